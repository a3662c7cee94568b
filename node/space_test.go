package node

import (
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/kverror"
)

const spaceRanges = 6

// ledBy returns the index of a span of borders that the node leads.
func (r *rig) ledBy(n *rigNode, ranges int) int {
	r.t.Helper()
	for i := range ranges {
		for _, s := range n.summaries() {
			if s.IsLeader && s.Descriptor.Span.Contains([]byte(keyOf(i))) {
				return i
			}
		}
	}
	r.t.Fatalf("node %s leads none of %d ranges", n.id, ranges)
	return 0
}

// waitFull waits until the node has noticed that its disk is full, or is no more.
func (r *rig) waitFull(n *rigNode, want bool) {
	r.t.Helper()
	r.wait(15*time.Second, "the node notices the state of its disk", func() bool { return n.core.full() == want })
	alarms := etcdAlarms{n.core}.Known()
	if has := len(alarms) == 1 && alarms[0].Type == pb.AlarmType_NOSPACE; has != want {
		r.t.Errorf("node %s: alarms %v, full %v", n.id, alarms, want)
	}
}

// A full disk of one node costs the puts to the ranges that it leads, and nothing
// else, until there is room again.
func TestFullDiskOfOneNode(t *testing.T) {
	bubble(t, 3, borders(spaceRanges), nil, func(r *rig) {
		full, other := r.nodes[0], r.nodes[1]
		r.spread(full, spaceRanges, "before")
		mine, theirs := r.ledBy(full, spaceRanges), r.ledBy(other, spaceRanges)
		full.disk.fill(0)
		r.waitFull(full, true)
		for _, at := range r.nodes {
			_, err := at.put(r.t.Context(), keyOf(mine), "refused")
			r.wantKind("a put led by the full node", err, kverror.NoSpace)
			r.mustGet(at, keyOf(mine), "before")
		}
		r.mustRemove(other, keyOf(mine))
		r.mustGet(full, keyOf(mine), "")
		r.mustPut(full, keyOf(theirs), "elsewhere")
		r.mustGet(full, keyOf(theirs), "elsewhere")
		full.disk.free()
		r.waitFull(full, false)
		r.mustPut(other, keyOf(mine), "after")
		r.checkAll("after", mine)
		r.stop(r.nodes...)
	})
}

// checkAll reads the key of a span at every node.
func (r *rig) checkAll(want string, span int) {
	r.t.Helper()
	for _, n := range r.nodes {
		r.mustGet(n, keyOf(span), want)
	}
}

// With all disks full no put succeeds anywhere, reads and deletes do, nobody stops,
// and it ends by itself.
func TestFullDiskOfAllNodes(t *testing.T) {
	bubble(t, 3, borders(spaceRanges), nil, func(r *rig) {
		r.spread(r.nodes[0], spaceRanges, "before")
		for _, n := range r.nodes {
			n.disk.fill(0)
		}
		for _, n := range r.nodes {
			r.waitFull(n, true)
		}
		for i := range spaceRanges {
			at := r.nodes[i%3]
			_, err := at.put(r.t.Context(), keyOf(i), "refused")
			r.wantKind("put", err, kverror.NoSpace)
			_, err = at.core.KV().Txn(r.t.Context(), &pb.TxnRequest{Success: []*pb.RequestOp{{
				Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(keyOf(i)), Value: []byte("refused")}},
			}}})
			r.wantKind("a put in a transaction", err, kverror.NoSpace)
			r.mustGet(at, keyOf(i), "before")
		}
		// Long enough for what is not noticed at once: elections, flushes, reports.
		time.Sleep(20 * time.Second)
		for i := range spaceRanges / 2 {
			r.mustRemove(r.nodes[i%3], keyOf(i))
			r.mustGet(r.nodes[(i+1)%3], keyOf(i), "")
		}
		for _, n := range r.nodes {
			n.disk.free()
		}
		for _, n := range r.nodes {
			r.waitFull(n, false)
		}
		for i := range spaceRanges {
			r.mustPut(r.nodes[i%3], keyOf(i), "after")
		}
		r.stop(r.nodes...)
		r.start(r.nodes...)
		for i := range spaceRanges {
			r.checkAll("after", i)
		}
	})
}

