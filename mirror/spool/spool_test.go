package spool

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// event is event sub of a revision. Its content follows from both.
func event(rev keyspace.Revision, sub int) mvcc.Version {
	e := mvcc.Version{Key: fmt.Appendf(nil, "k%d.%d", rev, sub), Mod: rev, Sub: uint32(sub)}
	if (int(rev)+sub)%3 == 0 {
		e.Tombstone = true
		return e
	}
	e.Create, e.Version, e.Value = rev-1, 2, bytes.Repeat([]byte{byte(rev)}, int(rev)%50)
	if sub%2 == 1 {
		e.Lease = keyspace.LeaseID(-rev)
	}
	return e
}

// write appends a revision of n events in pieces.
func write(s *Spool, rev keyspace.Revision, n, piece int) error {
	for at := 0; at < n; at += piece {
		var events []mvcc.Version
		for i := at; i < min(n, at+piece); i++ {
			events = append(events, event(rev, i))
		}
		if err := s.Append(events); err != nil {
			return err
		}
	}
	return s.End()
}

func eventsOf(rev keyspace.Revision) int { return 1 + int(rev)*7%13 }

func open(t *testing.T, fs vfs.FS) *Spool {
	t.Helper()
	s, err := Open(Options{FS: fs, Dir: "s", Source: 7, After: 100, SegmentBytes: 4 << 10})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// check reads everything above after and compares it with what write has written.
func check(t *testing.T, s *Spool, after, last keyspace.Revision) {
	t.Helper()
	r, err := s.NewReader(after)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for rev := after + 1; rev <= last; rev++ {
		events := 0
		for {
			rec, err := r.Next(t.Context())
			if err != nil {
				t.Fatalf("revision %d: %v", rev, err)
			}
			if rec.Revision != rev {
				t.Fatalf("revision %d where %d is next", rec.Revision, rev)
			}
			if rec.End {
				if rec.Total != events || events != eventsOf(rev) {
					t.Fatalf("revision %d has %d events and says %d", rev, events, rec.Total)
				}
				break
			}
			for i, e := range rec.Events {
				want := event(rev, events+i)
				if len(e.Value) == 0 && len(want.Value) == 0 {
					e.Value, want.Value = nil, nil
				}
				if !reflect.DeepEqual(e, want) {
					t.Fatalf("event %d of revision %d: %+v", events+i, rev, e)
				}
			}
			events += len(rec.Events)
		}
	}
	if after < last && r.Ready() {
		t.Fatalf("there is something behind revision %d", last)
	}
}

// TestCrashes: whatever a crash takes, what was synced is there, whole revisions only, and the
// spool goes on. Revisions break off at times, as the stream of a source does.
func TestCrashes(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		disk := simdisk.New()
		var dropped keyspace.Revision = 100
		last := dropped
		for range 8 {
			s := open(t, disk)
			if s.Last() < last {
				t.Fatalf("seed %d: revision %d was synced, %d is there", seed, last, s.Last())
			}
			last = s.Last()
			for range rng.IntN(80) {
				next := s.next
				if rng.IntN(10) == 0 {
					if err := s.Append([]mvcc.Version{event(next, 0)}); err != nil {
						t.Fatal(err)
					}
					if rng.IntN(2) == 0 { // what is whole stays, the begun one goes
						if err := s.Sync(); err != nil || s.Last() != next-1 {
							t.Fatalf("seed %d: %d is synced, not %d: %v", seed, s.Last(), next-1, err)
						}
						last = s.Last()
					}
					if err := s.Rollback(); err != nil {
						t.Fatal(err)
					}
					continue
				}
				if err := write(s, next, eventsOf(next), 1+rng.IntN(5)); err != nil {
					t.Fatal(err)
				}
				if rng.IntN(4) == 0 {
					if err := s.Sync(); err != nil {
						t.Fatal(err)
					}
					last = s.Last()
				}
				if rng.IntN(20) == 0 {
					dropped = last - keyspace.Revision(rng.IntN(5))
					if dropped = max(dropped, s.First()-1); s.Drop(dropped) != nil {
						t.Fatal("drop")
					}
				}
			}
			check(t, s, max(dropped, s.First()-1), s.Last())
			crashed := disk.Crash(rng.IntN(101), rng)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			disk = crashed
		}
	}
}

