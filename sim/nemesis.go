package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim/judge"
	"github.com/skeindb/skein/sim/simbus"
)

// flaky is the network of Flaky.
var flaky = simbus.Faults{
	Delay: simbus.Delay{Min: 100 * time.Microsecond, Max: 3 * time.Millisecond, Tail: 0.02, TailMean: 20 * time.Millisecond},
	Loss:  0.03, Duplicate: 0.03, Reorder: 0.1, ReorderBy: 10 * time.Millisecond, Break: 0.0005,
}

// nemesis injects faults. It belongs to one goroutine, except splits.
type nemesis struct {
	c   *cluster
	rng *rand.Rand
	// happened counts the faults that took effect.
	happened map[Fault]int
	// loadHappened and loadSplits are those of the load. They keep no promise of what comes later.
	loadHappened map[Fault]int
	loadSplits   int64
	// met counts the pairs of faults that were there at the same time.
	met map[Pair]int
	// splits, compactions, moves, merges and systemMoves count the successful ones.
	// losses counts the machines that are lost for good.
	splits, compactions, moves, merges, systemMoves, losses atomic.Int64
	// kept is what compactions may have removed. It belongs to compactLoop while that
	// runs.
	kept *keptVersions
	// cutter is who makes cuts, nil if nobody does.
	cutter *cutter
	// home is the machine that leads everything, if one does.
	home *machine
	// unbuilt says that replicas in quarantine were not rebuilt in time.
	unbuilt bool
	// failures counts the injected faults: each may leave a gap in the revisions.
	failures int
	// These count the work of joinLoop. joins are nodes that joined, leaves those that left
	// for good. refusals are nodes that were refused after the loss of their disks, besides
	// those refused while another node joined. deaths are nodes that lost their power while
	// they joined.
	joins, leaves, refusals, besides, deaths atomic.Int64
	// leaving is the node that is to leave and has not left, if there is one. It belongs
	// to joinLoop while that runs.
	leaving *leaver

	mu sync.Mutex
	// wrong is the list of violations. Guarded by mu.
	wrong []string
}

func newNemesis(c *cluster) *nemesis {
	return &nemesis{c: c, rng: rand.New(rand.NewPCG(c.cfg.Seed, 2)), happened: map[Fault]int{}, met: map[Pair]int{}}
}

// run injects the faults of the configuration in a random order, sometimes two at a time,
// unless one node must fail alone with all that it leads.
func (n *nemesis) run() error {
	if n.c.cfg.Pairs {
		return n.inPairs()
	}
	faults := append([]Fault(nil), n.c.cfg.Faults...)
	n.rng.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for i := 0; i < len(faults) && !n.broken() && !n.unbuilt; i++ {
		if n.c.cfg.Together {
			n.gather()
			n.c.sleep(n.between(300*time.Millisecond, 900*time.Millisecond)) // it must serve first
		}
		if n.rng.IntN(3) > 0 {
			n.c.sleep(n.c.intoBurst(n.rng)) // the faults must hit work under way
		}
		heal := []func() error{n.inject(faults[i])}
		n.c.sleep(n.lasts())
		most := faults[i] == CrashTwo || faults[i] == CrashAll // no target is left for another fault
		if i+1 < len(faults) && n.rng.IntN(3) == 0 && !most && !n.c.cfg.Together && !excludes(faults[i], faults[i+1]) {
			i++
			heal = append(heal, n.inject(faults[i]))
			n.met[pairOf(faults[i-1], faults[i])]++
			n.c.sleep(n.between(300*time.Millisecond, 1500*time.Millisecond))
		}
		if err := n.heal(heal); err != nil {
			return err
		}
	}
	return n.again()
}

// heal ends faults and gives the cluster time to serve.
func (n *nemesis) heal(heal []func() error) error {
	for _, h := range heal {
		if err := h(); err != nil {
			return err
		}
	}
	n.c.sleep(n.between(1500*time.Millisecond, 4*time.Second))
	n.awaitRebuilt()
	return nil
}

// again injects a fault once more, alone, if it had no effect beside another fault:
// there was no node left to be cut off from, or to take the sequencer over.
func (n *nemesis) again() error {
	for range 3 {
		for _, f := range n.c.cfg.Faults {
			if n.took(f) || n.broken() || n.unbuilt {
				continue
			}
			h := n.inject(f)
			n.c.sleep(n.lasts())
			if err := n.heal([]func() error{h}); err != nil {
				return err
			}
		}
	}
	return nil
}

