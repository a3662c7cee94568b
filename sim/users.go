package sim

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/sim/judge"
)

// serveAPI serves etcd's services of a node and those of data, without a port: clients call them by gRPC within the
// process.
func serveAPI(core *node.Core, o *node.Options) (*etcdapi.Server, error) {
	face := etcdapi.Options{
		Members: core.Members(1, true), Cluster: o.Cluster, Self: o.Self, MaxRequestBytes: o.MaxRequestBytes, MaxTxnOps: o.MaxTxnOps,
		RequestTimeout: o.RequestTimeout, ElectionTimeout: o.Election, Gatherer: prometheus.NewRegistry(),
	}
	if err := core.Face(&face); err != nil {
		return nil, fmt.Errorf("sim: etcd's services of node %s: %w", o.Self, err)
	}
	face.Register, face.Users.InsecureAdmin = core.RegisterData, true
	s := etcdapi.New(face)
	core.OnRevoked(func(*auth.View) { s.RightsTaken() })
	s.Start()
	return s, nil
}

// account is what a user's clients know of it.
type account struct {
	name string

	mu sync.Mutex
	// Guarded by mu. password is the present one, 0 for none. groups are those that the user may use, lost those that
	// it may not use any more since not long ago.
	password     int
	groups, lost []byte
}

func (a *account) now() (password int, groups, lost []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.password, a.groups, a.lost
}

// set tells the clients what the user may use. Nobody changes the slices afterwards.
func (a *account) set(password int, groups []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	lost := slices.DeleteFunc(slices.Concat(a.groups, a.lost), func(g byte) bool { return slices.Contains(groups, g) })
	a.password, a.groups, a.lost = password, groups, lost[:min(len(lost), 3)]
}

// Gateway is a node that takes a client's call.
type Gateway struct {
	Node keyspace.NodeID
	Conn grpc.ClientConnInterface
	// Ctx ends with the node: its clients receive nothing any more.
	Ctx context.Context
	// Leave says that the call is over.
	Leave func()
}

// Venue is where users work: simulated nodes, or processes.
type Venue interface {
	// Elapsed is the time since the run began.
	Elapsed() time.Duration
	Sleep(d time.Duration)
	// Places is how many machines there are. Enter begins a call at the node of one, and returns nil if that takes none.
	Places() int
	Enter(place int) *Gateway
}

// Elapsed is part of Venue.
func (c *cluster) Elapsed() time.Duration { return c.elapsed() }

// Sleep is part of Venue.
func (c *cluster) Sleep(d time.Duration) { c.sleep(d) }

// Places is part of Venue.
func (c *cluster) Places() int { return len(c.machines) }

// Enter is part of Venue.
func (c *cluster) Enter(place int) *Gateway {
	m := c.machines[place]
	r := m.current()
	if r == nil || !r.enter() {
		return nil
	}
	return &Gateway{m.id(), r.api.Conn(), r.ctx, r.leave}
}

// raiseAccess lets the cluster have users, until stop is closed.
func (c *cluster) raiseAccess(stop <-chan struct{}) {
	for ; !closed(stop); c.sleep(100 * time.Millisecond) {
		for _, m := range c.machines {
			r := m.current()
			if r == nil || !r.enter() {
				continue
			}
			ctx, cancel := context.WithTimeout(r.ctx, requestTimeout)
			err := r.core.Placement().RaiseVersion(ctx, keyspace.VersionAccess)
			cancel()
			r.leave()
			if err == nil {
				return
			}
		}
	}
}

// users is the workload of users: their clients, and the admin who changes what they may do.
type users struct {
	venue Venue
	// prepare lets the cluster have users, until stop is closed.
	prepare func(stop <-chan struct{})
	logf    func(format string, args ...any)
	// c has the seed and the form of the requests.
	c   *cluster
	h   *judge.History
	a   *judge.Access
	all []*account
}

func (u *users) moment() judge.Moment { return judge.Moment{Tick: u.h.Now(), At: u.venue.Elapsed()} }

// clientsOfUser is how many clients each user has.
const clientsOfUser = 2

// userClients is the id of the first client of a user, beyond all other ids but those of leases.
const userClients = 300

