package pipeline

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
)

// Env is what a pipeline needs of its replica.
type Env interface {
	Range
	Evaluator
	Sequencer
	Log
}

// Range is the range as its pipeline sees it. All methods are called with mu.
type Range interface {
	// Takes says whether the range serves the request. wait is closed when the answer may have
	// changed; it is nil where the request may go into the pipeline now.
	Takes(req *rangeapi.Request) (wait <-chan struct{}, err error)
	// MayEvaluate says whether calls may be evaluated: the range is not being changed itself.
	MayEvaluate() bool
	// Error returns an error with what helps the router: the range's descriptor and leader.
	Error(k kverror.Kind, detail string) *kverror.Error
	// Notify wakes those who wait for the pipeline to close, or for a change of the range.
	Notify()
	// Count counts a call that goes into a batch, once.
	Count(c *Call)
}

// Evaluator brings what an evaluation starts from.
type Evaluator interface {
	// BeginPass fills in the pass's store, with mu.
	BeginPass(pass *Pass)
	// Input returns what an evaluation starts from, without what is the pipeline's or the
	// call's. It is called without mu.
	Input(pass *Pass) eval.Input
	// NoSpace says why puts are refused, nil if they are not.
	NoSpace() error
	// AwaitLease lets a call wait until keys may be attached to the lease, with mu.
	AwaitLease(c *Call, lease keyspace.LeaseID, out *Answers)
}

// Sequencer allocates revisions. Its methods are called without mu.
type Sequencer interface {
	// Sequence asks for req.Count consecutive revisions, or with Count 0 for the current one.
	// done is called exactly once, from any goroutine or within the call.
	Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer))
	// Observe hears each answer first.
	Observe(a keyspace.SequenceAnswer)
	// SequencerTerm returns the highest term of a sequencer that the node has heard of.
	SequencerTerm() uint64
}

// Log is the range's raft group. Its methods but Committed are called without mu.
type Log interface {
	// Propose is as raftgroup.Group.Propose.
	Propose(term uint64, entry []byte, dropped func(error)) error
	// LeaseHeld says whether the lease of the term holds now.
	LeaseHeld(term uint64) bool
	// ReadIndex is as raftgroup.Group.ReadIndex.
	ReadIndex(done func(index uint64, err error))
	// Wake wakes the group if it sleeps.
	Wake()
	// Committed says how the entries that were applied last went through the log. It is called in Applied alone.
	Committed() raftgroup.Commit
}

// Limits bound a pipeline. All are set.
type Limits struct {
	// RangePendingBytes bounds the calls of one range that wait for evaluation. Budget bounds
	// those of the node.
	RangePendingBytes int64
	// BatchRequests and MaxEntryBytes bound the calls and the bytes of one batch. The latter
	// also bounds what one call may write.
	BatchRequests, MaxEntryBytes int
	// InflightBatches bounds the proposed and not yet applied batches of a range.
	InflightBatches int
	// EvaluateTurn is about how long a pass evaluates.
	EvaluateTurn time.Duration
	// FateTimeout is how long a write whose leader was lost waits for the log to tell its fate.
	FateTimeout time.Duration
}

// Shared is what the pipelines of one node share.
type Shared struct {
	Limits  Limits
	Pool    *Pool
	Budget  *Budget
	Reads   *eval.ReadLimit
	Cache   *eval.VersionCache
	Metrics *Metrics
	// Epoch is a stopwatch from which the readings of all pipelines count.
	Epoch clock.Stopwatch
	// After calls f in a goroutine of its own once d has passed, unless the node stops before.
	After func(d time.Duration, f func())
}

// Config is what a pipeline is made of. All fields are required.
type Config struct {
	Shared *Shared
	Range  keyspace.RangeID
	Log    *zap.Logger
	Env    Env
	// Mu guards the pipeline and what the fields below point to: the range's applied record,
	// the locks of transactions, and what the node's version cache knows of the range.
	Mu     *sync.Mutex
	Record *command.Record
	Locks  *locktable.Table
	Epochs *eval.KeyEpochs
}

