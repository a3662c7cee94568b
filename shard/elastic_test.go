package shard

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// elastic is one run of a model. A seed chooses what happens and when. Ranges split and merge,
// by each step of a merge's protocol and by its abort. Transactions over several ranges lock,
// commit, are pushed and are given up. Leases get keys and are revoked. Leaders lose a part of
// their logs. Nodes stop, or crash and lose what they had not flushed. The test itself plays
// the raft groups, the range map, placement, the records of the leases and all coordinators.
//
// One node leads all ranges. A second one applies the same logs behind it, sometimes gets a
// snapshot, and later takes the lead. Their answers are checked against the model (see
// elasticmodel_test.go), and their states against each other.
//
// One random source makes all choices, and only while no goroutine runs. So a seed repeats its
// run on the same version of the code.
type elastic struct {
	t      *testing.T
	seed   uint64
	rng    *rand.Rand
	traits traits
	trace  []string

	// leader leads every range, follower none.
	leader, follower *fakeWorld
	seq              *fakeSequencer
	logs             map[keyspace.RangeID]*elasticLog
	leases           *elasticLeases
	model            *elasticModel
	placed           elasticMap

	// waiting are the calls whose callers wait beside what else happens.
	waiting []*elasticCall
	wg      sync.WaitGroup

	// txns are the transactions whose coordinators are at it.
	txns []*elasticTxn
	// names and attempts are how many there were.
	names, attempts uint64
	merge           *elasticMerge
	merges          uint64
	values          int
	// ending says that nothing new begins.
	ending bool
}

// traits are what a seed's run is like.
type traits struct {
	// keys are how many there are, and ranges how many at most; where they are few, all leases
	// are one.
	keys, ranges int
	// losses is how many percent of the calls meet a loss in some range's log.
	losses int
	// smallEntries has nearly every delete of several keys swept.
	smallEntries bool
	// merging has merges take most of the steps, and what a transaction has locked stay locked
	// for long.
	merging bool
	// compacts has versions removed.
	compacts bool
	// slow has quorums and the records of leases take their time.
	slow bool
}

func traitsOf(seed uint64) traits {
	t := traits{keys: 6, ranges: 3, smallEntries: seed%6 < 3, merging: seed%5 < 3, compacts: seed%7 < 3, slow: seed%8 > 3}
	if seed%4 == 3 {
		t.keys, t.ranges = 26, 7
	}
	if seed%3 != 0 {
		t.losses = 10
	}
	return t
}

// elasticAction is something that happens. Its share of all weights is its probability.
// merging is its weight in runs with the trait merging, usual in all others.
type elasticAction struct {
	usual, merging int
	do             func(*elastic)
}

var elasticActions = []elasticAction{
	{80, 20, (*elastic).put},
	{30, 10, (*elastic).del},
	{50, 25, (*elastic).read},
	{30, 15, (*elastic).page},
	{100, 80, (*elastic).beginTxn},
	{30, 60, (*elastic).beginRevoke},
	{500, 250, (*elastic).advanceSome},
	{30, 120, (*elastic).push},
	{10, 10, (*elastic).finishRecord},
	{50, 60, (*elastic).split},
	{180, 400, (*elastic).mergeStep},
	{15, 15, (*elastic).changeLeader},
	{200, 250, (*elastic).followSome},
	{20, 25, (*elastic).copySome},
	{10, 10, (*elastic).flush},
	{8, 5, (*elastic).restart},
	{10, 10, (*elastic).restartFollower},
	{10, 10, (*elastic).handOver},
	{30, 30, (*elastic).compact},
	{40, 40, (*elastic).slowDown},
	{10, 10, (*elastic).check},
}

// elasticSteps is the number of actions in a run. Then all that is under way comes to its end.
const elasticSteps = 1000

// TestElasticRanges is the model. A run takes the first elasticSeeds seeds, with -short a
// ninth of them. As in package sim, SKEIN_SIM_SEED=s runs one, SKEIN_SIM_FIRST=f and
// SKEIN_SIM_SEEDS=n n of them from f on. A panic in a node's goroutine leaves the trace unprinted.
// go test -v then names the seed, and SKEIN_SIM_DEBUG=1 prints the trace as it comes.
func TestElasticRanges(t *testing.T) {
	usual := uint64(elasticSeeds)
	if testing.Short() {
		usual /= 9 // a seed is one deterministic run: more of them find few more data races
	}
	first, n := elasticNumber(t, "SKEIN_SIM_FIRST", 0), elasticNumber(t, "SKEIN_SIM_SEEDS", usual)
	if s := os.Getenv("SKEIN_SIM_SEED"); s != "" {
		first, n = elasticNumber(t, "SKEIN_SIM_SEED", 0), 1
	}
	for seed := first; seed < first+n; seed++ {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			virtually(t, func(t *testing.T) { newElastic(t, seed).run(elasticSteps) })
		})
	}
}

