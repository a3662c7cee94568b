package sim

import (
	"context"
	"time"
)

// BootLoop cuts the power of a node again and again, soon after it has started, until placement has
// given all its replicas to others. It is never silent for as long as a node that counts as lost, and
// its ranges have a voter less each time.
const BootLoop Fault = "boots in a row"

// repairedBeside is how soon the replicas of such a node must be elsewhere: it counts as lost after
// deadAfter, and copies take their time.
const repairedBeside = deadAfter + 22*time.Second

func (n *nemesis) bootLoop() func() error {
	m := n.holder()
	if m == nil {
		return func() error { return nil }
	}
	for begin := n.c.elapsed(); n.holds(m); {
		if took := n.c.elapsed() - begin; took > repairedBeside {
			n.found("not repaired %v after node %s began to start again and again: it has replicas", took, m.id())
			break
		}
		n.c.crash(n.keep(), m)
		n.c.sleep(n.between(50*time.Millisecond, 500*time.Millisecond))
		if err := m.boot(); err != nil {
			return func() error { return err }
		}
		n.c.sleep(n.between(100*time.Millisecond, deadAfter/6))
	}
	n.happened[BootLoop]++
	return m.boot
}

// holder returns a machine with replicas that is not the sequencer's: a new sequencer begins anew to
// count how often nodes start.
func (n *nemesis) holder() *machine {
	sequencer := n.sequencerMachine()
	ms := n.c.standing()
	for _, i := range n.rng.Perm(len(ms)) {
		if m := ms[i]; m != sequencer && m.current() != nil && n.holds(m) {
			return m
		}
	}
	return nil
}

// holds says whether a range has a replica on the machine's node, by the map of another one.
func (n *nemesis) holds(m *machine) bool {
	for o, r := range n.c.runs() {
		if o == m {
			continue
		}
		ctx, cancel := context.WithTimeout(r.ctx, askTimeout)
		ds, err := r.core.Placement().RangeMap(ctx)
		cancel()
		if err != nil {
			continue
		}
		for _, d := range ds {
			if _, ok := d.ReplicaOn(m.id()); ok {
				return true
			}
		}
		return false
	}
	return true // nobody knows
}
