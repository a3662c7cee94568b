package backup

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/keyspace"
)

// chainOf makes a full backup and two on top of it.
func chainOf(t testing.TB, r *Repository, m *model) []*Manifest {
	t.Helper()
	m.run(60)
	ms := []*Manifest{write(t, r, "", m, m.cut(Full, 0, 30))}
	for range 2 {
		m.run(20)
		ms = append(ms, write(t, r, ms[0].Chain, m, m.cut(Versions, ms[len(ms)-1].Revision, 30)))
	}
	return ms
}

// readAll reads the newest state.
func readAll(t testing.TB, r *Repository) error {
	t.Helper()
	p, err := r.Plan(t.Context(), testCluster, When{})
	if err != nil {
		return err
	}
	for _, err := range r.Versions(t.Context(), p, keyspace.Span{}) {
		if err != nil {
			return err
		}
	}
	return nil
}

// Trap 121: a wrong identity says so, and says it before anything else.
func TestWrongIdentity(t *testing.T) {
	pub, id := someone(t)
	_, other := someone(t)
	mem := newMem()
	ms := chainOf(t, repo(mem, mustKeys(t, []string{pub}, id)), newModel(1))
	for name, c := range map[string]struct {
		keys Keys
		want error
	}{
		"another": {mustKeys(t, nil, other), ErrWrongIdentity},
		"none":    {Keys{}, ErrNoIdentity},
	} {
		r := repo(mem, c.keys)
		if err := readAll(t, r); !errors.Is(err, c.want) || !strings.Contains(err.Error(), "--identity") {
			t.Errorf("%s: restore: %v", name, err)
		}
		report, err := r.Verify(t.Context(), testCluster, "", true)
		if err != nil || len(report.Problems) != 3 || !errors.Is(report.Problems[0].Err, c.want) {
			t.Errorf("%s: verify: %+v, %v", name, report, err)
		}
		if _, err := r.Prune(t.Context(), testCluster, Retention{KeepFull: 1}, false); !errors.Is(err, c.want) {
			t.Errorf("%s: prune: %v", name, err)
		}
		// The names still tell what is there.
		chains, err := r.List(t.Context(), 0)
		if err != nil || len(chains) != 1 || len(chains[0].Backups) != 3 || chains[0].Backups[2].Revision != ms[2].Revision {
			t.Errorf("%s: list: %+v, %v", name, chains, err)
		}
	}
	// One of several identities is enough.
	if err := readAll(t, repo(mem, mustKeys(t, nil, other+id))); err != nil {
		t.Error(err)
	}
	for _, s := range []string{"", "age1nonsense", "AGE-SECRET-KEY-1", "/root/key"} {
		if _, err := ParseKeys([]string{s}, nil); err == nil || !strings.Contains(err.Error(), "age1…") {
			t.Errorf("recipient %q: %v", s, err)
		}
	}
	if _, err := ParseKeys(nil, strings.NewReader("AGE-SECRET-KEY-1SECRET")); err == nil || strings.Contains(err.Error(), "1SECRET") {
		t.Errorf("identity: %v", err)
	}
}

// Trap 121: a flipped byte anywhere in a segment is found by a restore and by a deep
// verification, and named; in a manifest by each use of it.
func TestFlippedByte(t *testing.T) {
	pub, id := someone(t)
	for name, k := range map[string]Keys{"plain": {}, "encrypted": mustKeys(t, []string{pub}, id)} {
		t.Run(name, func(t *testing.T) {
			mem := newMem()
			chainOf(t, repo(mem, k), newModel(2))
			for _, file := range append(mem.names(segmentPrefix)[:4], mem.names(manifestFile)...) {
				size := len(mem.files[file])
				for i := 0; i < size; i += max(1, size/15) {
					broken := mem.clone()
					broken.files[file] = bytes.Clone(mem.files[file])
					broken.files[file][i] ^= 1
					r := repo(broken, k)
					_, short, _ := strings.Cut(file, "/00000") // 1/61/segment-…
					// Behind a broken manifest the backups before it are restored instead.
					err := readAll(t, r)
					instead := strings.HasSuffix(file, manifestFile) && short[0] > '1' && err == nil
					if !instead && (err == nil || !strings.Contains(err.Error(), short[2:])) {
						t.Fatalf("%s, byte %d: restore: %v", file, i, err)
					}
					report, err := r.Verify(t.Context(), testCluster, "", true)
					if err != nil || len(report.Problems) == 0 || !strings.Contains(report.Problems[0].String(), short[2:]) {
						t.Fatalf("%s, byte %d: verify: %+v, %v", file, i, report, err)
					}
				}
			}
		})
	}
}

