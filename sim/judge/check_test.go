package judge

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// script makes histories by hand. It runs the operations on its model, so they are
// right; a test then corrupts one of them.
type script struct {
	h     *History
	now   *Model
	past  map[int64]*Model
	disks []Version
	// at is the time of the next call or answer.
	at time.Duration
}

func newScript() *script {
	s := &script{h: &History{}, now: NewModel(), past: map[int64]*Model{}}
	s.now.past = func(rev int64) *Model {
		for ; s.past[rev] == nil; rev-- {
		}
		return s.past[rev]
	}
	s.past[1] = s.now
	return s
}

// call begins an operation. answer runs it now and ends it.
func (s *script) call(req proto.Message) *Op { return s.h.Begin(0, 1, req, s.at) }

func (s *script) answer(o *Op) *Op {
	s.h.End(o, s.apply(o.Request), nil, false, s.at)
	return o
}

// apply runs a request at the next revision, or at the present one if it changes
// nothing.
func (s *script) apply(req proto.Message) proto.Message {
	rev := s.now.rev + 1
	resp, next, events := s.now.Run(req, rev)
	if next == s.now {
		resp, _ = s.now.apply(req, s.now.rev)
		return resp
	}
	for i, v := range events {
		v.Sub = uint32(i)
		s.disks = append(s.disks, v)
	}
	s.now, s.past[rev] = next, next
	return resp
}

func (s *script) do(req proto.Message) *Op { return s.answer(s.call(req)) }

// lose ends an operation without an answer. made says that it took effect.
func (s *script) lose(o *Op, made bool) *Op {
	if made {
		s.apply(o.Request)
	}
	s.h.End(o, nil, kverror.Timeout, false, s.at)
	return o
}

func (s *script) report() *Evidence { return &Evidence{History: s.h, Versions: s.disks} }

func put(key, value string) *pb.PutRequest {
	return &pb.PutRequest{Key: []byte(key), Value: []byte(value), PrevKv: true}
}

func get(key string) *pb.RangeRequest { return &pb.RangeRequest{Key: []byte(key)} }

func del(key string) *pb.DeleteRangeRequest { return &pb.DeleteRangeRequest{Key: []byte(key)} }

func everything() *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}
}

func putOp(key string, value []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(key), Value: value}}}
}

func rangeOp(r *pb.RangeRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
}

func deleteOp(key string, prev bool) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte(key), PrevKv: prev}}}
}

func casOf(key, old, value string) *pb.TxnRequest {
	return &pb.TxnRequest{
		Compare: []*pb.Compare{{Key: []byte(key), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte(old)}}},
		Success: []*pb.RequestOp{putOp(key, []byte(value))},
		Failure: []*pb.RequestOp{rangeOp(get(key))},
	}
}

// writtenTwice is a transaction that writes its keys more than once.
func writtenTwice(value string) *pb.TxnRequest {
	return &pb.TxnRequest{Success: []*pb.RequestOp{
		deleteOp("r0", true), putOp("r1", []byte(value)), putOp("r0", []byte(value+"'")), deleteOp("r1", false), rangeOp(everything()), deleteOp("r0", true),
	}}
}

// good is a history with everything that a checker must accept: overlapping operations,
// lost answers with and without effect, refusals, reads of the past.
func good() *script {
	s := newScript()
	s.do(put("c0", "1"))
	a, b := s.call(put("c0", "2")), s.call(get("c0"))
	s.answer(a)
	s.answer(b)
	s.lose(s.call(put("c1", "3")), true)
	s.lose(s.call(put("c1", "4")), false)
	s.lose(s.call(del("c0")), true)
	s.lose(s.call(del("c0")), true)
	s.do(put("c0", "5"))
	s.do(casOf("c0", "5", "6"))
	s.do(casOf("c0", "5", "7"))
	s.do(everything())
	s.do(put("r0", "r"))
	s.do(writtenTwice("t"))
	s.lose(s.call(writtenTwice("u")), true)
	old := everything()
	old.Revision = 3
	s.do(old)
	s.do(del("c9"))
	s.do(&pb.DeleteRangeRequest{Key: []byte("c"), RangeEnd: []byte("d"), PrevKv: true})
	refused := s.call(put("c2", "8"))
	s.h.End(refused, nil, kverror.TooManyRequests, false, 0)
	for i := range 40 {
		s.do(put("l0", fmt.Sprint("x", i)))
	}
	s.do(everything())
	return s
}

