package shard

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// loadRig is a range of a new cluster that is being loaded.
type loadRig struct {
	*fakeWorld
	t    *testing.T
	term uint64
}

func loading(t *testing.T, f func(t *testing.T, w *loadRig)) { loadingWith(t, Limits{}, f) }

func loadingWith(t *testing.T, l Limits, f func(t *testing.T, w *loadRig)) {
	virtually(t, func(t *testing.T) {
		w := &loadRig{newLeasedWorld(t, l, "auto"), t, 5}
		defer w.stop()
		w.serve(1, 5)
		f(t, w)
	})
}

func loaded(key string, mod, create keyspace.Revision, version int64) mvcc.Version {
	return mvcc.Version{Key: []byte(key), Mod: mod, Create: create, Version: version, Value: fmt.Appendf(nil, "%s-%d", key, mod)}
}

func gone(key string, mod keyspace.Revision) mvcc.Version {
	return mvcc.Version{Key: []byte(key), Mod: mod, Tombstone: true}
}

func attached(v mvcc.Version, lease keyspace.LeaseID) mvcc.Version {
	v.Lease = lease
	return v
}

// someStore is a store of some keys, in the order of a bulk. Lease 7 lives, lease 8 does not.
func someStore() []mvcc.Version {
	return []mvcc.Version{
		loaded("a", 9, 3, 3), loaded("a", 5, 3, 2), loaded("a", 3, 3, 1),
		gone("b", 8), attached(loaded("b", 4, 4, 1), 7),
		attached(loaded("k", 10, 6, 2), 7), loaded("k", 6, 6, 1),
		attached(loaded("m", 7, 7, 1), 8),
		attached(loaded("x", 12, 11, 2), 7), attached(loaded("x", 11, 11, 1), 8),
	}
}

func putOf(id keyspace.RangeID, g keyspace.Generation, stage rangeapi.LoadStage, vs ...mvcc.Version) *rangeapi.LoadRequest {
	q := &rangeapi.LoadRequest{Range: id, Generation: g, Step: rangeapi.LoadPut, Stage: stage, Incarnation: 40, Alive: []keyspace.LeaseID{7}, Count: len(vs)}
	for i := range vs {
		q.Versions = rangeapi.AppendStoredVersion(q.Versions, &vs[i])
	}
	return q
}

// load sends a request and applies what is proposed for it.
func (w *loadRig) load(q *rangeapi.LoadRequest) (*rangeapi.LoadAnswer, error) {
	w.t.Helper()
	type answer struct {
		a   *rangeapi.LoadAnswer
		err error
	}
	done := make(chan answer, 1)
	go func() {
		a, err := w.store.Load(w.t.Context(), q)
		done <- answer{a, err}
	}()
	g := w.groups.group(q.Range)
	for {
		synctest.Wait()
		select {
		case r := <-done:
			return r.a, r.err
		default:
		}
		e := g.take(0)
		// What a log does not take would be proposed for ever.
		if most := w.limits.MaxRecordBytes; most > 0 && len(e.data) > most+128 {
			w.t.Fatalf("an entry of %d bytes, and the log takes %d", len(e.data), most+128)
		}
		if err := g.apply(entryOf(e)); err != nil {
			w.t.Fatal(err)
		}
	}
}

