package placement

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
)

// killer ends the node that leads placement at one of its steps: before or after a request of
// an operation to a range. Unless words is set, changes of its disk and messages of its groups
// are steps too.
type killer struct {
	words bool

	mu sync.Mutex
	// Guarded by mu: the node to kill, the step at which it dies (0 is never), and whether it
	// has died.
	victim    *rigNode
	at, steps int
	killed    bool
	what      string
	disk      *simdisk.Disk
}

// step counts one and says whether the node goes on.
func (k *killer) step(n *rigNode, word bool, what string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case n != k.victim:
		return true
	case k.killed:
		return false
	case k.at == 0 || k.words && !word:
		return true
	}
	if k.steps++; k.steps != k.at {
		return true
	}
	k.killed, k.what = true, what
	k.disk = n.fs.Crash(0, nil)
	return false
}

// arm lets the steps of a node count from now on; with 0 nobody ends any more.
func (k *killer) arm(n *rigNode, at int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.victim, k.at, k.steps, k.killed = n, at, 0, false
}

func (k *killer) ended(n *rigNode) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.killed && n == k.victim
}

func (k *killer) dead() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.killed
}

// again starts the node that has ended, with what its disk had then.
func (k *killer) again(pause time.Duration) {
	n := k.victim
	n.crash()
	n.fs = k.disk
	k.arm(nil, 0)
	time.Sleep(pause)
	n.start()
}

// files is the node's disk, whose changes are steps.
func (k *killer) files(n *rigNode) vfs.FS {
	if k == nil {
		return n.fs
	}
	return errorfs.Wrap(n.fs, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			k.step(n, false, fmt.Sprintf("%v %s", op.Kind, op.Path))
		}
		return nil
	}))
}

// mouth is a bus whose words are steps.
type mouth struct {
	raftgroup.Bus
	k *killer
	n *rigNode
}

func (k *killer) mouth(n *rigNode) raftgroup.Bus {
	if k == nil {
		return n.bus
	}
	return mouth{n.bus, k, n}
}

// Send implements raftgroup.Bus.
func (m mouth) Send(to keyspace.NodeID, method transport.Method, order uint64, payload []byte) error {
	if !m.k.step(m.n, false, fmt.Sprintf("word to node %s", to)) {
		return transport.ErrNoRoute
	}
	return m.Bus.Send(to, method, order, payload)
}

// ears take the handlers of a bus. A dead node is not heard any more, and what it has written
// since its death is lost.
type ears struct {
	Registrar
	k *killer
	n *rigNode
}

func (k *killer) ears(n *rigNode) Registrar {
	if k == nil {
		return n.bus
	}
	return ears{n.bus, k, n}
}

// HandleCall implements Registrar.
func (e ears) HandleCall(m transport.Method, class transport.Class, h transport.CallHandler) {
	e.Registrar.HandleCall(m, class, func(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
		answer, err := h(ctx, from, payload)
		if e.k.ended(e.n) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return answer, err
	})
}

// hands carry operations out; what they do are steps. Of a node that has ended they do nothing.
type hands struct {
	driver.Mover
	k *killer
	n *rigNode
}

func (k *killer) hands(n *rigNode, m driver.Mover) driver.Mover {
	if k == nil || m == nil {
		return m
	}
	return hands{m, k, n}
}

func (h hands) do(what string, f func() error) error {
	if !h.k.step(h.n, true, "before "+what) {
		return kverror.Unreachable
	}
	err := f()
	if !h.k.step(h.n, true, "after "+what) {
		return kverror.Unreachable
	}
	return err
}

// ChangeMembers implements driver.Mover.
func (h hands) ChangeMembers(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	return h.do(fmt.Sprintf("%v of range %s", changes, id), func() error { return h.Mover.ChangeMembers(ctx, node, id, confIndex, changes) })
}

// TransferTo implements driver.Mover.
func (h hands) TransferTo(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, to keyspace.NodeID) error {
	return h.do(fmt.Sprintf("range %s to be led by node %s", id, to), func() error { return h.Mover.TransferTo(ctx, node, id, to) })
}

// Merge implements driver.Merger.
func (h hands) Merge(ctx context.Context, node keyspace.NodeID, o keyspace.MergeOrder) error {
	return h.do(fmt.Sprintf("%s of range %s on node %s", o.Step, o.Range, node), func() error { return h.Mover.(driver.Merger).Merge(ctx, node, o) })
}

