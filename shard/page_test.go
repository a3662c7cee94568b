package shard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/eval"
)

// filled applies entries of one term to the range of a world and makes it lead there.
func (w *fakeWorld) filled(ents ...raftgroup.Entry) *fakeGroup {
	w.t.Helper()
	g := w.groups.group(1)
	g.lead(raftgroup.LeaderState{Term: 5, Leader: 1, LeaderNode: 1, IsLeader: true})
	for _, e := range append([]raftgroup.Entry{{Term: 5}}, ents...) {
		if err := g.apply(e); err != nil {
			w.t.Fatal(err)
		}
	}
	g.lead(raftgroup.LeaderState{Term: 5, Leader: 1, LeaderNode: 1, IsLeader: true, Ready: true})
	return g
}

// pages reads a request page by page through the wire's forms and puts it together.
func (w *fakeWorld) pages(at keyspace.Revision, req *pb.RangeRequest, maxBytes int) (*pb.RangeResponse, int, error) {
	w.t.Helper()
	out := &pb.RangeResponse{}
	req = proto.CloneOf(req)
	limited := req.Limit > 0
	for n := 1; ; n++ {
		b, err := rangeapi.AppendPageRequest(nil, &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: at}, &rangeapi.Page{RangeRequest: req, MaxBytes: maxBytes, WithCount: true})
		if err != nil {
			w.t.Fatal(err)
		}
		if b, err = w.store.handlePage(context.Background(), 2, b); err != nil {
			w.t.Fatal(err)
		}
		a, failed, err := rangeapi.DecodePageAnswer(b)
		if err != nil {
			w.t.Fatal(err)
		}
		if failed != nil {
			return nil, n, failed
		}
		if int64(len(a.Keys)) > int64(maxBytes) && a.N > 1 {
			w.t.Fatalf("%d keys of %d bytes in a page of %d", a.N, len(a.Keys), maxBytes)
		}
		kvs, err := rangeapi.DecodeKeys(a.Keys, a.N)
		if err != nil {
			w.t.Fatal(err)
		}
		var plain pb.RangeResponse
		if err := proto.Unmarshal(a.Keys, &plain); err != nil || !proto.Equal(&pb.RangeResponse{Kvs: kvs}, &plain) {
			w.t.Fatalf("decoded as %v, by protobuf as %v, %v", kvs, &plain, err)
		}
		if n == 1 {
			out.Count, out.Header = a.Count, a.Header
		}
		out.Kvs = append(out.Kvs, kvs...)
		if req.Limit > 0 {
			req.Limit -= a.N
		}
		if out.More = a.More; len(a.Next) == 0 || limited && req.Limit == 0 {
			return out, n, nil
		}
		req.Key = a.Next
	}
}

// Pages of any size add up to the answer of the range: with filters, with limits, at old
// revisions, with the count of all keys.
func TestPagesAreTheRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		rng := rand.New(rand.NewPCG(1, 1))
		var ents []raftgroup.Entry
		lives := map[string]bool{}
		for range 60 {
			keys := make([]string, 1+rng.IntN(4))
			for i := range keys {
				// A key lives or does not: the log's writer counts no key twice.
				k := strings.Repeat(string(rune('a'+rng.IntN(20))), 1+rng.IntN(3))
				if keys[i] = k; lives[k] {
					keys[i] = "-" + k
				}
				lives[k] = !lives[k]
			}
			ents = append(ents, l.batch(5, 1, keys...))
		}
		w.filled(ents...)
		w.seq.last = l.rev
		for range 400 {
			req := &pb.RangeRequest{Key: []byte{byte('a' + rng.IntN(20))}, RangeEnd: []byte{byte('a' + rng.IntN(22))}, KeysOnly: rng.IntN(3) == 0}
			if rng.IntN(3) == 0 {
				req.Key, req.RangeEnd = []byte{0}, []byte{0}
			}
			if rng.IntN(2) == 0 {
				req.Revision = 1 + rng.Int64N(int64(l.rev))
			}
			if rng.IntN(2) == 0 {
				req.Limit = 1 + rng.Int64N(12)
			}
			if rng.IntN(3) == 0 {
				req.MinModRevision, req.MaxCreateRevision = rng.Int64N(int64(l.rev)), rng.Int64N(int64(l.rev))
			}
			p, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: l.rev, Op: proto.CloneOf(req)})
			if err != nil {
				t.Fatal(err)
			}
			want := p.Op.(*pb.RangeResponse)
			got, n, err := w.pages(l.rev, req, 1+rng.IntN(200))
			if err != nil || !proto.Equal(got, want) {
				t.Fatalf("%v in %d pages: %v\n got %v\nwant %v", req, n, err, got, want)
			}
		}
		if _, _, err := w.pages(l.rev, &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("z"), Revision: int64(l.rev) + 1}, 10); !errors.Is(err, kverror.FutureRevision) {
			t.Errorf("in the future: %v", err)
		}
		for _, p := range []*rangeapi.Page{
			{MaxBytes: 1},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b")}, MaxBytes: rangeapi.MaxPageBytes + 1},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b"), SortOrder: pb.RangeRequest_DESCEND}, MaxBytes: 1},
			{RangeRequest: &pb.RangeRequest{Key: []byte("a"), RangeEnd: []byte("b"), CountOnly: true}, MaxBytes: 1},
		} {
			if _, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: l.rev, Op: p}); !errors.Is(err, kverror.BadRequest) {
				t.Errorf("%+v: %v", p, err)
			}
		}
	})
}

