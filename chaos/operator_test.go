package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/sim"
)

// The operations of an operator, by the command line alone.
const (
	opSplit    = "range split"
	opMerge    = "range merge"
	opMove     = "range move"
	opTransfer = "range transfer-leader"
	// Of the placement group itself.
	opGroupMove = "placement move"
	opGroupLead = "placement transfer-leader"
	opJoin      = "a new node joins"
	opDrain     = "node drain"
	opReplace   = "node decommission"
	opFactor    = "placement set-replication"
	opPause     = "placement pause" // only at the end
)

const (
	// operatorPause bounds the pause between two operations on ranges, nodePauseMax the
	// pause between two on nodes.
	operatorPause, nodePauseMax = 1500 * time.Millisecond, 6 * time.Second
	// commandTime is the timeout flag of a command. waitTime is the extra time of one
	// that waits for the end of its operation.
	commandTime, waitTime = 15 * time.Second, time.Minute
	// mostRanges bounds how far a storm splits if nothing merges.
	mostRanges = 20
)

// operator changes the cluster as a person at a terminal does.
type operator struct {
	s    *storm
	all  *clientv3.Client // of all machines, for etcd's own commands
	has  map[string]bool
	rngs [3]*rand.Rand // of splits and merges, of moves and transfers, of nodes
	// probes are the requests sent through each machine.
	probes []*sim.Requests
	nextID int // of the next new node
	// calming says that the storm is over, and that changes must last.
	calming bool
	running sync.WaitGroup
	// nodes is held while a node joins, leaves, is drained or is lost.
	nodes sync.Mutex
	stop  context.CancelFunc

	mu    sync.Mutex
	tries map[string]*tries // guarded by mu
}

// tries are the outcomes of an operation that was tried again and again.
type tries struct {
	tried, done int
	refusals    map[string]int
}

func newOperator(ctx context.Context, s *storm, seed uint64) *operator {
	o := &operator{s: s, all: s.c.connect(s.c.urls()...), nextID: stormMachines + 1, tries: map[string]*tries{}}
	s.t.Cleanup(func() { o.all.Close() })
	for i := range o.rngs {
		o.rngs[i] = rand.New(rand.NewPCG(seed, uint64(10+i)))
	}
	for i := range s.c.nodes {
		o.probes = append(o.probes, s.l.workload.Requests(probeIDs+i, 0))
	}
	help := func(args ...string) string {
		out, err := o.run(ctx, append(args, "--help")...)
		if err != nil {
			s.t.Errorf("help: %v", err)
		}
		return out
	}
	var leftOut []string
	o.has, leftOut = commands(help)
	s.leftOut = append(s.leftOut, leftOut...)
	return o
}

// needs are flags of skein start without which an operation would be accepted but not
// finished: placement would move nothing off a node by itself, or no node could join.
var needs = map[string][]string{opDrain: {"--node-dead-after"}, opReplace: {"--node-dead-after", "--join"}}

// commands reads from its help which operations a build of skein has. The others are
// left out of a storm, with the reason.
func commands(help func(args ...string) string) (has map[string]bool, leftOut []string) {
	has = map[string]bool{}
	for _, op := range []string{opSplit, opMerge, opMove, opTransfer, opGroupMove, opGroupLead, opFactor, opDrain, opReplace, opPause} {
		group, name, _ := strings.Cut(op, " ")
		for line := range strings.Lines(help(group)) {
			fields := strings.Fields(line)
			has[op] = has[op] || strings.HasPrefix(line, "  ") && len(fields) > 1 && fields[0] == name
		}
		if !has[op] {
			leftOut = append(leftOut, fmt.Sprintf("skein %s: this build has no such command", op))
			continue
		}
		for _, flag := range needs[op] {
			if !strings.Contains(help("start"), flag) {
				has[op] = false
				leftOut = append(leftOut, fmt.Sprintf("skein %s: skein start of this build has no %s", op, flag))
			}
		}
	}
	if has[opJoin] = strings.Contains(help("start"), "--join"); !has[opJoin] {
		leftOut = append(leftOut, opJoin+": skein start of this build has no --join")
	}
	return has, leftOut
}

