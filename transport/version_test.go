package transport_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// written is a version that a test gives a node.
type written struct {
	mu    sync.Mutex
	now   keyspace.Version
	reads keyspace.Versions
	full  int // so many times it cannot be noted
	fresh bool
}

func (w *written) Fresh() bool { return w.fresh }

func (w *written) Now() (keyspace.Version, keyspace.Versions) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now, w.reads
}

func (w *written) Raise(to keyspace.Version) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.full > 0 {
		w.full--
		return errors.New("no room")
	}
	w.now = max(w.now, to)
	return nil
}

// TestVersionsMeet: before there is a session the node of the lower version takes over the higher one,
// and there is none between builds that do not read what the other writes. A node that cannot take
// it over has a session as long as the other one reads what it goes on writing.
func TestVersionsMeet(t *testing.T) {
	old, between, later := keyspace.Versions{Oldest: 3, Newest: 4}, keyspace.Versions{Oldest: 4, Newest: 5}, keyspace.Versions{Oldest: 5, Newest: 6}
	for name, c := range map[string]struct {
		a, b *written
		want keyspace.Version // 0: no session
		// unnoted says that a keeps its version.
		unnoted bool
	}{
		"alike":                                          {a: &written{now: 3, reads: old}, b: &written{now: 3, reads: old}, want: 3},
		"one was away":                                   {a: &written{now: 3, reads: old}, b: &written{now: 4, reads: old}, want: 4},
		"it cannot note it first":                        {a: &written{now: 3, reads: old, full: 1}, b: &written{now: 4, reads: between}, want: 4},
		"it cannot note it for long":                     {a: &written{now: 3, reads: old, full: 1 << 30}, b: &written{now: 4, reads: old}, want: 4, unnoted: true},
		"builds of two releases":                         {a: &written{now: 4, reads: old}, b: &written{now: 4, reads: between}, want: 4},
		"an old build comes back":                        {a: &written{now: 4, reads: old}, b: &written{now: 5, reads: between}},
		"two releases lie between":                       {a: &written{now: 3, reads: old}, b: &written{now: 5, reads: later}},
		"a new node":                                     {a: &written{now: 3, reads: old, fresh: true}, b: &written{now: 4, reads: between}, want: 4},
		"a new node of a build that is too new":          {a: &written{now: 3, reads: old}, b: &written{now: 4, reads: between, fresh: true}},
		"a new cluster of two builds":                    {a: &written{now: 3, reads: old, fresh: true}, b: &written{now: 4, reads: between, fresh: true}, want: 4},
		"a new node of the older build before the raise": {a: &written{now: 3, reads: old, fresh: true}, b: &written{now: 3, reads: old}, want: 3},
	} {
		t.Run(name, func(t *testing.T) {
			was := [2]keyspace.Version{c.a.now, c.b.now}
			h := newQUICHarness()
			refused := make(chan struct{}, 100)
			node := func(id keyspace.NodeID, w *written) *transport.QUIC {
				o := selfMade(id)
				o.Version = w
				core, _ := observer.New(zap.WarnLevel)
				o.Logger = zap.New(zapcore.RegisterHooks(core, func(e zapcore.Entry) error {
					if strings.Contains(e.Message, "too old or too new") {
						select {
						case refused <- struct{}{}:
						default:
						}
					}
					return nil
				}))
				return h.new(t, o)
			}
			a, b := node(1, c.a), node(2, c.b)
			up := make(chan struct{}, 100)
			for _, q := range []*transport.QUIC{a, b} {
				q.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
					if s.Up {
						up <- struct{}{}
					}
				})
			}
			a.SetPeer(2, b.Addrs())
			b.SetPeer(1, a.Addrs())
			start(t, a, b)
			if c.want == 0 {
				select {
				case <-refused:
				case <-up:
					t.Error("there is a session")
				}
				if c.a.now != was[0] || c.b.now != was[1] {
					t.Errorf("versions %d and %d after the refusal, want %v", c.a.now, c.b.now, was)
				}
				return
			}
			<-up
			<-up
			want := [2]keyspace.Version{c.want, c.want}
			if c.unnoted {
				want[0] = was[0]
			}
			va, _ := c.a.Now()
			if vb, _ := c.b.Now(); va != want[0] || vb != want[1] {
				t.Errorf("versions %d and %d, want %v", va, vb, want)
			}
		})
	}
}

// TestRaiseEndsSessions: a session with a build that does not read the version any more ends soon after
// the raise.
func TestRaiseEndsSessions(t *testing.T) {
	h := newQUICHarness()
	v := &written{now: 4, reads: keyspace.Versions{Oldest: 4, Newest: 5}}
	node := func(id keyspace.NodeID, w *written) *transport.QUIC {
		o := selfMade(id)
		o.Version, o.PingInterval = w, time.Millisecond
		return h.new(t, o)
	}
	a, b := node(1, v), node(2, &written{now: 4, reads: keyspace.Versions{Oldest: 3, Newest: 4}})
	up := make(chan bool, 100)
	a.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) { up <- s.Up })
	a.SetPeer(2, b.Addrs())
	b.SetPeer(1, a.Addrs())
	start(t, a, b)
	if !<-up {
		t.Fatal("no session")
	}
	if err := v.Raise(5); err != nil {
		t.Fatal(err)
	}
	if <-up {
		t.Error("there is a session after the raise")
	}
}
