package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// rot changes one byte behind each place where the files of a directory below have the
// mark, and returns how many places that were.
func (d *memDisk) rot(t *testing.T, dir string, mark []byte) (places int) {
	t.Helper()
	names, err := d.mem.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, "MANIFEST") {
			continue // it names keys too
		}
		path := d.mem.PathJoin(dir, name)
		st, err := d.mem.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the engine removed what it needs no longer
		}
		if err != nil {
			t.Fatal(err)
		}
		if st.IsDir() {
			places += d.rot(t, path, mark)
			continue
		}
		f, err := d.mem.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		if at := bytes.Index(whole, mark); at >= 0 {
			at += len(mark)
			if _, err := f.WriteAt([]byte{whole[at] ^ 1}, int64(at)); err != nil {
				t.Fatal(err)
			}
			places++
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return places
}

// A replica whose table turns out to be rotten when it is read goes into quarantine, says why, and
// answers nothing more, also after a restart. Its node and the range go on.
func TestRotInTheStoreEndsTheReplica(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		r.pause() // nobody replaces it
		n, others := r.nodes[0], r.nodes[1:]
		// Random, so that they lie on the disk as they are here, and large: the block that rots
		// holds nothing else, and is read by nobody before the range is.
		var value []byte
		for i := range 9 {
			v := make([]byte, 64<<10)
			for at := range v {
				v[at] = byte(r.rng.Uint32())
			}
			if i == 4 {
				value = v
			}
			r.mustPut(n, keyOf(i), string(v))
		}
		r.caughtUp(5 * time.Second)
		r.stop(n)
		r.start(n) // with nothing of it in memory
		r.caughtUp(20 * time.Second)
		if places := n.disk.rot(t, "data", value[:64]); places == 0 {
			t.Fatal("the value is in no file")
		}
		time.Sleep(5 * time.Second)
		if err := n.core.Err(); err != nil {
			t.Fatalf("before the rotten block was read: %v", err)
		}
		id := n.summaries()[0].Descriptor.Range
		hash, err := n.core.Ranges().HashAt(r.t.Context(), n.id, id, keyspace.MaxRevision-1, 0)
		if err == nil {
			t.Fatalf("the rotten range has the hash %#x", hash)
		}
		quarantined := func() bool {
			q, ok := n.core.host.Quarantined()[id.Group()]
			return ok && strings.Contains(q.Reason, "corruption in ") && n.core.host.Group(id.Group()) == nil
		}
		r.wait(time.Second*5, "the replica is in quarantine", quarantined)
		for _, again := range []bool{false, true} {
			if again {
				time.Sleep(time.Second) // the note is durable
				r.crash(n)
				r.start(n)
				if !quarantined() {
					t.Errorf("after a crash: %v", n.core.host.Quarantined())
				}
			}
			r.wait(10*time.Second, "the range serves", func() bool {
				_, err := n.put(r.t.Context(), "after", "it")
				return err == nil
			})
			for _, o := range append(others, n) {
				r.mustGet(o, keyOf(4), string(value))
			}
			if err := n.core.Err(); err != nil {
				t.Errorf("the node has given up: %v", err)
			}
		}
	})
}

// A node whose log or own records have rotted before their end does not start, also not after another
// try. It says where the damage is and what to do. The others go on.
func TestRotInTheLogKeepsTheNodeDown(t *testing.T) {
	t.Run("log", func(t *testing.T) { testRotKeepsTheNodeDown(t, "wal", ".wal is damaged at offset") })
	t.Run("own records", func(t *testing.T) { testRotKeepsTheNodeDown(t, "data", "checksum mismatch") })
}

