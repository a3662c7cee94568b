//go:build planted

package sim

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/transport"
)

// twice is a bus that delivers each request to its range two times, as a transport that
// repeats calls would, or a router that repeats writes of unknown fate.
type twice struct{ node.Bus }

func (b twice) HandleCall(m transport.Method, class transport.Class, h transport.CallHandler) {
	if m != transport.MethodShardRequest {
		b.Bus.HandleCall(m, class, h)
		return
	}
	b.Bus.HandleCall(m, class, func(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
		again := append([]byte(nil), payload...)
		answer, err := h(ctx, from, payload)
		_, _ = h(ctx, from, again)
		return answer, err
	})
}

// setMutation sets a mutation in this process and in the run's machines.
func setMutation(_ *testing.T, b mutation.Bug, cfg *Config) {
	mutation.Set(b)
	switch b { //nolint:exhaustive // the others are asked for by the nodes themselves
	case mutation.RequestTwice:
		cfg.mutation.bus = func(b node.Bus) node.Bus { return twice{b} }
	case mutation.DiskLies:
		cfg.mutation.noSync = true
	case mutation.ClockFreezes:
		cfg.mutation.freeze = true
	}
}

// mutationStories says which story looks for each mutation. AllocatedWithoutLease is looked for among leases: an answer
// about one has its revision from the sequencer alone. Ranges refuse to read at a revision of a sequencer that has a
// successor.
var mutationStories = map[mutation.Bug]string{
	mutation.FsyncSkipped:             "blackout",
	mutation.AcknowledgedBeforeQuorum: "leaders",
	mutation.LeaseByTicks:             "alone",
	mutation.PromiseForgotten:         "alone",
	mutation.AllocatedWithoutLease:    "leases",
	mutation.OtherTerm:                "alone",
	mutation.AppliedTwice:             "restarts",
	mutation.SnapshotNotDurable:       "snapshots",
	mutation.NoopFromOverlay:          "alone",
	mutation.LiveRemoved:              "quiet",
	mutation.CompactionUnseen:         "snapshots",
	mutation.LockLeftBehind:           "txns",
	mutation.TxnHalfVisible:           "txns",
	mutation.EventLostAtSplit:         "splits",
	mutation.ReleasedTooEarly:         "quiet",
	mutation.VoidDespiteLock:          "txns",
	mutation.ResolvedDespiteLock:      "txns",
	mutation.AllocationsIgnored:       "overtakes",
	mutation.ProgressTooEarly:         "quiet",
	mutation.ProgressBehindEvent:      "quiet",
	mutation.LeaseCountedOn:           "holders",
	mutation.AttachedWhileEnding:      "holders",
	mutation.LeaseGrantedTwice:        "expiry",
	mutation.FreezeForgotten:          "seams",
	mutation.LocksLostAtMerge:         "seams",
	mutation.ResolvedByOneHalf:        "seams",
	mutation.LocksLostAtSplit:         "seams",
	mutation.NeverRemoved:             "moves",
	mutation.HandedOverInFlight:       "placementquiet",
	mutation.DeadCountedAlive:         "repair",
	mutation.OperationForgotten:       "placementmoves",
	mutation.AbsorbedStaysMapped:      "seams",
	mutation.VersionLostInCopy:        "moves",
	mutation.EmptyAdmitted:            "joins",
	mutation.JoinerUnknown:            "joins",
	mutation.RowGivenTwice:            "joins",
	mutation.ZonesIgnored:             "zones",
	mutation.OldSequencerBelieved:     "sequencers",
	mutation.LeasesKept:               "seen",
	mutation.NoWayAround:              storyOfLinks,
	mutation.UnheardCountsDead:        storyOfLinks,
	mutation.RotServed:                "rot",
	mutation.QuarantineUntold:         "rot",
	mutation.QuarantinedCounts:        "rot",
	mutation.BootsForgotten:           "flaps",
	mutation.ViewLeaseIgnored:         "usersaway",
	mutation.PermitsUnseen:            "users",
	mutation.WatchersKept:             "usersquiet",
	mutation.CursorNotDurable:         "load",
	mutation.CutTooEarly:              "cuts",
	mutation.HoldIgnored:              "cuts",
	mutation.CutOfCompacted:           "cuts",
	mutation.LoadRepeated:             "load",
	mutation.LoadUnchecked:            "load",
	mutation.LoadedUnleased:           "load",
	mutation.LoadCursorLost:           "load",
	mutation.RequestTwice:             "quiet",
	mutation.DiskLies:                 "blackout",
	mutation.ClockFreezes:             "alone",
}