// Trap 121: a manifest or a segment of another cluster, chain or place is refused.
func TestForeignFiles(t *testing.T) {
	mem := newMem()
	r := repo(mem, Keys{})
	ms := chainOf(t, r, newModel(3))
	// The same history, of another cluster.
	other := newMem()
	m := newModel(3)
	m.run(60)
	c := m.cut(Full, 0, 30)
	d, err := repo(other, Keys{}).Begin(t.Context(), testCluster+1, "", c, testBorders)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := repo(other, Keys{}).Write(t.Context(), d, &testSource{vs: m.within(c), perBlock: 5}, smallOptions)
	if err != nil {
		t.Fatal(err)
	}
	at := func(m *Manifest) string { return m.folder() + manifestFile }

	broken := mem.clone()
	broken.files[at(ms[0])] = other.files[at(foreign)]
	if err := readAll(t, repo(broken, Keys{})); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), "it is the manifest of abd/") {
		t.Errorf("another cluster's manifest: %v", err)
	}
	broken = mem.clone()
	broken.files[at(ms[2])] = mem.files[at(ms[1])]
	report, err := repo(broken, Keys{}).Verify(t.Context(), testCluster, "", false)
	if err != nil || len(report.Problems) != 1 || !errors.Is(report.Problems[0].Err, ErrForeign) || report.Problems[0].Number != 3 {
		t.Errorf("the manifest of the backup before: %+v, %v", report, err)
	}
	// What comes before the foreign one is whole, and can be restored.
	if p, err := repo(broken, Keys{}).Plan(t.Context(), testCluster, When{}); err != nil || p.Revision != ms[1].Revision {
		t.Errorf("plan %+v, %v", p, err)
	}
	segs := mem.names(segmentPrefix)
	broken = mem.clone()
	broken.files[segs[0]] = mem.files[segs[1]]
	if err := readAll(t, repo(broken, Keys{})); err == nil || !strings.Contains(err.Error(), "is outside of span") {
		t.Errorf("another segment: %v", err)
	}
	// A manifest that was written anew breaks those on top of it.
	broken = mem.clone()
	broken.files[at(ms[0])] = bytes.Replace(mem.files[at(ms[0])], []byte("{"), []byte(" {"), 1)
	report, err = repo(broken, Keys{}).Verify(t.Context(), testCluster, "", false)
	if err != nil || len(report.Problems) == 0 || !strings.Contains(report.Problems[0].String(), "made on top of another backup 1") {
		t.Errorf("a changed manifest: %+v, %v", report, err)
	}
	// Two clusters in one target are told apart only by name.
	for name, b := range other.files {
		mem.files[name] = b
	}
	if _, err := r.Plan(t.Context(), 0, When{}); err == nil || !strings.Contains(err.Error(), "abc and abd") {
		t.Errorf("two clusters: %v", err)
	}
	if _, err := r.Plan(t.Context(), testCluster+1, When{}); err != nil {
		t.Error(err)
	}
}

