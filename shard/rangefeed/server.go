package rangefeed

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// bounds are bounds of feeds, in bytes. A feed queues at most queue, or one block that is
// larger, and holds at most page of history, or one event that is larger. All feeds of a
// gateway queue at most conn, beside one block each, and hold as much history, beside one
// page. A message holds at most message, with the versions before its events, or one event
// that is larger.
type bounds struct{ queue, conn, page, message int64 }

var defaultBounds = bounds{queue: 1 << 20, conn: 8 << 20, page: 512 << 10, message: 256 << 10}

// failedEvery is how often at most a node logs that it could not send feeds.
const failedEvery = 10 * time.Second

// Config is what a Server is made of. All fields are required.
type Config struct {
	Clock  clock.Clock
	Engine *engine.Engine
	// Find returns the feeds of a range's replica on this node, or a kverror why there are
	// none.
	Find    func(keyspace.RangeID) (*Feeds, error)
	Log     *zap.Logger
	Metrics *Metrics
}

// Server serves the feeds of a node's ranges to gateways.
type Server struct {
	cfg    Config
	bounds bounds
	// failedAt is when the server last logged that it could not send feeds, 0 never.
	failedAt atomic.Int64
}

// NewServer returns a server.
func NewServer(cfg Config) *Server { return &Server{cfg: cfg, bounds: defaultBounds} }

// Serve serves one gateway's stream of feeds until ctx or the stream ends. first is the
// gateway's first message. The error is never nil.
func (s *Server) Serve(ctx context.Context, peer keyspace.NodeID, first []byte, st transport.Stream) error {
	c := &conn{s: s, st: st, feeds: make(map[rangeapi.FeedID]*feed), wakeSend: wake.New(), wakeRead: wake.New()}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		if err := c.send(ctx); err != nil && ctx.Err() == nil {
			s.failed(peer, err)
		}
	})
	wg.Go(func() { c.read(ctx) })
	err := c.obey(ctx, first)
	cancel()
	c.close()
	wg.Wait()
	return err
}

// failed notes that feeds could not be sent to a gateway, which opens all of them anew. If
// a message was too large, that repeats for ever.
func (s *Server) failed(peer keyspace.NodeID, err error) {
	if errors.Is(err, transport.ErrTooLarge) {
		s.cfg.Metrics.tooLarge.Inc()
	}
	s.cfg.Metrics.failed.Inc()
	last, now := s.failedAt.Load(), int64(s.cfg.Clock.Now())
	if last != 0 && now-last < int64(failedEvery) || !s.failedAt.CompareAndSwap(last, now) {
		return
	}
	s.cfg.Log.Warn("cannot send feeds", zap.Stringer("peer", peer), zap.Error(err))
}
