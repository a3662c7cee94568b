package conformance

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// pause lets etcd's unsynced watchers become synced, which etcd checks ten times a
// second. Only then does it send progress.
type pause struct{}

// TestWatchStories are requests to streams of watchers, with calls between them; both
// stores must send the same.
func TestWatchStories(t *testing.T) {
	t.Parallel()
	p := newPair(t, 1)
	// Each story starts at the revision that it finds, whichever stories came before.
	for i, s := range watchStories {
		t.Run(s.name, func(t *testing.T) {
			w, err := p.watch(t.Context(), i%skeinNodes)
			if err != nil {
				t.Fatal(err)
			}
			defer w.close()
			p.watchStory(t, w, s.calls(p.source.revision), i)
		})
	}
}

func (p *pair) watchStory(t *testing.T, w *watchers, calls []any, gateway int) {
	t.Helper()
	for i, op := range calls {
		var err error
		switch o := op.(type) {
		case split:
			p.splits.split([]byte(o))
			err = p.splits.wait()
		case pause:
			if err = w.settle(); err == nil {
				time.Sleep(300 * time.Millisecond)
			}
		case *pb.WatchRequest:
			if err = w.send(o); err == nil {
				err = w.settle()
			}
		case proto.Message:
			err = p.step(t.Context(), &call{kind: kindOf(t, o), request: o}, (gateway+i)%skeinNodes)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.settle(); err != nil {
		t.Error(err)
	}
}

func wcr(key, end string, change func(*pb.WatchCreateRequest)) *pb.WatchRequest {
	r := &pb.WatchCreateRequest{Key: []byte(key), RangeEnd: []byte(end)}
	if change != nil {
		change(r)
	}
	return create(r)
}

func from(rev int64) func(*pb.WatchCreateRequest) {
	return func(r *pb.WatchCreateRequest) { r.StartRevision = rev }
}

func withID(id int64) func(*pb.WatchCreateRequest) {
	return func(r *pb.WatchCreateRequest) { r.WatchId = id }
}

func withPrev(rev int64) func(*pb.WatchCreateRequest) {
	return func(r *pb.WatchCreateRequest) { r.PrevKv, r.StartRevision = true, rev }
}

var watchStories = []struct {
	name  string
	calls func(rev int64) []any
}{
	{"one key, a prefix, everything", func(int64) []any {
		return []any{
			wcr("a", "", nil), wcr("a", "b", nil), wcr("", fromKey, nil), wcr("\x00", fromKey, nil), wcr("b", fromKey, nil),
			put("a", "1"), put("ab", "1"), put("b", "1"), del("a", ""), del("a", ""), del("a", "c"), put("a", "2"), then(put("a", "3"), put("c", "1"), del("ab", "")),
		}
	}},
	{"what is not made", func(int64) []any {
		return []any{
			wcr("b", "a", nil), wcr("a", "a", nil), wcr("a", "", from(-1)), wcr("a", "", from(-7)), wcr("b", "a", from(-1)),
			wcr("a", "", withID(5)), wcr("b", "", withID(5)), wcr("b", "a", withID(5)), wcr("a", "", withID(1)), wcr("a", "", nil), wcr("a", "", nil),
			cancelWatch(77), cancelWatch(5), cancelWatch(5), wcr("a", "", withID(5)), put("a", "1"),
			&pb.WatchRequest{}, create(nil), &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{}}, put("a", "2"),
		}
	}},
	{"starts in the past and in the future", func(rev int64) []any {
		return []any{
			put("a", "1"), put("b", "1"), put("a", "2"), del("b", ""), then(put("a", "3"), put("b", "2")),
			wcr("a", "c", from(1)), wcr("a", "c", from(rev+2)), wcr("a", "", from(rev+5)), wcr("a", "c", from(rev+6)), wcr("a", "c", from(rev+9)),
			put("a", "4"), put("b", "3"), put("a", "5"), put("b", "4"), put("a", "6"),
		}
	}},
	{"the version before", func(rev int64) []any {
		return []any{
			put("p", "1"), put("p", "2"), del("p", ""), put("p", "3"), put("q", "1"),
			wcr("p", "r", withPrev(rev+1)), wcr("p", "r", nil), wcr("p", "", withPrev(0)),
			put("p", "4"), del("p", "r"), put("q", "2"), then(put("p", "5"), put("q", "3")),
		}
	}},
	{"filters", func(rev int64) []any {
		filter := func(fs ...pb.WatchCreateRequest_FilterType) func(*pb.WatchCreateRequest) {
			return func(r *pb.WatchCreateRequest) { r.Filters = fs }
		}
		return []any{
			wcr("f", "g", filter(pb.WatchCreateRequest_NOPUT)), wcr("f", "g", filter(pb.WatchCreateRequest_NODELETE)),
			wcr("f", "g", filter(pb.WatchCreateRequest_NODELETE, pb.WatchCreateRequest_NOPUT)),
			wcr("f", "g", func(r *pb.WatchCreateRequest) {
				r.StartRevision, r.Filters = rev, []pb.WatchCreateRequest_FilterType{pb.WatchCreateRequest_NOPUT}
			}),
			put("f", "1"), put("fa", "1"), del("f", ""), then(put("f", "2"), del("fa", "")), del("f", "g"),
		}
	}},
	{"progress", func(rev int64) []any {
		return []any{
			progress(), wcr("a", "b", nil),
			pause{},
			progress(), put("a", "1"),
			pause{},
			progress(), put("z", "1"),
			pause{},
			progress(),
			wcr("a", "b", from(1)),
			pause{},
			progress(), wcr("a", "b", from(rev+30)),
			pause{},
			progress(),
		}
	}},
	{"over a split", func(rev int64) []any {
		return []any{
			wcr("", fromKey, nil), put("m1", "1"), split("m5"), put("m7", "1"), put("m1", "2"), split("m2"), put("m3", "1"), put("m7", "2"),
			wcr("m", "n", from(rev+1)), wcr("m7", "", withPrev(rev+1)), del("m7", ""), put("m1", "3"),
		}
	}},
	{"compacted", func(rev int64) []any {
		return []any{
			put("m1", "1"), put("m7", "1"), del("m1", ""), put("m7", "2"), compact(rev + 3),
			wcr("m", "n", from(rev+1)), wcr("m", "n", withPrev(rev+2)), wcr("m1", "", withPrev(rev+3)), wcr("m", "n", withPrev(rev+4)),
			put("m7", "3"), cancelWatch(0), wcr("m7", "", withID(1)), cancelWatch(1), wcr("m7", "", withID(1)), put("m7", "4"),
		}
	}},
	{"the version before what is compacted, remembered", func(rev int64) []any {
		return []any{
			wcr("u", "v", withPrev(0)), put("u1", "1"), put("u1", "2"), put("u1", "3"), compact(rev + 2),
			wcr("u", "v", withPrev(rev+2)), wcr("u1", "", withPrev(rev+3)), put("u1", "4"),
		}
	}},
	{"one key more than once in a transaction", func(rev int64) []any {
		return []any{
			wcr("t", "u", withPrev(0)), put("t1", "1"),
			then(del("t1", ""), del("t1", "t2")), put("t1", "4"), then(then(put("t1", "5")), get("t1", "")), then(get("t1", ""), then(del("t1", ""))),
			then(put("t3", "1"), then(put("t2", "1"), del("t1", ""))), wcr("t", "u", withPrev(rev+1)),
		}
	}},
	{"compacted at a revision that has one key twice", func(rev int64) []any {
		return []any{
			put("v1", "1"), then(then(put("v1", "2"), put("v2", "1")), then(del("v1", ""))), put("v1", "3"),
			&pb.CompactionRequest{Revision: rev + 2, Physical: true},
			wcr("v", "w", from(rev+2)), wcr("v1", "", withPrev(rev+2)), wcr("v", "w", from(rev+3)), put("v1", "4"),
		}
	}},
	{"a revision in two fragments", func(rev int64) []any {
		most, half := strings.Repeat("x", 1<<20), strings.Repeat("y", 700<<10)
		return []any{
			put("g1", most), then(put("g2", half), put("g3", half)),
			wcr("g", "h", func(r *pb.WatchCreateRequest) { r.Fragment, r.StartRevision = true, rev+1 }), del("g", "h"),
		}
	}},
	{"one key put and deleted in a transaction", func(rev int64) []any {
		only := func(f pb.WatchCreateRequest_FilterType, rev int64) func(*pb.WatchCreateRequest) {
			return func(r *pb.WatchCreateRequest) {
				r.PrevKv, r.StartRevision, r.Filters = true, rev, []pb.WatchCreateRequest_FilterType{f}
			}
		}
		twice := func() []any {
			return []any{
				put("y1", "1"), put("y3", "1"),
				then(then(put("y1", "2"), put("y2", "1"), put("y5", "1")), get("y", "z"), then(del("y1", ""), del("y2", "y3")), put("y4", "1")),
				put("y1", "3"), then(del("y1", fromKey), put("y3", "4"), put("y1", "4"), put("y0", "1"), get("y", "z")),
				then(del("y1", fromKey), put("y1", "5"), put("y7", "5"), del("y1", fromKey)), get("y", "z"),
				then(put("y7", "6"), del("y1", fromKey)), then(then(put("y1", "6")), then(then(del("y", "z")))), get("\x00", fromKey),
			}
		}
		calls := []any{
			wcr("y", "z", withPrev(0)), wcr("y", "z", nil), wcr("y1", "", withPrev(0)),
			wcr("y", "z", only(pb.WatchCreateRequest_NOPUT, 0)), wcr("y", "z", only(pb.WatchCreateRequest_NODELETE, 0)),
		}
		calls = append(append(append(calls, twice()...), split("y2"), split("y4")), twice()...)
		return append(calls,
			wcr("y", "z", withPrev(rev+1)), wcr("y1", "", from(rev+1)), wcr("y", "z", from(rev+5)),
			wcr("y", "z", only(pb.WatchCreateRequest_NOPUT, rev+1)), wcr("y", "z", only(pb.WatchCreateRequest_NODELETE, rev+1)))
	}},
	{"fragments", func(int64) []any {
		big := strings.Repeat("x", 1<<20)
		return []any{
			put("g1", big), put("g2", big), put("g3", big),
			wcr("g", "h", func(r *pb.WatchCreateRequest) { r.Fragment = true }), wcr("g", "h", nil),
			del("g", "h"), put("g1", big), wcr("g", "h", func(r *pb.WatchCreateRequest) { r.Fragment, r.PrevKv = true, true }),
			put("g1", big), del("g", "h"),
		}
	}},
}

// TestLockstepWatches makes generated calls beside a stream of watchers whose requests
// are generated too. Skein's watchers must receive what etcd's receive.
func TestLockstepWatches(t *testing.T) {
	t.Parallel()
	overSeeds(t, (*pair).lockstepWatches, func(*testing.T, *pair) {}, false)
}

// watchersPerStream is after how many requests a new stream replaces the old one.
const watchersPerStream = 20

func (p *pair) lockstepWatches(ctx context.Context, calls, every int) error {
	all := make([]*watchers, len(p.skein.conns))
	defer func() {
		for _, w := range all {
			if w != nil {
				w.close()
			}
		}
	}()
	for i := range calls {
		if i >= calls/8 && i%every == 0 {
			p.splits.split(p.source.splitKey())
		}
		if err := p.watchTurn(ctx, i, all); err != nil {
			return fmt.Errorf("call %d: %w", p.calls, err)
		}
	}
	if err := settleAll(all); err != nil {
		return fmt.Errorf("behind the last call: %w", err)
	}
	return p.splits.wait()
}

// settleAll settles all streams.
func settleAll(all []*watchers) error {
	for i, w := range all {
		if w == nil {
			continue
		}
		if err := w.settle(); err != nil {
			return fmt.Errorf("at node %d: %w", i+1, err)
		}
	}
	return nil
}

// watchTurn does the next thing: a request to one of the streams, of which each node
// has one, or a call.
func (p *pair) watchTurn(ctx context.Context, i int, all []*watchers) (err error) {
	node := p.source.IntN(len(all))
	switch {
	case all[node] == nil:
		if all[node], err = p.watch(ctx, node); err == nil {
			all[node].etcd.once, all[node].skein.once = true, true
		}
		return err
	case p.source.chance(12):
		if err := p.watchCall(all[node]); err != nil {
			return fmt.Errorf("at node %d: %w", node+1, err)
		}
		if len(all[node].requests) >= watchersPerStream {
			all[node].close()
			all[node] = nil
		}
		return nil
	case i%40 == 39:
		return settleAll(all)
	}
	c := p.source.next()
	if c.kind.name == "Compact" {
		// A watcher receives late events without the previous version.
		if err := settleAll(all); err != nil {
			return err
		}
	}
	return p.step(ctx, c, node)
}

// watchCall sends the next request of a stream.
func (p *pair) watchCall(w *watchers) error {
	p.calls++
	p.outcomes["Watch: OK"]++
	if len(w.requests) > 3 && p.source.chance(12) && w.tellsProgress() {
		return errors.Join(w.settle(), w.progress(p.source.revision))
	}
	r := p.source.watchRequest()
	if r.GetCancelRequest() != nil {
		if err := w.settle(); err != nil { // events that it has not received yet may be left out
			return err
		}
	}
	if err := w.send(r); err != nil {
		return err
	}
	return w.settle()
}

// TestWritesTwice are transactions that write a key more than once, and similar ones
// that do not.
func TestWritesTwice(t *testing.T) {
	for _, c := range []struct {
		name  string
		txn   *pb.TxnRequest
		twice bool
	}{
		{"all deleted, one of them put", then(del("\x00", fromKey), put("e", "1"), get("e", ""), del("e1", "")), true},
		{"put within, all deleted", then(then(put("a2", "1")), del("\x00", fromKey)), true},
		{"one put, those above it deleted", then(put("a", "1"), del("b", fromKey)), false},
		{"put within, then deleted within", then(then(put("a", "1")), then(del("a", "b"))), true},
		{"put within, another one deleted within", then(then(put("b", "1")), then(del("a", "b"))), false},
		{"put and deleted far within", then(then(then(put("a", "1"))), put("b", "1"), then(then(del("a", "")))), true},
		{"put or deleted", &pb.TxnRequest{Success: then(put("a", "1")).Success, Failure: then(del("a", "")).Success}, false},
		{"deleted twice", then(del("a", ""), del("a", fromKey), then(del("a", "b"))), false},
		{"a span that holds nothing", then(del("b", "a"), put("a1", "1")), false},
	} {
		if got := writesTwice(c.txn); got != c.twice {
			t.Errorf("%s: %v, want %v", c.name, got, c.twice)
		}
	}
}

// watchRequest returns a request for a stream of watchers.
func (s *source) watchRequest() *pb.WatchRequest {
	if s.chance(5) {
		return cancelWatch(int64(s.IntN(12)))
	}
	r := &pb.WatchCreateRequest{}
	r.Key, r.RangeEnd = s.anySpan(s.group())
	switch s.IntN(4) {
	case 0:
		r.StartRevision = s.someRevision()
	case 1:
		r.StartRevision = s.revision + int64(s.IntN(8)) - 3
	}
	r.PrevKv, r.Fragment = s.chance(2), s.chance(4)
	r.ProgressNotify = s.chance(4) // after ten minutes
	for s.chance(6) {
		r.Filters = append(r.Filters, pb.WatchCreateRequest_FilterType(s.IntN(2)))
	}
	if s.chance(3) {
		r.WatchId = int64(s.IntN(12))
	}
	switch s.IntN(40) {
	case 0:
		r.Key = nil
	case 1:
		r.WatchId = pick(s, []int64{-1, -2, 1 << 40, math.MaxInt64})
	case 2:
		r.Filters = append(r.Filters, pb.WatchCreateRequest_FilterType(pick(s, []int32{2, -1})))
	}
	return create(r)
}
