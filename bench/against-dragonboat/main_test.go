package main

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSides: both sides apply what is proposed and time some of it.
func TestSides(t *testing.T) {
	for _, s := range []settings{
		{Side: skeinSide, Carrier: quicCarrier},
		{Side: skeinSide, Carrier: tlsCarrier},
		{Side: dragonboatSide, LogDB: tanLog},
		{Side: dragonboatSide, LogDB: pebbleLog},
	} {
		t.Run(s.Side+"/"+s.Carrier+s.LogDB, func(t *testing.T) {
			s.Groups, s.Depth, s.Bytes, s.Shards, s.Dir = 3, 4, 16, 1, t.TempDir()
			s.Warm, s.Window = 50*time.Millisecond, 200*time.Millisecond
			// Among so many there is one that is timed, whatever the groups' shares.
			enough := int64(s.Groups * (sampleEach + s.Depth))
			f, err := measured(t.Context(), s)
			for ; errors.Is(err, errNothing) || err == nil && f.Proposals < enough; f, err = measured(t.Context(), s) {
				s.Window *= 4 // a disk may stall
			}
			if err != nil {
				t.Fatal(err)
			}
			if f.Proposals < 1 || f.PerSecond <= 0 || f.CPUMicros <= 0 || f.P50Millis <= 0 || f.P99Millis < f.P50Millis {
				t.Errorf("%+v", f)
			}
		})
	}
}

// TestLatencies: every sixteenth proposal of a group is timed, from its own start, whatever the
// batches in which they are applied, and only while it records.
func TestLatencies(t *testing.T) {
	const depth = 40
	l := newLatencies(2, depth)
	l.record(true)
	count := func() int64 { return l.groups[1].counts.TotalCount() }
	under, total := 0, 0
	for i, batch := range []int{1, 15, 40, 3, 29, 16, 1, 7} {
		for ; under < depth; under++ {
			l.proposed(1)
			total++
		}
		if i == 6 {
			l.record(false)
		}
		l.applied(1, batch)
		under -= batch
	}
	// Of the 104 first ones these are 0, 16, 32, …, 96.
	if got := count(); got != 7 {
		t.Errorf("%d timed", got)
	}
	// Put the starts into the past, and apply what is left.
	l.record(true)
	for i := range l.groups[1].started {
		l.groups[1].started[i] = time.Now().Add(-time.Hour)
	}
	l.applied(1, under)
	if got := l.quantile(1000); got < 58*time.Minute || got > 62*time.Minute {
		t.Errorf("the slowest took %v", got)
	}
	if got := l.quantile(1); got > time.Minute {
		t.Errorf("the quickest took %v", got)
	}
}

func TestDepths(t *testing.T) {
	got, err := depthsOf("48, 1000,20000", 48)
	if err != nil || !slices.Equal(got, []int{1, 20, 416}) {
		t.Error(got, err)
	}
	for _, bad := range []string{"", "47", "many", "48,"} {
		if _, err := depthsOf(bad, 48); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

func TestFlags(t *testing.T) {
	for _, bad := range [][]string{{"--pairs", "0"}, {"--only", "etcd"}, {"--logdb", "rocks"}, {"--carrier", "tcp"}, {"now"}, {"--window", "0s"}} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%q are taken", bad)
		}
	}
	if o, err := parse([]string{"--only", skeinSide}); err != nil || o.only != skeinSide || o.each.Groups != 48 {
		t.Errorf("%+v, %v", o, err)
	}
}

func TestTable(t *testing.T) {
	var out strings.Builder
	writePairs(&out, "A caption", map[string][]figures{
		dragonboatSide: {{PerSecond: 100}, {PerSecond: 200}, {PerSecond: 100}},
		skeinSide:      {{PerSecond: 300}, {PerSecond: 100}, {PerSecond: 400}},
	})
	const want = "| proposals a second | 100 200 100 | 300 100 400 | 100 | 300 | 3.00 (0.50 to 4.00) |\n"
	if !strings.Contains(out.String(), want) {
		t.Errorf("got\n%s\nwithout\n%s", out.String(), want)
	}
	out.Reset()
	writePairs(&out, "One side", map[string][]figures{skeinSide: {{CPUMicros: 3.14159}}})
	const alone = "| CPU, µs a proposal |  | 3.14 | – | 3.14 | – |\n"
	if !strings.Contains(out.String(), alone) {
		t.Errorf("got\n%s\nwithout\n%s", out.String(), alone)
	}
}
