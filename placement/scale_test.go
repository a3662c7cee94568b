package placement

import (
	"context"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/sim/simbus"
	"github.com/skeindb/skein/transport"
)

// The model of docs/SCALE.md: many nodes ask the one sequencer, in virtual time. Client, allocator, allocation log and the
// placement group's raft are the real ones. Modelled are the network, which only delays, and the processor of the
// sequencer's node, where each message takes the time that a benchmark has measured and waits for those before it.

// What the sequencer's node pays, in processor time. All are figures of one machine with two cores, rounded up.
const (
	// busMessage is what a message costs one end of the bus if it shares nothing with another: a quarter of a call, which
	// has two messages and both ends here, from the table of calls in docs/PERFORMANCE.md. sharedMessage is the same with 64
	// calls under way between two nodes.
	busMessage    = 9800 * time.Nanosecond
	sharedMessage = 2000 * time.Nanosecond
	// busKiB is what 1,024 bytes cost one end: BenchmarkBurst/bus/batch=128, where a message and its frame have 260.
	busKiB = 3900 * time.Nanosecond
	// A batch costs the sequencer askedBatch and askedPut for each of its requests: BenchmarkAsked without followers.
	askedBatch = 1000 * time.Nanosecond
	askedPut   = 95 * time.Nanosecond
	// logPart is what a part of the allocation log costs for each follower without the bus, whatever is in it: what
	// followers add to BenchmarkAsked.
	logPart = 600 * time.Nanosecond
	// logRead and logEncode are what a part costs for each record, once for all that take it: BenchmarkLogPart. Allocations
	// wait for logRead.
	logRead   = 3 * time.Nanosecond
	logEncode = 13 * time.Nanosecond
)

// scaleCase is what a run of the model is about.
type scaleCase struct {
	Nodes int
	// Writes and Reads are a second, of all nodes together. They come at random moments. Writes in a row are of different
	// ranges, so each has a record of its own in the allocation log.
	Writes, Reads int
	// Followers are how many of the nodes have watchers, and so follow the allocation log.
	Followers int
	// Cores are those that the bus and the followers have on the sequencer's node. The allocator has one more: all that it
	// does counts as done under its lock, though batches are decoded beside each other.
	Cores int
	// Message is what a message takes of the bus without its bytes.
	Message time.Duration
	// RoundTrip is that between a node and the sequencer's. Commit is how long a ceiling takes to be committed.
	RoundTrip, Commit time.Duration
	// Over is how long is measured, after a fifth of it.
	Over time.Duration
}

// scaleResult is what a run has measured.
type scaleResult struct {
	scaleCase
	// Answered are the requests that were answered in the measured time, a second.
	Answered float64
	P50, P99 time.Duration
	// Batch is the mean number of requests in a batch.
	Batch float64
	// BusCores and AllocatorCores are how much of its processor's time each took.
	BusCores, AllocatorCores float64
	// CeilingWaits are how often batches were found waiting for a ceiling, a second.
	CeilingWaits float64
	// Missed is the part of the revisions that a follower did not learn from the log, since it was overwritten before.
	Missed float64
	// Behind is how far the last follower was behind at the end of the measured time, in writes' time.
	Behind time.Duration

	// The measured time.
	begin, rest time.Time
	// Counts of the whole run: requests, those that failed or were answered with the state of a moment before they were
	// asked, batches, revisions that followers have learned from the log and missed.
	requests, failed, stale, batches, learned, missed int
	// latest is the highest revision that anybody knows, known is up to where each follower knows the log.
	latest keyspace.Revision
	known  []keyspace.Revision
	// revisions are all that were given, took the latencies in the measured time.
	revisions []keyspace.Revision
	took      []time.Duration
}

// processor has cores that do one thing at a time each. Work waits for that before it.
type processor struct {
	mu    sync.Mutex
	free  []time.Time // by core: when it has done all that it was given
	given time.Duration
}

// take returns when the work is done.
func (p *processor) take(work time.Duration) {
	p.mu.Lock()
	core := 0
	for i := range p.free {
		if p.free[i].Before(p.free[core]) {
			core = i
		}
	}
	done := time.Now()
	if done.Before(p.free[core]) {
		done = p.free[core]
	}
	done = done.Add(work)
	p.free[core] = done
	p.given += work
	p.mu.Unlock()
	time.Sleep(time.Until(done))
}

// busy is for how long the cores have worked by now, all together.
func (p *processor) busy() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	busy := p.given
	for _, t := range p.free {
		busy -= max(0, time.Until(t))
	}
	return busy
}

