package placement

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/raftgroup"
)

// pretend is a range as its group would be: it applies changes of its members, or does
// not, and says so or not.
type pretend struct {
	t   *testing.T
	rng *rand.Rand

	mu sync.Mutex
	// Guarded by mu.
	d      keyspace.Descriptor
	leader keyspace.NodeID
	term   uint64
	dead   map[keyspace.NodeID]bool
	// failures is the part of the steps that fail, half of them after they were done.
	failures float64
	steps    int
	// starved are nodes whose learners get no copy, lagging those that cannot take the lead.
	starved, lagging map[keyspace.NodeID]bool
	// fed, if not nil, is called once, without mu, when one of them is to be promoted: they have
	// their copies then.
	fed   func()
	added map[keyspace.ReplicaID]bool
	// report takes the newest descriptor to the map.
	report func(keyspace.Descriptor)
}

func newPretend(t *testing.T, rng *rand.Rand, d keyspace.Descriptor) *pretend {
	t.Helper()
	return &pretend{t: t, rng: rng, d: d, leader: d.Replicas[0].Node, term: 1, dead: map[keyspace.NodeID]bool{}, added: map[keyspace.ReplicaID]bool{}, report: func(keyspace.Descriptor) {}}
}

func (p *pretend) alive(n keyspace.NodeID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !p.dead[n]
}

// fate says whether a step is done, and whether that is told.
func (p *pretend) fate() (done bool, err error) {
	if p.rng.Float64() >= p.failures {
		return true, nil
	}
	return p.rng.IntN(2) == 0, kverror.LeaderChanged
}

func (p *pretend) Look(_ context.Context, node keyspace.NodeID, _ keyspace.RangeID) (keyspace.Descriptor, keyspace.NodeID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, here := p.d.ReplicaOn(node); !here || p.dead[node] {
		return keyspace.Descriptor{}, 0, kverror.RangeNotHere
	}
	d := p.d
	d.Replicas = slices.Clone(d.Replicas)
	return d, p.leader, nil
}

func (p *pretend) TransferTo(_ context.Context, node keyspace.NodeID, _ keyspace.RangeID, to keyspace.NodeID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, v := range p.d.Replicas {
		if to == 0 && v.Role == keyspace.RoleVoter && v.Node != node && !p.dead[v.Node] && !p.lagging[v.Node] {
			to = v.Node
		}
	}
	m, ok := p.d.ReplicaOn(to)
	switch done, err := p.fate(); {
	case node != p.leader:
		return kverror.NotLeader
	case p.lagging[to]:
		return kverror.Busy
	case !ok || m.Role != keyspace.RoleVoter || p.dead[to]:
		return kverror.BadRequest
	case done:
		p.steps++
		p.leader, p.term = to, p.term+1
		return err
	default:
		return err
	}
}

func (p *pretend) ChangeMembers(_ context.Context, node keyspace.NodeID, _ keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	if err := p.starves(changes); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if node != p.leader || confIndex != p.d.ConfIndex {
		return kverror.WrongRange
	}
	done, err := p.fate()
	if !done {
		return err
	}
	p.steps++
	p.d.ConfIndex += uint64(1 + p.rng.IntN(5))
	p.d.Replicas = slices.Clone(p.d.Replicas)
	for _, c := range changes {
		i := slices.IndexFunc(p.d.Replicas, func(m keyspace.Replica) bool { return m.ID == c.Replica })
		switch c.Type {
		case raftgroup.AddLearner:
			if p.added[c.Replica] {
				p.t.Errorf("replica %d is added for the second time", c.Replica)
			}
			p.added[c.Replica] = true
			p.d.Replicas = append(p.d.Replicas, keyspace.Replica{ID: c.Replica, Node: c.Node, Role: keyspace.RoleLearner})
		case raftgroup.Promote:
			p.d.Replicas[i].Role = keyspace.RoleVoter
		case raftgroup.RemoveReplica:
			if p.d.Replicas[i].Node == p.leader {
				p.t.Errorf("the leader is removed by %v", changes)
			}
			p.d.Replicas = slices.Delete(p.d.Replicas, i, i+1)
		case raftgroup.Demote:
			p.t.Errorf("%v", c)
		}
	}
	p.report(p.d)
	return err
}

