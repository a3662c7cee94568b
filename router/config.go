package router

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// Ranges reaches the replicas of ranges; *rangeapi.Client is one.
type Ranges interface {
	// Do sends a request to the replica of its range on a node.
	Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error)
}

// Starter begins changes at replicas of this node; *shard.Store is one.
type Starter interface {
	// Start begins a change. answered is called once, from any goroutine, when the answer or an error is there; it must not
	// block. wait returns that; it waits if it is called before, no longer than ctx lasts. Start returns nil where nothing has
	// happened: Ranges.Do serves what has to wait, or is refused.
	Start(ctx context.Context, req *rangeapi.Request, answered func(ok bool)) (wait func() (*rangeapi.Response, error))
}

// Sequencer asks for the current revision; placement's client is one.
type Sequencer interface {
	// Sequence calls done exactly once, within a request's time.
	Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer))
}

// Placement is the part of the placement group that requests need; placement's client is one.
type Placement interface {
	// RangeMap returns the descriptors of all ranges.
	RangeMap(ctx context.Context) ([]keyspace.Descriptor, error)
	// Compact commits the cluster's compacted revision. It returns the current
	// revision.
	Compact(ctx context.Context, rev keyspace.Revision) (keyspace.Revision, error)
}

// Removal waits for the removal of compacted versions; node makes one from the ranges' client.
type Removal interface {
	// AwaitRemoval returns nil once every live replica has removed what compaction at the committed
	// compacted revision removes, and an error if ctx ends before.
	AwaitRemoval(ctx context.Context, compacted keyspace.Revision) error
}

// Config configures a Router.
type Config struct {
	// Self is this node, whose replica is asked before others. Boot is its present run.
	Self      keyspace.NodeID
	Boot      keyspace.BootID
	Clock     clock.Clock
	Ranges    Ranges
	Sequencer Sequencer
	Placement Placement
	// Local reads from this node's own replicas. Nil makes serializable reads linearizable.
	Local Local
	// Starter begins changes of ranges that are led here. Nil begins none: Start returns nil.
	Starter Starter
	Removal Removal
	// Hashes is for HashKV.
	Hashes Hashes
	// Cuts is for ReadCut.
	Cuts Cuts
	// Loads is for loads of a new cluster.
	Loads Loads
	// Txns and Bus are for transactions over several ranges.
	Txns TxnCommands
	Bus  Bus
	// Timeout bounds the work on a request: etcd's 5 s plus two election timeouts. Default 7 s. A
	// request beyond it gets etcd's timeout error.
	Timeout time.Duration
	// AttemptTimeout is after how long without an answer a read checks whether the asked node is
	// alive, and asks another one if not. A write is not asked twice for that. Default 1 s.
	AttemptTimeout time.Duration
	// Alive says whether this node considers a node alive. Required.
	Alive func(keyspace.NodeID) bool
	// Answers bounds all answers of spans that are put together or streamed, also those of
	// transactions over several ranges. An answer waits for memory; one that is larger than the
	// budget's reserve gets AnswerTooLarge. Default 256 MiB, and 512 MiB for one.
	Answers *budget.Bytes
	// TxnBytes bounds the transactions over several ranges that are under way. More wait. Default
	// 64 MiB.
	TxnBytes int64
	// Traces says that some requests ask for a record of each range.
	Traces  bool
	Logger  *zap.Logger
	Metrics *Metrics
}
