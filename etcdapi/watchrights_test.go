package etcdapi

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/watch"
)

// guarded is a server of watchers with users, in virtual time.
type guarded struct {
	t     *testing.T
	s     *Server
	o     *oneRange
	users *records
	hub   *watch.Hub
	// stale says that the node's view of the rights is too old.
	stale atomic.Bool
}

// withWatchers calls f with a server whose users are as setUp makes them.
func withWatchers(t *testing.T, f func(g *guarded)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		g := &guarded{t: t, o: newOneRange()}
		g.hub = watch.New(watch.Config{Self: 1, Clock: clock.Virtual(), Log: g.o, Ranges: g.o, Feeds: g.o})
		g.s, g.users = virtualServer(t, func(o *Options) { o.Watches, o.NoGateway = g.hub, true })
		g.s.opts.Users.Holds = func() bool { return !g.stale.Load() }
		g.users.taken = g.s.RightsTaken
		f(g)
		g.hub.Stop()
		g.s.Stop(t.Context())
	})
}

// open opens a stream of a user; "" is nobody. It ends with the test. Responses beyond so many wait for the client.
func (g *guarded) open(user string, taken int) (v *virtualStream, end func()) {
	g.t.Helper()
	parent := g.t.Context()
	if user != "" {
		parent = g.users.incoming(g.t, user)
	}
	ctx, cancel := context.WithCancel(parent)
	v = &virtualStream{t: g.t, ctx: ctx, in: make(chan *pb.WatchRequest), out: make(chan *pb.WatchResponse, taken), o: g.o, done: make(chan error, 1)}
	go func() { v.done <- (&watchServer{s: g.s}).Watch(v) }()
	return v, func() {
		cancel()
		if err := <-v.done; err == nil {
			g.t.Error("the stream ended without an error, before its client")
		}
	}
}

// all returns what has come to a stream.
func (v *virtualStream) all() (got []string) {
	synctest.Wait()
	for {
		select {
		case r := <-v.out:
			got = append(got, shown(r))
		default:
			return got
		}
	}
}

func shown(r *pb.WatchResponse) string {
	s := fmt.Sprint(r.WatchId)
	if r.Created {
		s += " created"
	}
	if r.Canceled {
		s += " canceled"
	}
	if r.CompactRevision != 0 {
		s += fmt.Sprint(" compacted ", r.CompactRevision)
	}
	if r.CancelReason != "" {
		s += ": " + r.CancelReason
	}
	for _, e := range r.Events {
		s += fmt.Sprintf(" %s@%d", e.Kv.Key, e.Kv.ModRevision)
	}
	return s
}

func (v *virtualStream) want(what string, want ...string) {
	v.t.Helper()
	if got := v.all(); strings.Join(got, "\n") != strings.Join(want, "\n") {
		v.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

const deniedText = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"

// Trap 87 (GHSA-xg4h-6gfc-h4m8): what a watcher may see is decided by the end of its span as the client sent it, and a denial has etcd's text.
func TestWatchersThatAreNotAllowed(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		const empty = "rpc error: code = InvalidArgument desc = etcdserver: user name is empty"
		const bad = "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token"
		for _, tc := range []struct{ user, key, end, reason string }{
			{"", "k", "", empty},
			{"u", "k", "", ""},
			{"u", "r", "s", ""},
			{"u", "r5", "", ""},
			{"u", "w", "", deniedText}, // only to write
			{"u", "k", "l", deniedText},
			{"u", "k", "\x00", deniedText}, // to the end of all keys
			{"u", "r", "\x00", deniedText},
			{"u", "", "", deniedText},
			{"u", "", "\x00", deniedText},
			{"u", "r", "s\x00", deniedText},
			{"u", "z", "a", deniedText}, // an empty span has a key
			{"u", "s", "r", deniedText},
			{"root", "", "\x00", ""},
			{"root", "z", "a", reasonEmptyRange},
		} {
			v, end := g.open(tc.user, 10)
			v.send(createWatch(&pb.WatchCreateRequest{Key: []byte(tc.key), RangeEnd: []byte(tc.end)}))
			want := "0 created"
			if tc.reason != "" {
				want = "-1 created canceled: " + tc.reason
			}
			v.want(fmt.Sprintf("%q of %q to %q", tc.user, tc.key, tc.end), want)
			end()
		}
		ctx, cancel := context.WithCancel(metadata.NewIncomingContext(g.t.Context(), metadata.Pairs(rpctypes.TokenFieldNameGRPC, "forged.1")))
		v := &virtualStream{t: g.t, ctx: ctx, in: make(chan *pb.WatchRequest), out: make(chan *pb.WatchResponse, 1), o: g.o, done: make(chan error, 1)}
		go func() { v.done <- (&watchServer{s: g.s}).Watch(v) }()
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k")}))
		v.want("a bad token", "-1 created canceled: "+bad)
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), StartRevision: -1})) // as in etcd, its look comes first
		v.want("a bad start", "-1 created canceled: "+rpctypes.ErrCompacted.Error())
		cancel()
		if err := <-v.done; err == nil {
			t.Error("the stream ended without an error, before its client")
		}

		// A stream outlives what was granted, and its user's next watchers go by the rights of then.
		v, end := g.open("u", 10)
		v.watches(3, "k")
		g.users.do(t, "permit own r x")
		v.watches(4, "x")
		g.users.do(t, "password u")
		if got := v.all(); len(got) != 2 || !strings.HasSuffix(got[0], deniedText) || !strings.HasSuffix(got[1], deniedText) {
			t.Errorf("the user is another one: %q", got)
		}
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k")}))
		v.want("the token is", "-1 created canceled: "+bad)
		end()
	})
}

