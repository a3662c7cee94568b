package heat

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
)

// TestStories walks testdata/stories.
//
//	fold [columns=N] [rows=N] [start=KEY] [end=KEY]
//	COLUMN: START WRITES/READS/BYTES, …
//
// puts columns into one map. A line is a column, or several with the number of the first one: then each cell has the
// counts of all, with spaces between them. The last cell of a line reaches to the end of the keyspace.
//
//	times now=TIME [from=TIME] [to=TIME] [last=DURATION] [rows=N] [columns=N]
//
// prints the columns that show a time. Times are written as 2006-01-02T15:04:05, a duration as 1h.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "fold":
				return foldStory(t, d)
			case "times":
				return timesStory(t, d)
			}
			t.Fatalf("%s: there is no command %s", d.Pos, d.Cmd)
			return ""
		})
	})
}

func foldStory(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	columns, rows := 1, maxCells
	var start, end string
	d.MaybeScanArgs(t, "columns", &columns)
	d.MaybeScanArgs(t, "rows", &rows)
	d.MaybeScanArgs(t, "start", &start)
	d.MaybeScanArgs(t, "end", &end)
	var bands []band
	for line := range strings.Lines(d.Input) {
		column, list, _ := strings.Cut(strings.TrimSpace(line), ":")
		b := band{column: number(t, column)}
		for cell := range strings.SplitSeq(list, ",") {
			fields := strings.Fields(cell)
			b.starts = append(b.starts, strings.Trim(fields[0], `"`))
			b.width = len(fields) - 1
			for _, f := range fields[1:] {
				b.counts = append(b.counts, counts(t, f))
			}
		}
		bands = append(bands, b)
	}
	out := fold(bands, keyspace.Span{Start: []byte(start), End: []byte(end)}, columns, rows)
	var b strings.Builder
	for row, s := range out.starts {
		fmt.Fprintf(&b, "%q", s)
		for _, c := range out.counts[row*columns : (row+1)*columns] {
			fmt.Fprintf(&b, "  %d/%d/%d", c.Writes, c.Reads, c.Bytes)
		}
		b.WriteByte('\n')
	}
	if len(out.starts) == 0 {
		return "nothing\n"
	}
	fmt.Fprintf(&b, "end %q\n", out.end)
	return b.String()
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func counts(t *testing.T, s string) Counts {
	t.Helper()
	var c Counts
	if _, err := fmt.Sscanf(s, "%d/%d/%d", &c.Writes, &c.Reads, &c.Bytes); err != nil {
		t.Fatalf("%s: %v", s, err)
	}
	return c
}

func timesStory(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	at := func(arg string) int64 {
		var text string
		if !d.MaybeScanArgs(t, arg, &text) {
			return 0
		}
		m, err := time.Parse("2006-01-02T15:04:05", text)
		if err != nil {
			t.Fatal(err)
		}
		return m.Unix()
	}
	var rows, columns int
	d.MaybeScanArgs(t, "rows", &rows)
	d.MaybeScanArgs(t, "columns", &columns)
	last := ""
	if d.MaybeScanArgs(t, "last", &last); last == "" {
		last = "0s"
	}
	long, err := time.ParseDuration(last)
	if err != nil {
		t.Fatal(err)
	}
	q, err := NewQuery(time.Unix(at("now"), 0), Time{at("from"), at("to"), int64(long / time.Second)}, rows, columns, keyspace.Span{})
	if err != nil {
		return err.Error() + "\n"
	}
	if err := q.check(); err != nil {
		t.Errorf("%s: %v", d.Pos, err)
	}
	show := func(s int64) string { return time.Unix(s, 0).UTC().Format("2006-01-02T15:04:05") }
	return fmt.Sprintf("%d columns of %v from %s to %s, %d rows\n", q.Columns, time.Duration(q.Width)*time.Second, show(q.From), show(q.end()), q.Rows)
}

// Whatever is folded, nothing is lost and nothing is counted twice. Rows are in order and not more than wanted; and
// what is folded in two steps is what is folded in one.
func TestFoldKeepsAll(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		const columns = 3
		var bands []band
		var want [columns]Counts
		for range 1 + rng.IntN(6) {
			b := band{column: rng.IntN(columns)}
			b.width = 1 + rng.IntN(columns-b.column)
			for range 1 + rng.IntN(20) {
				b.starts = append(b.starts, fmt.Sprintf("%03d", rng.IntN(40)))
			}
			slices.Sort(b.starts)
			b.starts = slices.Compact(b.starts)
			for range b.starts {
				for i := range b.width {
					c := Counts{Writes: rng.Uint64N(1 << rng.IntN(30)), Reads: rng.Uint64N(3), Bytes: rng.Uint64N(1 << rng.IntN(40))}
					b.counts = append(b.counts, c)
					want[b.column+i].add(c)
				}
			}
			bands = append(bands, b)
		}
		most := 1 + rng.IntN(30)
		out := fold(bands, keyspace.Span{}, columns, most)
		again := fold([]band{{starts: out.starts, width: columns, counts: out.counts}}, keyspace.Span{}, columns, most)
		for what, out := range map[string]cells{"folded": out, "folded again": again} {
			var got [columns]Counts
			for i, c := range out.counts {
				got[i%columns].add(c)
			}
			if got != want || len(out.starts) > most || !slices.IsSorted(out.starts) || len(out.counts) != columns*len(out.starts) {
				t.Fatalf("%s: %d rows of at most %d: %v, want %v", what, len(out.starts), most, got, want)
			}
		}
		if !slices.Equal(again.starts, out.starts) || !slices.Equal(again.counts, out.counts) {
			t.Fatalf("folded again, %v became %v", out, again)
		}
	}
}

