package pipeline

import (
	"context"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
)

// world is a pipeline whose range, sequencer, log and pool are the test itself. The test's
// goroutine does everything, so that nothing depends on a schedule.
type world struct {
	t     testing.TB
	p     Pipeline
	mu    sync.Mutex
	rec   command.Record
	locks locktable.Table

	shared Shared
	epochs eval.KeyEpochs
	store  memStore
	// visit, if set, is called for each key that scans visit.
	visit func()
	// disk, if set, is what each lookup waits for.
	disk chan struct{}

	// last is the last revision that was allocated, asks are the questions for revisions. access is the
	// access index.
	last   keyspace.Revision
	asks   []ask
	access keyspace.AccessIndex
	// log has what is proposed and not applied. full says that the group has no room.
	log  []proposal
	full bool
	// reads are the ReadIndexes under way while lease is false.
	lease bool
	reads []func(uint64, error)
	// timers are the calls that were put off.
	timers []timer
	// waits, if set, is what calls wait for before their admission.
	waits chan struct{}
	// shut says that the range itself is being changed; gone that it serves nobody.
	shut, gone bool
	// counted are the calls that were counted, changed those of them that write.
	counted, changed int
	// commit is how entries went through the log.
	commit raftgroup.Commit
}

type ask struct {
	req  keyspace.SequenceRequest
	done func(keyspace.SequenceAnswer)
}

type proposal struct {
	term    uint64
	entry   []byte
	dropped func(error)
}

type timer struct {
	after time.Duration
	f     func()
}

func newWorld(t testing.TB, change ...func(*Limits)) *world {
	t.Helper()
	w := &world{t: t, store: memStore{}, last: 1, lease: true}
	w.rec = command.Record{RangeID: 7, Generation: 1, LastRevision: 1, Counted: true}
	m := NewMetrics(nil)
	w.shared = Shared{
		Limits: Limits{
			RangePendingBytes: 1 << 20, BatchRequests: 100, MaxEntryBytes: 1 << 20,
			InflightBatches: 8, EvaluateTurn: time.Hour, FateTimeout: 7 * time.Second,
		},
		Pool: NewPool(clock.System()), Reads: eval.NewReadLimit(1<<20, 1<<20), Cache: eval.NewVersionCache(1 << 20), Metrics: m,
		After: func(d time.Duration, f func()) { w.timers = append(w.timers, timer{d, f}) },
	}
	for _, f := range change {
		f(&w.shared.Limits)
	}
	w.shared.Budget = NewBudget(1, 1<<20, nil, m)
	w.epochs = eval.NewKeyEpochs(w.shared.Cache)
	w.locks = locktable.New(&locktable.Shared{})
	w.p.Init(Config{
		Shared: &w.shared, Range: 7, Log: zap.NewNop(), Env: w, Mu: &w.mu, Record: &w.rec, Locks: &w.locks, Epochs: &w.epochs,
	})
	w.p.Become(5)
	return w
}

func (w *world) Takes(*rangeapi.Request) (<-chan struct{}, error) {
	if w.gone || !w.p.Leads() {
		return nil, kverror.New(kverror.NotLeader, "")
	}
	return w.waits, nil
}
func (w *world) MayEvaluate() bool { return !w.shut }
func (w *world) Error(k kverror.Kind, detail string) *kverror.Error {
	return kverror.New(k, "%s", detail)
}
func (w *world) Notify() {}
func (w *world) Count(c *Call) {
	w.counted++
	if c.Changes() {
		w.changed++
	}
}
func (w *world) BeginPass(*Pass) {}
func (w *world) NoSpace() error  { return nil }

// Input implements Evaluator: no key may be attached to a lease.
func (w *world) Input(*Pass) eval.Input {
	in := eval.Input{Store: w.store, Floor: w.last, Leases: noLeases{}}
	if w.visit != nil {
		in.Store = visitedStore{w.store, w.visit}
	}
	if w.disk != nil {
		in.Store = slowStore{w.store, w.disk}
	}
	return in
}

// visitedStore tells of the keys that scans visit.
type visitedStore struct {
	memStore
	visit func()
}

func (s visitedStore) Scan(span keyspace.Span, at keyspace.Revision, keysOnly bool, fn func(v *mvcc.Version) error) error {
	return s.memStore.Scan(span, at, keysOnly, func(v *mvcc.Version) error {
		s.visit()
		return fn(v)
	})
}

// slowStore is a store whose lookups wait for the disk.
type slowStore struct {
	memStore
	disk chan struct{}
}

func (s slowStore) Get(key []byte, at keyspace.Revision) (mvcc.Version, bool, error) {
	<-s.disk
	return s.memStore.Get(key, at)
}

func (w *world) AwaitLease(c *Call, _ keyspace.LeaseID, out *Answers) {
	out.Add(c, kverror.LeaseNotFound)
}

func (w *world) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	w.asks = append(w.asks, ask{req, done})
}
func (w *world) SequencerTerm() uint64 { return 0 }

func (w *world) Observe(keyspace.SequenceAnswer) {}

