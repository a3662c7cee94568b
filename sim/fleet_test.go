package sim

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/sim/judge"
)

// job is one run in a process of its own. So a panic or hang is a verdict on its seed
// alone, the process's randomness is the seed's, and several jobs run at a time.
type job struct {
	story string
	seed  uint64
	bug   mutation.Bug
}

// outcome is the result of a run, as it travels between processes.
type outcome struct {
	Story      string
	Seed       uint64
	Bug        mutation.Bug
	Operations [3]int // by Outcome
	Versions   int
	// Counts are the faults by kind, and the work of network and nodes.
	Counts map[string]int
	// Pairs are the pairs of faults that have met.
	Pairs                map[string]int
	Virtual, Ran, Judged time.Duration
	// Violations begin with the name of the checker that found them.
	Violations []string
	// kept is the directory of history and trace, if any.
	kept string
}

func (o *outcome) take(rep *Report, bad []string) {
	for _, op := range rep.History.Ops() {
		o.Operations[op.Outcome]++
	}
	n := &rep.Network
	o.Versions, o.Virtual, o.Violations = len(rep.Versions), rep.Elapsed, bad
	o.Counts = map[string]int{
		"(splits)": int(rep.Splits), "(moves)": int(rep.Moves), "(merges)": int(rep.Merges), "(moves of placement)": int(rep.SystemMoves), "(compactions)": int(rep.Compactions),
		"(joined)": int(rep.Joined), "(left)": int(rep.Left), "(came back empty)": int(rep.Refused), "(came so beside a join)": int(rep.Beside), "(died joining)": int(rep.Died), "(split by themselves)": rep.SelfSplits, "(merged by themselves)": rep.SelfMerges,
		"(snapshots)": rep.Snapshots, "(logs cut off)": rep.CutOffs,
		"(delivered)": int(n.Delivered), "(lost)": int(n.Lost), "(duplicated)": int(n.Duplicated), "(reordered)": int(n.Reordered),
		"(met a cut)": int(n.CutOff), "(sessions broken)": int(n.Broken), "(power cuts)": int(n.Crashes),
	}
	for _, c := range rep.Cuts {
		o.Counts["(cuts)"]++
		for i := range c.Parts {
			o.Counts["(read "+c.Parts[i].Select.String()+")"]++
		}
	}
	if a := rep.Access; a != nil {
		ops, _, logins, events, rights := a.Counts()
		o.Counts["(users' operations)"], o.Counts["(users' events)"], o.Counts["(logins)"] = ops, events, logins
		o.Counts["(rights)"], o.Counts["(times unchecked)"] = rights, len(a.Off)
	}
	o.Pairs = map[string]int{}
	for p, k := range rep.Met {
		o.Pairs[p.String()] += k
	}
	for f, k := range rep.Happened {
		o.Counts[string(f)] += k
	}
}

// line is the outcome on one line.
func (o *outcome) line() string {
	return fmt.Sprintf("%s: %d operations (%d answered, %d refused, %d unknown), %d versions, %v virtual in %v, judged in %v, %v",
		o.Story, o.Operations[judge.Answered]+o.Operations[judge.Refused]+o.Operations[judge.Unknown], o.Operations[judge.Answered], o.Operations[judge.Refused],
		o.Operations[judge.Unknown], o.Versions, o.Virtual.Round(time.Millisecond), o.Ran.Round(time.Millisecond), o.Judged.Round(time.Millisecond), o.Counts)
}

// many runs n seeds of all stories, or of those that SKEIN_SIM_STORIES names, and prints the outcomes.
// The first seed is 0, or SKEIN_SIM_FROM.
func many(t *testing.T, n uint64) {
	t.Helper()
	from, _ := number(t, "SKEIN_SIM_FROM")
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(os.Getenv("SKEIN_SIM_STORIES"), ",") {
		if name != "" {
			wanted[storyOf(t, name).name] = true
		}
	}
	var jobs []job
	for seed := range n {
		for _, s := range stories {
			if len(wanted) == 0 || wanted[s.name] {
				jobs = append(jobs, job{story: s.name, seed: from + seed})
			}
		}
	}
	began := time.Now()
	all := fleet(t, jobs, func(o *outcome) {
		for _, b := range o.Violations {
			t.Errorf("story %s, seed %d (%s): %s", o.Story, o.Seed, o.kept, b)
		}
	})
	t.Logf("%d runs in %v\n%s\n%s", len(all), time.Since(began).Round(time.Second), table(all), pairsMet(all))
}

// fleet runs jobs, as many at a time as there are processors, and returns their
// outcomes. It calls each with each outcome as it comes.
func fleet(t *testing.T, jobs []job, each func(*outcome)) []*outcome {
	t.Helper()
	all := make([]*outcome, len(jobs))
	next := make(chan int)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for i := range next {
				o := run1(t, jobs[i])
				mu.Lock()
				all[i] = o
				each(o)
				mu.Unlock()
			}
		})
	}
	for i := range jobs {
		next <- i
	}
	close(next)
	wg.Wait()
	return all
}

// Bounds of a run. A run that a mutation has broken may never end, so its history is
// judged after this much processor time, which other processes do not shorten. A run
// without a mutation takes up to 10 s on slow processors, and a run that is cut off has
// no finding. A run that stands still is ended by hangs, in real time.
const (
	childPatience    = 2 * time.Minute
	mutationPatience = 25 * time.Second
	hangs            = 5 * time.Minute
)

func (j *job) patience() time.Duration {
	if j.bug != mutation.None {
		return mutationPatience
	}
	return childPatience
}

