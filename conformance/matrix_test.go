package conformance

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/authpb"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/storage/mvcc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/rights"
)

const (
	passwordOfAll = "pw"
	// caseTimeout bounds a call: nothing waits for others.
	caseTimeout = 30 * time.Second
	// casesAtATime is how many calls that change nothing are made at a time.
	casesAtATime = 24
)

// shape is what a user may do. The user has a role of the same name with the permissions, and the roles.
type shape struct {
	name        string
	permissions []rights.Permission
	roles       []string
}

// shapes are all users. Those of requests lie in, on and beyond the borders of their permissions.
func shapes() (all []shape) {
	letters := map[rights.Type]string{rights.Read: "R", rights.Write: "W", rights.ReadWrite: "RW"}
	over := func(t rights.Type, spans ...[2]string) (all []rights.Permission) {
		for _, s := range spans {
			all = append(all, rights.Permission{Type: t, Key: []byte(s[0]), RangeEnd: []byte(s[1])})
		}
		return all
	}
	for _, s := range []struct {
		name  string
		spans [][2]string
	}{
		{"point", [][2]string{{"b", ""}}},
		{"span", [][2]string{{"b", "d"}}},
		{"open", [][2]string{{"b", fromKey}}},
		{"adjacent", [][2]string{{"b", "c"}, {"c", "d"}}},
	} {
		for _, t := range []rights.Type{rights.Read, rights.Write, rights.ReadWrite} {
			all = append(all, shape{name: s.name + " " + letters[t], permissions: over(t, s.spans...)})
		}
	}
	const rw = rights.ReadWrite
	return append(all,
		shape{name: "hole", permissions: over(rw, [2]string{"b", "bb"}, [2]string{"c", "d"})},
		shape{name: "overlap", permissions: over(rw, [2]string{"a", "c"}, [2]string{"b", "d"})},
		shape{name: "all", permissions: over(rw, [2]string{"\x00", fromKey})},
		shape{name: "two types", permissions: append(over(rights.Read, [2]string{"b", "d"}), over(rights.Write, [2]string{"b", ""}, [2]string{"c", fromKey})...)},
		shape{name: "empty"},
		shape{name: "two roles", roles: []string{"point R", "adjacent W"}},
		shape{name: "no role", roles: []string{}},
		shape{name: "rooted", roles: []string{rights.Root}},
		shape{name: "deleted", permissions: over(rw, [2]string{"b", "d"})},
		shape{name: "new password", permissions: over(rw, [2]string{"b", "d"})},
		shape{name: rights.Root, roles: []string{rights.Root}},
	)
}

// caller is somebody who makes the calls.
type caller struct {
	name string
	user string
	role string
	// token returns the token for a store, false for none.
	token func(store int) (string, bool)
	// known is who that may be by our own rules, nil where the token is none. It only says which calls may change
	// something.
	known *auth.Caller
}

// matrix is a pair of stores with users, and the calls that are made.
type matrix struct {
	*pair
	t       *testing.T
	jwt     bool
	callers []*caller
	tokens  map[string][2]string
	tokenMu sync.Mutex
	rev     int64

	mu     sync.Mutex
	cases  int
	denied int
	found  map[string]*found // guarded by mu
	used   map[string]int    // guarded by mu; how often a row of differences was needed
	unique int
}

// found are the cases with one difference.
type found struct {
	n     int
	first string
}

// matrixCase is one call.
type matrixCase struct {
	method  protoreflect.MethodDescriptor
	face    face
	caller  *caller
	request proto.Message
	gateway int
}

func (c *matrixCase) String() string {
	return fmt.Sprintf("%s as %q: %s{%s}", c.face, c.caller.name, c.method.Name(), short(c.request))
}

// difference is one from etcd, with its reason. docs/CONFORMANCE.md says the same.
type difference struct {
	name  string
	holds func(c *matrixCase, etcd, skein answer) bool
}

