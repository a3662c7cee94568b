package wal

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// TestStories runs the stories in testdata. Commands:
//
//	open [cache=BYTES] [target=SEGMENTS]   opens the log; segments are of 16 KiB
//	batch [nosync]                         submits one batch and waits until the log is idle.
//	                                       Lines: append G first=I term=T [n=N] [size=BYTES] [hs=T/V/C],
//	                                       hs G T/V/C, compact G I, reset G I T [hs=T/V/C], remove G, forget G
//	move G                                 lets a tail of any size be rewritten
//	state [G]                              the views
//	dump [SEQ]                             every segment, record by record
//	files                                  names in the directory
//	pinning                                who holds old segments
//	crash                                  a power failure: only what was synced survives
//	flip seq=S at=OFF                      damages a byte of a closed log
//	contains seq=S                         looks for old bytes in a file
//	close
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		synctest.Test(t, func(t *testing.T) {
			s := &story{t: t, mem: simdisk.New()}
			datadriven.RunTest(t, path, s.run)
			if s.l != nil {
				mustClose(t, s.l)
			}
		})
	})
}

type story struct {
	t    *testing.T
	mem  *simdisk.Disk
	l    *Log
	salt uint64
}

// nextSalt makes salts that a reader of the dump can tell apart.
func (s *story) nextSalt() (uint64, error) {
	s.salt++
	return 0x5a17000000000000 + s.salt, nil
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "open":
		return s.open(d)
	case "batch":
		b := s.l.NewBatch()
		b.SetSync(!d.HasArg("nosync"))
		for _, line := range strings.Split(d.Input, "\n") {
			s.op(b, strings.Fields(line))
		}
		s.l.Submit(b, nil)
		synctest.Wait()
		return ""
	case "move":
		s.l.Group(keyspace.GroupID(s.number(d))).Move()
		return ""
	case "state":
		return s.state(d)
	case "dump":
		return s.dump(d)
	case "files":
		names, err := s.mem.List("wal")
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(names)
		return strings.Join(names, "\n")
	case "pinning":
		var b strings.Builder
		for _, p := range s.l.Pinning(10) {
			fmt.Fprintf(&b, "group %s: %d segments behind, %d bytes of its own in %d\n", p.Group, p.Segments, p.Bytes, p.LogBytes)
		}
		return b.String()
	case "crash":
		s.mem = s.mem.Crash(0, nil)
		mustClose(t, s.l)
		s.l = nil
		return ""
	case "flip":
		return s.flip(d)
	case "contains":
		var seq uint64
		d.ScanArgs(t, "seq", &seq)
		n := bytes.Count(readFile(t, s.mem, "wal/"+segmentName(seq, segmentSuffix)), []byte("1.2."))
		return fmt.Sprintf("entry 2 stands in the file %d times", n)
	case "close":
		mustClose(t, s.l)
		s.l = nil
		return ""
	}
	t.Fatalf("unknown command %q", d.Cmd)
	return ""
}

func (s *story) open(d *datadriven.TestData) string {
	o := testOptions(s.mem)
	if d.HasArg("cache") {
		d.ScanArgs(s.t, "cache", &o.EntryCacheBytes)
	}
	if d.HasArg("target") {
		d.ScanArgs(s.t, "target", &o.TargetBytes)
		o.TargetBytes *= o.SegmentBytes
	}
	l, err := open(o, s.nextSalt)
	if err != nil {
		return err.Error()
	}
	s.l = l
	synctest.Wait()
	return fmt.Sprintf("groups %v, removed %v", l.Groups(), l.Removed())
}

func (s *story) op(b *Batch, f []string) {
	num := func(v string) uint64 {
		n, err := strconv.ParseUint(v, 10, 64)
		if err != nil {
			s.t.Fatalf("%v: %v", f, err)
		}
		return n
	}
	args := map[string]string{"n": "1", "size": "5"}
	var plain []uint64
	var hard *hardState
	parseHard := func(v string) {
		hard = &hardState{}
		if _, err := fmt.Sscanf(v, "%d/%d/%d", &hard.term, &hard.vote, &hard.commit); err != nil {
			s.t.Fatalf("%v: %v", f, err)
		}
	}
	for _, a := range f[1:] {
		if k, v, ok := strings.Cut(a, "="); ok && k == "hs" {
			parseHard(v)
		} else if ok {
			args[k] = v
		} else if strings.Contains(a, "/") {
			parseHard(a)
		} else {
			plain = append(plain, num(a))
		}
	}
	g := keyspace.GroupID(plain[0])
	switch f[0] {
	case "append", "hs":
		var data []string
		for i := range num(args["n"]) {
			if f[0] == "append" {
				text := fmt.Sprintf("%d.%d.", num(args["term"]), num(args["first"])+i)
				data = append(data, (text + strings.Repeat("x", int(num(args["size"]))))[:num(args["size"])])
			}
		}
		first, term := num("0"+args["first"]), num("0"+args["term"])
		if hard == nil {
			b.Append(g, nil, testEntries(first, term, data...))
		} else {
			b.Append(g, testHard(*hard), testEntries(first, term, data...))
		}
	case "compact":
		b.Compact(g, plain[1])
	case "reset":
		if hard == nil {
			b.Reset(g, plain[1], plain[2], nil)
		} else {
			b.Reset(g, plain[1], plain[2], testHard(*hard))
		}
	case "remove":
		b.Remove(g)
	case "forget":
		b.Forget(g)
	default:
		s.t.Fatalf("unknown operation %v", f)
	}
}

