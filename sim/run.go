package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap/zapcore"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/sim/judge"
	"github.com/skeindb/skein/sim/simbus"
)

// Config describes a run.
type Config struct {
	Seed uint64
	// Nodes are 3, 5 or 6. Clients is the number of concurrent clients. BurstOps is the
	// operations of one client in one burst, on average.
	Nodes, Clients, BurstOps int
	// Txns is how many of a hundred operations are transactions over some keys, beside
	// the other transactions.
	Txns int
	// Impatient is how many impatient clients each node has in addition; 0 is one.
	Impatient int
	// Leases is how many clients hold leases in addition; the others then attach keys to
	// these.
	Leases int
	// Users is how many users there are, whose rights change. Each has clients of its own in addition. 0 is that nobody
	// knows of users.
	Users int
	// Faults are injected one after the other, in a random order. Splits is how many
	// splits are tried meanwhile.
	Faults []Fault
	Splits int
	// Lasts is how long each fault lasts at least; 0 is a random time, mostly below three election timeouts.
	Lasts time.Duration
	// Pairs has Faults injected two at a time, in their order.
	Pairs bool
	// Moves is how many moves of replicas and leaders are tried meanwhile; Nodes is 5
	// then.
	Moves int
	// Merges is how many merges of neighbours are tried meanwhile.
	Merges int
	// Zones is the number of zones in which the machines stand, by turns; 0 means no
	// zones. Then moves stay within a zone, and replicas in different zones stay so.
	Zones int
	// SystemMoves is how many moves of the placement group's replicas are tried
	// meanwhile. Nodes is even then: there must be a node without a replica.
	SystemMoves int
	// Lose is how many machines are lost for good meanwhile.
	Lose int
	// Joins is how many times meanwhile a node joins, or leaves for good and another one
	// joins in its place. Spares are the machines that have no node at first, beside the
	// Nodes.
	Joins, Spares int
	// RangeMaxBytes and RangeSplitLoad are the nodes'; 0 is their default. If one of
	// them is set, ranges must split by themselves.
	RangeMaxBytes, RangeSplitLoad int64
	// MergeAfter is how long neighbours must be small and cold before they merge by
	// themselves, and such a merge must happen. 0 is the nodes' default, longer than a
	// run. Merges is 0 with it.
	MergeAfter time.Duration
	// Unheld says that the left range of a merge serves until it absorbs: the hold may
	// be lost.
	Unheld bool
	// Padding is up to how many incompressible bytes more a value has than it needs.
	Padding int
	// Together moves the sequencer, before each fault, to the leader of the first hot
	// key's range.
	Together bool
	// SplitEvery is the least time between two splits, and a third of the most. 0 is 1 s
	// and puts most splits between groups of keys.
	SplitEvery time.Duration
	// Compactions is how many compactions are tried meanwhile. ShortLogs makes all nodes
	// but one keep so short a log that a follower which misses anything needs a
	// snapshot. The one node has much in memory that is not durable.
	Compactions int
	ShortLogs   bool
	// Cuts is how often meanwhile a reader makes a cut through the whole store, and reads it.
	Cuts int
	// Load is how many revisions the store has that is loaded into the cluster before anything else, with faults of
	// its own; 0 is a cluster that begins empty.
	Load int
	// LoadFaults are injected one after the other while it is loaded.
	LoadFaults []Fault
	// NoLeaseReads is the nodes' --lease-reads=false.
	NoLeaseReads bool
	// Crowded has idle groups sleep at once, as on nodes with many awake groups.
	Crowded bool
	// Quiet is how long the clients run if there are no faults.
	Quiet time.Duration
	// LogLevel is the level of the nodes' logs in the trace; 0 is info.
	LogLevel zapcore.Level
	// Borders are the borders of the first ranges.
	Borders []string

	mutation machineBug
}

// machineBug is a mutation between a node and its machine, added by a test, to see that the
// checkers find it. The zero value is none.
type machineBug struct {
	// bus may stand in front of a node's bus.
	bus func(node.Bus) node.Bus
	// noSync makes the disks lie: only the first sync of each wal file does anything,
	// and a crash drops all that came after it.
	noSync bool
	// freeze makes the clock of a node nearly stand still while it is cut off, as that
	// of a suspended machine does. So its leases go on for ever.
	freeze bool
}

