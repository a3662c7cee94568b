package mirror

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is versions in memory, read as etcd's API reads them.
type store struct {
	mu sync.Mutex
	// keys holds the versions of each key, oldest first.
	keys      map[string][]mvcc.Version
	rev       keyspace.Revision // up to which it is visible
	compacted keyspace.Revision
	leases    map[keyspace.LeaseID]int64
	order     []string // the keys in order
	// call is called before each request.
	call func(what string) error
}

func newStore() *store {
	return &store{keys: map[string][]mvcc.Version{}, rev: 1, leases: map[keyspace.LeaseID]int64{}, call: func(string) error { return nil }}
}

// get returns a key at a revision, nil if it is not there.
func (s *store) get(key string, rev keyspace.Revision) *mvcc.Version {
	all := s.keys[key]
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].Mod <= rev {
			if all[i].Tombstone {
				return nil
			}
			v := all[i]
			v.Earlier, v.Sub = nil, 0
			return &v
		}
	}
	return nil
}

// called tells of a request.
func (s *store) called(what string) error {
	s.mu.Lock()
	call := s.call
	s.mu.Unlock()
	return call(what)
}

// onCall sets what is called before each request.
func (s *store) onCall(call func(what string) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.call = call
}

// present is the revision that the store is at.
func (s *store) present() keyspace.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rev
}

// enter begins a request at a revision, 0 for the present one. The caller unlocks.
func (s *store) enter(what string, rev keyspace.Revision) (keyspace.Revision, error) {
	if err := s.called(what); err != nil {
		return 0, err
	}
	s.mu.Lock()
	switch {
	case rev == 0:
		rev = s.rev
	case rev < s.compacted:
		s.mu.Unlock()
		return 0, fmt.Errorf("%s: %w", what, diff.ErrCompacted)
	case rev > s.rev:
		s.mu.Unlock()
		return 0, rpctypes.ErrFutureRev
	}
	return rev, nil
}

func (s *store) Page(_ context.Context, from, end []byte, rev keyspace.Revision, limit int) (diff.Page, error) {
	rev, err := s.enter("page", rev)
	if err != nil {
		return diff.Page{}, err
	}
	defer s.mu.Unlock()
	p := diff.Page{Revision: rev}
	if len(s.order) != len(s.keys) {
		s.order = slices.Sorted(maps.Keys(s.keys))
	}
	first, _ := slices.BinarySearch(s.order, string(from))
	for _, k := range s.order[first:] {
		if end != nil && k >= string(end) {
			break
		}
		v := s.get(k, rev)
		if v == nil {
			continue
		}
		if len(p.Keys) == limit {
			p.More = true
			break
		}
		p.Keys = append(p.Keys, *v)
	}
	return p, nil
}

func (s *store) Count(_ context.Context, from, end []byte, rev keyspace.Revision) (n int64, at keyspace.Revision, err error) {
	rev, err = s.enter("count", rev)
	if err != nil {
		return 0, 0, err
	}
	defer s.mu.Unlock()
	for k := range s.keys {
		if k >= string(from) && (end == nil || k < string(end)) && s.get(k, rev) != nil {
			n++
		}
	}
	return n, rev, nil
}

func (s *store) Written(_ context.Context, keys [][]byte) ([]keyspace.Revision, error) {
	rev, err := s.enter("written", 0)
	if err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	written := make([]keyspace.Revision, len(keys))
	for i, k := range keys {
		if v := s.get(string(k), rev); v != nil {
			written[i] = v.Mod
		}
	}
	return written, nil
}

func (s *store) Leases(context.Context) ([]keyspace.LeaseID, error) {
	if _, err := s.enter("leases", 0); err != nil {
		return nil, err
	}
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.leases)), nil
}

func (s *store) TTL(_ context.Context, id keyspace.LeaseID) (int64, bool, error) {
	if _, err := s.enter("ttl", 0); err != nil {
		return 0, false, err
	}
	defer s.mu.Unlock()
	ttl, ok := s.leases[id]
	return ttl, ok, nil
}

