package shard

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// slowPusher takes a moment for each push and knows no coordinator.
type slowPusher struct {
	takes time.Duration

	mu            sync.Mutex
	running, most int
}

func (p *slowPusher) Push(context.Context, TxnName, []byte) (bool, *Decided, error) {
	p.mu.Lock()
	p.running++
	p.most = max(p.most, p.running)
	p.mu.Unlock()
	time.Sleep(p.takes)
	p.mu.Lock()
	p.running--
	p.mu.Unlock()
	return false, &Decided{}, nil
}

func (p *slowPusher) Finish(context.Context, TxnName, *Decided) (bool, error) { return false, nil }

func (p *slowPusher) Reads(context.Context, keyspace.Revision) (bool, error) { return false, nil }

// The locks that a gateway leaves behind are ended one right after the other, however many
// they are, and those of one range do not take all that a node can push.
func TestManyLocksOfADeadGateway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &slowPusher{takes: 2 * time.Millisecond}
		w := newFakeWorld(t)
		w.node.cfg.Txns = p
		w.seq.auto = true
		w.serve(1, 5)
		defer w.stop()
		const locks = 400
		for i := range locks {
			if g := w.step(t.Context(), &Prepare{Name: nameAged(i + 1), Anchor: []byte("z"), Writes: writeAt(fmt.Sprint(i))}); g.err != nil {
				t.Fatal(g.err)
			}
		}
		r := w.node.Replica(1)
		for range 300 {
			time.Sleep(3 * time.Millisecond)
			w.settle()
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.locks != nil {
			t.Errorf("%d of %d locks are left after a second", len(r.locks.all), locks)
		}
		if p.most != maxRangePushes {
			t.Errorf("%d pushes at a time", p.most)
		}
	})
}
