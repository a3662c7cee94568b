package shard

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/datadriven"
	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/transport"
)

// pipeEnd is one end of a stream in memory. Its reader may be told to stand still.
type pipeEnd struct {
	in, out chan []byte
	done    chan struct{}
	once    *sync.Once
}

// newPipe returns both ends; each way holds one message.
func newPipe() (near, far *pipeEnd) {
	a, b, done, once := make(chan []byte), make(chan []byte), make(chan struct{}), new(sync.Once)
	return &pipeEnd{a, b, done, once}, &pipeEnd{b, a, done, once}
}

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

func (p *pipeEnd) Close(error) { p.once.Do(func() { close(p.done) }) }

var _ transport.Stream = (*pipeEnd)(nil)

// gateway is the other side of a node's feeds: it notes what comes.
type gateway struct {
	t   *testing.T
	s   *rangeapi.FeedStream
	end *pipeEnd
	wg  sync.WaitGroup
}

func (w *fakeWorld) gateway(t *testing.T) *gateway {
	t.Helper()
	near, far := newPipe()
	g := &gateway{t: t, s: rangeapi.NewFeedStream(near), end: near}
	g.wg.Go(func() {
		if err := w.node.handleFeeds(t.Context(), 9, rangeapi.EncodeOrders(nil), far); err == nil {
			t.Error("the handler ended without a reason")
		}
	})
	return g
}

func (g *gateway) close() {
	g.s.Close()
	g.wg.Wait()
}

func (g *gateway) order(orders ...rangeapi.FeedOrder) {
	g.t.Helper()
	if err := g.s.Order(g.t.Context(), orders); err != nil {
		g.t.Fatal(err)
	}
}

// take returns what comes until nothing more does, as text.
func (g *gateway) take() string {
	g.t.Helper()
	var out []string
	for {
		synctest.Wait()
		select {
		case b := <-g.end.in:
			ps, err := rangeapi.DecodeParts(b)
			if err != nil {
				g.t.Fatal(err)
			}
			for i := range ps {
				out = append(out, describe(&ps[i]))
			}
		default:
			// Feeds wait for each other in no particular order.
			slices.SortStableFunc(out, func(a, b string) int { return cmp.Compare(a[0], b[0]) })
			return strings.Join(out, "; ")
		}
	}
}

func describe(p *rangeapi.FeedPart) string {
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

func (g *gateway) want(what, want string) {
	g.t.Helper()
	if got := g.take(); got != want {
		g.t.Errorf("%s:\n got %s\nwant %s", what, got, want)
	}
}

// begin lets a put be evaluated, sequenced and proposed.
func (w *fakeWorld) begin(t *testing.T, key, value string) (done chan error) {
	t.Helper()
	done = make(chan error, 1)
	go func() {
		_, err := w.node.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: w.node.Replica(1).Descriptor().Generation, Op: &pb.PutRequest{Key: []byte(key), Value: []byte(value)}})
		done <- err
	}()
	synctest.Wait()
	return done
}

// write writes through the pipeline.
func (w *fakeWorld) write(t *testing.T, term uint64, key, value string) {
	t.Helper()
	done := w.begin(t, key, value)
	g := w.groups.group(1)
	if err := g.apply(raftgroup.Entry{Term: term, Data: g.take(0).data}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func splitAt(term uint64, generation keyspace.Generation, key string, child keyspace.RangeID) raftgroup.Entry {
	b := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: term, Generation: generation})
	b = command.AppendSplit(b, &command.Split{Key: []byte(key), Child: child, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
	return raftgroup.Entry{Term: term, Data: b}
}

// fed runs a test with a range that serves in term 5 and whose next revision is 2.
func fed(t *testing.T, test func(t *testing.T, w *fakeWorld)) {
	t.Helper()
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto = true
		w.serve(1, 5)
		test(t, w)
	})
}

func TestFeedBeginsAnywhereAndGoesOn(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for i := range 3 {
			w.write(t, 5, fmt.Sprintf("k%d", i%2), fmt.Sprint(i))
		}
		g := w.gateway(t)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 5}, rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 1, From: 3}, rangeapi.FeedOrder{ID: 3, Range: 1, Generation: 1, From: 3, Prev: true})
		g.want("openings", "1: |4; 2: k1@3=1 k0@4=2 |4; 2: |4; 3: k1@3=1 k0@4=2(0@2) |4; 3: |4")
		w.write(t, 5, "k1", "x")
		g.want("a put", "1: k1@5=x |5; 2: k1@5=x |5; 3: k1@5=x(1@3) |5")
		g.order(rangeapi.FeedOrder{ID: 2, Close: true})
		g.want("an end", "")
		w.write(t, 5, "k2", "y")
		g.want("a put after it", "1: k2@6=y |6; 3: k2@6=y |6")
	})
}

