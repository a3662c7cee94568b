package backup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Every revision of a followed cluster can be restored, and equals the history replayed:
// plain in a folder, and encrypted.
func TestRestoreEveryRevision(t *testing.T) {
	pub, id := someone(t)
	folder, err := target.Open("file://"+t.TempDir(), clock.System())
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]*Repository{
		"plain":     repo(folder, Keys{}),
		"encrypted": repo(newMem(), mustKeys(t, []string{pub}, id)),
	} {
		t.Run(name, func(t *testing.T) {
			m := newModel(1)
			m.run(60)
			full := write(t, r, "", m, m.cut(Full, 0, 30))
			cuts := []Cut{full.Cut}
			last := full
			for i := range 5 {
				m.run(10)
				c := m.cut(Versions, last.Revision, last.Revision-keyspace.Revision(5*(i%2)))
				last = write(t, r, full.Chain, m, c)
				cuts = append(cuts, c)
			}
			for rev := keyspace.Revision(30); rev <= m.rev; rev++ {
				want := keyspace.Revision(0)
				for _, c := range cuts {
					if c.Previous < rev && c.Compacted <= rev {
						want = max(want, c.Compacted)
					}
				}
				p, got := restore(t, r, When{Revision: rev}, keyspace.Span{})
				if p.Revision != rev || p.Compacted != want {
					t.Fatalf("the plan for revision %d has %d, compacted %d, want %d", rev, p.Revision, p.Compacted, want)
				}
				same(t, got, m.at(rev, want))
			}
			if _, err := r.Plan(t.Context(), testCluster, When{Revision: 29}); err == nil || !strings.Contains(err.Error(), "no backup has revision 29; the newest is revision 111") {
				t.Errorf("below the compacted revision: %v", err)
			}
			if _, err := r.Plan(t.Context(), testCluster, When{Revision: m.rev + 1}); err == nil {
				t.Error("above the newest: no error")
			}
			part := keyspace.Span{Start: []byte("/registry/things/005"), End: []byte("/registry/things/025")}
			_, got := restore(t, r, When{}, part)
			p, err := r.Plan(t.Context(), testCluster, When{})
			if err != nil {
				t.Fatal(err)
			}
			want := slices.DeleteFunc(m.at(m.rev, p.Compacted), func(v mvcc.Version) bool { return !part.Contains(v.Key) })
			same(t, got, want)
			if string(p.Users) != "users" || len(p.Leases) != 1 || p.Leases[0].ID != keyspace.LeaseID(m.rev) {
				t.Errorf("plan %+v", p)
			}
		})
	}
}

// A chain of tombstones restores the ends of its backups, and nothing between.
func TestChainOfTombstones(t *testing.T) {
	r := repo(newMem(), Keys{})
	m := newModel(2)
	m.run(50)
	full := write(t, r, "", m, m.cut(Full, 0, 50))
	last := full
	ends := []keyspace.Revision{full.Revision}
	for range 3 {
		m.run(30)
		last = write(t, r, full.Chain, m, m.cut(Tombstones, last.Revision, m.rev-2))
		ends = append(ends, last.Revision)
	}
	for _, rev := range ends[1:] {
		p, got := restore(t, r, When{Revision: rev}, keyspace.Span{})
		if p.Compacted != rev {
			t.Errorf("compacted %d, want %d: there is no history", p.Compacted, rev)
		}
		same(t, got, m.at(rev, rev))
		if _, err := r.Plan(t.Context(), testCluster, When{Revision: rev - 1}); err == nil {
			t.Errorf("revision %d: no error", rev-1)
		}
	}
	// A time within the last interval is that of the end before.
	p, _ := restore(t, r, When{Time: last.Time.Add(-time.Second)}, keyspace.Span{})
	if p.Revision != ends[2] {
		t.Errorf("revision %d, want %d", p.Revision, ends[2])
	}
}