// load begins the work of all users until stop is closed. ready is closed when they are there, and checked.
func (u *users) load(stop <-chan struct{}, wg *sync.WaitGroup, ready chan struct{}) {
	for i := range u.c.cfg.Users {
		u.all = append(u.all, &account{name: fmt.Sprintf("u%d", i)})
	}
	adm := &admin{users: u, rng: rand.New(rand.NewPCG(u.c.cfg.Seed, 3000))}
	wg.Go(func() { adm.run(stop, ready) })
	for i, who := range u.all {
		for k := range clientsOfUser {
			cl := u.newClient(who, userClients+i*clientsOfUser+k)
			wg.Go(func() {
				<-ready
				cl.runUntil(stop)
			})
		}
		w := u.newClient(who, userClients+100+i)
		wg.Go(func() {
			<-ready
			w.watchUntil(stop)
		})
	}
	if !u.a.Remote {
		return
	}
	for place := range u.venue.Places() {
		wg.Go(func() {
			<-ready
			u.peekUntil(stop, place)
		})
	}
}

// peekUntil asks one machine for serializable reads of what each user has lost just now, until stop is closed. The
// other clients wait for their writes while a machine is cut off.
func (u *users) peekUntil(stop <-chan struct{}, place int) {
	var cls []*userClient
	for i, who := range u.all {
		cls = append(cls, u.newClient(who, userClients+150+place*len(u.all)+i))
	}
	for !closed(stop) {
		for _, c := range cls {
			if g := u.venue.Enter(place); g != nil {
				ctx, cancel := context.WithTimeout(g.Ctx, time.Second)
				c.peek(ctx, g)
				cancel()
				g.Leave()
			}
		}
		u.venue.Sleep(100 * time.Millisecond)
	}
}

// peek reads a group that the user has lost, or one that it has.
func (c *userClient) peek(ctx context.Context, g *Gateway) {
	password, groups, lost := c.who.now()
	if c.token == "" || password != c.password && c.rng.IntN(16) == 0 {
		c.login(ctx, g, password)
		return
	}
	all := append(slices.Clone(lost[:min(len(lost), 2)]), groups...)
	if len(all) == 0 {
		return
	}
	q := groupRead(string(all[c.rng.IntN(min(len(all), 3))]))
	q.Serializable = true
	c.ask(metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, c.token), g, q, true)
}

// at calls services of a node that is up, mostly the one at a place, in the name of who has the token. It does
// nothing if no node takes calls.
func (u *users) at(place int, token string, timeout time.Duration, call func(context.Context, *Gateway)) {
	for i := range u.venue.Places() {
		g := u.venue.Enter((place + i) % u.venue.Places())
		if g == nil {
			continue
		}
		ctx, cancel := context.WithTimeout(g.Ctx, timeout)
		if token != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, rpctypes.TokenFieldNameGRPC, token)
		}
		call(ctx, g)
		cancel()
		g.Leave()
		return
	}
}

// is says whether a client's error has the text of one of etcd's.
func is(err error, etcds ...error) bool {
	return err != nil && slices.ContainsFunc(etcds, func(e error) bool { return rpctypes.ErrorDesc(err) == rpctypes.ErrorDesc(e) })
}

// userClient is a client of a user. It belongs to one goroutine.
type userClient struct {
	*users
	*client
	who *account
	// token was got for a password; both are zero before. While nothing is checked a client without one uses noToken.
	token    string
	password int
}

func (u *users) newClient(who *account, id int) *userClient {
	return &userClient{users: u, client: newClient(u.c, u.h, id), who: who}
}

func (c *userClient) actor() judge.Actor { return judge.Actor{User: c.who.name, Password: c.password} }

// runUntil works in bursts until stop is closed.
func (c *userClient) runUntil(stop <-chan struct{}) {
	for !closed(stop) {
		for range 2 + c.rng.IntN(6) {
			c.users.at(c.place(), c.token, 2*requestTimeout, c.step)
			c.venue.Sleep(time.Duration(c.rng.Int64N(int64(burstThink))))
		}
		c.venue.Sleep(time.Duration(c.rng.Int64N(int64(burstEvery / 2))))
	}
}

// place is mostly the client's own.
func (c *userClient) place() int {
	if c.rng.IntN(3) == 0 {
		return c.rng.IntN(c.venue.Places())
	}
	return c.client.id
}

// step does one operation. A client without a token logs in first. It keeps an old token for a while.
func (c *userClient) step(ctx context.Context, g *Gateway) {
	password, groups, lost := c.who.now()
	if c.token == "" || password != c.password && c.rng.IntN(4) == 0 {
		c.login(ctx, g, password)
		return
	}
	req, serializable := c.draw(groups, lost)
	c.ask(ctx, g, req, serializable)
}