func (c *Config) splitKeys() [][]byte {
	keys := make([][]byte, len(c.Borders))
	for i, b := range c.Borders {
		keys[i] = []byte(b)
	}
	return keys
}

// mergeHold is how long nodes hold the left range of a merge; 0 is their default.
func (c *Config) mergeHold() time.Duration {
	if c.Unheld {
		return -1
	}
	return 0
}

func (c *Config) splitEvery() time.Duration { return cmp.Or(c.SplitEvery, time.Second) }

// impatient is the number of all impatient clients.
func (c *Config) impatient() int { return (c.Nodes + c.Spares) * max(1, c.Impatient) }

// Report is the result of a run, to be judged.
type Report struct {
	judge.Evidence

	Config   Config
	Trace    *Trace
	Happened map[Fault]int
	Met      map[Pair]int
	// Splits, Compactions, Snapshots and CutOffs count the nodes' work. The last two are
	// snapshots that followers installed, and truncations past what a follower needed.
	Splits, Compactions int64
	Snapshots, CutOffs  int
	// Moves and SystemMoves count the operations begun, of ranges and of the placement
	// group. Merges counts the merges that a node has executed.
	Moves, SystemMoves, Merges int64
	// Joined and Left count the nodes that joined and those that left for good. Refused
	// counts the nodes that were refused after the loss of their disks, and Beside those
	// of them that returned while another one joined. Died counts those that lost their
	// power while they joined. SelfSplit counts the ranges that their leaders split by
	// themselves.
	Joined, Left, Refused, Beside, Died int64
	SelfSplits                          int
	// SelfMerges are, if Config.MergeAfter is set, the replicas of ranges that have
	// absorbed their neighbours.
	SelfMerges int
	Network    simbus.Stats
	// Elapsed is the virtual time of the run.
	Elapsed time.Duration
}

// Bounds of the end of a run, in virtual time.
const (
	// liveWithin: this long after healing every gateway serves every range again.
	liveWithin = 20 * time.Second
	// promptWithin: from then on a single operation takes at most this long.
	promptWithin = time.Second
	// watchWithin: this long after the last write watchers have everything.
	watchWithin = 3 * time.Second
	// convergeWithin: this long after the last write the replicas are equal.
	convergeWithin = 15 * time.Second
	// mergedWithin is how much longer a run may take in which ranges must merge by
	// themselves.
	mergedWithin = time.Minute
	// orphansWithin: this long after healing no node holds a replica that is no member
	// of its range any more. Repairs, and moves because nodes left, may end later; then
	// convergeWithin counts.
	orphansWithin = 30 * time.Second
)

