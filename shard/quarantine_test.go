package shard

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// rot changes the byte behind the mark in each of the node's tables, and returns those.
func (n *rigNode) rot(mark []byte) (tables []string) {
	n.r.t.Helper()
	names, err := n.fs.List("data")
	n.must(err)
	for _, name := range names {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		f, err := n.fs.OpenReadWrite("data/"+name, vfs.WriteCategoryUnspecified)
		n.must(err)
		whole, err := io.ReadAll(f)
		n.must(err)
		if at := bytes.Index(whole, mark); at >= 0 {
			at += len(mark)
			_, err := f.WriteAt([]byte{whole[at] ^ 1}, int64(at))
			n.must(err)
			tables = append(tables, name)
		}
		n.must(f.Close())
	}
	if len(tables) == 0 {
		n.r.t.Fatalf("node %s: %q is in no table", n.id, mark)
	}
	return tables
}

// replaceOn moves the key's range from one node to another.
func (m *walker) replaceOn(key string, from, to keyspace.NodeID) {
	m.until(key, func(d keyspace.Descriptor, lead *rigNode) (bool, error) {
		old, has := d.ReplicaOn(from)
		own, ok := d.ReplicaOn(to)
		switch {
		case ok && !has && own.Role == keyspace.RoleVoter:
			return true, nil
		case !ok:
			m.last++
			return false, m.change(lead, &d, raftgroup.ConfChange{Type: raftgroup.AddLearner, Replica: m.last, Node: to})
		}
		return false, m.change(lead, &d,
			raftgroup.ConfChange{Type: raftgroup.Promote, Replica: own.ID}, raftgroup.ConfChange{Type: raftgroup.RemoveReplica, Replica: old.ID})
	})
}

// A replica whose records cannot be read when its node starts goes into quarantine, and the node
// starts. The replica can be removed, although its deletion cannot read them either, and replaced.
func TestUnreadableRecordsAtStart(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newWideRig(t, 7, lan, 4)
		r.startAll()
		defer r.stopAll()
		m := &walker{r: r, last: 100}
		m.lead("k", 1)
		r.put("k", "v")
		bad := r.nodes[2]
		b := bad.engine.NewBatch()
		bad.must(command.PutAttachment(b, 1, rangeapi.Attachment{Lease: 7, Incarnation: 1}))
		bad.must(b.Set(engine.AppendLeaseKey(nil, 7, []byte("k")), nil))
		bad.must(b.Commit())
		bad.must(bad.engine.Flush(t.Context()))
		bad.crash()
		bad.rot(command.AttachmentKey(1, 7)[:9])
		for round := range 2 {
			bad.start()
			q, ok := bad.host.Quarantined()[keyspace.RangeID(1).Group()]
			if !ok || q.Replica != 3 || bad.host.Group(keyspace.RangeID(1).Group()) != nil {
				t.Fatalf("start %d: quarantine %+v %t", round, q, ok)
			}
			if _, err := bad.node.Load().Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, Op: &etcdserverpb.PutRequest{Key: []byte("k")}}); kverror.Of(err).Kind != kverror.RangeNotHere {
				t.Errorf("start %d: a request to it: %v", round, err)
			}
			r.put("k", "without it")
			if round == 0 {
				bad.crash()
			}
		}
		m.replaceOn("k", 3, 4)
		gone := func() bool {
			return bad.node.Load().Replica(1) == nil && len(bad.host.Quarantined()) == 0
		}
		for range 600 {
			if gone() {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if !gone() {
			t.Fatalf("not removed: %v", bad.host.Quarantined())
		}
		if _, ok, err := bad.engine.Get(engine.AppendLeaseKey(nil, 7, []byte("k"))); ok || err != nil {
			t.Errorf("its part of the index of leases stays: %t, %v", ok, err)
		}
		bad.crash()
		bad.start()
		m.replaceOn("k", 4, 3)
		r.put("k", "back")
		if err := bad.engine.Err(); err != nil {
			t.Error(err)
		}
	})
}