func TestGoodHistoryPasses(t *testing.T) {
	r := good().report()
	if bad := Check(r); len(bad) != 0 {
		t.Fatalf("%s", strings.Join(bad, "\n"))
	}
	p, _ := checkReplay(r.History.Ops(), r.Versions, nil)
	if len(p.ops) < 50 || len(p.revs) < 45 {
		t.Fatalf("%d operations at %d revisions were judged", len(p.ops), len(p.revs))
	}
}

// TestBadHistoriesFail corrupts the good history in one way each, and names the check
// that must report it.
func TestBadHistoriesFail(t *testing.T) {
	for _, c := range []struct {
		name, by string
		spoil    func(s *script)
	}{
		{"a stale read", "linearizability", func(s *script) {
			o := s.do(get("l0"))
			s.do(put("l0", "new"))
			again := s.do(get("l0"))
			again.Response = o.Response
		}},
		{"a stale read that lies about its revision", "replay", func(s *script) {
			o := s.do(get("l0"))
			s.do(put("l0", "new"))
			again := s.do(get("l0"))
			rev := again.Revision()
			again.Response = proto.Clone(o.Response)
			setRevision(again.Response, rev)
		}},
		{"a revision that steps back", "real time", func(s *script) {
			o := s.do(get("c9"))
			s.do(put("l0", "new"))
			again := s.do(get("c9"))
			again.Response = o.Response
		}},
		{"two changes with one revision", "real time", func(s *script) {
			a := s.do(put("l0", "a"))
			b := s.do(put("u0", "b"))
			setRevision(b.Response, a.Revision())
		}},
		{"a write that is answered and lost", "replay", func(s *script) {
			s.do(put("u0", "a"))
			s.disks = s.disks[:len(s.disks)-1]
		}},
		{"a write that is replaced and lost", "replay", func(s *script) {
			s.do(writtenTwice("a"))
			s.disks = slices.Delete(s.disks, len(s.disks)-3, len(s.disks)-2)
		}},
		{"a write of unknown fate that is replaced and lost", "replay", func(s *script) {
			s.lose(s.call(writtenTwice("a")), true)
			s.disks = slices.Delete(s.disks, len(s.disks)-4, len(s.disks)-3)
		}},
		{"writes of one key in another order", "replay", func(s *script) {
			s.do(writtenTwice("a"))
			a, b := &s.disks[len(s.disks)-1], &s.disks[len(s.disks)-3]
			a.Sub, b.Sub = b.Sub, a.Sub
		}},
		{"a write that is answered and lost, and read", "linearizability", func(s *script) {
			s.do(put("u0", "a"))
			o := s.do(get("u0"))
			o.Response.(*pb.RangeResponse).Kvs, o.Response.(*pb.RangeResponse).Count = nil, 0
		}},
		{"a write that was refused and is there", "replay", func(s *script) {
			o := s.call(put("u0", "a"))
			s.apply(o.Request)
			s.h.End(o, nil, kverror.NoLeader, false, 0)
		}},
		{"a write that is applied twice", "applied twice", func(s *script) {
			o := s.call(del("u0"))
			s.do(put("u0", "a"))
			s.apply(o.Request)
			s.do(put("u0", "b"))
			s.lose(o, true)
		}},
		{"an event from before its operation began", "replay", func(s *script) {
			s.apply(put("u0", "a"))
			s.do(put("u1", "b"))
			s.lose(s.call(put("u0", "a")), false)
		}},
		{"an event that nobody asked for", "nobody asked", func(s *script) {
			s.apply(put("u0", "a"))
		}},
		{"a wrong previous value", "replay", func(s *script) {
			o := s.do(put("l0", "new"))
			o.Response.(*pb.PutResponse).PrevKv.Version++
		}},
		{"a compare that came out wrong", "linearizability", func(s *script) {
			s.do(put("u0", "a"))
			o := s.do(casOf("u0", "b", "c"))
			o.Response.(*pb.TxnResponse).Succeeded = true
			o.Response.(*pb.TxnResponse).Responses = []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{}}}}
		}},
		{"a range that is torn", "replay", func(s *script) {
			before := s.do(everything())
			s.do(&pb.TxnRequest{Success: []*pb.RequestOp{putOp("u0", []byte("a")), putOp("u1", []byte("b"))}})
			o := s.do(everything())
			kvs := o.Response.(*pb.RangeResponse).Kvs
			o.Response.(*pb.RangeResponse).Kvs = kvs[:len(kvs)-1]
			_ = before
		}},
		{"a wrong count", "replay", func(s *script) {
			o := s.do(everything())
			o.Response.(*pb.RangeResponse).Count++
		}},
		{"a revision that bears nothing", "gaps", func(s *script) {
			s.now = &Model{rev: s.now.rev + 1, keys: s.now.keys, past: s.now.past}
			s.past[s.now.rev] = s.now
			s.do(put("u0", "a"))
		}},
		{"a read of what was compacted", "compaction", func(s *script) {
			s.do(&pb.CompactionRequest{Revision: 4})
			old := everything()
			old.Revision = 3
			s.do(old)
		}},
		{"a refusal of what nobody has compacted", "compaction", func(s *script) {
			s.do(&pb.CompactionRequest{Revision: 3})
			old := everything()
			old.Revision = 3
			s.h.End(s.call(old), nil, kverror.Compacted, false, 0)
		}},
		{"too many unknown", "definite", func(s *script) {
			for i := range 30 {
				s.lose(s.call(put("u0", fmt.Sprint("?", i))), false)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := good()
			c.spoil(s)
			r := s.report()
			found, p := checkAnswers(r)
			bad := strings.Join(append(found, checkOrder(r, p)...), "\n")
			if !strings.Contains(bad, c.by) {
				t.Fatalf("no %q in the findings:\n%s", c.by, bad)
			}
			if len(Check(r)) == 0 {
				t.Error("the run passes")
			}
		})
	}
}

