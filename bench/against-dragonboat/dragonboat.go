package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/lni/dragonboat/v4"
	"github.com/lni/dragonboat/v4/config"
	"github.com/lni/dragonboat/v4/logger"
	"github.com/lni/dragonboat/v4/plugin/tan"
	"github.com/lni/dragonboat/v4/statemachine"
	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/internal/ports"
)

// Dragonboat's logs. Tan has a file for each replica, Pebble is shared by them.
const (
	tanLog    = "tan"
	pebbleLog = "pebble"
)

const (
	hosts = 3
	// tick is Dragonboat's unit of time. With 48 groups a short one is work of its own.
	tick = 50 * time.Millisecond
	// Elections are not measured: other load on the machine must not cause one.
	electionTicks  = 40
	heartbeatTicks = 4
	// proposalLimit is after how long a proposal would count as lost.
	proposalLimit = 20 * time.Second
	startLimit    = 60 * time.Second
)

// dragonboatHosts are three NodeHosts.
type dragonboatHosts struct {
	s     settings
	l     *latencies
	hosts []*dragonboat.NodeHost
	terms []uint64 // of the groups' leaders at the start
	count atomic.Int64
}

func startDragonboat(ctx context.Context, s settings, l *latencies) (_ side, err error) {
	for _, name := range []string{
		"LogDB", "config", "dragonboat", "logdb", "pebblekv", "raft", "raft-mt", "raftpb", "registry", "rsm", "server", "settings",
		"tan", "transport",
	} {
		logger.GetLogger(name).SetLevel(logger.ERROR)
	}
	d := &dragonboatHosts{s: s, l: l}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	free, err := ports.Unused(hosts)
	if err != nil {
		return nil, err
	}
	members := map[uint64]dragonboat.Target{}
	for i, port := range free {
		members[uint64(i+1)] = fmt.Sprintf("127.0.0.1:%d", port)
	}
	for i := range hosts {
		h, err := dragonboat.NewNodeHost(hostConfig(s, filepath.Join(s.Dir, fmt.Sprintf("host-%d", i+1)), members[uint64(i+1)]))
		if err != nil {
			return nil, err
		}
		d.hosts = append(d.hosts, h)
	}
	for g := range s.Groups {
		for i, h := range d.hosts {
			if err := h.StartConcurrentReplica(members, false, newMachine, replicaConfig(g, i)); err != nil {
				return nil, err
			}
		}
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return d, d.lead(ctx)
}

// hostConfig is Dragonboat's own but for the log and the number of workers.
func hostConfig(s settings, dir, addr string) config.NodeHostConfig {
	expert := config.GetDefaultExpertConfig()
	expert.Engine.ExecShards, expert.Engine.CommitShards, expert.Engine.ApplyShards = s.Shards, s.Shards, s.Shards
	expert.LogDB.Shards = s.Shards
	if s.LogDB == tanLog {
		expert.LogDBFactory = tan.Factory
	}
	return config.NodeHostConfig{
		NodeHostDir: dir, RTTMillisecond: uint64(tick.Milliseconds()), RaftAddress: addr, Expert: expert,
	}
}

// replicaConfig takes no snapshots: the log only grows, which is the least work.
func replicaConfig(group, host int) config.Config {
	return config.Config{
		ShardID: uint64(group + 1), ReplicaID: uint64(host + 1),
		ElectionRTT: electionTicks, HeartbeatRTT: heartbeatTicks, CheckQuorum: true, PreVote: true,
	}
}

// lead moves the leaders until the hosts lead the groups in turn.
func (d *dragonboatHosts) lead(ctx context.Context) error {
	d.terms = make([]uint64, d.s.Groups)
	for g := range d.terms {
		shard, want := uint64(g+1), uint64(g%hosts+1)
		for asked := (time.Time{}); ; {
			leader, term, known, err := d.hosts[want-1].GetLeaderID(shard)
			if err != nil {
				return err
			}
			if known && leader == want {
				d.terms[g] = term
				break
			}
			if known && time.Since(asked) > 200*time.Millisecond {
				asked = time.Now()
				// One that is refused is asked for again.
				_ = d.hosts[leader-1].RequestLeaderTransfer(shard, want)
			}
			select {
			case <-time.After(time.Millisecond):
			case <-ctx.Done():
				return fmt.Errorf("host %d does not lead shard %d: %w", want, shard, ctx.Err())
			}
		}
	}
	return nil
}

// drive has a goroutine for each group, at its leader.
func (d *dragonboatHosts) drive(stop *atomic.Bool) error {
	var all errgroup.Group
	for g := range d.s.Groups {
		all.Go(func() error { return d.driveGroup(g, stop) })
	}
	return all.Wait()
}

// driveGroup keeps proposals of a group under way. They are answered in their order: it
// waits for the oldest, and takes all others that were answered meanwhile.
func (d *dragonboatHosts) driveGroup(group int, stop *atomic.Bool) error {
	host := d.hosts[group%hosts]
	session := host.GetNoOPSession(uint64(group + 1))
	data := make([]byte, d.s.Bytes) // Propose copies it
	waiting := make([]*dragonboat.RequestState, d.s.Depth)
	var proposed, answered int
	for {
		for ; proposed-answered < len(waiting) && !stop.Load(); proposed++ {
			d.l.proposed(group)
			r, err := host.Propose(session, data, proposalLimit)
			if err != nil {
				return fmt.Errorf("shard %d: %w", group+1, err)
			}
			waiting[proposed%len(waiting)] = r
		}
		if proposed == answered {
			return nil
		}
		n := 0
		for ; answered < proposed; answered++ {
			r := waiting[answered%len(waiting)]
			result, known := answer(r, n == 0)
			if !known {
				break
			}
			if !result.Completed() {
				return fmt.Errorf("shard %d: a proposal was not applied", group+1)
			}
			r.Release()
			n++
		}
		d.count.Add(int64(n))
		d.l.applied(group, n)
	}
}

// answer returns what became of a proposal, if that is known or it shall wait.
func answer(r *dragonboat.RequestState, wait bool) (result dragonboat.RequestResult, known bool) {
	if wait {
		return <-r.AppliedC(), true
	}
	select {
	case result = <-r.AppliedC():
		return result, true
	default:
		return result, false
	}
}

func (d *dragonboatHosts) applied() int64 { return d.count.Load() }

// check compares the leaders' terms with those at the start.
func (d *dragonboatHosts) check() error {
	for g, want := range d.terms {
		leader, term, known, err := d.hosts[g%hosts].GetLeaderID(uint64(g + 1))
		if err != nil {
			return err
		}
		if !known || leader != uint64(g%hosts+1) || term != want {
			return fmt.Errorf("shard %d has lost its leader: the run is worth nothing", g+1)
		}
	}
	return nil
}

// close ends one host after the other. Those that are left complain that they miss it.
func (d *dragonboatHosts) close() error {
	logger.GetLogger("transport").SetLevel(logger.CRITICAL)
	for _, h := range d.hosts {
		h.Close()
	}
	return nil
}

// machine is a state machine that does nothing. A concurrent one gets entries in batches,
// which costs Dragonboat less than one call for each.
type machine struct{}

func newMachine(uint64, uint64) statemachine.IConcurrentStateMachine { return machine{} }

func (machine) Update(entries []statemachine.Entry) ([]statemachine.Entry, error) {
	return entries, nil
}
func (machine) Lookup(any) (any, error)       { return nil, nil }
func (machine) PrepareSnapshot() (any, error) { return nil, nil }
func (machine) Close() error                  { return nil }
func (machine) SaveSnapshot(any, io.Writer, statemachine.ISnapshotFileCollection, <-chan struct{}) error {
	return nil
}

func (machine) RecoverFromSnapshot(io.Reader, []statemachine.SnapshotFile, <-chan struct{}) error {
	return nil
}
