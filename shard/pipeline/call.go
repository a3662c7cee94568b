package pipeline

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/locktable"
)

// CallOverheadBytes is about what a call takes beside its request.
const CallOverheadBytes = 1 << 10

// Call is one operation that goes through a pipeline, and the caller's wait for it. Its fields
// are guarded by the pipeline's mu.
type Call struct {
	ctx context.Context //nolint:containedctx // it is the request's, looked at once before evaluation
	// Req is the client's request. That of a command has no Op.
	Req *rangeapi.Request
	op  Operation
	// bytes is what the call holds of the byte budgets until it is answered.
	bytes int64

	// place is where the call is, and at the batch that it is with there, if any. moveTo alone
	// sets them.
	place place
	// marks say what has been done with the call.
	marks marks
	// stage is where its time goes.
	stage stages.Stage
	// waits counts how often the call was put back.
	waits uint8
	// ticket is its number among those that had to wait for a lock, 0 before.
	ticket uint32
	at     *batch

	// The result of the evaluation. A call without writes changes nothing.
	txn    *eval.PendingTxn
	writes []*eval.PendingVersion
	draft  eval.Draft
	// fail is the refusal that is held back like an answer.
	fail error
	// future is the explicit revision that the range had not heard of, 0 if none. The
	// call is evaluated again once its place is known to be at or above it.
	future keyspace.Revision
	// current and compacted are what the sequencer said when it was asked for this
	// call alone.
	current, compacted keyspace.Revision
	// seen is the newest batch of which the evaluation saw a version, and its own batch once that is proposed.
	seen *eval.Batch

	// met is the lock for which it waited last, nil for none or for the registration of a lease.
	met *command.Lock

	// lost says that the call was proposed by a leadership that ended.
	lost atomic.Bool
	// times say where its time went.
	times callTimes
	// Lacks is a lease that was not there when the call asked for it, 0 for none. The next
	// evaluation knows of it.
	Lacks keyspace.LeaseID
	// err is why the draft is not the answer. Both count once done is closed.
	err  error
	done chan struct{}
	// onAnswer, if not nil, is called once done is closed: nobody waits for the call.
	onAnswer func(ok bool)
}

// marks are a set. A field for each would make each call larger.
type marks uint8

const (
	// wasAsked: it wants only the current revision before it is evaluated.
	wasAsked marks = 1 << iota
	// wasCounted: it may be evaluated again, and is one request.
	wasCounted
)

// A Call waits in the lock table of its pipeline.
var _ locktable.Waiter = (*Call)(nil)

// NewCall returns a call of an operation that holds so many bytes until it is answered.
func NewCall(ctx context.Context, req *rangeapi.Request, op Operation, bytes int64) *Call {
	return &Call{ctx: ctx, Req: req, op: op, bytes: bytes, done: make(chan struct{})}
}

// come notes when the call came, by a stopwatch that was started then.
func (c *Call) come(p *Pipeline, watch clock.Stopwatch) {
	c.stage, c.times.since = stages.Queued, inMicros(watch.After(p.shared.Epoch))
}

// Asks implements locktable.Waiter.
func (c *Call) Asks() (proto.Message, rangeapi.TxnCommand) { return c.Req.Op, c.op.Command() }

// Bytes implements locktable.Waiter.
func (c *Call) Bytes() int64 { return c.bytes }

// Ticket implements locktable.Waiter.
func (c *Call) Ticket() *uint32 { return &c.ticket }

// Operation returns what the call does.
func (c *Call) Operation() Operation { return c.op }

// Changes says whether the call writes versions of its own.
func (c *Call) Changes() bool { return len(c.writes) > 0 }

// TakeWrites makes the writes of an evaluation those of the call.
func (c *Call) TakeWrites(e *eval.Evaluation) {
	if c.writes = e.Writes(); len(c.writes) > 0 {
		c.txn = e.Txn()
	}
}

