package heat

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// kept is what a Recorder has kept: columns by their minutes.
type kept struct {
	*Recorder
	minutes []int64
	columns []Column
}

func newKept() *kept {
	k := &kept{}
	k.Recorder = NewRecorder(func(at int64, c Column) { k.minutes, k.columns = append(k.minutes, at), append(k.columns, c) })
	return k
}

func (k *kept) sum() (sum Counts) {
	for _, c := range k.columns {
		for i := range c {
			sum.add(c[i].Counts)
		}
	}
	return sum
}

func text(c Column) string {
	var b strings.Builder
	for i := range c {
		fmt.Fprintf(&b, "%q %d/%d/%d ", c[i].Start, c[i].Writes, c[i].Reads, c[i].Bytes)
	}
	return strings.TrimSpace(b.String())
}

func sample(key string, wrote bool, bytes uint64) Sample {
	return NewSample([]byte(key), wrote, bytes, 1)
}

func part(id keyspace.RangeID, g keyspace.Generation, start, end string, c Counts, samples ...Sample) Part {
	return Part{Range: id, Generation: g, Span: keyspace.Span{Start: []byte(start), End: []byte(end)}, Counts: c, Samples: samples}
}

// The counts of a range are exact, and lie over its keys as the sample does. What is not sampled lies where something is.
func TestShapeOfARange(t *testing.T) {
	for _, tc := range []struct {
		what string
		part Part
		want string
	}{
		{"no sample", part(1, 1, "a", "z", Counts{10, 1, 70}), `"a" 10/1/70 "z" 0/0/0`},
		{"the last range", part(1, 1, "a", "", Counts{10, 1, 70}), `"a" 10/1/70`},
		{
			"one key is hot", part(1, 1, "a", "z", Counts{100, 0, 1000}, sample("m", true, 10), sample("m", true, 10), sample("m", true, 10), sample("p", true, 10)),
			`"m" 75/0/750 "m\x00" 0/0/0 "p" 25/0/250 "p\x00" 0/0/0`,
		},
		{
			"reads lie elsewhere, and bytes by their sizes", part(1, 1, "a", "z", Counts{10, 6, 100}, sample("r", false, 0), sample("b", true, 30), sample("c", true, 10)),
			`"b" 5/0/75 "b\x00" 0/0/0 "c" 5/0/25 "c\x00" 0/0/0 "r" 0/6/0 "r\x00" 0/0/0`,
		},
		{
			"no write is sampled", part(1, 1, "a", "z", Counts{3, 2, 30}, sample("r", false, 0), sample("s", false, 0)),
			`"r" 1/1/15 "r\x00" 0/0/0 "s" 2/1/15 "s\x00" 0/0/0`,
		},
		{
			"a key at the beginning, and one of before the split", part(1, 2, "a", "m", Counts{Reads: 4}, sample("a", false, 0), sample("x", false, 0)),
			`"a" 0/4/0 "a\x00" 0/0/0`,
		},
		{
			"long keys", part(1, 1, "", "", Counts{Reads: 2}, sample(strings.Repeat("k", 80), false, 0), sample(strings.Repeat("k", 70), false, 0)),
			fmt.Sprintf(`"%s" 0/2/0 "%sl" 0/0/0`, strings.Repeat("k", 64), strings.Repeat("k", 63)),
		},
		{
			"long borders", part(1, 1, strings.Repeat("k", 80), strings.Repeat("k", 81), Counts{Reads: 2}),
			fmt.Sprintf(`"%s" 0/2/0 "%sl" 0/0/0`, strings.Repeat("k", 64), strings.Repeat("k", 63)),
		},
		{
			"long keys that are no text", part(1, 1, "a", "", Counts{Reads: 2}, sample(strings.Repeat("k", 62)+"\x80\xff", false, 0)),
			fmt.Sprintf(`"%s\x80\xff" 0/2/0 "%s\x81" 0/0/0`, strings.Repeat("k", 62), strings.Repeat("k", 62)),
		},
		{
			"the highest keys", part(1, 1, "a", "", Counts{Reads: 2}, sample(strings.Repeat("\xff", 80), false, 0)),
			fmt.Sprintf(`"%s" 0/2/0`, strings.Repeat(`\xff`, 64)),
		},
	} {
		k := newKept()
		k.Turn(time.Unix(600, 0))
		k.Add(tc.part)
		k.Flush()
		if got := text(k.columns[0]); got != tc.want || k.minutes[0] != 600 {
			t.Errorf("%s: %s\nwant %s", tc.what, got, tc.want)
		}
	}
}