// An entry is as large as the log takes, which is less than a request may write if the log has small segments. This holds
// for versions in both stages, for leases, and with a long key in the cursor. What no entry can hold is refused.
func TestLoadFitsIntoTheLog(t *testing.T) {
	loadingWith(t, Limits{MaxRecordBytes: 1000}, func(t *testing.T, w *loadRig) {
		large := func(key string, mod keyspace.Revision, size int) mvcc.Version {
			v := loaded(key, mod, mod, 1)
			v.Value = make([]byte, size)
			return v
		}
		long := strings.Repeat("k", 400)
		var bulk, follow []mvcc.Version
		for i := range 20 {
			bulk = append(bulk, large(fmt.Sprintf("%s%02d", long, i), keyspace.Revision(i+2), 150))
			follow = append(follow, large(fmt.Sprint("m", i), keyspace.Revision(i+30), 300))
		}
		w.must(putOf(1, 1, rangeapi.LoadBulk, bulk...))
		_, err := w.load(putOf(1, 1, rangeapi.LoadBulk, large("l", 25, 700)))
		wantKind(t, "a version that fits into no entry", err, kverror.RequestTooLarge)
		w.must(putOf(1, 1, rangeapi.LoadFollow, follow...))
		w.want(append(bulk, follow...), 1)

		attach := putOf(1, 1, rangeapi.LoadFollow)
		attach.Alive = nil
		var all []mvcc.Version
		for i := range 300 {
			lease := keyspace.LeaseID(1<<60 + i)
			attach.Alive = append(attach.Alive, lease)
			all = append(all, attached(loaded(fmt.Sprintf("n%03d", i), keyspace.Revision(60+i), keyspace.Revision(60+i), 1), lease))
		}
		for i := range 300 {
			all = append(all, gone(fmt.Sprintf("n%03d", i), keyspace.Revision(400+i)))
		}
		for i := range all {
			attach.Versions = rangeapi.AppendStoredVersion(attach.Versions, &all[i])
		}
		attach.Count = len(all)
		w.must(attach)
		w.must(&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadTrim, Incarnation: 40})
		a := w.must(&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadLook, Lease: -1 << 63})
		if len(a.Leases) != 0 || a.Versions != uint64(len(bulk)+len(follow)+len(all)) {
			t.Errorf("%d leases without keys, %d versions", len(a.Leases), a.Versions)
		}
	})
}

// restart stops the node and starts it again; its replicas lead in a new term.
func (w *loadRig) restart() {
	ids := w.store.Replicas()
	w.stop()
	w.start()
	w.term++
	for _, r := range ids {
		w.serve(r.Range(), w.term)
	}
}

// split cuts a range that this node leads.
func (w *loadRig) split(id keyspace.RangeID, key string, child keyspace.RangeID) {
	w.t.Helper()
	if err := w.groups.group(id).apply(splitAt(w.term, w.store.Replica(id).Descriptor().Generation, key, child)); err != nil {
		w.t.Fatal(err)
	}
	synctest.Wait()
	w.serve(child, w.term)
}

func wantKind(t *testing.T, what string, err error, kind kverror.Kind) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: %v, want %s", what, err, kind)
	}
}

