package mvcc

import (
	"bytes"
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// model is the expected content of a store: all versions ever written, in memory. It
// implements the rules in their simplest form.
type model struct {
	versions  map[string][]Version // oldest first
	compacted keyspace.Revision
}

func (m *model) at(key string, rev keyspace.Revision) (Version, bool) {
	vs := m.versions[key]
	for i := len(vs) - 1; i >= 0; i-- {
		if vs[i].Mod <= rev {
			return vs[i], true
		}
	}
	return Version{}, false
}

func (m *model) keys(s keyspace.Span) []string {
	var ks []string
	for k := range m.versions {
		if s.Contains([]byte(k)) {
			ks = append(ks, k)
		}
	}
	slices.Sort(ks)
	return ks
}

// kept reports whether the compaction rule keeps the version.
func (m *model) kept(v Version, compacted keyspace.Revision) bool {
	if v.Mod > compacted {
		return true
	}
	newest, _ := m.at(string(v.Key), compacted)
	return newest.Mod == v.Mod && (!v.Tombstone || v.Mod == compacted)
}

func line(v *Version) string {
	s := fmt.Sprintf("%q@%d.%d delete", v.Key, v.Mod, v.Sub)
	if !v.Tombstone {
		s = fmt.Sprintf("%q@%d.%d create %d version %d lease %d %q", v.Key, v.Mod, v.Sub, v.Create, v.Version, v.Lease, v.Value)
	}
	if v.Earlier != nil {
		s += ", before that " + line(v.Earlier)
	}
	return s
}

// apart returns the version and its earlier writes as separate versions.
func apart(v Version) []Version {
	w := v.Earlier
	v.Earlier = nil
	if w == nil {
		return []Version{v}
	}
	return append(apart(*w), v)
}

// workload writes random transactions into store and model.
type workload struct {
	t    *testing.T
	rng  *rand.Rand
	e    *engine.Engine
	m    *model
	rev  keyspace.Revision
	keys []string
	// since is the compacted revision of the last complete pass of removal.
	since keyspace.Revision
}

func newWorkload(t *testing.T, seed int64) *workload {
	t.Helper()
	w := &workload{
		t: t, rng: rand.New(rand.NewPCG(uint64(seed), 0)), e: openTest(t),
		m: &model{versions: map[string][]Version{}}, rev: 1,
	}
	for range 40 {
		// Few bytes and many zeros, so that keys are prefixes of each other.
		k := make([]byte, 1+w.rng.IntN(4))
		for i := range k {
			k[i] = []byte{0, 0, 1, 2, 'a', 0xff}[w.rng.IntN(6)]
		}
		w.keys = append(w.keys, string(k))
	}
	slices.Sort(w.keys)
	w.keys = slices.Compact(w.keys)
	return w
}

// txn writes one transaction of up to four keys at the next revision.
func (w *workload) txn() {
	w.rev++
	b := w.e.NewBatch()
	sub := uint32(0)
	for _, i := range w.rng.Perm(len(w.keys))[:1+w.rng.IntN(4)] {
		key := w.keys[i]
		last, ok := w.m.at(key, w.rev)
		live, wrote := ok && !last.Tombstone, false
		// Some keys are written more than once.
		for n := max(1, w.rng.IntN(6)-2); n > 0; n-- {
			v := Version{Key: []byte(key), Mod: w.rev, Sub: sub}
			switch {
			case w.rng.IntN(3) > 0:
				v.Create, v.Version = w.rev, 1
				if live {
					v.Create, v.Version = last.Create, last.Version+1
				}
				v.Value = fmt.Appendf(nil, "v%d", w.rng.IntN(1000))
				v.Lease = keyspace.LeaseID(w.rng.IntN(2))
			case live:
				v.Tombstone = true
			default:
				continue
			}
			if before := last; wrote {
				v.Earlier = &before
			}
			last, live, wrote, sub = v, !v.Tombstone, true, sub+1
		}
		if !wrote {
			continue
		}
		if err := Put(b, &last); err != nil {
			w.t.Fatal(err)
		}
		w.m.versions[key] = append(w.m.versions[key], last)
	}
	if err := b.Commit(); err != nil {
		w.t.Fatal(err)
	}
}

func (w *workload) span() keyspace.Span {
	if w.rng.IntN(3) == 0 {
		return keyspace.Span{}
	}
	i, j := w.rng.IntN(len(w.keys)), w.rng.IntN(len(w.keys))
	if i > j {
		i, j = j, i
	}
	if i == j {
		return keyspace.Span{Start: []byte(w.keys[i])}
	}
	return keyspace.Span{Start: []byte(w.keys[i]), End: []byte(w.keys[j])}
}

// revision returns a readable revision.
func (w *workload) revision() keyspace.Revision {
	lo := max(w.m.compacted, 1)
	return lo + keyspace.Revision(w.rng.Int64N(int64(w.rev-lo)+2))
}

func (w *workload) checkReads() {
	w.t.Helper()
	s, at := w.span(), w.revision()
	var want []string
	for _, k := range w.m.keys(s) {
		if v, ok := w.m.at(k, at); ok && !v.Tombstone {
			want = append(want, line(&v))
		}
	}
	var got []string
	for o := (ScanOptions{Span: s, At: at, Limit: int64(w.rng.IntN(5)), MaxBytes: int64(w.rng.IntN(30))}); ; {
		res, err := Scan(w.e, o, func(v *Version) error {
			got = append(got, line(v))
			return nil
		})
		if err != nil {
			w.t.Fatal(err)
		}
		if !res.More {
			break
		}
		o.Span.Start = res.Next
	}
	equal(w.t, fmt.Sprintf("scan of %s at %d", s, at), got, want)
	if n, err := Count(w.e, s, at); err != nil || n != int64(len(want)) {
		w.t.Fatalf("count of %s at %d: %d %v, want %d", s, at, n, err, len(want))
	}
	key := w.keys[w.rng.IntN(len(w.keys))]
	v, ok, err := Get(w.e, []byte(key), at)
	mv, mok := w.m.at(key, at)
	mok = mok && !mv.Tombstone
	if err != nil || ok != mok || ok && line(&v) != line(&mv) {
		w.t.Fatalf("get %q at %d: %s %v %v, want %s %v", key, at, line(&v), ok, err, line(&mv), mok)
	}
}

func (w *workload) checkHistory() {
	w.t.Helper()
	s, from := w.span(), max(w.revision(), 1)
	var all []Version
	for _, k := range w.m.keys(s) {
		for _, v := range w.m.versions[k] {
			if v.Mod >= from && v.Mod <= w.rev {
				all = append(all, apart(v)...)
			}
		}
	}
	slices.SortFunc(all, func(a, b Version) int {
		if a.Mod != b.Mod {
			return int(a.Mod - b.Mod)
		}
		return int(a.Sub) - int(b.Sub)
	})
	var want, got []string
	for i := range all {
		want = append(want, line(&all[i]))
	}
	o := HistoryOptions{Span: s, From: from, To: w.rev, MaxBytes: int64(1 + w.rng.IntN(4000))}
	for o.From <= o.To {
		next, err := History(w.e, o, func(v *Version) error {
			got = append(got, line(v))
			return nil
		})
		if err != nil {
			w.t.Fatal(err)
		}
		if next <= o.From {
			w.t.Fatalf("history from %d goes on at %d", o.From, next)
		}
		o.From = next
	}
	equal(w.t, fmt.Sprintf("history of %s from %d", s, from), got, want)
	w.checkPages(s, from, o.MaxBytes, want)
}

// checkPages reads the same in pages, which may end within a revision.
func (w *workload) checkPages(s keyspace.Span, from keyspace.Revision, maxBytes int64, want []string) {
	w.t.Helper()
	o := HistoryOptions{Span: s, From: from, To: w.rev, MaxBytes: maxBytes}
	var all []Version
	var key []byte
	for o.From <= o.To {
		var size int64
		n := len(all)
		next, nextKey, err := HistoryPages(w.e, o, key, func(v *Version) error {
			all = append(all, *v)
			size += v.Size() + eventOverhead
			return nil
		})
		switch {
		case err != nil:
			w.t.Fatal(err)
		case size > maxBytes && string(all[n].Key) != string(all[len(all)-1].Key):
			w.t.Fatalf("a page of %d events has %d bytes, allowed are %d", len(all)-n, size, maxBytes)
		case nextKey != nil && (len(all) == n || all[n].Mod != next || all[len(all)-1].Mod != next):
			w.t.Fatalf("a page ends within revision %d, which is not alone in it", next)
		case next < o.From || next == o.From && bytes.Compare(nextKey, key) <= 0:
			w.t.Fatalf("pages from %d, %q go on at %d, %q", o.From, key, next, nextKey)
		}
		o.From, key = next, nextKey
	}
	slices.SortFunc(all, func(a, b Version) int {
		return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub), bytes.Compare(a.Key, b.Key))
	})
	var got []string
	for i := range all {
		got = append(got, line(&all[i]))
	}
	equal(w.t, fmt.Sprintf("pages of history of %s from %d", s, from), got, want)
}