// evaluated says whether the call is what it is known to be: not one that only asks for the current revision first.
func (c *Call) evaluated() bool {
	return c.draft.Op != nil || c.fail != nil || c.Changes() || c.op.Command() != nil
}

// endsLocks says whether the call is a command that others may be waiting for.
func (c *Call) endsLocks() bool {
	cmd := c.op.Command()
	return cmd != nil && rangeapi.EndsLocks(cmd)
}

// answer returns what the call was answered with.
func (c *Call) answer() (*rangeapi.Response, error) {
	if c.err != nil {
		return nil, c.err
	}
	return &rangeapi.Response{Op: c.draft.Op}, nil
}

// place is where a call is. It is in exactly one place at any time.
type place uint8

const (
	// placeCaller is before its admission.
	placeCaller place = iota
	placeQueue
	placeEvaluation
	// placeParked is with a batch for whose revisions it waits, to be evaluated again.
	placeParked
	// placeBlocked is with a lock for whose end it waits, to be evaluated again.
	placeBlocked
	// placeBatch is in a batch that fills, is sequenced, proposed or lost. Once the batch is
	// settled only calls with writes or items are there.
	placeBatch
	// placeHeld is with a batch whose writes it has seen, until they are applied.
	placeHeld
	// placeConfirming waits for a confirmation of the leadership.
	placeConfirming
	placeAnswered
)

// placeMoves says from where a call may go where.
var placeMoves = [...][]place{
	placeCaller:     {placeQueue},
	placeQueue:      {placeEvaluation, placeAnswered},
	placeEvaluation: {placeQueue, placeParked, placeBlocked, placeBatch, placeConfirming, placeAnswered},
	placeParked:     {placeQueue, placeAnswered},
	placeBlocked:    {placeQueue, placeEvaluation, placeAnswered},
	placeBatch:      {placeQueue, placeHeld, placeConfirming, placeAnswered},
	placeHeld:       {placeConfirming, placeAnswered},
	placeConfirming: {placeAnswered},
	placeAnswered:   {},
}

func (p place) String() string {
	return [...]string{
		"with its caller", "queued", "in evaluation", "parked", "blocked", "in a batch", "held", "confirming", "answered",
	}[p]
}

// moveTo takes the call from where it is to p, with batch b where p is with one.
func (c *Call) moveTo(p place, b *batch) {
	if !slices.Contains(placeMoves[c.place], p) {
		panic(fmt.Sprintf("pipeline: a %T that is %s (%s) goes to be %s (%s)", c.Req.Op, c.place, c.at, p, b))
	}
	c.place, c.at = p, b
}

// isAt asserts that the call is in the place with the batch where it was found.
func (c *Call) isAt(p place, b *batch) {
	if c.place != p || c.at != b {
		panic(fmt.Sprintf("pipeline: a %T found %s (%s) is %s (%s)", c.Req.Op, p, b, c.place, c.at))
	}
}

// callTimes is what a call remembers of its stages. It is small, since each call has it.
type callTimes struct {
	// since is when the present stage began, in microseconds since the epoch modulo 2^32: 71 minutes.
	since uint32
	// micros are what the stages up to Revision took. After those a call has one stage more.
	micros [stages.Revision + 1]uint32
}

func inMicros(at time.Duration) uint32 { return uint32(at / time.Microsecond) }

// enter ends the present stage of the call and begins another. A reading from before the stage began counts as its
// begin: calls share readings, and those who take them do not take turns.
func (c *Call) enter(s stages.Stage, at time.Duration) {
	c.spend(at)
	c.stage = s
}

func (c *Call) spend(at time.Duration) {
	t, now := &c.times, inMicros(at)
	if int32(now-t.since) <= 0 {
		return
	}
	slot := c.stage
	switch {
	case slot == stages.Held:
		slot = stages.Parked
	case slot > stages.Revision:
		slot = stages.Batch // it is evaluated again: others of its batch were not permitted
	}
	t.micros[slot] += now - t.since
	t.since = now
}
