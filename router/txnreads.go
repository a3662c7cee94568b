package router

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// lowestRead returns the lowest revision that a transaction that began at start may read. Reads
// that name none use the revision before its own, which is at or above start.
func lowestRead(req *pb.TxnRequest, start keyspace.Revision) keyspace.Revision {
	low := start
	for _, ops := range [2][]*pb.RequestOp{req.GetSuccess(), req.GetFailure()} {
		for _, op := range ops {
			if at := op.GetRequestRange().GetRevision(); at > 0 {
				low = min(low, keyspace.Revision(at))
			}
			if n := op.GetRequestTxn(); n != nil {
				low = lowestRead(n, low)
			}
		}
	}
	return low
}

// addReader notes, before any range pins a revision, that a transaction may read. removeReader ends
// that.
func (t *coordinator) addReader(x *txn) {
	low := lowestRead(x.req, x.id.Start)
	t.mu.Lock()
	t.reading[x] = low
	t.mu.Unlock()
}

func (t *coordinator) removeReader(x *txn) {
	t.mu.Lock()
	delete(t.reading, x)
	t.mu.Unlock()
}

// readsBelow says whether a transaction of this node may still read below the revision.
func (t *coordinator) readsBelow(rev keyspace.Revision) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, low := range t.reading {
		if low < rev {
			return true
		}
	}
	return false
}

// Reads says whether a transaction over several ranges that began before the call may still read
// below the revision. It asks the coordinators on the given nodes. It skips dead nodes, whose
// clients get no answer any more.
func (r *Router) Reads(ctx context.Context, nodes []keyspace.NodeID, below keyspace.Revision) (bool, error) {
	if r.coordinator.readsBelow(below) {
		return true, nil
	}
	var some atomic.Bool
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxParallelCommands)
	for _, node := range nodes {
		if node == r.cfg.Self || !r.cfg.Alive(node) {
			continue
		}
		g.Go(func() error {
			reads, err := r.askReads(ctx, node, below)
			if reads {
				some.Store(true)
			}
			if err != nil && !r.cfg.Alive(node) {
				return nil
			}
			return err
		})
	}
	err := g.Wait()
	return some.Load(), err
}

// readsWireVersion is the first byte of method 25's messages.
const readsWireVersion = 1

func (r *Router) askReads(ctx context.Context, node keyspace.NodeID, below keyspace.Revision) (bool, error) {
	b, err := r.cfg.Bus.Call(ctx, node, transport.MethodRouterReads, binary.AppendUvarint([]byte{readsWireVersion}, uint64(below)))
	if err != nil {
		return false, fmt.Errorf("ask node %s about reads below revision %d: %w", node, below, err)
	}
	if len(b) != 2 || b[0] != readsWireVersion || b[1] > 1 {
		return false, fmt.Errorf("router: answer %x of node %s about reads below revision %d", b, node, below)
	}
	return b[1] == 1, nil
}

func (r *Router) handleReads(_ context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	below, err := decodeReads(payload)
	if err != nil {
		return nil, err
	}
	if r.coordinator.readsBelow(below) {
		return []byte{readsWireVersion, 1}, nil
	}
	return []byte{readsWireVersion, 0}, nil
}

// decodeReads decodes a request of method 25.
func decodeReads(payload []byte) (keyspace.Revision, error) {
	if len(payload) == 0 || payload[0] != readsWireVersion {
		return 0, fmt.Errorf("router: question of %d bytes about reads", len(payload))
	}
	rev, rest, err := wire.Uvarint(payload[1:])
	if err != nil || len(rest) > 0 || rev > uint64(keyspace.MaxRevision) {
		return 0, fmt.Errorf("router: question %x about reads", payload)
	}
	return keyspace.Revision(rev), nil
}