// elasticSeeds is how many seeds a run takes without -short: they have each pair of traits.
const elasticSeeds = 36

// The same seed is the same run: without that no failure could be looked into.
func TestElasticRunsAreRepeated(t *testing.T) {
	var traces [2]string
	for i := range traces {
		virtually(t, func(t *testing.T) {
			e := newElastic(t, 7)
			e.run(elasticSteps / 4)
			traces[i] = strings.Join(e.trace, "\n")
		})
	}
	if traces[0] != traces[1] {
		t.Errorf("one run:\n%s\nanother one:\n%s", traces[0], traces[1])
	}
}

func elasticNumber(t *testing.T, name string, usual uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return usual
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

func newElastic(t *testing.T, seed uint64) *elastic {
	t.Helper()
	e := &elastic{
		t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 14)), traits: traitsOf(seed),
		seq:    &fakeSequencer{last: 1, compacted: -1, auto: true},
		logs:   map[keyspace.RangeID]*elasticLog{},
		leases: newElasticLeases(),
		model:  newElasticModel(),
	}
	e.say("seed %d: %+v", seed, e.traits)
	world := func() *fakeWorld {
		w := &fakeWorld{t: t, fs: simdisk.New(), seq: e.seq, leasesOf: e.leases, placed: &e.placed}
		if e.traits.smallEntries {
			w.limits.MaxEntryBytes = 400
		}
		w.start()
		if err := w.store.Create(t.Context(), []keyspace.Descriptor{testDescriptor}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // it has fetched its range ids before the other one does
		return w
	}
	e.leader, e.follower = world(), world()
	return e
}

// run has things happen, and then everything come to its end.
func (e *elastic) run(steps int) {
	ended := false
	defer func() {
		trace := fmt.Sprintf("repeat with SKEIN_SIM_SEED=%d go test -tags invariants ./shard -run '^TestElasticRanges$'; the trace:\n%s",
			e.seed, strings.Join(e.trace, "\n"))
		if !ended && !e.t.Failed() {
			// A node panics, in this goroutine and perhaps under a lock: nothing can be stopped.
			fmt.Println(trace)
			return
		}
		if e.t.Failed() {
			e.t.Log(trace)
		}
		e.leader.stop()
		e.follower.stop()
		e.wg.Wait()
	}()
	e.settle()
	for range steps {
		e.pick().do(e)
		e.collect()
		e.stepped()
		e.settle()
		e.model.observe(e)
		e.checkAttachments()
	}
	e.end()
	e.judge()
	ended = true
}

// pick chooses what happens next.
func (e *elastic) pick() elasticAction {
	weight := func(a *elasticAction) int {
		if e.traits.merging {
			return a.merging
		}
		return a.usual
	}
	all := 0
	for i := range elasticActions {
		all += weight(&elasticActions[i])
	}
	n := e.rng.IntN(all)
	for i := range elasticActions {
		if n -= weight(&elasticActions[i]); n < 0 {
			return elasticActions[i]
		}
	}
	panic("a weight is negative")
}

// say adds to the trace.
func (e *elastic) say(format string, args ...any) {
	e.trace = append(e.trace, fmt.Sprintf("%4d ", len(e.trace))+fmt.Sprintf(format, args...))
	if os.Getenv("SKEIN_SIM_DEBUG") != "" {
		fmt.Println(e.trace[len(e.trace)-1])
	}
}

// fatal ends the run; what is wrong is the trace's last line too.
func (e *elastic) fatal(format string, args ...any) {
	e.t.Helper()
	e.say("WRONG: "+format, args...)
	e.t.Fatalf(format, args...)
}

// one says yes once in n times.
func (e *elastic) one(n int) bool { return e.rng.IntN(n) == 0 }

// key is one of those that there are.
func (e *elastic) key() []byte { return []byte{byte('a' + e.rng.IntN(e.traits.keys))} }

// value is one that nobody else writes.
func (e *elastic) value() string {
	e.values++
	return fmt.Sprintf("v%d", e.values)
}

// lease is one that is granted now and then.
func (e *elastic) lease() keyspace.LeaseID {
	if e.traits.keys < 26 {
		return 7
	}
	return keyspace.LeaseID(7 + e.rng.IntN(2))
}

