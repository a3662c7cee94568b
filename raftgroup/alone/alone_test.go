package alone

import (
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/keyspace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counts is an observer that counts, and never sees more under way than the depth.
type counts struct {
	t                 *testing.T
	depth             int64
	proposed, applied [4]atomic.Int64
	wanted            int64
	done              chan struct{}
	all               atomic.Int64
}

func (c *counts) Proposed(g keyspace.GroupID) {
	if n := c.proposed[g-1].Add(1) - c.applied[g-1].Load(); n > c.depth {
		c.t.Errorf("%d proposals of group %s are under way", n, g)
	}
}

func (c *counts) Applied(g keyspace.GroupID, n int) {
	c.applied[g-1].Add(int64(n))
	if c.all.Add(int64(n)) == c.wanted {
		close(c.done)
	}
}

// TestLoad: what is proposed is applied and counted once, in every group, with no more
// under way than there is room for.
func TestLoad(t *testing.T) {
	const depth, proposals = 5, 400
	c := &counts{t: t, depth: depth, wanted: proposals, done: make(chan struct{})}
	l, err := Start(t.Context(), Options{Dir: t.TempDir(), Groups: len(c.proposed), Depth: depth, Observer: c})
	if err != nil {
		t.Fatal(err)
	}
	left := proposals
	l.Propose(func() []byte { return []byte("data") }, func() bool { left--; return left >= 0 })
	<-c.done
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
	if got := l.Applied(); got != proposals {
		t.Errorf("%d applied, %d proposed", got, proposals)
	}
	if l.Syncs() == 0 {
		t.Error("no fsync")
	}
	for g := range c.proposed {
		p, a := c.proposed[g].Load(), c.applied[g].Load()
		if p != a || p < depth {
			t.Errorf("group %d: %d proposed, %d applied, %d have room", g+1, p, a, depth)
		}
	}
}

// TestProposer: what is proposed past the load's room is applied and counted once, in its
// group.
func TestProposer(t *testing.T) {
	const depth, proposals = 6, 6
	c := &counts{t: t, depth: depth, wanted: proposals, done: make(chan struct{})}
	l, err := Start(t.Context(), Options{Dir: t.TempDir(), Groups: len(c.proposed), Depth: 1, Observer: c})
	if err != nil {
		t.Fatal(err)
	}
	propose := l.Proposer(2)
	for range proposals {
		if err := propose([]byte("data")); err != nil {
			t.Error(err)
		}
	}
	<-c.done
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.Check(); err != nil {
		t.Error(err)
	}
	for g := range c.proposed {
		want := int64(0)
		if g+1 == 2 {
			want = proposals
		}
		if p, a := c.proposed[g].Load(), c.applied[g].Load(); p != want || a != want {
			t.Errorf("group %d: %d proposed, %d applied, want %d", g+1, p, a, want)
		}
	}
}

// TestStart: after the start the hosts lead the groups in turn, and keep them. With many
// groups other elections than the first ones would be under way when proposals begin.
func TestStart(t *testing.T) {
	const groups, depth = 48, 2
	l, err := Start(t.Context(), Options{Dir: t.TempDir(), Groups: groups, Depth: depth})
	if err != nil {
		t.Fatal(err)
	}
	left := 20 * groups
	l.Propose(func() []byte { return []byte("data") }, func() bool { left--; return left >= 0 })
	if err := l.Check(); err != nil {
		t.Error(err)
	}
	for g := range groups {
		for i, h := range l.hosts {
			s := h.host.Group(keyspace.GroupID(g + 1)).Status()
			if s.Leader != keyspace.ReplicaID(g%hosts+1) || s.IsLeader != (i == g%hosts) {
				t.Errorf("group %d at host %d: %+v", g+1, i+1, s)
			}
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// TestLostLeader: a run in which a leader was lost does not count.
func TestLostLeader(t *testing.T) {
	l, err := Start(t.Context(), Options{Dir: t.TempDir(), Groups: 3, Depth: 2})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.hosts[1].host.Group(2).Transfer(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for ledBy := -1; ledBy != 0; {
		if ledBy, _ = l.groups[1].leader(); ledBy < 0 {
			<-l.groups[1].told
		}
	}
	if err := l.Check(); err == nil {
		t.Error("a lost leader is not noticed")
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