// mutationTests say which test of a package looks for a mutation that no run shows, or hardly any.
var mutationTests = map[mutation.Bug]struct{ pkg, test string }{
	mutation.LeadKeptUnheard: {"raftgroup", "TestLeaderWithoutQuorumGivesUp"},
	mutation.PrevFromFed:     {"watch", "TestPrevIsWanted.*"},
	mutation.RemovedCounted:  {"node", "TestReplacedNodesDoNotIsolateTheOthers"},
	mutation.GrownKeepsThree: {"node", "TestAGrownClusterOutlivesTwoNodes"},
	mutation.VersionUnnoted:  {"node", "TestARaisedVersionIsNoted"},
	mutation.TailsKept:       {"raftgroup", "TestLostQuorumsDoNotHoldTheLog"},
	mutation.CommitForEver:   {"router", "TestCommitIsRefusedForGood"},
	mutation.EmbargoKept:     {"raftgroup", "TestEmbargoShrinks"},
	mutation.RelayRelays:     {"sim/simbus", "TestARelayAsksNoRelay"},

	mutation.RefusedCounted:     {"placement", "TestAlarms"},
	mutation.RightsUnknownFirst: {"placement", "TestTakenRightsLeader"},
	mutation.HashesTold:         {"placement/fsm", "TestAccessIsTold"},
	mutation.AlarmUnseen:        {"placement", "TestAlarms"},
	mutation.AlarmEndUnseen:     {"etcdapi", "TestStickyAlarmsRefuse"},
	mutation.AlarmOfNobody:      {"placement/fsm", "TestState"},
	mutation.HashedTwice:        {"mvcc", "TestModel"},
	mutation.RangeUnhashed:      {"node", "TestHashIsTheSameEverywhere"},
	mutation.DifferenceKept:     {"node", "TestScrub/leads_false"},
	mutation.QuotaUnseen:        {"node", "TestQuota"},
}

// How the verdicts of the checkers of runs begin: about what clients were told, and
// about the final state of the nodes. All other verdicts are errors of the nodes
// themselves, or say that a run missed its purpose. They may come from the mutation but
// prove nothing about the checkers.
var (
	ofAnswers = []string{"real time: ", "gaps: ", "compaction: ", "replay: ", "linearizability: key", "linearizability: revisions", "leases: ", "progress: ", "access: ", "cut: "}
	ofNodes   = []string{
		"not live ", "an operation of a healthy cluster ", "the replicas do not become equal ", "not repaired ", "sim: the disks of nodes ", "watcher ",
		"membership: ", "zones: ", "load: ", "range map of node ", "an orphan ",
	}
)

// unbootable begins the verdict that a node cannot start from its own disk after a
// power cut. One mutation does no other harm, so this counts as its finding. The replica
// has lost its snapshot, and its log begins behind it. The others have all that was
// acknowledged.
const unbootable = "a node does not start again: sim: start node "

// finding returns the first violation that a checker of runs has found. If a node has
// given up, only the node itself could have found that others miss it or differ from
// it.
func finding(o *outcome) (checker, violation string, ok bool) {
	begins := func(v string) func(string) bool {
		return func(prefix string) bool { return strings.HasPrefix(v, prefix) }
	}
	gaveUp := slices.ContainsFunc(o.Violations, func(v string) bool {
		return slices.ContainsFunc([]string{"node ", "a node ", "a clean stop "}, begins(v))
	})
	for _, v := range o.Violations {
		lost := o.Bug == mutation.SnapshotNotDurable && strings.HasPrefix(v, unbootable)
		if lost || slices.ContainsFunc(ofAnswers, begins(v)) || !gaveUp && slices.ContainsFunc(ofNodes, begins(v)) {
			checker, violation, _ = strings.Cut(v, ": ")
			return checker, violation, true
		}
	}
	return "", "", false
}

// mutationSeeds is how many seeds may be needed to find a mutation. On busy processors a
// seed finds the hardest one (resolved by one half of a merge) in six of sixteen runs.
// So all seeds miss it once in 80,000 times.
const mutationSeeds = 24

// TestMutations sets each mutation. A checker must find it within a few seeds of its
// story, and the same seeds must be clean without it. Each is a subtest, so that -run takes
// some of them.
func TestMutations(t *testing.T) {
	used := map[job]bool{}
	table := fmt.Sprintf("%-44s %-10s %4s  %-28s %6s  %s", "bug", "story", "seed", "checker", "took", "what it found")
	for _, bug := range mutation.All() {
		t.Run(bug.String(), func(t *testing.T) {
			line, clean := lookFor(t, bug)
			for _, j := range clean {
				used[j] = true
			}
			t.Log(line)
			table += "\n" + line
		})
	}
	began := time.Now()
	jobs := slices.SortedFunc(maps.Keys(used), func(a, b job) int {
		return cmp.Or(strings.Compare(a.story, b.story), cmp.Compare(a.seed, b.seed))
	})
	wrong := 0
	fleet(t, jobs, func(o *outcome) {
		for _, v := range o.Violations {
			wrong = wrong + 1
			t.Errorf("without a mutation: story %s, seed %d (%s): %s", o.Story, o.Seed, o.kept, v)
		}
	})
	t.Logf("\n%s\nwithout a mutation: %d runs of the same seeds, %d violations, %.1f s", table, len(jobs), wrong, time.Since(began).Seconds())
}