// A time means the last revision that the cluster is known to have had by then.
func TestRestoreAtTime(t *testing.T) {
	r := repo(newMem(), Keys{})
	m := newModel(3)
	m.run(20)
	full := write(t, r, "", m, m.cut(Full, 0, 10))
	from := m.time
	m.run(40)
	c := m.cut(Versions, full.Revision, 10)
	for i := keyspace.Revision(1); i <= 3; i++ {
		c.Points = append(c.Points, Point{Time: from.Add(time.Duration(i) * 10 * time.Second), Revision: full.Revision + 10*i})
	}
	write(t, r, full.Chain, m, c)
	for after, want := range map[time.Duration]keyspace.Revision{
		0: full.Revision, 9: full.Revision, 10: full.Revision + 10, 25: full.Revision + 20, 39: full.Revision + 30, 40: full.Revision + 40, 1e6: full.Revision + 40,
	} {
		p, got := restore(t, r, When{Time: from.Add(after * time.Second)}, keyspace.Span{})
		if p.Revision != want {
			t.Errorf("after %d s: revision %d, want %d", after, p.Revision, want)
		}
		same(t, got, m.at(p.Revision, p.Compacted))
		if between := want > full.Revision && want < m.rev; len(p.Leases) != 1+map[bool]int{true: 1}[between] {
			t.Errorf("after %d s: leases %v", after, p.Leases)
		}
	}
	if _, err := r.Plan(t.Context(), testCluster, When{Time: from.Add(-time.Second)}); err == nil {
		t.Error("before the first backup: no error")
	}
}

