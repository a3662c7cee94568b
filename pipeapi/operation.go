package pipeapi

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
)

// operation is one that is under way.
type operation struct {
	p    *pipe
	tag  uint64
	size uint64
	// request is etcd's. It is nil for one that is refused for its refusal, and once the operation is answered.
	request any
	refusal error
	// parts is the room that it has of Options.PartBytes. late is the operation while it waits for that.
	parts int64
	late  encodedOperation
	// timeoutMs is the client's, 0 for none.
	timeoutMs uint32
	// field is that of the answer.
	field  protowire.Number
	growth growth
	// locate says that the client wants to know who leads the key.
	locate bool
	ctx    context.Context
	cancel context.CancelFunc
	// hasty says that its time is short.
	hasty bool
	// finish is the rest of what was begun. here says that a range led here has answered it.
	finish func() (mem.BufferSlice, error)
	here   bool
	hands  atomic.Uint32
	// Guarded by the pipe's mu. looks is that of the pipe when it came. reserved is the room that its answer has, and counted says that it is one of the pipe's singles.
	looks    uint64
	reserved uint64
	counted  bool
}

// Fields of an Answer.
const (
	fieldTag protowire.Number = 1 + iota
	fieldError
	fieldRange
	fieldPut
	fieldDelete
	fieldTxn
	fieldPlace
)

// requestOf returns the request of etcd's that an operation is, and the field of its answer. It is nil for an operation
// of a newer client.
func requestOf(op *pipepb.Operation) (any, protowire.Number) {
	switch r := op.GetRequest().(type) {
	case *pipepb.Operation_Range:
		return r.Range, fieldRange
	case *pipepb.Operation_Put:
		return r.Put, fieldPut
	case *pipepb.Operation_DeleteRange:
		return r.DeleteRange, fieldDelete
	case *pipepb.Operation_Txn:
		return r.Txn, fieldTxn
	case *pipepb.Operation_CompareAndPut:
		return compareAndPut(r.CompareAndPut), fieldTxn
	}
	return nil, fieldError
}

// decode decodes the operation.
func (o *operation) decode(b []byte) error {
	op := &pipepb.Operation{}
	if err := proto.Unmarshal(b, op); err != nil {
		return err
	}
	o.tag, o.timeoutMs, o.locate = op.GetTag(), op.GetTimeoutMs(), op.GetLocate()
	if o.request, o.field = requestOf(op); o.request == nil {
		o.refusal = status.Errorf(codes.Unimplemented, "skein: pipe: operation %d has no request that this node knows: the client may be newer than the node", o.tag)
	}
	o.growth = growthOf(o.request)
	return nil
}

// compareAndPut returns the transaction that a CompareAndPut is short for.
func compareAndPut(c *pipepb.CompareAndPut) *pb.TxnRequest {
	put := c.GetPut()
	if put == nil {
		put = &pb.PutRequest{} // refused for its empty key
	}
	return &pb.TxnRequest{
		Compare: []*pb.Compare{{
			Key: put.GetKey(), Target: pb.Compare_MOD, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_ModRevision{ModRevision: c.GetModRevision()},
		}},
		Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestPut{RequestPut: put}}},
		Failure: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: put.GetKey()}}}},
	}
}

// context returns the context of the operation, which ends with the pipe's. What takes room for parts gives it back in time, also if
// its client takes no answers: it may wait for the room, and then for its answer.
func (o *operation) context() (context.Context, context.CancelFunc) {
	timeout := time.Duration(o.timeoutMs) * time.Millisecond
	if most := 2 * o.p.s.o.PartWait; (o.parts > 0 || o.late.body != nil) && (timeout == 0 || timeout > most) {
		timeout = most
	}
	if timeout > 0 {
		return context.WithTimeout(o.p.ctx, timeout)
	}
	return context.WithCancel(o.p.ctx)
}

// Most changes wait for nothing but the answer of a range that this node leads. The reader begins them, and whoever brings the
// answer finishes them. All others have a worker that waits, and so has one that is given up, fails or takes long.

// In whose hands an operation is.
const (
	// ofReader: the reader is about to begin it.
	ofReader uint32 = iota
	// hasFailed and isDone: it was answered while the reader was beginning it.
	hasFailed
	isDone
	// ofNobody: it is begun, and who finishes it takes it from here.
	ofNobody
	// taken: somebody finishes it.
	taken
)

// patience is how long an operation may be begun without a worker that looks at its deadline, up to twice as long.
const patience = 250 * time.Millisecond