func (w *loadRig) must(q *rangeapi.LoadRequest) *rangeapi.LoadAnswer {
	w.t.Helper()
	a, err := w.load(q)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

func (w *loadRig) record(id keyspace.RangeID) command.Record {
	w.t.Helper()
	a, ok, err := w.engine.Applied(id.Group())
	if err != nil || !ok {
		w.t.Fatal(ok, err)
	}
	rec, err := command.DecodeRecord(a.Payload)
	if err != nil {
		w.t.Fatal(err)
	}
	return rec
}

// want checks that ranges have exactly the versions, however they came.
func (w *loadRig) want(vs []mvcc.Version, ids ...keyspace.RangeID) {
	w.t.Helper()
	var sum, count, want uint64
	var live int64
	newest := map[string]mvcc.Version{}
	for i := range vs {
		want += mvcc.HashWrite(&vs[i])
		if n := newest[string(vs[i].Key)]; vs[i].Mod > n.Mod {
			newest[string(vs[i].Key)] = vs[i]
		}
	}
	uncounted := false
	for _, id := range ids {
		rec := w.record(id)
		sum, count, live = sum+rec.Load.Sum, count+rec.Load.Versions, live+rec.Live
		uncounted = uncounted || !rec.Counted
	}
	living, leased := int64(0), []string{}
	for k, v := range newest {
		if !v.Tombstone {
			living++
		}
		if v.Lease == 7 {
			leased = append(leased, k)
		}
	}
	slices.Sort(leased)
	if sum != want || count != uint64(len(vs)) || !uncounted && live != living {
		w.t.Errorf("%d versions of sum %x with %d living keys, want %d, %x, %d", count, sum, live, len(vs), want, living)
	}
	hash, err := mvcc.Hash(w.engine, keyspace.Span{}, 1000, 0)
	model, merr := mvccSum(vs)
	if err != nil || merr != nil || hash != model {
		w.t.Errorf("the store has hash %x, %v, want %x, %v", hash, err, model, merr)
	}
	var keys []string
	for _, lease := range []keyspace.LeaseID{7, 8} {
		if err := mvcc.Attached(w.engine, lease, keyspace.Span{}, func(k []byte) error {
			keys = append(keys, string(k))
			return nil
		}); err != nil {
			w.t.Fatal(err)
		}
	}
	if fmt.Sprint(keys) != fmt.Sprint(leased) {
		w.t.Errorf("keys %v are attached, want %v", keys, leased)
	}
}

// mvccSum is the hash of a store that has exactly the versions.
func mvccSum(vs []mvcc.Version) (uint64, error) {
	e, err := engine.Open(engine.Options{FS: simdisk.New(), Dir: "model", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		return 0, err
	}
	b := e.NewBatch()
	for i := range vs {
		if err := mvcc.Put(b, &vs[i]); err != nil {
			return 0, err
		}
	}
	if err := b.Commit(); err != nil {
		return 0, err
	}
	sum, err := mvcc.Hash(e, keyspace.Span{}, 1000, 0)
	return sum, errors.Join(err, e.Close())
}

// A store comes in pieces: in bulk, with a split in the middle, with requests that are repeated, with restarts
// between; then it follows; then it ends. At the end ranges have exactly what was loaded, and the next write
// builds on it. Trap 114: a lease without a record, and one of an old version, attach nothing.
// A cursor that is not durable would have versions counted twice after a restart.
func TestLoad(t *testing.T) {
	loading(t, func(t *testing.T, w *loadRig) {
		all := someStore()
		for i := range 4 {
			w.must(putOf(1, 1, rangeapi.LoadBulk, all[:i+1]...)) // each brings the ones before again
			if i == 2 {
				w.restart()
			}
		}
		if a := w.must(putOf(1, 1, rangeapi.LoadBulk, all[:2]...)); string(a.Key) != "b" || a.Revision != 8 || a.Versions != 4 {
			t.Errorf("the range is at %s with %d versions", &a.LoadCursor, a.Versions)
		}
		w.want(all[:4], 1)
		w.split(1, "l", 2)
		w.must(putOf(1, 2, rangeapi.LoadBulk, all[:7]...))
		w.must(putOf(2, 2, rangeapi.LoadBulk, all[7:9]...))
		w.restart()
		w.must(putOf(2, 2, rangeapi.LoadBulk, all[7:]...))
		w.want(all, 1, 2)
		if a := w.must(&rangeapi.LoadRequest{Range: 1, Generation: 2, Step: rangeapi.LoadLook}); fmt.Sprint(a.Leases) != "[7]" || a.LastRevision != 10 {
			t.Errorf("the range has keys of leases %v, revision %d", a.Leases, a.LastRevision)
		}

		after := []mvcc.Version{gone("a", 13), attached(loaded("b", 13, 13, 1), 7), loaded("k", 14, 6, 3), loaded("b", 15, 13, 2)}
		after[1].Sub, after[3].Sub = 1, 0
		w.must(putOf(1, 2, rangeapi.LoadFollow, after[:2]...))
		w.restart()
		w.must(putOf(1, 2, rangeapi.LoadFollow, after...))
		all = append(all, after...)
		w.want(all, 1, 2)

		for id := keyspace.RangeID(1); id <= 2; id++ {
			end := &rangeapi.LoadRequest{Range: id, Generation: 2, Step: rangeapi.LoadEnd, Incarnation: 40, Revision: 20, Compacted: 2}
			w.must(end)
			w.must(end)
			if rec := w.record(id); rec.LastRevision != 20 || rec.Compacted != 2 || rec.Load.Stage != rangeapi.LoadEnded {
				t.Errorf("range %s ends at %d, compacted %d, stage %s", id, rec.LastRevision, rec.Compacted, rec.Load.Stage)
			}
		}
		_, err := w.load(putOf(1, 2, rangeapi.LoadFollow, loaded("z", 21, 21, 1)))
		wantKind(t, "versions behind the end", err, kverror.BadRequest)
		w.want(all, 1, 2)
	})
}

// A lease whose keys went while the range followed leaves an attachment. A trim takes that away and no other, on
// as many entries as it needs; the range goes on, through restarts. Otherwise a lease that has the same id later gets
// keys here of which its record does not know. A range that follows trims by itself when there are many.
func TestLoadTrim(t *testing.T) {
	loading(t, func(t *testing.T, w *loadRig) {
		const many = 7000 // more than one entry has
		all := []mvcc.Version{attached(loaded("a", 3, 3, 1), 7), attached(loaded("b", 4, 4, 1), 9)}
		var alive []keyspace.LeaseID
		for i := range keyspace.LeaseID(many) {
			all = append(all, attached(loaded(fmt.Sprintf("c%05d", i), 5, 5, 1), 100+i))
			alive = append(alive, 100+i)
		}
		put := putOf(1, 1, rangeapi.LoadBulk, all...)
		put.Alive = append([]keyspace.LeaseID{7, 9}, alive...)
		w.must(put)
		leases := func() []keyspace.LeaseID {
			return w.must(&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadLook, Lease: -1 << 63}).Leases
		}
		trim := &rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadTrim, Incarnation: 40}
		w.must(trim)
		if got := leases(); len(got) != many+2 {
			t.Fatalf("%d leases with keys, want %d", len(got), many+2)
		}
		var after []mvcc.Version
		for i := range many {
			v := gone(fmt.Sprintf("c%05d", i), 7)
			v.Sub = uint32(i)
			after = append(after, v)
		}
		w.must(putOf(1, 1, rangeapi.LoadFollow, after...))
		if got := leases(); fmt.Sprint(got) != "[7 9]" {
			t.Fatalf("%d leases after most of them ended, want [7 9]", len(got))
		}
		after = append(after, gone("b", 8))
		w.must(putOf(1, 1, rangeapi.LoadFollow, after...))
		if got := leases(); fmt.Sprint(got) != "[7 9]" {
			t.Fatalf("leases %v before the trim, want [7 9]", got)
		}
		before := w.record(1)
		w.must(trim)
		w.must(trim)
		for range 2 {
			if got := leases(); fmt.Sprint(got) != "[7]" {
				t.Errorf("leases %v, want [7]", got)
			}
			if rec := w.record(1); fmt.Sprint(rec.Load) != fmt.Sprint(before.Load) || rec.Hash != before.Hash {
				t.Errorf("the trim changed the load from %v to %v", before.Load, rec.Load)
			}
			w.restart()
		}
		w.want(append(all, after...), 1)
		w.must(putOf(1, 1, rangeapi.LoadFollow, attached(loaded("a", 9, 3, 2), 7), gone("a", 10)))
		w.must(&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadEnd, Incarnation: 40, Revision: 20, Compacted: 5})
		w.must(trim) // the rest of a finish that is repeated
		if got := leases(); fmt.Sprint(got) != "[7]" {
			t.Errorf("a trim behind the end left leases %v, want [7]", got)
		}
		_, err := w.load(&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadEnd, Incarnation: 40, Revision: 20, Compacted: 4})
		wantKind(t, "an end that is compacted less", err, kverror.BadRequest)
	})
}