// lookFor looks for a mutation in its story or its test. It returns the line of the table, and the runs that
// must be clean without the mutation.
func lookFor(t *testing.T, bug mutation.Bug) (line string, clean []job) {
	t.Helper()
	began := time.Now()
	if test, ok := mutationTests[bug]; ok || mutationStories[bug] == storyOfLinks {
		where, found := storyOfLinks, ""
		if ok {
			where, found = test.pkg, findInTest(t, bug, test.pkg, test.test)
		} else {
			found = findInLinks(t, bug)
		}
		return fmt.Sprintf("%-44s %-10s %34.1fs  %.160s", bug, where, time.Since(began).Seconds(), found), nil
	}
	by, clean := findMutation(t, bug)
	took := time.Since(began).Seconds()
	if by == nil {
		t.Errorf("%q was not found", bug)
		return fmt.Sprintf("%-44s %-10s NOT FOUND with %d seeds, %.1f s", bug, mutationStories[bug], mutationSeeds, took), clean
	}
	checker, what, _ := finding(by)
	return fmt.Sprintf("%-44s %-10s %4d  %-28s %5.1fs  %.160s", bug, by.Story, by.Seed, checker, took, what), clean
}

// storyOfLinks is TestBrokenLinks, which looks for the mutations that cost availability alone.
const storyOfLinks = "links"

// findInLinks breaks the links of three nodes with a mutation, in this process, and returns what
// is wrong then. TestBrokenLinks itself is the run without one.
func findInLinks(t *testing.T, bug mutation.Bug) (found string) {
	t.Helper()
	mutation.Set(bug)
	defer mutation.Set(mutation.None)
	synctest.Test(t, func(t *testing.T) {
		if wrong := brokenLinks(t, 3, 0, singleLinks(3)); len(wrong) > 0 {
			found = wrong[0]
		}
	})
	if found == "" {
		t.Errorf("%q was not found", bug)
	}
	return found
}

// findInTest runs a test of a package with a mutation, in a process of its own, and returns what
// it says. Without one it must pass.
func findInTest(t *testing.T, bug mutation.Bug, pkg, test string) (found string) {
	t.Helper()
	run := func(bug mutation.Bug, args ...string) (string, error) {
		args = append([]string{"test", "-tags", "invariants planted", "-count=1", "-timeout", "30m", "-run", "^" + test + "$"}, args...)
		cmd := exec.CommandContext(t.Context(), "go", append(args, "../"+pkg)...)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", mutation.Variable, bug))
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	// A test that is skipped passes too.
	if out, err := run(mutation.None, "-v"); err != nil || !strings.Contains(out, "--- PASS: Test") || strings.Contains(out, "--- SKIP: ") {
		t.Errorf("%s of %s without a mutation: %v\n%s", test, pkg, err, out)
	}
	out, err := run(bug)
	at := strings.Index(out, "_test.go:")
	if err == nil || !strings.Contains(out, "--- FAIL: Test") || at < 0 {
		t.Errorf("%q was not found by %s of %s: %v\n%.2000s", bug, test, pkg, err, out)
		return ""
	}
	_, found, _ = strings.Cut(out[at:], ":")
	_, found, _ = strings.Cut(found, ":")
	found, _, _ = strings.Cut(strings.TrimSpace(found), "\n")
	return found
}

// findMutation searches for a mutation, two seeds at a time. It returns the first
// outcome that has it, nil if none does, and the same runs without mutation.
func findMutation(t *testing.T, bug mutation.Bug) (by *outcome, clean []job) {
	t.Helper()
	story := mutationStories[bug]
	for seed := uint64(0); seed < mutationSeeds && by == nil; seed += 2 {
		jobs := []job{{story, seed, bug}, {story, seed + 1, bug}}
		for _, o := range fleet(t, jobs, func(*outcome) {}) {
			clean = append(clean, job{story: o.Story, seed: o.Seed})
			if _, _, ok := finding(o); ok && by == nil {
				by = o
			}
			if o.kept != "" && os.Getenv("SKEIN_SIM_KEEP") == "" {
				_ = os.RemoveAll(o.kept) // it is as it should be
			}
		}
	}
	return by, clean
}
