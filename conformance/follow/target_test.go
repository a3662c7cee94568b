package follow

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/server/v3/storage/backend"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/mvcc"
)

// target is a cluster that is loaded, in memory.
type target struct {
	mu     sync.Mutex
	phase  mirror.Phase
	rev    keyspace.Revision
	keys   map[string][]mvcc.Version // oldest first, also above rev
	order  []string
	cursor [2]int64 // revision and sub of the last version
	leases map[keyspace.LeaseID]int64
	// imported is what the file had.
	imported mirror.Imported
	// versions counts what Follow has brought.
	versions, batches int
}

func newTarget() *target {
	return &target{phase: mirror.TargetEmpty, keys: map[string][]mvcc.Version{}}
}

// fileRevision is the revision of a database file.
func fileRevision(path string) (rev keyspace.Revision, err error) {
	err = eachRecord(path, func(v mvcc.Version) { rev = max(rev, v.Mod) })
	return max(rev, 1), err
}

// eachRecord calls f for the records of a database file, in order of revision.
func eachRecord(path string, f func(mvcc.Version)) error {
	be := backend.NewDefaultBackend(zap.NewNop(), path)
	defer be.Close()
	tx := be.ReadTx()
	tx.RLock()
	defer tx.RUnlock()
	return tx.UnsafeForEach(schema.Key, func(k, v []byte) error {
		var kv mvccpb.KeyValue
		if err := proto.Unmarshal(v, &kv); err != nil {
			return err
		}
		f(mvcc.Version{
			Key: slices.Clone(kv.Key), Value: slices.Clone(kv.Value), Create: keyspace.Revision(kv.CreateRevision), Version: kv.Version, Lease: keyspace.LeaseID(kv.Lease),
			Mod: keyspace.Revision(binary.BigEndian.Uint64(k)), Sub: uint32(binary.BigEndian.Uint64(k[9:])), Tombstone: len(k) == 18,
		})
		return nil
	})
}

func (t *target) add(v mvcc.Version) {
	all := t.keys[string(v.Key)]
	if n := len(all); n > 0 && all[n-1].Mod == v.Mod {
		earlier := all[n-1]
		v.Earlier, all = &earlier, all[:n-1]
	}
	t.keys[string(v.Key)] = append(all, v)
}

func (t *target) State(context.Context, string) (mirror.Phase, keyspace.Revision, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.phase, t.rev, nil
}

func (t *target) Import(_ context.Context, _, path string) (in mirror.Imported, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.phase == mirror.TargetLoading {
		return t.imported, nil
	}
	t.rev = 1
	err = eachRecord(path, func(v mvcc.Version) {
		t.add(v)
		t.rev = v.Mod
	})
	t.phase, t.cursor = mirror.TargetLoading, [2]int64{int64(t.rev) + 1, -1}
	t.imported = mirror.Imported{Revision: t.rev, Sum: t.sum()}
	return t.imported, err
}

// sum is that of all versions.
func (t *target) sum() (s mirror.Sum) {
	for _, versions := range t.keys {
		for i := range versions {
			s.Add(&versions[i])
		}
	}
	return s
}

func (t *target) Follow(_ context.Context, _ string, b mirror.Batch) error {
	versions, upTo := b.Versions, b.UpTo
	t.mu.Lock()
	defer t.mu.Unlock()
	t.batches++
	for i := range versions {
		v := versions[i].Clone()
		at := [2]int64{int64(v.Mod), int64(v.Sub)}
		if slices.Compare(at[:], t.cursor[:]) <= 0 {
			continue // a repeat
		}
		if at[0] > t.cursor[0]+1 {
			return fmt.Errorf("revision %d behind revision %d", at[0], t.cursor[0])
		}
		t.cursor = at
		t.versions++
		t.keys[string(v.Key)] = append(t.keys[string(v.Key)], v)
	}
	t.rev = max(t.rev, upTo)
	return nil
}

func (t *target) Finish(_ context.Context, _ string, f mirror.Finish) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.Revision != t.rev {
		return fmt.Errorf("finished at revision %d, the position is %d", f.Revision, t.rev)
	}
	if sum := t.sum(); f.Sum != sum {
		return fmt.Errorf("finished with the sum %+v, and the target has %+v", f.Sum, sum)
	}
	t.phase, t.leases = mirror.TargetServing, maps.Clone(f.Leases)
	return nil
}

func (t *target) Abandon(context.Context, string) error { return nil }

// get returns a key at a revision, nil if it is not there.
func (t *target) get(key string, rev keyspace.Revision) *mvcc.Version {
	all := t.keys[key]
	for i := len(all) - 1; i >= 0; i-- {
		if v := &all[i]; v.Mod <= rev {
			if v.Tombstone {
				return nil
			}
			return v
		}
	}
	return nil
}

func (t *target) at(rev keyspace.Revision) (keyspace.Revision, error) {
	if rev > t.rev {
		return 0, fmt.Errorf("revision %d above the position %d", rev, t.rev)
	}
	if rev == 0 {
		rev = t.rev
	}
	return rev, nil
}

func (t *target) Page(_ context.Context, from, end []byte, rev keyspace.Revision, limit int) (diff.Page, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rev, err := t.at(rev)
	p := diff.Page{Revision: rev}
	if len(t.order) != len(t.keys) {
		t.order = slices.Sorted(maps.Keys(t.keys))
	}
	first, _ := slices.BinarySearch(t.order, string(from))
	for _, k := range t.order[first:] {
		if end != nil && k >= string(end) {
			break
		}
		if v := t.get(k, rev); v != nil {
			if len(p.Keys) == limit {
				p.More = true
				break
			}
			p.Keys = append(p.Keys, *v)
		}
	}
	return p, err
}

func (t *target) Lookup(_ context.Context, keys [][]byte, rev keyspace.Revision) ([]mvcc.Version, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rev, err := t.at(rev)
	out := make([]mvcc.Version, len(keys))
	for i, k := range keys {
		if v := t.get(string(k), rev); v != nil {
			out[i] = *v
		}
	}
	return out, err
}

func (t *target) Written(context.Context, [][]byte) ([]keyspace.Revision, error) {
	panic("keys are looked up at the source alone")
}

func (t *target) Count(_ context.Context, _, _ []byte, rev keyspace.Revision) (n int64, at keyspace.Revision, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rev, err = t.at(rev)
	for k := range t.keys {
		if t.get(k, rev) != nil {
			n++
		}
	}
	return n, rev, err
}

func (t *target) Leases(context.Context) ([]keyspace.LeaseID, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.leases)), nil
}

func (t *target) TTL(_ context.Context, id keyspace.LeaseID) (int64, bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ttl, ok := t.leases[id]
	return ttl, ok, nil
}