// Run makes one run into rep. The caller sets rep's Config, History and Trace, and so
// has them if the run hangs. It must be called in a testing/synctest bubble.
func Run(rep *Report) {
	rng := rand.New(rand.NewPCG(rep.Config.Seed, 1))
	rep.Faulty = len(rep.Config.Faults) > 0
	c := newCluster(rep.Config, rng, rep.Trace)
	n := newNemesis(c)
	defer func() {
		rep.Network, rep.Elapsed = c.net.Stats(), c.elapsed()
		rep.Violations = append(rep.Violations, n.wrong...)
		rep.Joined, rep.Left, rep.Refused, rep.Beside, rep.Died = n.joins.Load(), n.leaves.Load(), n.refusals.Load(), n.besides.Load(), n.deaths.Load()
		rep.Violations = append(append(rep.Violations, c.doubles()...), c.gaveUp()...)
		c.crash(0, c.machines...) // whatever still runs
		rep.Snapshots, rep.CutOffs, rep.SelfSplits = c.snapshots, c.cutOffs, c.bySize+c.byLoad
	}()
	if err := c.bootAll(); err != nil {
		rep.Violate("the cluster does not start: %v", err)
		return
	}
	if rep.Config.Load > 0 && !loadStore(rep, c, n) {
		return
	}
	stopWatching := watchAll(c)
	defer func() {
		if stopWatching != nil {
			stopWatching()
		}
	}()
	if !chaos(rep, c, n) || n.broken() {
		return
	}
	healed := c.elapsed()
	c.logf("all is healed")
	probe := newClient(c, rep.History, rep.Config.Clients+rep.Config.impatient())
	if !n.changed(rep) || !live(rep, c, probe) || !repaired(rep, c) {
		return
	}
	rep.Violations = append(rep.Violations, n.missing()...)
	if size, load := c.countSplits(); rep.Config.RangeMaxBytes > 0 && size == 0 || rep.Config.RangeSplitLoad > 0 && load == 0 {
		rep.Violate("the fault %q never happened: %d by size, %d by load", SelfSplit, size, load)
	}
	if rep.SelfMerges = c.countMerges(); rep.Config.MergeAfter > 0 && rep.SelfMerges == 0 {
		rep.Violate("the fault %q never happened", SelfMerge)
	}
	if !n.heldStays(rep, probe) || len(rep.Config.Faults) == 0 && !reboot(rep, c, probe) {
		return
	}
	converge(rep, c, healed)
	c.sleep(watchWithin)
	rep.Watchers, stopWatching = stopWatching(), nil
	if err := c.stopAll(); err != nil {
		rep.Violate("a clean stop failed: %v", err)
	}
	var err error
	if rep.Versions, err = readDisks(c, n.kept); err != nil {
		rep.Violate("%v", err)
	}
}

// awaitHeat lets the clients go on, at most four times as long, until a range was split
// for its load. A leader observes the load for half a minute, and each move of the
// leader restarts that.
func (c *cluster) awaitHeat(cfg *Config) {
	for end := c.elapsed() + 3*cfg.Quiet; cfg.RangeSplitLoad > 0 && c.elapsed() < end; {
		if _, load := c.countSplits(); load > 0 {
			return
		}
		c.sleep(time.Second)
	}
}

// reboot stops all nodes at the same time, in order, and starts them again. Nothing is lost.
func reboot(rep *Report, c *cluster, probe *client) bool {
	rep.Rebooted = judge.Known(rep.History.Ops())
	err := c.stopAll()
	if err == nil {
		err = c.bootAll()
	}
	if err != nil {
		rep.Violate("a clean stop and start of all nodes: %v", err)
		return false
	}
	return live(rep, c, probe)
}

// chaos runs clients and faults beside each other and heals everything.
func chaos(rep *Report, c *cluster, n *nemesis) bool {
	stopLoad := load(c, rep.History)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	if c.cfg.Users > 0 {
		rep.Access = &judge.Access{}
		u := &users{venue: c, prepare: c.raiseAccess, logf: c.logf, c: c, h: rep.History, a: rep.Access}
		u.load(stop, &wg, make(chan struct{}))
	}
	n.splitLoop(stop, &wg)
	n.moveLoop(stop, &wg)
	n.mergeLoop(stop, &wg)
	n.systemMoveLoop(stop, &wg)
	n.loseLoop(stop, &wg)
	n.joinLoop(stop, &wg)
	n.zoneLoop(stop, &wg)
	if c.cfg.Cuts > 0 {
		n.cutter = newCutter(c, rep.History)
		n.cutLoop(stop, &wg)
	}
	n.compactLoop(stop, &wg, newClient(c, rep.History, rep.Config.Clients+rep.Config.impatient()+1))
	c.sleep(2 * time.Second)
	err := n.run()
	if len(rep.Config.Faults) == 0 {
		c.sleep(rep.Config.Quiet)
		c.awaitHeat(&rep.Config)
	}
	n.awaitMerge()
	c.net.HealAll()
	_ = n.calmNetwork()
	close(stop)
	stopLoad()
	wg.Wait()
	rep.Met = n.met
	rep.Happened, rep.Splits, rep.Compactions, rep.Failures = n.happened, n.splits.Load(), n.compactions.Load(), n.failures+int(n.losses.Load()+n.deaths.Load())
	rep.Moves, rep.SystemMoves, rep.Merges = n.moves.Load(), n.systemMoves.Load(), n.merges.Load()
	if err == nil {
		err = c.bootAll()
	}
	if err != nil {
		rep.Violate("a node does not start again: %v", err)
		return false
	}
	return len(c.gaveUp()) == 0
}

