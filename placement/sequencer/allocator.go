package sequencer

import (
	"fmt"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

const (
	// CeilingBlock is how far the committed ceiling is ahead of the last revision, and so the largest gap that the loss
	// of a sequencer leaves, while few revisions are allocated.
	CeilingBlock = 10_000
	// MaxCeilingBlock is the same at any rate.
	MaxCeilingBlock = 100_000
	// blockCommits is for how many commits of a ceiling a block is enough. Half of it is left when the next one is
	// proposed, so allocations wait only for a commit that takes four times as long as the last one.
	blockCommits = 8
)

// phase is what an allocator does in its term.
type phase uint8

const (
	// following: this node does not lead, or not yet with an entry of its own term
	// applied. Everything is refused.
	following phase = iota
	// starting: it leads, and waits for its first ceiling. Batches wait.
	starting
	// serving: it allocates.
	serving
	// ending: allocations have ended; the lowered ceiling is not committed yet.
	ending
	// ended: the ceiling is committed at the last revision. Only repeated numbers are
	// answered.
	ended
)

// String returns the phase's name.
func (p phase) String() string {
	return [...]string{"following", "starting", "serving", "ending", "ended"}[p]
}

// waitingBatch is a batch that waits for its answer.
type waitingBatch struct {
	from Process
	Batch
	// confirmed says that this node was known to lead at a moment after the batch had
	// arrived.
	confirmed bool
	// round is the ReadIndex round whose end will confirm the ask, 0 for none.
	round uint64
	// done gets the answer, once, outside all locks.
	done func(Grant, error)
}

// remembered is the last answer to one process.
type remembered struct {
	boot  keyspace.BootID
	total int
	grant Grant
}

// processesPerNode is how many processes of one node the answers are remembered
// of: the running one, and the one before it, of which something may still arrive.
const processesPerNode = 2

// output is what an allocator wants done after an input. The owner does it outside
// its lock and reports back.
type output struct {
	// answers are answered asks.
	answers []answered
	// raise is the ceiling to propose, 0 for none. It is answered by ceilingApplied or
	// ceilingDropped.
	raise keyspace.Revision
	// lower is the ceiling to propose lowering to, 0 for none; answered alike.
	lower keyspace.Revision
	// readIndex is the number of a ReadIndex round to begin, 0 for none; answered by
	// roundDone.
	readIndex uint64
}

type answered struct {
	batch *waitingBatch
	grant Grant
	err   error
	// repeated says that the grant was given before.
	repeated bool
}

// allocator is the sequencer without locks, clocks, raft and network: a state
// machine whose inputs are its methods and whose outputs are lists of things to
// do. See S1 to S4 of the package.
type allocator struct {
	phase phase
	term  uint64
	// last is the last revision allocated, ceiling the committed one.
	last, ceiling keyspace.Revision
	// block is how far the next ceiling is ahead. raisedAt was the last revision when the newest ceiling was proposed.
	block, raisedAt keyspace.Revision
	// raising says that a higher ceiling, lowering that a lower one is proposed and
	// its fate not known.
	raising, lowering bool
	// resuming says that allocations start again as soon as the lowering has settled. closed
	// says that they never do: the node stops.
	resuming, closed bool
	// leader is who is asked next, once allocations have ended; 0 is unknown.
	leader keyspace.NodeID

	compacted, settings keyspace.Revision
	access              keyspace.AccessIndex
	// loading is the load of the cluster, nil if there was none.
	loading *fsm.Loading

	// waiting are asks in the order of their arrival, at most one per process.
	waiting []*waitingBatch
	// round is the last ReadIndex round that was begun, and open whether it runs.
	round uint64
	open  bool
	// memory holds the last answers, the newest process first.
	memory map[keyspace.NodeID][]remembered
	log    *AllocationLog
	// asked counts the revisions that each node got in this term.
	asked map[keyspace.NodeID]uint64
}

func newAllocator(log *AllocationLog) *allocator {
	return &allocator{memory: map[keyspace.NodeID][]remembered{}, log: log, asked: map[keyspace.NodeID]uint64{}}
}

// lead starts a term: an entry of it is applied, and ceiling is what the terms before have
// left. Numbers start above it, and none is given until a higher ceiling is committed. It is
// proposed with the first batch and not before. When all nodes stop, a leader that is elected
// after the lowering must not raise the ceiling again for nobody (trap 67).
func (c *allocator) lead(term uint64, ceiling keyspace.Revision) (out output) {
	if term <= c.term {
		panic(fmt.Sprintf("placement: sequencer of term %d led in term %d before", term, c.term))
	}
	out = c.follow(0)
	c.term, c.phase = term, starting
	if c.closed {
		c.phase = ended
	}
	c.last, c.ceiling, c.block = ceiling, ceiling, CeilingBlock
	c.log.restart(term, ceiling)
	return out
}

// follow ends the term: all that wait are refused, all answers forgotten.
func (c *allocator) follow(leader keyspace.NodeID) (out output) {
	c.phase, c.leader = following, leader
	c.raising, c.lowering, c.resuming, c.open = false, false, false, false
	clear(c.memory)
	clear(c.asked)
	c.log.restart(0, 0)
	c.refuseAll(&out)
	return out
}

func (c *allocator) refuseAll(out *output) {
	for _, a := range c.waiting {
		out.answers = append(out.answers, answered{batch: a, err: c.refusal()})
	}
	c.waiting = nil
}

// refusal is the answer of an allocator that does not serve.
func (c *allocator) refusal() error {
	return &kverror.Error{Kind: kverror.NotLeader, Leader: c.leader}
}

// observe takes over what the answers say of the state machine.
func (c *allocator) observe(compacted, settings keyspace.Revision, access keyspace.AccessIndex) {
	c.compacted, c.settings, c.access = compacted, settings, access
}

// observeLoad takes over how far the load of the cluster is, as of the entry that has set the ceiling. When it has
// finished, the source's last revision is the last one allocated.
func (c *allocator) observeLoad(l *fsm.Loading, ceiling keyspace.Revision) {
	ended := c.loading.Active() && !l.Active()
	if c.loading = l; !ended || c.phase == following {
		return
	}
	c.last, c.ceiling = ceiling, ceiling
	c.log.restart(c.term, ceiling)
}

// answerLoading answers all that wait while the cluster is loaded: nothing is allocated. Once it follows its source,
// the current revision is the position.
func (c *allocator) answerLoading(out *output) {
	kept := c.waiting[:0]
	for _, a := range c.waiting {
		switch position := c.loading.Position; {
		case a.Total() > 0 || c.loading.Phase != fsm.PhaseFollow:
			out.answers = append(out.answers, answered{batch: a, err: c.loading.Err()})
		case !a.confirmed:
			kept = append(kept, a)
		default:
			g := Grant{Number: a.Number, Term: c.term, Before: position, Compacted: c.compacted, Settings: c.settings, Access: c.access}
			c.remember(a, g)
			out.answers = append(out.answers, answered{batch: a, grant: g})
		}
	}
	clear(c.waiting[len(kept):])
	c.waiting = kept
}

// arrive takes a batch. It is answered at once where it repeats the last number of
// its process or cannot be served; else it waits for advance.
func (c *allocator) arrive(a *waitingBatch) (out output) {
	if c.phase == following {
		out.answers = append(out.answers, answered{batch: a, err: c.refusal()})
		return out
	}
	if answer, known := c.recall(a); known {
		out.answers = append(out.answers, answer)
		return out
	}
	if c.phase == ending || c.phase == ended {
		out.answers = append(out.answers, answered{batch: a, err: c.refusal()})
		return out
	}
	for i, w := range c.waiting {
		if w.from != a.from {
			continue
		}
		if w.Number > a.Number {
			out.answers = append(out.answers, answered{batch: a, err: errOldNumber(a.Number, w.Number)})
			return out
		}
		// The process has given up the call that brought the older one. A repeated
		// content keeps its place, and what is known about its arrival.
		if w.Number == a.Number {
			a.confirmed, a.round = w.confirmed, w.round
		}
		c.waiting[i] = a
		out.answers = append(out.answers, answered{batch: w, err: kverror.Canceled})
		return out
	}
	c.waiting = append(c.waiting, a)
	return out
}

func errOldNumber(got, had uint64) error {
	return kverror.New(kverror.Dropped, "batch %d arrived after batch %d of the same process", got, had)
}

// recall answers a batch whose number is not above the last one of its process.
func (c *allocator) recall(a *waitingBatch) (answer answered, known bool) {
	for _, m := range c.memory[a.from.Node] {
		if m.boot != a.from.Boot || a.Number > m.grant.Number {
			continue
		}
		switch {
		case a.Number < m.grant.Number:
			return answered{batch: a, err: errOldNumber(a.Number, m.grant.Number)}, true
		case a.Total() != m.total:
			err := kverror.New(kverror.BadRequest, "batch %d asks for %d revisions, and for %d before", a.Number, a.Total(), m.total)
			return answered{batch: a, err: err}, true
		}
		return answered{batch: a, grant: m.grant, repeated: true}, true
	}
	return answered{}, false
}

// withdraw forgets an ask whose caller has left, unless it is answered.
func (c *allocator) withdraw(a *waitingBatch) (found bool) {
	for i, w := range c.waiting {
		if w == a {
			c.waiting = append(c.waiting[:i], c.waiting[i+1:]...)
			return true
		}
	}
	return false
}

// advance allocates as far as it can. lease says that this node holds the lease in the
// allocator's term. It was read after all waiting batches had arrived.
func (c *allocator) advance(lease bool) (out output) {
	loading := c.loading.Active() && (c.phase == starting || c.phase == serving)
	if c.phase == starting && len(c.waiting) > 0 {
		c.wantCeiling(&out)
	}
	if c.phase != serving && !loading {
		return out
	}
	if lease {
		for _, a := range c.waiting {
			a.confirmed = true
		}
	}
	if loading {
		c.answerLoading(&out)
	} else {
		c.grantConfirmed(&out)
	}
	c.beginRound(&out)
	c.wantCeiling(&out)
	return out
}

// grantConfirmed answers confirmed asks in the order of arrival, as far as the
// ceiling reaches. One that does not fit lets none behind it pass: it would starve.
func (c *allocator) grantConfirmed(out *output) {
	kept := c.waiting[:0]
	full := false
	for _, a := range c.waiting {
		switch total := keyspace.Revision(a.Total()); {
		case full || !a.confirmed:
			kept = append(kept, a)
		case c.last+total >= keyspace.MaxRevision:
			out.answers = append(out.answers, answered{batch: a, err: kverror.New(kverror.NoSpace, "revisions are used up at %d", c.last)})
		case c.last+total > c.ceiling:
			full = true
			kept = append(kept, a)
		default:
			out.answers = append(out.answers, answered{batch: a, grant: c.grant(a)})
		}
	}
	clear(c.waiting[len(kept):])
	c.waiting = kept
}

// grant allocates the batch's revisions.
func (c *allocator) grant(a *waitingBatch) Grant {
	g := Grant{Number: a.Number, Term: c.term, Before: c.last, Compacted: c.compacted, Settings: c.settings, Access: c.access}
	if mutation.Is(mutation.CompactionUnseen) {
		g.Compacted = -1
	}
	if mutation.Is(mutation.RightsUnknownFirst) && len(c.memory) == 0 {
		g.Access = 0
	}
	for i := range a.Items {
		it := &a.Items[i]
		n := g.count(it)
		if mutation.Is(mutation.RefusedCounted) {
			n = keyspace.Revision(it.Count)
		}
		if n == 0 {
			continue
		}
		c.log.append(Allocation{First: c.last + 1, Count: it.Count, Range: it.Range, Generation: it.Generation}, it.Also...)
		c.last += n
	}
	if c.last > c.ceiling {
		panic(fmt.Sprintf("placement: revision %d allocated above the ceiling %d", c.last, c.ceiling))
	}
	if n := c.last - g.Before; n > 0 {
		c.asked[a.from.Node] += uint64(n)
		c.log.tell()
	}
	c.remember(a, g)
	return g
}

func (c *allocator) remember(a *waitingBatch, g Grant) {
	m := remembered{boot: a.from.Boot, total: a.Total(), grant: g}
	mem := c.memory[a.from.Node]
	for i := range mem {
		if mem[i].boot == m.boot {
			mem = append(mem[:i], mem[i+1:]...)
			break
		}
	}
	if len(mem) == processesPerNode {
		mem = mem[:processesPerNode-1]
	}
	c.memory[a.from.Node] = append([]remembered{m}, mem...)
}

// beginRound begins a ReadIndex round for asks that nothing will confirm yet. One
// round runs at a time: what arrives meanwhile waits for the next, since a round
// proves nothing about a moment after its begin.
func (c *allocator) beginRound(out *output) {
	if c.open {
		return
	}
	for _, a := range c.waiting {
		if a.confirmed {
			continue
		}
		if !c.open {
			c.open = true
			c.round++
			out.readIndex = c.round
		}
		a.round = c.round
	}
}

// roundDone ends a ReadIndex round: ok says that it proved this node to lead in
// the allocator's term. The owner calls advance next, which begins another round for
// whoever still needs one.
func (c *allocator) roundDone(round uint64, ok bool) {
	if !c.open || round != c.round {
		return
	}
	c.open = false
	for _, a := range c.waiting {
		if a.round == round {
			a.confirmed = a.confirmed || ok
			a.round = 0
		}
	}
}

// wantCeiling proposes the next ceiling when less than half a block is left, so
// that allocations seldom wait for it, or when the first batch does not fit. The ceiling never is more than the largest
// block ahead of the last revision.
func (c *allocator) wantCeiling(out *output) {
	if c.raising || c.lowering || c.loading.Active() || (c.phase != starting && c.phase != serving) {
		return
	}
	to := min(c.last+c.block, keyspace.MaxRevision-1)
	short := c.ceiling-c.last < c.block/2 ||
		len(c.waiting) > 0 && c.last+keyspace.Revision(c.waiting[0].Total()) > c.ceiling
	if short && to > c.ceiling {
		c.raising, c.raisedAt = true, c.last
		out.raise = to
	}
}

// ceilingApplied says that the ceiling proposed last, in this term, is committed
// and applied.
func (c *allocator) ceilingApplied(term uint64, ceiling keyspace.Revision) (out output) {
	if term != c.term || c.phase == following {
		return out
	}
	c.ceiling = ceiling
	if c.lowering {
		c.lowering = false
		if c.last != ceiling {
			panic(fmt.Sprintf("placement: ceiling lowered to %d, revision %d allocated", ceiling, c.last))
		}
		c.phase = ended
	}
	if c.raising {
		c.raising = false
		c.adaptBlock()
	}
	if c.phase == starting && c.ceiling > c.last {
		c.phase = serving
	}
	c.settled(&out)
	return out
}

// adaptBlock sets the size of the next block, when a ceiling is committed.
func (c *allocator) adaptBlock() {
	next := blockCommits * (c.last - c.raisedAt)
	if len(c.waiting) > 0 && c.waiting[0].confirmed {
		next = 4 * c.block // the old ceiling was reached, so more was wanted
	}
	c.block = min(max(next, CeilingBlock), MaxCeilingBlock)
}

// ceilingDropped says that the ceiling proposed last in this term was certainly
// not appended. The owner calls retryCeiling after a pause.
func (c *allocator) ceilingDropped(term uint64) {
	if term == c.term {
		c.raising, c.lowering = false, false
	}
}

// retryCeiling proposes again what was dropped.
func (c *allocator) retryCeiling() (out output) {
	c.settled(&out)
	if c.phase == serving || len(c.waiting) > 0 {
		c.wantCeiling(&out)
	}
	return out
}

// end ends the allocations: all that wait and all that comes is refused with next as
// the hint; then the ceiling is lowered. The ceiling is proposed only when no other
// one is under way, so that none can overtake it in the log.
func (c *allocator) end(next keyspace.NodeID) (out output) {
	c.resuming = false
	if c.phase != starting && c.phase != serving {
		return out
	}
	c.phase, c.leader, c.open = ending, next, false
	c.refuseAll(&out)
	c.settled(&out)
	return out
}

// close ends the allocations for good: in this term, and in any other that this node leads.
func (c *allocator) close() output {
	c.closed = true
	return c.end(0)
}

// resume starts the allocations again, under a new ceiling, after end was in vain.
func (c *allocator) resume() (out output) {
	if c.closed || c.phase != ending && c.phase != ended {
		return out
	}
	c.resuming = true
	c.settled(&out)
	return out
}

// settled goes on where a change of the ceiling was waited for.
func (c *allocator) settled(out *output) {
	if c.raising || c.lowering {
		return
	}
	if c.resuming {
		c.resuming = false
		c.phase, c.leader = starting, 0
		if c.ceiling > c.last {
			c.phase = serving // it was never lowered
		}
		return
	}
	if c.phase == ending && c.ceiling == c.last {
		c.phase = ended // nothing was allocated under this ceiling: it is as low as it can be
		return
	}
	if c.phase == ending {
		c.lowering = true
		out.lower = c.last
	}
}