// run runs a command of skein. An error contains the command's output.
func (o *operator) run(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime+waitTime+10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.s.c.nodes[0].binary, args...)
	cmd.Env = environment()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("skein %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// ask runs a command with the endpoints of all machines in a random order.
func (o *operator) ask(ctx context.Context, rng *rand.Rand, args ...string) (string, error) {
	urls := o.s.c.urls()
	rng.Shuffle(len(urls), func(i, j int) { urls[i], urls[j] = urls[j], urls[i] })
	if root := o.s.c.root; root != nil {
		args = append(args, "--user", root.name+":"+root.password)
	}
	return o.run(ctx, append(args, "--endpoints", strings.Join(urls, ","), "--command-timeout", commandTime.String())...)
}

// start begins to change the cluster: up to three operations at a time.
func (o *operator) start(ctx context.Context) {
	ctx, o.stop = context.WithCancel(ctx)
	loop := func(rng *rand.Rand, most time.Duration, guard *sync.Mutex, ops ...string) {
		ops = slices.DeleteFunc(ops, func(op string) bool { return !o.has[op] })
		if len(ops) == 0 {
			return
		}
		o.running.Go(func() {
			for ctx.Err() == nil {
				wait(ctx, most/4+time.Duration(rng.Int64N(int64(most))))
				if guard != nil {
					guard.Lock()
				}
				o.do(ctx, rng, ops[rng.IntN(len(ops))])
				if guard != nil {
					guard.Unlock()
				}
			}
		})
	}
	loop(o.rngs[0], operatorPause, nil, opSplit, opMerge)
	loop(o.rngs[1], operatorPause, nil, opMove, opMove, opTransfer, opTransfer, opGroupMove, opGroupLead)
	loop(o.rngs[2], nodePauseMax, &o.nodes, opJoin, opDrain, opReplace, opFactor)
}

// end stops new operations and waits for those under way.
func (o *operator) end() {
	o.stop()
	o.running.Wait()
}

// do does one operation and counts its outcome.
func (o *operator) do(ctx context.Context, rng *rand.Rand, op string) bool {
	start := time.Now()
	ctx = context.WithoutCancel(ctx) // an operator does not leave in the middle of it
	what, err := o.one(ctx, rng, op)
	if what == "" && err == nil {
		return false // there was no object for it
	}
	took := time.Since(start).Round(time.Millisecond)
	o.mu.Lock()
	defer o.mu.Unlock()
	t := o.tries[op]
	if t == nil {
		t = &tries{refusals: map[string]int{}}
		o.tries[op] = t
	}
	t.tried++
	if err != nil {
		t.refusals[reason(err)]++
		o.s.note("operator: %s %s, after %v: %v", op, what, took, err)
		return false
	}
	t.done++
	o.s.note("operator: %s %s, in %v", op, what, took)
	return true
}

// reason is the part of a refusal that is equal for all refusals of its kind.
func reason(err error) string {
	text := err.Error()
	if _, after, found := strings.Cut(text, "skein: "); found {
		text = after
	}
	text, _, _ = strings.Cut(text, "\n")
	return strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return '#'
		}
		return r
	}, text)
}

// rangeRow is a range as printed by skein range list -w json.
type rangeRow struct {
	ID       uint64   `json:"id"`
	Start    string   `json:"start"`
	End      string   `json:"end"`
	Leader   string   `json:"leader"`
	Replicas []string `json:"replicas"`
}

func (o *operator) ranges(ctx context.Context, rng *rand.Rand) ([]rangeRow, error) {
	out, err := o.ask(ctx, rng, "range", "list", "-w", "json")
	if err != nil {
		return nil, err
	}
	var list struct{ Ranges []rangeRow }
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list.Ranges) == 0 {
		return nil, fmt.Errorf("skein range list -w json: %w: %s", err, out)
	}
	return list.Ranges, nil
}

