package raftgroup

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// killer ends nodes at one step of one of them, the victim. A step is an operation that
// changes the victim's disks, or a message of it to another node: nothing observable
// happens between two steps. At the step the nodes that end go silent, and their disks
// become what a power failure would leave.
type killer struct {
	r      *rig
	victim *testNode
	others bool // all nodes end, not only the victim
	rng    *rand.Rand

	mu sync.Mutex
	// Guarded by mu. at is the last step, or 0 for none.
	at, steps int
	killed    bool
	what      string
	disks     map[keyspace.NodeID]*simdisk.Disk
	// acked counts the writes that were acknowledged before the end.
	acked uint64
	// stored and term are the newest entry that the victim acknowledged, and its term;
	// voted and voteTerm are its newest vote.
	stored, term, voted, voteTerm uint64
}

// ends reports whether the node is one of those that end.
func (k *killer) ends(id keyspace.NodeID) bool { return k.others || id == k.victim.id }

// step counts one step, unless the node has ended. It reports whether the node continues.
func (k *killer) step(id keyspace.NodeID, what string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.killed {
		return !k.ends(id)
	}
	if id != k.victim.id {
		return true
	}
	if k.steps++; k.steps != k.at {
		return true
	}
	k.killed, k.what = true, what
	for _, n := range k.r.nodes {
		if k.ends(n.id) {
			// Either everything that was not synced, or none of it: Pebble relies on a
			// directory that does not keep its newest entry without the one before. The
			// tests of wal and engine cover partial losses.
			k.disks[n.id] = n.fs.Crash(100*k.rng.IntN(2), k.rng)
		}
	}
	return false
}

func (k *killer) dead() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.killed
}

// disk turns changes of a node's disk into steps.
func (k *killer) disk(n *testNode) vfs.FS {
	return errorfs.Wrap(n.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			k.step(n.id, fmt.Sprintf("%v %s", op.Kind, op.Path))
		}
		return nil
	}))
}

// killBus is a node's bus, whose messages are steps.
type killBus struct {
	*busEnd
	k *killer
}

func (m killBus) Send(to keyspace.NodeID, method transport.Method, order uint64, payload []byte) error {
	if !m.k.step(m.id, fmt.Sprintf("word to node %s", to)) {
		return transport.ErrNoRoute
	}
	m.k.hear(m.id, payload)
	return m.busEnd.Send(to, method, order, payload)
}

// hear notes what the victim commits itself to.
func (k *killer) hear(from keyspace.NodeID, payload []byte) {
	kind, rest, err := frameKind(payload)
	if err != nil || kind != frameMessages || from != k.victim.id {
		return
	}
	msgs, err := decodeMessages(from, rest)
	if err != nil {
		panic(err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range msgs {
		m := &msgs[i]
		switch {
		case m.raft == nil || m.raft.GetReject():
		case m.kind == pb.MsgAppResp && (m.term > k.term || m.raft.GetIndex() > k.stored):
			k.stored, k.term = m.raft.GetIndex(), m.term
		case m.kind == pb.MsgVoteResp && m.term > k.voteTerm:
			k.voted, k.voteTerm = uint64(m.to), m.term
		case m.kind == pb.MsgVote && m.term > k.voteTerm:
			// A candidate has voted for itself, and others may make it the leader of that
			// term.
			k.voted, k.voteTerm = uint64(m.from), m.term
		}
	}
}

// write writes until the data is applied at a leader, or until the end.
func (k *killer) write(data string) {
	for !k.dead() {
		for _, id := range k.r.ids() {
			n := k.r.nodes[id]
			if l, is := n.sms[1].leads(); !is || !l.Ready {
				continue
			}
			if n.sms[1].has(data) {
				k.mu.Lock()
				if !k.killed {
					k.acked++
				}
				k.mu.Unlock()
				return
			}
			_ = n.propose(1, data)
		}
		synctest.Wait()
		time.Sleep(5 * time.Millisecond)
	}
}

// filled reports whether a snapshot was installed in this run.
func (s *testSM) filled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.done) > 0 && s.done[len(s.done)-1] == nil
}

// finish replaces the ended nodes by what their disks hold, and checks that every
// acknowledged write exists and that the victim stands by what it said.
func (k *killer) finish() {
	r := k.r
	r.t.Helper()
	for id, fs := range k.disks {
		r.bus.isolate(id, true)
		r.nodes[id].crash(0)
		r.nodes[id].fs = fs
	}
	v := k.victim
	l, err := wal.Open(wal.Options{FS: v.fs, Dir: "wal", Clock: r.clk, SegmentBytes: 256 << 10})
	r.must(err)
	hs, last := l.Group(1).HardState(), l.Group(1).LastIndex()
	if last < k.stored && hs.GetTerm() <= k.term {
		r.t.Errorf("it has said in term %d that it has stored %d, its log ends at %d in term %d", k.term, k.stored, last, hs.GetTerm())
	}
	if hs.GetTerm() < k.voteTerm || hs.GetTerm() == k.voteTerm && hs.GetVote() != k.voted {
		r.t.Errorf("it has voted for %d in term %d, and remembers %d in term %d", k.voted, k.voteTerm, hs.GetVote(), hs.GetTerm())
	}
	r.must(l.Close())
	k.arm(0)
	for id := range k.disks {
		r.nodes[id].start()
	}
	for id := range k.disks {
		r.bus.isolate(id, false)
	}
	r.write(1, "after the end")
	r.equal(1)
	if _, n := v.sms[1].state(); n <= k.acked {
		r.t.Errorf("%d writes are left, %d were acknowledged before", n-1, k.acked)
	}
}