// lasts chooses how long a fault lasts. A leader's wrong belief ends about an election
// timeout after it was true, so many faults end then. If one node leads everything, the
// fault mostly lasts until others lead.
func (n *nemesis) lasts() time.Duration {
	switch {
	case n.c.cfg.Lasts > 0:
		return n.between(n.c.cfg.Lasts, n.c.cfg.Lasts*3/2)
	case n.rng.IntN(4) == 0:
		return n.aboutLease()
	case n.home != nil:
		return n.between(election*13/10, election*3)
	}
	return n.between(300*time.Millisecond, 2500*time.Millisecond)
}

// aboutLease chooses a time just below or above an election timeout.
func (n *nemesis) aboutLease() time.Duration {
	return n.between(election*8/10, election*13/10)
}

// excludes says whether two faults may not meet. A direction has only one kind of
// network fault. A paused node, or one that waits for its disk, can neither stop in
// order nor notice a failed sync. Two restarts of three nodes are a failure, while one
// is not. A repair in time needs the other nodes. The wall clock that SuspendSeen sets is not right where
// ClockStep has set it, and then nobody sees the suspension in time, as --lease-reads says.
func excludes(a, b Fault) bool {
	weather := []Fault{Flaky, Slow}
	still := []Fault{Pause, PauseLeader, Suspend, SuspendSeen, SuspendSequencer, Stall, SickLeader}
	moves := []Fault{Restart, SyncError, Rot}
	return slices.Contains(weather, a) && slices.Contains(weather, b) ||
		slices.Contains(moves, a) && slices.Contains(still, b) ||
		slices.Contains(moves, b) && slices.Contains(still, a) ||
		a == BootLoop || b == BootLoop ||
		a == SuspendSeen && b == ClockStep || a == ClockStep && b == SuspendSeen ||
		slices.Contains([]Fault{Restart, Rot}, a) && slices.Contains([]Fault{Restart, Rot}, b)
}

func (n *nemesis) between(from, to time.Duration) time.Duration {
	return from + time.Duration(n.rng.Int64N(int64(to-from)))
}

// inject begins a fault and returns the function that ends it.
func (n *nemesis) inject(f Fault) (heal func() error) {
	n.c.logf("nemesis: %s", f)
	if f != Restart && f != Drift && f != ClockStep && f != Transfer {
		n.failures++
	}
	switch f {
	case Restart:
		return n.restart()
	case CrashOne, CrashTwo, CrashAll:
		return n.crash(f)
	case CrashLoop:
		return n.crashLoop()
	case SyncError:
		return n.syncError()
	case Isolate, IsolateLeader:
		m := n.pick()
		if f == IsolateLeader {
			m = n.leader()
		}
		if len(n.c.runs()) > 1 {
			n.happened[f]++
		}
		n.c.logf("nemesis: cut off node %s", m.id())
		n.c.net.Partition(m.id())
		if n.c.cfg.mutation.freeze {
			m.clock.SetRate(0.01)
		}
		return func() error {
			m.clock.SetRate(m.rate)
			return n.healNetwork()
		}
	case DeafLeader, MuteLeader:
		return n.oneSided(f, n.leader())
	case Blink:
		return n.blink(n.leader())
	case Transfer:
		return n.transfer()
	case Overtake:
		return n.overtake()
	case OneWay:
		return n.oneWay()
	case Pause:
		return n.pause(f, n.pick())
	case PauseLeader:
		return n.pause(f, n.leader())
	case Suspend, SuspendSeen:
		return n.suspend(f, n.leader())
	case SuspendSequencer:
		if m := n.sequencerAlone(); m != nil {
			return n.suspend(f, m)
		}
		return func() error { return nil }
	case Stall:
		return n.stall(f, n.pick())
	case SickLeader:
		return n.sickLeader()
	case CutOff:
		return n.cutOff()
	case Rot:
		return n.rot()
	case BootLoop:
		return n.bootLoop()
	default:
		n.happened[f]++
		return n.world(f)
	}
}