// Trap 51: at a split a feed ends behind the last event before it, and both heirs
// begin there.
func TestFeedEndsAtASplit(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.gateway(t)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2}, rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 2, From: 2}, rangeapi.FeedOrder{ID: 3, Range: 8, Generation: 1})
		g.want("openings", "1: |0; 2 ends: busy 1.1; 3 ends: range not here")
		done := w.begin(t, "x", "1")
		group := w.groups.group(1)
		// One call of Applied brings the event and the split.
		if err := group.apply(raftgroup.Entry{Term: 5, Data: group.take(0).data}, splitAt(5, 1, "m", 2)); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		g.want("a put and a split", "1: x@2=1 |2; 1 ends: wrong range 1.2 2.2")
		g.order(rangeapi.FeedOrder{ID: 4, Range: 1, Generation: 1, From: 3}, rangeapi.FeedOrder{ID: 5, Range: 1, Generation: 2, From: 3}, rangeapi.FeedOrder{ID: 6, Range: 2, Generation: 2, From: 2})
		g.want("the heirs", "4 ends: wrong range 1.2 2.2; 5: |2; 6: x@2=1 |2; 6: |2")
	})
}

// A feed that begins between the writing of a batch and its publication gets it all
// the same.
func TestFeedBeginsBesideAnApply(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.gateway(t)
		defer g.close()
		done := w.begin(t, "k", "1")
		group, r := w.groups.group(1), w.node.Replica(1)
		b := w.engine.NewBatch()
		if err := r.Apply(b, []raftgroup.Entry{{Index: 100, Term: 5, Data: group.take(0).data}}); err != nil {
			t.Fatal(err)
		}
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
		g.want("an opening", "1: |0")
		if err := b.Commit(); err != nil {
			t.Fatal(err)
		}
		r.Applied(raftgroup.Position{Index: 100, Term: 5})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		g.want("the batch", "1: k@2=1 |2; 1: |2")
	})
}

// A gateway that does not take what is sent makes a feed fall behind, whatever comes
// meanwhile; it misses nothing and gets nothing twice.
func TestFeedFallsBehindAndCatchesUp(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		g := w.gateway(t)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
		g.want("an opening", "1: |0")
		value := strings.Repeat("v", 100<<10)
		for range 40 {
			w.write(t, 5, "k", value)
		}
		next, complete := keyspace.Revision(2), keyspace.Revision(0)
		for complete < 60 {
			synctest.Wait()
			b := <-g.end.in
			ps, err := rangeapi.DecodeParts(b)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range ps {
				for _, e := range p.Events {
					if e.Mod != next {
						t.Fatalf("revision %d follows %d", e.Mod, next-1)
					}
					next++
				}
				if p.Resolved >= next || p.Resolved < complete {
					t.Fatalf("complete up to %d behind revision %d and %d", p.Resolved, next-1, complete)
				}
				complete = p.Resolved
			}
			if next < 62 {
				w.write(t, 5, "k", value[:next]) // while it catches up
			}
		}
		if n := testutil.ToFloat64(w.node.metrics.feedsBehind); n == 0 {
			t.Error("the feed has never been behind")
		}
	})
}

// However many feeds are behind, what is read for them and not taken has a bound.
func TestPagesOfFeedsHaveABound(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		const size = 100 << 10
		for range 10 {
			w.write(t, 5, "k", strings.Repeat("v", size))
		}
		g := w.gateway(t)
		defer g.close()
		const feeds = 60
		for i := range rangeapi.FeedID(feeds) {
			g.order(rangeapi.FeedOrder{ID: 1 + i, Range: 1, Generation: 1, From: 2})
		}
		synctest.Wait()
		if n := testutil.ToFloat64(w.node.metrics.historyEvents) * size; n > float64(defaultFeedBounds.conn+4*defaultFeedBounds.page) {
			t.Errorf("%.0f bytes were read for who takes nothing", n)
		}
		if n := strings.Count(g.take(), "@11="); n != feeds {
			t.Errorf("%d of %d feeds got everything", n, feeds)
		}
	})
}

// What compaction may have taken away is not passed over in silence; where nothing was
// written since, nothing is missing.
func TestFeedBelowTheCompactedRevision(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for range 3 {
			w.write(t, 5, "k", "v")
		}
		r := w.node.Replica(1)
		r.mu.Lock()
		r.rec.Compacted = 4
		r.mu.Unlock()
		g := w.gateway(t)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 3}, rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 1, From: 4})
		g.want("openings", "1 ends: compacted; 2: k@4=v |4; 2: |4")
		r.mu.Lock()
		r.rec.Compacted = 40
		r.mu.Unlock()
		g.order(rangeapi.FeedOrder{ID: 3, Range: 1, Generation: 1, From: 5})
		g.want("a quiet range", "3: |4")
		if _, err := r.History(&rangeapi.HistoryRequest{Range: 1, Generation: 1, From: 4, To: 4}); !errors.Is(err, kverror.Compacted) || kverror.Of(err).CompactRevision != 40 {
			t.Errorf("history: %v", err)
		}
	})
}