// A denial has etcd's texts, also for a token of an old auth revision.
func TestReasonsOfDeniedWatchers(t *testing.T) {
	for err, want := range map[error]error{
		kverror.InvalidAuthToken: rpctypes.ErrGRPCInvalidAuthToken, kverror.AuthOldRevision: rpctypes.ErrGRPCAuthOldRevision,
		kverror.UserEmpty: rpctypes.ErrGRPCUserEmpty, kverror.PermissionDenied: rpctypes.ErrGRPCPermissionDenied,
	} {
		if got := reasonDenied(kverror.GRPC(err)); got != want.Error() {
			t.Errorf("%v: %q, want %q", err, got, want)
		}
	}
}

// Trap 105: once rights are taken away, the watchers that they covered end, and no others. Their clients are told etcd's
// text for a denial, and no event of later.
func TestWatchersEndWithTheRights(t *testing.T) {
	for _, tc := range []struct {
		name  string
		taken []string
		ends  bool
	}{
		{"the permission", []string{"forbid own k"}, true},
		{"the role", []string{"revoke u own"}, true},
		{"the role itself", []string{"delete-role own"}, true},
		{"less of the permission", []string{"permit own w k"}, true},
		{"the user", []string{"delete-user u"}, true},
		{"the user, who is made anew", []string{"delete-user u", "user u", "grant u own"}, true},
		{"the password", []string{"password u"}, true},
		{"another permission", []string{"forbid own r s"}, false},
		{"another user", []string{"user x", "delete-user x"}, false},
		{"all checks, and they begin again", []string{"disable", "enable"}, false},
		{"half of what gives it twice", []string{"permit own rw j l", "forbid own k"}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			withWatchers(t, func(g *guarded) {
				v, end := g.open("u", 100)
				defer end()
				root, endRoot := g.open("root", 100)
				defer endRoot()
				v.watches(1, "k")
				root.watches(1, "k")
				g.o.put("k")
				v.want("before", "1 k@2")
				root.want("before", "1 k@2")
				g.users.do(t, tc.taken...)
				g.o.put("k")
				time.Sleep(time.Second)
				root.want("root", "1 k@3")
				if !tc.ends {
					v.want("nothing is taken from it", "1 k@3")
					return
				}
				v.want("its right is taken away", "1 canceled: "+deniedText)
				v.send(cancelRequest(1)) // it has crossed the answer
				time.Sleep(time.Second)
				v.want("its client cancels it")
				v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("r5"), WatchId: 1}))
				time.Sleep(time.Second)
				if got := v.all(); len(got) != 1 || !strings.Contains(got[0], "created") {
					t.Errorf("its id is used again: %q", got)
				}
			})
		})
	}
}

// Who watched before checks began has no user. The watchers end.
func TestWatchersOfNobodyEndWhenChecksBegin(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		g.users.do(t, "disable")
		v, end := g.open("", 10)
		defer end()
		v.watches(1, "k")
		g.users.do(t, "user x", "delete-user x")
		v.want("without checks")
		g.users.do(t, "enable")
		v.want("with checks", "1 canceled: "+deniedText)
	})
}