// Few manifests are read: of the chain that has the state, or the last one to go on with it.
func TestFewManifestsAreRead(t *testing.T) {
	mem := newMem()
	r := repo(mem, Keys{})
	m := newModel(11)
	var chains [][]*Manifest
	for range 4 {
		chains = append(chains, chainOf(t, r, m))
	}
	reads := func(want int, name string, f func() error) {
		t.Helper()
		mem.gets = nil
		if err := f(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(mem.gets) != want {
			t.Errorf("%s has read %v", name, mem.gets)
		}
	}
	plan := func(w When, chain int) func() error {
		return func() error {
			p, err := r.Plan(t.Context(), testCluster, w)
			if err == nil && p.Chain != chains[chain][0].Chain {
				err = fmt.Errorf("the plan is of chain %s", p.Chain)
			}
			return err
		}
	}
	reads(3, "the newest state", plan(When{}, 3))
	reads(3, "an old revision", plan(When{Revision: chains[1][2].Revision - 3}, 1))
	reads(3, "an old time", plan(When{Time: chains[1][2].Time}, 1))
	// Only the history of a later full backup has it, so the older chains are asked in vain.
	reads(9, "between two chains", plan(When{Revision: chains[2][0].Revision - 1}, 2))
	reads(1, "latest", func() error { _, _, err := r.Latest(t.Context(), testCluster); return err })
	last := chains[3][2]
	m.run(1)
	reads(1, "begin", func() error {
		_, err := r.Begin(t.Context(), testCluster, last.Chain, m.cut(Versions, last.Revision, 30), nil)
		return err
	})
}

// More backups than are read at once are merged in steps, in files that are removed.
func TestLongChain(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	pub, id := someone(t)
	r := repo(newMem(), mustKeys(t, []string{pub}, id))
	m := newModel(4)
	m.run(10)
	last := write(t, r, "", m, m.cut(Full, 0, 5))
	chain := last.Chain
	for range 2*maxOpen + 10 {
		m.run(1)
		last = write(t, r, chain, m, m.cut(Versions, last.Revision, 5))
	}
	_, got := restore(t, r, When{}, keyspace.Span{})
	same(t, got, m.at(m.rev, 5))
	plan, err := r.Plan(t.Context(), testCluster, When{})
	if err != nil {
		t.Fatal(err)
	}
	plan.TempDir = t.TempDir()
	made := 0
	for _, err := range r.Versions(t.Context(), plan, keyspace.Span{}) {
		if err != nil {
			t.Fatal(err)
		}
		left, err := filepath.Glob(filepath.Join(plan.TempDir, "skein-backup-*"))
		if made = len(left); made != 1 || err != nil {
			t.Errorf("%v in the directory of the plan, %v", left, err)
		}
		break
	}
	if left, err := os.ReadDir(plan.TempDir); made != 1 || err != nil || len(left) > 0 {
		t.Errorf("%v is left behind, %v", left, err)
	}
	part := keyspace.Span{Start: []byte("/registry/things/011"), End: []byte("/registry/things/012")}
	_, got = restore(t, r, When{Revision: m.rev - 1}, part)
	same(t, got, slices.DeleteFunc(m.at(m.rev-1, 5), func(v mvcc.Version) bool { return !part.Contains(v.Key) }))
	if left, err := target.Open("file://"+tmp, clock.System()); err != nil {
		t.Fatal(err)
	} else {
		for o, err := range left.List(t.Context(), "") {
			t.Errorf("%s is left behind, error %v", o.Name, err)
		}
	}
}

// A backup that was broken off at any point is gone on with, and what was finished is not read
// again.
func TestResume(t *testing.T) {
	pub, id := someone(t)
	k := mustKeys(t, []string{pub}, id)
	m := newModel(5)
	m.run(300)
	c := m.cut(Full, 0, 100)
	vs := m.within(c)
	for failAfter := 1; ; failAfter += 7 {
		mem := newMem()
		r := repo(mem, k)
		d, err := r.Begin(t.Context(), testCluster, "", c, testBorders)
		if err != nil {
			t.Fatal(err)
		}
		o := smallOptions
		o.Parallel = 1
		_, err = r.Write(t.Context(), d, &testSource{vs: vs, perBlock: 5, failAfter: failAfter}, o)
		if err == nil {
			if failAfter < 20 {
				t.Fatalf("only %d blocks", failAfter)
			}
			break
		}
		if !errors.Is(err, errSource) {
			t.Fatal(err)
		}
		if chains, err := r.List(t.Context(), testCluster); err != nil || len(chains) != 1 || len(chains[0].Backups) != 0 || chains[0].Unfinished != 1 {
			t.Fatalf("list: %+v, %v", chains, err)
		}
		again, err := r.Unfinished(t.Context(), testCluster)
		if err != nil || again == nil {
			t.Fatalf("unfinished: %v, %v", again, err)
		}
		if got := again.Cut(); got.Revision != c.Revision || got.Kind != Full {
			t.Fatalf("cut %+v", got)
		}
		src := &testSource{vs: vs, perBlock: 5}
		var last Progress
		o.Progress = func(p Progress) { last = p }
		mf, err := r.Write(t.Context(), again, src, o)
		if err != nil {
			t.Fatal(err)
		}
		if last.Versions != int64(len(vs)) || last.SpansDone != 4 || last.Spans != 4 {
			t.Errorf("progress %+v, versions %d", last, len(vs))
		}
		if all := len(vs) / 5; failAfter > all/2 && src.given > all*9/10 {
			t.Errorf("%d of about %d blocks were read again after %d", src.given, all, failAfter)
		}
		var want block.Sum
		for i := range vs {
			want.Add(&vs[i])
		}
		if mf.Sum != want {
			t.Fatalf("sum %s, want %s", mf.Sum, want)
		}
		_, got := restore(t, r, When{}, keyspace.Span{})
		same(t, got, vs)
		if d, err := r.Unfinished(t.Context(), testCluster); d != nil || err != nil {
			t.Fatalf("unfinished: %v, %v", d, err)
		}
		if left := mem.names(recordPrefix); len(left) > 0 {
			t.Errorf("records are left: %v", left)
		}
		report, err := r.Verify(t.Context(), testCluster, "", true)
		if err != nil || len(report.Problems) > 0 || report.Sum != want {
			t.Fatalf("verify: %+v, %v", report, err)
		}
	}
}

// Each write of a backup fails once. The run ends with the error, and the next finishes.
func TestEachWriteFails(t *testing.T) {
	m := newModel(6)
	m.run(200)
	c := m.cut(Full, 0, 100)
	vs := m.within(c)
	errDisk := errors.New("no space left on device")
	for n := 0; ; n++ {
		mem := newMem()
		r := repo(mem, Keys{})
		at := 0
		mem.fail = func(op, name string) error {
			if op == "put" {
				if at++; at == n+1 {
					return fmt.Errorf("put %s: %w", name, errDisk)
				}
			}
			return nil
		}
		d, err := r.Begin(t.Context(), testCluster, "", c, testBorders)
		if err == nil {
			_, err = r.Write(t.Context(), d, &testSource{vs: vs, perBlock: 5}, smallOptions)
		}
		if err == nil {
			if n < 10 {
				t.Fatalf("only %d writes", n)
			}
			return
		}
		if !errors.Is(err, errDisk) {
			t.Fatalf("write %d: %v", n, err)
		}
		d, err = r.Unfinished(t.Context(), testCluster)
		if err != nil || (d == nil) != (n == 0) {
			t.Fatalf("write %d: unfinished: %v, %v", n, d, err)
		}
		if d == nil {
			continue
		}
		if _, err := r.Write(t.Context(), d, &testSource{vs: vs, perBlock: 5}, smallOptions); err != nil {
			t.Fatalf("write %d: %v", n, err)
		}
		_, got := restore(t, r, When{}, keyspace.Span{})
		same(t, got, vs)
	}
}

// Two full backups of one revision that begin within a second have one name. The second is told what to do about it,
// and so is who goes on with a chain to a revision to which somebody else goes on. A second later there is room.
func TestTheSameBackupIsBegunOnce(t *testing.T) {
	r := repo(newMem(), Keys{})
	m := newModel(7)
	m.run(20)
	begin := func(chain string, c Cut, want ...string) {
		t.Helper()
		if _, err := r.Begin(t.Context(), testCluster, chain, c, testBorders); err != nil {
			t.Fatal(err)
		}
		_, err := r.Begin(t.Context(), testCluster, chain, c, testBorders)
		if !errors.Is(err, ErrTaken) {
			t.Fatalf("begun twice: %v", err)
		}
		for _, text := range want {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%q does not say %q", err, text)
			}
		}
	}
	full := m.cut(Full, 0, 0)
	begin("", full, "within the same second", fmt.Sprint(full.Revision), "a second later")
	full.Time = full.Time.Add(time.Second)
	chain := write(t, r, "", m, full).Chain
	m.run(20)
	begin(chain, m.cut(Versions, full.Revision, 0), "gone on with chain "+chain, "make a full one")
}