// ask sends a request and records the outcome.
func (c *userClient) ask(ctx context.Context, g *Gateway, req proto.Message, serializable bool) {
	o := &judge.Op{Client: c.client.id, Node: g.Node, Request: req, Call: c.h().Now(), Began: c.venue.Elapsed()}
	if !serializable {
		o = c.h().Begin(c.client.id, g.Node, req, c.venue.Elapsed())
	}
	resp, err := call(ctx, pb.NewKVClient(g.Conn), req)
	if serializable {
		o.Ended, o.Return, o.Outcome, o.Response, o.Err = c.venue.Elapsed(), c.h().Now(), judge.Answered, resp, err
		if err != nil {
			o.Outcome = judge.Refused
		}
	} else {
		c.h().End(o, resp, judge.Fated(err), g.Ctx.Err() != nil, c.venue.Elapsed())
	}
	if g.Ctx.Err() == nil || !serializable {
		c.a.AddOp(judge.UserOp{Op: o, Actor: c.actor()})
	}
	// A JWT is void with the next change of rights, and says nothing of a password.
	if is(err, rpctypes.ErrGRPCInvalidAuthToken) && c.rng.IntN(3) == 0 || is(err, rpctypes.ErrGRPCAuthOldRevision) {
		c.token = ""
	}
}

func (c *userClient) h() *judge.History { return c.users.h }

// call sends a request to a KV service.
func call(ctx context.Context, kv pb.KVClient, req proto.Message) (proto.Message, error) {
	switch q := req.(type) {
	case *pb.RangeRequest:
		return kv.Range(ctx, q)
	case *pb.PutRequest:
		return kv.Put(ctx, q)
	case *pb.DeleteRangeRequest:
		return kv.DeleteRange(ctx, q)
	case *pb.TxnRequest:
		return kv.Txn(ctx, q)
	}
	panic(fmt.Sprintf("sim: a request %T of a user", req))
}

// login gets a token for a password. While nothing is checked there is none, and an old one does.
func (c *userClient) login(ctx context.Context, g *Gateway, password int) {
	l := judge.Login{Actor: judge.Actor{User: c.who.name, Password: password}, Node: g.Node, Begun: c.users.moment()}
	resp, err := pb.NewAuthClient(g.Conn).Authenticate(metadata.NewOutgoingContext(ctx, nil), &pb.AuthenticateRequest{Name: c.who.name, Password: word(password)})
	if g.Ctx.Err() != nil {
		return
	}
	l.Over, l.OK, l.Refused = c.users.moment(), err == nil, is(err, rpctypes.ErrGRPCAuthFailed)
	c.a.AddLogin(l)
	switch {
	case l.OK:
		c.token, c.password = resp.GetToken(), password
	case is(err, rpctypes.ErrGRPCAuthNotEnabled):
		c.token, c.password = noToken, 0
	}
}

// noToken is none that any node has made.
const noToken = "none"

func word(password int) string { return fmt.Sprintf("password %d", password) }

// draw makes a request: mostly one that the user may send, and sometimes one that it might send a moment ago.
func (c *userClient) draw(groups, lost []byte) (req proto.Message, serializable bool) {
	group := func() string {
		n := c.rng.IntN(16)
		switch {
		case n < 10 && len(groups) > 0:
			return string(groups[c.rng.IntN(len(groups))])
		case n < 15 && len(lost) > 0:
			return string(lost[c.rng.IntN(len(lost))])
		}
		return c.group()
	}
	key := func() string { return fmt.Sprintf("%s%d", group(), c.rng.IntN(judge.KeysPerGroup)) }
	switch n := c.rng.IntN(100); {
	case n < 30:
		return &pb.PutRequest{Key: []byte(key()), Value: c.value(), PrevKv: c.rng.IntN(4) == 0}, false
	case n < 38:
		return &pb.DeleteRangeRequest{Key: []byte(key()), PrevKv: c.rng.IntN(4) == 0}, false
	case n < 52:
		a, b := key(), key()
		t := &pb.TxnRequest{Success: []*pb.RequestOp{putOp(a, c.value()), rangeOp(groupRead(b[:1]))}}
		if a != b {
			t.Success = append(t.Success, putOp(b, c.value()))
		}
		if c.rng.IntN(3) == 0 {
			t.Compare = []*pb.Compare{c.compare(a)}
		}
		return t, false
	case n < 65:
		return groupRead(group()), false
	default:
		q := groupRead(group())
		q.Serializable = true
		return q, true
	}
}

