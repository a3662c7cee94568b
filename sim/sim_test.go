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

	"github.com/skeindb/skein/sim/judge"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// story is a kind of run, made with a seed.
type story struct {
	name string
	// long stories only run if seeds are requested.
	long bool
	cfg  func(seed uint64) Config
}

// of is a seed's run of the story. In each third one idle groups sleep at once.
func (s *story) of(seed uint64) Config {
	cfg := s.cfg(seed)
	cfg.Seed, cfg.Crowded = seed, seed%3 == 1
	return cfg
}

// stories are all kinds of runs.
var stories = []story{
	// Everything there is, one after the other and some at a time.
	{name: "faults", cfg: func(seed uint64) Config {
		return Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Faults: faults(), Splits: 10, Compactions: 12, ShortLogs: seed%2 == 0,
			Borders: []string{"j", "s"},
		}
	}},
	// Splits, impatient clients, a clean stop of all nodes and no failure: every
	// revision before the stop is used.
	{name: "quiet", cfg: func(uint64) Config {
		return Config{Nodes: 3, Clients: 8, BurstOps: 6, Splits: 4, Compactions: 2, Quiet: 8 * time.Second, Borders: []string{"j"}}
	}},
	// One node after the other is restarted, in order, under load: every revision is used.
	{name: "restarts", cfg: func(uint64) Config {
		return Config{Nodes: 3, Clients: 4, BurstOps: 3, Splits: 8, Faults: []Fault{Restart, Restart, Restart}, Borders: []string{"j"}}
	}},
	// Many clients at few keys, and the failures that lose leaders.
	{name: "hot", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 16, BurstOps: 8, Splits: 6, Borders: []string{"j"},
			Faults: []Fault{CrashAll, IsolateLeader, Pause, CrashOne, CrashLoop},
		}
	}},
	// Ranges have replicas on three nodes of five.
	{name: "five", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 5, Clients: 5, BurstOps: 4, Leases: 3, Faults: AllFaults, Splits: 8, Compactions: 12, ShortLogs: seed%2 == 1,
			Borders: []string{"f", "j", "s", "x"},
		}
	}},
	// Each kind of fault beside each other kind, within as many seeds as there are kinds. Then the
	// same without leases, where machines are suspended unseen.
	{name: "pairs", long: true, cfg: func(seed uint64) Config {
		rounds := uint64(roundsOf(pairKinds(true)))
		leases := seed/rounds%2 == 0
		return Config{
			Nodes: 3 + 2*int(seed%2), Clients: 5, BurstOps: 4, Txns: 20, Leases: 2, Splits: 8, Compactions: 12, ShortLogs: seed%2 == 0, Padding: 256,
			Borders: []string{"f", "j", "s"}, Pairs: true, NoLeaseReads: !leases, Faults: roundOf(pairKinds(leases), int(seed%rounds)),
		}
	}},
	// Leaders that pause, hang and are cut off while they believe that they lead.
	{name: "leaders", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Borders: []string{"j", "s"},
			Faults: []Fault{PauseLeader, SickLeader, IsolateLeader, PauseLeader, SickLeader, IsolateLeader, PauseLeader, SickLeader},
		}
	}},
	// Leaders whose machines are suspended and whose clocks stand still meanwhile. Leases prove
	// nothing then, and nobody uses them.
	{name: "suspended", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 3, Clients: 8, BurstOps: 6, Txns: 20, Impatient: 3, Borders: []string{"j", "s"}, NoLeaseReads: true, Together: seed%2 == 0,
			Faults: []Fault{Suspend, Suspend, SuspendSeen, Suspend, IsolateLeader, Suspend, CrashOne, Suspend, Transfer, Suspend},
		}
	}},
	// Leaders whose machines are suspended, and which notice it by their wall clocks.
	{name: "seen", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 8, BurstOps: 6, Txns: 20, Impatient: 3, Borders: []string{"j"}, Together: true,
			Faults: []Fault{SuspendSeen, SuspendSeen, SuspendSeen, SuspendSeen, SuspendSeen, SuspendSeen},
		}
	}},
	// A sequencer whose machine is suspended believes in its lease when it goes on. Ranges and
	// gateways know of its successor.
	{name: "sequencers", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 10, BurstOps: 8, Txns: 20, Impatient: 4, Borders: []string{"f", "j", "s"},
			Faults: []Fault{SuspendSequencer, SuspendSequencer, SuspendSequencer, SuspendSequencer, SuspendSequencer, SuspendSequencer},
		}
	}},
	// One range, led by the sequencer's node. A failing node could do alone all that it
	// must not do, and impatient clients make it try.
	{name: "alone", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Impatient: 3, Together: true,
			Faults: []Fault{
				SickLeader, SickLeader, SickLeader, PauseLeader, PauseLeader, IsolateLeader, IsolateLeader, DeafLeader, MuteLeader, Blink, Transfer,
			},
		}
	}},
	// Many ranges, and coordinators that die, are cut off and return too late.
	{name: "txns", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 8, BurstOps: 6, Txns: 40, Borders: []string{"f", "i", "l", "o", "r", "u", "x"}, Splits: 14, Compactions: 8,
			Faults: []Fault{CrashOne, IsolateLeader, CrashTwo, Pause, CrashLoop, Restart, CrashOne, IsolateLeader},
		}
	}},
	// One range that becomes many while clients and watchers are busy, and no failure:
	// every revision is used.
	{name: "splits", long: true, cfg: func(uint64) Config {
		return Config{Nodes: 3, Clients: 8, BurstOps: 10, Splits: 30, SplitEvery: 60 * time.Millisecond, Quiet: 12 * time.Second}
	}},
	// Nodes that do not hear the sequencer's allocations while it moves to another node.
	{name: "overtakes", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Borders: []string{"f", "j", "o", "s"},
			Faults: []Fault{Overtake, Overtake, Overtake, Overtake, Overtake, Transfer},
		}
	}},
	// Leases that are renewed, revoked and left to expire, under all faults.
	{name: "leases", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 3, Clients: 5, BurstOps: 3, Leases: 6, Faults: append([]Fault{PauseLeader, PauseLeader, IsolateLeader, ClockStep, Drift}, AllFaults...),
			Splits: 20, Compactions: 6, ShortLogs: seed%2 == 0, Borders: []string{"j", "s"},
		}
	}},
	// Leases, some of them long-lived, while the nodes that count their time pause and
	// return, and keys in many ranges.
	{name: "holders", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 3, BurstOps: 3, Leases: 8, Borders: []string{"f", "i", "l", "o", "r", "u", "x"}, Splits: 8,
			Faults: []Fault{PauseLeader, Transfer, PauseLeader, IsolateLeader, PauseLeader, Transfer, PauseLeader, CrashOne},
		}
	}},
	// Leases that expire without failures: they end soon.
	{name: "expiry", long: true, cfg: func(uint64) Config {
		return Config{Nodes: 3, Clients: 5, BurstOps: 3, Leases: 8, Splits: 6, Compactions: 2, Quiet: 15 * time.Second, Borders: []string{"j", "s"}}
	}},
	// Ranges that move over five nodes and are split, under all faults.
	{name: "moves", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 5, Clients: 6, BurstOps: 4, Leases: 2, Txns: 30, Moves: 40, Splits: 8, Compactions: 6, ShortLogs: seed%2 == 0, Borders: []string{"j", "s"},
			Faults: []Fault{CrashOne, IsolateLeader, Pause, CrashTwo, OneWay, CrashLoop, Restart, Apart, Flaky, CrashAll},
		}
	}},
	// Ranges that are split and merged again, on three nodes or moving over five, with
	// transactions and leases across the borders, under all faults.
	{name: "merges", long: true, cfg: func(seed uint64) Config {
		cfg := Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Txns: 20, Leases: 2, Merges: 40, Splits: 16, Compactions: 6, ShortLogs: seed%2 == 0,
			Borders: []string{"f", "j", "o", "s"},
			Faults:  []Fault{CrashOne, IsolateLeader, Pause, CrashTwo, OneWay, CrashLoop, Restart, CutOff, Flaky, Transfer, CrashAll},
		}
		if seed%3 == 2 {
			cfg.Nodes, cfg.Moves = 5, 10
		}
		return cfg
	}},
	// The same without failures: every revision is used, and every watcher receives its
	// events in time. The left range serves until it absorbs, and is ahead of the right
	// one then.
	{name: "seams", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 8, BurstOps: 8, Txns: 20, Leases: 2, Merges: 20, Splits: 20, SplitEvery: 300 * time.Millisecond, Unheld: true,
			Borders: []string{"f", "j", "o", "s"}, Quiet: 15 * time.Second,
		}
	}},
	// A placement group of five that moves over six nodes, its leader with it, under all
	// faults.
	{name: "placementmoves", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 6, Clients: 6, BurstOps: 4, Leases: 2, SystemMoves: 40, Splits: 6, Compactions: 6, ShortLogs: seed%2 == 0, Borders: []string{"j", "s"},
			Faults: []Fault{CrashOne, IsolateLeader, Pause, CrashTwo, OneWay, PauseLeader, CrashLoop, Restart, Apart, Flaky, Transfer, CrashAll},
		}
	}},
	// One of three over four nodes, without failures: every revision is used. It has no leases:
	// those restart with each leader, and without failures they are expected to end in time.
	{name: "placementquiet", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 4, Clients: 8, BurstOps: 6, SystemMoves: 20, Splits: 4, Compactions: 2, Quiet: 16 * time.Second, Borders: []string{"j"},
		}
	}},
	// A machine of five is lost for good, under all other faults.
	{name: "repair", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 5, Clients: 6, BurstOps: 4, Leases: 2, Lose: 1, Splits: 8, Compactions: 4, ShortLogs: seed%2 == 0, Borders: []string{"f", "j", "o", "s"},
			Faults: []Fault{CrashOne, IsolateLeader, Pause, OneWay, CrashLoop, Restart, Apart, Flaky, Transfer, CrashAll},
		}
	}},
	// Nodes that join, leave for good, lose their disks and are replaced, with ranges
	// that move to them, under all other faults.
	{name: "joins", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 3 + 2*int(seed%2), Spares: 2, Clients: 6, BurstOps: 4, Txns: 20, Leases: 2, Joins: 14, Moves: 24, Splits: 6, Compactions: 12, ShortLogs: seed%2 == 0, Borders: []string{"j", "s"},
			Faults: []Fault{CrashOne, IsolateLeader, Pause, CrashTwo, OneWay, CrashLoop, Restart, Apart, Flaky, Transfer, CrashAll},
		}
	}},
	// Ranges that their leaders split by size, while they are merged and moved and nodes
	// join and leave, under all faults.
	{name: "divides", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 3 + 2*int(seed%2), Spares: 1, Clients: 6, BurstOps: 5, Txns: 20, Leases: 2, Padding: 4 << 10, RangeMaxBytes: 192 << 10,
			Joins: 8, Moves: 20, Merges: 24, Compactions: 16, Borders: []string{"l"},
			Faults: []Fault{CrashOne, IsolateLeader, Pause, CrashTwo, OneWay, Restart, CutOff, Flaky, Transfer, CrashAll},
		}
	}},
	// Ranges that their leaders split by load, which takes time, while some are merged
	// and moved, and no failure: every revision is used.
	{name: "heats", long: true, cfg: func(uint64) Config {
		return Config{Nodes: 5, Clients: 6, BurstOps: 5, Txns: 20, RangeSplitLoad: 8, Moves: 10, Merges: 6, Quiet: 60 * time.Second, Borders: []string{"s"}}
	}},
	// Ranges that merge and split by themselves, with few requests to do so, under all
	// faults: large ones split; small, cold and old ones merge.
	{name: "breath", long: true, cfg: func(seed uint64) Config {
		cfg := Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Txns: 20, Leases: 2, Splits: 24, Compactions: 6, ShortLogs: seed%2 == 0, MergeAfter: time.Second,
			Faults: []Fault{CrashOne, IsolateLeader, Pause, CrashTwo, OneWay, CrashLoop, Restart, CutOff, Flaky, Transfer, CrashAll},
		}
		if seed%2 == 1 {
			cfg.RangeMaxBytes, cfg.Padding, cfg.Compactions = 128<<10, 4<<10, 60 // ranges that merge get small again, until the end
		}
		if seed%3 == 2 {
			cfg.Nodes, cfg.Moves = 5, 10
		}
		return cfg
	}},
	// The same without failures: every revision is used, and every watcher receives its
	// events in time.
	{name: "rest", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 8, BurstOps: 8, Txns: 20, Leases: 2, Splits: 20, SplitEvery: 300 * time.Millisecond, Padding: 2 << 10,
			MergeAfter: time.Second, RangeMaxBytes: 256 << 10, Quiet: 20 * time.Second,
		}
	}},
	// Neighbours with replicas in three zones, moving within them, merge by themselves
	// while nodes fail. No two replicas come into one zone on the way.
	{name: "zones", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 6, Zones: 3, Clients: 6, BurstOps: 4, Txns: 20, Moves: 40, Splits: 24, Compactions: 6, MergeAfter: time.Second, Borders: []string{"j", "s"},
			Faults: []Fault{CrashOne, IsolateLeader, Pause, OneWay, CrashLoop, Restart, Flaky, Transfer},
		}
	}},
	// Nodes that start again and again, and lose their replicas to others, beside faults that end.
	{name: "flaps", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 5, Clients: 4, BurstOps: 4, Splits: 4, ShortLogs: seed%2 == 0, Borders: []string{"j", "s"},
			Faults: []Fault{BootLoop, CrashOne, BootLoop, Transfer},
		}
	}},
	// Tables that rot, one node after the other: replicas are rebuilt in place or elsewhere.
	{name: "rot", long: true, cfg: func(seed uint64) Config {
		return Config{
			Nodes: 3 + 2*int(seed%2), Clients: 5, BurstOps: 4, Txns: 20, Splits: 6, Padding: 256, Borders: []string{"j", "s"},
			Faults: []Fault{Rot, CrashOne, Rot, IsolateLeader, Rot, Flaky},
		}
	}},
	// Users whose rights change while their clients work, under all faults, splits, merges and moves.
	{name: "users", long: true, cfg: func(seed uint64) Config {
		rounds := uint64(roundsOf(AllFaults))
		cfg := Config{
			Nodes: 3 + 2*int(seed%2), Clients: 4, BurstOps: 3, Txns: 20, Users: 3, Splits: 6, Merges: 6, Borders: []string{"f", "j", "s"},
			Pairs: true, Faults: roundOf(AllFaults, int(seed%rounds)),
		}
		if cfg.Nodes == 5 {
			cfg.Moves = 10
		}
		return cfg
	}},
	// Nodes that are away for longer than their view leases last, with the users' clients and watchers there.
	{name: "usersaway", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 2, BurstOps: 2, Users: 3, Borders: []string{"j"}, Lasts: 4 * time.Second,
			Faults: []Fault{Isolate, IsolateLeader, Pause, PauseLeader, SuspendSeen, Isolate, SuspendSeen},
		}
	}},
	// The same without failures: every revision is used, although the sequencer refuses some.
	{name: "usersquiet", long: true, cfg: func(uint64) Config {
		return Config{Nodes: 3, Clients: 4, BurstOps: 4, Txns: 20, Users: 4, Splits: 6, Merges: 4, Quiet: 12 * time.Second, Borders: []string{"f", "j", "s"}}
	}},
	// Cuts through the whole store, full ones and what came since, while ranges split, merge and move and old versions
	// are removed, under all faults.
	{name: "cuts", long: true, cfg: func(seed uint64) Config {
		rounds := uint64(roundsOf(AllFaults))
		faults := roundOf(AllFaults, int(seed/2%rounds))
		half := len(faults) / 4 * 2 // whole pairs
		if faults = faults[:half]; seed%2 == 1 {
			faults = roundOf(AllFaults, int(seed/2%rounds))[half:]
		}
		cfg := Config{
			Nodes: 3, Clients: 5, BurstOps: 4, Txns: 30, Leases: 2, Cuts: 40, Splits: 16, Merges: 16, Compactions: 14, ShortLogs: seed%4 < 2,
			Borders: []string{"f", "j", "s"}, Pairs: true, Faults: faults,
		}
		if seed%3 == 2 {
			cfg.Nodes, cfg.Moves = 5, 10
		}
		return cfg
	}},
	// A cluster that is loaded with a store from elsewhere under faults, by loaders that are killed, and then works as
	// always.
	{name: "load", long: true, cfg: func(seed uint64) Config {
		kinds := []Fault{CrashOne, CrashAll, Transfer, CrashTwo, IsolateLeader, CrashOne, Flaky, PauseLeader, CrashLoop, Restart, CrashAll, SyncError}
		at := int(seed % uint64(len(kinds)))
		return Config{
			Nodes: 3 + 2*int(seed%2), Clients: 5, BurstOps: 4, Txns: 20, Leases: 2, Load: 150, LoadFaults: append(kinds[at:], kinds[:at]...)[:6],
			Splits: 4, Compactions: 4, Cuts: 4, ShortLogs: seed%4 < 2, Borders: []string{"j", "s"}, Faults: []Fault{CrashOne, IsolateLeader, Transfer},
		}
	}},
	// Power cuts.
	{name: "power", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Borders: []string{"j", "s"},
			Faults: []Fault{CrashAll, CrashTwo, CrashOne, CrashAll, CrashLoop, CrashAll},
		}
	}},
	// All nodes lose their power at the same moment, again and again.
	{name: "blackout", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 6, BurstOps: 4, Borders: []string{"j", "s"},
			Faults: []Fault{CrashAll, CrashAll, CrashAll, CrashAll, CrashAll},
		}
	}},
	// Followers that return behind the log's beginning and lose their power again.
	{name: "snapshots", long: true, cfg: func(uint64) Config {
		return Config{
			Nodes: 3, Clients: 8, BurstOps: 6, Borders: []string{"j", "s"}, ShortLogs: true, Splits: 8, Compactions: 8,
			Faults: []Fault{CutOff, CutOff, CutOff, CutOff, CrashAll},
		}
	}},
}

