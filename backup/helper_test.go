package backup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testCluster = keyspace.ClusterID(0xabc)

// memTarget is a Target in memory.
type memTarget struct {
	mu    sync.Mutex
	files map[string][]byte
	times map[string]time.Time
	now   time.Time
	gets  []string
	// fail, if it is not nil, is asked before each Put and Delete.
	fail func(op, name string) error
}

func newMem() *memTarget {
	return &memTarget{files: map[string][]byte{}, times: map[string]time.Time{}, now: time.Unix(1_800_000_000, 0).UTC()}
}

func (m *memTarget) String() string { return "mem" }

func (m *memTarget) failing(op, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail == nil {
		return nil
	}
	return m.fail(op, name)
}

func (m *memTarget) Put(_ context.Context, name string, r io.Reader) error {
	if err := m.failing("put", name); err != nil {
		return err
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, there := m.files[name]; there {
		return fmt.Errorf("put %s: %w", name, target.ErrExists)
	}
	m.files[name], m.times[name] = b, m.now
	return nil
}

func (m *memTarget) Get(_ context.Context, name string, offset int64) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gets = append(m.gets, name)
	b, there := m.files[name]
	if !there {
		return nil, fmt.Errorf("get %s: %w", name, target.ErrNotFound)
	}
	return io.NopCloser(bytes.NewReader(b[offset:])), nil
}

func (m *memTarget) List(_ context.Context, folder string) iter.Seq2[target.Object, error] {
	return func(yield func(target.Object, error) bool) {
		m.mu.Lock()
		var os []target.Object
		for name, b := range m.files {
			if strings.HasPrefix(name, folder) {
				os = append(os, target.Object{Name: name, Bytes: int64(len(b)), Modified: m.times[name]})
			}
		}
		m.mu.Unlock()
		for _, o := range os {
			if !yield(o, nil) {
				return
			}
		}
	}
}

func (m *memTarget) Delete(_ context.Context, name string) error {
	if err := m.failing("delete", name); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.files, name)
	return nil
}

// names are the files that contain the text, in order.
func (m *memTarget) names(text string) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.DeleteFunc(slices.Sorted(maps.Keys(m.files)), func(n string) bool { return !strings.Contains(n, text) })
}

func (m *memTarget) clone() *memTarget {
	c := newMem()
	c.files, c.times, c.now = maps.Clone(m.files), maps.Clone(m.times), m.now
	return c
}

// model is the history of a cluster.
type model struct {
	rng  *rand.Rand
	rev  keyspace.Revision
	all  map[string][]mvcc.Version // of each key, the newest first
	time time.Time
	// valueBytes bounds the size of values.
	valueBytes int
}

func newModel(seed uint64) *model {
	return &model{rng: rand.New(rand.NewPCG(seed, 1)), rev: 1, all: map[string][]mvcc.Version{}, time: time.Unix(1_800_000_000, 0).UTC(), valueBytes: 200}
}

// run makes n revisions, each of which changes up to three keys of 40.
func (m *model) run(n int) {
	for range n {
		m.rev++
		m.time = m.time.Add(time.Second)
		for sub, k := range m.rng.Perm(40)[:1+m.rng.IntN(3)] {
			m.change(fmt.Sprintf("/registry/things/%03d", k), uint32(sub)*2)
		}
	}
}

func (m *model) change(key string, sub uint32) {
	vs := m.all[key]
	v := mvcc.Version{Key: []byte(key), Mod: m.rev, Sub: sub}
	lives := len(vs) > 0 && !vs[0].Tombstone
	if lives && m.rng.IntN(4) == 0 {
		v.Tombstone = true
		if m.rng.IntN(3) == 0 { // a put and a delete in one transaction
			e := mvcc.Version{Key: v.Key, Mod: m.rev, Sub: sub, Create: vs[0].Create, Version: vs[0].Version + 1, Value: []byte("earlier")}
			v.Sub++
			v.Earlier = &e
		}
	} else {
		v.Create, v.Version = m.rev, 1
		if lives {
			v.Create, v.Version = vs[0].Create, vs[0].Version+1
		}
		v.Value = make([]byte, m.rng.IntN(m.valueBytes))
		_, _ = rand.NewChaCha8([32]byte{byte(m.rev)}).Read(v.Value)
		if m.rng.IntN(3) == 0 {
			v.Lease = keyspace.LeaseID(m.rng.Int64())
		}
	}
	m.all[key] = append([]mvcc.Version{v}, vs...)
}

// at returns what the compaction rule leaves at a revision, by key.
func (m *model) at(rev, compacted keyspace.Revision) (vs []mvcc.Version) {
	for _, key := range slices.Sorted(maps.Keys(m.all)) {
		for _, v := range m.all[key] {
			if v.Mod > rev {
				continue
			}
			if v.Mod > compacted || !v.Tombstone || v.Mod == compacted {
				vs = append(vs, v)
			}
			if v.Mod <= compacted {
				break
			}
		}
	}
	return vs
}

