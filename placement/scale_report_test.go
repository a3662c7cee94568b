package placement

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

var scaleReport = flag.Bool("scale", false, "run the whole model of docs/SCALE.md and write its plots and tables")

// Every request is answered, with no revision that was known before it asked; no revision is given twice or left out;
// who follows the log learns of each. Under more load the nodes' batches are larger.
func TestScale(t *testing.T) {
	var results []scaleResult
	for _, writes := range []int{30_000, 1_000_000} {
		virtually(t, func(t *testing.T) {
			r := runScale(t, scaleCase{
				Nodes: 30, Writes: writes, Reads: writes / 4, Followers: 3, Cores: 2, Message: busMessage,
				RoundTrip: 500 * time.Microsecond, Commit: time.Millisecond, Over: 10 * time.Millisecond,
			})
			results = append(results, r)
			if r.failed > 0 || len(r.revisions) == 0 || len(r.revisions) == r.requests {
				t.Errorf("%d writes a second: %d requests, %d of them writes, %d failed", writes, r.requests, len(r.revisions), r.failed)
			}
			for i, rev := range r.revisions {
				if want := r.revisions[0]; int(rev-want) != i {
					t.Fatalf("%d writes a second: the %dth revision from %d on is %d", writes, i+1, want, rev)
				}
			}
			if r.stale > 0 {
				t.Errorf("%d writes a second: %d answers are older than their questions", writes, r.stale)
			}
			if last := r.revisions[len(r.revisions)-1]; r.missed > 0 || !slices.Equal(r.known, []keyspace.Revision{last, last, last}) {
				t.Errorf("%d writes a second: followers know the log up to %d of %d and missed %d revisions", writes, r.known, last, r.missed)
			}
			if r.P50 < r.RoundTrip {
				t.Errorf("%d writes a second: half of the requests are answered within %v", writes, r.P50)
			}
		})
	}
	if light, heavy := results[0], results[1]; heavy.Batch < 2*light.Batch || heavy.AllocatorCores <= light.AllocatorCores {
		t.Errorf("batches of %.1f requests become %.1f under load; the allocator takes %.4f cores, and then %.4f",
			light.Batch, heavy.Batch, light.AllocatorCores, heavy.AllocatorCores)
	}
}

// standardScale is what the cases of the report have in common. It takes a round trip within a data centre, and a disk
// that is asked to sync.
func standardScale(nodes, followers int) scaleCase {
	return scaleCase{
		Nodes: nodes, Followers: followers, Cores: 4, Message: busMessage,
		RoundTrip: 500 * time.Microsecond, Commit: 2 * time.Millisecond, Over: 100 * time.Millisecond,
	}
}