// Trap 105: no event after RightsTaken has returned, and it waits for no client: one takes nothing, and one gets events
// all the time. Thousands of watchers end, each once.
func TestRightsTakenWaitsForNoClient(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		const many = 5000
		busy, endBusy := g.open("u", 3*many)
		defer endBusy()
		for id := range int64(many) {
			busy.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: id + 1}))
		}
		time.Sleep(time.Second)
		if n := len(busy.all()); n != many {
			t.Fatalf("%d watchers are made", n)
		}
		slow, endSlow := g.open("u", 1)
		defer endSlow()
		slow.watches(1, "k")
		g.o.put("k")
		synctest.Wait()
		g.o.put("k")
		synctest.Wait()
		g.o.put("k")
		synctest.Wait()
		busy.all()
		begin := time.Now()
		g.users.do(t, "forbid own k")
		if took := time.Since(begin); took > 0 {
			t.Errorf("it took %v", took)
		}
		g.o.put("k")
		time.Sleep(time.Second)
		ended := map[string]int{}
		for _, r := range busy.all() {
			if !strings.HasSuffix(r, "canceled: "+deniedText) {
				t.Fatalf("told %q", r)
			}
			ended[r]++
		}
		if len(ended) != many {
			t.Errorf("%d watchers have ended", len(ended))
		}
		for r, n := range ended {
			if n != 1 {
				t.Errorf("%q was told %d times", r, n)
			}
		}
		// The client that took nothing gets earlier events alone.
		last := ""
		for r, _ := slow.told(); ; r, _ = slow.told() {
			if last = shown(r); r.Canceled {
				break
			}
			for _, e := range r.Events {
				if e.Kv.ModRevision > 4 {
					t.Errorf("told %q", last)
				}
			}
		}
		if last != "1 canceled: "+deniedText {
			t.Errorf("the last one is %q", last)
		}
		if st := len(g.s.watchers.all); st != 2 {
			t.Errorf("%d streams", st)
		}
	})
}

// Rights are taken while a watcher is being made: before the sequencer answers, and before its client is told. It is
// refused, or ends.
func TestRightsAreTakenWhileAWatcherIsMade(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		v, end := g.open("u", 10)
		defer end()
		g.o.mu.Lock()
		g.o.slow = time.Second
		g.o.mu.Unlock()
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 1}))
		time.Sleep(500 * time.Millisecond)
		g.users.do(t, "forbid own k")
		g.o.put("k")
		time.Sleep(10 * time.Second)
		v.want("before the sequencer has answered", "-1 created canceled: "+deniedText)
		g.users.do(t, "permit own rw k")
		g.o.mu.Lock()
		g.o.slow = 0
		g.o.mu.Unlock()

		// Its answer waits behind another one, which waits for the sequencer.
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 2}))
		time.Sleep(time.Second)
		v.want("an id is free again", "2 created")
		g.o.mu.Lock()
		g.o.slow = time.Second
		g.o.mu.Unlock()
		v.send(cancelRequest(2)) // asks for the revision of its header
		synctest.Wait()
		g.o.mu.Lock()
		g.o.slow = 0
		g.o.mu.Unlock()
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 3}))
		synctest.Wait()
		g.users.do(t, "forbid own k")
		g.o.put("k")
		v.want("nothing is told yet")
		time.Sleep(10 * time.Second)
		v.want("before its client is told", "2 canceled", "3 created", "3 canceled: "+deniedText)
	})
}

// The sequencer knows of rights that were taken away before the node does: the watcher is made by the rights of then.
func TestAWatcherIsMadeAnew(t *testing.T) {
	for _, mine := range []bool{false, true} {
		withWatchers(t, func(g *guarded) {
			v, end := g.open("u", 10)
			defer end()
			g.users.do(t, "user x")
			g.users.hear(false)
			taken, want := "delete-user x", "1 created"
			if mine {
				taken, want = "forbid own k", "-1 created canceled: "+deniedText
			}
			g.users.do(t, taken)
			g.o.breakSequencer(kverror.New(kverror.AccessChanged, "a test"))
			v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 1}))
			time.Sleep(500 * time.Millisecond)
			v.want("the node has not heard yet")
			g.o.breakSequencer(nil)
			g.users.hear(true)
			g.s.RightsTaken()
			time.Sleep(time.Second)
			v.want(taken, want)

			g.users.hear(false)
			g.o.breakSequencer(kverror.New(kverror.AccessChanged, "a test"))
			v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("r5"), WatchId: 2}))
			time.Sleep(10 * time.Second)
			v.want("the node does not hear", "-1 created canceled: etcdserver: no leader")
		})
	}
}

// A watcher whose past was compacted has ended before. Its client is told that alone, and may use the id again once it
// has cancelled it, as in etcd.
func TestACompactedWatcherHasEndedBefore(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		for range 10 {
			g.o.put("k")
		}
		g.o.mu.Lock()
		g.o.compacted = 8
		g.o.mu.Unlock()
		v, end := g.open("u", 10)
		defer end()
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 1, StartRevision: 2}))
		time.Sleep(time.Second)
		v.want("compacted", "1 created", "1 canceled compacted 8")
		g.users.do(t, "forbid own k")
		v.want("its right is taken away")
		v.send(cancelRequest(1))
		time.Sleep(time.Second)
		v.want("its client cancels it", "1 canceled")
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("r5"), WatchId: 1}))
		time.Sleep(time.Second)
		v.want("its id is used again", "1 created")
	})
	// The answer is on its way to a client that takes nothing.
	withWatchers(t, func(g *guarded) {
		g.o.put("k")
		v, end := g.open("u", 0)
		defer end()
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 1}))
		v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: 2, StartRevision: 1}))
		synctest.Wait()
		g.users.do(t, "forbid own k")
		var got []string
		for range 4 {
			r, _ := v.told()
			got = append(got, shown(r))
		}
		if all := strings.Join(got, ", "); !strings.Contains(all, "1 canceled") || !strings.Contains(all, "2 canceled") {
			t.Errorf("told %q", got)
		}
	})
}