// toKill is an operation during which the leader of placement ends.
type toKill struct {
	name string
	// least is how many words to ranges it has at least, each with two steps.
	least int
	// start starts a cluster in which placement's leader soon executes an operation: asked, or
	// a decision of its own if that is nil. judge returns an error if the outcome is wrong.
	start func(t *testing.T, k *killer) (r *rig, asked *fsm.Operation, judge func(*fsm.Map) error)
}

// The node that leads placement is killed at each step of a move, of merges, also of ranges on
// different nodes, and of a repair. Steps are the moments before and after each request to a
// range, each change of its disk, and each message of its groups. The next leader finishes the
// operation, or undoes a merge. No operation is left, the map says what the ranges say, and no
// replica was added twice. Each word to a range has its turn in every run, with -short every
// third one, another time others. A run takes a few of the other steps, and make kills takes
// them all (PLACEMENT_TEST_STRIDE=1).
func TestLeaderIsKilledAtEachStep(t *testing.T) {
	stride, each := 48, 1
	if testing.Short() {
		stride, each = 144, 3
	}
	if s, err := strconv.Atoi(os.Getenv("PLACEMENT_TEST_STRIDE")); err == nil {
		stride = s
	}
	for _, c := range []toKill{
		{"move", 3, moveToKill(false)},
		{"move to the leader", 3, moveToKill(true)},
		{"merge", 9, mergeToKill(3)},
		{"merge from elsewhere", 12, mergeToKill(5)},
		{"repair", 2, repairToKill},
	} {
		t.Run(c.name, func(t *testing.T) {
			at := 1 + rand.IntN(each)
			for c.killAt(t, &killer{words: true}, at) && !t.Failed() {
				at += each
			}
			if at <= 2*c.least {
				t.Errorf("no more than %d steps are words to ranges", at-1)
			}
			words, from := at-each, 1+rand.IntN(stride)
			for at = from; c.killAt(t, &killer{}, at) && !t.Failed(); {
				at += stride
			}
			t.Logf("%d or some more steps are words to ranges; of all, which are fewer than %d, every one that is %d modulo %d", words, at, from, stride)
		})
	}
}

// killAt says whether the leader was killed: else the operation has fewer steps.
func (c *toKill) killAt(t *testing.T, k *killer, at int) (killed bool) {
	t.Helper()
	virtually(t, func(t *testing.T) {
		r, op, judge := c.start(t, k)
		l := r.leader()
		other := r.nodes[0]
		if other == l {
			other = r.nodes[1]
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		k.arm(l, at)
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			for op != nil && ctx.Err() == nil {
				// Refused is who asks again since the answer was lost; but also while the one that was
				// killed is needed, and then nothing has begun.
				_, err := other.client.BeginOperation(ctx, *op)
				if err == nil || kverror.Of(err).Kind == kverror.BadRequest && !strings.Contains(err.Error(), "does not live") {
					return
				}
				time.Sleep(50 * time.Millisecond)
			}
		}()
		defer func() { <-asked }()
		var last error
		for {
			if k.dead() {
				killed = true
				k.again(time.Duration(at%4) * 700 * time.Millisecond)
			}
			err := c.over(ctx, other, asked, judge)
			if err == nil && !k.dead() {
				return
			}
			if ctx.Err() != nil { // of which err tells, and not of what has never come about
				t.Errorf("killed at step %d, %s: %v", at, k.what, cmp.Or(last, err))
				return
			}
			last = err
			time.Sleep(20 * time.Millisecond)
		}
	})
	return killed
}

// over says what is not as it should be in the end.
func (c *toKill) over(ctx context.Context, n *rigNode, asked <-chan struct{}, judge func(*fsm.Map) error) error {
	select {
	case <-asked:
	default:
		return errors.New("it is not begun")
	}
	ops, err := n.client.Operations(ctx)
	if err == nil && len(ops) > 0 {
		err = fmt.Errorf("under way: %v", ops)
	}
	if err != nil {
		return err
	}
	m, err := n.client.Map(ctx)
	if err != nil {
		return err
	}
	return judge(m)
}

