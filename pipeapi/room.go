package pipeapi

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// growth says what an answer may come to, before it is there. A pipe must not hold a window's number of large ones.
type growth uint8

const (
	// small answers have no values, or hold their bytes of the node's own budget: those of spans wait for them.
	small growth = iota
	// repeatable operations may have a large answer, and have changed nothing if it is large. The answer may be dropped, and
	// the operation done again: nobody has seen it.
	repeatable
	// single operations may have a large answer and a change.
	single
)

// mostSingles is how many single operations of a pipe are done at a time. They are rare, as most changes that read do so
// where they change nothing.
const mostSingles = 16

func growthOf(request any) growth {
	switch r := request.(type) {
	case *pb.RangeRequest:
		if len(r.GetRangeEnd()) == 0 {
			return repeatable
		}
	case *pb.PutRequest:
		if r.GetPrevKv() {
			return single
		}
	case *pb.DeleteRangeRequest:
		if r.GetPrevKv() {
			return single
		}
	case *pb.TxnRequest:
		return max(growthOfBranch(r.GetSuccess()), growthOfBranch(r.GetFailure()))
	}
	return small
}

func growthOfBranch(ops []*pb.RequestOp) growth {
	reads, changes := false, false
	for _, op := range ops {
		switch {
		case op.GetRequestRange() != nil:
			reads = true
		case op.GetRequestTxn() != nil, op.GetRequestPut().GetPrevKv(), op.GetRequestDeleteRange().GetPrevKv():
			reads, changes = true, true
		default:
			changes = true
		}
	}
	switch {
	case !reads:
		return small
	case changes:
		return single
	}
	return repeatable
}

// unchanged says whether a repeatable operation that was answered so has changed nothing.
func unchanged(request any, body mem.BufferSlice) bool {
	r, ok := request.(*pb.TxnRequest)
	if !ok {
		return true // a read
	}
	resp := &pb.TxnResponse{}
	if proto.Unmarshal(body.Materialize(), resp) != nil {
		return false
	}
	taken := r.GetFailure()
	if resp.GetSucceeded() {
		taken = r.GetSuccess()
	}
	for _, op := range taken {
		if op.GetRequestRange() == nil {
			return false
		}
	}
	return true
}

// takeParts takes room for the parts of an operation, or says that take has found none. It takes of its pipe's first, and whoever has
// room of all pipes waits for no more: so nobody waits for one who waits for him.
func (o *operation) takeParts(parts int64, take func(*semaphore.Weighted, int64) bool) bool {
	if !take(o.p.parts, o.p.s.ofPipe(parts)) {
		return false
	}
	if !take(o.p.s.parts, parts) {
		o.p.parts.Release(o.p.s.ofPipe(parts))
		return false
	}
	o.parts = parts
	o.p.s.o.Metrics.Parts.Add(float64(parts))
	return true
}

// ofPipe is what parts count in the room of their pipe, which is half of all. What is larger is alone in its pipe.
func (s *Service) ofPipe(parts int64) int64 { return min(parts, s.o.PartBytes/2) }

// giveBack gives back the room of the operation's parts.
func (o *operation) giveBack() {
	if o.parts == 0 {
		return
	}
	o.p.s.o.Metrics.Parts.Sub(float64(o.parts))
	o.p.s.parts.Release(o.parts)
	o.p.parts.Release(o.p.s.ofPipe(o.parts))
	o.parts = 0
}

// comeLate waits for the room that the operation has not found when it came, and decodes it. It returns why it is not served.
func (o *operation) comeLate() error {
	late := o.late
	if late.body == nil {
		return o.refusal
	}
	o.late.body = nil
	ctx, cancel := context.WithTimeout(o.ctx, o.p.s.o.PartWait)
	defer cancel()
	wait := func(room *semaphore.Weighted, n int64) bool { return room.Acquire(ctx, n) == nil }
	if !o.takeParts(int64(late.messages)*messageBytes, wait) {
		if err := o.ctx.Err(); err != nil {
			return status.FromContextError(err).Err()
		}
		o.p.s.o.Metrics.Refused.Inc()
		return rpctypes.ErrGRPCRequestTooManyRequests
	}
	if err := o.decode(late.body); err != nil { // the stream goes on, because others of its frame may have been served
		return status.Errorf(codes.Internal, "skein: pipe: the operation %d is no Operation: %v", o.tag, err)
	}
	return o.refusal
}

// serve does the operation, and returns its answer once there is room for it.
func (o *operation) serve() (mem.BufferSlice, error) {
	for o.enter(); ; {
		body, err := o.p.s.o.Operations.Do(o.ctx, o.request)
		size := uint64(body.Len())
		if err != nil || o.growth != repeatable || size <= copiedBytes || o.reserve(size) || !unchanged(o.request, body) {
			return body, err
		}
		body.Free()
		if err := o.awaitRoom(size); err != nil {
			return nil, err
		}
	}
}

// enter waits until the operation may begin, or its time is over. While the client takes nothing, its answer would only add to
// those that wait.
func (o *operation) enter() {
	p := o.p
	p.mu.Lock()
	defer p.mu.Unlock()
	p.await(o.ctx, func() bool { return p.hasRoom() && (o.growth != single || p.singles < mostSingles) })
	if o.growth == single {
		p.singles++
		o.counted = true
	}
}

// reserve takes an answer into what the pipe holds, if there is room for it.
func (o *operation) reserve(size uint64) bool {
	o.p.mu.Lock()
	defer o.p.mu.Unlock()
	if size <= o.reserved {
		return true // awaitRoom has found it
	}
	o.p.reserved -= o.reserved
	o.reserved = 0
	if o.p.held() >= o.p.s.window.GetBytes() {
		return false
	}
	o.reserved = size
	o.p.reserved += size
	return true
}

// awaitRoom waits for the room of an answer of that size, and takes it. No other operation begins meanwhile.
func (o *operation) awaitRoom(size uint64) error {
	p := o.p
	p.mu.Lock()
	defer p.mu.Unlock()
	p.again++
	p.await(o.ctx, func() bool { return p.held() < p.s.window.GetBytes() })
	p.again--
	p.room.Broadcast()
	if err := o.ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	o.reserved = size
	p.reserved += size
	return nil
}

// held is how many bytes of answers the pipe holds, or is about to. mu is held.
func (p *pipe) held() uint64 { return p.answerBytes + p.reserved }

// hasRoom says whether operations may begin. mu is held.
func (p *pipe) hasRoom() bool { return p.again == 0 && p.held() < p.s.window.GetBytes() }

// await waits for something that room tells of, and no longer than the context. mu is held.
func (p *pipe) await(ctx context.Context, ready func() bool) {
	if ready() {
		return
	}
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.room.Broadcast()
	})
	defer stop()
	for !ready() && !p.over && ctx.Err() == nil {
		p.room.Wait()
	}
}