func testRotKeepsTheNodeDown(t *testing.T, dir, says string) {
	t.Helper()
	bubble(t, 3, nil, nil, func(r *rig) {
		n, other := r.nodes[0], r.nodes[1]
		value := make([]byte, 8<<10) // random, so that it is found on the disk
		for at := range value {
			value[at] = byte(r.rng.Uint32())
		}
		r.mustPut(other, keyOf(1), string(value))
		for i := range 20 {
			r.mustPut(other, keyOf(2), strings.Repeat("behind", i))
		}
		r.caughtUp(5 * time.Second)
		r.crash(n)
		mark := value[:64]
		if dir == "data" {
			mark = []byte("raftgroup/promise")
		}
		if places := n.disk.rot(t, dir, mark); places == 0 {
			t.Fatal("the mark is in no file")
		}
		for range 2 {
			c, err := Open(r.t.Context(), r.optionsOf(n))
			if err == nil {
				n.set(c)
				t.Fatal("the node has started")
			}
			for _, want := range []string{says, "member remove", "--join", "data", "wal"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v does not say %q", err, want)
				}
			}
		}
		r.wait(10*time.Second, "the others go on", func() bool {
			_, err := other.put(r.t.Context(), keyOf(3), "without it")
			return err == nil
		})
		r.mustGet(other, keyOf(1), string(value))
	})
}

// A node whose own records rot while it runs ends, and says the same.
func TestRotInOwnRecordsEndsTheNode(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		n := r.nodes[0]
		r.mustPut(n, keyOf(1), "before")
		r.caughtUp(5 * time.Second)
		// Random, and so large that the block of the second one holds nothing else: nobody reads it.
		key, value := engine.NodeLocalKey([]byte("zz")), make([]byte, 128<<10)
		for at := range value {
			value[at] = byte(r.rng.Uint32())
		}
		b := n.core.engine.NewBatch()
		if err := errors.Join(b.Set(engine.NodeLocalKey([]byte("zy")), value[1:]), b.Set(key, value), b.Commit(), n.core.engine.Flush(r.t.Context())); err != nil {
			t.Fatal(err)
		}
		r.stop(n)
		r.start(n)
		r.caughtUp(20 * time.Second)
		if places := n.disk.rot(t, "data", value[:64]); places == 0 {
			t.Fatal("the mark is in no file")
		}
		if _, _, err := n.core.engine.Get(key); err == nil {
			t.Fatal("the bad block was read")
		}
		r.wait(time.Second, "the node ends", func() bool { return n.core.Err() != nil })
		for _, want := range []string{"checksum mismatch", "member remove", "--join", "data", "wal"} {
			if err := n.core.Err(); !strings.Contains(err.Error(), want) {
				t.Errorf("%v does not say %q", err, want)
			}
		}
		r.crash(n)
	})
}