// differences are the only ones.
var differences = []difference{
	{"answers about the member itself, whose cluster is another one, and tokens", func(c *matrixCase, etcd, skein answer) bool {
		return etcd.response != nil && skein.response != nil && c.calls("Status", "Hash", "HashKV", "MemberList", "Authenticate", "Snapshot")
	}},
	{"MoveLeader is for the leader, and the case is for any node", func(c *matrixCase, etcd, skein answer) bool {
		return c.calls("MoveLeader") && etcd.says("bad leader transferee") && skein.says("not leader")
	}},
	{"AuthStatus reads no token", func(c *matrixCase, etcd, skein answer) bool {
		return c.calls("AuthStatus") && etcd.says("invalid auth token") && skein.response != nil
	}},
	{"MemberAdd looks at rights before URLs", func(c *matrixCase, etcd, skein answer) bool {
		return c.calls("MemberAdd") && etcd.says("given member URLs are invalid") && (skein.says(refusals...) || skein.says("user name not found"))
	}},
	{"Observe says why it refuses, where etcd ends the stream without an error", func(c *matrixCase, etcd, skein answer) bool {
		return c.calls("Observe") && etcd.says("EOF") && skein.says(refusals...)
	}},
	{"locks and elections look at the user before the request and its lease", func(c *matrixCase, etcd, skein answer) bool {
		return c.calls("Lock", "Unlock", "Campaign", "Proclaim", "Resign") && skein.says(refusals...) &&
			etcd.says(beforeUser...)
	}},
	{"logins are held back after several failures", func(c *matrixCase, etcd, skein answer) bool {
		return c.calls("Authenticate") && (etcd.response != nil || etcd.says("authentication failed")) && skein.says("too many requests")
	}},
	{"a span that ends before it begins: etcd's verdict depends on the shape of a tree", func(c *matrixCase, etcd, skein answer) bool {
		ends := proto.Clone(c.request)
		straight(ends.ProtoReflect())
		return !proto.Equal(ends, c.request) && etcd.says("permission denied") && skein.response != nil
	}},
	{"a JWT of a later auth revision: etcd lets it write and not read", func(c *matrixCase, etcd, _ answer) bool {
		return c.caller.name == "future revision" && (etcd.says("revision of auth store is old") || c.calls("Observe") && etcd.says("EOF"))
	}},
}

func (c *matrixCase) calls(methods ...protoreflect.Name) bool {
	return slices.Contains(methods, c.method.Name())
}

func newMatrix(t *testing.T, jwt bool) *matrix {
	t.Helper()
	p, _, err := startPair(t, 1, tokenOption(t, jwt))
	if err != nil {
		t.Fatal(err)
	}
	m := &matrix{pair: p, t: t, jwt: jwt, tokens: map[string][2]string{}, found: map[string]*found{}, used: map[string]int{}}
	m.asRoot("RoleAdd", &pb.AuthRoleAddRequest{Name: rights.Root})
	m.makeUsers(tokenOption(t, true))
	m.makeContent()
	return m
}

func (m *matrix) must(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatal(err)
	}
}

// asRoot makes a call at both as root, which must succeed.
func (m *matrix) asRoot(method protoreflect.Name, req proto.Message) {
	m.t.Helper()
	m.must(m.both(m.t.Context(), m.rootTokens(), true, method, req))
}

// tries makes a call at both as root.
func (m *matrix) tries(method protoreflect.Name, req proto.Message) {
	m.t.Helper()
	m.must(m.both(m.t.Context(), m.rootTokens(), false, method, req))
}

func (m *matrix) rootTokens() []string {
	if !m.etcd.etcd.AuthStore().IsAuthEnabled() {
		return nil
	}
	t := m.tokensOf(rights.Root)
	return t[:]
}

// tokensOf returns a user's tokens of now.
func (m *matrix) tokensOf(user string) [2]string {
	if m.jwt {
		token := signed(secretOfAll, "HS256", user, m.etcd.etcd.AuthStore().Revision(), time.Now().Add(time.Hour))
		return [2]string{token, token}
	}
	m.tokenMu.Lock()
	defer m.tokenMu.Unlock()
	return m.tokens[user]
}

