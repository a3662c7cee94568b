package eval

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
)

// Draft is an answer that still misses revisions: those of its own request, and
// of predecessors that wait for theirs.
type Draft struct {
	// Op is the answer; nil before the evaluation.
	Op proto.Message
	// top is the header that reports the request's revision.
	top *pb.ResponseHeader
	// headers are those of operations inside a transaction.
	headers []headerDraft
	kvs     []found
	ranges  []*rangeDraft
}

type headerDraft struct {
	h *pb.ResponseHeader
	// changed says that the transaction had changed something by then: the header
	// reports its revision and not the one before.
	changed bool
}

// Settle fills in the revisions once the request has its own: rev, which it bears
// where it changed something. All others are known by then.
func (d *Draft) Settle(rev keyspace.Revision, changed bool) {
	d.top.Revision = int64(rev)
	for _, h := range d.headers {
		h.h.Revision = int64(rev)
		if changed && !h.changed {
			h.h.Revision--
		}
	}
	for i := range d.kvs {
		f := &d.kvs[i]
		f.kv.ModRevision, f.kv.CreateRevision = int64(f.mod.must()), int64(f.create.must())
	}
	for _, r := range d.ranges {
		r.finish()
	}
}

// SettleOthers fills in the revisions of others, and 0 for those of the transaction own,
// which has none yet.
func (d *Draft) SettleOthers(own *PendingTxn) {
	for i := range d.kvs {
		f := &d.kvs[i]
		f.kv.ModRevision, f.kv.CreateRevision = int64(f.mod.Except(own)), int64(f.create.Except(own))
	}
}

// keep returns the item as etcd's message and remembers it where a revision is
// still to come.
func (d *Draft) keep(it *item) *mvccpb.KeyValue {
	// Asked before the message is made: a revision may arrive in between, and would
	// then be neither in the message nor remembered.
	_, modKnown := it.mod.known()
	_, createKnown := it.create.known()
	kv := it.kv()
	if !modKnown || !createKnown {
		d.kvs = append(d.kvs, found{kv: kv, mod: it.mod, create: it.create})
	}
	return kv
}