// elasticCall is what a client does, in a goroutine of its own.
type elasticCall struct {
	ended chan struct{}
	// take takes the answer, in the test's goroutine.
	take func()
}

// Callers wait so long, most of them shortly: who waits for a lock that nobody ends gives up.
const (
	elasticPatience     = 20 * time.Millisecond
	elasticLongPatience = 2 * time.Second
	elasticTick         = 30 * time.Millisecond
	// maxElasticWaiting bounds the calls that are under way beside what else happens.
	maxElasticWaiting = 6
)

// call runs f, and then take in the test's goroutine: now, or where the caller waits beside
// what else happens, when f has ended. Meanwhile a range's log may lose something.
func (e *elastic) call(beside bool, f func(ctx context.Context), take func()) {
	beside = beside && len(e.waiting) < maxElasticWaiting
	patience := elasticPatience
	if beside {
		patience = elasticLongPatience
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	c := &elasticCall{ended: make(chan struct{}), take: take}
	e.wg.Go(func() {
		defer close(c.ended)
		defer cancel()
		f(ctx)
	})
	synctest.Wait()
	if e.rng.IntN(100) < e.traits.losses {
		e.lose(e.some())
	}
	e.settle()
	e.waiting = append(e.waiting, c)
	if beside {
		e.collect()
		return
	}
	for range 100 {
		if e.collect(); !slices.Contains(e.waiting, c) {
			return
		}
		e.pass(elasticTick)
	}
	e.fatal("a call does not end that waits for %s", patience)
}

// collect takes the answers of the calls that have ended, in the order of their begin.
func (e *elastic) collect() {
	for i := 0; i < len(e.waiting); {
		select {
		case <-e.waiting[i].ended:
			c := e.waiting[i]
			e.waiting = slices.Delete(e.waiting, i, i+1)
			c.take()
		default:
			i++
		}
	}
}

// do is call of one that is waited for.
func do[T any](e *elastic, f func(ctx context.Context) (T, error)) (got T, err error) {
	e.call(false, func(ctx context.Context) { got, err = f(ctx) }, func() {})
	e.sane(err)
	return got, err
}

// sane fails where an answer says that an invariant is broken.
func (e *elastic) sane(err error) {
	if k := kverror.Of(err); err != nil && (k.Kind == kverror.Internal || k.Kind == kverror.Corrupt) {
		e.fatal("%v", err)
	}
}

// over returns the leader's replicas that hold a part of the span, in order.
func (e *elastic) over(s keyspace.Span) (rs []*Replica) { return e.leader.over(s) }

// over returns the replicas that hold a part of the span, in order.
func (w *fakeWorld) over(s keyspace.Span) (rs []*Replica) {
	for _, r := range w.store.Replicas() {
		if holds(r, s) && !(lifecycleReplica{r}).State().Ended {
			rs = append(rs, r)
		}
	}
	slices.SortFunc(rs, func(a, b *Replica) int {
		return cmp.Or(bytes.Compare(a.Descriptor().Span.Start, b.Descriptor().Span.Start), cmp.Compare(a.id, b.id))
	})
	return rs
}

// at returns the leader's replica that holds the key.
func (e *elastic) at(key []byte) *Replica {
	rs := e.over(keyspace.Single(key))
	if len(rs) != 1 {
		e.fatal("%d ranges hold key %q", len(rs), key)
	}
	return rs[0]
}

// some returns one of the ranges that there are.
func (e *elastic) some() keyspace.RangeID {
	rs := e.over(keyspace.Span{})
	return rs[e.rng.IntN(len(rs))].id
}

// elasticMap is the range map as placement has it: what the leader's node had when last
// nothing moved.
type elasticMap struct {
	mu sync.Mutex
	// Guarded by mu.
	all []keyspace.Descriptor
}

func (m *elasticMap) update(rs []*Replica) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all = m.all[:0]
	for _, r := range rs {
		m.all = append(m.all, r.Descriptor())
	}
}

func (m *elasticMap) find(is func(d *keyspace.Descriptor) bool) (keyspace.Descriptor, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.all {
		if is(&m.all[i]) {
			return m.all[i], true
		}
	}
	return keyspace.Descriptor{}, false
}

func (m *elasticMap) Descriptor(id keyspace.RangeID) (keyspace.Descriptor, bool) {
	return m.find(func(d *keyspace.Descriptor) bool { return d.Range == id })
}

func (m *elasticMap) Ranges() int { return 0 }

func (m *elasticMap) At(key []byte) (keyspace.Descriptor, bool) {
	return m.find(func(d *keyspace.Descriptor) bool { return d.Span.Contains(key) })
}