// scaleModel is a running model.
type scaleModel struct {
	scaleCase
	sequencer *Service // the leader's
	// bus and allocator are the processors of the sequencer's node.
	bus, allocator processor
	wait           sync.WaitGroup

	mu sync.Mutex // guards all below
	r  scaleResult
	// parts are the parts of the allocation log that were sent, each by its first byte in memory.
	parts map[*byte]bool
}

func bytesTake(payload []byte) time.Duration { return time.Duration(len(payload)) * busKiB / 1024 }

// scaleBus takes a node's messages to the sequencer's node and back.
type scaleBus struct {
	*scaleModel
	node keyspace.NodeID
}

func (b scaleBus) Call(ctx context.Context, _ keyspace.NodeID, _ transport.Method, payload []byte) ([]byte, error) {
	q, err := sequencer.DecodeBatch(payload) // for the model alone
	if err != nil {
		return nil, err
	}
	time.Sleep(b.RoundTrip / 2)
	b.bus.take(2*b.Message + bytesTake(payload)) // the question and the answer
	b.allocator.take(askedBatch + time.Duration(len(q.Items))*askedPut)
	answer, err := b.sequencer.handleSequence(ctx, b.node, payload)
	time.Sleep(b.RoundTrip / 2)
	b.mu.Lock()
	b.r.batches++
	b.mu.Unlock()
	return answer, err
}

func (b scaleBus) OpenStream(ctx context.Context, _ keyspace.NodeID, _ transport.Method, first []byte) (transport.Stream, error) {
	// As many parts may be under way as fit into the window of a stream.
	s := &scaleStream{m: b.scaleModel, parts: make(chan scalePart, 16)}
	b.wait.Go(func() {
		_ = b.sequencer.handleLog(ctx, b.node, first, s)
		close(s.parts)
	})
	return s, nil
}

// scaleStream is a stream of the allocation log.
type scaleStream struct {
	m     *scaleModel
	parts chan scalePart
}

type scalePart struct {
	payload []byte
	arrives time.Time
}