// What a load cannot take is refused with what is wrong, and changes nothing. Trap 115: a value above the bound of an
// entry is refused by key. Trap 122: a full disk refuses versions, and the load goes on once there is room.
func TestLoadRefuses(t *testing.T) {
	loading(t, func(t *testing.T, w *loadRig) {
		all := someStore()
		w.disk.mu.Lock()
		w.disk.full = true
		w.disk.mu.Unlock()
		_, err := w.load(putOf(1, 1, rangeapi.LoadBulk, all...))
		wantKind(t, "a full disk", err, kverror.NoSpace)
		w.disk.mu.Lock()
		w.disk.full = false
		w.disk.mu.Unlock()
		w.must(putOf(1, 1, rangeapi.LoadBulk, all[:3]...))
		large := loaded("c", 3, 3, 1)
		large.Value = make([]byte, 5<<20)
		gap := putOf(1, 1, rangeapi.LoadBulk, all[7:]...)
		gap.After = rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: []byte("k"), Revision: 6}
		for what, x := range map[string]struct {
			q    *rangeapi.LoadRequest
			kind kverror.Kind
			text string
		}{
			"a gap":            {gap, kverror.BadRequest, `behind key "k"`},
			"no order":         {putOf(1, 1, rangeapi.LoadBulk, all[8], all[6]), kverror.BadRequest, "not behind"},
			"a value too long": {putOf(1, 1, rangeapi.LoadBulk, large), kverror.RequestTooLarge, `key "c" at revision 3`},
			"an old revision":  {putOf(1, 1, rangeapi.LoadFollow, loaded("a", 9, 9, 1)), kverror.BadRequest, "revision 9 already"},
			"a gap of a key":   {putOf(1, 1, rangeapi.LoadFollow, loaded("a", 19, 3, 9)), kverror.NotNext, "would be version"},
			"an early end":     {&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadEnd, Incarnation: 40, Revision: 8}, kverror.BadRequest, "cannot end"},
			"broken bytes":     {&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadPut, Stage: rangeapi.LoadBulk, Incarnation: 40, Count: 1, Versions: []byte{1}}, kverror.BadRequest, "version 0"},
		} {
			if _, err := w.load(x.q); kverror.Of(err) == nil || kverror.Of(err).Kind != x.kind || !strings.Contains(err.Error(), x.text) {
				t.Errorf("%s: %v", what, err)
			}
		}
		w.want(all[:3], 1)
	})
}

