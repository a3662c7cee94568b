package watch

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
)

// Log is the sequencer's allocation log; placement's client is one.
type Log interface {
	FollowLog(ctx context.Context, known sequencer.LogPosition, take func(*sequencer.LogPart))
}

// Ranges knows the ranges; *router.Router does.
type Ranges interface {
	// Locate returns the ranges that overlap the span, in order and without holes.
	Locate(ctx context.Context, span keyspace.Span) ([]router.Located, error)
	// Learn takes in descriptors from ranges' answers.
	Learn(descs ...keyspace.Descriptor)
	// Directory is the cache behind Locate.
	Directory
}

// Directory finds ranges by their ids.
type Directory interface {
	// SpanOf returns the span of the range at the generation, if it is known. It does not
	// block.
	SpanOf(id keyspace.RangeID, g keyspace.Generation) (keyspace.Span, bool)
	// Refresh loads the range map from placement.
	Refresh(ctx context.Context) error
	// Current asks the sequencer for the current and the compacted revision until ctx ends.
	Current(ctx context.Context) (keyspace.SequenceAnswer, error)
}

// Feeds reaches replicas; ClientFeeds makes one from a *rangeapi.Client.
type Feeds interface {
	OpenFeeds(ctx context.Context, node keyspace.NodeID) (FeedStream, error)
	AwaitResolved(ctx context.Context, node keyspace.NodeID, q *rangeapi.ResolvedRequest) (rangeapi.FeedPosition, error)
	History(ctx context.Context, node keyspace.NodeID, q *rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error)
}

// FeedStream is a stream of feeds from one node; *rangeapi.FeedStream is one.
type FeedStream interface {
	Order(ctx context.Context, orders []rangeapi.FeedOrder) error
	Recv(ctx context.Context) ([]rangeapi.FeedPart, error)
	Close()
}

// ClientFeeds returns the Feeds of a client.
func ClientFeeds(c *rangeapi.Client) Feeds { return clientFeeds{c} }

type clientFeeds struct{ *rangeapi.Client }

func (o clientFeeds) OpenFeeds(ctx context.Context, node keyspace.NodeID) (FeedStream, error) {
	s, err := o.Client.OpenFeeds(ctx, node)
	if err != nil {
		return nil, err // not a typed nil
	}
	return s, nil
}

// Config configures a Hub. Self, Clock, Log, Ranges and Feeds are required.
type Config struct {
	// Self is this node. If it has a replica of a range, that replica feeds the range.
	Self   keyspace.NodeID
	Clock  clock.Clock
	Log    Log
	Ranges Ranges
	Feeds  Feeds
	// Overdue is for how long an allocation may be pending before the range's leader is asked.
	// Default 100 ms. A shorter time asks leaders that are merely busy. A longer one delays
	// watchers when a leader was lost.
	Overdue time.Duration
	// Linger is for how long ranges without watchers are still followed. Default 10 s.
	Linger time.Duration
	// IdleBytes bounds what watchers and their streams take without events. Those beyond it are
	// refused. Default 64 MiB.
	IdleBytes int64
	// RecentBytes bounds the events that are kept for watchers that begin a little in the past.
	// Default 16 MiB.
	RecentBytes int64
	// PendingBytes bounds the events above the frontier. Beyond it watchers go on from history.
	// Default 64 MiB.
	PendingBytes int64
	// WatcherBytes bounds one watcher's queue, and QueuedBytes all queues. A watcher beyond them
	// goes on from history when its queue is empty. One release always fits. Defaults 1 MiB and 64
	// MiB.
	WatcherBytes, QueuedBytes int64
	// HistoryBytes bounds a page of history, over all ranges of a watcher. Default 4 MiB.
	HistoryBytes int64
	// RevisionBytes bounds one revision that is larger than a page, because a watcher gets a
	// revision whole. One at a time may be four times as large; watchers of a larger one are
	// cancelled. Default 64 MiB, for each of the Readers.
	RevisionBytes int64
	// Readers bounds the concurrent reads of history. Default 4.
	Readers int
	Logger  *zap.Logger
	Metrics *Metrics
}

func (c *Config) fill() {
	setDefault(&c.Overdue, 100*time.Millisecond)
	setDefault(&c.Linger, 10*time.Second)
	setDefault(&c.IdleBytes, 64<<20)
	setDefault(&c.RecentBytes, 16<<20)
	setDefault(&c.PendingBytes, 64<<20)
	setDefault(&c.WatcherBytes, 1<<20)
	setDefault(&c.QueuedBytes, 64<<20)
	setDefault(&c.HistoryBytes, 4<<20)
	setDefault(&c.RevisionBytes, 64<<20)
	setDefault(&c.Readers, 4)
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics(nil)
	}
}

func setDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}
