package engine

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/keyspace"
)

// TestCommitVisibleThenDurable checks the two steps of a write.
func TestCommitVisibleThenDurable(t *testing.T) {
	e := openTest(t, vfs.NewMem())
	b := e.NewBatch()
	if err := b.Set(GroupLocalKey(7, []byte("k")), []byte("v")); err != nil {
		t.Fatal(err)
	}
	want := Applied{Index: 11, Term: 5, ConfIndex: 10, Replicas: []keyspace.Replica{{ID: 1, Node: 2, Role: keyspace.RoleVoter}}, Payload: []byte("descriptor")}
	if err := b.SetApplied(7, want); err != nil {
		t.Fatal(err)
	}
	if err := b.Commit(); err != nil {
		t.Fatal(err)
	}
	if a, ok, err := e.Applied(7); err != nil || !ok || a.Index != 11 {
		t.Fatalf("applied after commit: %+v %v %v", a, ok, err)
	}
	if a, ok, err := e.DurableApplied(7); err != nil || ok {
		t.Fatalf("durable before a flush: %+v %v %v", a, ok, err)
	}
	if err := e.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a, ok, err := e.DurableApplied(7); err != nil || !ok || a.Index != 11 || string(a.Payload) != "descriptor" {
		t.Fatalf("durable after a flush: %+v %v %v", a, ok, err)
	}
}

// gather returns the values of metrics; of a histogram, how many there were.
func gather(t *testing.T, r prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		m := f.GetMetric()[0]
		values[f.GetName()] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return values
}