// Pipeline carries the operations of one range. Run, Start, Wait, Send and Evaluation are called without
// mu, Schedule either way, all other methods with it.
type Pipeline struct {
	shared *Shared
	id     keyspace.RangeID
	log    *zap.Logger
	env    Env
	mu     *sync.Mutex

	// Everything below is guarded by mu.

	rec    *command.Record
	locks  *locktable.Table
	epochs *eval.KeyEpochs

	// lead is set while the range's replica leads, has applied an entry of its term, and may
	// evaluate and propose.
	lead *leadership
	// closed counts the reasons to evaluate nothing; draining is the one that never
	// ends: the node stops.
	closed   int
	draining bool

	// queue holds the calls that wait for evaluation.
	queue      []*Call
	queueBytes int64
	// barrier is a call that was put back too often: nothing that came after it is
	// evaluated before it.
	barrier    *Call
	evaluating bool
	overlay    *eval.Overlay
	// counts are true together with what the version cache has under the epochs.
	counts eval.SpanCounts

	// filling collects evaluated calls. sequencing is the one batch that awaits revisions or is
	// being proposed. Raft has the proposed ones, oldest first. lost are batches of a former
	// leadership: the log decides their fate. batches counts all.
	batches    uint64
	filling    *batch
	sequencing *batch
	proposed   []*batch
	lost       []*batch
	// now is the newest reading of the clock that somebody took with mu, since the epoch. All who change places of calls
	// use it: a request costs no reading of its own.
	now time.Duration
	// access is the highest access index that the sequencer has named to the range.
	access keyspace.AccessIndex
	// confirming counts the answers that wait for a confirmation of the leadership.
	confirming int
	mutated    mutationState //nolint:unused // used with the build tag planted
}

// Init prepares a pipeline. Mu need not be held.
func (p *Pipeline) Init(c Config) {
	*p = Pipeline{
		shared: c.Shared, id: c.Range, log: c.Log, env: c.Env, mu: c.Mu,
		rec: c.Record, locks: c.Locks, epochs: c.Epochs, overlay: eval.NewOverlay(),
	}
}

// read takes over a reading of the clock.
func (p *Pipeline) read(at time.Duration) { p.now = max(p.now, at) }

// Schedule has the pool evaluate what waits. Mu may be held.
func (p *Pipeline) Schedule() { p.shared.Pool.schedule(p) }

// Leads says whether the replica leads, has applied an entry of its term, and may evaluate and
// propose.
func (p *Pipeline) Leads() bool { return p.lead != nil }

// Term returns the term in which the replica leads as Leads says, 0 if it does not.
func (p *Pipeline) Term() uint64 {
	if p.lead == nil {
		return 0
	}
	return p.lead.term
}

// Close keeps calls from evaluation until Reopen. Batches under way go on; once Idle is true
// they are over. The pipeline notifies the replica when that may be.
func (p *Pipeline) Close() { p.closed++ }

// Reopen ends a Close.
func (p *Pipeline) Reopen() { p.closed-- }

// Closed says whether the pipeline is closed, and not for good.
func (p *Pipeline) Closed() bool { return p.closed > 0 }

// Drain closes the pipeline for good: what waits, and what comes, is refused.
func (p *Pipeline) Drain() { p.draining = true }

// Draining says whether the pipeline is closed for good.
func (p *Pipeline) Draining() bool { return p.draining }

// Idle says whether nothing is being evaluated, has or awaits revisions, or waits for a
// confirmation.
func (p *Pipeline) Idle() bool {
	return !p.evaluating && !p.underWay() && p.confirming == 0
}

// underWay says whether there are batches that are not applied.
func (p *Pipeline) underWay() bool {
	return p.filling != nil || p.sequencing != nil || len(p.proposed) > 0
}