// A minute ends with the first second of another one, and one in which nothing was served is none.
func TestMinutes(t *testing.T) {
	k := newKept()
	for second := range int64(300) {
		if keeps := k.Turn(time.Unix(6000+second, 0)); keeps != (second == 60 || second == 120) {
			t.Errorf("second %d: %v", second, keeps)
		}
		if second < 120 {
			k.Add(part(1, 1, "a", "z", Counts{Writes: 1}))
		}
	}
	if !slices.Equal(k.minutes, []int64{6000, 6060}) || k.sum().Writes != 120 {
		t.Errorf("%v: %v", k.minutes, k.columns)
	}
}

// A range splits and merges within the minute: what it had before lies over the keys that it had then, and each request
// counts once.
func TestSplitWithinAMinute(t *testing.T) {
	k := newKept()
	k.Turn(time.Unix(0, 0))
	k.Add(part(1, 1, "a", "z", Counts{Writes: 8}, sample("c", true, 1), sample("p", true, 1)))
	k.Turn(time.Unix(1, 0))
	k.Add(part(1, 2, "a", "m", Counts{Writes: 1}, sample("c", true, 1)))
	k.Add(part(2, 1, "m", "z", Counts{Writes: 2}, sample("p", true, 1)))
	k.Turn(time.Unix(2, 0))
	k.Add(part(1, 3, "a", "z", Counts{Writes: 4}, sample("c", true, 1)))
	k.Flush()
	if got := text(k.columns[0]); got != `"c" 9/0/0 "c\x00" 0/0/0 "p" 6/0/0 "p\x00" 0/0/0` {
		t.Error(got)
	}
}

// However many requests come, there are no more samples than may be, and they take no more than their bytes. The more there are, the
// fewer are taken; the counts stay exact.
func TestSamplesAreBounded(t *testing.T) {
	k := newKept()
	var taken, most int
	for second := range 60 {
		k.Turn(time.Unix(int64(second), 0))
		inSecond := 0
		var samples []Sample
		const requests = 1_000_000
		for i := 0; i < requests; {
			stride, ok := k.Stride()
			if !ok {
				break
			}
			inSecond++
			samples = append(samples, NewSample(fmt.Appendf(nil, "%064d", i), true, 1, stride))
			i += int(stride)
		}
		taken, most = taken+inSecond, max(most, inSecond)
		k.Add(Part{Range: 1, Generation: 1, Counts: Counts{Writes: requests}, Samples: samples})
		if k.sampled > maxSampledBytes {
			t.Fatalf("samples take %d bytes", k.sampled)
		}
	}
	if most > samplesPerSecond || taken < 60*samplesPerSecond/3 {
		t.Errorf("%d samples are taken in a second, %d in all", most, taken)
	}
	k.Flush()
	if k.sum().Writes != 60_000_000 || len(k.columns[0]) < maxCells/2 || len(k.columns[0]) > maxCells {
		t.Errorf("%d cells have %v", len(k.columns[0]), k.sum())
	}
	// The keys are uniform but for the first second's, of which only the first ones were sampled.
	for i, c := range k.columns[0] {
		if c.Writes > 60_000_000/20 && i > 0 {
			t.Errorf("a cell at %q of uniform load has %v", c.Start, c.Counts)
		}
	}
}

// One sample of each of very many ranges takes no more than the bytes either, and very many ranges are kept in parts.
func TestManyRanges(t *testing.T) {
	k := newKept()
	k.Turn(time.Unix(0, 0))
	const ranges = maxPending + 10
	for i := range ranges {
		key := fmt.Sprintf("%060d", i)
		k.Add(part(keyspace.RangeID(i+1), 1, key, key+"/", Counts{Writes: 1}, sample(key, true, 1)))
		if k.sampled > maxSampledBytes || len(k.pending) > maxPending {
			t.Fatalf("samples take %d bytes, %d ranges are pending", k.sampled, len(k.pending))
		}
	}
	k.Flush()
	if k.sum().Writes != ranges || len(k.columns) != 2 {
		t.Errorf("%d parts have %v", len(k.columns), k.sum())
	}
}

// Nobody is a Recorder that keeps nothing.
func TestNoRecorder(t *testing.T) {
	var r *Recorder
	r.Add(part(1, 1, "a", "z", Counts{Writes: 1}))
	r.Flush()
	if r.Turn(time.Unix(0, 0)) {
		t.Error("it keeps something")
	}
}

// BenchmarkMinute makes the column of a busy minute: 10,000 ranges, as many samples as there may be.
func BenchmarkMinute(b *testing.B) {
	for b.Loop() {
		r := NewRecorder(func(int64, Column) {})
		for i := range 10_000 {
			key := fmt.Sprintf("/registry/pods/namespace-%06d/", i)
			r.Add(part(keyspace.RangeID(i+1), 1, key, key+"~", Counts{Writes: uint64(i % 100)}, sample(key+"a", true, 1), sample(key+"b", true, 1)))
		}
		r.Flush()
	}
}