func storyOf(t *testing.T, name string) *story {
	t.Helper()
	for i := range stories {
		if stories[i].name == name {
			return &stories[i]
		}
	}
	t.Fatalf("no story %q", name)
	return nil
}

// number reads a number from the environment.
func number(t *testing.T, name string) (uint64, bool) {
	t.Helper()
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

// faults returns all faults. With -short it leaves out those that resemble another one: a story
// costs the heartbeats of its virtual time. CI runs all of them without the race detector.
func faults() []Fault {
	if testing.Short() {
		return []Fault{CrashOne, CrashAll, SyncError, IsolateLeader, PauseLeader, ClockStep, Flaky, CutOff, Transfer}
	}
	return AllFaults
}

// TestStories is the simulation. Every test run has one seed of the short stories.
// SKEIN_SIM_SEED runs one seed of all stories, and SKEIN_SIM_SEEDS all seeds below it
// of all stories, in processes of their own.
func TestStories(t *testing.T) {
	if n, ok := number(t, "SKEIN_SIM_SEEDS"); ok {
		many(t, n)
		return
	}
	seed, asked := number(t, "SKEIN_SIM_SEED")
	repeat, _ := number(t, "SKEIN_SIM_REPEAT")
	for _, s := range stories {
		if s.long && !asked {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			for i := range max(1, repeat) {
				t.Run(fmt.Sprint(i), func(t *testing.T) {
					cfg := s.of(seed)
					o := judged(t, cfg)
					t.Log(o.line())
					for _, b := range o.Violations {
						t.Errorf("seed %d: %s", seed, b)
					}
				})
			}
		})
	}
}