// While a node's disk is full the others go on writing. The full node replicates their
// writes: its wal uses up its reserve and then stands still. That costs it its
// leaderships, and nothing else. Afterwards it catches up.
func TestFullDiskRunsOutOfReserve(t *testing.T) {
	bubble(t, 3, borders(spaceRanges), nil, func(r *rig) {
		full, other := r.nodes[0], r.nodes[1]
		r.spread(full, spaceRanges, "before")
		theirs := r.ledBy(other, spaceRanges)
		full.disk.fill(0)
		r.waitFull(full, true)
		value := strings.Repeat("v", 64<<10)
		for range 80 { // five segments of the wal
			r.mustPut(other, keyOf(theirs), value)
		}
		r.wait(10*rigElection, "the full node has no leaderships left", func() bool { return len(full.led()) == 0 })
		for i := range spaceRanges {
			r.mustPut(other, keyOf(i), "meanwhile")
		}
		if err := full.core.Err(); err != nil {
			r.t.Fatalf("the full node gave up: %v", err)
		}
		full.disk.free()
		r.waitFull(full, false)
		for i := range spaceRanges {
			r.mustPut(full, keyOf(i), "after")
			r.checkAll("after", i)
		}
		r.caughtUp(20 * time.Second)
		r.stop(r.nodes...)
	})
}

// A full disk's last room belongs to the store, which needs it to make more: the log
// does not take it for its reserve.
func TestLogLeavesRoomToTheStore(t *testing.T) {
	bubble(t, 3, borders(spaceRanges), nil, func(r *rig) {
		full, other := r.nodes[0], r.nodes[1]
		r.spread(full, spaceRanges, "before")
		theirs := r.ledBy(other, spaceRanges)
		before := r.walBytes(full)
		full.disk.fill(10 << 20) // a quarter of low is 12.8 MiB
		r.waitFull(full, true)
		value := strings.Repeat("v", 64<<10)
		for range 80 { // five segments of the wal
			r.mustPut(other, keyOf(theirs), value)
		}
		time.Sleep(5 * time.Second)
		if after := r.walBytes(full); after > before {
			r.t.Errorf("the log has grown from %d to %d bytes on a full disk", before, after)
		}
		full.disk.free()
		r.waitFull(full, false)
		r.mustPut(full, keyOf(theirs), "after")
		r.caughtUp(20 * time.Second)
		r.stop(r.nodes...)
	})
}

// walBytes returns the size of a node's log files.
func (r *rig) walBytes(n *rigNode) (total int64) {
	r.t.Helper()
	names, err := n.disk.List("wal")
	for _, name := range names {
		if !strings.HasSuffix(name, ".wal") {
			continue
		}
		st, serr := n.disk.Stat(n.disk.PathJoin("wal", name))
		if serr != nil {
			err = serr
			break
		}
		total += st.Size()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return total
}

// A node whose store is above its quota is as one whose disk is full, for the ranges that it leads
// alone. Once what was deleted is compacted it takes data again, although nobody writes.
func TestQuota(t *testing.T) {
	const quota = 4 << 20
	r := func(o *Options) {
		if o.Self == 1 {
			o.QuotaBytes = quota
		}
	}
	bubble(t, 3, borders(spaceRanges), r, func(r *rig) {
		full, other := r.nodes[0], r.nodes[1]
		r.spread(full, spaceRanges, "before")
		mine, theirs := r.ledBy(full, spaceRanges), r.ledBy(other, spaceRanges)
		if st := (etcdNode{full.core}).Status(); st.DBQuotaBytes != quota {
			r.t.Errorf("the quota is %d in the status", st.DBQuotaBytes)
		}
		if st := (etcdNode{other.core}).Status(); st.DBQuotaBytes <= st.DBSizeBytes || st.DBQuotaBytes > diskBytes {
			r.t.Errorf("without a quota: %d of %d, on a disk of %d", st.DBSizeBytes, st.DBQuotaBytes, diskBytes)
		}
		var at int64
		value := make([]byte, 100<<10)
		for i := range 60 {
			for j := range value {
				value[j] = byte(r.rng.Uint32())
			}
			at = r.mustPut(other, keyOf(theirs)+string(rune('a'+i)), string(value))
		}
		r.caughtUp(5 * time.Second)
		if err := full.core.engine.Flush(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
		r.waitFull(full, true)
		_, err := other.put(r.t.Context(), keyOf(mine), "refused")
		r.wantKind("a put led by the node above its quota", err, kverror.NoSpace)
		r.mustGet(other, keyOf(mine), "before")
		r.mustPut(full, keyOf(theirs), "elsewhere")
		time.Sleep(time.Minute)
		r.waitFull(full, true)
		for i := range 60 {
			r.mustRemove(full, keyOf(theirs)+string(rune('a'+i)))
			at++
		}
		if _, err := full.core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: at + 1}); err != nil {
			r.t.Fatal(err)
		}
		r.wait(3*time.Minute, "it hears of the compaction, and is below the quota", func() bool { return !full.core.full() })
		r.waitFull(full, false)
		r.mustPut(other, keyOf(mine), "after")
		r.checkAll("after", mine)
		r.stop(r.nodes...)
	})
}