// makeUsers makes the users of all shapes, logs them in, and makes the callers.
func (m *matrix) makeUsers(ofSecret string) {
	m.t.Helper()
	state := rights.New()
	index := uint64(0)
	apply := func(c rights.Change) {
		index++
		if _, err := state.Apply(index, rights.Root, &c); err != nil {
			m.t.Fatal(err)
		}
	}
	apply(rights.Change{Kind: rights.AddRole, Role: rights.Root})
	all := shapes()
	for _, s := range all {
		if s.roles == nil {
			m.asRoot("RoleAdd", &pb.AuthRoleAddRequest{Name: s.name})
			apply(rights.Change{Kind: rights.AddRole, Role: s.name})
		}
		for _, p := range s.permissions {
			m.asRoot("RoleGrantPermission", &pb.AuthRoleGrantPermissionRequest{
				Name: s.name, Perm: &authpb.Permission{PermType: authpb.Permission_Type(p.Type), Key: p.Key, RangeEnd: p.RangeEnd},
			})
			apply(rights.Change{Kind: rights.GrantPermission, Role: s.name, Permission: p})
		}
	}
	for _, s := range all {
		m.asRoot("UserAdd", &pb.AuthUserAddRequest{Name: s.name, Password: passwordOfAll})
		apply(rights.Change{Kind: rights.AddUser, User: s.name, Hash: []byte("x")})
		if s.roles == nil {
			s.roles = []string{s.name}
		}
		for _, role := range s.roles {
			m.asRoot("UserGrantRole", &pb.AuthUserGrantRoleRequest{User: s.name, Role: role})
			apply(rights.Change{Kind: rights.GrantRole, User: s.name, Role: role})
		}
	}
	m.asRoot("AuthEnable", &pb.AuthEnableRequest{})
	apply(rights.Change{Kind: rights.Enable})
	m.logIn()
	m.asRoot("UserDelete", &pb.AuthUserDeleteRequest{Name: "deleted"})
	apply(rights.Change{Kind: rights.DeleteUser, User: "deleted"})
	m.asRoot("UserChangePassword", &pb.AuthUserChangePasswordRequest{Name: "new password", Password: "another"})
	m.resetVictim()

	tokens, err := openTokens(ofSecret)
	m.must(err)
	gate := auth.NewGate(clock.System(), tokens)
	gate.Update(&auth.View{Rights: state, Index: index})
	for _, s := range all {
		c := &caller{name: s.name, user: s.name, role: cmp.Or(strings.Join(s.roles[:min(1, len(s.roles))], ""), s.name)}
		c.token = func(store int) (string, bool) { return m.tokensOf(s.name)[store], true }
		if s.name != "deleted" {
			token := signed(secretOfAll, "HS256", s.name, state.Revision, time.Now().Add(time.Hour))
			c.known, err = gate.Identify(m.t.Context(), auth.Claim{Token: token, HasToken: true})
			m.must(err)
		}
		m.callers = append(m.callers, c)
	}
	nobody := func(name string, token func(store int) (string, bool)) {
		m.callers = append(m.callers, &caller{name: name, user: "nobody", role: "nobody", token: token})
	}
	fixed := func(name, token string) { nobody(name, func(int) (string, bool) { return token, true }) }
	nobody("nobody", func(int) (string, bool) { return "", false })
	fixed("empty token", "")
	fixed("garbage", "garbage.17")
	fixed("two dots", "a.b.c")
	if !m.jwt {
		nobody("token of the other store", func(store int) (string, bool) { return m.tokensOf("span RW")[1-store], true })
		return
	}
	made := func(name, secret, method, user string, ahead int, lasts time.Duration) {
		nobody(name, func(int) (string, bool) {
			revision := m.etcd.etcd.AuthStore().Revision()
			if ahead == noRevision {
				revision = 0
			} else {
				revision += uint64(ahead)
			}
			return signed(secret, method, user, revision, time.Now().Add(lasts)), true
		})
	}
	made("expired", secretOfAll, "HS256", "span RW", 0, -time.Hour)
	made("expired root", secretOfAll, "HS256", "root", 0, -time.Hour)
	made("old revision", secretOfAll, "HS256", "span RW", -1, time.Hour)
	made("old revision of root", secretOfAll, "HS256", "root", -1, time.Hour)
	m.callers[len(m.callers)-1].known = m.callerNamed(rights.Root).known
	made("future revision", secretOfAll, "HS256", "span RW", 1, time.Hour)
	made("no revision", secretOfAll, "HS256", "span RW", noRevision, time.Hour)
	made("no user", secretOfAll, "HS256", "", 0, time.Hour)
	for _, name := range []string{"old revision", "future revision", "no revision", "no user", "deleted"} {
		m.callerNamed(name).known = m.callerNamed("span RW").known
	}
	made("other secret", "another secret", "HS256", "span RW", 0, time.Hour)
	made("other method", secretOfAll, "HS512", "span RW", 0, time.Hour)
}

