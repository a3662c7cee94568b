package shard

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/replicas"
	"github.com/skeindb/skein/transport"
)

// fakeGroup is a raft group of which the test is the log, the peers and the clock.
type fakeGroup struct {
	e    *engine.Engine
	id   keyspace.GroupID
	self keyspace.ReplicaID
	sm   raftgroup.StateMachine

	mu sync.Mutex
	// Guarded by mu.
	term  uint64
	leads bool
	lease bool
	full  bool
	index uint64
	// commit is what is committed beyond index.
	commit   uint64
	log      []fakeEntry
	reads    []func(uint64, error)
	campaign int
	wakes    int
	replicas []keyspace.Replica
	// transferred says that the leadership was handed over in time.
	transferred bool
}

type fakeEntry struct {
	term    uint64
	data    []byte
	dropped func(error)
}

func (g *fakeGroup) Propose(term uint64, data []byte, dropped func(error)) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.leads || term != g.term {
		return raftgroup.ErrNotLeader
	}
	if g.full {
		return raftgroup.ErrFull
	}
	g.log = append(g.log, fakeEntry{term, data, dropped})
	return nil
}

func (g *fakeGroup) LeaseHeld(term uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.leads && g.lease && g.term == term
}

func (g *fakeGroup) ReadIndex(done func(uint64, error)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reads = append(g.reads, done)
}

func (g *fakeGroup) Campaign() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.campaign++
}

func (g *fakeGroup) Wake() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wakes++
}

func (g *fakeGroup) CanTransfer(context.Context, keyspace.ReplicaID) error { return nil }

func (g *fakeGroup) Transfer(ctx context.Context, _ keyspace.ReplicaID) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.transferred = ctx.Err() == nil
	return ctx.Err()
}

func (g *fakeGroup) Status() raftgroup.Status {
	g.mu.Lock()
	defer g.mu.Unlock()
	return raftgroup.Status{Group: g.id, Replica: g.self, Term: g.term, IsLeader: g.leads, Last: g.index, Applied: g.index, Commit: max(g.commit, g.index)}
}

func (g *fakeGroup) Committed() raftgroup.Commit { return raftgroup.Commit{} }

func (g *fakeGroup) Replica() keyspace.ReplicaID { return g.self }

func (g *fakeGroup) ChangeConf(context.Context, uint64, []raftgroup.ConfChange, []byte) error {
	return raftgroup.ErrConfInvalid
}

func (g *fakeGroup) Progress(context.Context) ([]raftgroup.Progress, error) { return nil, nil }

// lead tells the replica who leads.
func (g *fakeGroup) lead(s raftgroup.LeaderState) {
	g.mu.Lock()
	g.term, g.leads = s.Term, s.IsLeader
	g.mu.Unlock()
	g.sm.LeaderChanged(s)
}

// take removes the i-th entry from the log's front.
func (g *fakeGroup) take(i int) fakeEntry {
	g.mu.Lock()
	defer g.mu.Unlock()
	e := g.log[i]
	g.log = append(g.log[:i:i], g.log[i+1:]...)
	return e
}

// apply applies entries in one batch, as the host does.
func (g *fakeGroup) apply(ents ...raftgroup.Entry) error {
	b := g.e.NewBatch()
	g.mu.Lock()
	for i := range ents {
		g.index++
		ents[i].Index = g.index
	}
	g.mu.Unlock()
	if err := g.sm.Apply(b, ents); err != nil {
		b.Close()
		return err
	}
	last := ents[len(ents)-1]
	a := engine.Applied{
		Index: last.Index, Term: last.Term, Replicas: g.replicas, ConfIndex: raftgroup.InitIndex,
		Payload: g.sm.(raftgroup.Payloader).Payload(),
	}
	if err := b.SetApplied(g.id, a); err != nil {
		return err
	}
	if err := b.Commit(); err != nil {
		return err
	}
	g.sm.Applied(raftgroup.Position{Index: last.Index, Term: last.Term})
	return nil
}

// fakeGroups opens fake groups.
type fakeGroups struct {
	e      *engine.Engine
	mu     sync.Mutex
	groups map[keyspace.GroupID]*fakeGroup
}