// A table that nobody's keys are in is dropped when it is met. One with keys of replicas in
// quarantine stays until they have left.
func TestBadTableIsDropped(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newWideRig(t, 8, lan, 4)
		r.startAll()
		defer r.stopAll()
		m := &walker{r: r, last: 100}
		m.lead("a", 1)
		r.split("m")
		m.lead("m", 1)
		random := make([]byte, 8<<10) // it lies on the disk as it is here
		for i := range random {
			random[i] = byte(r.rng.Uint32())
		}
		value := string(random)
		keys := []string{"k", "l", "n", "o"}
		for _, k := range keys {
			r.put(k, k+value)
		}
		holder, empty := r.nodes[2], r.nodes[3]
		r.caughtUp(holder)
		b := empty.engine.NewBatch() // what a crash between two steps of a removal may leave
		for _, k := range keys {
			empty.must(mvcc.Put(b, &mvcc.Version{Key: []byte(k), Mod: 7, Create: 7, Version: 1, Value: []byte(k + value)}))
		}
		empty.must(b.Commit())
		for _, c := range []struct {
			n    *rigNode
			held int
		}{{empty, 0}, {holder, 2}} {
			n := c.n
			n.must(n.engine.Flush(t.Context()))
			n.crash()
			tables := n.rot([]byte("l" + value[:64])) // one may be out of use
			n.start()
			if err := n.readAll(); err == nil || len(n.host.Quarantined()) != c.held {
				t.Fatalf("node %s: read with %v, in quarantine %v", n.id, err, n.host.Quarantined())
			}
			looks := func(held bool) {
				t.Helper()
				names, err := n.fs.List("data")
				n.must(err)
				in := func(table string) bool { return slices.Contains(names, table) }
				dropped := testutil.ToFloat64(n.node.Load().metrics.tablesDropped)
				if (dropped > 0) == held {
					t.Errorf("node %s: %g tables are dropped", n.id, dropped)
				}
				err = n.readAll()
				if there := slices.ContainsFunc(tables, in); there != held || (err != nil) != there {
					t.Errorf("node %s: the table is there: %t; read with %v", n.id, there, err)
				}
			}
			looks(c.held > 0)
			if c.held > 0 {
				m.replaceOn("a", 3, 4)
				m.replaceOn("m", 3, 4)
				n.quarantineEnds()
				looks(false)
			}
		}
		for _, k := range keys {
			if got := r.get(k); got != k+value {
				t.Errorf("%s is %.10q", k, got)
			}
		}
	})
}

// A table that has records of two ranges is bad. The first of them that comes back is not filled before
// the second has left: whoever comes earlier would read its own records through the bad block.
func TestBadTableOfRecordsIsDropped(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newWideRig(t, 9, lan, 4)
		r.startAll()
		defer r.stopAll()
		m := &walker{r: r, last: 100}
		m.lead("k", 1)
		bad := r.nodes[2]
		b := bad.engine.NewBatch()
		for _, id := range []keyspace.RangeID{1, 2} { // in one table, as long as there is one range
			bad.must(command.PutAttachment(b, id, rangeapi.Attachment{Lease: 7, Incarnation: 1}))
		}
		bad.must(b.Commit())
		bad.must(bad.engine.Flush(t.Context()))
		r.split("m")
		m.lead("m", 1)
		r.put("k", "v")
		r.put("n", "v")
		if d, _ := r.route([]byte("n")); d.Range != 2 {
			t.Fatalf("the child is range %s", d.Range)
		}
		r.caughtUp(bad)
		bad.must(bad.engine.Flush(t.Context()))
		bad.crash()
		bad.rot(command.AttachmentKey(1, 7)[:9])
		bad.start()
		time.Sleep(2 * time.Second)
		if got := bad.host.Quarantined(); len(got) != 2 {
			t.Fatalf("in quarantine are %v", got)
		}
		m.replaceOn("k", 3, 4)
		lead := r.leader(1)
		d := lead.node.Load().Replica(1).Descriptor()
		m.last++
		if err := m.change(lead, &d, raftgroup.ConfChange{Type: raftgroup.AddLearner, Replica: m.last, Node: 3}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		if got := bad.host.Quarantined(); len(got) != 1 {
			t.Errorf("before range 2 has left, in quarantine are %v", got)
		}
		m.replaceOn("n", 3, 4)
		m.replaceOn("n", 4, 3)
		bad.quarantineEnds()
		r.put("k", "back")
		r.put("n", "back")
		r.caughtUp(bad)
		bad.must(bad.engine.Flush(t.Context()))
		if err := bad.readAll(); err != nil {
			t.Error(err)
		}
		if got := testutil.ToFloat64(bad.node.Load().metrics.tablesDropped); got != 1 {
			t.Errorf("%g tables are dropped", got)
		}
		for _, id := range []keyspace.RangeID{1, 2} {
			if o := bad.node.Load().Replica(id); o == nil || o.Descriptor().Generation == 0 {
				t.Errorf("range %s is not filled", id)
			}
		}
	})
}