// starves refuses to promote who has no copy yet.
func (p *pretend) starves(changes []raftgroup.ConfChange) error {
	p.mu.Lock()
	hungry := slices.ContainsFunc(p.d.Replicas, func(m keyspace.Replica) bool {
		return p.starved[m.Node] && slices.ContainsFunc(changes, func(c raftgroup.ConfChange) bool {
			return c.Type == raftgroup.Promote && c.Replica == m.ID
		})
	})
	fed := p.fed
	if hungry && fed != nil {
		p.starved, p.fed = nil, nil
	}
	p.mu.Unlock()
	switch {
	case hungry && fed == nil:
		return kverror.Busy
	case hungry:
		fed()
	}
	return nil
}

func (p *pretend) voters() (nodes []keyspace.NodeID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.d.Replicas {
		if m.Role == keyspace.RoleVoter {
			nodes = append(nodes, m.Node)
		}
	}
	return nodes
}

// Every operation comes to its end from any configuration, whoever leads, whatever step
// fails or is only said to have failed. No range ever has fewer voters than before or
// after, and no replica is added twice.
func TestOperationsComeToTheirEnd(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 11))
		d := keyspace.Descriptor{Range: 7, Generation: 1, ConfIndex: 10}
		for i := range 1 + rng.IntN(5) {
			d.Replicas = append(d.Replicas, keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: keyspace.NodeID(i + 1)})
		}
		p := newPretend(t, rng, d)
		p.failures = 0.3
		op := fsm.Operation{ID: 1, Range: 7, Kind: fsm.OperationKind(1 + rng.IntN(3)), From: keyspace.NodeID(1 + rng.IntN(len(d.Replicas))), To: 9, Replica: 100}
		nodes := map[keyspace.NodeID]fsm.Node{9: {State: fsm.NodeServing}}
		want := len(d.Replicas)
		switch op.Kind {
		case fsm.OperationAdd:
			op.From = 0
			want++
		case fsm.OperationRemove:
			op.To, op.Replica = 0, 0
			want--
		case fsm.OperationMove, fsm.OperationTidy, fsm.OperationTransfer, fsm.OperationMerge:
		}
		leaving, _ := d.ReplicaOn(op.From)
		op.Leaving = leaving.ID
		if err := fsm.CheckOperation(&op, &d, nodes); err != nil {
			if want == 0 {
				continue
			}
			t.Fatal(err)
		}
		p.leader = keyspace.NodeID(1 + rng.IntN(len(d.Replicas)))
		if !p.drive(&op, min(want, len(d.Replicas))) {
			t.Fatalf("seed %d: %s does not end: %v, led by %s", seed, &op, p.d, p.leader)
		}
		_, hasTo := p.d.ReplicaOn(op.To)
		_, hasFrom := p.d.ReplicaOn(op.From)
		if len(p.voters()) != want || hasTo != (op.To != 0) || hasFrom || len(p.d.Replicas) != want {
			t.Fatalf("seed %d: after %s: %v", seed, &op, p.d.Replicas)
		}
	}
}

// drive takes steps until the operation is over.
func (p *pretend) drive(op *fsm.Operation, least int) bool {
	for range 200 {
		st := driver.NextStep(op, &p.d, p.leader, p.alive)
		var err error
		switch {
		case st.Done:
			return true
		case st.Transfer:
			err = p.TransferTo(p.t.Context(), p.leader, 7, st.Leader)
		case len(st.Change) > 0:
			err = p.ChangeMembers(p.t.Context(), p.leader, 7, p.d.ConfIndex, st.Change)
		}
		if n := len(p.voters()); n < least {
			p.t.Errorf("%d voters during %s (%v)", n, op, err)
		}
	}
	return false
}