// one does one random operation. what names its object.
func (o *operator) one(ctx context.Context, rng *rand.Rand, op string) (what string, err error) {
	switch op {
	case opDrain:
		return o.drain(ctx, rng)
	case opReplace:
		return o.replace(ctx, rng)
	case opJoin:
		return o.join(ctx, rng)
	case opGroupMove, opGroupLead:
		return o.group(ctx, rng, op)
	case opFactor:
		return o.setReplication(ctx, rng)
	}
	ranges, err := o.ranges(ctx, rng)
	if err != nil {
		return "", err
	}
	i := rng.IntN(len(ranges))
	r := ranges[i]
	names := o.s.c.names()
	switch op {
	case opSplit:
		key := sim.SomeKey(rng)
		if len(ranges) >= mostRanges || slices.ContainsFunc(ranges, func(r rangeRow) bool { return r.Start == key }) {
			return "", nil
		}
		_, err = o.ask(ctx, rng, "range", "split", key)
		return "at " + key, err
	case opMerge:
		if r.End == "" {
			return "", nil // the last one has no right neighbour
		}
		_, err = o.ask(ctx, rng, "range", "merge", fmt.Sprint(r.ID), "--wait-timeout", commandTime.String())
		return fmt.Sprintf("of range %d and the next", r.ID), err
	case opMove:
		names = slices.DeleteFunc(names, func(n string) bool { return slices.Contains(r.Replicas, n) })
		if len(names) == 0 || len(r.Replicas) == 0 {
			return "", nil
		}
		from, to := r.Replicas[rng.IntN(len(r.Replicas))], names[rng.IntN(len(names))]
		_, err = o.ask(ctx, rng, "range", "move", fmt.Sprint(r.ID), "--from", from, "--to", to, "--wait-timeout", commandTime.String())
		return fmt.Sprintf("of range %d from %s to %s", r.ID, from, to), err
	case opTransfer:
		to := r.Replicas[rng.IntN(len(r.Replicas))]
		_, err = o.ask(ctx, rng, "range", "transfer-leader", fmt.Sprint(r.ID), "--to", to)
		return fmt.Sprintf("of range %d to %s", r.ID, to), err
	}
	return "", fmt.Errorf("no operation is called %q", op)
}

// holders returns the nodes that hold the placement group, and its leader.
func (o *operator) holders(ctx context.Context, rng *rand.Rand) (holders []string, leader string, err error) {
	out, err := o.ask(ctx, rng, "placement", "show", "-w", "json")
	if err != nil {
		return nil, "", err
	}
	var shown struct {
		Leader   string
		Replicas []struct{ Node string }
	}
	if err := json.Unmarshal([]byte(out), &shown); err != nil {
		return nil, "", fmt.Errorf("skein placement show -w json: %w: %s", err, out)
	}
	for _, r := range shown.Replicas {
		holders = append(holders, r.Node)
	}
	return holders, shown.Leader, nil
}

// group changes the leader or the members of the placement group.
func (o *operator) group(ctx context.Context, rng *rand.Rand, op string) (what string, err error) {
	holders, leader, err := o.holders(ctx, rng)
	if err != nil {
		return "", err
	}
	if op == opGroupLead {
		holders = slices.DeleteFunc(holders, func(n string) bool { return n == leader })
		if len(holders) == 0 {
			return "", nil
		}
		to := holders[rng.IntN(len(holders))]
		_, err = o.ask(ctx, rng, "placement", "transfer-leader", "--to", to)
		return "from " + leader + " to " + to, err
	}
	free := slices.DeleteFunc(o.s.c.names(), func(n string) bool { return slices.Contains(holders, n) })
	if len(free) == 0 || len(holders) == 0 {
		return "", nil
	}
	from, to := holders[rng.IntN(len(holders))], free[rng.IntN(len(free))]
	_, err = o.ask(ctx, rng, "placement", "move", "--from", from, "--to", to, "--wait-timeout", commandTime.String())
	return "from " + from + " to " + to, err
}

// setReplication sets how many voters ranges have: 3 or 5 in a storm, where nobody
// waits until they are reached, and 3 at the end.
func (o *operator) setReplication(ctx context.Context, rng *rand.Rand) (what string, err error) {
	factor, waiting := fmt.Sprint(voters), []string{"--wait-timeout", waitTime.String()}
	if !o.calming {
		factor, waiting = fmt.Sprint(voters+2*rng.IntN(2)), []string{"--wait=false"}
	}
	_, err = o.ask(ctx, rng, append([]string{"placement", "set-replication", factor}, waiting...)...)
	return "to " + factor, err
}

// drain drains a node and takes it back after a while, whatever the drain's outcome.
func (o *operator) drain(ctx context.Context, rng *rand.Rand) (what string, err error) {
	name := o.s.c.names()[rng.IntN(stormMachines)]
	_, err = o.ask(ctx, rng, "node", "drain", name, "--wait-timeout", waitTime.String())
	wait(ctx, time.Duration(rng.Int64N(int64(3*time.Second))))
	return name, errors.Join(err, o.insist(ctx, rng, "node", "undrain", name))
}