// groupRead reads a group. Permissions are for the same span.
func groupRead(group string) *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte(group), RangeEnd: []byte(group + "9")}
}

// watchUntil watches a group after the other until stop is closed.
func (c *userClient) watchUntil(stop <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		<-stop
		cancel()
	})
	for !closed(stop) {
		place := c.place() % c.venue.Places()
		if g := c.venue.Enter(place); g != nil {
			g.Leave() // a watch is no call that ends
			c.watchAt(ctx, place, g)
		}
		c.venue.Sleep(time.Duration(10+c.rng.IntN(100)) * time.Millisecond)
	}
}

// watchAt watches one group at a node, for a while.
func (c *userClient) watchAt(ctx context.Context, place int, g *Gateway) {
	password, groups, _ := c.who.now()
	if password == 0 || len(groups) == 0 {
		return
	}
	if c.token == "" || c.password != password {
		c.users.at(place, "", requestTimeout, func(ctx context.Context, g *Gateway) { c.login(ctx, g, password) })
		if c.token == "" {
			return
		}
	}
	group := groups[c.rng.IntN(len(groups))]
	wctx, cancel := context.WithTimeout(metadata.NewOutgoingContext(g.Ctx, metadata.Pairs(rpctypes.TokenFieldNameGRPC, c.token)), 8*time.Second)
	defer cancel()
	end := context.AfterFunc(ctx, cancel)
	defer end()
	s, err := pb.NewWatchClient(g.Conn).Watch(wctx)
	if err != nil {
		return
	}
	span := groupRead(string(group))
	err = s.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: span.GetKey(), RangeEnd: span.GetRangeEnd()}}})
	for err == nil {
		var resp *pb.WatchResponse
		if resp, err = s.Recv(); err != nil || g.Ctx.Err() != nil {
			break
		}
		if n := len(resp.GetEvents()); n > 0 {
			c.a.AddTold(judge.Told{
				Actor: c.actor(), Node: g.Node, Group: group, Revision: resp.GetEvents()[n-1].GetKv().GetModRevision(), At: c.users.moment(),
			})
		}
		if resp.GetCanceled() {
			if r := resp.GetCancelReason(); r == rpctypes.ErrGRPCInvalidAuthToken.Error() || r == rpctypes.ErrGRPCAuthOldRevision.Error() {
				c.token = ""
			}
			return
		}
	}
	if is(err, rpctypes.ErrGRPCInvalidAuthToken, rpctypes.ErrGRPCAuthOldRevision) {
		c.token = ""
	}
}

// admin is the root user, who changes what the others may do: one change after the other.
type admin struct {
	*users
	rng *rand.Rand
	// token is root's.
	token string
	// passwords and roles count those that were used. on says that requests are checked, as the admin has asked last.
	passwords, roles int
	on               bool
	off              *judge.Fact
	identity         map[*account]*judge.Identity
	held             map[*account][]*grant
	// ended are facts that do not hold any more; when nobody goes by them is known at the next acknowledgement of a
	// change that takes something away.
	ended []*judge.Fact
	stop  <-chan struct{}
}

// grant is a role of one user.
type grant struct {
	role   string
	rights []*judge.Right
	groups []byte
}

// rootPassword is root's for the whole run.
const rootPassword = 1

// run sets the users up, closes ready, and goes on until stop is closed.
func (a *admin) run(stop <-chan struct{}, ready chan<- struct{}) {
	a.stop, a.passwords = stop, rootPassword
	a.identity, a.held = map[*account]*judge.Identity{}, map[*account][]*grant{}
	a.off = &judge.Fact{MustNot: judge.Never, MayNot: judge.Never}
	a.a.Off = append(a.a.Off, a.off)
	a.setUp()
	close(ready)
	for !closed(stop) {
		a.step()
		a.venue.Sleep(time.Duration(50+a.rng.IntN(500)) * time.Millisecond)
	}
}

func (a *admin) setUp() {
	a.prepare(a.stop)
	a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: word(rootPassword)})
		return err
	}, rpctypes.ErrGRPCUserAlreadyExist)
	a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: "root", Role: "root"})
		return err
	})
	a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserAdd(ctx, &pb.AuthUserAddRequest{Name: spare, Password: "any"})
		return err
	}, rpctypes.ErrGRPCUserAlreadyExist)
	for _, who := range a.all {
		a.add(who)
		a.grant(who)
	}
	a.enable()
}