func (w *world) Propose(term uint64, entry []byte, dropped func(error)) error {
	if w.full {
		return raftgroup.ErrFull
	}
	if term != w.p.Term() {
		return raftgroup.ErrNotLeader
	}
	w.log = append(w.log, proposal{term, entry, dropped})
	return nil
}
func (w *world) LeaseHeld(uint64) bool              { return w.lease }
func (w *world) ReadIndex(done func(uint64, error)) { w.reads = append(w.reads, done) }
func (w *world) Wake()                              {}
func (w *world) Committed() raftgroup.Commit        { return w.commit }

// under calls f with mu, and sends its answers.
func (w *world) under(f func(out *Answers)) {
	var out Answers
	w.mu.Lock()
	f(&out)
	w.mu.Unlock()
	w.p.Send(&out)
}

// send admits a request and returns its call.
func (w *world) send(op proto.Message) *Call {
	w.t.Helper()
	return w.sendCtx(context.Background(), op)
}

func (w *world) sendCtx(ctx context.Context, op proto.Message) *Call {
	w.t.Helper()
	return w.sendPermitted(ctx, keyspace.Internal, op)
}

// sendPermitted admits a request with a permit.
func (w *world) sendPermitted(ctx context.Context, permit keyspace.Permit, op proto.Message) *Call {
	w.t.Helper()
	c := NewCall(ctx, &rangeapi.Request{Range: 7, Generation: 1, Permit: permit, Op: op}, (*request)(&w.p), 100)
	if err := w.p.enqueue(c); err != nil {
		w.t.Fatal(err)
	}
	return c
}

// put sends a put and evaluates it.
func (w *world) put(key string) *Call {
	w.t.Helper()
	c := w.send(&pb.PutRequest{Key: []byte(key), Value: []byte("v")})
	w.pass()
	return c
}

// ifMod is a transaction that writes nothing and asks for the revision at which the key changed.
func ifMod(key string, rev keyspace.Revision) *pb.TxnRequest {
	return &pb.TxnRequest{Compare: []*pb.Compare{{
		Key: []byte(key), Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_ModRevision{ModRevision: int64(rev)},
	}}}
}

// see is a transaction that writes nothing and looks whether the key is there.
func see(key string) *pb.TxnRequest {
	return &pb.TxnRequest{Compare: []*pb.Compare{{
		Key: []byte(key), Target: pb.Compare_VERSION, Result: pb.Compare_GREATER, TargetUnion: &pb.Compare_Version{Version: 0},
	}}}
}

// pass evaluates what waits.
func (w *world) pass() {
	if w.p.evaluating {
		return // something happens during an evaluation
	}
	for w.p.evaluatePass(&worker{}) {
	}
}

// settle has the sequencer answer its oldest question, and evaluates what waits then.
func (w *world) settle(err error) {
	w.t.Helper()
	w.sequence(err)
	w.pass()
}

// sequence has the sequencer answer its oldest question.
func (w *world) sequence(err error) {
	w.t.Helper()
	if len(w.asks) == 0 {
		w.t.Fatal("nobody asks for revisions")
	}
	a := w.asks[0]
	w.asks = w.asks[1:]
	answer := keyspace.SequenceAnswer{Err: err, Compacted: -1, Access: w.access}
	if err == nil && a.req.Permit.Ended(w.access) {
		err = kverror.New(kverror.AccessChanged, "at index %d", w.access)
		answer.Err = err
	}
	if err == nil && a.req.Count > 0 {
		answer.First = w.last + 1
		w.last += keyspace.Revision(a.req.Count)
	}
	answer.Current = w.last
	a.done(answer)
}