// A client cancels its watchers while their rights are taken away. Each ends once, whoever comes first.
func TestCancelledWhileRightsAreTaken(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		const many = 200
		v, end := g.open("u", 3*many)
		defer end()
		for id := range int64(many) {
			v.send(createWatch(&pb.WatchCreateRequest{Key: []byte("k"), WatchId: id + 1}))
		}
		time.Sleep(time.Second)
		v.all()
		done := make(chan struct{})
		go func() {
			defer close(done)
			for id := range int64(many) {
				v.send(cancelRequest(id + 1))
			}
		}()
		g.users.do(t, "forbid own k")
		g.o.put("k")
		<-done
		time.Sleep(time.Second)
		ended := map[string]int{}
		for _, r := range v.all() {
			id, rest, _ := strings.Cut(r, " ")
			if !strings.HasPrefix(rest, "canceled") && !strings.HasSuffix(rest, "k@2") {
				t.Errorf("told %q", r)
			}
			if strings.HasPrefix(rest, "canceled") {
				ended[id]++
			} else if ended[id] > 0 {
				t.Errorf("told %q after its end", r)
			}
		}
		if len(ended) != many {
			t.Errorf("%d have ended", len(ended))
		}
		for id, n := range ended {
			if n != 1 {
				t.Errorf("watcher %s has ended %d times", id, n)
			}
		}
	})
}

// A cancelled watcher is gone from the hub as soon as RightsTaken does not see it any more.
func TestACancelledWatcherIsGoneAtOnce(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		v, end := g.open("u", 10)
		defer end()
		v.watches(1, "k")
		var st *watchStream
		for st = range g.s.watchers.all {
		}
		w := st.forgetAsked(1)
		if w == nil || st.hub.Cancel(w.w) {
			t.Error("its events would go on")
		}
	})
}

// While the node may not know what was taken away, events wait. They come later, but for those of watchers whose
// rights have ended meanwhile. Without checks they do not wait.
func TestEventsWaitForTheView(t *testing.T) {
	withWatchers(t, func(g *guarded) {
		v, end := g.open("u", 10)
		defer end()
		v.watches(1, "k")
		v.watches(2, "r5")
		g.stale.Store(true)
		g.o.put("k", "r5")
		time.Sleep(time.Minute)
		v.want("stale")
		g.stale.Store(false)
		time.Sleep(time.Second)
		if got := v.all(); len(got) != 2 {
			t.Errorf("the view holds again: %q", got)
		}
		g.stale.Store(true)
		g.o.put("k", "r5")
		time.Sleep(time.Second)
		g.users.do(t, "forbid own k")
		g.stale.Store(false)
		time.Sleep(time.Second)
		v.want("one has lost its right", "2 r5@3", "1 canceled: "+deniedText)
		g.stale.Store(true)
		g.o.put("r5")
		time.Sleep(time.Second)
		v.want("stale again")
		g.users.do(t, "disable")
		time.Sleep(time.Second)
		v.want("without checks", "2 r5@4")
	})
}

// etcd's client closes the channel of a watcher that ends, and gives no reason. Its others go on.
func TestClientsHearThatTheirWatchersEnd(t *testing.T) {
	o := newOneRange()
	hub := watch.New(watch.Config{Self: 1, Clock: clock.System(), Log: o, Ranges: o, Feeds: o})
	t.Cleanup(hub.Stop)
	r := newAuthRig(t, func(opts *Options) { opts.Watches = hub })
	c := r.client(t, clientv3.Config{Username: "u", Password: "u"})
	mine, other := c.Watch(t.Context(), "k", clientv3.WithCreatedNotify()), c.Watch(t.Context(), "r5", clientv3.WithCreatedNotify())
	<-mine
	<-other
	r.users.do(t, "forbid own k")
	if resp, open := <-mine; open {
		t.Errorf("its right is taken away, and it goes on: %v", resp)
	}
	o.put("r5")
	if resp := <-other; len(resp.Events) != 1 {
		t.Errorf("the other: %v", resp)
	}
	resp := <-c.Watch(t.Context(), "k")
	if err := resp.Err(); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a new one: %v", err)
	}
}