// judged makes one run and returns its outcome.
func judged(t *testing.T, cfg Config) *outcome {
	t.Helper()
	r := prepare(t, cfg)
	return r.run(t)
}

// trial is one run and the place of its history and trace.
type trial struct {
	rep   *Report
	dir   string
	trace *os.File
}

// prepare makes a run that has not begun.
func prepare(t *testing.T, cfg Config) *trial {
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
	return &trial{&Report{Evidence: judge.Evidence{History: &judge.History{}}, Config: cfg, Trace: NewTrace(trace)}, dir, trace}
}

// run makes the run. One with violations keeps its history and trace.
func (r *trial) run(t *testing.T) *outcome {
	t.Helper()
	o := &outcome{Seed: r.rep.Config.Seed}
	judged := false
	defer func() {
		// Also if the bubble panics because every goroutine in it waits.
		r.trace.Close()
		if judged && len(o.Violations) == 0 && os.Getenv("SKEIN_SIM_KEEP") == "" {
			_ = os.RemoveAll(r.dir)
			return
		}
		t.Log(r.keep(t.Name()))
	}()
	began := time.Now()
	synctest.Test(t, func(*testing.T) { Run(r.rep) })
	o.Ran = time.Since(began)
	bad := judge.Check(&r.rep.Evidence)
	o.Judged = time.Since(began) - o.Ran
	o.take(r.rep, bad)
	judged = true
	return o
}

// keep writes the history and reports its place.
func (r *trial) keep(test string) string {
	if f, err := os.Create(filepath.Join(r.dir, "history.txt")); err == nil {
		_, _ = r.rep.History.WriteTo(f)
		f.Close()
	}
	var short string
	if testing.Short() {
		short = "-short "
	}
	return fmt.Sprintf("history and trace are in %s; repeat with SKEIN_SIM_SEED=%d go test %s./sim -run '%s'", r.dir, r.rep.Config.Seed, short, test)
}