// An operation goes on where it was when placement's leader dies; a second one for the
// range is refused meanwhile, and so is what makes no sense.
func TestOperationOutlivesItsLeader(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 31, 5, quiet)
		var p *pretend
		r.mover = func() driver.Mover { return p }
		d := r.bootstrap.Ranges()[0]
		p = newPretend(t, rand.New(rand.NewPCG(31, 1)), d)
		p.failures = 0.8
		p.report = r.report
		r.startAll()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		first := fsm.Operation{Range: d.Range, Kind: fsm.OperationMove, From: d.Replicas[0].Node, To: 4, Why: "asked for"}
		op, err := r.nodes[4].client.BeginOperation(ctx, first)
		if err != nil || op.Replica != 6 || op.ID == 0 {
			t.Fatalf("begun: %+v, %v", op, err)
		}
		for what, c := range map[string]struct {
			o    fsm.Operation
			kind kverror.Kind
		}{
			"a second one":     {fsm.Operation{Range: d.Range, Kind: fsm.OperationAdd, To: 5}, kverror.BadRequest},
			"no such range":    {fsm.Operation{Range: 99, Kind: fsm.OperationAdd, To: 5}, kverror.BadRequest},
			"no such node":     {fsm.Operation{Range: d.Range, Kind: fsm.OperationAdd, To: 77}, kverror.BadRequest},
			"from nobody":      {fsm.Operation{Range: d.Range, Kind: fsm.OperationMove, From: 5, To: 4}, kverror.BadRequest},
			"to one who holds": {fsm.Operation{Range: d.Range, Kind: fsm.OperationAdd, To: d.Replicas[1].Node}, kverror.BadRequest},
		} {
			if o, err := r.nodes[2].client.BeginOperation(ctx, c.o); err == nil || kverror.Of(err).Kind != c.kind {
				t.Errorf("%s: %+v, %v", what, o, err)
			}
		}
		for i := 0; ; i++ {
			under, err := r.nodes[4].client.Operations(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if len(under) == 0 {
				break
			}
			if i < 3 {
				n := r.leader()
				n.crash()
				time.Sleep(2 * time.Second)
				n.start()
			}
			time.Sleep(100 * time.Millisecond)
		}
		if got := fmt.Sprint(p.voters()); got != "[2 3 4]" {
			t.Errorf("the voters are %s", got)
		}
		after, err := r.nodes[4].client.BeginOperation(ctx, fsm.Operation{Range: d.Range, Kind: fsm.OperationAdd, To: 5})
		if err != nil || after.Replica <= op.Replica {
			t.Errorf("the next one: %+v, %v", after, err)
		}
	})
}

// An operation whose target never comes is given up, and takes what it has added along.
func TestOperationIsGivenUp(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 32, 4, quiet)
		var p *pretend
		r.mover = func() driver.Mover { return stubborn{p} }
		d := r.bootstrap.Ranges()[0]
		p = newPretend(t, rand.New(rand.NewPCG(32, 1)), d)
		p.report = r.report
		r.startAll()
		ctx := t.Context()
		if _, err := r.nodes[0].client.BeginOperation(ctx, fsm.Operation{Range: d.Range, Kind: fsm.OperationAdd, To: 4}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(15 * time.Second)
		if under, err := r.nodes[0].client.Operations(ctx); err != nil || len(under) != 1 || len(p.d.Replicas) != 4 {
			t.Fatalf("under way: %v, %v, %v", under, err, p.d.Replicas)
		}
		time.Sleep(70 * time.Second)
		if under, err := r.nodes[0].client.Operations(ctx); err != nil || len(under) != 0 || len(p.d.Replicas) != 3 {
			t.Fatalf("after a long time: %v, %v, %v", under, err, p.d.Replicas)
		}
	})
}