// A bad table on each of two nodes of three costs one range each a replica. While clients write to every
// range, both are rebuilt, with new ids, and nobody is restarted. Every range takes writes all the time.
// The nodes say what they lack, and nothing any more once all replicas are equal again.
func TestRotOnTwoNodesIsRebuilt(t *testing.T) {
	bubble(t, 3, [][]byte{[]byte("k0010")}, nil, func(r *rig) {
		r.publish(r.nodes...)
		keys := []string{keyOf(1), keyOf(11)}
		marks := make([][]byte, len(keys))
		// Random, as in TestRotInTheStoreEndsTheReplica, and so many that no table holds the first of one
		// range or the last of the other and a key of both.
		for i := range 2 * 40 {
			v := make([]byte, 200<<10)
			for at := 0; at < len(v); at += 8 {
				binary.LittleEndian.PutUint64(v[at:], r.rng.Uint64())
			}
			r.mustPut(r.nodes[2], fmt.Sprintf("%s%02d", keys[i/40], i%40), string(v))
			if i == 0 || i == 2*40-1 {
				marks[i/40] = v[:64]
			}
		}
		r.caughtUp(20 * time.Second)
		for _, n := range r.nodes[:2] {
			r.stop(n)
			r.start(n)
			r.caughtUp(20 * time.Second)
		}
		ctx, stop := context.WithCancel(r.t.Context())
		longest := make([]time.Duration, len(keys))
		wrote := make([]int, len(keys))
		var wg sync.WaitGroup
		defer wg.Wait()
		defer stop()
		for i, key := range keys {
			wg.Go(func() {
				// A write under way is waited for: whether it is done is known then.
				for last := time.Now(); ctx.Err() == nil; time.Sleep(fewer(5*time.Millisecond, 50*time.Millisecond)) {
					if _, err := r.nodes[2].put(r.t.Context(), key, fmt.Sprint(wrote[i])); err == nil {
						wrote[i]++
						longest[i], last = max(longest[i], time.Since(last)), time.Now()
					}
				}
			})
		}
		time.Sleep(5 * time.Second)
		was := make([]keyspace.Descriptor, len(keys))
		for i := range keys {
			n := r.nodes[i]
			was[i] = rangeWith(n, keys[i])
			if places := n.disk.rot(t, "data", marks[i]); places == 0 {
				t.Fatalf("node %s has no table with the value", n.id)
			}
		}
		for i := range keys {
			n := r.nodes[i]
			if hash, err := n.core.Ranges().HashAt(ctx, n.id, was[i].Range, keyspace.MaxRevision-1, 0); err == nil {
				t.Fatalf("the rotten range has the hash %#x", hash)
			}
		}
		said := map[keyspace.NodeID]string{}
		shown := func() (rows int) {
			for _, n := range r.nodes {
				s, err := r.operator(r.nodes[2]).a.ShowNode(r.t.Context(), n.id.String())
				if err != nil {
					t.Fatal(err)
				}
				rows += len(s.GetQuarantined())
				for _, q := range s.GetQuarantined() {
					said[n.id] = fmt.Sprintf("range %d: %s", q.GetRange(), q.GetReason())
				}
			}
			return rows
		}
		r.wait(5*time.Second, "both nodes say it", func() bool { return shown() == 2 })
		for i, d := range was {
			if want := fmt.Sprintf("range %s: corruption in ", d.Range); !strings.HasPrefix(said[r.nodes[i].id], want) {
				t.Errorf("node %s says %q, want %q", r.nodes[i].id, said[r.nodes[i].id], want)
			}
		}
		admin := r.operator(r.nodes[2]).a
		for i, d := range was {
			rs, err := admin.ShowRange(r.t.Context(), d.Range)
			if err != nil {
				t.Fatal(err)
			}
			for j, m := range rs.GetRange().GetMembers() {
				bad := d.Replicas[j].Node == r.nodes[i].id
				if (m.GetQuarantine() != "") != bad || strings.HasPrefix(rs.GetReplicas()[j].GetError(), "in quarantine: corruption in ") != bad {
					t.Errorf("range %s, %v: %v", d.Range, m, rs.GetReplicas()[j].GetError())
				}
			}
		}
		if l, err := admin.Nodes(r.t.Context()); err != nil || l.GetNodes()[0].GetQuarantined() != 1 || l.GetNodes()[2].GetQuarantined() != 0 {
			t.Errorf("the list of nodes: %v, %v", l, err)
		}
		took := r.wait(2*time.Minute, "both replicas are rebuilt", func() bool {
			for i, d := range was {
				old, _ := d.ReplicaOn(r.nodes[i].id)
				now := rangeWith(r.nodes[2], keys[i])
				m, ok := now.ReplicaOn(r.nodes[i].id)
				if !ok || m.ID == old.ID || m.Role != keyspace.RoleVoter || len(now.Replicas) != 3 {
					return false
				}
			}
			return shown() == 0
		})
		time.Sleep(5 * time.Second)
		stop()
		wg.Wait()
		t.Logf("rebuilt within %v; the longest time without a write: %v", took, longest)
		for i := range keys {
			if longest[i] > 2*rigElection {
				t.Errorf("%s: no write for %v", keys[i], longest[i])
			}
		}
		r.caughtUp(20 * time.Second)
		for i, d := range was {
			var hashes []uint64
			for _, n := range r.nodes {
				h, err := n.core.Ranges().HashAt(r.t.Context(), n.id, d.Range, keyspace.MaxRevision-1, 0)
				if err != nil {
					t.Errorf("range %s on node %s: %v", d.Range, n.id, err)
				}
				hashes = append(hashes, h)
				r.mustGet(n, keys[i], fmt.Sprint(wrote[i]-1))
				if err := n.core.Err(); err != nil {
					t.Errorf("node %s has given up: %v", n.id, err)
				}
			}
			if hashes[0] != hashes[1] || hashes[0] != hashes[2] {
				t.Errorf("range %s has the hashes %#x", d.Range, hashes)
			}
		}
		r.stop(r.nodes...)
	})
}