// run1 runs one job in a process of its own.
func run1(t *testing.T, j job) *outcome {
	t.Helper()
	result := filepath.Join(t.TempDir(), "result")
	//nolint:gosec // this test's own binary
	cmd := exec.Command(os.Args[0], "-test.run=^TestChild$", "-test.v", "-test.timeout="+hangs.String())
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "SKEIN_SIM_SEED") }),
		"SKEIN_SIM_STORY="+j.story, fmt.Sprintf("SKEIN_SIM_SEED=%d", j.seed), fmt.Sprintf("SKEIN_SIM_BUG=%d", j.bug), "SKEIN_SIM_RESULT="+result)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	o := &outcome{Story: j.story, Seed: j.seed, Bug: j.bug}
	b, rerr := os.ReadFile(result)
	if rerr == nil {
		rerr = json.Unmarshal(b, o)
	}
	if len(o.Violations) > 0 {
		_, o.kept, _ = strings.Cut(out.String(), "history and trace are in ")
		o.kept, _, _ = strings.Cut(o.kept, ";")
	}
	if rerr != nil || err != nil && len(o.Violations) == 0 {
		o.Violations = []string{fmt.Sprintf("assertion: the process ended (%v): %s", err, reason(out.String()))}
		o.kept = keepOutput(t, j, out.Bytes())
	}
	return o
}

// keepOutput keeps all that a process has said, its goroutines included, and returns where.
func keepOutput(t *testing.T, j job, out []byte) string {
	t.Helper()
	//nolint:usetesting // as in prepare
	dir, err := os.MkdirTemp("", fmt.Sprintf("skein-sim-%d-", j.seed))
	if err == nil {
		dir = filepath.Join(dir, "output.txt")
		err = os.WriteFile(dir, out, 0o600)
	}
	if err != nil {
		t.Log(err)
	}
	return dir
}

// reason finds in a process's last words what it died of.
func reason(out string) string {
	lines := strings.Split(out, "\n")
	at := slices.IndexFunc(lines, func(l string) bool {
		return strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") || strings.HasPrefix(l, "WARNING: DATA RACE")
	})
	if at < 0 {
		at = 0
	}
	return strings.Join(lines[at:min(len(lines), at+40)], "\n")
}

// TestChild is the run of one job.
func TestChild(t *testing.T) {
	result := os.Getenv("SKEIN_SIM_RESULT")
	if result == "" {
		return // only fleet runs it
	}
	seed, _ := number(t, "SKEIN_SIM_SEED")
	bug, _ := number(t, "SKEIN_SIM_BUG")
	s := storyOf(t, os.Getenv("SKEIN_SIM_STORY"))
	cfg := s.of(seed)
	setMutation(t, mutation.Bug(bug), &cfg)
	give := func(o *outcome) {
		o.Story, o.Bug = s.name, mutation.Bug(bug)
		b, err := json.Marshal(o)
		if err == nil {
			err = os.WriteFile(result, b, 0o600)
		}
		if err != nil {
			panic(err)
		}
	}
	r := prepare(t, cfg)
	j := job{s.name, seed, mutation.Bug(bug)}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		for used := time.Duration(0); used < j.patience(); used = processorTime() {
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ended:
				return
			}
		}
		fmt.Println(r.keep(t.Name()))
		if f, err := os.Create(filepath.Join(r.dir, "goroutines.txt")); err == nil { // what has computed for so long
			_ = pprof.Lookup("goroutine").WriteTo(f, 2)
			f.Close()
		}
		o := &outcome{Seed: seed, Ran: j.patience(), Violations: judge.CheckUnfinished(r.rep.History)}
		o.Violations = append(o.Violations, fmt.Sprintf("assertion: the run has not ended after %v", j.patience()))
		give(o)
		os.Exit(1)
	}()
	give(r.run(t))
}

// processorTime is the CPU time that this process has used.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// table is the result of many runs: a column for each story.
func table(all []*outcome) string {
	var names []string
	sums := map[string]map[string]int{} // row, then story
	add := func(row, name string, n int) {
		if sums[row] == nil {
			sums[row] = map[string]int{}
		}
		sums[row][name] += n
		sums[row]["all"] += n
	}
	head := []string{"seeds", "operations", "  answered", "  refused", "  unknown", "versions", "virtual s", "real ms", "found wrong"}
	for _, o := range all {
		if !slices.Contains(names, o.Story) {
			names = append(names, o.Story)
		}
		ops := o.Operations
		for i, n := range []int{
			1, ops[judge.Answered] + ops[judge.Refused] + ops[judge.Unknown], ops[judge.Answered], ops[judge.Refused], ops[judge.Unknown], o.Versions,
			int(o.Virtual.Seconds()), int((o.Ran + o.Judged).Milliseconds()), min(1, len(o.Violations)),
		} {
			add(head[i], o.Story, n)
		}
		for row, n := range o.Counts {
			add(row, o.Story, n)
		}
	}
	names = append(names, "all")
	rows := slices.Concat(head, slices.DeleteFunc(slices.Sorted(maps.Keys(sums)), func(r string) bool { return slices.Contains(head, r) }))
	var b strings.Builder
	fmt.Fprintf(&b, "%-20s", "")
	for _, name := range names {
		fmt.Fprintf(&b, "%12s", name)
	}
	for _, row := range rows {
		fmt.Fprintf(&b, "\n%-20s", row)
		for _, name := range names {
			fmt.Fprintf(&b, "%12d", sums[row][name])
		}
	}
	return b.String()
}