// readAll reads all the data of ranges, and waits for what that ends.
func (n *rigNode) readAll() error {
	n.r.t.Helper()
	it, err := n.engine.NewIter(engine.IterOptions{Lower: engine.GroupLocalKey(1, nil), Upper: engine.LeaseIndexSpan().Upper})
	n.must(err)
	for ok := it.First(); ok; ok = it.Next() {
		_ = it.Key()
	}
	err = it.Close()
	time.Sleep(2 * time.Second)
	synctest.Wait()
	return err
}

// quarantineEnds waits until no replica of the node is in quarantine.
func (n *rigNode) quarantineEnds() {
	n.r.t.Helper()
	for range 600 {
		if len(n.host.Quarantined()) == 0 {
			time.Sleep(2 * time.Second)
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	n.r.t.Fatalf("node %s: in quarantine are %v", n.id, n.host.Quarantined())
}

// caughtUp waits until the node has applied what the leaders have.
func (r *rig) caughtUp(n *rigNode) {
	for range 100 {
		same := true
		for _, p := range r.nodes[0].node.Load().Replicas() {
			o := n.node.Load().Replica(p.id)
			same = same && o != nil && o.Show().Applied.Index == p.Show().Applied.Index
		}
		if same {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	r.t.Fatal("the node lags")
}

// A replica goes into quarantine behind a split that only its log has. Nothing makes the child there any
// more. A child that was there before a crash left its log in the wal. It comes back like its parent.
func TestChildOfAQuarantinedParent(t *testing.T) {
	for _, c := range []struct {
		name   string
		before bool // the split is applied before the crash
	}{{"new", false}, {"with a log", true}} {
		t.Run(c.name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := newWideRig(t, 7, lan, 4)
				r.startAll()
				defer r.stopAll()
				m := &walker{r: r, last: 100}
				m.lead("k", 1)
				r.put("k", "v")
				bad := r.nodes[2]
				r.caughtUp(bad)
				b := bad.engine.NewBatch()
				bad.must(command.PutAttachment(b, 1, rangeapi.Attachment{Lease: 7, Incarnation: 1}))
				bad.must(b.Set(engine.AppendLeaseKey(nil, 7, []byte("k")), nil))
				bad.must(b.Commit())
				bad.must(bad.engine.Flush(t.Context()))
				if c.before {
					r.split("m")
					m.lead("m", 1)
					r.put("n", "v")
					r.caughtUp(bad)
				}
				bad.crash()
				bad.rot(command.AttachmentKey(1, 7)[:9])
				bad.start()
				if q, ok := bad.host.Quarantined()[keyspace.RangeID(1).Group()]; !ok {
					t.Fatalf("quarantine %+v", q)
				}
				if !c.before {
					r.split("m")
				}
				r.put("n", "w")
				m.replaceOn("k", 3, 4)
				d, _ := r.route([]byte("n"))
				whole := func() bool {
					p := bad.node.Load().Replica(d.Range)
					_, closed := bad.host.Quarantined()[d.Range.Group()]
					return p != nil && (closed || p.Descriptor().Generation != 0)
				}
				for range 600 {
					if whole() {
						break
					}
					time.Sleep(100 * time.Millisecond)
				}
				if !whole() {
					t.Fatalf("range %s is neither here nor in quarantine", d.Range)
				}
				if _, closed := bad.host.Quarantined()[d.Range.Group()]; closed {
					m.replaceOn("n", 3, 4)
					m.replaceOn("n", 4, 3)
				}
				m.replaceOn("k", 4, 3)
				r.put("k", "back")
				r.put("n", "back")
			})
		})
	}
}
