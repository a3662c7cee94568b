package conformance

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
)

// TestMain prints the sums of all runs if there are many.
func TestMain(m *testing.M) {
	ctx, cancel := context.WithCancel(context.Background())
	watched := make(chan struct{})
	go func() { defer close(watched); still.watch(ctx) }()
	code := m.Run()
	cancel()
	<-watched
	if *seedsFlag > 1 {
		runs.print(os.Stdout)
	}
	os.Exit(code)
}

// still is of this process.
var still standstill

// standstill notices that the process stood still. A store may then find in the middle of a
// call that its time is over. That is no difference.
type standstill struct {
	mu    sync.Mutex
	times int
	long  time.Duration
}

// The process has stood still if so short a sleep took so long. Two nodes that do not
// hear of each other for 3 s consider their connection lost, and they send once a
// second.
const (
	standstillLook  = 200 * time.Millisecond
	standstillLeast = time.Second
)

func (s *standstill) watch(ctx context.Context) {
	ck := clock.System()
	for {
		before := ck.Now()
		if clock.Sleep(ctx, ck, standstillLook) != nil {
			return
		}
		if took := ck.Now().Sub(before); took >= standstillLeast {
			s.mu.Lock()
			s.times++
			s.long += took
			s.mu.Unlock()
		}
	}
}

// count returns how often the process has stood still, and how long in all.
func (s *standstill) count() (int, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.times, s.long
}

// tally sums up the runs of one test.
type tally struct {
	seeds, calls, splits, differences, repeated int
	// kinds counts the calls by kind, and how many of them were refused.
	kinds, refused map[string]int
	took           time.Duration
}

// tallies are those of all tests, by name.
type tallies struct {
	mu sync.Mutex
	of map[string]*tally
}

var runs = tallies{of: map[string]*tally{}}

// change calls f with the test's tally.
func (s *tallies) change(test string, f func(*tally)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.of[test]
	if t == nil {
		t = &tally{kinds: map[string]int{}, refused: map[string]int{}}
		s.of[test] = t
	}
	f(t)
}

// add adds a run that has ended without a difference.
func (t *tally) add(p *pair) {
	t.seeds++
	t.calls += p.calls
	t.splits += p.splits.done
	for o, n := range p.outcomes {
		kind, outcome, _ := strings.Cut(o, ": ")
		switch outcome {
		case compactedThere:
			continue // it is counted with etcd's answer
		case "OK":
		default:
			t.refused[kind] += n
		}
		t.kinds[kind] += n
	}
}

// print shows the tallies of all tests.
func (s *tallies) print(w io.Writer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, test := range slices.Sorted(maps.Keys(s.of)) {
		t := s.of[test]
		fmt.Fprintf(w, "%s: %d seeds clean, %d calls, %d splits, %d differences, %d repeated after a standstill, %s\n",
			test, t.seeds, t.calls, t.splits, t.differences, t.repeated, t.took.Round(time.Second))
		for _, k := range slices.Sorted(maps.Keys(t.kinds)) {
			fmt.Fprintf(w, "%9d %s, %d of them refused\n", t.kinds[k], k, t.refused[k])
		}
	}
}

func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:])
		seed = uint64(binary.LittleEndian.Uint32(b[:])) + 1
	}
	t.Logf("seed %d", seed)
	return seed
}

// overSeeds runs one seed, or as many as requested. keeps checks that a run without a
// difference met its purpose.
func overSeeds(t *testing.T, run func(p *pair, ctx context.Context, calls, every int) error, keeps func(*testing.T, *pair), jwt bool) {
	t.Helper()
	first, test := seedOf(t), t.Name()
	began := clock.StartStopwatch()
	if *seedsFlag == 1 {
		overSeed(t, test, first, run, keeps, jwt)
		return
	}
	t.Run("seed", func(t *testing.T) {
		for seed := first; seed < first+uint64(*seedsFlag); seed++ {
			t.Run(fmt.Sprint(seed), func(t *testing.T) {
				t.Parallel()
				overSeed(t, test, seed, run, keeps, jwt)
			})
		}
	})
	runs.change(test, func(t *tally) { t.took = began.Elapsed() })
}

// tokenOption is the value of --auth-token, for simple tokens or for JWTs of secretOfAll.
func tokenOption(t *testing.T, jwt bool) string {
	t.Helper()
	if !jwt {
		return simpleTokens
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte(secretOfAll), 0o600); err != nil {
		t.Fatal(err)
	}
	return "jwt,sign-method=HS256,priv-key=" + secret
}

// standstillsMax is how often a seed is run again because the process stood still.
const standstillsMax = 5

func overSeed(t *testing.T, test string, seed uint64, run func(p *pair, ctx context.Context, calls, every int) error, keeps func(*testing.T, *pair), jwt bool) {
	t.Helper()
	for turn := 0; ; turn++ {
		before, long := still.count()
		p, stop, err := startPair(t, seed, tokenOption(t, jwt))
		if err == nil {
			err = run(p, t.Context(), *callsFlag, *splitFlag)
		}
		stop()
		t.Logf("seed %d: %d calls, %d splits, revision %d\n%s", seed, p.calls, p.splits.done, p.source.revision, p.outcomesText())
		if err == nil {
			runs.change(test, func(sum *tally) { sum.add(p) })
			keeps(t, p)
			return
		}
		times, longer := still.count()
		if times == before || turn == standstillsMax {
			runs.change(test, func(sum *tally) { sum.differences++ })
			t.Fatalf("seed %d: %v\n\ngo test . -run '^%s$' -seed %d -calls %d -split %d", seed, err, test, seed, *callsFlag, *splitFlag)
		}
		runs.change(test, func(sum *tally) { sum.repeated++ })
		t.Logf("seed %d: run again, the process stood still for %s before this:\n%v", seed, longer-long, err)
	}
}