// Paging at an old revision counts once, whether the client's pages are read whole or
// in smaller ones: what is behind each page is what was known less its keys.
func TestClientPagesAreCountedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		var ents []raftgroup.Entry
		for i := range 100 {
			ents = append(ents, l.batch(5, 1, fmt.Sprintf("k%03d", i)))
		}
		old := l.rev
		for range 2 * eval.MaxCountChanges {
			ents = append(ents, l.batch(5, 1, "z", "-z"))
		}
		w.filled(ents...)
		w.seq.last = l.rev
		req := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l"), Limit: 7, Revision: int64(old)}
		for left := int64(100); left > 0; left -= 7 {
			got, _, err := w.pages(l.rev, req, 90)
			if err != nil || got.Count != left || got.More != (left > 7) {
				t.Fatalf("%d keys are left: %v, %v", left, got, err)
			}
			req.Key = keyspace.Next(got.Kvs[len(got.Kvs)-1].Key)
		}
		if n := testutil.ToFloat64(w.store.metrics.reads.CountScans); n != 1 {
			t.Errorf("%v counts, want 1", n)
		}
	})
}

// An answer that is better read by pages is refused as such; the last keys of many are
// no such answer, and cost no more than they are.
func TestLargeAnswersAreReadByPages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorldWith(t, Limits{AnswerBytes: 100, ScanBytes: 20 * 165, ReadBytes: 1 << 20})
		defer w.stop()
		var l logWriter
		l.rev = 1
		var ents []raftgroup.Entry
		for i := range 200 {
			ents = append(ents, l.batch(5, 1, fmt.Sprintf("k%03d", i)))
		}
		w.filled(ents...)
		read := func(req *pb.RangeRequest) (*pb.RangeResponse, error) {
			req.Key, req.RangeEnd = []byte{0}, []byte{0}
			p, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: l.rev, Op: req})
			if err != nil {
				return nil, err
			}
			return p.Op.(*pb.RangeResponse), nil
		}
		for _, req := range []*pb.RangeRequest{{}, {Limit: 30}, {SortOrder: pb.RangeRequest_DESCEND}, {SortTarget: pb.RangeRequest_MOD, SortOrder: pb.RangeRequest_ASCEND, Limit: 1}} {
			if _, err := read(req); !errors.Is(err, kverror.ReadByPages) {
				t.Errorf("%v: %v", req, err)
			}
		}
		resp, err := read(&pb.RangeRequest{SortOrder: pb.RangeRequest_DESCEND, Limit: 3})
		if err != nil || len(resp.Kvs) != 3 || string(resp.Kvs[0].Key) != "k199" || string(resp.Kvs[2].Key) != "k197" || !resp.More || resp.Count != 200 {
			t.Errorf("the last three: %v, %v", resp, err)
		}
		resp, err = read(&pb.RangeRequest{MinModRevision: int64(l.rev) - 1})
		if err != nil || len(resp.Kvs) != 2 || resp.More || resp.Count != 200 {
			t.Errorf("by a filter: %v, %v", resp, err)
		}
		if got := w.store.reads.Held(); got != 0 {
			t.Errorf("%d bytes are held", got)
		}
	})
}