// gaveUp names the nodes that have given up although they run.
func (c *cluster) gaveUp() (bad []string) {
	for m, r := range c.runs() {
		if err := r.core.Err(); err != nil && !m.leaves.Load() { // a removed node does not go on
			bad = append(bad, fmt.Sprintf("node %s gave up: %v", m.id(), err))
		}
	}
	return bad
}

// live waits until every gateway serves every group of keys, and everything at once,
// since a range may have no key that is written here. Then it expects every operation
// to be answered at once.
func live(rep *Report, c *cluster, probe *client) bool {
	begin := c.elapsed()
	each := func(timeout time.Duration, f func(*judge.Op, time.Duration) bool) bool {
		for _, m := range c.standing() {
			r := m.current()
			for _, req := range probe.probes() {
				for {
					from := c.elapsed()
					o := probe.do(m, r, req, timeout)
					if o.Outcome == judge.Answered && f(o, c.elapsed()-from) {
						break
					}
					if !f(o, c.elapsed()-from) {
						return false
					}
					if p, ok := req.(*pb.PutRequest); ok {
						p.Value = probe.value()
					}
					c.sleep(50 * time.Millisecond)
				}
			}
		}
		return true
	}
	ok := each(liveWithin, func(o *judge.Op, _ time.Duration) bool {
		if c.elapsed()-begin <= liveWithin {
			return true
		}
		rep.Violate("not live %v after healing: %s", c.elapsed()-begin, o)
		return false
	})
	return ok && each(promptWithin, func(o *judge.Op, took time.Duration) bool {
		if o.Outcome == judge.Answered && took <= promptWithin {
			return true
		}
		rep.Violate("an operation of a healthy cluster took %v: %s", took, o)
		return false
	}) && drain(rep, c, probe) && whole(rep, c, probe)
}

// probes are requests that no other range can answer.
func (c *client) probes() (reqs []proto.Message) {
	for _, g := range judge.Groups {
		reqs = append(reqs,
			&pb.PutRequest{Key: fmt.Appendf(nil, "%c0", g), Value: c.value()},
			&pb.RangeRequest{Key: fmt.Appendf(nil, "%c0", g)})
	}
	return append(reqs, readAll())
}

// readAll is a read of all keys.
func readAll() *pb.RangeRequest { return &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}} }

// whole reads everything at every gateway; these are the last operations of the
// history.
func whole(rep *Report, c *cluster, probe *client) bool {
	for _, m := range c.standing() {
		o := probe.do(m, m.current(), readAll(), promptWithin)
		if o.Outcome != judge.Answered {
			rep.Violate("reading everything from a healthy cluster: %s", o)
			return false
		}
	}
	return true
}

// converge waits until all replicas of all ranges have the same hash at the same index,
// every node's range map agrees with the replicas, and nobody holds anything else.
func converge(rep *Report, c *cluster, healed time.Duration) {
	for begin := c.elapsed(); ; c.sleep(100 * time.Millisecond) {
		err, now := converged(c), c.elapsed()
		orphan := errors.Is(err, errOrphan)
		switch {
		case err == nil:
			return
		case orphan && now-begin > convergeWithin && now-healed > orphansWithin:
			rep.Violate("an orphan %v after healing: %v", now-healed, err)
			return
		case errors.Is(err, errNever) || !orphan && now-begin > convergeWithin:
			rep.Violate("the replicas do not become equal within %v: %v", convergeWithin, err)
			return
		}
	}
}

// errNever marks an error that waiting does not mend, errOrphan a replica that is no
// member of its range.
var (
	errNever  = errors.New("for ever")
	errOrphan = errors.New("an orphan")
)