// insist repeats a command until it succeeds.
func (o *operator) insist(ctx context.Context, rng *rand.Rand, args ...string) error {
	for term := o.s.c.still.term(replacePatience, "skein %s", strings.Join(args, " ")); ; wait(ctx, time.Second) {
		_, err := o.ask(ctx, rng, args...)
		if err == nil {
			return nil
		}
		if term.over() {
			o.s.c.late("operator: skein %s is not done in %v: %v", strings.Join(args, " "), replacePatience, err)
			return err
		}
	}
}

// replacePatience bounds how long a node may take to give up all that it holds, and a
// new one to join.
const replacePatience = 5 * time.Minute

// replace removes a node after it has given up all that it holds. Then a new node with
// an empty disk and another name takes its place.
func (o *operator) replace(ctx context.Context, rng *rand.Rand) (what string, err error) {
	machine := rng.IntN(stormMachines)
	n := o.s.c.nodes[machine]
	old := n.is()
	n.leaves.Store(true) // it ends as soon as it learns of its removal, maybe before the command does
	defer n.leaves.Store(false)
	if _, err := o.ask(ctx, rng, "node", "decommission", old, "--wait-timeout", waitTime.String()); err != nil {
		// The removal goes on or is refused: the node stays unless it has gone by now.
		gone, again := o.takeBack(ctx, rng, old)
		if !gone {
			return old, errors.Join(err, again)
		}
	}
	n.away.Store(true)
	defer n.away.Store(false)
	n.busy.Lock() // when nothing in it is broken any more
	defer n.busy.Unlock()
	n.kill()
	if n.data != nil {
		if err := n.data.renew(); err != nil {
			o.s.t.Errorf("a new disk for machine %d: %v", machine+1, err)
			return old, err
		}
	}
	name := o.begin(ctx, machine)
	return fmt.Sprintf("%s by %s", old, name), o.joined(ctx, rng, name)
}

// join has a node join on the last machine, once.
func (o *operator) join(ctx context.Context, rng *rand.Rand) (what string, err error) {
	n := o.s.c.nodes[stormMachines]
	if !n.away.Load() {
		return "", nil
	}
	name := o.begin(ctx, stormMachines)
	if err = o.joined(ctx, rng, name); err == nil {
		n.away.Store(false)
	}
	return name, err
}

// begin starts a node under a new name on a machine without one. It only gets the
// addresses of the others.
func (o *operator) begin(ctx context.Context, machine int) (name string) {
	name = fmt.Sprintf("n%d", o.nextID)
	o.nextID++
	n := o.s.c.nodes[machine]
	n.rename(name)
	if o.s.c.root == nil {
		others := strings.ReplaceAll(strings.Join(o.s.c.urls(), ","), "http://", "")
		n.args = append(o.s.c.arguments(machine), "--join", others)
	} else {
		n.args = append(o.s.c.arguments(machine), "--initial-cluster-state", "existing", "--initial-cluster", o.added(ctx, machine))
	}
	o.s.c.start(n)
	return name
}

// added has root admit the node of a machine, because a node without a certificate may not ask for that by itself where
// users are checked. It returns the node's --initial-cluster.
func (o *operator) added(ctx context.Context, machine int) string {
	var members []string
	for i, n := range o.s.c.nodes {
		if i == machine || !n.away.Load() {
			members = append(members, n.is()+"="+peerURL(i))
		}
	}
	for term := o.s.c.still.term(replacePatience, "adding machine %d", machine+1); ; wait(ctx, 200*time.Millisecond) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		_, err := o.all.MemberAdd(ctx, []string{peerURL(machine)})
		cancel()
		if term.over() {
			o.s.c.late("operator: machine %d is not added in %v: %v", machine+1, replacePatience, err)
		}
		if err == nil || message(err) == message(rpctypes.ErrPeerURLExist) || term.over() {
			return strings.Join(members, ",")
		}
	}
}

// takeBack cancels the removal of a node, and says whether the node has gone already.
func (o *operator) takeBack(ctx context.Context, rng *rand.Rand, name string) (gone bool, err error) {
	for term := o.s.c.still.term(replacePatience, "taking %s back", name); !term.over(); wait(ctx, time.Second) {
		if _, err = o.ask(ctx, rng, "node", "recommission", name); err == nil {
			return false, nil
		}
		if alive, lerr := o.members(ctx, rng); lerr == nil {
			if _, still := alive[name]; !still {
				return true, nil
			}
		}
	}
	o.s.c.late("operator: %s is neither gone nor taken back in %v: %v", name, replacePatience, err)
	return false, err
}