// world begins a fault of clocks or network that concerns all nodes.
func (n *nemesis) world(f Fault) (heal func() error) {
	switch f {
	case Drift:
		for _, m := range n.c.machines {
			m.clock.SetRate(1 + (n.rng.Float64()-0.5)*2*judge.MaxDrift)
		}
	case ClockStep:
		for _, m := range n.c.machines {
			m.clock.StepWall(time.Duration(n.rng.Int64N(int64(2*time.Hour))) - time.Hour)
		}
	case Apart:
		ms := n.c.members()
		at := n.rng.Perm(len(ms))
		a, b := ms[at[0]].id(), ms[at[1]].id()
		n.c.logf("nemesis: nothing between nodes %s and %s", a, b)
		n.c.net.Cut(a, b)
		n.c.net.Cut(b, a)
		return n.healNetwork
	case TwoApart:
		n.twoApart()
		return n.healNetwork
	case Flaky:
		n.c.net.SetStandard(flaky)
		n.c.sleep(time.Second)
		n.await(10*time.Second, func() bool { // with few messages each fault should still happen
			st := n.c.net.Stats()
			return st.Lost > 0 && st.Duplicated > 0 && st.Reordered > 0
		})
		return n.calmNetwork
	case Slow:
		for _, a := range n.c.machines {
			for _, b := range n.c.machines {
				d := n.between(time.Millisecond, 60*time.Millisecond)
				n.c.net.SetFaults(a.id(), b.id(), simbus.Faults{Delay: simbus.Delay{Min: d / 2, Max: d}})
			}
		}
		return n.calmNetwork
	default:
		panic(fmt.Sprintf("sim: no such fault: %q", f))
	}
	return func() error { return nil }
}

// oneWay cuts one direction between two members.
func (n *nemesis) oneWay() func() error {
	ms := n.c.members()
	at := n.rng.Perm(len(ms))
	from, to := ms[at[0]].id(), ms[at[1]].id()
	n.happened[OneWay]++
	n.c.logf("nemesis: nothing from node %s to node %s", from, to)
	n.c.net.Cut(from, to)
	return n.healNetwork
}

// twoApart cuts two links between members, in both directions.
func (n *nemesis) twoApart() {
	ms := n.c.members()
	var links [][2]keyspace.NodeID
	for i, a := range ms {
		for _, b := range ms[:i] {
			links = append(links, [2]keyspace.NodeID{a.id(), b.id()})
		}
	}
	n.rng.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
	for _, l := range links[:2] {
		n.c.logf("nemesis: nothing between nodes %s and %s", l[0], l[1])
		n.c.net.Cut(l[0], l[1])
		n.c.net.Cut(l[1], l[0])
	}
}

// calmNetwork ends the faults of Flaky and Slow.
func (n *nemesis) calmNetwork() error {
	n.c.net.SetStandard(calm)
	n.c.net.ClearFaults()
	return nil
}

// healNetwork ends all cuts. A machine that is paused stays so. No real machine uses the network while its
// clock stands still.
func (n *nemesis) healNetwork() error {
	n.c.logf("nemesis: heal the network")
	n.c.net.HealCuts()
	return nil
}

// pick chooses a machine, one that is up if there is any.
func (n *nemesis) pick() *machine {
	ms := n.c.members()
	at := n.rng.IntN(len(ms))
	for i := range ms {
		if m := ms[(at+i)%len(ms)]; m.current() != nil {
			return m
		}
	}
	return ms[at]
}