const noRevision = -1000

func (m *matrix) callerNamed(name string) *caller {
	return m.callers[slices.IndexFunc(m.callers, func(c *caller) bool { return c.name == name })]
}

// logIn logs all users in.
func (m *matrix) logIn() {
	m.t.Helper()
	if m.jwt {
		return
	}
	for _, s := range shapes() {
		if _, had := m.tokens[s.name]; had && (s.name == "deleted" || s.name == "new password") {
			continue
		}
		tokens, err := m.login(m.t.Context(), s.name, passwordOfAll)
		m.must(err)
		m.tokenMu.Lock()
		m.tokens[s.name] = tokens
		m.tokenMu.Unlock()
	}
}

// resetVictim makes anew what calls about users change.
func (m *matrix) resetVictim() {
	m.t.Helper()
	m.tries("UserDelete", &pb.AuthUserDeleteRequest{Name: "fresh"})
	m.tries("RoleDelete", &pb.AuthRoleDeleteRequest{Role: "fresh"})
	m.tries("UserDelete", &pb.AuthUserDeleteRequest{Name: "victim"})
	m.tries("RoleDelete", &pb.AuthRoleDeleteRequest{Role: "victim"})
	m.asRoot("RoleAdd", &pb.AuthRoleAddRequest{Name: "victim"})
	m.asRoot("RoleGrantPermission", &pb.AuthRoleGrantPermissionRequest{Name: "victim", Perm: &authpb.Permission{PermType: authpb.READWRITE, Key: []byte("b"), RangeEnd: []byte("d")}})
	m.asRoot("UserAdd", &pb.AuthUserAddRequest{Name: "victim", Password: passwordOfAll})
	m.asRoot("UserGrantRole", &pb.AuthUserGrantRoleRequest{User: "victim", Role: "victim"})
}

// makeContent makes the keys and leases.
func (m *matrix) makeContent() {
	m.t.Helper()
	m.asRoot("Put", put("a", "1"))
	m.asRoot("Compact", compact(2))
	for i, ttl := range []int64{leaseOfB: 3600, leaseOfMany: 36_000, leaseOfNone: 360_000, leaseOfC: 3_600_000, leaseOfA: 36_000_000} {
		if ttl > 0 {
			m.asRoot("LeaseGrant", grant(int64(i), ttl))
		}
	}
	m.restoreKeys()
	m.rev = m.etcd.etcd.KV().Rev()
}

// intact says whether there are the keys with the leases of baseKeys, and no others.
func (m *matrix) intact() bool {
	r, err := m.etcd.etcd.KV().Range(m.t.Context(), []byte{0}, []byte{}, mvcc.RangeOptions{})
	m.must(err)
	for i := range r.KVs {
		if id, ok := baseKeys[string(r.KVs[i].Key)]; !ok || id != r.KVs[i].Lease {
			return false
		}
	}
	return len(r.KVs) == len(baseKeys)
}