// checkHash compares the hash with that of the kept versions, and with the sum over two
// halves read in parts.
func (w *workload) checkHash() {
	w.t.Helper()
	at := w.revision()
	var want uint64
	for _, vs := range w.m.versions {
		for _, v := range vs {
			if v.Mod <= at && w.m.kept(v, w.m.compacted) {
				for _, one := range apart(v) {
					want += one.hash()
				}
			}
		}
	}
	if got, err := Hash(w.e, keyspace.Span{}, at, w.m.compacted); err != nil || got != want {
		w.t.Fatalf("hash at %d, compacted %d: %x %v, want %x", at, w.m.compacted, got, err, want)
	}
	middle := []byte(w.keys[w.rng.IntN(len(w.keys))])
	var sum uint64
	for _, s := range []keyspace.Span{{End: middle}, {Start: middle}} {
		for {
			part, next, err := HashPart(w.e, s, at, w.m.compacted, 3*versionBytes)
			if err != nil {
				w.t.Fatal(err)
			}
			sum += part
			if next == nil {
				break
			}
			s.Start = next
		}
	}
	if sum != want {
		w.t.Fatalf("hash of two halves at %q: %x, want %x", middle, sum, want)
	}
}

// compact raises the compacted revision and removes in random steps; sometimes it leaves
// the pass unfinished.
func (w *workload) compact() {
	w.t.Helper()
	w.m.compacted = w.revision()
	if w.m.compacted > w.rev {
		w.m.compacted = w.rev
	}
	o := RemoveOptions{
		Compacted: w.m.compacted, Since: w.since,
		MaxVisits: int64(1 + w.rng.IntN(40)), MaxDeletes: int64(1 + w.rng.IntN(10)),
	}
	for {
		b := w.e.NewBatch()
		res, err := RemoveOld(w.e, b, o)
		if err != nil {
			w.t.Fatal(err)
		}
		if err := b.Commit(); err != nil {
			w.t.Fatal(err)
		}
		w.checkHash()
		w.checkCut()
		if res.Cursor == nil {
			break
		}
		if w.rng.IntN(20) == 0 {
			return
		}
		o.Cursor = res.Cursor
	}
	w.since = w.m.compacted
	var want []string
	for _, k := range w.m.keys(keyspace.Span{}) {
		for _, v := range slices.Backward(w.m.versions[k]) {
			if w.m.kept(v, w.m.compacted) {
				want = append(want, line(&v))
			}
		}
	}
	equal(w.t, fmt.Sprintf("stored versions after removal by %d", w.m.compacted), stored(w.t, w.e), want)
}

// stored returns all versions in the store.
func stored(t testing.TB, r engine.Reader) []string {
	t.Helper()
	it, err := r.NewIter(engine.IterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer it.Close()
	var out []string
	for ok := it.First(); ok; ok = it.Next() {
		v, err := decodeVersion(it.Key(), it.Value())
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, line(&v))
	}
	if err := it.Error(); err != nil {
		t.Fatal(err)
	}
	return out
}

func equal(t testing.TB, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("%s:\n%s\nwant:\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// TestModel compares the store with a model over random transactions, reads, histories,
// hashes and removals, with flushes in between.
func TestModel(t *testing.T) {
	seeds, steps := int64(6), 600
	if testing.Short() {
		seeds, steps = 2, 300
	}
	for seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			w := newWorkload(t, seed)
			for range steps {
				switch n := w.rng.IntN(100); {
				case n < 60:
					w.txn()
				case n < 80:
					w.checkReads()
				case n < 90:
					w.checkHistory()
				case n < 94:
					w.checkHash()
					w.checkCut()
				case n < 97:
					if err := w.e.Flush(t.Context()); err != nil {
						t.Fatal(err)
					}
				default:
					w.compact()
				}
			}
		})
	}
}