// mapped says whether the map has the range as it is.
func (p *pretend) mapped(m *fsm.Map) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	row, ok := m.ByID(p.d.Range)
	if in := row.Descriptor; !ok || in.ConfIndex != p.d.ConfIndex || len(in.Replicas) != len(p.d.Replicas) {
		return fmt.Errorf("range %s is %v, and in the map %v", p.d.Range, p.d, in)
	}
	return nil
}

// moveToKill is a move to the node that leads placement, which ends then, or to another one.
func moveToKill(toLeader bool) func(*testing.T, *killer) (*rig, *fsm.Operation, func(*fsm.Map) error) {
	return func(t *testing.T, k *killer) (*rig, *fsm.Operation, func(*fsm.Map) error) {
		t.Helper()
		r := newRig(t, 81, 5, quiet)
		r.killer = k
		d := r.bootstrap.Ranges()[0]
		p := newPretend(t, rand.New(rand.NewPCG(81, 1)), d)
		p.report = r.report
		r.mover = func() driver.Mover { return p }
		r.startAll()
		to := keyspace.NodeID(4)
		for toLeader != (r.leader().id == to) {
			heir := to
			if !toLeader {
				heir++
			}
			_ = r.nodes[1].client.TransferLeader(t.Context(), heir)
			time.Sleep(100 * time.Millisecond)
		}
		return r, &fsm.Operation{Range: d.Range, Kind: fsm.OperationMove, From: d.Replicas[0].Node, To: to, Why: "asked for"}, func(m *fsm.Map) error {
			if got := fmt.Sprint(p.voters()); got != "[2 3 4]" {
				return fmt.Errorf("the voters are %s", got)
			}
			return p.mapped(m)
		}
	}
}

// mergeToKill is a merge on so many nodes: three hold all, of five not.
func mergeToKill(nodes int) func(*testing.T, *killer) (*rig, *fsm.Operation, func(*fsm.Map) error) {
	return func(t *testing.T, k *killer) (*rig, *fsm.Operation, func(*fsm.Map) error) {
		t.Helper()
		r := newRig(t, 82, nodes, quiet, "m")
		r.killer = k
		ds := r.bootstrap.Ranges()
		rng := rand.New(rand.NewPCG(82, 1))
		p := &pretendPair{t: t, settled: map[keyspace.NodeID]bool{}}
		p.left, p.right = newPretend(t, rng, ds[0]), newPretend(t, rng, ds[1])
		p.left.report, p.right.report = r.report, r.report
		r.mover = func() driver.Mover { return p }
		r.startAll()
		return r, &fsm.Operation{Range: ds[0].Range, Kind: fsm.OperationMerge, Why: "asked for"}, func(m *fsm.Map) error {
			p.mu.Lock()
			absorbed, bound := p.absorbed, p.bound
			p.mu.Unlock()
			switch merged := m.Len() == 1; {
			case merged != absorbed, !merged && bound != [2]uint64{}, bound[0] != 0:
				return fmt.Errorf("%d ranges are in the map, absorbed %t, bound to %v", m.Len(), absorbed, bound)
			case merged:
				return nil
			}
			return errors.Join(p.left.mapped(m), p.right.mapped(m))
		}
	}
}

// repairToKill loses a node that does not lead placement, and waits until its replicas are about
// to be rebuilt.
func repairToKill(t *testing.T, k *killer) (*rig, *fsm.Operation, func(*fsm.Map) error) {
	t.Helper()
	w := pretendedRig(t, 83, 5, "m")
	w.killer, w.deadAfter = k, 15*time.Second
	w.mover = func() driver.Mover { return w }
	w.startAll()
	time.Sleep(10 * time.Second)
	leader := w.leader().id
	// Not the first one either: it is asked what became of it.
	lost := keyspace.NodeID(5)
	for replicas, _ := w.on(lost); lost == leader || replicas == 0; replicas, _ = w.on(lost) {
		lost--
	}
	w.kill(lost)
	time.Sleep(w.deadAfter - time.Second)
	return w.rig, nil, func(m *fsm.Map) error {
		err := w.whole(3)
		w.each(func(p *pretend) {
			row, _ := m.ByID(p.d.Range)
			if row.Descriptor.ConfIndex != p.d.ConfIndex {
				err = errors.Join(err, fmt.Errorf("range %s is %v, and in the map %v", p.d.Range, p.d, row.Descriptor))
			}
		})
		return err
	}
}