// restoreKeys makes all keys anew.
func (m *matrix) restoreKeys() {
	m.t.Helper()
	ops := []proto.Message{del("\x00", fromKey)}
	for _, k := range slices.Sorted(maps.Keys(baseKeys)) {
		ops = append(ops, leased(baseKeys[k], put(k, "1")))
	}
	m.asRoot("Txn", then(ops...))
}

// mayChange says whether a call may change something: such calls are made alone.
func (m *matrix) mayChange(c *matrixCase) bool {
	who := c.caller.known
	switch c.method.Name() {
	case "Authenticate":
		return true // those that fail count
	case "Range", "RangeStream", "Watch", "LeaseKeepAlive", "LeaseTimeToLive", "LeaseLeases", "MemberList", "Status", "Hash", "HashKV", "Snapshot",
		"AuthStatus", "UserGet", "RoleGet", "UserList", "RoleList", "Leader", "Observe":
		return false
	case "Put", "DeleteRange", "Txn":
		return who != nil && auth.Check(who, c.request) == nil
	}
	return who != nil
}

// shareFlag makes a run short. A prime that is not the number of callers has each request made by others in each turn.
var shareFlag = flag.Int("matrix", 29, "of how many cases of the access matrix one is run; 1 runs all")

// listed returns the calls of a turn.
func (m *matrix) listed(turn int) (all []*matrixCase) {
	n := turn
	for _, method := range allMethods() {
		for _, by := range facesOf(method) {
			for _, r := range variants(method.Input(), by != overGRPC, 0) {
				for _, c := range m.callers {
					if n++; n%*shareFlag != 0 {
						continue
					}
					if request := m.filled(method, c, r); request != nil {
						all = append(all, &matrixCase{method: method, face: by, caller: c, request: request, gateway: len(all) % skeinNodes})
					}
				}
			}
		}
	}
	return all
}

// filled is a request with names and numbers in the place of those that stand for them. It is nil where the call is
// not made.
func (m *matrix) filled(method protoreflect.MethodDescriptor, c *caller, r proto.Message) proto.Message {
	switch r := r.(type) {
	case *pb.WatchRequest:
		if r.GetCreateRequest() == nil {
			return nil // nobody answers
		}
	case *pb.MemberAddRequest:
		if c.known != nil && c.known.Root() == nil && r.GetPeerURLs()[0] != "none" {
			return nil // both would have a member more, and etcd with one member no quorum
		}
	case *pb.AuthUserAddRequest:
		if c.known != nil && c.known.Root() == nil && r.GetName() == self {
			return nil // another case has a user that there is
		}
	}
	r = proto.Clone(r)
	m.fill(method, c, r.ProtoReflect())
	return r
}

func (m *matrix) fill(method protoreflect.MethodDescriptor, c *caller, r protoreflect.Message) {
	r.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsList() && fd.Message() != nil:
			for i := range v.List().Len() {
				m.fill(method, c, v.List().Get(i).Message())
			}
		case fd.IsList():
		case fd.Message() != nil:
			m.fill(method, c, v.Message())
		case fd.Kind() == protoreflect.Int64Kind && v.Int() == atBase:
			r.Set(fd, protoreflect.ValueOfInt64(m.rev))
		case fd.Kind() == protoreflect.StringKind && v.String() == self:
			r.Set(fd, protoreflect.ValueOfString(c.user))
		case fd.Kind() == protoreflect.StringKind && v.String() == ownRole:
			r.Set(fd, protoreflect.ValueOfString(c.role))
		case fd.Kind() == protoreflect.StringKind && v.String() == "unknown" && method.Name() == "Authenticate":
			// Skein holds logins back that fail too often.
			m.unique++
			r.Set(fd, protoreflect.ValueOfString(fmt.Sprint("unknown", m.unique)))
		}
		return true
	})
}