func (f *fakeGroups) Bootstrap(b *engine.Batch, g keyspace.GroupID, replicas []keyspace.Replica, payload []byte) error {
	return b.SetApplied(g, engine.Applied{
		Index: raftgroup.InitIndex, Term: raftgroup.InitTerm, Replicas: replicas, ConfIndex: raftgroup.InitIndex, Payload: payload,
	})
}

func (f *fakeGroups) Quarantine(keyspace.GroupID, string) {}

func (f *fakeGroups) KeepClosed(keyspace.GroupID, keyspace.ReplicaID, string) {}

func (f *fakeGroups) FinishRemovals(context.Context, raftgroup.Deleter) error { return nil }

func (f *fakeGroups) Removed() []keyspace.GroupID { return nil }

func (f *fakeGroups) Remove(_ context.Context, ids []keyspace.GroupID, del raftgroup.Deleter) map[keyspace.GroupID]error {
	failed := map[keyspace.GroupID]error{}
	for _, id := range ids {
		b := f.e.NewBatch()
		err := b.DeleteApplied(id)
		if err == nil {
			err = del(b, id)
		}
		if err == nil {
			err = b.Commit()
		}
		if err = errors.Join(err, b.Close()); err != nil {
			failed[id] = err
		}
	}
	return failed
}

func (f *fakeGroups) open(id keyspace.GroupID, self keyspace.ReplicaID, at raftgroup.Position, sm raftgroup.StateMachine) (group, error) {
	a, ok, err := f.e.Applied(id)
	if err != nil {
		return nil, err
	}
	if at != (raftgroup.Position{Index: a.Index, Term: a.Term}) {
		return nil, errors.New("the record has moved")
	}
	g := &fakeGroup{e: f.e, id: id, self: self, sm: sm, lease: true}
	if ok {
		g.index, g.replicas = a.Index, a.Replicas
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.groups[id] = g
	return g, nil
}

func (f *fakeGroups) group(id keyspace.RangeID) *fakeGroup {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.groups[id.Group()]
}

// fakeSequencer allocates revisions when the test says so.
type fakeSequencer struct {
	mu sync.Mutex
	// Guarded by mu.
	last, compacted keyspace.Revision
	term            uint64
	auto            bool
	ids             keyspace.RangeID
	asks            []fakeAsk
}

type fakeAsk struct {
	req  keyspace.SequenceRequest
	done func(keyspace.SequenceAnswer)
}

func (s *fakeSequencer) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	s.mu.Lock()
	if !s.auto {
		s.asks = append(s.asks, fakeAsk{req, done})
		s.mu.Unlock()
		return
	}
	a := s.allocateLocked(req)
	s.mu.Unlock()
	done(a)
}

func (s *fakeSequencer) allocateLocked(req keyspace.SequenceRequest) keyspace.SequenceAnswer {
	a := keyspace.SequenceAnswer{Term: s.term, Compacted: s.compacted}
	if req.Count > 0 {
		a.First = s.last + 1
		s.last += keyspace.Revision(req.Count)
	}
	a.Current = s.last
	return a
}

// answer answers the i-th waiting ask.
func (s *fakeSequencer) answer(i int, err error) {
	s.mu.Lock()
	k := s.asks[i]
	s.asks = append(s.asks[:i:i], s.asks[i+1:]...)
	a := keyspace.SequenceAnswer{Err: err}
	if err == nil {
		a = s.allocateLocked(k.req)
	}
	s.mu.Unlock()
	k.done(a)
}

func (s *fakeSequencer) RangeIDs(_ context.Context, n int) ([]keyspace.RangeID, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]keyspace.RangeID, n)
	for i := range ids {
		ids[i] = max(s.ids, 1) + 1
		s.ids = ids[i]
	}
	return ids, nil
}