// TestScaleReport runs the model for docs/SCALE.md. It is no test: make scale runs it.
func TestScaleReport(t *testing.T) {
	if !*scaleReport {
		t.Skip("make scale runs it")
	}
	var out strings.Builder
	out.WriteString("# The model of one sequencer\n\n`make scale` writes this file and the plots of [SCALE.md](../../docs/SCALE.md). ")
	fmt.Fprintf(&out, "All of it is computed, from these costs\nof the sequencer's node: %v for a message and %v for each KiB; %v for a batch and %v for each of its requests;\n"+
		"%v for a part of the allocation log and each follower; %v to read and %v to encode a record, once for all. Where nothing\n"+
		"else is said, the bus has 4 cores, a round trip takes 0.5 ms and the commit of a ceiling 2 ms.\n",
		busMessage, busKiB, askedBatch, askedPut, logPart, logRead, logEncode)
	alone := map[int][]scaleResult{}
	watched := map[int][]scaleResult{}
	for _, nodes := range []int{30, 100, 300, 1000} {
		alone[nodes] = sweepScale(t, standardScale(nodes, 0))
		scaleTable(&out, fmt.Sprintf("%d nodes, nobody watches", nodes), alone[nodes])
	}
	for _, c := range [][2]int{{30, 30}, {100, 100}, {300, 30}, {300, 300}, {1000, 1000}} {
		rs := sweepScale(t, standardScale(c[0], c[1]))
		if c[0] == 300 {
			watched[c[1]] = rs
		}
		scaleTable(&out, fmt.Sprintf("%d nodes, of which %d have watchers", c[0], c[1]), rs)
	}
	vary := func(title string, change ...func(*scaleCase)) {
		var rs []scaleResult
		for _, f := range change {
			c := standardScale(300, 0)
			c.Writes = 1_000_000
			f(&c)
			rs = append(rs, inBubble(t, c))
		}
		scaleTable(&out, title, rs)
	}
	writes := func(n int) func(*scaleCase) { return func(c *scaleCase) { c.Writes = n } }
	vary("300 nodes, more writes", writes(8e6), writes(16e6))
	message := func(d time.Duration) func(*scaleCase) { return func(c *scaleCase) { c.Message = d } }
	vary("300 nodes, a message takes 9.8 and 2 µs", message(busMessage), message(sharedMessage))
	cores := func(n int) func(*scaleCase) { return func(c *scaleCase) { c.Cores = n } }
	vary("300 nodes, the bus on 1, 2, 4 and 8 cores", cores(1), cores(2), cores(4), cores(8))
	commit := func(ms int) func(*scaleCase) {
		return func(c *scaleCase) { c.Commit = time.Duration(ms) * time.Millisecond }
	}
	vary("300 nodes, a ceiling committed in 1, 2, 5, 10 and 20 ms", commit(1), commit(2), commit(5), commit(10), commit(20))
	trip := func(us int) func(*scaleCase) {
		return func(c *scaleCase) { c.RoundTrip = time.Duration(us) * time.Microsecond }
	}
	vary("300 nodes, a round trip of 0.1, 0.5, 2 and 10 ms", trip(100), trip(500), trip(2000), trip(10_000))
	reads := func(n int) func(*scaleCase) { return func(c *scaleCase) { c.Reads, c.Writes = n, 0 } }
	vary("300 nodes, linearizable reads and no writes", reads(1e6), reads(4e6), reads(8e6), reads(16e6))
	write := func(file, text string) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	out.WriteString("\nA follower that is behind by a fifth of the measured time or misses a part of the log counts as too much.\n")
	write("../bench/results/scale.md", out.String())
	write("../docs/scale-latency.svg", plotScale("How long a write waits for its revision (p99, ms)", []scaleLine{
		lineOf("30 nodes", alone[30], p99Millis), lineOf("100", alone[100], p99Millis),
		lineOf("300", alone[300], p99Millis), lineOf("1,000", alone[1000], p99Millis),
	}))
	write("../docs/scale-processor.svg", plotScale("What the sequencer takes of its node (cores), 300 nodes", []scaleLine{
		lineOf("nobody watches", alone[300], coresTaken), lineOf("watchers on 30", watched[30], coresTaken),
		lineOf("on all 300", watched[300], coresTaken),
	}))
}

// sweepScale raises the writes until they are not taken any more.
func sweepScale(t *testing.T, c scaleCase) (rs []scaleResult) {
	t.Helper()
	for _, c.Writes = range []int{10_000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000} {
		rs = append(rs, inBubble(t, c))
		if rs[len(rs)-1].broken() {
			break
		}
	}
	return rs
}

func inBubble(t *testing.T, c scaleCase) (r scaleResult) {
	t.Helper()
	virtually(t, func(t *testing.T) { r = runScale(t, c) })
	t.Logf("%d nodes, %d followers, %d writes and %d reads: %.0f answered, p99 %v, %s", c.Nodes, c.Followers, c.Writes, c.Reads, r.Answered, r.P99, r.full())
	return r
}

// broken says that the load is not taken: requests pile up or fail, or followers of the log miss some of it or are
// behind at the end by a fifth of the time.
func (r *scaleResult) broken() bool {
	return r.failed > 0 || r.Answered < 0.95*float64(r.Writes+r.Reads) || r.P99 > 50*time.Millisecond || r.Missed > 0 || r.Behind > r.Over/5
}