// source is an etcd in memory.
type source struct {
	*store
	cluster uint64
	events  map[keyspace.Revision][]mvcc.Version
	changed chan struct{}
	rng     *rand.Rand
	// keeps says that it compacts nothing.
	keeps bool
	// breaks is how often a watch breaks off, in percent of its answers.
	breaks int
	// lagging is how many snapshots are those of a member that lags (trap 125).
	lagging int
	// sparse says that it leaves out revisions, as a Skein does.
	sparse bool
	// expected is the cluster that it was told to be.
	expected atomic.Uint64
}

func (s *source) Expect(cluster uint64) { s.expected.Store(cluster) }

func newSource(seed uint64) *source {
	return &source{store: newStore(), cluster: 7, events: map[keyspace.Revision][]mvcc.Version{}, changed: make(chan struct{}), rng: rand.New(rand.NewPCG(seed, 2))}
}

// leaveOut has revisions pass without events.
func (s *source) leaveOut(n keyspace.Revision) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rev += n
	close(s.changed)
	s.changed = make(chan struct{})
}

// grant grants a lease.
func (s *source) grant(id keyspace.LeaseID, ttl int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases[id] = ttl
}

// revoke ends a lease, and deletes the keys in one revision.
func (s *source) revoke(id keyspace.LeaseID) {
	s.mu.Lock()
	var deletes []op
	for k := range s.keys {
		if v := s.get(k, s.rev); v != nil && v.Lease == id {
			deletes = append(deletes, op{key: k})
		}
	}
	s.mu.Unlock()
	s.txn(deletes...)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.leases, id)
}

// op is a write of a transaction: a put, or a delete without a value.
type op struct {
	key, value string
	lease      keyspace.LeaseID
}

// txn writes in one revision and returns it. Deletes of keys that are not there do nothing.
func (s *source) txn(ops ...op) keyspace.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	rev, sub := s.rev+1, uint32(0)
	now := map[string]*mvcc.Version{}
	for _, o := range ops {
		v, written := now[o.key]
		if !written {
			v = s.get(o.key, s.rev)
		}
		e := mvcc.Version{Key: []byte(o.key), Mod: rev, Sub: sub}
		switch {
		case o.value == "" && v == nil:
			continue
		case o.value == "":
			e.Tombstone = true
		default:
			e.Create, e.Version, e.Lease, e.Value = rev, 1, o.lease, []byte(o.value)
			if v != nil {
				e.Create, e.Version = v.Create, v.Version+1
			}
		}
		sub++
		s.events[rev] = append(s.events[rev], e)
		all := s.keys[o.key]
		stored := e
		if n := len(all); n > 0 && all[n-1].Mod == rev {
			earlier := all[n-1]
			stored.Earlier, all = &earlier, all[:n-1]
		}
		s.keys[o.key] = append(all, stored)
		if now[o.key] = &e; e.Tombstone {
			now[o.key] = nil
		}
	}
	if sub == 0 {
		return s.rev
	}
	s.rev = rev
	close(s.changed)
	s.changed = make(chan struct{})
	return rev
}

func (s *source) Now(context.Context) (uint64, keyspace.Revision, error) {
	rev, err := s.enter("now", 0)
	if err != nil {
		return 0, 0, err
	}
	defer s.mu.Unlock()
	return s.cluster, rev, nil
}