// spare is a user whose password is changed for nothing but the acknowledgement.
const spare = "spare"

// step makes one random change.
func (a *admin) step() {
	who := a.all[a.rng.IntN(len(a.all))]
	held := a.held[who]
	switch n := a.rng.IntN(100); {
	case n < 5:
		if a.on {
			a.disable()
		} else {
			a.enable()
		}
	case !a.on && n < 40:
		a.enable()
	case n < 15:
		a.remove(who)
		a.add(who)
		a.grant(who)
	case n < 25:
		a.changePassword(who)
	case len(held) < 2 || len(held) < 4 && n < 60:
		a.grant(who)
	default:
		a.revoke(who, a.rng.IntN(len(held)))
	}
}

// change makes a change. It repeats the call until the change is made, or until stop is closed; then acked is never.
// The errors already tell a repeated call that the change is made. It ends the facts of ends.
func (a *admin) change(ends []*judge.Fact, call func(context.Context, pb.AuthClient) error, already ...error) (begun, acked judge.Moment) {
	begun = a.moment()
	for _, f := range ends {
		f.MustNot = begun
	}
	a.ended = append(a.ended, ends...)
	for unknown := false; !closed(a.stop); a.venue.Sleep(50 * time.Millisecond) {
		err := error(kverror.NoLeader)
		a.at(a.rng.IntN(a.venue.Places()), a.token, requestTimeout, func(ctx context.Context, g *Gateway) {
			s := pb.NewAuthClient(g.Conn)
			if err = call(ctx, s); is(err, rpctypes.ErrGRPCInvalidAuthToken, rpctypes.ErrGRPCUserEmpty, rpctypes.ErrGRPCAuthOldRevision) {
				resp, lerr := s.Authenticate(metadata.NewOutgoingContext(ctx, nil), &pb.AuthenticateRequest{Name: "root", Password: word(rootPassword)})
				if lerr == nil {
					a.token = resp.GetToken()
				}
			}
			if g.Ctx.Err() != nil {
				err = context.Canceled // the client has not received it
			}
			a.logf("admin: change begun at %d by node %s: %v", begun.Tick, g.Node, err)
		})
		switch {
		case err == nil:
			acked = a.moment()
			if len(ends) > 0 {
				a.taken(acked)
			}
			return begun, acked
		case unknown && is(err, already...):
			if len(ends) > 0 {
				a.flush()
			}
			return begun, a.moment()
		}
		unknown = unknown || !judge.Certain(err)
	}
	return begun, judge.Never
}

// taken notes that nobody goes by what has ended before.
func (a *admin) taken(now judge.Moment) {
	for _, f := range a.ended {
		f.MayNot = now
	}
	a.ended = nil
}

// flush makes a change that takes something away, for its acknowledgement: the one before was made, but the answer
// is lost.
func (a *admin) flush() {
	a.change([]*judge.Fact{{}}, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserChangePassword(ctx, &pb.AuthUserChangePasswordRequest{Name: spare, Password: "any"})
		return err
	})
}

func (a *admin) enable() {
	a.change([]*judge.Fact{a.off}, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.AuthEnable(ctx, &pb.AuthEnableRequest{})
		return err
	})
	a.on = true
}

func (a *admin) disable() {
	begun, acked := a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.AuthDisable(ctx, &pb.AuthDisableRequest{})
		return err
	})
	f := judge.NewFact(begun, acked)
	a.off, a.on = &f, false
	a.a.Off = append(a.a.Off, a.off)
}

// identify notes that a user has a new password.
func (a *admin) identify(who *account, begun, acked judge.Moment) {
	id := &judge.Identity{Fact: judge.NewFact(begun, acked), User: who.name, Password: a.passwords}
	a.identity[who] = id
	a.a.Identities = append(a.a.Identities, id)
	a.tell(who)
}

func (a *admin) add(who *account) {
	a.passwords++
	begun, acked := a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserAdd(ctx, &pb.AuthUserAddRequest{Name: who.name, Password: word(a.passwords)})
		return err
	}, rpctypes.ErrGRPCUserAlreadyExist)
	a.identify(who, begun, acked)
}

func (a *admin) changePassword(who *account) {
	a.passwords++
	begun, acked := a.change([]*judge.Fact{&a.identity[who].Fact}, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserChangePassword(ctx, &pb.AuthUserChangePasswordRequest{Name: who.name, Password: word(a.passwords)})
		return err
	})
	a.identify(who, begun, acked)
}

