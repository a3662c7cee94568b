package pipeline

import (
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// Operation is what a call does. A client's request is one implementation, which is this
// package's. A command of a transaction over several ranges is the other; the replica brings it.
// All methods but Evaluate and Answered are called with the pipeline's mu.
type Operation interface {
	Course
	Effect
	// Command returns the command, nil for a client's request.
	Command() rangeapi.TxnCommand
}

// Course is an operation's way into a batch.
type Course interface {
	// Gate looks at the locks before the evaluation. dealt says that the call is not to be
	// evaluated: it waits, is answered, or is in the batch.
	Gate(c *Call, out *Answers) (dealt bool)
	// Evaluate finds out what the operation does and answers. It runs without mu.
	Evaluate(c *Call, pass *Pass) error
	// Place puts the evaluated call where it belongs: into the batch, behind what it waits for,
	// or back to its caller. err is Evaluate's. The leadership is that of the evaluation.
	Place(c *Call, pass *Pass, err error, out *Answers)
}

// Effect is what an operation does to the entry of its batch, and what the batch does to it.
type Effect interface {
	// ItemBytes bounds what the operation adds to the entry beside its versions. 0 says that it
	// adds nothing. It is asked once the call is placed.
	ItemBytes() int
	// AppendItem appends what the operation adds. A lock of it gets the id. It returns the sum
	// of the hashes of all that it adds to the range.
	AppendItem(dst []byte, id rangeapi.LockID) ([]byte, uint64)
	// Settle gives an operation with writes its revision.
	Settle(c *Call, rev keyspace.Revision)
	// Undo takes back the effects of Gate and Place outside of the pipeline. err is the reason to discard or refuse the call.
	// It is nil if the call is evaluated again, or was about to be.
	Undo(c *Call, err error, out *Answers)
	// Answered is told before the caller has its answer. It is called without mu.
	Answered()
}

// Pass is one turn of a pipeline in the pool. It is for one goroutine.
type Pass struct {
	// Store is the applied state.
	Store eval.PassStore
	// Evaluation and Budget are those of the call at hand.
	Evaluation eval.Evaluation
	Budget     eval.Budget
	// watched is Store, or what the replica took instead, as the pool watches it.
	watched watchedStore
	// out has the answers that the pass leaves.
	out Answers
}
