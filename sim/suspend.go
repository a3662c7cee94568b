package sim

import "context"

// sequencerAlone returns the machine of the sequencer's node once the node leads no range, nil
// if that does not come.
func (n *nemesis) sequencerAlone() *machine {
	for range 10 {
		m := n.sequencerMachine()
		if m == nil {
			break
		}
		r := m.current()
		if r == nil {
			break
		}
		// A node that is suspended already does not answer, and its own clock ends no wait.
		led := false
		ctx, cancel := context.WithTimeout(r.ctx, election)
		held, err := r.core.Ranges().List(ctx, m.id())
		for i := range held {
			if held[i].IsLeader {
				led = true
				_ = r.core.Ranges().TransferTo(ctx, m.id(), held[i].Descriptor.Range, 0)
			}
		}
		cancel()
		if err == nil && !led {
			return m
		}
		n.c.sleep(election / 5)
	}
	return nil
}

// suspend pauses a machine while its clock stands still. Nothing in a paused machine runs, so
// clients cannot ask its node meanwhile.
func (n *nemesis) suspend(f Fault, m *machine) func() error {
	r := m.current()
	if r == nil {
		return func() error { return nil }
	}
	n.happened[f]++
	n.c.logf("nemesis: suspend node %s", m.id())
	r.suspend(true)
	m.clock.Suspend()
	n.c.net.Pause(m.id())
	began := n.c.elapsed()
	return func() error {
		n.c.logf("nemesis: node %s goes on", m.id())
		if f != SuspendSeen {
			m.clock.StepWall(began - n.c.elapsed())
		}
		m.clock.Resume()
		if f == SuspendSeen {
			n.c.sleep(election / 5)
		}
		if f != SuspendSequencer { // clients come before the network tells the node what has happened
			r.suspend(false)
			n.c.sleep(n.between(0, election/2))
		}
		n.c.net.Resume(m.id())
		r.suspend(false)
		return nil
	}
}