// report takes a descriptor to the map, as the range's leader does.
func (r *rig) report(d keyspace.Descriptor) {
	for _, n := range r.nodes {
		if c := n.current.Load(); c != nil {
			c.ReportDescriptors(d)
		}
	}
}

// A replica that was to be removed as a learner stays if it votes by then: the map is behind.
// So does a replica that came to its node after the operation was begun.
func TestOperationLeavesOthersAlone(t *testing.T) {
	voter := func(id keyspace.ReplicaID, n keyspace.NodeID) keyspace.Replica {
		return keyspace.Replica{ID: id, Node: n}
	}
	d := keyspace.Descriptor{Range: 7, Generation: 1, ConfIndex: 30, Replicas: []keyspace.Replica{voter(1, 1), voter(2, 2), voter(9, 3)}}
	all := func(keyspace.NodeID) bool { return true }
	tidy := fsm.Operation{Range: 7, Kind: fsm.OperationTidy, From: 3, Leaving: 9}
	if st := driver.NextStep(&tidy, &d, 1, all); !st.Done {
		t.Errorf("a learner that votes meanwhile: %+v", st)
	}
	d.Replicas[2].Role = keyspace.RoleLearner
	if st := driver.NextStep(&tidy, &d, 1, all); len(st.Change) != 1 || st.Change[0].Replica != 9 {
		t.Errorf("a learner: %+v", st)
	}
	d.Replicas[2] = voter(12, 3)
	for _, o := range []fsm.Operation{tidy, {Range: 7, Kind: fsm.OperationRemove, From: 3, Leaving: 9}} {
		if st := driver.NextStep(&o, &d, 1, all); !st.Done {
			t.Errorf("%s of one that has gone: %+v", &o, st)
		}
	}
	last := fsm.Operation{Range: 7, Kind: fsm.OperationRemove, From: 1, Leaving: 1}
	if st := driver.NextStep(&last, &d, 2, func(n keyspace.NodeID) bool { return n != 3 }); st.Stuck == "" {
		t.Errorf("removed from {1, 2, 3}, of which 3 is dead: %+v", st)
	}
	if st := driver.NextStep(&last, &d, 2, all); len(st.Change) != 1 || st.Change[0].Replica != 1 {
		t.Errorf("removed where all live: %+v", st)
	}
}

// stubborn is a range whose new replicas never catch up.
type stubborn struct{ *pretend }

func (s stubborn) ChangeMembers(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, confIndex uint64, changes []raftgroup.ConfChange) error {
	if changes[0].Type == raftgroup.Promote {
		return kverror.Busy
	}
	return s.pretend.ChangeMembers(ctx, node, id, confIndex, changes)
}

// Each operation says in one word why it is, what was asked for too.
func TestReasonWords(t *testing.T) {
	words, known := map[string]bool{}, 0
	for r := decide.None; r <= decide.Leaders; r++ {
		if r.Known() {
			words[(&fsm.Operation{Reason: r}).ReasonWord()] = true
			known++
		}
	}
	if words[""] || words["none"] || !words["command"] || !words["drain"] || len(words) != known || known < 12 {
		t.Errorf("the words are %v", words)
	}
	virtually(t, func(t *testing.T) {
		w := newPretended(t, 57, 4, "h")
		time.Sleep(time.Second)
		var d keyspace.Descriptor
		w.each(func(p *pretend) { d = p.d })
		to := keyspace.NodeID(1)
		for ; ; to++ {
			if _, has := d.ReplicaOn(to); !has {
				break
			}
		}
		o, err := w.leader().client.BeginOperation(t.Context(), fsm.Operation{
			Range: d.Range, Kind: fsm.OperationMove, From: d.Replicas[0].Node, To: to, Reason: decide.Drain, Why: "asked for",
		})
		if err != nil || o.ReasonWord() != "command" {
			t.Errorf("%+v is for %s, %v", o, o.ReasonWord(), err)
		}
	})
}