// Waits says whether a call waits for evaluation.
func (p *Pipeline) Waits() bool { return len(p.queue) > 0 || p.locks.HasWoken() }

// NewestBatch returns the newest batch with a change of the span that is, or may turn out to be,
// at or below the revision; nil if there is none.
func (p *Pipeline) NewestBatch(s keyspace.Span, at keyspace.Revision) *eval.Batch {
	return p.overlay.NewestBatch(s, at)
}

// MayAppear says whether a batch under way may still bring a version at or below a revision that
// was allocated before the question. It returns nil if none may, else a channel that is closed
// when the batch in question has ended.
func (p *Pipeline) MayAppear(rev keyspace.Revision) <-chan struct{} {
	// The filling batch asks for its revisions later, and gets higher ones. The one that is
	// being sequenced may have got its own already, from this sequencer or the one before,
	// unless its floor shows that the revision was known when it was evaluated.
	if b := p.sequencing; b != nil && !b.settled && b.txns > 0 && b.floor < rev {
		return b.Ended()
	}
	for i := len(p.proposed) - 1; i >= 0; i-- {
		if b := p.proposed[i]; b.txns > 0 && b.first <= rev {
			return b.Ended()
		}
	}
	return nil
}

// Sequencing says whether a batch is being sequenced.
func (p *Pipeline) Sequencing() bool { return p.sequencing != nil }

// LowestFloor returns the floor of the batch that is being sequenced, or rev if that is lower.
func (p *Pipeline) LowestFloor(rev keyspace.Revision) keyspace.Revision {
	if b := p.sequencing; b != nil && b.txns > 0 {
		return min(rev, b.floor)
	}
	return rev
}

// Status is what a pipeline holds.
type Status struct {
	// Queued calls wait for evaluation, QueuedBytes is what they take.
	Queued      int
	QueuedBytes int64
	OverlayKeys int
	// Filling counts the calls of the batch that fills.
	Filling    int
	Sequencing bool
	// Proposed and Lost count batches: those in the log's hands, and those of former
	// leaderships whose fate is unknown.
	Proposed, Lost int
	// Confirming counts answers that wait for a confirmation of the leadership.
	Confirming int
	// Closed counts the reasons to evaluate nothing.
	Closed   int
	Draining bool
}

// Status returns what the pipeline holds.
func (p *Pipeline) Status() Status {
	s := Status{
		Queued: len(p.queue), QueuedBytes: p.queueBytes, OverlayKeys: p.overlay.Len(), Sequencing: p.sequencing != nil,
		Proposed: len(p.proposed), Lost: len(p.lost), Confirming: p.confirming, Closed: p.closed, Draining: p.draining,
	}
	if p.filling != nil {
		s.Filling = len(p.filling.calls)
	}
	return s
}

// newLeadership is a leadership of the term that builds on what is applied here.
func (p *Pipeline) newLeadership(term uint64) *leadership {
	return &leadership{term: term, last: p.rec.Last, hash: p.rec.Hash, revision: p.rec.LastRevision}
}

// Become starts a leadership: everything that earlier leaders committed is applied here, so
// that the last applied batch is the one to build on.
func (p *Pipeline) Become(term uint64) {
	p.lead = p.newLeadership(term)
	p.overlay = eval.NewOverlay()
	p.mutateKept()
}

// Rebase has the leadership, if there is one, build on the record as it is now. The pipeline is
// empty: a change of the range itself was applied.
func (p *Pipeline) Rebase() {
	old := p.lead
	if old == nil {
		return
	}
	if p.underWay() {
		panic(fmt.Sprintf("pipeline: range %s changes with %d batches under way", p.id, len(p.proposed)))
	}
	p.lead = p.newLeadership(old.term)
	p.lead.number, p.lead.revision = old.number, max(old.revision, p.rec.LastRevision)
}
