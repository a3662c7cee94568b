package simbus

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// ledger counts how often each call ran and checks the order of messages.
type ledger struct {
	mu   sync.Mutex
	ran  map[uint64]int
	last map[string]uint64 // by receiver, sender and order key
	bad  []string
}

func (l *ledger) call(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ran[id]++
}

func (l *ledger) message(key string, number uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if number <= l.last[key] {
		l.bad = append(l.bad, fmt.Sprintf("%s: message %d after %d", key, number, l.last[key]))
	}
	l.last[key] = number
}

// TestFates: sessions break, directions are cut, nodes crash and return. No call runs
// twice, a call that was certainly not delivered never ran, and an answered call did
// run. Messages never overtake each other or come twice, also across reconnections.
// (Trap 47.)
func TestFates(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { testFates(t, seed) })
		})
	}
}

func testFates(t *testing.T, seed uint64) {
	t.Helper()
	const nodes, rounds = 3, 2000
	r := rand.New(rand.NewPCG(seed, 1))
	n := New(seed, Faults{
		Delay: Delay{Min: 100 * time.Microsecond, Max: 3 * time.Millisecond, Tail: 0.01, TailMean: 50 * time.Millisecond},
		Loss:  0.01, Break: 0.002,
	})
	l := &ledger{ran: map[uint64]int{}, last: map[string]uint64{}}
	buses := map[keyspace.NodeID]*Bus{}
	boot := keyspace.BootID(0)
	open := func(id keyspace.NodeID) {
		boot++
		b, err := n.NewBus(transport.Config{Cluster: 1, Node: id, Boot: boot, Clock: clock.Virtual()})
		if err != nil {
			t.Fatal(err)
		}
		register(b, l)
		for p := range keyspace.NodeID(nodes) {
			b.SetPeer(p+1, nil)
		}
		if err := b.Start(); err != nil {
			t.Fatal(err)
		}
		buses[id] = b
	}
	for id := range keyspace.NodeID(nodes) {
		open(id + 1)
	}
	var wg sync.WaitGroup
	outcomes := map[string]int{}
	var mu sync.Mutex // guards outcomes
	for i := uint64(1); i <= rounds; i++ {
		from, to := keyspace.NodeID(r.IntN(nodes)+1), keyspace.NodeID(r.IntN(nodes)+1)
		b := buses[from]
		// A message that is not sent leaves a gap in the numbers, which is no fault.
		_ = b.Send(to, methodMessage, i%5, binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, i%5), i))
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(r.IntN(int(10*time.Second))))
		wg.Go(func() {
			defer cancel()
			_, err := b.Call(ctx, to, methodCall, binary.BigEndian.AppendUint64(nil, i))
			mu.Lock()
			defer mu.Unlock()
			outcomes[l.judge(i, err)]++
		})
		disturb(n, r, buses, open)
		time.Sleep(time.Duration(r.IntN(int(4 * time.Millisecond))))
	}
	wg.Wait()
	n.HealAll()
	for _, b := range buses {
		_ = b.Close()
	}
	l.final(t)
	for _, kind := range []string{"answered", "not delivered", "unknown"} {
		if outcomes[kind] == 0 {
			t.Errorf("no call was %s: %v", kind, outcomes)
		}
	}
	if s := n.Stats(); s.Broken == 0 || s.Crashes == 0 || s.Lost == 0 || s.CutOff == 0 {
		t.Errorf("a fault did not happen: %+v", s)
	}
}

// disturb changes the network every now and then.
func disturb(n *Network, r *rand.Rand, buses map[keyspace.NodeID]*Bus, open func(keyspace.NodeID)) {
	id := keyspace.NodeID(r.IntN(len(buses)) + 1)
	other := keyspace.NodeID(r.IntN(len(buses)) + 1)
	switch r.IntN(150) {
	case 0:
		n.Crash(id)
		_ = buses[id].Close()
		open(id)
	case 1:
		_ = buses[id].Close()
		open(id)
	case 2, 4, 6:
		n.Cut(id, other)
	case 3:
		n.HealAll()
	case 5:
		n.Pause(id)
	}
}

func register(b *Bus, l *ledger) {
	b.HandleSend(methodMessage, transport.ClassRaft, func(from keyspace.NodeID, p []byte) {
		// A node's numbers go on over its restarts, and so does the order that its peers
		// see. A restarted receiver counts as another one.
		key := fmt.Sprintf("%s/%d from %s by %d", b.Self(), b.Config().Boot, from, binary.BigEndian.Uint64(p))
		l.message(key, binary.BigEndian.Uint64(p[8:]))
	})
	b.HandleCall(methodCall, transport.ClassRequest, func(_ context.Context, _ keyspace.NodeID, p []byte) ([]byte, error) {
		l.call(binary.BigEndian.Uint64(p))
		return nil, nil
	})
}

// judge checks a call's outcome against the calls that ran, and names it.
func (l *ledger) judge(id uint64, err error) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		if l.ran[id] != 1 {
			l.bad = append(l.bad, fmt.Sprintf("call %d was answered and ran %d times", id, l.ran[id]))
		}
		return "answered"
	case transport.NotDelivered(err):
		// It must not run later either: this makes a later run count as the second.
		if l.ran[id]++; l.ran[id] != 1 {
			l.bad = append(l.bad, fmt.Sprintf("call %d ran: %v", id, err))
		}
		return "not delivered"
	}
	return "unknown"
}

func (l *ledger) final(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.ran {
		if n > 1 {
			t.Errorf("call %d ran %d times, or after it certainly had not", id, n)
		}
	}
	for _, b := range l.bad {
		t.Error(b)
	}
}