// Watch sends revisions in fragments of three events.
func (s *source) Watch(ctx context.Context, from keyspace.Revision, out chan<- Part) error {
	for {
		if err := s.called("watch"); err != nil {
			return err
		}
		s.mu.Lock()
		if from <= s.compacted {
			s.mu.Unlock()
			return &CompactedError{s.compacted}
		}
		var events []mvcc.Version
		for n := 1 + s.rng.IntN(5); n > 0 && from <= s.rev; n-- {
			if s.sparse {
				from = s.made(from)
			}
			events = append(events, s.events[from]...)
			from++
		}
		changed, rev, breaks := s.changed, s.rev, s.breaks
		s.mu.Unlock()
		for len(events) > 0 {
			n := min(len(events), 3)
			p := Part{Cluster: s.cluster, Revision: rev, Events: slices.Clone(events[:n]), More: n < len(events), Sparse: s.sparse}
			for i := range p.Events {
				p.Events[i].Sub = 0
			}
			if events = events[n:]; s.chance(breaks) {
				return rpctypes.ErrNoLeader
			}
			select {
			case out <- p:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if from <= rev {
			continue
		}
		if s.sparse {
			select {
			case out <- Part{Cluster: s.cluster, Revision: rev, Sparse: true, Through: rev}:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// made returns the first revision from one on that has events, or else the present one. s.mu is held.
func (s *source) made(from keyspace.Revision) keyspace.Revision {
	first := s.rev
	for rev := range s.events {
		if rev >= from && rev < first {
			first = rev
		}
	}
	return first
}

func (s *source) chance(percent int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rng.IntN(100) < percent
}

// database is what a snapshot holds.
type database struct {
	Revision keyspace.Revision
	Keys     map[string][]mvcc.Version
}

func (s *source) Snapshot(_ context.Context, _ keyspace.Revision, w io.Writer) error {
	if _, err := s.enter("snapshot", 0); err != nil {
		return err
	}
	defer s.mu.Unlock()
	db := database{Revision: s.rev, Keys: s.keys}
	if s.lagging > 0 {
		s.lagging--
		db.Revision -= 5
	}
	b, err := json.Marshal(db)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	return err
}

func (s *source) Compacted(context.Context) (keyspace.Revision, error) {
	if _, err := s.enter("compacted", 0); err != nil {
		return 0, err
	}
	defer s.mu.Unlock()
	return s.compacted, nil
}

// target is a cluster that is loaded. It checks what it is given.
type target struct {
	*store
	fs     vfs.FS
	phase  Phase
	nonce  string
	held   []mvcc.Version // of a revision that is not there as a whole
	finish Finish
	// largest is the largest batch in versions, held the most versions of a revision that
	// was not visible.
	largest, largestHeld, batches int
	// gaps says that revisions may be left out.
	gaps bool
	// taken counts the leases that were taken back, attached are those of them with keys.
	taken    int
	attached []keyspace.LeaseID
	// loose are versions with a lease that are not attached to it, by key.
	loose map[string]keyspace.Revision
}

func newTarget() *target {
	return &target{store: newStore(), phase: TargetEmpty, loose: map[string]keyspace.Revision{}}
}

func (t *target) use(what, nonce string) error {
	if _, err := t.enter(what, 0); err != nil {
		return err
	}
	if t.nonce != "" && t.nonce != nonce {
		t.mu.Unlock()
		return fmt.Errorf("the cluster is loaded by %s", t.nonce)
	}
	return nil
}

func (t *target) State(_ context.Context, nonce string) (Phase, keyspace.Revision, error) {
	if err := t.use("state", nonce); err != nil {
		return "", 0, err
	}
	defer t.mu.Unlock()
	return t.phase, t.rev, nil
}

// readDatabase reads what Snapshot has written.
func readDatabase(fs vfs.FS, path string) (db database, err error) {
	err = readJSON(fs, path, &db)
	return db, err
}

func (t *target) Import(_ context.Context, nonce, path string) (in Imported, err error) {
	if err := t.use("import", nonce); err != nil {
		return in, err
	}
	defer t.mu.Unlock()
	db, err := readDatabase(t.fs, path)
	if err != nil {
		return in, err
	}
	in.Revision = db.Revision
	for _, versions := range db.Keys {
		for i := range versions {
			if versions[i].Mod <= db.Revision {
				in.Sum.Add(&versions[i])
			}
		}
	}
	if t.phase == TargetLoading && t.rev >= db.Revision {
		return in, nil // a repeat
	}
	if t.phase != TargetEmpty {
		return in, fmt.Errorf("import into a cluster that is %s", t.phase)
	}
	t.phase, t.nonce, t.rev, t.keys = TargetLoading, nonce, db.Revision, map[string][]mvcc.Version{}
	for k, versions := range db.Keys {
		for _, v := range versions {
			if v.Mod <= db.Revision {
				t.keys[k] = append(t.keys[k], v)
			}
		}
	}
	return in, nil
}

// cursor is how far the target is.
func (t *target) cursor() (keyspace.Revision, int64) {
	if n := len(t.held); n > 0 {
		return t.held[n-1].Mod, int64(t.held[n-1].Sub)
	}
	return t.rev + 1, -1
}

func (t *target) Follow(_ context.Context, nonce string, b Batch) error {
	versions, upTo := b.Versions, b.UpTo
	if err := t.use("follow", nonce); err != nil {
		return err
	}
	defer t.mu.Unlock()
	if t.phase != TargetLoading {
		return fmt.Errorf("follow at a cluster that is %s", t.phase)
	}
	t.batches++
	t.largest = max(t.largest, len(versions))
	newest := map[string]mvcc.Version{}
	for i := range t.held {
		newest[string(t.held[i].Key)] = t.held[i]
	}
	for i := range versions {
		v := versions[i].Clone()
		rev, sub := t.cursor()
		switch {
		case v.Mod < rev || v.Mod == rev && int64(v.Sub) <= sub:
			continue // a repeat
		case t.gaps:
		case v.Mod > rev+1 && len(t.held) > 0 || v.Mod > rev && len(t.held) == 0:
			return fmt.Errorf("revision %d behind revision %d", v.Mod, rev)
		}
		before, known := newest[string(v.Key)]
		if all := t.keys[string(v.Key)]; !known && len(all) > 0 {
			before = all[len(all)-1]
		}
		if err := fits(&before, &v); err != nil {
			return err
		}
		newest[string(v.Key)] = before
		if _, lives := b.Leases[v.Lease]; v.Lease != 0 && !lives {
			t.loose[string(v.Key)] = v.Mod
		}
		t.held = append(t.held, v)
	}
	t.largestHeld = max(t.largestHeld, len(t.held))
	n := 0
	for ; n < len(t.held) && t.held[n].Mod <= upTo; n++ {
		k := string(t.held[n].Key)
		t.keys[k] = append(t.keys[k], t.held[n])
	}
	if t.held = t.held[n:]; upTo > t.rev {
		t.rev = upTo
	}
	maps.Copy(t.leases, b.Leases)
	return t.end(b.Ended)
}

// fits says whether v can follow on the key as it is, and changes that to v.
func fits(before, v *mvcc.Version) error {
	if v.Earlier != nil {
		if err := fits(before, v.Earlier); err != nil {
			return err
		}
	}
	create, version := before.Create, before.Version+1
	if before.Version == 0 {
		create, version = v.Mod, 1
	}
	switch {
	case v.Tombstone && before.Version == 0:
		return status.Errorf(codes.DataLoss, "key %q: revision %d deletes it, and there is no such key", v.Key, v.Mod)
	case !v.Tombstone && (v.Create != create || v.Version != version):
		return status.Errorf(codes.DataLoss, "key %q: revision %d is version %d, and would be version %d", v.Key, v.Mod, v.Version, version)
	}
	*before = *v
	return nil
}

// end takes leases back. No key may be attached to them.
func (t *target) end(ended []keyspace.LeaseID) error {
	for _, id := range ended {
		if _, has := t.leases[id]; !has {
			return fmt.Errorf("lease %x is taken back and was not granted", int64(id))
		}
		delete(t.leases, id)
		t.taken++
		for k := range t.keys {
			if v := t.get(k, t.rev); v != nil && v.Lease == id {
				t.attached = append(t.attached, id)
			}
		}
		for i := range t.held {
			if t.held[i].Lease == id {
				t.attached = append(t.attached, id)
			}
		}
	}
	return nil
}

func (t *target) Finish(_ context.Context, nonce string, f Finish) error {
	if err := t.use("finish", nonce); err != nil {
		return err
	}
	defer t.mu.Unlock()
	if t.phase == TargetServing {
		return errors.New("finished twice")
	}
	if f.Revision != t.rev || len(t.held) > 0 {
		return fmt.Errorf("finished at revision %d, the position is %d", f.Revision, t.rev)
	}
	var sum Sum
	for _, versions := range t.keys {
		for i := range versions {
			sum.Add(&versions[i])
		}
	}
	if f.Sum != sum {
		return fmt.Errorf("finished with the sum %+v, and the target has %+v", f.Sum, sum)
	}
	t.phase, t.finish, t.leases = TargetServing, f, maps.Clone(f.Leases)
	return nil
}

func (t *target) Abandon(_ context.Context, nonce string) error {
	if err := t.use("abandon", nonce); err != nil {
		return err
	}
	defer t.mu.Unlock()
	t.phase = TargetAbandoned
	return nil
}

// sameHistory says whether the target has every version above a revision that the source made,
// and no other.
func sameHistory(t *testing.T, s *source, d *target, above keyspace.Revision) {
	t.Helper()
	for k := range s.keys {
		after := func(all []mvcc.Version) (out []mvcc.Version) {
			for _, v := range all {
				if v.Mod > above {
					out = append(out, v)
				}
			}
			return out
		}
		want, got := after(s.keys[k]), after(d.keys[k])
		if len(want) != len(got) {
			t.Fatalf("key %q has %d versions, not %d", k, len(got), len(want))
		}
		for i := range want {
			if !sameVersion(&want[i], &got[i]) {
				t.Fatalf("key %q: %+v, not %+v", k, got[i], want[i])
			}
		}
	}
	for k := range d.keys {
		if s.keys[k] == nil {
			t.Fatalf("key %q is not at the source", k)
		}
	}
}

func sameVersion(a, b *mvcc.Version) bool {
	if a == nil || b == nil {
		return a == b
	}
	return bytes.Equal(a.Key, b.Key) && bytes.Equal(a.Value, b.Value) && a.Mod == b.Mod && a.Create == b.Create && a.Version == b.Version &&
		a.Lease == b.Lease && a.Sub == b.Sub && a.Tombstone == b.Tombstone && sameVersion(a.Earlier, b.Earlier)
}

// work writes at random for a number of transactions, some of them with leases, deletes of many
// keys and several writes of a key.
func (s *source) work(rng *rand.Rand, transactions int, pause time.Duration) {
	key := func() string { return fmt.Sprintf("k%03d", rng.IntN(60)) }
	for i := range transactions {
		time.Sleep(time.Duration(rng.Int64N(int64(2*pause) + 1)))
		value := fmt.Sprint("v", i)
		switch rng.IntN(8) {
		case 0:
			id := keyspace.LeaseID(1000 + i)
			s.mu.Lock()
			s.leases[id] = 60
			s.mu.Unlock()
			s.txn(op{key(), value, id})
		case 1:
			s.txn(op{key: key()}, op{key: key()})
		case 2: // put, delete and put of a key in one transaction (trap 112)
			k := key()
			s.txn(op{k, value, 0}, op{key(), value, 0}, op{key: k}, op{k, value + "again", 0})
		case 3:
			var all []op
			for n := range 20 {
				all = append(all, op{key: fmt.Sprintf("k%03d", n)})
			}
			s.txn(all...)
		case 4:
			s.mu.Lock()
			if s.rev > s.compacted+700 && !s.keeps {
				s.compacted = s.rev - 600
			}
			s.mu.Unlock()
		default:
			s.txn(op{key(), value, 0}, op{key() + "x", value, 0})
		}
	}
}
