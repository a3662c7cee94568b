package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// Bounds of a run in which machines are lost for good.
const (
	// deadAfter is the nodes' --node-dead-after then. It is longer than a fault lasts,
	// so that a returning node is mostly in time.
	deadAfter = 8 * time.Second
	// repairedWithin is how long after healing every range has all its replicas on
	// existing machines. A new leader restarts the count of silence and first hears
	// everybody.
	repairedWithin = deadAfter + 50*time.Second
)

// standing returns the members that are not lost for good.
func (c *cluster) standing() (ms []*machine) {
	for _, m := range c.machines {
		if m.is(stateMember) && !m.isLost() {
			ms = append(ms, m)
		}
	}
	return ms
}

func (m *machine) isLost() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost
}

// loseLoop loses machines for good, each at a random moment, until stop is closed.
func (n *nemesis) loseLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	n.beside(stop, wg, repeat{times: n.c.cfg.Lose, least: 3 * time.Second, spread: 12 * time.Second, stream: 6}, func(rng *rand.Rand) {
		up := n.c.standing()
		n.lose(up[rng.IntN(len(up))])
	})
}

// lose removes a machine with its disk.
func (n *nemesis) lose(m *machine) {
	m.mu.Lock()
	m.lost = true
	m.mu.Unlock()
	n.c.logf("nemesis: node %s is lost for good", m.id())
	n.c.crash(0, m)
	n.losses.Add(1)
}

// repaired waits until every range has all its voters, and nothing else, on existing
// machines.
func repaired(rep *Report, c *cluster) bool {
	if c.cfg.Lose == 0 && c.cfg.Joins == 0 {
		return true
	}
	for begin := c.elapsed(); ; c.sleep(100 * time.Millisecond) {
		err := fullyReplicated(c)
		if err == nil {
			return true
		}
		if c.elapsed()-begin > repairedWithin {
			rep.Violate("not repaired %v after healing: %v", c.elapsed()-begin, err)
			return false
		}
	}
}

func fullyReplicated(c *cluster) error {
	ctx := context.Background()
	there := map[keyspace.NodeID]bool{}
	for _, m := range c.standing() {
		there[m.id()] = true
	}
	for _, m := range c.standing() {
		ds, err := m.current().core.Placement().RangeMap(ctx)
		if err != nil {
			return fmt.Errorf("range map of node %s: %w", m.id(), err)
		}
		for _, d := range ds {
			good := len(d.Replicas) == 3
			for _, r := range d.Replicas {
				good = good && r.Role == keyspace.RoleVoter && there[r.Node]
			}
			if !good {
				err = errors.Join(err, fmt.Errorf("range %s has the replicas %v", d.Range, d.Replicas))
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