// members returns the names of all nodes, and which of them are alive.
func (o *operator) members(ctx context.Context, rng *rand.Rand) (alive map[string]bool, err error) {
	out, err := o.ask(ctx, rng, "node", "list", "-w", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Nodes []struct {
			Name  string
			Alive bool
		}
		Stale bool
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || list.Stale {
		return nil, fmt.Errorf("skein node list -w json: %w: %s", err, out)
	}
	alive = map[string]bool{}
	for _, n := range list.Nodes {
		alive[n.Name] = n.Alive
	}
	return alive, nil
}

// joined waits until a node is a member and alive.
func (o *operator) joined(ctx context.Context, rng *rand.Rand, name string) error {
	for term := o.s.c.still.term(replacePatience, "the joining of %s", name); ; wait(ctx, 200*time.Millisecond) {
		alive, err := o.members(ctx, rng)
		if alive[name] {
			return nil
		}
		if term.over() {
			err = fmt.Errorf("%s has not joined in %v: %v, %w", name, replacePatience, alive, err)
			o.s.c.late("operator: %v", err)
			return err
		}
	}
}

// tried is how often an operation was tried.
func (o *operator) tried(op string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t := o.tries[op]; t != nil {
		return t.tried
	}
	return 0
}

// done is how often an operation was done.
func (o *operator) done(op string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	if t := o.tries[op]; t != nil {
		return t.done
	}
	return 0
}

// makesRoomFor names the operation that gives another one an object: one range cannot
// be merged, and a storm does not split without bound.
var makesRoomFor = map[string]string{opSplit: opMerge, opMerge: opSplit}

// calm requires each operation of this build to succeed once on a healthy cluster. A
// refused operation is tried again on another object.
func (o *operator) calm(ctx context.Context) {
	o.calming = true
	// First, because everything else depends on it.
	ops := append([]string{opFactor}, slices.DeleteFunc(slices.Sorted(maps.Keys(o.has)), func(op string) bool { return op == opFactor })...)
	for _, op := range ops {
		if !o.has[op] || op == opPause || op == opJoin && !o.s.c.nodes[stormMachines].away.Load() {
			continue
		}
		term := o.s.c.still.term(stormPatience, "calm: %s", op)
		rng := o.rngs[0]
		before := o.tried(op)
		for !o.do(ctx, rng, op) {
			if other := makesRoomFor[op]; other != "" && o.tried(op) == before {
				o.do(ctx, rng, other)
			}
			if term.over() {
				o.s.c.late("operator: %s is not done in %v on a cluster that is well: %v", op, stormPatience, o.tries[op].refusals)
				break
			}
			wait(ctx, 200*time.Millisecond)
		}
		o.s.measure("calm: "+op, term.took())
	}
	o.s.tidied(ctx)
	if o.has[opPause] {
		// Placement's own operations must come to an end.
		_ = o.insist(ctx, o.rngs[0], "placement", "pause")
	}
}

// The help text names the commands of a build; missing ones are found and reported.
func TestCommandsAreFoundByTheirHelp(t *testing.T) {
	pages := map[string]string{
		"range": "List ranges\n\nAvailable Commands:\n  list            List\n  move            Move merge\n  split           Split\n  transfer-leader Lead\n",
		"node":  "Nodes\n\nAvailable Commands:\n  drain        Drain\n  decommission Give up\n", "placement": "Placement\n",
		"start": "Flags:\n  --name\n  --node-dead-after 5m\n",
	}
	page := func(args ...string) string { return pages[args[0]] }
	has, leftOut := commands(page)
	for op, want := range map[string]bool{opSplit: true, opMove: true, opTransfer: true, opMerge: false, opDrain: true, opReplace: false, opJoin: false, opPause: false} {
		if has[op] != want {
			t.Errorf("%s: %t", op, has[op])
		}
	}
	if text := strings.Join(leftOut, "\n"); !strings.Contains(text, opMerge) || !strings.Contains(text, "--join") || strings.Contains(text, opDrain) {
		t.Errorf("left out: %s", text)
	}
	pages["start"] += "  --join ''\n"
	if has, _ := commands(page); !has[opReplace] {
		t.Error("a node can be decommissioned and another one join, and none is replaced")
	}
	pages["start"] = "Flags:\n  --join ''\n"
	if has, _ := commands(page); has[opReplace] || has[opDrain] {
		t.Error("nothing leaves a node by itself, and nodes are drained")
	}
}
