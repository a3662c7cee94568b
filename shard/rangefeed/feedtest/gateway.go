// Package feedtest has the gateway's end of a stream of feeds in memory, for tests in a
// bubble of testing/synctest.
package feedtest

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// pipeEnd is one end of a stream in memory, each way of which holds one message.
type pipeEnd struct {
	in, out chan []byte
	done    chan struct{}
	once    *sync.Once
}

// newPipe returns both ends.
func newPipe() (near, far *pipeEnd) {
	a, b, done, once := make(chan []byte), make(chan []byte), make(chan struct{}), new(sync.Once)
	return &pipeEnd{a, b, done, once}, &pipeEnd{b, a, done, once}
}

// Send implements transport.Stream.
func (p *pipeEnd) Send(ctx context.Context, b []byte) error {
	select {
	case p.out <- bytes.Clone(b):
		return nil
	case <-p.done:
		return io.EOF
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Recv implements transport.Stream.
func (p *pipeEnd) Recv(ctx context.Context) ([]byte, error) {
	select {
	case b := <-p.in:
		return b, nil
	case <-p.done:
		return nil, io.EOF
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Close implements transport.Stream.
func (p *pipeEnd) Close(error) { p.once.Do(func() { close(p.done) }) }

// Serve serves a stream of feeds as a node does, see rangefeed.Server.Serve.
type Serve func(ctx context.Context, first []byte, st transport.Stream) error

// Gateway is the gateway's end. It takes messages only when the test says so.
type Gateway struct {
	t   testing.TB
	s   *rangeapi.FeedStream
	end *pipeEnd
	wg  sync.WaitGroup
}

// New opens a stream that serve serves. The test must close the Gateway.
func New(t testing.TB, serve Serve) *Gateway {
	t.Helper()
	near, far := newPipe()
	g := &Gateway{t: t, s: rangeapi.NewFeedStream(near), end: near}
	g.wg.Go(func() {
		if err := serve(t.Context(), rangeapi.EncodeOrders(nil), far); err == nil {
			t.Error("the handler ended without a reason")
		}
	})
	return g
}

// Close ends the stream.
func (g *Gateway) Close() {
	g.s.Close()
	g.wg.Wait()
}

// Order sends orders, and returns when the server has taken them: what the test writes next
// comes after them.
func (g *Gateway) Order(orders ...rangeapi.FeedOrder) {
	g.t.Helper()
	if err := g.s.Order(g.t.Context(), orders); err != nil {
		g.t.Fatal(err)
	}
	synctest.Wait()
}

// Message takes the next message, which must not be larger than limit, and returns nil if
// none comes.
func (g *Gateway) Message(limit int) []rangeapi.FeedPart {
	g.t.Helper()
	synctest.Wait()
	select {
	case b := <-g.end.in:
		if len(b) > limit {
			g.t.Errorf("a message of %d bytes, allowed are %d", len(b), limit)
		}
		ps, err := rangeapi.DecodeParts(b)
		if err != nil {
			g.t.Fatal(err)
		}
		return ps
	default:
		return nil
	}
}

// Take takes messages until no more come, and returns them as text, in the order of the
// feeds: these wait for each other in no particular order.
func (g *Gateway) Take() string {
	g.t.Helper()
	var out []string
	for ps := g.Message(1 << 30); ps != nil; ps = g.Message(1 << 30) {
		for i := range ps {
			out = append(out, Describe(&ps[i]))
		}
	}
	slices.SortStableFunc(out, func(a, b string) int { return cmp.Compare(a[0], b[0]) })
	return strings.Join(out, "; ")
}

// Want compares what Take returns.
func (g *Gateway) Want(what, want string) {
	g.t.Helper()
	if got := g.Take(); got != want {
		g.t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// Describe returns a part as text: the feed, its events, and its resolved revision.
func Describe(p *rangeapi.FeedPart) string {
	if p.Err != nil {
		s := fmt.Sprintf("%d ends: %s", p.ID, p.Err.Kind)
		for _, d := range p.Err.Descriptors {
			s += fmt.Sprintf(" %s.%d", d.Range, d.Generation)
		}
		return s
	}
	s := fmt.Sprintf("%d:", p.ID)
	for i := range p.Events {
		e := &p.Events[i]
		s += fmt.Sprintf(" %s@%d", e.Key, e.Mod)
		if e.Tombstone {
			s += "!"
		} else {
			s += "=" + string(e.Value)
		}
		if e.Prev != nil {
			s += fmt.Sprintf("(%s@%d)", e.Prev.Value, e.Prev.Mod)
		}
	}
	return s + fmt.Sprintf(" |%d", p.Resolved)
}