// remove deletes a user with all roles. Those stay behind, and nobody has them again.
func (a *admin) remove(who *account) {
	ends := []*judge.Fact{&a.identity[who].Fact}
	for _, g := range a.held[who] {
		ends = append(ends, g.facts()...)
	}
	a.change(ends, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.UserDelete(ctx, &pb.AuthUserDeleteRequest{Name: who.name})
		return err
	}, rpctypes.ErrGRPCUserNotFound)
	a.held[who] = nil
	who.set(0, nil)
}

func (g *grant) facts() (fs []*judge.Fact) {
	for _, r := range g.rights {
		fs = append(fs, &r.Fact)
	}
	return fs
}

func (a *admin) groups(who *account) (all []byte) {
	for _, g := range a.held[who] {
		all = append(all, g.groups...)
	}
	return all
}

// grant gives a user a new role for two groups of keys: the role before its permissions, or after.
func (a *admin) grant(who *account) {
	a.roles++
	g := &grant{role: fmt.Sprintf("r%d", a.roles)}
	permission := authpb.READWRITE
	if a.rng.IntN(4) == 0 {
		permission = authpb.READ
	}
	for _, i := range a.rng.Perm(len(judge.Groups))[:2] {
		g.groups = append(g.groups, judge.Groups[i])
	}
	a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
		_, err = s.RoleAdd(ctx, &pb.AuthRoleAddRequest{Name: g.role})
		return err
	}, rpctypes.ErrGRPCRoleAlreadyExist)
	give := func() (begun, acked judge.Moment) {
		return a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
			_, err = s.UserGrantRole(ctx, &pb.AuthUserGrantRoleRequest{User: who.name, Role: g.role})
			return err
		})
	}
	holds := func(group byte, begun, acked judge.Moment) {
		r := &judge.Right{Fact: judge.NewFact(begun, acked), User: who.name, Group: group, Write: permission == authpb.READWRITE}
		g.rights = append(g.rights, r)
		a.a.Rights.Rights = append(a.a.Rights.Rights, r)
	}
	last := a.rng.IntN(2) == 0
	if !last {
		give()
	}
	for _, group := range g.groups {
		q := groupRead(string(group))
		begun, acked := a.change(nil, func(ctx context.Context, s pb.AuthClient) (err error) {
			_, err = s.RoleGrantPermission(ctx, &pb.AuthRoleGrantPermissionRequest{Name: g.role, Perm: &authpb.Permission{PermType: permission, Key: q.GetKey(), RangeEnd: q.GetRangeEnd()}})
			return err
		})
		if !last {
			holds(group, begun, acked)
		}
	}
	if last {
		begun, acked := give()
		for _, group := range g.groups {
			holds(group, begun, acked)
		}
	}
	a.held[who] = append(a.held[who], g)
	a.tell(who)
}

// tell tells a user's clients what it may use.
func (a *admin) tell(who *account) { who.set(a.identity[who].Password, a.groups(who)) }

// revoke takes a role from a user: the role itself, all of it, or one permission after the other.
func (a *admin) revoke(who *account, at int) {
	g := a.held[who][at]
	switch a.rng.IntN(3) {
	case 0:
		a.change(g.facts(), func(ctx context.Context, s pb.AuthClient) (err error) {
			_, err = s.UserRevokeRole(ctx, &pb.AuthUserRevokeRoleRequest{Name: who.name, Role: g.role})
			return err
		}, rpctypes.ErrGRPCRoleNotGranted)
	case 1:
		a.change(g.facts(), func(ctx context.Context, s pb.AuthClient) (err error) {
			_, err = s.RoleDelete(ctx, &pb.AuthRoleDeleteRequest{Role: g.role})
			return err
		}, rpctypes.ErrGRPCRoleNotFound)
	default:
		for i, r := range g.rights {
			q := groupRead(string(g.groups[i]))
			a.change([]*judge.Fact{&r.Fact}, func(ctx context.Context, s pb.AuthClient) (err error) {
				_, err = s.RoleRevokePermission(ctx, &pb.AuthRoleRevokePermissionRequest{Role: g.role, Key: q.GetKey(), RangeEnd: q.GetRangeEnd()})
				return err
			}, rpctypes.ErrGRPCPermissionNotGranted)
		}
	}
	a.held[who] = slices.Delete(a.held[who], at, at+1)
	a.tell(who)
}