// Of two writers one loses, whether they have the same cut or go on with one chain at
// different revisions. The chain stays whole.
func TestTwoWriters(t *testing.T) {
	mem := newMem()
	r := repo(mem, Keys{})
	m := newModel(7)
	m.run(200)
	c := m.cut(Full, 0, 100)
	d, err := r.Begin(t.Context(), testCluster, "", c, testBorders)
	if err != nil {
		t.Fatal(err)
	}
	both := func(ds [2]*Draft, vs [2][]mvcc.Version) (won int) {
		var errs [2]error
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() {
				_, errs[i] = repo(mem, Keys{}).Write(t.Context(), ds[i], &testSource{vs: vs[i], perBlock: 5}, smallOptions)
			})
		}
		wg.Wait()
		for i, err := range errs {
			if err == nil {
				won++
			} else if !errors.Is(err, ErrTaken) {
				t.Errorf("writer %d: %v", i, err)
			}
		}
		return won
	}
	vs := m.within(c)
	if won := both([2]*Draft{d, d}, [2][]mvcc.Version{vs, vs}); won == 2 {
		t.Error("both writers of one cut have won")
	} else if won == 0 { // each had some of the records; one of them goes on
		if d, err = r.Unfinished(t.Context(), testCluster); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Write(t.Context(), d, &testSource{vs: vs, perBlock: 5}, smallOptions); err != nil {
			t.Fatal(err)
		}
	}
	chain, rev, err := r.Latest(t.Context(), testCluster)
	if err != nil || rev != c.Revision {
		t.Fatal(chain, rev, err)
	}
	var ds [2]*Draft
	var inc [2][]mvcc.Version
	for i := range ds {
		m.run(5)
		c := m.cut(Versions, rev, 100)
		if ds[i], err = r.Begin(t.Context(), testCluster, chain, c, testBorders); err != nil {
			t.Fatal(err)
		}
		inc[i] = m.within(c)
	}
	if won := both(ds, inc); won != 1 {
		t.Errorf("%d writers have won", won)
	}
	p, got := restore(t, r, When{}, keyspace.Span{})
	same(t, got, m.at(p.Revision, 100))
	if report, err := r.Verify(t.Context(), testCluster, "", true); err != nil || len(report.Problems) > 0 {
		t.Errorf("verify: %+v, %v", report, err)
	}
	// Whoever begins above an older revision is told before it reads anything.
	if _, err := r.Begin(t.Context(), testCluster, chain, m.cut(Versions, rev, 100), nil); err == nil || !strings.Contains(err.Error(), "make a full backup") {
		t.Error(err)
	}
	// The same full backup is begun once.
	if _, err := r.Begin(t.Context(), testCluster, "", Cut{Kind: Versions, Revision: 5, Previous: 2}, nil); err == nil {
		t.Error("a backup of versions without a chain: no error")
	}
}

