package wal

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/skeindb/skein/internal/simdisk"
)

func readFile(t testing.TB, fs vfs.FS, path string) []byte {
	t.Helper()
	f, err := fs.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func writeFile(t testing.TB, fs vfs.FS, path string, b []byte) {
	t.Helper()
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(slices.Clone(b)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// copyLog copies the segments, so that each test damages a fresh log.
func copyLog(t testing.TB, files map[string][]byte) *simdisk.Disk {
	t.Helper()
	fs := simdisk.New()
	if err := fs.MkdirAll("wal", 0o700); err != nil {
		t.Fatal(err)
	}
	for name, b := range files {
		writeFile(t, fs, "wal/"+name, b)
	}
	return fs
}

// segmentFiles reads all files. In a bubble it waits for the log to be idle.
func segmentFiles(t testing.TB, fs vfs.FS) map[string][]byte {
	t.Helper()
	synctest.Wait()
	names, err := fs.List("wal")
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, n := range names {
		files[n] = readFile(t, fs, "wal/"+n)
	}
	return files
}

// syncedLog returns the files of a log of a few segments, stopped without a Close after a
// synced batch. It also returns the model of its contents, and the newest file written to
// with the offset up to which it is synced.
func syncedLog(t *testing.T) (files map[string][]byte, want string, active string, synced int64) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { files, want, active, synced = makeSyncedLog(t) })
	return files, want, active, synced
}

func makeSyncedLog(t *testing.T) (files map[string][]byte, want string, active string, synced int64) {
	t.Helper()
	mem := simdisk.New()
	o := testOptions(mem)
	l := mustOpen(t, o)
	d := newDriver(7, 5)
	d.pinned = 1
	for range 120 {
		b := l.NewBatch()
		d.fill(b)
		l.Submit(b, nil)
		if err := l.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// The mark that proves the sync follows when the log is idle.
	synctest.Wait()
	l.mu.Lock()
	s := l.segs[len(l.segs)-1]
	l.mu.Unlock()
	files = segmentFiles(t, mem)
	mustClose(t, l)
	return files, d.state.String(), segmentName(s.seq, segmentSuffix), s.synced
}

// TestBitFlips flips a bit in every byte of every file of a synced log. Open refuses and
// names the file, or the bit is unused and the log is complete.
func TestBitFlips(t *testing.T) {
	files, want, active, synced := syncedLog(t)
	t.Logf("%d files, %s synced up to %d", len(files), active, synced)
	refused, harmless, each := 0, 0, 1
	if testing.Short() {
		each = 3
	}
	fs := copyLog(t, files)
	first := slices.Min(slices.Collect(maps.Keys(files)))
	for name, b := range files {
		var step int
		for off := 0; off < len(b); off += step {
			// Every byte of the newest segment in use, the only one that may be cut; with
			// -short every third one. Of the others, the headers' padding and the space
			// behind the end only some.
			switch step = each; {
			case off >= 64 && off < headerLen-8, name == active && int64(off) > synced+2*markLen:
				step = 397
			case name == first:
				step = 7
			case name != active:
				step = 71
			}
			flip(t, fs, name, b, off, 1<<(off%8))
			got, err := recoverOnly(t, fs)
			flip(t, fs, name, b, off, 0)
			if err != nil {
				var c *CorruptionError
				if !errors.As(err, &c) || !strings.HasSuffix(c.File, name) || c.Offset > int64(off) {
					t.Fatalf("%s, byte %d: %v", name, off, err)
				}
				refused++
				continue
			}
			if got != want {
				t.Fatalf("%s, byte %d (%d synced in %s): opened with another state", name, off, synced, active)
			}
			harmless++
			fs = copyLog(t, files)
		}
	}
	t.Logf("%d refused, %d harmless", refused, harmless)
	if refused < 2000/each {
		t.Fatalf("only %d flips were refused", refused)
	}
}

// flip changes one byte of a file in place.
func flip(t *testing.T, fs vfs.FS, name string, b []byte, off int, mask byte) {
	t.Helper()
	f, err := fs.OpenReadWrite("wal/"+name, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{b[off] ^ mask}, int64(off)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// recoverOnly recovers a log, without starting it, and returns what is in it.
func recoverOnly(t *testing.T, fs vfs.FS) (string, error) {
	t.Helper()
	o, err := testOptions(fs).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	l := newLog(o, newSalt)
	defer func() {
		if err := l.closeFiles(); err != nil {
			t.Fatal(err)
		}
	}()
	if err := l.recover(); err != nil {
		return "", err
	}
	m, err := observe(l)
	if err != nil {
		t.Fatal(err)
	}
	return m.String(), nil
}

// openBytes opens a copy of the log with one file replaced.
func openBytes(t *testing.T, files map[string][]byte, name string, b []byte) (*Log, error) {
	t.Helper()
	damaged := maps.Clone(files)
	damaged[name] = b
	o := testOptions(copyLog(t, damaged))
	return Open(o)
}

// TestTornTail zeroes or damages the unsynced end of the newest segment at every offset.
// The log opens with all synced batches, and records behind a hole are never used (trap
// 18: torn and zero-filled tails).
func TestTornTail(t *testing.T) { synctest.Test(t, testTornTail) }

func testTornTail(t *testing.T) {
	mem := simdisk.New()
	l := mustOpen(t, testOptions(mem))
	d := newDriver(3, 4)
	h := newHistory(d.state)
	for range 12 {
		h.submit(t, l, d, true)
	}
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	synced := len(h.states) - 1
	for range 8 {
		h.submit(t, l, d, false)
	}
	done := make(chan struct{})
	b := l.NewBatch()
	b.SetSync(false)
	l.Submit(b, func(error) { close(done) })
	<-done
	l.mu.Lock()
	s := l.segs[0]
	l.mu.Unlock()
	from, to := s.synced, s.end.Load()
	files := segmentFiles(t, mem)
	mustClose(t, l)
	name := segmentName(s.seq, segmentSuffix)
	damages := map[string]func([]byte, int64) []byte{
		"zeros": func(b []byte, at int64) []byte { clear(b[at:]); return b },
		"hole":  func(b []byte, at int64) []byte { clear(b[at:min(at+40, int64(len(b)))]); return b },
		"noise": func(b []byte, at int64) []byte {
			for i := at; i < to; i++ {
				b[i] ^= 0x5a
			}
			return b
		},
	}
	for what, damage := range damages {
		least := len(h.states)
		for at := from; at < to; at += 17 {
			l, err := openBytes(t, files, name, damage(slices.Clone(files[name]), at))
			if err != nil {
				t.Fatalf("%s at %d in [%d, %d): %v", what, at, from, to, err)
			}
			n, err := h.find(l, synced)
			if err != nil {
				t.Fatalf("%s at %d: %v", what, at, err)
			}
			least = min(least, n)
			mustClose(t, l)
		}
		if least != synced {
			t.Errorf("%s: no damage cut back to the %d synced batches, but to %d", what, synced, least)
		}
	}
}

// TestRecycledRecordsVerify puts intact records of an earlier use, of another log and of
// another offset behind the end of the log. None may be replayed (trap 18: recycled
// segments and older generations).
func TestRecycledRecordsVerify(t *testing.T) { synctest.Test(t, testRecycledRecordsVerify) }

func testRecycledRecordsVerify(t *testing.T) {
	mem := simdisk.New()
	l := mustOpen(t, testOptions(mem))
	b := l.NewBatch()
	b.Append(1, testHard(hardState{1, 1, 0}), testEntries(1, 1, "one", "two"))
	l.Submit(b, nil)
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustClose(t, l)
	want := "group 1: exists=true removed=false hard=true{1 1 0} base={0 0} last=2: 1/1/\"one\" 2/1/\"two\"\n"
	files := segmentFiles(t, mem)
	name := segmentName(1, segmentSuffix)
	header, err := decodeSegmentHeader(files[name])
	if err != nil {
		t.Fatal(err)
	}
	end := scan(files[name], header, int64(len(files[name]))).end
	record := func(h segmentHeader, off int64) []byte {
		b := endRecord(appendEntry(beginRecord(nil, kindAppend, 1, 3, 1), testEntries(3, 1, "ghost")[0]))
		putState(b, position{}, hardState{1, 1, 3}, true)
		b[17] |= flagUnitEnd
		seal(b, h, off)
		if _, err := verify(b, h, off); err != nil {
			t.Fatal(err)
		}
		return b
	}
	ghosts := map[string][]byte{
		"earlier use":         record(segmentHeader{seq: header.seq, salt: header.salt + 1}, end),
		"other sequence":      record(segmentHeader{seq: header.seq + 1, salt: header.salt}, end),
		"other offset":        record(header, end+8),
		"shifted in the file": append(make([]byte, 16), record(header, end)...),
		// This one lies at its stated offset, but behind a hole.
		"behind a hole": append(make([]byte, 16), record(header, end+16)...),
	}
	for what, ghost := range ghosts {
		bad := slices.Clone(files[name])
		copy(bad[end:], ghost)
		l, err := openBytes(t, files, name, bad)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		m, err := observe(l)
		if err != nil || m.String() != want {
			t.Fatalf("%s: got %s, %v", what, m, err)
		}
		// The next write is followed by what was behind the hole.
		b := l.NewBatch()
		b.Append(2, testHard(hardState{1, 1, 0}), nil)
		l.Submit(b, nil)
		mustClose(t, l)
		again := mustOpen(t, l.opts)
		if last := again.Group(1).LastIndex(); last != 2 {
			t.Fatalf("%s: last index %d after a restart", what, last)
		}
		mustClose(t, again)
	}
}

// TestRotUnderReader damages a record while the log is open: the read reports the damage
// and its place.
func TestRotUnderReader(t *testing.T) {
	mem := simdisk.New()
	o := testOptions(mem)
	o.EntryCacheBytes = 1
	l := mustOpen(t, o)
	for i := range uint64(5) {
		b := l.NewBatch()
		b.Append(1, nil, testEntries(i+1, 1, "some data"))
		l.Submit(b, nil)
		if err := l.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	g := l.Group(1)
	if _, ok := g.EntriesCached(1, 3, 1<<20); ok {
		t.Fatal("entries in memory, with a cache of one byte")
	}
	if ents, err := g.Entries(1, 6, 1<<20); err != nil || len(ents) != 5 {
		t.Fatalf("%d entries, %v", len(ents), err)
	}
	name := segmentName(1, segmentSuffix)
	b := readFile(t, mem, "wal/"+name)
	flip(t, mem, name, b, strings.LastIndex(string(b), "some data"), 4)
	_, err := g.Entries(1, 6, 1<<20)
	var c *CorruptionError
	if !errors.As(err, &c) || !strings.HasSuffix(c.File, name) {
		t.Fatalf("read of a damaged record: %v", err)
	}
	mustClose(t, l)
}

// TestShortenedFiles cuts every file at many lengths, even where nothing was ever written
// or synced. A file has its full size before it has its name, so none of this is a torn
// tail. Open refuses and names the file and its end.
func TestShortenedFiles(t *testing.T) {
	files, _, active, synced := syncedLog(t)
	for name, b := range files {
		cuts := []int64{0, 1, headerLen - 1, headerLen, headerLen + markLen, int64(len(b)) / 2, int64(len(b)) - 1}
		if name == active {
			cuts = append(cuts, synced-1, synced, synced+markLen)
		}
		for _, at := range cuts {
			l, err := openBytes(t, files, name, b[:at])
			if err == nil {
				mustClose(t, l)
				t.Fatalf("%s opened with %d bytes of %d", name, at, len(b))
			}
			var c *CorruptionError
			if !errors.As(err, &c) || !strings.HasSuffix(c.File, name) || at >= headerLen && c.Offset != at {
				t.Fatalf("%s with %d bytes of %d: %v", name, at, len(b), err)
			}
		}
	}
}

// TestLostNewest removes the segment in use, alone or with all prepared ones behind it,
// at every moment of a log's growth: the previous segment names it.
func TestLostNewest(t *testing.T) { synctest.Test(t, testLostNewest) }

func testLostNewest(t *testing.T) {
	mem := simdisk.New()
	l := mustOpen(t, testOptions(mem))
	defer mustClose(t, l)
	lost := 0
	for i := range 30 {
		if err := <-appendOne(l, 1, strings.Repeat("x", 1000), i%3 > 0); err != nil {
			t.Fatal(err)
		}
		files := segmentFiles(t, mem)
		l.mu.Lock()
		newest := l.segs[len(l.segs)-1].seq
		l.mu.Unlock()
		if newest == 1 {
			continue
		}
		for _, all := range []bool{false, true} {
			rest := maps.Clone(files)
			for name := range files {
				if seq, _ := parseSegmentName(name); seq == newest || all && seq > newest {
					delete(rest, name)
				}
			}
			_, err := recoverOnly(t, copyLog(t, rest))
			var c *CorruptionError
			if !errors.As(err, &c) || !strings.HasSuffix(c.File, segmentName(newest, segmentSuffix)) {
				t.Fatalf("without segment %d, the newest: %v", newest, err)
			}
			lost++
		}
	}
	if lost < 20 {
		t.Fatalf("only %d losses", lost)
	}
}

// TestMissingAndForeignFiles removes a segment, or replaces it by one of another name:
// both are refused. Only files that are no part of the log may be missing.
func TestMissingAndForeignFiles(t *testing.T) {
	files, want, active, _ := syncedLog(t)
	names := slices.Sorted(maps.Keys(files))
	opened := 0
	for i, name := range names {
		rest := maps.Clone(files)
		delete(rest, name)
		l, err := Open(testOptions(copyLog(t, rest)))
		if err == nil {
			if m, _ := observe(l); m.String() != want || name == active {
				t.Fatalf("opened without %s (in use: %s)", name, active)
			}
			mustClose(t, l)
			opened++
		}
		if i == 0 {
			continue
		}
		swapped := maps.Clone(files)
		swapped[names[i-1]], swapped[name] = files[name], files[names[i-1]]
		if l, err := Open(testOptions(copyLog(t, swapped))); err == nil {
			mustClose(t, l)
			t.Fatalf("opened with %s and %s swapped", names[i-1], name)
		}
	}
	if opened == len(names) {
		t.Fatal("no file was missed")
	}
}

// TestRecoveryErrors fails the n-th operation of a recovery, including reads: Open fails,
// and the next one finds everything.
func TestRecoveryErrors(t *testing.T) {
	files, want, _, _ := syncedLog(t)
	for n := 1; ; n++ {
		ops := 0
		var in bool
		inj := errorfs.InjectorFunc(func(op errorfs.Op) error {
			if !in || op.Kind == errorfs.OpFileClose {
				return nil
			}
			if ops++; ops == n {
				return fmt.Errorf("%w: %v", errInjected, op.Kind)
			}
			return nil
		})
		fs := copyLog(t, files)
		o, err := testOptions(errorfs.Wrap(fs, inj)).withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		l := newLog(o, newSalt)
		in = true
		err = l.recover()
		in = false
		if cerr := l.closeFiles(); cerr != nil {
			t.Fatal(cerr)
		}
		if err == nil {
			if n < 10 {
				t.Fatalf("recovery took %d operations", n)
			}
			return
		}
		if !errors.Is(err, errInjected) {
			t.Fatalf("operation %d: %v", n, err)
		}
		whole := mustOpen(t, testOptions(fs))
		if m, err := observe(whole); err != nil || m.String() != want {
			t.Fatalf("operation %d: state lost, %v", n, err)
		}
		mustClose(t, whole)
	}
}

// TestRecoveryRefusesWhatDoesNotFit opens logs of intact records that contradict each
// other as no crash leaves them: a hard state that commits missing entries (trap 19), and
// a hole between entries.
func TestRecoveryRefusesWhatDoesNotFit(t *testing.T) { synctest.Test(t, testRecoveryRefuses) }

func testRecoveryRefuses(t *testing.T) {
	mem := simdisk.New()
	l := mustOpen(t, testOptions(mem))
	b := l.NewBatch()
	b.Append(1, testHard(hardState{1, 1, 0}), testEntries(1, 1, "one", "two"))
	l.Submit(b, nil)
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustClose(t, l)
	files := segmentFiles(t, mem)
	name := segmentName(1, segmentSuffix)
	header, err := decodeSegmentHeader(files[name])
	if err != nil {
		t.Fatal(err)
	}
	end := scan(files[name], header, int64(len(files[name]))).end
	for what, c := range map[string]struct {
		first, commit uint64
		want          string // in the error; if empty, Open succeeds
	}{
		"as it should be":   {3, 3, ""},
		"commit beyond all": {3, 4, "commit index 4 above the last index 3"},
		"a hole":            {4, 2, "missing"},
	} {
		r := endRecord(appendEntry(beginRecord(nil, kindAppend, 1, c.first, 1), testEntries(c.first, 1, "more")[0]))
		putState(r, position{}, hardState{1, 1, c.commit}, true)
		r[17] |= flagUnitEnd
		seal(r, header, end)
		bad := slices.Clone(files[name])
		copy(bad[end:], r)
		l, err := openBytes(t, files, name, bad)
		if err == nil {
			mustClose(t, l)
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