// A map has no more bytes than may be sent, whatever it has; it then has fewer rows, and lacks nothing.
func TestGridIsBounded(t *testing.T) {
	q := Query{From: 0, Width: minute, Columns: MaxColumns, Rows: MaxRows}
	b := band{width: MaxColumns}
	var want Counts
	for i := range MaxRows {
		b.starts = append(b.starts, fmt.Sprintf("%060d", i))
		for range MaxColumns {
			c := Counts{Writes: 1 << 30, Reads: 1 << 30, Bytes: 1 << 40}
			b.counts = append(b.counts, c)
			want.add(c)
		}
	}
	g := q.grid([]band{b})
	size := 0
	for _, c := range g.Counts {
		size += c.size()
	}
	if size > MaxGridBytes || size < MaxGridBytes/2 || total(g) != want {
		t.Errorf("%d rows take %d bytes, and have %v of %v", len(g.Starts), size, total(g), want)
	}
	form, err := g.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	back, err := q.DecodeGrid(form)
	if err != nil || !slices.Equal(back.Counts, g.Counts) || !slices.EqualFunc(back.Starts, g.Starts, bytes.Equal) {
		t.Errorf("decoded: %v", err)
	}
}

// A query with long keys means all keys with the same beginning: no more is kept of a key.
func TestQueryOfLongKeys(t *testing.T) {
	long := strings.Repeat("x", maxKeyBytes)
	q, err := NewQuery(time.Unix(1e9, 0), Time{}, 0, 0, keyspace.Span{Start: []byte(long + "a"), End: []byte(long + "b")})
	if err != nil || string(q.Start) != long || string(q.End) != long[1:]+"y" || q.check() != nil {
		t.Errorf("%q to %q, %v, %v", q.Start, q.End, err, q.check())
	}
	for _, s := range []keyspace.Span{{Start: []byte("b"), End: []byte("a")}, {Start: []byte("a"), End: []byte("a")}} {
		if _, err := NewQuery(time.Unix(1e9, 0), Time{}, 0, 0, s); err == nil {
			t.Errorf("%s is taken", s)
		}
	}
	for _, q := range []Query{{}, {Width: 60, Columns: 401, Rows: 1}, {Width: 61, Columns: 1, Rows: 1}, {From: 1, Width: 60, Columns: 1, Rows: 1}, {Width: 60, Columns: 1, Rows: 257}, {Width: 60, Columns: 1, Rows: 1, Start: []byte("b"), End: []byte("a")}} {
		if q.check() == nil {
			t.Errorf("%+v is taken", q)
		}
	}
}
