package raftgroup

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/wal"
)

// spoil changes a byte of the first record that contains the text in the node's log.
func (n *testNode) spoil(text string) {
	t := n.r.t
	t.Helper()
	names, err := n.fs.List("wal")
	n.r.must(err)
	for _, name := range names {
		if !strings.HasSuffix(name, ".wal") {
			continue
		}
		f, err := n.fs.OpenReadWrite("wal/"+name, vfs.WriteCategoryUnspecified)
		n.r.must(err)
		st, err := f.Stat()
		n.r.must(err)
		b := make([]byte, st.Size())
		if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		at := strings.Index(string(b), text)
		if at >= 0 {
			_, err = f.WriteAt([]byte{b[at] ^ 1}, int64(at))
			n.r.must(err)
		}
		n.r.must(f.Close())
		if at >= 0 {
			return
		}
	}
	t.Fatalf("%q is in no segment", text)
}

// TestDamagedLogStopsTheNode: the log is damaged, or the disk returns read errors, under
// a running node. The node names the place and stops, whether a lagging follower needs
// the entries or they are to be applied here. It neither hides the damage behind a
// snapshot nor stops silently.
func TestDamagedLogStopsTheNode(t *testing.T) {
	damages := map[string]func(n *testNode, entry string, broken *atomic.Bool){
		"rot": func(n *testNode, entry string, _ *atomic.Bool) { n.spoil(entry) },
		"EIO": func(_ *testNode, _ string, broken *atomic.Bool) { broken.Store(true) },
	}
	for what, damage := range damages {
		for _, whose := range []string{"a follower's", "its own"} {
			t.Run(what+" in "+whose+" entries", func(t *testing.T) {
				inBubble(t, func(t *testing.T) {
					r := newRig(t, 3, noSleep)
					r.walopt = func(o *wal.Options) { o.EntryCacheBytes, o.SegmentBytes = 1, 4<<20 }
					var broken [4]atomic.Bool
					for id, n := range r.nodes {
						n.wfs = errorfs.Wrap(n.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
							if op.Kind == errorfs.OpFileReadAt && broken[id].Load() {
								return syscall.EIO
							}
							return nil
						}))
					}
					r.startAll()
					defer r.close()
					r.bootstrap(1, 1, voters(3))
					r.write(1, "first")
					r.equal(1)
					l := r.leader(1)
					f := r.nodes[1+l.id%3]
					victim, gate := l, make(chan struct{})
					// More than raft hands out before some of it is applied.
					pad, count := 600_000, 3
					if whose == "its own" {
						victim = f
						f.sms[1].slow = func() { <-gate }
					} else {
						r.bus.isolate(f.id, true)
						pad = 10
					}
					for i := range count {
						r.write(1, fmt.Sprintf("needed %d %0*d", i, pad, 0))
					}
					if victim == f {
						last := l.host.Group(1).Status().Commit
						r.eventually("it is stored", 5*time.Second, func() bool { return f.host.Group(1).Status().Commit == last })
					}
					// The last entry: raft already holds the first ones if they are its
					// own.
					damage(victim, fmt.Sprintf("needed %d ", count-1), &broken[victim.id])
					close(gate)
					r.bus.isolate(f.id, false)
					r.eventually("it stops", 5*time.Second, func() bool {
						select {
						case <-victim.host.Fatal():
							return true
						default:
							return false
						}
					})
					if err := victim.host.Err(); !strings.Contains(err.Error(), ".wal") || !strings.Contains(err.Error(), "offset") {
						t.Errorf("it does not say where: %v", err)
					}
					if f.sms[1].filled() {
						t.Error("a snapshot took the place of the damaged entries")
					}
				})
			})
		}
	}
}

// TestOldCopyOfTheDirectory: a node started on an old copy of its directory has lost
// entries that it acknowledged. A leader notices: the node reports it and stops, and has
// given no vote.
func TestOldCopyOfTheDirectory(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, 1, voters(3))
		r.write(1, "first")
		r.equal(1)
		l := r.leader(1)
		f := r.nodes[1+l.id%3]
		old := f.fs.Crash(0, nil)
		for i := range 5 {
			r.write(1, fmt.Sprint("forgotten ", i))
		}
		r.equal(1)
		term := l.host.Group(1).Status().Term
		f.crash(0)
		f.fs = old
		var votes atomic.Int64
		r.bus.set(func(b *testBus) {
			b.filter = func(from, _ keyspace.NodeID, m *message) bool {
				if from == f.id && (m.kind == pb.MsgVoteResp || m.kind == pb.MsgVote) {
					votes.Add(1)
				}
				return true
			}
		})
		f.start()
		select {
		case <-f.host.Fatal():
		case <-time.After(5 * time.Second):
			t.Fatal("it goes on")
		}
		if err := f.host.Err(); !strings.Contains(err.Error(), "old copy") {
			t.Errorf("it stops with %v", err)
		}
		if n := votes.Load(); n != 0 {
			t.Errorf("it has given or asked for %d votes", n)
		}
		f.crash(0)
		r.write(1, "without it")
		if s := r.leader(1).host.Group(1).Status(); s.Term != term {
			t.Errorf("term %d after %d", s.Term, term)
		}
	})
}
