package sim

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap/zapcore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// seeds returns the seeds to run: SKEIN_SIM_SEED alone, or the first
// SKEIN_SIM_SEEDS.
func seeds(t *testing.T, usual int) (s []uint64) {
	t.Helper()
	number := func(name string) (uint64, bool) {
		text := os.Getenv(name)
		if text == "" {
			return 0, false
		}
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n, true
	}
	if one, ok := number("SKEIN_SIM_SEED"); ok {
		repeat, _ := number("SKEIN_SIM_REPEAT")
		for range max(1, repeat) {
			s = append(s, one)
		}
		return s
	}
	n, ok := number("SKEIN_SIM_SEEDS")
	if !ok {
		n = uint64(usual)
	}
	for i := range n {
		s = append(s, i)
	}
	return s
}

// simulate makes one run, and fails and keeps its history and trace if the judges
// find anything.
func simulate(t *testing.T, cfg Config) {
	t.Helper()
	for i, b := range judge(t, cfg) {
		if i == 10 {
			t.Error("and more")
			break
		}
		t.Errorf("seed %d: %s", cfg.Seed, b)
	}
}

// judge makes one run and returns what is wrong with it.
func judge(t *testing.T, cfg Config) (bad []string) {
	t.Helper()
	if os.Getenv("SKEIN_SIM_DEBUG") != "" {
		cfg.LogLevel = zapcore.DebugLevel
	}
	cryptotest.SetGlobalRandom(t, cfg.Seed)
	//nolint:usetesting // a directory of the test would be gone when somebody wants to look at the failure
	dir, err := os.MkdirTemp("", fmt.Sprintf("skein-sim-%d-", cfg.Seed))
	if err != nil {
		t.Fatal(err)
	}
	trace, err := os.Create(filepath.Join(dir, "trace.txt"))
	if err != nil {
		t.Fatal(err)
	}
	rep := &Report{Config: cfg, History: &History{}, Trace: NewTrace(trace)}
	judged := false
	defer func() {
		// Also where the bubble panics, since everybody in it waits.
		trace.Close()
		if judged && len(bad) == 0 {
			_ = os.RemoveAll(dir)
			return
		}
		if f, err := os.Create(filepath.Join(dir, "history.txt")); err == nil {
			_, _ = rep.History.WriteTo(f)
			f.Close()
		}
		t.Logf("history and trace are in %s; repeat with SKEIN_SIM_SEED=%d go test ./sim -run '%s'", dir, cfg.Seed, t.Name())
	}()
	began := time.Now()
	synctest.Test(t, func(*testing.T) { Run(rep) })
	ran := time.Since(began)
	bad = Check(rep)
	ops := rep.History.Ops()
	var by [3]int
	for _, o := range ops {
		by[o.Outcome]++
	}
	t.Logf("%d operations (%d answered, %d refused, %d unknown), %d versions, %d splits, %v virtual in %v, judged in %v, faults %v, network %+v",
		len(ops), by[Answered], by[Refused], by[Unknown], len(rep.Versions), rep.Splits, rep.Elapsed.Round(time.Millisecond),
		ran.Round(time.Millisecond), (time.Since(began) - ran).Round(time.Millisecond), rep.Happened, rep.Network)
	judged = true
	return bad
}

// TestSeeds is the simulation: one seed in every test run, many with make sim.
func TestSeeds(t *testing.T) {
	for i, seed := range seeds(t, 1) {
		t.Run(fmt.Sprintf("%d/%d", seed, i), func(t *testing.T) {
			simulate(t, Config{
				Seed: seed, Nodes: 3, Clients: 6, BurstOps: 4, Faults: AllFaults, Splits: 8, Borders: []string{"j", "s"},
			})
		})
	}
}

// TestWithoutFailures has splits, impatient clients, and a clean stop of all nodes,
// and nothing that fails: every revision is used.
func TestWithoutFailures(t *testing.T) {
	for i, seed := range seeds(t, 1) {
		t.Run(fmt.Sprintf("%d/%d", seed, i), func(t *testing.T) {
			simulate(t, Config{
				Seed: seed, Nodes: 3, Clients: 8, BurstOps: 6, Splits: 4, Quiet: 8 * time.Second, Borders: []string{"j"},
			})
		})
	}
}

// TestRollingRestart restarts one node after the other, in order, under load: every
// revision is used.
func TestRollingRestart(t *testing.T) {
	for i, seed := range seeds(t, 1) {
		t.Run(fmt.Sprintf("%d/%d", seed, i), func(t *testing.T) {
			simulate(t, Config{
				Seed: seed, Nodes: 3, Clients: 4, BurstOps: 3, Splits: 8, Faults: []Fault{Restart, Restart, Restart}, Borders: []string{"j"},
			})
		})
	}
}

// TestHot has many clients at few keys, and the failures that lose leaders.
func TestHot(t *testing.T) {
	for i, seed := range manySeeds(t) {
		t.Run(fmt.Sprintf("%d/%d", seed, i), func(t *testing.T) {
			simulate(t, Config{
				Seed: seed, Nodes: 3, Clients: 16, BurstOps: 8, Splits: 6, Borders: []string{"j"},
				Faults: []Fault{CrashAll, IsolateLeader, Pause, CrashOne, CrashLoop},
			})
		})
	}
}

// manySeeds returns seeds for what is too long for every test run.
func manySeeds(t *testing.T) []uint64 {
	t.Helper()
	if os.Getenv("SKEIN_SIM_SEEDS") == "" && os.Getenv("SKEIN_SIM_SEED") == "" {
		t.Skip("only with SKEIN_SIM_SEEDS or SKEIN_SIM_SEED")
	}
	return seeds(t, 0)
}

// TestFiveNodes: ranges have replicas on three nodes of five.
func TestFiveNodes(t *testing.T) {
	for i, seed := range manySeeds(t) {
		t.Run(fmt.Sprintf("%d/%d", seed, i), func(t *testing.T) {
			simulate(t, Config{
				Seed: seed, Nodes: 5, Clients: 5, BurstOps: 4, Faults: AllFaults, Splits: 6, Borders: []string{"f", "j", "s", "x"},
			})
		})
	}
}