// apply applies the oldest entry of the log, or makes a no-op of it.
func (w *world) apply(ok bool) {
	w.t.Helper()
	e := w.log[0]
	w.log = w.log[1:]
	h, body, err := command.DecodeHeader(e.entry)
	if err != nil {
		w.t.Fatal(err)
	}
	b, versions, err := command.DecodeBatchHeader(body)
	if err != nil {
		w.t.Fatal(err)
	}
	link := command.Link{Term: h.Term, Number: b.Number}
	w.under(func(out *Answers) {
		if ok = ok && b.Prev == w.rec.Last && b.Hash == w.rec.Hash; ok {
			var items []byte
			items, err = command.VisitBatch(&b, versions, func(_ int, v *mvcc.Version, before command.Prior) error {
				switch {
				case before.Replaced:
				case v.Tombstone && before.Lived:
					w.rec.Live--
				case !v.Tombstone && !before.Lived:
					w.rec.Live++
				}
				w.rec.Hash += mvcc.HashWrite(v)
				w.rec.LastRevision = v.Mod
				if v.Tombstone {
					delete(w.store, string(v.Key))
					return nil
				}
				w.store[string(v.Key)] = mvcc.Version{Key: slices.Clone(v.Key), Mod: v.Mod, Create: v.Create, Version: v.Version, Value: slices.Clone(v.Value)}
				return nil
			})
			w.rec.Hash += markHash * uint64(len(items)/len(markItem))
			w.rec.Last = link
		}
		if own := w.p.Applied(link, ok, out); ok && !own {
			w.epochs.End(w.shared.Cache)
		}
		w.p.Passed(e.term, out)
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.pass()
}

// lose ends the leadership, as the replica does that hears of another leader.
func (w *world) lose() {
	w.under(func(out *Answers) {
		w.locks.DropPending()
		w.p.Lose(out)
		w.p.Refuse(out, kverror.New(kverror.NotLeader, "the leader changed"))
	})
}

// become begins the leadership of a term whose first entry is applied.
func (w *world) become(term uint64) {
	w.under(func(out *Answers) {
		w.p.Become(term)
		w.p.Passed(term, out)
	})
	w.pass()
}

func (c *Call) answered() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// want checks a call's answer: open, no error (nil), or an error of that kind.
func (w *world) want(when string, c *Call, err error) {
	w.t.Helper()
	switch {
	case !c.answered():
		w.t.Errorf("%s: no answer to what is %s", when, c.place)
	case err == nil && c.err != nil, err != nil && !errors.Is(c.err, err):
		w.t.Errorf("%s: the answer is %v, want %v", when, c.err, err)
	}
}

func (w *world) open(when string, c *Call, at place) {
	w.t.Helper()
	if c.answered() || c.place != at {
		w.t.Errorf("%s: the call is %s, want %s", when, c.place, at)
	}
}

// empty checks that the pipeline holds nothing of anybody.
func (w *world) empty() {
	w.t.Helper()
	s := w.p.Status()
	s.Closed, s.Draining = 0, false
	if s != (Status{}) || w.shared.Budget.Pending() != 0 || w.shared.Budget.Ending() != 0 || w.shared.Reads.Held() != 0 || !w.p.Idle() {
		w.t.Errorf("left over: %+v, %d bytes, %d of reads", s, w.shared.Budget.Pending(), w.shared.Reads.Held())
	}
}

// lock puts a lock of a transaction over several ranges on a key.
func (w *world) lock(key string) *command.Lock {
	l := &command.Lock{
		ID: rangeapi.LockID{Range: 7, Term: 1, Number: 1}, Name: rangeapi.TxnName{Attempt: 1}, Anchor: []byte(key), Floor: 1,
		Spans: []command.LockSpan{{Span: keyspace.Single([]byte(key)), Mode: command.Exclusive}},
	}
	w.locks.Apply(&locktable.Change{Added: l}, 0)
	return l
}

func (w *world) unlock(l *command.Lock) { w.locks.Apply(&locktable.Change{Removed: l}, 0) }

// memStore is an applied state without old versions.
type memStore map[string]mvcc.Version

func (s memStore) Get(key []byte, _ keyspace.Revision) (mvcc.Version, bool, error) {
	v, ok := s[string(key)]
	return v, ok, nil
}

func (s memStore) Scan(span keyspace.Span, _ keyspace.Revision, _ bool, fn func(v *mvcc.Version) error) error {
	s = maps.Clone(s) // fn may apply something
	for _, k := range slices.Sorted(maps.Keys(s)) {
		if v := s[k]; span.Contains([]byte(k)) {
			if err := fn(&v); err != nil {
				return err
			}
		}
	}
	return nil
}

func (memStore) Attached(keyspace.LeaseID, keyspace.Span, func([]byte) error) error { return nil }

type noLeases struct{}

func (noLeases) Attachable(keyspace.LeaseID) bool { return false }

const (
	markItem = "item"
	markHash = 11
)

// marker is the operation of a command that adds an item to the entry and needs no evaluation.
type marker struct {
	p                *Pipeline
	undone, answered int
}

func (m *marker) Command() rangeapi.TxnCommand { return &rangeapi.Forget{} }
func (m *marker) Gate(c *Call, _ *Answers) bool {
	m.p.Append(c)
	return true
}
func (m *marker) Evaluate(*Call, *Pass) error         { panic("it is dealt with at the gate") }
func (m *marker) Place(*Call, *Pass, error, *Answers) { panic("it is dealt with at the gate") }
func (m *marker) ItemBytes() int                      { return 10 }
func (m *marker) AppendItem(dst []byte, _ rangeapi.LockID) ([]byte, uint64) {
	return append(dst, markItem...), markHash
}
func (m *marker) Settle(*Call, keyspace.Revision) { panic("it has no writes") }
func (m *marker) Undo(*Call, error, *Answers)     { m.undone++ }
func (m *marker) Answered()                       { m.answered++ }

// mark sends a marker and evaluates it.
func (w *world) mark() (*Call, *marker) {
	w.t.Helper()
	m := &marker{p: &w.p}
	c := NewCall(context.Background(), &rangeapi.Request{Range: 7, Generation: 1}, m, 100)
	if err := w.p.enqueue(c); err != nil {
		w.t.Fatal(err)
	}
	w.pass()
	return c, m
}

const never = keyspace.Revision(math.MaxInt32)