func (s *story) state(d *datadriven.TestData) string {
	m, err := observe(s.l)
	if err != nil {
		return err.Error()
	}
	if len(d.CmdArgs) > 0 {
		id := keyspace.GroupID(s.number(d))
		m = model{id: m[id]}
	}
	return m.String()
}

// number is the number behind the command.
func (s *story) number(d *datadriven.TestData) uint64 {
	n, err := strconv.ParseUint(d.CmdArgs[0].Key, 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *story) flip(d *datadriven.TestData) string {
	var seq uint64
	var at int
	d.ScanArgs(s.t, "seq", &seq)
	d.ScanArgs(s.t, "at", &at)
	name := segmentName(seq, segmentSuffix)
	flip(s.t, s.mem, name, readFile(s.t, s.mem, "wal/"+name), at, 1)
	return ""
}

func (s *story) dump(d *datadriven.TestData) string {
	names, err := s.mem.List("wal")
	if err != nil {
		s.t.Fatal(err)
	}
	slices.Sort(names)
	var b strings.Builder
	for _, n := range names {
		seq, _ := parseSegmentName(n)
		if len(d.CmdArgs) > 0 && d.CmdArgs[0].Key != strconv.FormatUint(seq, 10) {
			continue
		}
		fmt.Fprintf(&b, "%s\n", n)
		dumpSegment(&b, readFile(s.t, s.mem, "wal/"+n))
	}
	return b.String()
}

// dumpSegment prints a segment record by record, up to the first that does not verify.
func dumpSegment(w *strings.Builder, b []byte) {
	h, err := decodeSegmentHeader(b)
	if err != nil {
		fmt.Fprintf(w, "  %v\n", err)
		return
	}
	fmt.Fprintf(w, "  segment %d of %d bytes, salt %016x\n", h.seq, h.size, h.salt)
	for off := int64(headerLen); ; {
		raw, err := verify(b[off:], h, off)
		if err != nil {
			return
		}
		if kind(raw[16]) == kindMark {
			m, err := decodeMark(raw, off)
			if err != nil {
				fmt.Fprintf(w, "  %d: %v\n", off, err)
				return
			}
			fmt.Fprintf(w, "  %d: mark synced=%d oldest=%d before=%d to %d", off, m.durable, m.oldest, m.prevSeq, m.prevEnd)
			if m.next != 0 {
				fmt.Fprintf(w, " next=%d", m.next)
			}
			w.WriteString("\n")
		} else {
			r, err := decodeRecord(raw, off)
			if err != nil {
				fmt.Fprintf(w, "  %d: %v\n", off, err)
				return
			}
			dumpRecord(w, &r)
		}
		off += int64(len(raw))
	}
}

func dumpRecord(w *strings.Builder, r *record) {
	fmt.Fprintf(w, "  %d: %s group=%s base=%d/%d", r.off, r.kind, r.group, r.base.index, r.base.term)
	rest := r.entries
	for i := range uint64(r.count) {
		e, tail, err := cutEntry(rest)
		if err != nil {
			fmt.Fprintf(w, " %v", err)
			break
		}
		text := string(e.data)
		if len(text) > 12 {
			text = fmt.Sprintf("%s... %d bytes", text[:8], len(text))
		}
		fmt.Fprintf(w, " %d/%d:%q", r.first+i, e.term, text)
		rest = tail
	}
	if r.flags&flagHardState != 0 {
		fmt.Fprintf(w, " hs=%d/%d/%d", r.hard.term, r.hard.vote, r.hard.commit)
	}
	if r.prevLen > 0 {
		fmt.Fprintf(w, " prev=%d+%d", r.prevOff, r.prevLen)
	}
	if r.flags&flagUnitEnd != 0 {
		w.WriteString(" end")
	}
	w.WriteString("\n")
}

// TestFormatGolden compares the bytes of a small segment with the golden file of the
// format's version. They change only together with formatVersion.
func TestFormatGolden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &story{t: t, mem: simdisk.New()}
		l, err := open(testOptions(s.mem), s.nextSalt)
		if err != nil {
			t.Fatal(err)
		}
		b := l.NewBatch()
		b.Reset(7, 10, 5, testHard(hardState{5, 0, 10}))
		b.Append(7, testHard(hardState{6, 2, 10}), testEntries(11, 6, "one", ""))
		l.Submit(b, nil)
		synctest.Wait()
		b = l.NewBatch()
		b.Append(7, nil, testEntries(13, 6, "three"))
		b.Compact(7, 11)
		b.Remove(8)
		l.Submit(b, nil)
		synctest.Wait()
		mustClose(t, l)
		raw := readFile(t, s.mem, "wal/"+segmentName(1, segmentSuffix))
		got := hex.Dump(bytes.TrimRight(raw, "\x00"))
		golden := filepath.Join("testdata", fmt.Sprintf("format_v%d.hex", formatVersion))
		want, err := os.ReadFile(golden)
		if errors.Is(err, os.ErrNotExist) {
			if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
			t.Fatalf("%s written anew", golden)
		}
		if err != nil {
			t.Fatal(err)
		}
		if got != string(want) {
			t.Fatalf("format version %d has other bytes than %s:\n%s", formatVersion, golden, got)
		}
	})
}