// A range that has had a transaction takes no versions.
func TestLoadIntoUsedRange(t *testing.T) {
	loading(t, func(t *testing.T, w *loadRig) {
		w.seq.auto = true
		w.write(t, 5, "a", "1")
		_, err := w.load(putOf(1, 1, rangeapi.LoadBulk, someStore()...))
		wantKind(t, "a used range", err, kverror.BadRequest)
	})
}

// An entry of a leader that was lost does nothing where another one has taken its place, and what a leader takes
// builds on what is applied. After the load a put counts on: its hash is the one that replicas have.
func TestLoadThroughLeaders(t *testing.T) {
	loading(t, func(t *testing.T, w *loadRig) {
		all := someStore()
		g := w.groups.group(1)
		ctx, cancel := context.WithCancel(t.Context())
		lost := make(chan error, 1)
		go func() {
			_, err := w.store.Load(ctx, putOf(1, 1, rangeapi.LoadBulk, all[:5]...))
			lost <- err
		}()
		synctest.Wait()
		late := g.take(0)
		g.lead(raftgroup.LeaderState{Term: 6, Leader: 2, LeaderNode: 2})
		wantKind(t, "its leader was lost", <-lost, kverror.LeaderChanged)
		cancel()
		w.serve(1, 7)
		w.must(putOf(1, 1, rangeapi.LoadBulk, all[:3]...))
		if err := g.apply(raftgroup.Entry{Term: 7, Data: late.data}); err != nil { // made in term 5
			t.Fatal(err)
		}
		w.want(all[:3], 1)
		w.must(putOf(1, 1, rangeapi.LoadBulk, all...))
		w.must(&rangeapi.LoadRequest{Range: 1, Generation: 1, Step: rangeapi.LoadEnd, Incarnation: 40, Revision: 20})
		w.want(all, 1)
		w.seq.last, w.seq.auto = 20, true
		w.write(t, 7, "a", "next")
		resp, err := w.store.Do(t.Context(), &rangeapi.Request{Range: 1, Generation: 1, ReadRevision: 21, Op: &pb.RangeRequest{Key: []byte("a")}})
		if err != nil {
			t.Fatal(err)
		}
		if kv := resp.Op.(*pb.RangeResponse).Kvs[0]; kv.ModRevision != 21 || kv.CreateRevision != 3 || kv.Version != 4 {
			t.Errorf("the next put made %v", kv)
		}
	})
}

// The form of versions from a bulk is in the store's order.
func TestSomeStoreIsInOrder(t *testing.T) {
	if !slices.IsSortedFunc(someStore(), func(a, b mvcc.Version) int {
		return cmp.Or(bytes.Compare(a.Key, b.Key), cmp.Compare(b.Mod, a.Mod))
	}) {
		t.Error("out of order")
	}
}