// fakeWorld is a node with fake groups, one range over everything, and no peers.
type fakeWorld struct {
	t      testing.TB
	fs     *simdisk.Disk
	engine *engine.Engine
	groups *fakeGroups
	seq    *fakeSequencer
	store  *Store
	limits Limits
	disk   fakeDisk
	leases fakeLeases
	// written is the version in which the node writes.
	written atomic.Uint32
	// leased says that there are leases. Their records are in leases, or in leasesOf if that is
	// set.
	leased   bool
	leasesOf Leases
	// placed is the range map, nil for none.
	placed replicas.Placed

	mu       sync.Mutex
	reported []keyspace.Descriptor
}

type fakeDisk struct {
	mu               sync.Mutex
	full, overloaded bool
}

func (d *fakeDisk) Full() bool       { d.mu.Lock(); defer d.mu.Unlock(); return d.full }
func (d *fakeDisk) Overloaded() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.overloaded }

func (w *fakeWorld) ReportDescriptors(ds ...keyspace.Descriptor) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reported = append(w.reported, ds...)
}

func (w *fakeWorld) Call(context.Context, keyspace.NodeID, transport.Method, []byte) ([]byte, error) {
	return nil, transport.ErrNoRoute
}

func (w *fakeWorld) OpenStream(context.Context, keyspace.NodeID, transport.Method, []byte) (transport.Stream, error) {
	return nil, transport.ErrNoRoute
}

var testDescriptor = keyspace.Descriptor{
	Range: 1, Generation: 1, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}},
}

func newFakeWorld(t testing.TB) *fakeWorld {
	t.Helper()
	return newFakeWorldWith(t, Limits{})
}

func newFakeWorldWith(t testing.TB, l Limits) *fakeWorld {
	t.Helper()
	return newLeasedWorld(t, l, "")
}

// newLeasedWorld is newFakeWorldWith of a node with leases, whose records answer by
// themselves with "auto" and when the test says so with "manual".
func newLeasedWorld(t testing.TB, l Limits, leases string) *fakeWorld {
	t.Helper()
	w := &fakeWorld{t: t, fs: simdisk.New(), seq: &fakeSequencer{last: 1, compacted: -1}, limits: l, leased: leases != ""}
	w.written.Store(uint32(keyspace.NewestVersion))
	w.leases.auto, w.leases.known = leases == "auto", map[keyspace.LeaseID]keyspace.LeaseIncarnation{}
	w.start()
	if err := w.store.Create(context.Background(), []keyspace.Descriptor{testDescriptor}); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *fakeWorld) start() {
	var err error
	ck := clock.Virtual()
	w.engine, err = engine.Open(engine.Options{FS: w.fs, Dir: "data", Clock: ck, BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		w.t.Fatal(err)
	}
	w.groups = &fakeGroups{e: w.engine, groups: map[keyspace.GroupID]*fakeGroup{}}
	cfg := Config{
		Self: 1, Clock: ck, Engine: w.engine, Groups: w.groups, Sequencer: w.seq, IDs: w.seq, Reporter: w,
		Bus: w, Disk: &w.disk, Limits: w.limits, Workers: 1, Placed: w.placed,
		Written: func() keyspace.Version { return keyspace.Version(w.written.Load()) },
	}
	if w.leasesOf != nil {
		cfg.Leases = w.leasesOf
	} else if w.leased {
		cfg.Leases = &w.leases
	}
	w.store = NewStore(cfg)
	if err := w.store.Open(); err != nil {
		w.t.Fatal(err)
	}
}

func (w *fakeWorld) stop() {
	w.store.Stop()
	if err := w.engine.Close(); err != nil {
		w.t.Error(err)
	}
}

// serve makes the range's replica a leader that serves in the term.
func (w *fakeWorld) serve(id keyspace.RangeID, term uint64) {
	g := w.groups.group(id)
	g.lead(raftgroup.LeaderState{Term: term, Leader: 1, LeaderNode: 1, IsLeader: true})
	if err := g.apply(raftgroup.Entry{Term: term}); err != nil {
		w.t.Fatal(err)
	}
	g.lead(raftgroup.LeaderState{Term: term, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true})
}

// entryOf is an entry of the log as it is applied.
func entryOf(e fakeEntry) raftgroup.Entry { return raftgroup.Entry{Term: e.term, Data: e.data} }