// full names what has no more room.
func (r *scaleResult) full() string {
	var all []string
	if r.BusCores > 0.95*float64(r.Cores) {
		all = append(all, "bus")
	}
	if r.AllocatorCores > 0.95 {
		all = append(all, "allocator")
	}
	if r.CeilingWaits > 0 {
		all = append(all, "ceiling")
	}
	if r.Behind > r.Over/5 {
		all = append(all, fmt.Sprintf("log: %d ms behind", r.Behind.Milliseconds()))
	}
	if r.Missed > 0 {
		all = append(all, fmt.Sprintf("log: %.0f %% missed", 100*r.Missed))
	}
	if r.broken() {
		all = append(all, "**too much**")
	}
	return strings.Join(all, ", ")
}

func scaleTable(out *strings.Builder, title string, rs []scaleResult) {
	fmt.Fprintf(out, "\n## %s\n\n| offered a second | answered a second | requests a batch | p50, ms | p99, ms | bus, cores | allocator, cores | full |\n"+
		"| ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n", title)
	for i := range rs {
		r := &rs[i]
		fmt.Fprintf(out, "| %d | %.3g M | %.1f | %.2f | %.2f | %.2f | %.3f | %s |\n", r.Writes+r.Reads, r.Answered/1e6, r.Batch,
			float64(r.P50.Microseconds())/1e3, p99Millis(r), r.BusCores, r.AllocatorCores, r.full())
	}
}

func p99Millis(r *scaleResult) float64  { return float64(r.P99.Microseconds()) / 1e3 }
func coresTaken(r *scaleResult) float64 { return r.BusCores + r.AllocatorCores }

// scaleLine is a line of a plot over the writes a second.
type scaleLine struct {
	name string
	x, y []float64
	// broken says that the last load was too much.
	broken bool
}

func lineOf(name string, rs []scaleResult, y func(*scaleResult) float64) scaleLine {
	l := scaleLine{name: name}
	for i := range rs {
		l.x, l.y = append(l.x, float64(rs[i].Writes)), append(l.y, y(&rs[i]))
		l.broken = rs[i].broken()
	}
	return l
}

// plotScale draws lines as SVG. Both axes are logarithmic: from 10,000 to 10 M writes a second, from 0.01 to 1,000. A
// hollow last point is a load that was too much.
func plotScale(title string, lines []scaleLine) string {
	const left, top, width, height = 60, 40, 540, 300
	x := func(v float64) float64 { return left + width*(math.Log10(v)-4)/3 }
	y := func(v float64) float64 { return top + height*(1-(math.Log10(min(max(v, 0.01), 1000))+2)/5) }
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 400" font-family="sans-serif" font-size="13">
<rect width="740" height="400" fill="white"/>
<text x="%d" y="22" font-size="15">%s</text>
`, left, title)
	for i, name := range []string{"10,000", "100,000", "1 M", "10 M"} {
		at := x(math.Pow10(4 + i))
		fmt.Fprintf(&b, `<path d="M%.0f %d V%d" stroke="#ddd"/><text x="%.0f" y="%d" text-anchor="middle">%s</text>`+"\n", at, top, top+height, at, top+height+18, name)
	}
	for i, name := range []string{"0.01", "0.1", "1", "10", "100", "1,000"} {
		at := y(math.Pow10(i - 2))
		fmt.Fprintf(&b, `<path d="M%d %.0f H%d" stroke="#ddd"/><text x="%d" y="%.0f" text-anchor="end">%s</text>`+"\n", left, at, left+width, left-6, at+4, name)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle">writes a second</text>`+"\n", left+width/2, top+height+40)
	colours := []string{"#4477aa", "#228833", "#cc7711", "#aa3377"}
	for i, l := range lines {
		var points []string
		for j := range l.x {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(l.x[j]), y(l.y[j])))
		}
		fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(points, " "), colours[i])
		for j := range l.x {
			fill := colours[i]
			if l.broken && j == len(l.x)-1 {
				fill = "white"
			}
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s" stroke="%s"/>`+"\n", x(l.x[j]), y(l.y[j]), fill, colours[i])
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", left+width+10, top+20+20*i, colours[i], l.name)
	}
	b.WriteString("</svg>\n")
	return b.String()
}