// rangeWith returns the range that holds the key, as the node's replica has it.
func rangeWith(n *rigNode, key string) keyspace.Descriptor {
	for _, s := range n.summaries() {
		if s.Descriptor.Span.Contains([]byte(key)) {
			return s.Descriptor
		}
	}
	return keyspace.Descriptor{}
}

// A range with two of three replicas in quarantine is left alone, and named. Its third replica is read
// serializably yet, and other ranges go on. Each node logs and counts it; that a client ends the alarms is not its end.
func TestRangeWithoutQuorumInQuarantineIsLeftAlone(t *testing.T) {
	logged, metrics := map[keyspace.NodeID]*observer.ObservedLogs{}, map[keyspace.NodeID]*prometheus.Registry{}
	bubble(t, 3, [][]byte{[]byte("k0010")}, func(o *Options) {
		core, logs := observer.New(zap.InfoLevel)
		logged[o.Self], metrics[o.Self] = logs, prometheus.NewRegistry()
		o.Logger, o.Registry = zap.New(core), metrics[o.Self]
	}, func(r *rig) {
		r.publish(r.nodes...)
		r.spread(r.nodes[2], 12, "v")
		r.caughtUp(10 * time.Second)
		was := rangeWith(r.nodes[2], keyOf(1))
		for _, n := range r.nodes[:2] {
			n.core.host.Quarantine(was.Range.Group(), "its state cannot be trusted")
		}
		time.Sleep(time.Minute)
		admin := r.operator(r.nodes[2]).a
		for _, n := range r.nodes[:2] {
			s, err := admin.ShowNode(r.t.Context(), n.id.String())
			if q := s.GetQuarantined(); err != nil || len(q) != 1 || !strings.Contains(q[0].GetOutlook(), "lost its quorum") {
				t.Errorf("node %s: %v, %v", n.id, q, err)
			}
		}
		if now := rangeWith(r.nodes[2], keyOf(1)); !slices.Equal(now.Replicas, was.Replicas) {
			t.Errorf("its replicas were %v and are %v", was.Replicas, now.Replicas)
		}
		resp, err := r.nodes[2].core.KV().Range(r.t.Context(), &pb.RangeRequest{Key: []byte(keyOf(1)), Serializable: true})
		if err != nil || len(resp.GetKvs()) != 1 {
			t.Errorf("a serializable read: %v, %v", resp, err)
		}
		r.mustPut(r.nodes[0], keyOf(11), "after")
		r.mustGet(r.nodes[1], keyOf(11), "after")
		if _, _, err := admin.SplitRange(r.t.Context(), []byte(keyOf(1))); err == nil || !strings.HasPrefix(err.Error(), "no quorum for range ") || !strings.Contains(err.Error(), "replicas in quarantine on n, n") {
			t.Errorf("a split: %v", err)
		}
		for range 30 {
			for _, n := range r.nodes[:2] {
				if _, err := (etcdAlarms{r.nodes[2].core}).Deactivate(r.t.Context(), pb.AlarmType_CORRUPT, n.id); err != nil {
					t.Error(err)
				}
			}
			time.Sleep(700 * time.Millisecond) // looks fall into each part of a round of placement
		}
		for _, n := range r.nodes {
			told := logged[n.id].FilterLevelExact(zap.ErrorLevel).FilterMessageSnippet("no quorum for ")
			if told.Len() != 1 || told.All()[0].Message != "no quorum for one range: replicas in quarantine on n, n" {
				t.Errorf("node %s has logged %s", n.id, lines(told.All()))
			}
			if over := logged[n.id].FilterMessageSnippet("have a quorum again").Len(); over > 0 {
				t.Errorf("node %s has logged that it is over", n.id)
			}
			if got := stoppedRanges(t, metrics[n.id]); got != 1 {
				t.Errorf("node %s counts %v", n.id, got)
			}
		}
		for _, n := range r.nodes {
			n.core.Crash()
			n.core = nil
		}
	})
}