// A snapshot that leaps makes a feed go on from the store; one that brings another
// generation ends it.
func TestFeedAcrossASnapshot(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "k", "v")
		g, r := w.gateway(t), w.node.Replica(1)
		defer g.close()
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 3})
		g.want("an opening", "1: |2")
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6})
		snap := snapshotOf(1, 1, "")
		rec := command.Record{RangeID: 1, Generation: 1, LastRevision: 9, Counted: true}
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		r.SnapshotDone(snap, nil)
		g.want("a snapshot", "1: |9; 1: |9")
		rec.Generation = 2
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		r.SnapshotDone(snap, nil)
		g.want("another generation", "1 ends: wrong range 1.2")
	})
}

// The tables of a snapshot are in the store a flush before the replica says so. What it lets go
// is not passed over in silence meanwhile.
func TestHistoryBesideASnapshot(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for range 3 {
			w.write(t, 5, "k", "v")
		}
		g, r := w.gateway(t), w.node.Replica(1)
		defer g.close()
		w.groups.group(1).lead(raftgroup.LeaderState{Term: 6})
		snap := snapshotOf(1, 1, "")
		rec := command.Record{RangeID: 1, Generation: 1, LastRevision: 9, Compacted: 8, Counted: true}
		snap.Payload = command.AppendRecord(nil, &rec)
		if err := r.AcceptSnapshot(snap); err != nil {
			t.Fatal(err)
		}
		b, data := w.engine.NewBatch(), engine.VersionedSpan(keyspace.Span{})
		if err := errors.Join(b.DeleteRange(data.Lower, data.Upper), mvcc.Put(b, keyVersion("k", 9, false)), b.SetApplied(r.id.Group(), snap), b.Commit()); err != nil {
			t.Fatal(err)
		}
		if p, err := r.History(&rangeapi.HistoryRequest{Range: 1, Generation: 1, From: 2, To: 4, MaxBytes: 1 << 20}); !errors.Is(err, kverror.Compacted) {
			t.Errorf("history: %+v, %v", p, err)
		}
		g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
		g.want("beside a snapshot", "1 ends: compacted")
		r.SnapshotDone(snap, nil)
		g.order(rangeapi.FeedOrder{ID: 2, Range: 1, Generation: 1, From: 2}, rangeapi.FeedOrder{ID: 3, Range: 1, Generation: 1, From: 9})
		g.want("behind it", "2 ends: compacted; 3: k@9= |9; 3: |9")
	})
}

func TestHistoryWaitsForNobodyButWhoHasSeen(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		for i := range 4 {
			w.write(t, 5, fmt.Sprintf("k%d", i), "v")
		}
		c := w.node.Client()
		ask := func(q rangeapi.HistoryRequest) (*rangeapi.HistoryPage, error) {
			q.Range, q.MaxBytes = 1, 1<<20
			return c.History(t.Context(), 1, &q)
		}
		p, err := ask(rangeapi.HistoryRequest{Generation: 1, Span: keyspace.Span{Start: []byte("k1"), End: []byte("k3")}, From: 2, To: 9, Seen: rangeapi.FeedPosition{Term: 5, Number: 4}})
		if err != nil || len(p.Events) != 2 || p.Next != 10 || string(p.Events[0].Key) != "k1" {
			t.Errorf("%+v, %v", p, err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 1, From: 2, To: 9, Seen: rangeapi.FeedPosition{Term: 5, Number: 5}}); !errors.Is(err, kverror.Busy) {
			t.Errorf("a replica that lags: %v", err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 2, From: 2, To: 9}); !errors.Is(err, kverror.Busy) {
			t.Errorf("a later generation: %v", err)
		}
		if err := w.groups.group(1).apply(splitAt(5, 1, "m", 2)); err != nil {
			t.Fatal(err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 1, From: 2, To: 9}); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("an earlier generation: %v", err)
		}
		if _, err := ask(rangeapi.HistoryRequest{Generation: 2, From: 2, To: 9}); !errors.Is(err, kverror.WrongRange) {
			t.Errorf("more than the range has: %v", err)
		}
		if _, err := c.AwaitResolved(t.Context(), 1, &rangeapi.ResolvedRequest{Range: 77}); !errors.Is(err, kverror.RangeNotHere) {
			t.Errorf("no such range: %v", err)
		}
	})
}

