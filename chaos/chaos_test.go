package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"text/tabwriter"
	"time"
)

// run is one run.
type run struct {
	t       *testing.T
	c       *cluster
	h       *history
	probes  []*session // of each node and range
	began   time.Time
	outages map[string]*outage
}

// Three real processes under load while their machines fail. Acknowledged writes stay,
// nothing happens twice, and the cluster serves again.
func TestChaos(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes for half a minute")
	}
	seed, duration := settings(t)
	// A wal segment is 64 MiB and a node keeps several; the disk must still be small
	// enough to fill at once.
	diskBytes := int64(768 << 20)
	if duration > 0 {
		diskBytes = 4 << 30
	}
	t.Logf("seed %d, again with SKEIN_CHAOS_SEED=%d", seed, seed)
	c, missing := newCluster(t, diskBytes)
	r := &run{t: t, c: c, h: &history{}, began: time.Now(), outages: map[string]*outage{}}
	for i := range nodes * (len(borders) + 1) {
		node := i / (len(borders) + 1)
		rng := rand.New(rand.NewPCG(seed, uint64(1000+i)))
		r.probes = append(r.probes, &session{w: &workload{h: r.h}, id: 1000 + i, node: node, cl: c.nodes[node].client, rng: rng, last: map[string]string{}})
	}
	can, leftOut := possible(missing)
	say := t.Logf
	if nothingLeftOut() {
		say = t.Errorf
	}
	for _, l := range leftOut {
		say("left out: %s", l)
	}
	r.serves(t.Context(), "start", []int{0, 1, 2}, true)
	r.play(t.Context(), seed, duration, can)
	if r.well() {
		r.serves(t.Context(), "end", []int{0, 1, 2}, true)
		r.agree(t.Context())
	}
	loaded := time.Since(r.began)
	e, err := r.collect(t.Context())
	if err != nil {
		c.blame("nodes: reading back: %v", err)
	}
	if r.well() {
		c.stop()
	}
	r.report(e, loaded, leftOut)
}

// well says that no violation was found yet. The run does not break a broken cluster
// further, and reads back what it still knows.
func (r *run) well() bool { return len(r.c.blames()) == 0 }

// play runs the workload and round after round of faults, at least one.
func (r *run) play(ctx context.Context, seed uint64, duration time.Duration, can []breakage) {
	w := startWorkload(ctx, r.c, r.h, seed)
	defer w.end()
	rng := rand.New(rand.NewPCG(seed, 0))
	for round := 0; r.well() && (round == 0 || time.Since(r.began) < duration); round++ {
		for _, s := range schedule(rng, can) {
			if !r.well() {
				return
			}
			if round > 0 && time.Since(r.began) > duration {
				break
			}
			r.apply(ctx, s)
		}
	}
	r.sleep(ctx, time.Second)
}

// settings are the seed and the length of the run; 0 is one round of faults.
func settings(t *testing.T) (seed uint64, duration time.Duration) {
	t.Helper()
	seed = uint64(time.Now().UnixNano()) % 1_000_000
	var err, err2 error
	if text := os.Getenv("SKEIN_CHAOS_SEED"); text != "" {
		seed, err = strconv.ParseUint(text, 10, 64)
	}
	if text := os.Getenv("SKEIN_CHAOS_DURATION"); text != "" {
		duration, err2 = time.ParseDuration(text)
	}
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return seed, duration
}

// nothingLeftOut says whether a fault that this machine cannot produce is a failure.
func nothingLeftOut() bool { return os.Getenv("SKEIN_NOTHING_LEFT_OUT") != "" }

// possible says which faults this machine can produce, and which are left out and why.
func possible(missing error) (can []breakage, leftOut []string) {
	can = []breakage{kill, stop}
	if missing != nil {
		for _, b := range []breakage{power, hang, full} {
			leftOut = append(leftOut, fmt.Sprintf("%s: no disk in a loop file: %v", b, missing))
		}
		return can, leftOut
	}
	can = append(can, power, full)
	if _, err := exec.LookPath("fsfreeze"); err != nil {
		return can, append(leftOut, fmt.Sprintf("%s: %v", hang, err))
	}
	return append(can, hang), nil
}