func converged(c *cluster) error {
	ctx := context.Background()
	for _, m := range c.standing() {
		r := m.current()
		ds, err := r.core.Placement().RangeMap(ctx)
		if err != nil {
			return fmt.Errorf("range map of node %s: %w", m.id(), err)
		}
		if err := covers(ds); err != nil {
			return fmt.Errorf("range map of node %s: %w: %w", m.id(), err, errNever)
		}
		for i := range ds {
			if err := sameReplicas(ctx, r.core.Ranges(), &ds[i]); err != nil {
				return err
			}
		}
		if err := settled(ctx, c, ds); err != nil {
			return err
		}
		if err := checkAttachments(ctx, r, ds); err != nil {
			return err
		}
	}
	return samePlacement(ctx, c)
}

// covers says whether the ranges cover the keyspace exactly once.
func covers(ds []keyspace.Descriptor) error {
	var at []byte
	seen := map[keyspace.RangeID]bool{}
	for i, d := range ds {
		switch {
		case string(d.Span.Start) != string(at):
			return fmt.Errorf("range %s begins at %q, and the one before it ends at %q", d.Range, d.Span.Start, at)
		case seen[d.Range]:
			return fmt.Errorf("range %s is there twice", d.Range)
		case len(d.Span.End) == 0 && i < len(ds)-1:
			return fmt.Errorf("range %s has no end and is not the last one", d.Range)
		}
		seen[d.Range] = true
		at = d.Span.End
	}
	if len(ds) == 0 || len(at) != 0 {
		return fmt.Errorf("nothing covers what comes from %q on", at)
	}
	return nil
}

// rangeStates is what nodes are asked about their replicas.
type rangeStates interface {
	Show(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID) (*shard.Status, error)
	HashAt(ctx context.Context, node keyspace.NodeID, id keyspace.RangeID, at, compacted keyspace.Revision) (uint64, error)
}

// sameReplicas compares all replicas of a range with its descriptor and each other.
func sameReplicas(ctx context.Context, ask rangeStates, d *keyspace.Descriptor) error {
	type state struct {
		index uint64
		hash  string
	}
	var first state
	leaders := 0
	for i, rep := range d.Replicas {
		st, err := ask.Show(ctx, rep.Node, d.Range)
		if err != nil {
			return fmt.Errorf("range %s on node %s: %w", d.Range, rep.Node, err)
		}
		if st.Serving {
			leaders++
		}
		own := &st.Descriptor
		if own.Generation != d.Generation || !own.Span.Equal(d.Span) || len(own.Replicas) != len(d.Replicas) {
			return fmt.Errorf("range %s on node %s says %+v, and the map %+v", d.Range, rep.Node, own, d)
		}
		h, err := ask.HashAt(ctx, rep.Node, d.Range, keyspace.MaxRevision-1, st.Compacted)
		if err != nil {
			return fmt.Errorf("range %s on node %s: hash: %w", d.Range, rep.Node, err)
		}
		// The hash is of the state when it is taken, so it counts only if the applied
		// index is the same before and after.
		after, err := ask.Show(ctx, rep.Node, d.Range)
		if err != nil {
			return fmt.Errorf("range %s on node %s: %w", d.Range, rep.Node, err)
		}
		if after.Applied != st.Applied {
			return fmt.Errorf("range %s on node %s applies: %d, then %d", d.Range, rep.Node, st.Applied.Index, after.Applied.Index)
		}
		now := state{st.Applied.Index, fmt.Sprintf("%s %016x", st.Hash, h)}
		if i == 0 {
			first = now
		}
		switch {
		case now.index != first.index:
			return fmt.Errorf("range %s: node %s has applied %d and node %s %d", d.Range, d.Replicas[0].Node, first.index, rep.Node, now.index)
		case now.hash != first.hash:
			return fmt.Errorf("range %s at index %d: node %s has the hash %s and node %s %s: %w",
				d.Range, now.index, d.Replicas[0].Node, first.hash, rep.Node, now.hash, errNever)
		}
	}
	if leaders > 1 {
		return fmt.Errorf("range %s has %d leaders", d.Range, leaders)
	}
	return nil
}