// watch are the commands of what gateways ask.
func (s *story) watch(t *testing.T, d *datadriven.TestData, id keyspace.RangeID) string {
	t.Helper()
	if s.gateway == nil {
		s.gateway = s.w.gateway(t)
	}
	gen := arg(d, "gen", keyspace.Generation(1))
	switch d.Cmd {
	case "feed":
		s.gateway.order(rangeapi.FeedOrder{
			ID: rangeapi.FeedID(arg(d, "id", 0)), Range: id, Generation: gen, From: arg(d, "from", keyspace.Revision(0)), Prev: d.HasArg("prev"),
		})
	case "complete":
		q := &rangeapi.ResolvedRequest{Range: id, Generation: gen, Revision: arg(d, "rev", keyspace.Revision(0))}
		s.begin(func(ctx context.Context) string {
			mark, err := s.w.node.Client().AwaitResolved(ctx, 1, q)
			if err != nil {
				return formatAnswer(nil, err)
			}
			return fmt.Sprintf("complete up to %d behind batch %d of term %d", q.Revision, mark.Number, mark.Term)
		})
	case "history":
		q := &rangeapi.HistoryRequest{Range: id, Generation: gen, From: arg(d, "from", keyspace.Revision(0)), To: arg(d, "to", keyspace.Revision(0)), MaxBytes: 1 << 20}
		q.Span = s.w.node.Replica(id).Descriptor().Span
		p, err := s.w.node.Client().History(t.Context(), 1, q)
		if err != nil {
			return formatAnswer(nil, err) + "\n"
		}
		part := rangeapi.FeedPart{Events: p.Events, Resolved: p.Next - 1}
		return describe(&part)[2:] + "\n"
	}
	if out := s.gateway.take(); out != "" {
		return strings.ReplaceAll(out, "; ", "\n") + "\n"
	}
	return ""
}

// A transaction's version that lands below what a feed has read from the store by then is
// not missed, whenever it lands; and nobody is told that all is there before it has come
// (traps 51 and 64).
func TestFeedThatIsBehindMissesNoLateVersion(t *testing.T) {
	for messages := range 12 { // that the gateway takes before it lands
		fed(t, func(t *testing.T, w *fakeWorld) {
			w.write(t, 5, "a", "1")
			w.step(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
			w.seq.mu.Lock()
			w.seq.last++ // revision 3 is the transaction's
			w.seq.mu.Unlock()
			for range 14 {
				w.write(t, 5, "v", strings.Repeat("v", 100<<10))
			}
			g := w.gateway(t)
			defer g.close()
			g.order(rangeapi.FeedOrder{ID: 1, Range: 1, Generation: 1, From: 2})
			seen := map[keyspace.Revision]bool{}
			take := func() bool {
				synctest.Wait()
				var b []byte
				select {
				case b = <-g.end.in:
				default:
					return false
				}
				ps, err := rangeapi.DecodeParts(b)
				if err != nil {
					t.Fatal(err)
				}
				for _, p := range ps {
					for _, e := range p.Events {
						seen[e.Mod] = true
					}
					if !seen[3] && (p.Resolved >= 3 || p.Position.Number >= 17) {
						t.Fatalf("complete up to %d behind batch %d, and revision 3 has not come", p.Resolved, p.Position.Number)
					}
				}
				return true
			}
			for range messages {
				take()
			}
			if a := w.step(t.Context(), &rangeapi.Resolve{Name: nameAged(1), Revision: 3}); !a.done || a.err != nil {
				t.Fatalf("%+v", a)
			}
			for more := true; more; {
				more = take()
			}
			for rev := keyspace.Revision(2); rev <= 17; rev++ {
				if !seen[rev] {
					t.Errorf("with %d messages before it: revision %d has not come", messages, rev)
				}
			}
		})
	}
}

// The child of a split that has taken no batch yet has events in its past, which a feed has to
// bring; the mark of a leader's answer is not to be one that who has none of them is at.
func TestAFreshChildHasAMark(t *testing.T) {
	fed(t, func(t *testing.T, w *fakeWorld) {
		w.write(t, 5, "z", "1")
		split := make(chan error, 1)
		go func() {
			_, err := w.node.Replica(1).Split(t.Context(), 1, []byte("m"))
			split <- err
		}()
		synctest.Wait()
		w.applyNext(t, 5)
		if err := <-split; err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.serve(2, 5)
		synctest.Wait()
		var last keyspace.Revision = 2
		mark, err := w.node.Client().AwaitResolved(t.Context(), 1, &rangeapi.ResolvedRequest{Range: 2, Generation: 2, Revision: last})
		if err != nil {
			t.Fatal(err)
		}
		if (rangeapi.FeedPosition{}).Reaches(mark) {
			t.Errorf("who has nothing of the child reaches %v", mark)
		}
	})
}
