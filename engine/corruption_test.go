package engine

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// rotAt changes the byte behind the first place of the mark in each of the store's tables.
func rotAt(t *testing.T, fs vfs.FS, mark []byte) {
	t.Helper()
	found := false
	names, err := fs.List("data")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		f, err := fs.OpenReadWrite("data/"+name, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		at := bytes.Index(whole, mark)
		if at >= 0 {
			at += len(mark)
			if _, err := f.WriteAt([]byte{whole[at] ^ 1}, int64(at)); err != nil {
				t.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		found = found || at >= 0
	}
	if !found {
		t.Fatal("the mark is in no table")
	}
}

// openOn opens the store on a disk.
func openOn(t *testing.T, fs vfs.FS) *Engine {
	t.Helper()
	e, err := Open(Options{FS: fs, Dir: "data", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// A bad table with user data alone is reported, with bounds that lie within user data, whether a
// read or a compaction meets it, and the store goes on. One with the node's own records ends it.
func TestBadTablesAreReported(t *testing.T) {
	mark := make([]byte, 4<<10) // random, so that it lies in the file as it is here
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range mark {
		mark[i] = byte(rng.Uint32())
	}
	for _, c := range []struct {
		name     string
		key      []byte
		by       string
		reported bool
	}{
		{"user data, read", AppendVersionedKey(nil, []byte("k5"), 7), "read", true},
		{"user data, compaction", AppendVersionedKey(nil, []byte("k5"), 7), "compaction", true},
		{"a group's records", GroupLocalKey(5, []byte("x")), "read", true},
		{"lease index", AppendLeaseKey(nil, 3, []byte("k5")), "read", true},
		{"placement's records", GroupLocalKey(keyspace.PlacementGroup, []byte("x")), "read", false},
		{"the node's records", NodeLocalKey([]byte("x")), "read", false},
		{"an applied record", appliedKey(5), "read", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fs := simdisk.New()
				e := openOn(t, fs)
				write := func() {
					b := e.NewBatch()
					for i := range 9 {
						for _, k := range [][]byte{
							NodeLocalKey(fmt.Append(nil, "x", i)), appliedKey(keyspace.GroupID(i + 20)), GroupLocalKey(keyspace.GroupID(i), nil),
							GroupLocalKey(keyspace.PlacementGroup, fmt.Append(nil, i)),
							AppendVersionedKey(nil, fmt.Append(nil, "k", i), 5), AppendLeaseKey(nil, keyspace.LeaseID(i), []byte("k")),
						} {
							if err := b.Set(k, nil); err != nil {
								t.Fatal(err)
							}
						}
					}
					if err := b.Set(c.key, mark); err != nil {
						t.Fatal(err)
					}
					if err := b.Commit(); err != nil {
						t.Fatal(err)
					}
					if err := e.Flush(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				write()
				if err := e.Close(); err != nil {
					t.Fatal(err)
				}
				rotAt(t, fs, mark[:64])
				e = openOn(t, fs)
				var met []Corruption
				e.OnCorruption(func(c Corruption) { met = append(met, c) })
				if c.by == "read" {
					if _, _, err := e.Get(c.key); err == nil {
						t.Error("the bad block was read")
					}
				} else {
					for range 3 * l0Compaction {
						write()
					}
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				if !c.reported {
					if err := e.Err(); err == nil || !IsCorruption(err) || !strings.Contains(err.Error(), "corruption in data/") || len(met) > 0 {
						t.Errorf("the store goes on: %v, reported %v", err, met)
					}
					_ = e.Abort()
					return
				}
				if err := e.Err(); err != nil {
					t.Errorf("the store has ended: %v", err)
				}
				if len(met) == 0 {
					t.Fatal("nobody was told")
				}
				if b := met[0].Bounds; bytes.Compare(c.key, b.Lower) < 0 || bytes.Compare(c.key, b.Upper) >= 0 || b.Lower[0] != c.key[0] || b.Upper[0] != c.key[0] {
					t.Errorf("key %s, bounds %s", FormatKey(c.key), b)
				}
				if len(met) > 130 {
					t.Errorf("%d reports in a minute", len(met))
				}
				if err := e.Flush(t.Context()); err != nil {
					t.Error(err)
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// A store whose first block cannot be read is not empty. It opens: the block may be one range's.
func TestRotIsNotEmpty(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := simdisk.New()
		e := openOn(t, fs)
		mark := []byte("a value that does not compress")
		b := e.NewBatch()
		if err := errors.Join(b.Set(AppendVersionedKey(nil, []byte("k"), 7), mark), b.Commit(), e.Flush(t.Context()), e.Close()); err != nil {
			t.Fatal(err)
		}
		rotAt(t, fs, mark[:20])
		e = openOn(t, fs)
		if empty, err := e.Empty(); empty || err != nil {
			t.Errorf("empty %t, %v", empty, err)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// An excise reads the tables at its ends, and Pebble holds its lock then. A bad one there is met without
// a pause: the whole store would stand still.
func TestExciseDoesNotPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fs := simdisk.New()
		e := openOn(t, fs)
		value := make([]byte, 64<<10) // random, and a block of its own
		rng := rand.New(rand.NewPCG(1, 1))
		b := e.NewBatch()
		for _, k := range []string{"k3", "k4", "k5", "k6", "k7"} {
			for i := range value {
				value[i] = byte(rng.Uint32())
			}
			if err := b.Set(AppendVersionedKey(nil, []byte(k), 7), value); err != nil {
				t.Fatal(err)
			}
		}
		if err := errors.Join(b.Commit(), e.Flush(t.Context()), e.Close()); err != nil {
			t.Fatal(err)
		}
		rotAt(t, fs, value[:64])
		e = openOn(t, fs)
		met := 0
		e.OnCorruption(func(Corruption) { met++ })
		if _, _, err := e.Get(AppendVersionedKey(nil, []byte("k7"), 7)); err == nil {
			t.Error("the bad block was read")
		}
		synctest.Wait()
		before, began := met, time.Now()
		err := e.Drop(t.Context(), &Corruption{Bounds: VersionedSpan(keyspace.Span{Start: []byte("k5"), End: []byte("k7")})})
		if took := time.Since(began); took > 0 {
			t.Errorf("it has paused for %v: %v", took, err)
		}
		synctest.Wait()
		if met == before {
			t.Error("it has not met the bad block")
		}
		_ = e.Abort()
	})
}

// The bounds of a bad table hold all versions of its first and last key, and say whose data it may hold.
func TestBoundsOfABadTable(t *testing.T) {
	key := func(k string) []byte { return AppendVersionedKey(nil, []byte(k), 7) }
	span := func(start, end string) keyspace.Span { return keyspace.Span{Start: []byte(start), End: []byte(end)} }
	lease := func(id keyspace.LeaseID, k string) []byte { return AppendLeaseKey(nil, id, []byte(k)) }
	synctest.Test(t, func(t *testing.T) {
		e := openOn(t, simdisk.New())
		met := make(chan Corruption, 1)
		e.OnCorruption(func(c Corruption) { met <- c })
		for i, c := range []struct {
			first, last []byte
			exclusive   bool
			bounds      string
			holds       string // of group 3 with ["c", "f"), 4 with ["f", "k"), 5 with ["k", end)
		}{
			{key("d"), key("e"), false, `[key/"d", key/"e"/end)`, "3"},
			{key("d"), key("f"), false, `[key/"d", key/"f"/end)`, "3 4"},
			{key("d"), VersionedSpan(span("f", "")).Lower, true, `[key/"d", key/"f")`, "3"},
			{key("d"), VersionedSpan(span("", "")).Upper, true, `[key/"d", 41)`, "3 4 5"},
			{GroupLocalKey(3, []byte("m")), GroupLocalKey(4, []byte("a")), false, `[group/3/"m", group/4/"a\x00")`, "3 4"},
			{GroupLocalKey(3, []byte("m")), GroupLocalSpan(3).Upper, true, `[group/3/"m", group/4/"")`, "3"},
			{lease(7, "d"), lease(7, "e"), false, `[lease/0000000000000007/"d", lease/0000000000000007/"e\x00")`, "3"},
			{lease(7, "d"), lease(8, "e"), false, `[lease/0000000000000007/"d", lease/0000000000000008/"e\x00")`, "3 4 5"},
		} {
			info := pebble.DataCorruptionInfo{Path: fmt.Sprint(i, ".sst"), Details: errors.New("a bad block")}
			info.Bounds.Start, info.Bounds.End.Key = c.first, c.last
			if !c.exclusive {
				info.Bounds.End.Kind = 1
			}
			e.dataCorruption(info)
			bad := <-met
			var holds []string
			for g, s := range []keyspace.Span{span("c", "f"), span("f", "k"), span("k", "")} {
				if id := keyspace.GroupID(3 + g); bad.MayHold(id, s) {
					holds = append(holds, fmt.Sprint(uint64(id)))
				}
			}
			if got := strings.Join(holds, " "); got != c.holds || bad.Bounds.String() != c.bounds {
				t.Errorf("table %d: %s holds data of %s, want %s of %s", i, bad.Bounds, got, c.bounds, c.holds)
			}
			if err := e.Drop(t.Context(), &bad); err != nil {
				t.Errorf("table %d: %v", i, err)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Who excises holds the lock of the whole store, so nobody pauses there: not in an ingest, and not in the
// flush of one.
func TestNobodyPausesUnderPebblesLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := openOn(t, simdisk.New())
		l := e.listener()
		meets := func() (pause time.Duration) {
			info := pebble.DataCorruptionInfo{Path: "1.sst", Details: errors.New("a bad block")}
			info.Bounds.Start, info.Bounds.End.Key = AppendVersionedKey(nil, []byte("a"), 7), AppendVersionedKey(nil, []byte("c"), 7)
			began := time.Now()
			l.DataCorruption(info)
			return time.Since(began)
		}
		meets()
		if got := meets(); got != retryPause {
			t.Errorf("a compaction that begins anew at once pauses for %v", got)
		}
		meets()
		for _, ingest := range []bool{true, false} {
			l.FlushBegin(pebble.FlushInfo{Ingest: ingest})
			if got := meets(); (got == 0) != ingest {
				t.Errorf("beside a flush of an ingest (%t): a pause of %v", ingest, got)
			}
			l.FlushEnd(pebble.FlushInfo{Ingest: ingest})
		}
		if err := e.excising.Acquire(t.Context(), excisingAll); err != nil {
			t.Fatal(err)
		}
		if got := meets(); got != 0 {
			t.Errorf("in an ingest: a pause of %v", got)
		}
		e.excising.Release(excisingAll)
		if got := meets(); got != retryPause {
			t.Errorf("afterwards: a pause of %v", got)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Compactions that meet two bad tables in turn pause for each, and both are reported. So are two
// parts of one file, and what was met before there was a listener.
func TestEachBadTablePauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, err := Open(Options{FS: simdisk.New(), Dir: "data", Clock: clock.Virtual(), BallastBytes: -1, LowSpaceBytes: -1})
		if err != nil {
			t.Fatal(err)
		}
		table := func(path, first, last string) *Corruption {
			return &Corruption{Path: path, Bounds: KeySpan{AppendVersionedPrefix(nil, []byte(first)), immediateSuccessor(nil, AppendVersionedPrefix(nil, []byte(last)))}}
		}
		one, other, part := table("1.sst", "a", "c"), table("2.sst", "k", "m"), table("1.sst", "x", "z")
		for round := range 3 {
			for _, c := range []*Corruption{one, other} {
				if again := e.noteCorruption(c); again != (round > 0) {
					t.Errorf("round %d: %s was met just before: %t", round, c, again)
				}
			}
		}
		e.noteCorruption(part)
		time.Sleep(2 * retryPause)
		if e.noteCorruption(other) {
			t.Error("a table that was met long ago pauses")
		}
		if e.Err() != nil {
			t.Error(e.Err())
		}
		var met []string
		e.OnCorruption(func(c Corruption) {
			met = append(met, fmt.Sprint(c.Path, " ", c.Bounds))
		})
		synctest.Wait()
		if got, want := strings.Join(met, "\n"), "1.sst [key/\"a\", key/\"c\"/end)\n2.sst [key/\"k\", key/\"m\"/end)\n1.sst [key/\"x\", key/\"z\"/end)"; got != want {
			t.Errorf("reported\n%s\nwant\n%s", got, want)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}