// within returns what a backup of the cut has.
func (m *model) within(c Cut) (vs []mvcc.Version) {
	if c.Kind == Full {
		return m.at(c.Revision, c.Compacted)
	}
	for _, key := range slices.Sorted(maps.Keys(m.all)) {
		for _, v := range m.all[key] {
			if v.Mod > c.Previous && v.Mod <= c.Revision {
				vs = append(vs, v)
				if c.Kind == Tombstones {
					break
				}
			}
		}
	}
	return vs
}

// cut is a cut of the model now.
func (m *model) cut(kind Kind, previous, compacted keyspace.Revision) Cut {
	return Cut{
		Kind: kind, Revision: m.rev, Previous: previous, Compacted: compacted, Time: m.time,
		Leases: []Lease{{ID: keyspace.LeaseID(m.rev), TTLSeconds: 60, RemainingSeconds: 30}},
		Users:  []byte("users"),
	}
}

var errSource = errors.New("the source is gone")

// testSource has versions by key.
type testSource struct {
	vs []mvcc.Version
	// perBlock, if not 0, makes blocks of so many versions.
	perBlock int
	// failAfter, if not 0, is how many blocks it gives before it fails.
	failAfter int

	mu    sync.Mutex
	given int
	spans []keyspace.Span
}

func (s *testSource) Read(_ context.Context, span keyspace.Span, emit func([]byte, []mvcc.Version) error) error {
	s.mu.Lock()
	s.spans = append(s.spans, span)
	s.mu.Unlock()
	var dec block.Decoder
	w := block.NewWriter(block.ByKey, func(b []byte, _ block.Sum) error {
		s.mu.Lock()
		s.given++
		fails := s.failAfter > 0 && s.given > s.failAfter
		s.mu.Unlock()
		if fails {
			return errSource
		}
		vs, err := dec.Decode(b)
		if err != nil {
			return err
		}
		return emit(b, vs)
	})
	n := 0
	for i := range s.vs {
		if !span.Contains(s.vs[i].Key) {
			continue
		}
		if err := w.Add(&s.vs[i]); err != nil {
			return err
		}
		if n++; s.perBlock > 0 && n%s.perBlock == 0 {
			if err := w.Flush(); err != nil {
				return err
			}
		}
	}
	return w.Flush()
}

var testBorders = [][]byte{[]byte("/registry/things/010"), []byte("/registry/things/020"), []byte("/zzz")}

// smallOptions make many segments.
var smallOptions = Options{SegmentBytes: 2000, Parallel: 2}

// write makes a backup of the cut.
func write(t testing.TB, r *Repository, chain string, m *model, c Cut) *Manifest {
	t.Helper()
	d, err := r.Begin(t.Context(), testCluster, chain, c, testBorders)
	if err != nil {
		t.Fatal(err)
	}
	mf, err := r.Write(t.Context(), d, &testSource{vs: m.within(c), perBlock: 5}, smallOptions)
	if err != nil {
		t.Fatal(err)
	}
	return mf
}

// restore returns the plan of a state, and its versions in the span.
func restore(t testing.TB, r *Repository, w When, span keyspace.Span) (*Plan, []mvcc.Version) {
	t.Helper()
	p, err := r.Plan(t.Context(), testCluster, w)
	if err != nil {
		t.Fatal(err)
	}
	var vs []mvcc.Version
	for v, err := range r.Versions(t.Context(), p, span) {
		if err != nil {
			t.Fatal(err)
		}
		vs = append(vs, v.Clone())
	}
	return p, vs
}

// same compares versions; an empty value may be nil.
func same(t testing.TB, got, want []mvcc.Version) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d versions, want %d", len(got), len(want))
	}
	for i := range got {
		a, b := &got[i], &want[i]
		for ; a != nil && b != nil; a, b = a.Earlier, b.Earlier {
			x, y := *a, *b
			x.Earlier, y.Earlier = nil, nil
			x.Value, y.Value = append([]byte{}, x.Value...), append([]byte{}, y.Value...)
			if fmt.Sprint(x) != fmt.Sprint(y) {
				t.Fatalf("version %d: %+v, want %+v", i, x, y)
			}
		}
		if a != nil || b != nil {
			t.Fatalf("version %d of key %q: one has an earlier write", i, got[i].Key)
		}
	}
}

// someone has an identity.
func someone(t testing.TB) (recipient, identityFile string) {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id.Recipient().String(), "# a comment\n" + id.String() + "\n"
}

func mustKeys(t testing.TB, recipients []string, identities string) Keys {
	t.Helper()
	var file io.Reader
	if identities != "" {
		file = strings.NewReader(identities)
	}
	k, err := ParseKeys(recipients, file)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func repo(tgt target.Target, k Keys) *Repository { return NewRepository(tgt, k, clock.System()) }