// A source that brings what does not belong to the cut is refused by key.
func TestSourceIsChecked(t *testing.T) {
	m := newModel(8)
	m.run(50)
	r := repo(newMem(), Keys{})
	full := write(t, r, "", m, m.cut(Full, 0, 20))
	m.run(20)
	v := func(key string, mod keyspace.Revision) mvcc.Version {
		return mvcc.Version{Key: []byte(key), Mod: mod, Create: 1, Version: 1}
	}
	for name, c := range map[string]struct {
		kind Kind
		vs   []mvcc.Version
		want string
	}{
		"below the interval":    {Versions, []mvcc.Version{v("a", full.Revision)}, `key "a" at revision 51, outside of (51, 71]`},
		"above the interval":    {Versions, []mvcc.Version{v("a", 72)}, "outside of (51, 71]"},
		"two versions of a key": {Tombstones, []mvcc.Version{v("a", 70), v("a", 69)}, "is there twice"},
	} {
		d, err := r.Begin(t.Context(), testCluster, full.Chain, m.cut(c.kind, full.Revision, 20), nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Write(t.Context(), d, &testSource{vs: c.vs, perBlock: 1}, Options{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		for _, f := range r.target.(*memTarget).names("000002/") {
			delete(r.target.(*memTarget).files, f)
		}
	}
	d, err := r.Begin(t.Context(), testCluster, full.Chain, m.cut(Versions, full.Revision, 20), [][]byte{[]byte("b")})
	if err != nil {
		t.Fatal(err)
	}
	b, _, err := block.Encode(block.ByKey, []mvcc.Version{v("b", 60)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Write(t.Context(), d, sourceBlock(b[0]), Options{}); err == nil ||
		!strings.Contains(err.Error(), `key "b" is outside of span`) {
		t.Error(err)
	}
}

// The rate holds over all spans together, in virtual time.
func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clock.Virtual()
		r := NewRepository(newMem(), Keys{}, c)
		m := newModel(9)
		m.run(300)
		cut := m.cut(Full, 0, 0)
		d, err := r.Begin(t.Context(), testCluster, "", cut, testBorders)
		if err != nil {
			t.Fatal(err)
		}
		start := c.Now()
		o := smallOptions
		o.RateBytesPerSecond = 1000
		var last Progress
		o.Progress = func(p Progress) { last = p }
		if _, err := r.Write(t.Context(), d, &testSource{vs: m.within(cut), perBlock: 5}, o); err != nil {
			t.Fatal(err)
		}
		took := c.Now().Sub(start)
		want := time.Duration(last.StoredBytes) * time.Second / 1000
		if took < want*9/10 || took > want*11/10 {
			t.Errorf("%d bytes took %s, want %s", last.StoredBytes, took, want)
		}
	})
}

// Without an identity an encrypted chain can be gone on with, and nothing of it be read.
func TestRecipientsOnly(t *testing.T) {
	pub, id := someone(t)
	mem := newMem()
	writer := repo(mem, mustKeys(t, []string{pub}, ""))
	m := newModel(10)
	m.run(50)
	full := write(t, writer, "", m, m.cut(Full, 0, 10))
	m.run(10)
	chain, rev, err := writer.Latest(t.Context(), testCluster)
	if err != nil || chain != full.Chain || rev != full.Revision {
		t.Fatal(chain, rev, err)
	}
	write(t, writer, chain, m, m.cut(Versions, rev, 10))
	if _, err := writer.Plan(t.Context(), testCluster, When{}); !errors.Is(err, ErrNoIdentity) {
		t.Errorf("plan: %v", err)
	}
	for name, b := range mem.files {
		if !strings.HasPrefix(string(b), ageIntro) || strings.Contains(string(b), "registry") {
			t.Errorf("%s is not encrypted", name)
		}
	}
	reader := repo(mem, mustKeys(t, nil, id))
	_, got := restore(t, reader, When{}, keyspace.Span{})
	same(t, got, m.at(m.rev, 10))
}

// sourceBlock is the one block of the first span.
type sourceBlock []byte

func (s sourceBlock) Read(_ context.Context, span keyspace.Span, emit func([]byte, []mvcc.Version) error) error {
	if len(span.Start) > 0 {
		return nil
	}
	var dec block.Decoder
	vs, err := dec.Decode(s)
	if err != nil {
		return err
	}
	return emit(s, vs)
}