// begin begins an operation without a worker, if that can be.
func (o *operation) begin() {
	if !o.beginHere() {
		o.hands.Store(taken)
		o.p.s.begin(o)
	}
}

func (o *operation) beginHere() bool {
	p := o.p
	if o.refusal != nil || o.late.body != nil || o.growth != small || o.hasty {
		return false
	}
	p.mu.Lock()
	room := p.hasRoom()
	p.mu.Unlock()
	if !room {
		return false
	}
	var begun bool
	if o.finish, begun = p.s.o.Operations.Begin(o.ctx, o.request, o.answered); !begun {
		return false
	}
	switch {
	case !o.hands.CompareAndSwap(ofReader, ofNobody):
		o.conclude(o.hands.Swap(taken) == isDone)
	case o.ctx.Err() != nil:
		o.giveUp() // who has ended the context may have come too early
	}
	return true
}

// answered is told when the range has answered an operation that was begun: well, or with an error. It does not block.
func (o *operation) answered(ok bool) {
	early := hasFailed
	if ok {
		early = isDone
	}
	if !o.hands.CompareAndSwap(ofReader, early) && o.hands.CompareAndSwap(ofNobody, taken) {
		o.conclude(ok)
	}
}

// conclude finishes an operation that is answered. An error may be no answer yet: a worker tries on.
func (o *operation) conclude(ok bool) {
	if o.here = ok; ok {
		o.do()
	} else {
		o.p.s.begin(o)
	}
}

// giveUp has a worker wait for an operation that was begun, for as long as its context lasts.
func (o *operation) giveUp() {
	if o.hands.CompareAndSwap(ofNobody, taken) {
		o.p.s.begin(o)
	}
}

// watch has what was begun watched from now on. mu is held.
func (p *pipe) watch() {
	switch {
	case p.watched:
		return
	case p.watcher == nil:
		p.watcher = p.s.o.Clock.AfterFunc(patience, p.look)
	default:
		p.watcher.Reset(patience)
	}
	p.watched = true
}

// look gives those a worker that were there at the last look.
func (p *pipe) look() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watched = false
	for _, o := range p.under {
		switch h := o.hands.Load(); {
		case h == taken:
		case (o.looks == p.looks || h != ofNobody) && !p.over:
			p.watch()
		default:
			o.giveUp()
		}
	}
	p.looks++
}

// do serves the operation.
func (o *operation) do() {
	a := answer{tag: o.tag}
	err := o.comeLate()
	if err == nil {
		a.field = o.field
		if o.finish != nil {
			a.body, err = o.finish()
		} else {
			a.body, err = o.serve()
		}
		if err == nil && o.locate && !o.here {
			a.place = o.place()
		}
	}
	o.cancel()
	if err != nil {
		a.field, a.body = fieldError, errorBody(err)
	}
	o.p.answer(a)
}

// place returns the encoded Place of the operation's key, nil if there is none to tell.
func (o *operation) place() []byte {
	key := keyOf(o.request)
	if len(key) == 0 {
		return nil
	}
	p := o.p.s.o.Operations.Place(o.ctx, key)
	if p == nil {
		return nil
	}
	b, err := proto.Marshal(p)
	if err != nil || len(b) > mostPlaceBytes { // a URL that is not UTF-8, or a range that ends at a huge key
		return nil
	}
	return b
}

// mostPlaceBytes bounds a Place, which does not count in what the pipe holds for its client.
const mostPlaceBytes = 4 << 10

// keyOf returns the key whose place an operation asks for.
func keyOf(request any) []byte {
	switch r := request.(type) {
	case *pb.RangeRequest:
		return r.GetKey()
	case *pb.PutRequest:
		return r.GetKey()
	case *pb.DeleteRangeRequest:
		return r.GetKey()
	case *pb.TxnRequest:
		if all := r.GetCompare(); len(all) > 0 {
			return all[0].GetKey()
		}
		for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
			if len(branch) > 0 {
				op := branch[0]
				return slices.Concat(op.GetRequestRange().GetKey(), op.GetRequestPut().GetKey(), op.GetRequestDeleteRange().GetKey()) // one has it
			}
		}
	}
	return nil
}

// errorBody returns an Error as it is sent.
func errorBody(err error) mem.BufferSlice {
	s := status.Convert(err)
	b, err := proto.Marshal(&pipepb.Error{Code: int32(s.Code()), Message: s.Message()})
	if err != nil { // a text that is not UTF-8: keys may be in it
		b, _ = proto.Marshal(&pipepb.Error{Code: int32(s.Code())}) // a number can be encoded
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}
}