// TestMetrics gathers the metrics of an open store and of a closed one.
func TestMetrics(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	o := testOptions(vfs.NewMem())
	o.Metrics = NewMetrics(r)
	e, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	put(t, e, "k", 2, "v")
	if err := e.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	values := gather(t, r)
	for _, name := range []string{
		"etcd_mvcc_db_total_size_in_bytes", "etcd_mvcc_db_total_size_in_use_in_bytes",
		"etcd_disk_backend_commit_duration_seconds", "skein_engine_flushes_total", "skein_engine_flush_bytes_total",
	} {
		if values[name] <= 0 {
			t.Errorf("%s is %v", name, values[name])
		}
	}
	if n, err := e.EstimateSpanBytes(keyspace.Span{}); err != nil || n <= 0 {
		t.Errorf("estimate: %d %v", n, err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	if _, ok := gather(t, r)["etcd_mvcc_db_total_size_in_bytes"]; ok {
		t.Error("a closed store still tells its size")
	}
}

// TestVisitApplied visits groups, completely and in part.
func TestVisitApplied(t *testing.T) {
	e := openTest(t, vfs.NewMem())
	groups := []keyspace.GroupID{1, 7, 300, keyspace.PlacementGroup}
	commit(t, e, func(b *Batch) error {
		for _, g := range groups {
			if err := b.SetApplied(g, Applied{Index: 11, Term: 5}); err != nil {
				return err
			}
		}
		return b.SetApplied(8, Applied{Index: 11, Term: 5})
	})
	commit(t, e, func(b *Batch) error { return b.DeleteApplied(8) })
	for _, n := range []int{len(groups), 2} {
		var got []keyspace.GroupID
		enough := errors.New("enough")
		err := e.VisitApplied(func(g keyspace.GroupID, a Applied) error {
			if got = append(got, g); len(got) == n && n < len(groups) {
				return enough
			}
			return nil
		})
		if !slices.Equal(got, groups[:n]) || (err == nil) != (n == len(groups)) || err != nil && !errors.Is(err, enough) {
			t.Errorf("groups %v and %v, want %v", got, err, groups[:n])
		}
	}
}

// TestOldTablesUnderSnapshot holds a snapshot over flushes and compactions: it shows its
// state as long as it is open.
func TestOldTablesUnderSnapshot(t *testing.T) {
	e := openTest(t, vfs.NewMem())
	put(t, e, "a", 2, "old")
	s := e.NewSnapshot()
	want := dump(t, s)
	for i := range 5 {
		commit(t, e, func(b *Batch) error {
			return b.DeleteRange(VersionedSpan(keyspace.Span{}).Lower, VersionedSpan(keyspace.Span{}).Upper)
		})
		put(t, e, "a", keyspace.Revision(3+i), "new")
		if err := e.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := dump(t, s); got != want {
			t.Fatalf("after flush %d the snapshot shows\n%swant\n%s", i, got, want)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestCompactionMemory: the memory of a compaction for an unfinished table is bounded,
// even if the table has only values of older versions.
func TestCompactionMemory(t *testing.T) {
	const block, buffer, bound = 4 << 10, 32 << 10, 128 << 20
	e := openTest(t, vfs.NewMem())
	o := testOptions(vfs.NewMem())
	po := e.pebbleOptions(&o)
	po.Cache.Unref()
	for i, l := range po.Levels {
		if n := po.TargetFileSizes[i] / int64(l.BlockSize) * buffer; l.BlockSize < block || n > bound {
			t.Errorf("level %d: tables of %d bytes, blocks of %d: %d bytes in memory, bound %d", i, po.TargetFileSizes[i], l.BlockSize, n, bound)
		}
	}
}

// Pebble takes the memory of its memtables from the cache. Full ones, of which it keeps two, leave the cache what it is
// to have, and the metrics say what it holds.
func TestFullMemtablesLeaveTheCache(t *testing.T) {
	r := prometheus.NewRegistry()
	o := testOptions(vfs.NewMem())
	o.CacheBytes, o.MemTableBytes, o.Metrics = 1<<20, 1<<20, NewMetrics(r)
	e, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}()
	const keys, valueBytes = 800, 4 << 10
	value := make([]byte, valueBytes)
	rng := rand.New(rand.NewPCG(1, 0))
	for i := range keys {
		for j := range value {
			value[j] = byte(rng.Uint32())
		}
		put(t, e, fmt.Sprintf("%04d", i), keyspace.Revision(2+i), string(value))
	}
	if err := e.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	read := func() {
		for i := range keys / 8 { // less than the cache
			if _, ok, err := e.Get(AppendVersionedKey(nil, fmt.Appendf(nil, "%04d", i), keyspace.Revision(2+i))); err != nil || !ok {
				t.Fatal(ok, err)
			}
		}
	}
	read()
	before := gather(t, r)
	read()
	after := gather(t, r)
	if got := before["skein_engine_memtable_bytes"]; got < float64(o.MemTableBytes) {
		t.Fatalf("the memtables have %v bytes: they are not full", got)
	}
	if got := before["skein_engine_block_cache_bytes"]; got < keys/8*valueBytes {
		t.Errorf("the cache holds %v bytes of the %d that were read", got, keys/8*valueBytes)
	}
	if hits := after["skein_engine_block_cache_hits_total"] - before["skein_engine_block_cache_hits_total"]; hits < keys/8 {
		t.Errorf("%v blocks were found when %d keys were read again", hits, keys/8)
	}
}

// A table has its index in one block, and a filter.
func TestIndexAndFilterOfTables(t *testing.T) {
	e := openTest(t, vfs.NewMem())
	for i := range 2000 {
		put(t, e, fmt.Sprintf("%032d", i), keyspace.Revision(2+i), strings.Repeat("v", 1<<10))
	}
	if err := e.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	levels, err := e.db.SSTables(pebble.WithProperties())
	if err != nil {
		t.Fatal(err)
	}
	blocks := uint64(0)
	for _, tables := range levels {
		for i := range tables {
			p := tables[i].Properties
			if p.IndexPartitions != 0 || p.FilterSize == 0 {
				t.Errorf("a table of %d blocks has an index in %d parts, and a filter of %d bytes", p.NumDataBlocks, p.IndexPartitions, p.FilterSize)
			}
			blocks = max(blocks, p.NumDataBlocks)
		}
	}
	if blocks < 200 {
		t.Errorf("%d blocks in the largest table: its index had room in a small block", blocks)
	}
}