// run makes a call at both and compares.
func (m *matrix) run(c *matrixCase) (got [2]answer, same bool) {
	_ = each(2, func(i int) error {
		ctx, cancel := context.WithTimeout(m.t.Context(), caseTimeout)
		defer cancel()
		if token, ok := c.caller.token(i); ok {
			ctx = withBearer(ctx, token)
		}
		conn := m.etcd.conns[0]
		if i == 1 {
			conn = m.skein.conns[c.gateway]
		}
		got[i] = invoke(ctx, conn, c.method, c.face, c.request)
		if c.method.Parent().Name() == "Auth" {
			got[i] = anyRevision(got[i])
		}
		if ctx.Err() != nil {
			got[i] = answer{code: codes.Internal, text: "conformance: " + m.stores()[i].name + " does not answer"}
		}
		return nil
	})
	return got, m.judge(c, got[0], got[1])
}

// sameRevision notes that a call changed only one of the stores, and has both come to the same revision again.
func (m *matrix) sameRevision(after string) {
	m.t.Helper()
	for first := true; ; first = false {
		var at [2]int64
		token := m.tokensOf(rights.Root)
		m.must(each(2, func(i int) error {
			r, err := pb.NewKVClient(m.stores()[i].conns[0]).Range(withBearer(m.t.Context(), token[i]), get1("none"))
			at[i] = r.GetHeader().GetRevision()
			return err
		}))
		if at[0] == at[1] {
			return
		}
		if first {
			m.t.Errorf("after %s: etcd is at revision %d, Skein at %d", after, at[0], at[1])
		}
		behind := 0
		if at[1] < at[0] {
			behind = 1
		}
		_, err := pb.NewKVClient(m.stores()[behind].conns[0]).Put(withBearer(m.t.Context(), token[behind]), put("z", "1"))
		m.must(err)
	}
}

// judge notes how the answers differ.
func (m *matrix) judge(c *matrixCase, etcd, skein answer) (same bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.cases++
	if etcd.response == nil {
		m.denied++
	}
	diff := compare(etcd, skein)
	if diff == "" {
		return true
	}
	for _, d := range differences {
		if d.holds(c, etcd, skein) {
			m.used[d.name]++
			return false
		}
	}
	what := func(a answer) string {
		if a.response != nil {
			return "an answer"
		}
		return a.code.String() + " " + cut(a.text, 200)
	}
	key := fmt.Sprintf("%s by %s: etcd %s, Skein %s", c.method.Name(), c.face, what(etcd), what(skein))
	if m.found[key] == nil {
		m.found[key] = &found{first: fmt.Sprintf("%s\n%s", c, diff)}
	}
	m.found[key].n++
	return false
}

// TestAccessMatrix: everybody's calls of every method are answered as by etcd. The requests have everything that matters
// for rights. They go over one range and over several, in every way to make them.
func TestAccessMatrix(t *testing.T) {
	t.Parallel()
	for name, jwt := range map[string]bool{"simple tokens": false, "JWT": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMatrix(t, jwt)
			m.all("one range", len(name))
			m.splitRanges()
			m.all("several ranges", len(name)+1)
			m.report()
		})
	}
}

// splitRanges has ranges begin at, and between, the keys and the borders of permissions.
func (m *matrix) splitRanges() {
	m.t.Helper()
	for _, key := range []string{"b", "bb", "c", "c\x00", "d"} {
		m.splits.tokens = m.rootTokens()
		m.splits.split([]byte(key))
		m.must(m.splits.wait())
	}
}

// abreast waits until every node answers a serializable read at the last revision: its replicas may be behind.
func (m *matrix) abreast() {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), startTimeout)
	defer cancel()
	ctx = withBearer(ctx, m.tokensOf(rights.Root)[1])
	for _, conn := range m.skein.conns {
		for {
			r, err := pb.NewKVClient(conn).Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte(fromKey), Serializable: true, CountOnly: true})
			m.must(err)
			if r.GetHeader().GetRevision() >= m.etcd.etcd.KV().Rev() {
				break
			}
			m.must(clock.Sleep(ctx, clock.System(), readyPause))
		}
	}
}