// TestDamage: a flipped byte in what is known to be whole is an error that names the segment, and
// never a shorter spool (trap 121).
func TestDamage(t *testing.T) {
	disk := simdisk.New()
	s := open(t, disk)
	for rev := keyspace.Revision(101); rev <= 300; rev++ {
		if err := errors.Join(write(s, rev, eventsOf(rev), 4), s.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	first := s.segments[0]
	if len(s.segments) < 3 {
		t.Fatalf("%d segments", len(s.segments))
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	name := disk.PathJoin("s", segmentName(first.seq))
	for _, at := range []int64{3, 13, 25, 50, headerBytes, headerBytes + 9, first.end / 2, first.end - 1} {
		flip := func() {
			f, err := disk.OpenReadWrite(name, writes)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 1)
			if _, err := f.ReadAt(b, at); err != nil {
				t.Fatal(err)
			}
			b[0] ^= 4
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		flip()
		if _, err := Open(Options{FS: disk, Dir: "s", Source: 7}); err == nil || !strings.Contains(err.Error(), "0000000000000001") && !strings.Contains(err.Error(), "segment 1 ") {
			t.Errorf("byte %d: %v", at, err)
		}
		flip()
	}
	s = open(t, disk)
	check(t, s, 100, 300)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestIdentity: a spool of another source is refused, and so is a second process (traps 121, 123).
func TestIdentity(t *testing.T) {
	disk := simdisk.New()
	s := open(t, disk)
	if _, err := Open(Options{FS: disk, Dir: "s", Source: 7}); err == nil || !strings.Contains(err.Error(), "another process uses it") {
		t.Errorf("a second process: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Options{FS: disk, Dir: "s", Source: 8}); err == nil || !strings.Contains(err.Error(), "filled from cluster 7, and the source is cluster 8") {
		t.Errorf("another source: %v", err)
	}
}

// TestDiskFull: a full disk at any operation loses nothing that was synced, and the spool goes on
// when there is room (trap 122).
func TestDiskFull(t *testing.T) {
	for at := 0; ; at++ {
		left := at
		failing := true
		fs := errorfs.Wrap(simdisk.New(), errorfs.InjectorFunc(func(op errorfs.Op) error {
			if op.Kind.ReadOrWrite() != errorfs.OpIsWrite || !failing {
				return nil
			}
			if op.Kind == errorfs.OpFileClose || op.Kind == errorfs.OpRemove {
				return nil
			}
			if left--; left < 0 {
				return syscall.ENOSPC
			}
			return nil
		}))
		s, err := Open(Options{FS: fs, Dir: "s", Source: 7, After: 100, SegmentBytes: 4 << 10})
		if err != nil {
			if !IsNoSpace(err) {
				t.Fatalf("operation %d: %v", at, err)
			}
			continue
		}
		for s.Last() < 250 {
			err := write(s, s.next, eventsOf(s.next), 3)
			if err == nil && s.next%5 == 0 {
				err = s.Sync()
			}
			if err == nil {
				continue
			}
			if !IsNoSpace(err) {
				t.Fatalf("operation %d: %v", at, err)
			}
			if failing {
				if err := s.Rollback(); !IsNoSpace(err) {
					t.Fatalf("operation %d: a rollback without room: %v", at, err)
				}
			}
			failing = false
			if err := s.Rollback(); err != nil {
				t.Fatalf("operation %d: %v", at, err)
			}
		}
		check(t, s, 100, s.Last())
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if failing {
			if at < 20 {
				t.Fatalf("only %d operations", at)
			}
			return
		}
	}
}

// TestReaderWaits: a reader sees a revision when it is synced, in the present segment or the next.
func TestReaderWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, simdisk.New())
		r, err := s.NewReader(100)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := make(chan Record)
		go func() {
			for {
				rec, err := r.Next(t.Context())
				if err != nil {
					if !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
					close(got)
					return
				}
				if rec.End {
					got <- rec
				}
			}
		}()
		nothing := func() {
			synctest.Wait()
			select {
			case rec := <-got:
				t.Fatalf("revision %d was read before it was synced", rec.Revision)
			default:
			}
		}
		for rev := keyspace.Revision(101); rev < 120; rev++ {
			if err := write(s, rev, 20, 4); err != nil {
				t.Fatal(err)
			}
			nothing()
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			if rec := <-got; rec.Revision != rev {
				t.Fatalf("revision %d, not %d", rec.Revision, rev)
			}
		}
		if len(s.segments) < 3 {
			t.Fatalf("%d segments", len(s.segments))
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		<-got
	})
}

// TestRewind: a revision is read twice where the reader goes back, and a reader of what was dropped
// is refused.
func TestRewind(t *testing.T) {
	s := open(t, simdisk.New())
	defer s.Close()
	for rev := keyspace.Revision(101); rev <= 200; rev++ {
		if err := errors.Join(write(s, rev, 9, 2), s.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	r, err := s.NewReader(150)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for i := range 100 {
		for {
			rec, err := r.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if want := keyspace.Revision(151 + i/2); rec.Revision != want {
				t.Fatalf("revision %d, not %d", rec.Revision, want)
			}
			if rec.End {
				break
			}
		}
		if i%2 == 0 {
			r.Rewind()
		}
	}
	if err := s.Drop(150); err != nil {
		t.Fatal(err)
	}
	if _, err := s.NewReader(101); err == nil || s.First() > 151 || s.First() < 120 {
		t.Errorf("a reader of what was dropped: %v, the first is %d", err, s.First())
	}
	if err := write(s, 300, 1, 1); err == nil || !strings.Contains(err.Error(), "revision 300 where revision 201 is next") {
		t.Errorf("a gap: %v", err)
	}
}

// TestGaps: however many revisions the source leaves out in a row, they take one record. They are there after a start, and
// whoever begins to read within them gets their end.
func TestGaps(t *testing.T) {
	const gap = 1 << 40
	disk := simdisk.New()
	s := open(t, disk)
	last := keyspace.Revision(100)
	for range 20 {
		before := s.written + int64(len(s.buf))
		if err := s.Skip(last + gap); err != nil {
			t.Fatal(err)
		}
		if took := s.written + int64(len(s.buf)) - before; took > 32 {
			t.Fatalf("a gap of %d revisions takes %d bytes", int64(gap), took)
		}
		last += gap + 1
		if err := errors.Join(write(s, last, 2, 1), s.Skip(last), s.Sync()); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(s.Skip(last+gap), s.Sync(), s.Close()); err != nil {
		t.Fatal(err)
	}
	s = open(t, disk)
	defer s.Close()
	if s.Last() != last+gap {
		t.Fatalf("the last revision is %d, not %d", s.Last(), last+gap)
	}
	r, err := s.NewReader(100 + gap/2)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want := keyspace.Revision(100)
	for want < last {
		for i := range 4 { // a gap, two pieces, an end
			rec, err := r.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			isGap := rec.Gap == want+1 && rec.Revision == want+gap && rec.End
			isPiece := rec.Gap == 0 && rec.Revision == want+gap+1 && !rec.End
			isEnd := rec.Gap == 0 && rec.Revision == want+gap+1 && rec.End && rec.Total == 2
			if i == 0 && !isGap || (i == 1 || i == 2) && !isPiece || i == 3 && !isEnd {
				t.Fatalf("record %d behind revision %d: %+v", i, want, rec)
			}
		}
		want += gap + 1
	}
	if rec, err := r.Next(t.Context()); err != nil || rec.Gap != last+1 || rec.Revision != last+gap || r.Ready() {
		t.Errorf("%+v, %v", rec, err)
	}
}

func formats() map[string][]byte {
	return map[string][]byte{
		"header": header{seq: 2, source: 0xabc, after: 1000, prevEnd: 4096}.append(nil),
		"piece":  appendRecord(nil, 2, 52, Record{Revision: 1001, Events: []mvcc.Version{event(1001, 1), event(1001, 2), event(1001, 3)}}),
		"end":    appendRecord(nil, 2, 300, Record{Revision: 1001, End: true, Total: 4}),
		"gap":    appendRecord(nil, 2, 312, Record{Revision: 5001, Gap: 1002, End: true}),
	}
}

func TestFormat(t *testing.T) { golden.Formats(t, formats()) }

// FuzzRecord: no bytes make the decoder panic, and what it accepts it writes in the same meaning.
func FuzzRecord(f *testing.F) {
	for name, b := range formats() {
		if name != "header" {
			f.Add(b[prefixBytes:])
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeBody(b)
		if err != nil {
			return
		}
		again, err := decodeBody(appendBody(nil, r))
		if err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%+v became %+v: %v", r, again, err)
		}
	})
}

// FuzzSegment: a segment of any bytes is refused or opened, and what is read of it is in order.
func FuzzSegment(f *testing.F) {
	b := header{seq: 1, source: 7, after: 100}.append(nil)
	b = appendRecord(b, 1, int64(len(b)), Record{Revision: 101, Events: []mvcc.Version{event(101, 0)}})
	b = appendRecord(b, 1, int64(len(b)), Record{Revision: 101, End: true, Total: 1})
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Add(appendRecord(b, 1, int64(len(b)), Record{Revision: 1 << 40, Gap: 102, End: true}))
	f.Fuzz(func(t *testing.T, b []byte) {
		disk := simdisk.New()
		if err := disk.MkdirAll("s", 0o700); err != nil {
			t.Fatal(err)
		}
		file, err := disk.Create("s/"+segmentName(1), writes)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.Write(b); err != nil {
			t.Fatal(err)
		}
		file.Close()
		s, err := Open(Options{FS: disk, Dir: "s", Source: 7, After: 100})
		if err != nil {
			return
		}
		defer s.Close()
		r, err := s.NewReader(s.First() - 1)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for next := s.First(); next <= s.Last(); {
			rec, err := r.Next(ctx)
			if err != nil || rec.first() != next {
				t.Fatalf("revision %d, not %d: %v", rec.first(), next, err)
			}
			if rec.End {
				next = rec.Revision + 1
			}
		}
	})
}

// TestOldVersion: a spool of version 1 is refused with what to do: it has ends of no events where this one has gaps.
func TestOldVersion(t *testing.T) {
	b, err := hex.DecodeString("534b4549" + "4e53504c" + "01000000" + "0100000000000000" + "0700000000000000" + "6400000000000000" + "0000000000000000" + "00000000")
	if err != nil {
		t.Fatal(err)
	}
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	disk := simdisk.New()
	if err := disk.MkdirAll("s", 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := disk.Create("s/"+segmentName(1), writes)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(b); err != nil {
		t.Fatal(err)
	}
	f.Close()
	const want = "the format has version 1; this build reads 2: use the build that wrote it, or begin anew: `skein mirror abandon`, then start with an empty cluster and another --spool"
	if _, err := Open(Options{FS: disk, Dir: "s", Source: 7, After: 100}); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
}