func (n *nemesis) crash(f Fault) func() error {
	members := n.c.members()
	count := map[Fault]int{CrashOne: 1, CrashTwo: 2, CrashAll: len(members)}[f]
	var ms []*machine
	for _, i := range n.rng.Perm(len(members))[:count] {
		ms = append(ms, members[i])
	}
	n.c.crash(n.keep(), ms...)
	n.happened[f]++
	return func() error {
		// Each returns in its own time.
		errs := make([]error, len(ms))
		var wg sync.WaitGroup
		for i, m := range ms {
			wait := n.between(0, 800*time.Millisecond)
			wg.Go(func() {
				n.c.sleep(wait)
				errs[i] = m.boot()
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	}
}

// keep chooses how many percent of the unsynced data survive a crash.
func (n *nemesis) keep() int { return []int{0, 0, 50, 90, n.rng.IntN(100)}[n.rng.IntN(5)] }

func (n *nemesis) crashLoop() func() error {
	m := n.pick()
	for range 3 {
		n.c.crash(n.keep(), m)
		if err := m.boot(); err != nil {
			return func() error { return err }
		}
		n.c.sleep(n.between(0, 400*time.Millisecond))
	}
	n.c.crash(n.keep(), m)
	n.happened[CrashLoop]++
	return m.boot
}

// giveUpWithin is how soon a node must notice that its disk has failed. Its wal is
// probed at least this often.
const giveUpWithin = 5 * time.Second

func (n *nemesis) syncError() func() error {
	m := n.pick()
	r := m.current()
	if r == nil {
		return func() error { return nil }
	}
	m.mu.Lock()
	m.disk.failing.Store(true)
	m.mu.Unlock()
	t := n.c.time.NewTimer(giveUpWithin)
	defer t.Stop()
	select {
	case <-r.core.Fatal():
		n.happened[SyncError]++
		n.c.logf("nemesis: node %s gives up: %v", m.id(), r.core.Err())
	case <-r.ctx.Done(): // another one was faster
		return m.boot
	case <-t.C():
		return func() error {
			return fmt.Errorf("sim: node %s goes on, %v after its wal could not be synced", m.id(), giveUpWithin)
		}
	}
	n.c.crash(n.keep(), m)
	return m.boot
}

func (n *nemesis) restart() func() error {
	m := n.pick()
	if m.current() != nil {
		n.happened[Restart]++
	}
	err := m.stop()
	return func() error {
		if err != nil {
			return err
		}
		return m.boot()
	}
}

func (n *nemesis) pause(f Fault, m *machine) func() error {
	if m.current() != nil {
		n.happened[f]++
	}
	n.c.logf("nemesis: pause node %s", m.id())
	m.clock.Pause()
	n.c.net.Pause(m.id())
	return func() error {
		n.c.logf("nemesis: resume node %s", m.id())
		m.clock.Resume()
		n.c.net.Resume(m.id())
		return nil
	}
}

func (n *nemesis) stall(f Fault, m *machine) func() error {
	m.mu.Lock()
	d := m.disk
	m.mu.Unlock()
	n.c.logf("nemesis: the disk of node %s stands still", m.id())
	waits, release := d.stall()
	return func() error {
		n.c.logf("nemesis: the disk of node %s goes on", m.id())
		select {
		case <-waits:
			n.happened[f]++
		default: // nothing was written
		}
		release()
		return nil
	}
}

// sickLeader makes a leader's disk hang and then stops its incoming messages, about an
// election timeout after the first sync that does not return. The others then hear that it
// is not well.
func (n *nemesis) sickLeader() func() error {
	m := n.leader()
	m.mu.Lock()
	d := m.disk
	m.mu.Unlock()
	n.c.logf("nemesis: the disk of node %s stands still", m.id())
	waits, release := d.stall()
	t := n.c.time.NewTimer(2 * election) // a node that does not wait for its disk yet
	defer t.Stop()
	select {
	case <-waits:
		n.happened[SickLeader]++
	case <-t.C():
	}
	n.c.sleep(n.between(election*8/10, election))
	n.deafen(m)
	return func() error {
		n.c.logf("nemesis: the disk of node %s goes on", m.id())
		release()
		return n.healNetwork()
	}
}

func (n *nemesis) deafen(m *machine) {
	n.c.logf("nemesis: node %s hears nobody", m.id())
	for _, o := range n.c.machines {
		if o != m {
			n.c.net.Cut(o.id(), m.id())
		}
	}
}

// oneSided cuts one direction between a node and all others.
func (n *nemesis) oneSided(f Fault, m *machine) func() error {
	n.happened[f]++
	if f == DeafLeader {
		n.deafen(m)
		return n.healNetwork
	}
	n.c.logf("nemesis: nobody hears node %s", m.id())
	for _, o := range n.c.machines {
		if o != m {
			n.c.net.Cut(m.id(), o.id())
		}
	}
	return n.healNetwork
}

// blink cuts a node off again and again. Each cut lasts until others may just lead in
// its place, or until it may just lead again itself.
func (n *nemesis) blink(m *machine) func() error {
	for range 2 + n.rng.IntN(2) {
		n.c.logf("nemesis: cut off node %s, for a moment", m.id())
		n.c.net.Partition(m.id())
		n.c.sleep(n.aboutLease())
		_ = n.healNetwork()
		n.c.sleep(n.between(50*time.Millisecond, 400*time.Millisecond))
	}
	n.happened[Blink]++
	return n.healNetwork
}

// transfer moves the sequencer to another node that is up. A fault may prevent it; then
// it is done after healing.
func (n *nemesis) transfer() func() error {
	move := func() bool {
		to := n.pick()
		if r := to.current(); r == nil || n.sequencer(r) == to.id() || !n.moveSequencer(to) {
			return false
		}
		n.happened[Transfer]++
		return true
	}
	done := move()
	return func() error {
		for try := 0; !done && try < 20; try++ {
			n.c.sleep(300 * time.Millisecond)
			done = move()
		}
		return nil
	}
}

// overtake makes a node lose sight of the sequencer, and then moves the sequencer to
// where the node sees it again. A fault may prevent it.
func (n *nemesis) overtake() func() error {
	from := n.sequencerMachine()
	if from == nil {
		return n.healNetwork
	}
	others := slices.DeleteFunc(n.c.members(), func(m *machine) bool { return m == from })
	n.rng.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	blind, to := others[0], others[1]
	n.c.logf("nemesis: nothing between nodes %s and %s", from.id(), blind.id())
	n.c.net.Cut(from.id(), blind.id())
	n.c.net.Cut(blind.id(), from.id())
	n.c.sleep(n.between(300*time.Millisecond, 900*time.Millisecond))
	if n.moveSequencer(to) {
		n.happened[Overtake]++
	}
	return n.healNetwork
}

// gather moves the sequencer to the node that leads the range of the first hot key. The
// loss of that node then loses everything at once, and an isolated node could do alone
// all that it must not do.
func (n *nemesis) gather() {
	n.home = nil
	for _, m := range n.c.machines {
		if r := m.current(); r != nil && leads(m, r, hotKeys[0]) && n.moveSequencer(m) {
			n.home = m
			return
		}
	}
}

// moveSequencer makes a node the sequencer, and says whether it has become it.
func (n *nemesis) moveSequencer(to *machine) bool {
	r := to.current()
	if r == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(r.ctx, 2*askTimeout)
	defer cancel()
	if err := r.core.Placement().TransferLeader(ctx, to.id()); err != nil {
		n.c.logf("nemesis: the sequencer does not move to node %s: %v", to.id(), err)
		return false
	}
	n.c.logf("nemesis: the sequencer moves to node %s", to.id())
	return true
}

// cutOff isolates a node for longer than the others' logs reach back. On its return it
// receives snapshots, which its store takes in slowly. Its power goes soon after it
// reported one, or at any moment.
func (n *nemesis) cutOff() func() error {
	m := n.pick()
	for _, o := range n.c.machines {
		if n.c.cfg.ShortLogs && !o.shortLog && o.current() != nil && n.rng.IntN(3) > 0 {
			m = o // what it has not made durable needs a snapshot
		}
	}
	n.c.logf("nemesis: cut off node %s, for long", m.id())
	cut := n.cutOffs()
	n.c.net.Partition(m.id())
	n.c.sleep(n.between(2*time.Second, 4*time.Second))
	n.await(6*time.Second, func() bool { return !n.c.cfg.ShortLogs || n.cutOffs() > cut })
	n.happened[CutOff]++
	m.mu.Lock()
	m.disk.slowStore.Store(int64(n.between(100*time.Millisecond, 700*time.Millisecond)))
	m.mu.Unlock()
	if err := n.healNetwork(); err != nil {
		return func() error { return err }
	}
	if n.rng.IntN(4) == 0 {
		n.c.sleep(n.between(200*time.Millisecond, 2*time.Second))
	} else {
		n.awaitSnapshots(m, 1+n.rng.IntN(2))
		n.c.sleep(n.between(0, 60*time.Millisecond))
	}
	n.c.crash(n.keep(), m)
	return m.boot
}

// awaitSnapshots waits, not for long, until a node has installed so many more
// snapshots.
func (n *nemesis) awaitSnapshots(m *machine, more int) {
	if r := m.current(); r != nil {
		had := r.count(snapshotsReceived)
		n.await(4*time.Second, func() bool { return r.count(snapshotsReceived) >= had+more })
	}
}

// cutOffs counts how often the running nodes truncated their logs past what a follower
// needed.
func (n *nemesis) cutOffs() (sum int) {
	for _, r := range n.c.runs() {
		sum += r.count(followersCutOff)
	}
	return sum
}

// await waits until a condition holds, at most so long.
func (n *nemesis) await(most time.Duration, so func() bool) {
	for begin := n.c.elapsed(); !so() && n.c.elapsed()-begin < most; {
		n.c.sleep(5 * time.Millisecond)
	}
}

// askTimeout bounds the nemesis's own questions.
const askTimeout = time.Second

// leader returns a machine whose node leads something: the sequencer, or a range.
func (n *nemesis) leader() *machine {
	if n.home != nil {
		return n.home
	}
	sequencer := n.rng.IntN(3) > 0
	if sequencer {
		if m := n.sequencerMachine(); m != nil {
			return m
		}
		return n.pick()
	}
	for _, m := range n.c.machines {
		if r := m.current(); r != nil && leads(m, r, hotKeys[0]) {
			return m
		}
	}
	return n.pick()
}

// sequencerMachine returns the machine of the sequencer's node, nil if no running node
// knows of one that is up. Nodes may name one that has crashed, and a stopped clock or
// disk could keep that one from returning for ever.
func (n *nemesis) sequencerMachine() *machine {
	for _, m := range n.c.machines {
		if r := m.current(); r != nil {
			if s := n.c.machine(n.sequencer(r)); s != nil && s.current() != nil {
				return s
			}
		}
	}
	return nil
}

// sequencer returns the node that a node takes for the sequencer, 0 if it knows of
// none.
func (n *nemesis) sequencer(r *run) keyspace.NodeID {
	ctx, cancel := context.WithTimeout(r.ctx, askTimeout)
	defer cancel()
	st, err := r.core.Placement().Status(ctx)
	if err != nil {
		return 0
	}
	return st.Leader
}

// leads says whether the node on m leads the range of a key.
func leads(m *machine, r *run, key string) bool {
	l, err := r.core.Ranges().List(r.ctx, m.id())
	if err != nil {
		return false
	}
	for _, s := range l {
		if s.IsLeader && s.Descriptor.Span.Contains([]byte(key)) {
			return true
		}
	}
	return false
}

// missing names the faults of the configuration that never happened.
func (n *nemesis) missing() []string {
	var m []string
	promise := func(f Fault, ok bool) {
		if !ok {
			m = append(m, fmt.Sprintf("the fault %q never happened", f))
		}
	}
	for _, f := range n.c.cfg.Faults {
		promise(f, n.took(f))
	}
	if n.c.cfg.Splits > 0 {
		promise(Split, n.splits.Load() > n.loadSplits)
	}
	if n.c.cfg.Moves > 0 && n.c.cfg.Joins == 0 {
		// Each of three nodes has every range. A replica can move only while a fourth node is there.
		promise(Move, n.moves.Load() > 0)
	}
	if n.c.cfg.Merges > 0 {
		promise(Merge, n.merges.Load() > 0)
	}
	if n.c.cfg.SystemMoves > 0 {
		promise(SystemMove, n.systemMoves.Load() > 0)
	}
	if n.c.cfg.Lose > 0 {
		promise(Lose, n.losses.Load() > 0)
	}
	if n.c.cfg.Joins > 0 {
		promise(Join, n.joins.Load() > 0)
		promise(Leave, n.leaves.Load() > 0)
	}
	if t := n.cutter; t != nil {
		promise(FullCut, t.full > 0)
		promise(Increment, t.increments > 0)
	}
	if n.c.cfg.Compactions > 0 && n.happened[Rot] == 0 {
		// The versions that a compaction may remove are read from all stores before, also from
		// one that is not readable until its replicas are copied anew.
		promise(Compact, n.compactions.Load() > 0)
	}
	return m
}

// took says whether a fault has had an effect.
func (n *nemesis) took(f Fault) bool {
	st, happened := n.c.net.Stats(), n.happened[f] > n.loadHappened[f]
	switch f {
	case Isolate, IsolateLeader, OneWay, DeafLeader, MuteLeader, Blink, Apart, TwoApart, CutOff, Overtake:
		return happened && st.CutOff > 0
	case Flaky:
		return happened && st.Lost > 0 && st.Duplicated > 0 && st.Reordered > 0
	case CrashOne, CrashTwo, CrashAll:
		return happened && st.Crashes > 0
	default: // happened says all
		return happened
	}
}
