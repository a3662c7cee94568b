package router

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
)

// Ranges reaches the replicas of ranges; *rangeapi.Client is one.
type Ranges interface {
	// Do sends a request to the replica of its range on a node.
	Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error)
}

// Sequencer asks for the current revision; placement's client is one.
type Sequencer interface {
	// Sequence calls done exactly once, after less time than a request has.
	Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer))
}

// Placement is the placement group's part in requests; placement's client is one.
type Placement interface {
	// RangeMap returns the descriptors of all ranges.
	RangeMap(ctx context.Context) ([]keyspace.Descriptor, error)
	// Compact commits the cluster's compacted revision. It returns the current
	// revision.
	Compact(ctx context.Context, rev keyspace.Revision) (keyspace.Revision, error)
}

// Removal waits for what compaction takes away; node makes one of the ranges' client.
type Removal interface {
	// AwaitRemoval returns nil once every replica that lives has removed what compaction
	// at the committed compacted revision lets go, and an error when ctx ends before.
	AwaitRemoval(ctx context.Context, compacted keyspace.Revision) error
}

// Config is what a Router is made of.
type Config struct {
	// Self is this node: of several replicas that could be asked its own goes first. Boot
	// is its present run.
	Self      keyspace.NodeID
	Boot      keyspace.BootID
	Clock     clock.Clock
	Ranges    Ranges
	Sequencer Sequencer
	Placement Placement
	// Local reads from this node's own replicas; nil where serializable reads are like
	// others.
	Local   Local
	Removal Removal
	// Txns and Bus are for transactions over several ranges.
	Txns TxnCommands
	Bus  Bus
	// Timeout is how long a request is worked on at most, etcd's 5 s plus two election
	// timeouts. Default 7 s. What is not answered by then gets etcd's timeout error.
	Timeout time.Duration
	// AttemptTimeout is after how long without an answer a read looks whether the
	// asked node still lives, and asks another one if not. Writes are never asked
	// twice for that. Default 1 s.
	AttemptTimeout time.Duration
	// Alive says whether a node lives as far as this one knows. Required.
	Alive func(keyspace.NodeID) bool
	// ReadBytes bounds the answers to reads of spans that are being put together or
	// streamed, those of transactions over several ranges too, all together. One at a time
	// may be larger than half of it or exceed it; more are refused with TooManyRequests.
	// Default 256 MiB.
	ReadBytes int64
	// AnswerBytes bounds that one: what is larger gets AnswerTooLarge. Default 512 MiB.
	AnswerBytes int64
	// TxnBytes bounds the transactions over several ranges that are under way; more are
	// refused with TooManyRequests. One alone always fits. Default 64 MiB.
	TxnBytes int64
	Logger   *zap.Logger
	Metrics  *Metrics
}