// What is missing or short is found without reading, what is damaged only by reading.
func TestVerify(t *testing.T) {
	mem := newMem()
	ms := chainOf(t, repo(mem, Keys{}), newModel(4))
	segs := mem.names(segmentPrefix)
	for name, c := range map[string]struct {
		damage func(m *memTarget)
		want   []string // of a verification
		deep   []string // of a deep one, if it differs
	}{
		"nothing": {func(*memTarget) {}, nil, nil},
		"a segment is missing": {
			func(m *memTarget) { delete(m.files, segs[1]) },
			[]string{"backup 1: segment " + strings.SplitN(segs[1], "/", 4)[3] + ": ", "not found"},
			nil,
		},
		"a segment is short": {
			func(m *memTarget) { m.files[segs[1]] = m.files[segs[1]][:100] },
			[]string{"100 bytes, the manifest has"},
			nil,
		},
		"a segment is damaged": {
			func(m *memTarget) {
				m.files[segs[1]] = bytes.Clone(m.files[segs[1]])
				m.files[segs[1]][200]++
			},
			nil,
			[]string{"backup 1: segment " + strings.SplitN(segs[1], "/", 4)[3] + ": ", "checksum"},
		},
		"a manifest is missing": {
			func(m *memTarget) { delete(m.files, ms[1].folder()+manifestFile) },
			[]string{"backup 3: ", "backup 2 of the chain is missing"},
			nil,
		},
		"the full one is missing": {
			func(m *memTarget) { delete(m.files, ms[0].folder()+manifestFile) },
			[]string{"backup 1: the full backup is missing", "backup 2: "},
			nil,
		},
	} {
		broken := mem.clone()
		c.damage(broken)
		r := repo(broken, Keys{})
		for _, deep := range []bool{false, true} {
			report, err := r.Verify(t.Context(), 0, ms[0].Chain, deep)
			if err != nil {
				t.Fatal(err)
			}
			want := c.want
			if deep && c.deep != nil {
				want = c.deep
			}
			got := fmt.Sprint(report.Problems)
			if (want == nil) != (len(report.Problems) == 0) {
				t.Errorf("%s, deep %v: %s", name, deep, got)
			}
			for _, w := range want {
				if !strings.Contains(got, w) {
					t.Errorf("%s, deep %v: %s, want %q", name, deep, got, w)
				}
			}
		}
	}
	if _, err := repo(mem, Keys{}).Verify(t.Context(), 0, "nonsense", false); !errors.Is(err, ErrNoChain) {
		t.Error(err)
	}
}

// Of all chains a restore takes the newest whole one that has the state.
func TestPlanAvoidsBrokenChains(t *testing.T) {
	mem := newMem()
	r := repo(mem, Keys{})
	m := newModel(5)
	first := chainOf(t, r, m)
	second := write(t, r, "", m, m.cut(Full, 0, m.rev-10))
	if first[0].Chain == second.Chain {
		t.Fatal("one chain")
	}
	p, got := restore(t, r, When{Revision: m.rev}, keyspace.Span{})
	if p.Chain != second.Chain {
		t.Errorf("chain %s", p.Chain)
	}
	same(t, got, m.at(m.rev, m.rev-10))
	mem.files[second.folder()+manifestFile] = []byte("{}")
	p, got = restore(t, r, When{Revision: m.rev}, keyspace.Span{})
	if p.Chain != first[0].Chain {
		t.Errorf("chain %s", p.Chain)
	}
	same(t, got, m.at(m.rev, 30))
	_, err := r.Plan(t.Context(), testCluster, When{Revision: 1e6})
	if err == nil || !strings.Contains(err.Error(), "no whole chain has revision 1000000") || !strings.Contains(err.Error(), second.Chain) {
		t.Error(err)
	}
	if _, err := repo(newMem(), Keys{}).Plan(t.Context(), 0, When{}); !errors.Is(err, ErrNoChain) {
		t.Error(err)
	}
	if _, _, err := repo(newMem(), Keys{}).Latest(t.Context(), testCluster); !errors.Is(err, ErrNoChain) {
		t.Error(err)
	}
}

// Files that are not of backups are left alone.
func TestStrangers(t *testing.T) {
	mem := newMem()
	r := repo(mem, Keys{})
	for _, name := range []string{"readme.txt", "abc/notes/a/b", "abc/x/7/manifest.json", "zzz/x/000001/manifest.json", "0abc/x/000001/manifest.json"} {
		if err := mem.Put(t.Context(), name, strings.NewReader("?")); err != nil {
			t.Fatal(err)
		}
	}
	before := mem.names("")
	chainOf(t, r, newModel(6))
	chains, err := r.List(t.Context(), 0)
	if err != nil || len(chains) != 1 {
		t.Fatalf("%+v, %v", chains, err)
	}
	if _, err := r.Prune(t.Context(), testCluster, Retention{KeepFull: 1}, false); err != nil {
		t.Fatal(err)
	}
	for _, name := range before {
		if !slices.Contains(mem.names(""), name) {
			t.Errorf("%s is gone", name)
		}
	}
	if _, err := mem.Get(t.Context(), "none", 0); !errors.Is(err, target.ErrNotFound) {
		t.Error(err)
	}
}
