// Package alone runs raft groups with nothing above them: three hosts in one process, the
// real bus on loopback, real disks, and a state machine that does nothing. What a proposal
// costs there is the cost of raftgroup and of the layers below. Benchmarks use it; nothing
// that ships does.
package alone

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/wal"
)

// hosts is how many hosts there are. Each has a replica of every group.
const hosts = 3

// electionTimeout is also how long a disk may stand still before its host's leaders give
// the lead up. Elections are not measured: other load on the machine may cost time, but
// must not spoil the run.
const electionTimeout = 20 * time.Second

// startLimit bounds each wait of a start: for the hosts' connections, and for the wanted
// leader of every group. A first election that fails is repeated after two election
// timeouts at most.
const startLimit = 2 * time.Minute

// host is a host as a node has it.
type host struct {
	wal  *wal.Log
	eng  *engine.Engine
	bus  *transport.QUIC
	host *raftgroup.Host
}

// newHost opens a host whose files are below dir. On an error the caller closes what there
// is of it.
func newHost(dir string, id keyspace.NodeID, carrier transport.Carrier) (h *host, err error) {
	h = &host{}
	clk := clock.System()
	if h.wal, err = wal.Open(wal.Options{FS: vfs.Default, Dir: filepath.Join(dir, "wal"), Clock: clk}); err != nil {
		return h, err
	}
	h.eng, err = engine.Open(engine.Options{
		FS: vfs.Default, Dir: filepath.Join(dir, "engine"), Clock: clk,
		CacheBytes: 64 << 20, MemTableBytes: 32 << 20, BallastBytes: -1, LowSpaceBytes: -1,
	})
	if err != nil {
		return h, err
	}
	h.bus, err = transport.NewQUIC(transport.Options{
		Config:   transport.Config{Cluster: 1, Node: id, Boot: keyspace.BootID(id), Clock: clk, Logger: zap.NewNop()},
		Listen:   []string{"127.0.0.1:0"},
		Security: transport.Security{SelfMade: true},
		Carrier:  carrier,
	})
	if err != nil {
		return h, err
	}
	h.host, err = raftgroup.NewHost(raftgroup.Config{
		Node: id, Boot: keyspace.BootID(id), Clock: clk, WAL: h.wal, Engine: h.eng, Bus: h.bus, ElectionTimeout: electionTimeout,
	})
	if err != nil {
		return h, err
	}
	h.host.RegisterHandlers(h.bus)
	return h, nil
}

// close ends what was opened.
func (h *host) close() error {
	var all []error
	if h.host != nil {
		all = append(all, h.host.Stop(context.Background()))
	}
	if h.bus != nil {
		all = append(all, h.bus.Close())
	}
	if h.wal != nil {
		all = append(all, h.wal.Close())
	}
	if h.eng != nil {
		all = append(all, h.eng.Close())
	}
	return errors.Join(all...)
}

// bootstrap durably creates the groups 1 to groups.
func (h *host) bootstrap(ctx context.Context, groups int) error {
	voters := make([]keyspace.Replica, hosts)
	for i := range voters {
		voters[i] = keyspace.Replica{ID: keyspace.ReplicaID(i + 1), Node: keyspace.NodeID(i + 1)}
	}
	batch := h.eng.NewBatch()
	for g := range groups {
		if err := h.host.Bootstrap(batch, keyspace.GroupID(g+1), voters, nil); err != nil {
			return errors.Join(err, batch.Close())
		}
	}
	return errors.Join(batch.Commit(), h.eng.Flush(ctx))
}

// connect starts the hosts and waits until each reaches every other one. A replica that
// campaigns before that reaches nobody, and another one may lead in its place.
func connect(ctx context.Context, all []*host) error {
	for i, h := range all {
		for j, peer := range all {
			if i != j {
				h.bus.SetPeer(keyspace.NodeID(j+1), peer.bus.Addrs())
			}
		}
	}
	for _, h := range all {
		if err := h.bus.Start(); err != nil {
			return err
		}
		h.host.Start()
	}
	clk := clock.System()
	ctx, cancel := clock.WithTimeout(ctx, clk, startLimit)
	defer cancel()
	for i, h := range all {
		for j := range all {
			for peer := keyspace.NodeID(j + 1); i != j && !h.bus.Peer(peer).Up; {
				if err := clock.Sleep(ctx, clk, time.Millisecond); err != nil {
					return fmt.Errorf("node %d does not reach node %s: %w", i+1, peer, err)
				}
			}
		}
	}
	return nil
}