// all makes all calls: first those that change nothing, many at a time, then the others.
func (m *matrix) all(ranges string, turn int) {
	began := clock.StartStopwatch()
	m.abreast()
	var alone []*matrixCase
	work := make(chan *matrixCase)
	var workers sync.WaitGroup
	for range casesAtATime {
		workers.Go(func() {
			for c := range work {
				m.run(c)
			}
		})
	}
	for _, c := range m.listed(turn) {
		if m.mayChange(c) {
			alone = append(alone, c)
		} else {
			work <- c
		}
	}
	close(work)
	workers.Wait()
	m.sameRevision("calls that should change nothing")
	m.t.Logf("%s: %d calls that change nothing and are not alone, after %s", ranges, m.cases, began.Elapsed())
	for _, c := range alone {
		m.runAlone(c)
	}
	m.t.Logf("%s: %d calls, %d alone, %d refused, after %s", ranges, m.cases, len(alone), m.denied, began.Elapsed())
}

// runAlone makes a call that may change something, and restores what it has changed.
func (m *matrix) runAlone(c *matrixCase) {
	m.t.Helper()
	if l, ok := c.request.(interface {
		GetLeader() *v3electionpb.LeaderKey
	}); ok && l.GetLeader().GetRev() == ofKey {
		l.GetLeader().Rev = m.createdAt(l.GetLeader().GetKey())
	}
	got, same := m.run(c)
	if !same {
		m.t.Logf("%s: %s", c, compare(got[0], got[1]))
		m.sameRevision(c.String())
	}
	if got[0].response != nil {
		m.restore(c)
	}
	if !m.intact() { // also where a lock was refused half-way
		m.restoreKeys()
	}
}

// restore makes anew what a successful call has changed, apart from keys.
func (m *matrix) restore(c *matrixCase) {
	m.t.Helper()
	switch r := c.request.(type) {
	case *pb.LeaseGrantRequest:
		m.asRoot("LeaseRevoke", revoke(r.GetID()))
	case *pb.LeaseRevokeRequest:
		if r.GetID() != leaseUnknown {
			m.asRoot("LeaseGrant", grant(r.GetID(), map[int64]int64{leaseOfB: 3600, leaseOfMany: 36_000, leaseOfNone: 360_000, leaseOfC: 3_600_000}[r.GetID()]))
		}
	case *pb.AlarmRequest:
		m.asRoot("Alarm", &pb.AlarmRequest{Action: pb.AlarmRequest_DEACTIVATE, MemberID: 77, Alarm: 9})
	case *pb.AuthDisableRequest:
		m.asRoot("AuthEnable", &pb.AuthEnableRequest{})
		m.logIn()
	}
	if c.method.Parent().Name() == "Auth" && c.method.Name() != "Authenticate" {
		m.resetVictim()
	}
}

// createdAt returns the revision that created a key, 1 where there is none.
func (m *matrix) createdAt(key []byte) int64 {
	if len(key) == 0 {
		return 1
	}
	r, err := m.etcd.etcd.KV().Range(m.t.Context(), key, nil, mvcc.RangeOptions{})
	m.must(err)
	if len(r.KVs) == 0 {
		return 1
	}
	return r.KVs[0].CreateRevision
}

// report fails the test for each difference.
func (m *matrix) report() {
	m.t.Helper()
	for _, d := range slices.Sorted(maps.Keys(m.found)) {
		m.t.Errorf("%d times: %s\n%s", m.found[d].n, d, m.found[d].first)
	}
	m.t.Logf("%d calls, %d of them refused, differences: %v", m.cases, m.denied, m.used)
	for _, d := range differences {
		if *shareFlag == 1 && m.jwt && m.used[d.name] == 0 {
			m.t.Errorf("no call shows the difference: %s", d.name)
		}
	}
}