// shown is how many findings of one check a report has.
const shown = 10

// report judges the run and prints its table; e is nil if nothing could be read back.
// If something is wrong the test fails and the history is kept.
func (r *run) report(e *evidence, loaded time.Duration, leftOut []string) {
	t := r.t
	r.c.still.end(time.Now()) // time of the checkers is not counted
	out := tabwriter.NewWriter(t.Output(), 0, 8, 2, ' ', 0)
	defer func() {
		if err := out.Flush(); err != nil {
			t.Error(err)
		}
	}()
	ops := r.h.ops()
	fmt.Fprintf(out, "\n%d operations, %d answered, in %v\n", len(ops), r.h.answered.Load(), loaded.Round(time.Second))
	r.tableOfFaults(out, leftOut)
	tableOfOps(out, ops)
	fmt.Fprintf(out, "\nVERDICT\tFOUND\n")
	verdict := func(name string, bad []string) {
		word := "ok"
		if len(bad) > 0 {
			word = fmt.Sprintf("%d WRONG", len(bad))
		}
		fmt.Fprintf(out, "%s\t%s\n", name, word)
		for _, b := range bad[:min(len(bad), shown)] {
			t.Errorf("%s: %s", name, b)
		}
	}
	for _, c := range checks {
		if e == nil {
			fmt.Fprintf(out, "%s\tnot known\n", c.name)
			continue
		}
		verdict(c.name, c.wrong(e))
	}
	bad, aside, unjudged := r.c.judged()
	verdict("nodes and replicas agree, all serve in time, none ends by itself", bad)
	fmt.Fprintln(out, r.c.still)
	if unjudged != nil {
		fmt.Fprintf(out, "%v, %d late: %q\n", unjudged, len(aside), aside)
	}
	if !t.Failed() {
		if unjudged != nil {
			leaveOut(t, unjudged)
		}
		return
	}
	path := filepath.Join(t.ArtifactDir(), "history.txt")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.h.write(f), f.Close()); err != nil {
		t.Error(err)
	}
	t.Logf("the history is in %s", path)
}

func (r *run) tableOfFaults(out io.Writer, leftOut []string) {
	fmt.Fprintf(out, "\nFAULT\tTIMES\tSERVED AFTER\tAND, HEALED, AFTER\n")
	for _, name := range slices.Sorted(maps.Keys(r.outages)) {
		o := r.outages[name]
		during := "-"
		if o.during > 0 {
			during = o.during.Round(time.Millisecond).String()
		}
		fmt.Fprintf(out, "%s\t%d\t%s\t%s\n", name, o.count, during, o.after.Round(time.Millisecond))
	}
	for _, l := range leftOut {
		fmt.Fprintf(out, "left out: %s\n", l)
	}
}

// tableOfOps prints how operations ended, and with which errors.
func tableOfOps(out io.Writer, ops []*op) {
	var n [kinds][3]int
	errs := map[string]int{}
	for _, o := range ops {
		n[o.kind][o.outcome]++
		if o.err != nil {
			errs[fmt.Sprintf("%s\t%s", o.outcome, message(o.err))]++
		}
	}
	fmt.Fprintf(out, "\nOPERATION\tANSWERED\tREFUSED\tUNKNOWN\n")
	for k := range kinds {
		fmt.Fprintf(out, "%s\t%d\t%d\t%d\n", k, n[k][answered], n[k][refused], n[k][unknown])
	}
	fmt.Fprintf(out, "\nFATE\tERROR\tTIMES\n")
	for _, text := range slices.SortedFunc(maps.Keys(errs), func(a, b string) int { return cmp.Or(errs[b]-errs[a], cmp.Compare(a, b)) }) {
		fmt.Fprintf(out, "%s\t%d\n", text, errs[text])
	}
}