func (s *scaleStream) Send(ctx context.Context, payload []byte) error {
	p, err := sequencer.DecodeLogPart(payload) // for the model alone
	if err != nil {
		return err
	}
	work := s.m.Message + bytesTake(payload) + logPart
	if s.m.encoded(payload) {
		n := time.Duration(len(p.Records))
		s.m.allocator.take(n * logRead)
		work += n * logEncode
	}
	s.m.bus.take(work)
	select {
	case s.parts <- scalePart{payload, time.Now().Add(s.m.RoundTrip / 2)}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// encoded says that the part was encoded for this follower: no other was sent it before.
func (m *scaleModel) encoded(part []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.parts == nil {
		m.parts = map[*byte]bool{}
	}
	first := !m.parts[&part[0]]
	m.parts[&part[0]] = true
	return first
}

func (s *scaleStream) Recv(ctx context.Context) ([]byte, error) {
	select {
	case p, ok := <-s.parts:
		if !ok {
			return nil, io.EOF
		}
		time.Sleep(time.Until(p.arrives))
		return p.payload, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *scaleStream) Close(error) {}

// runScale runs the model in a bubble.
func runScale(t *testing.T, c scaleCase) scaleResult {
	t.Helper()
	half := c.Commit / 2 // to the other replicas and back, with their disks
	r := newRig(t, 1, 3, simbus.Faults{Delay: simbus.Delay{Min: half, Max: half}})
	r.startAll()
	leader := r.leader()
	m := &scaleModel{scaleCase: c, sequencer: leader.service}
	m.r.scaleCase, m.r.known = c, make([]keyspace.Revision, c.Followers)
	m.bus.free, m.allocator.free = make([]time.Time, c.Cores), make([]time.Time, 1)
	if a := leader.sequence(1); a.Err != nil { // with the first ceiling
		t.Fatal(a.Err)
	}
	// One service without a replica is enough for all nodes.
	idle, err := NewService(ServiceOptions{Self: 99, Boot: 99, Clock: clock.Virtual(), Engine: memoryEngine(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Stop()
	metrics := NewMetrics(nil)
	m.r.begin = time.Now().Add(c.Over / 5)
	m.r.rest = m.r.begin.Add(c.Over)
	following, unfollow := context.WithCancel(t.Context())
	defer unfollow()
	var load sync.WaitGroup
	var clients []*Client
	for i := range c.Nodes {
		id := keyspace.NodeID(100 + i)
		n := NewClient(ClientOptions{
			Self: id, Boot: keyspace.BootID(id), Service: idle, Clock: clock.Virtual(), Bus: scaleBus{m, id}, Metrics: metrics,
		})
		n.SetLeaderHint(leader.id, 1)
		n.wait.Go(n.sequenceLoop)
		clients = append(clients, n)
		if i < c.Followers {
			m.wait.Go(func() { m.follow(following, n, i) })
		}
		load.Go(func() { m.load(n, rand.New(rand.NewPCG(1, uint64(id)))) })
	}
	m.measure(leader.service)
	load.Wait()
	time.Sleep(time.Second) // the followers of the log learn the last of it
	unfollow()
	m.wait.Wait()
	for _, n := range clients {
		n.Stop()
	}
	m.settle()
	return m.r
}

// measure waits for the end of the measured time, and says what the processors did in it.
func (m *scaleModel) measure(s *Service) {
	waits := s.o.Metrics.Sequencer.CeilingWaits
	time.Sleep(time.Until(m.r.begin))
	bus, allocator, waited := m.bus.busy(), m.allocator.busy(), testutil.ToFloat64(waits)
	time.Sleep(time.Until(m.r.rest))
	over := m.Over.Seconds()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.r.BusCores = (m.bus.busy() - bus).Seconds() / over
	m.r.AllocatorCores = (m.allocator.busy() - allocator).Seconds() / over
	m.r.CeilingWaits = (testutil.ToFloat64(waits) - waited) / over
	if m.Followers > 0 {
		behind := float64(m.r.latest-slices.Min(m.r.known)) / float64(m.Writes)
		m.r.Behind = max(0, time.Duration(behind*float64(time.Second)))
	}
}

// load asks for a node until the measured time is over, and then waits for the answers.
func (m *scaleModel) load(n *Client, rng *rand.Rand) {
	var asked sync.WaitGroup
	mean := time.Duration(float64(time.Second) * float64(m.Nodes) / float64(m.Writes+m.Reads))
	for i := 0; ; i++ {
		time.Sleep(time.Duration(rng.ExpFloat64() * float64(mean)))
		now := time.Now()
		if !now.Before(m.r.rest) {
			break
		}
		q := keyspace.SequenceRequest{Range: keyspace.RangeID(int(n.o.Self)*256 + i%256), Generation: 7}
		if rng.IntN(m.Writes+m.Reads) < m.Writes {
			q.Count = 1
		}
		m.mu.Lock()
		latest := m.r.latest
		m.mu.Unlock()
		asked.Add(1)
		n.Sequence(q, func(a keyspace.SequenceAnswer) {
			m.answered(now, latest, &q, &a)
			asked.Done()
		})
	}
	asked.Wait()
}

// answered takes an answer to what was asked at a time at which the revision latest was known.
func (m *scaleModel) answered(asked time.Time, latest keyspace.Revision, q *keyspace.SequenceRequest, a *keyspace.SequenceAnswer) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	r := &m.r
	r.requests++
	if a.Err != nil {
		r.failed++
		return
	}
	if a.Current < latest || q.Count > 0 && a.First <= latest {
		r.stale++
	}
	r.latest = max(r.latest, a.Current)
	if q.Count > 0 {
		r.revisions = append(r.revisions, a.First)
	}
	if !asked.Before(r.begin) {
		r.took = append(r.took, now.Sub(asked))
	}
	if !now.Before(r.begin) && now.Before(r.rest) {
		r.Answered++
	}
}

// follow follows the allocation log for a node, the i-th of those that do.
func (m *scaleModel) follow(ctx context.Context, n *Client, i int) {
	last := keyspace.Revision(0)
	n.FollowLog(ctx, sequencer.LogPosition{}, func(p *sequencer.LogPart) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if last > 0 {
			m.r.missed += int(p.After - last)
			m.r.learned += int(p.Last - p.After)
		}
		last, m.r.known[i] = p.Last, p.Last
	})
}

// settle turns counts into what the result says, when all is answered.
func (m *scaleModel) settle() {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := &m.r
	r.Answered /= m.Over.Seconds()
	if r.batches > 0 {
		r.Batch = float64(r.requests) / float64(r.batches)
	}
	if all := r.learned + r.missed; all > 0 {
		r.Missed = float64(r.missed) / float64(all)
	}
	slices.Sort(r.took)
	slices.Sort(r.revisions)
	if n := len(r.took); n > 0 {
		r.P50, r.P99 = r.took[n/2], r.took[n*99/100]
	}
}