// TestWindowsOrderInRealTime: the replay passes, because each answer fits its revision,
// but the operation that returned first has the later revision.
func TestWindowsOrderInRealTime(t *testing.T) {
	s := newScript()
	first, second := s.call(put("c0", "1")), s.call(put("l0", "2"))
	s.answer(first)
	s.answer(second)
	// second returned before first began.
	first.Call, first.Return, second.Call, second.Return = 3, 4, 1, 2
	p, bad := checkReplay(s.h.Ops(), s.disks, nil)
	if len(bad) != 0 {
		t.Fatalf("%v", bad)
	}
	bad = checkWindows(p)
	if len(bad) != 1 || !strings.Contains(bad[0], "are not linearizable") || !strings.Contains(bad[0], "had returned before") {
		t.Fatalf("the windows found %v", bad)
	}
	// An answer that does not fit its place.
	second.Call, second.Return = 3, 4
	second.Response.(*pb.PutResponse).PrevKv = &mvccpb.KeyValue{}
	bad = checkWindows(p)
	if len(bad) != 1 || !strings.Contains(bad[0], "are not linearizable") || !strings.Contains(bad[0], "does not fit") {
		t.Fatalf("the windows found %v", bad)
	}
}

// TestLateAnswersAreNotHeard: an answer that a gateway gives after its crash does not
// count.
func TestLateAnswersAreNotHeard(t *testing.T) {
	h := &History{}
	o := h.Begin(0, 1, put("c0", "1"), 0)
	h.End(o, &pb.PutResponse{Header: &pb.ResponseHeader{Revision: 2}}, nil, true, 0)
	p := h.Begin(0, 1, put("c0", "1"), 0)
	h.End(p, nil, context.DeadlineExceeded, false, 0)
	for _, o := range []*Op{o, p} {
		if o.Outcome != Unknown || o.Return != 0 || o.Response != nil {
			t.Fatalf("%s", o)
		}
	}
}

// A read that had returned before another was called stands before it. Otherwise the order of revisions contradicts time,
// and porcupine looks for another, without an end where many operations overlap.
func TestReadsOfOneRevisionStandByTheirCalls(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var ops []placed
	for i := range int64(40) {
		o := &Op{Call: 2 * i, Return: 2*i + 1, Outcome: Answered, Response: &pb.RangeResponse{}}
		ops = append(ops, placed{op: o, rev: 7 + i%3})
	}
	rng.Shuffle(len(ops), func(i, j int) { ops[i], ops[j] = ops[j], ops[i] })
	sortPlaced(ops)
	for i := range len(ops) - 1 {
		if a, b := ops[i], ops[i+1]; a.rev > b.rev || a.rev == b.rev && a.op.Return > b.op.Call {
			t.Errorf("revision %d, call %d stands before revision %d, call %d", a.rev, a.op.Call, b.rev, b.op.Call)
		}
	}
}