// work is the nodes' load: writes, flushes, truncations, a change of the leader.
func (k *killer) work() {
	for i := range 3 {
		for j := range 2 {
			k.write(fmt.Sprint(i, "/", j))
		}
		for _, n := range k.r.nodes {
			if k.dead() {
				return
			}
			_ = n.eng.Flush(context.Background())
			n.host.Group(1).w.flag(n.host.Group(1), flagTruncate)
		}
		if i == 1 {
			for _, n := range k.r.nodes {
				if g := n.host.Group(1); g.Status().IsLeader && !k.dead() {
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					_ = g.Transfer(ctx, 0)
					cancel()
				}
			}
		}
	}
}

// killAt runs one life that ends at the given step, and reports whether there was such a
// step. laggard first makes the victim, or the node that it leads, catch up by a
// snapshot.
func killAt(t *testing.T, at int, leads, others, laggard, crowded bool) (killed bool) {
	t.Helper()
	inBubble(t, func(t *testing.T) {
		k := &killer{others: others, rng: rand.New(rand.NewPCG(uint64(at), 9)), disks: map[keyspace.NodeID]*simdisk.Disk{}}
		r := newRig(t, 3, func(c *Config) {
			if c.SleepAfter = -1; crowded {
				c.SleepAfter = 0
				crowd(c)
			}
			c.Bus = killBus{c.Bus.(*busEnd), k}
		})
		k.r, k.victim = r, r.nodes[1]
		for _, n := range r.nodes {
			n.efs = k.disk(n)
			n.wfs = n.efs
		}
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		l := r.leader(1)
		if k.victim = l; !leads {
			k.victim = r.nodes[1+l.id%3]
		}
		if laggard {
			_, f := r.cutOffFollower(1, 3)
			if f.efs = k.disk(f); !leads {
				k.victim = f
			} else {
				k.victim = r.leader(1)
			}
			f.wfs = f.efs
			k.acked = 3
			for _, n := range r.nodes {
				if n.up {
					n.end.stall = func() { k.step(n.id, "chunk of a snapshot") }
				}
			}
			f.start() // not a step: MemFS cannot be cloned while Pebble locks its directory
			k.arm(at)
			for !k.dead() && !f.sms[1].filled() {
				time.Sleep(5 * time.Millisecond)
				synctest.Wait()
			}
		} else {
			k.arm(at)
		}
		k.acked++ // the first write
		k.work()
		if killed = k.dead(); !killed {
			return
		}
		k.finish()
		if t.Failed() {
			t.Logf("ended at step %d: %s", at, k.what)
		}
	})
	return killed
}

// arm starts counting steps; with 0 no node ends any more.
func (k *killer) arm(at int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at, k.steps, k.killed = at, 0, false
}

// TestKillAtEachStep kills a node, or in turn all of them at once, at each step between
// save, send, apply, flush, truncation and the parts of a snapshot (traps 19, 21, 24, 31,
// 32, 58 and invariants 1 and 2). No acknowledged write is lost, and no node takes back
// what it said. A run tries a sample of the steps and logs the first one; make kills
// tries all of them (RAFTGROUP_TEST_STRIDE=1).
func TestKillAtEachStep(t *testing.T) {
	stride := fewer(10, 30)
	if s, err := strconv.Atoi(os.Getenv("RAFTGROUP_TEST_STRIDE")); err == nil {
		stride = s
	}
	for _, c := range []struct {
		name                    string
		leads, laggard, crowded bool
		// least is the minimum number of steps.
		least int
	}{
		{"follower", false, false, false, 60},
		{"leader", true, false, false, 60},
		{"follower on crowded hosts", false, false, true, 50},
		{"leader on crowded hosts", true, false, true, 50},
		{"receiver of a snapshot", false, true, false, 90},
		{"sender of a snapshot", true, true, false, 90},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := 1 + rand.IntN(stride)
			t.Logf("every step that is %d modulo %d", at, stride)
			for killAt(t, at, c.leads, at/stride%2 == 0, c.laggard, c.crowded) && !t.Failed() {
				at += stride
			}
			if at < c.least {
				t.Errorf("only %d steps", at)
			}
		})
	}
}
