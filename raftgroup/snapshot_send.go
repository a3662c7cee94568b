package raftgroup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync/atomic"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// outgoingSnapshot is one snapshot on its way to a follower. Each runs in a goroutine of
// its own, at most SnapshotSends at a time.
type outgoingSnapshot struct {
	g      *Group
	sm     Snapshotter
	to     keyspace.ReplicaID
	node   keyspace.NodeID
	term   uint64
	ctx    *watchdog
	stream transport.Stream
	// The current table. chunk is the part of it gathered for the next message, with the
	// kind in front, or empty.
	sum     uint32
	size    uint64
	chunk   []byte
	renewed clock.Time
	tables  int
	waits   atomic.Bool // for its turn
}

// maySendSnapshot reports whether raft may be given a snapshot to send.
func (g *Group) maySendSnapshot() bool {
	_, can := g.sm.(Snapshotter)
	return can && len(g.conf.replicas) > 0 && g.w.now >= g.snapshotAgain && g.h.snaps.mayAdd()
}

// sendSnapshot takes raft's MsgSnap as the order to send a snapshot. The log behind the
// snapshot stays pinned meanwhile.
func (g *Group) sendSnapshot(m *pb.Message) {
	x := &outgoingSnapshot{
		g: g, to: keyspace.ReplicaID(m.GetTo()), node: g.nodeOf(keyspace.ReplicaID(m.GetTo())),
		term: m.GetTerm(), renewed: g.w.now,
	}
	sm, can := g.sm.(Snapshotter)
	x.sm = sm
	x.ctx = newWatchdog(g.h.ctx, g.h.cfg.Clock)
	if !can || x.node == 0 {
		_ = x.ctx.end(nil)
		g.snapshotEnded(x.to, errSnapshotRefused)
		return
	}
	if !g.h.snaps.addSend(x) {
		_ = x.ctx.end(nil)
		g.snapshotEnded(x.to, errNoSnapshotSlot)
		return
	}
	g.trunc.pins = append(g.trunc.pins, pin{x.to, m.GetSnapshot().GetMetadata().GetIndex(), g.w.now.Add(pinTTL)})
	g.h.wg.Go(x.run)
}

// snapshotEnded tells raft the outcome of a snapshot. After a success the log stays
// pinned a little longer, until the follower has reported its position.
func (g *Group) snapshotEnded(to keyspace.ReplicaID, err error) {
	keep := g.trunc.pins[:0]
	for _, p := range g.trunc.pins {
		if p.to == to {
			p.until = g.w.now.Add(5 * g.h.cfg.ElectionTimeout)
		}
		if p.to != to || err == nil {
			keep = append(keep, p)
		}
	}
	g.trunc.pins = keep
	status := raft.SnapshotFinish
	if err != nil {
		status = raft.SnapshotFailure
	}
	// A snapshot that found no slot is retried at the next heartbeat: nothing failed, and
	// with many small snapshots slots become free all the time.
	if err != nil && !errors.Is(err, errNoSnapshotSlot) {
		g.snapshotAgain = g.w.now.Add(g.h.cfg.ElectionTimeout)
	}
	g.rn.ReportSnapshot(uint64(to), status)
}

func (x *outgoingSnapshot) run() {
	start := x.g.h.cfg.Clock.Now()
	ended := x.g.h.m.sends.begin(x.node, x.g.h.cfg.Clock)
	err := x.ctx.end(x.send())
	ended(err)
	x.g.h.snaps.done(x, nil)
	if err != nil {
		x.g.h.m.snapshotsFailed.Inc()
	} else {
		x.g.h.m.snapshotsSent.Inc()
		x.g.zap.Info("snapshot installed by a follower", zap.Stringer("peer", x.node), zap.Int("tables", x.tables),
			zap.Duration("took", x.g.h.cfg.Clock.Now().Sub(start)))
	}
	x.g.w.call(x.g, func() {
		if !x.g.closed {
			x.logFailure(err)
			x.g.snapshotEnded(x.to, err)
		}
	})
}

// logFailure logs why the snapshot was not sent, and does not repeat itself. A node with
// a full disk refuses a snapshot of each of its groups in every election timeout.
func (x *outgoingSnapshot) logFailure(err error) {
	if err == nil {
		delete(x.g.snapshotFailed, x.to)
		return
	}
	level, text := zap.InfoLevel, err.Error()
	if x.g.snapshotFailed[x.to] == text {
		level = zap.DebugLevel
	}
	if x.g.snapshotFailed == nil {
		x.g.snapshotFailed = map[keyspace.ReplicaID]string{}
	}
	x.g.snapshotFailed[x.to] = text
	x.g.zap.Log(level, "snapshot not sent", zap.Stringer("peer", x.node), zap.Error(err))
}

// send sends the current state, which may be newer than what raft asked for, and waits
// until it is installed.
func (x *outgoingSnapshot) send() (err error) {
	defer func() {
		if x.stream != nil {
			x.stream.Close(err)
		}
	}()
	if err := x.export(); err != nil {
		return err
	}
	return x.await(snapDone)
}

// export sends the tables.
func (x *outgoingSnapshot) export() (err error) {
	snap := x.g.h.cfg.Engine.NewSnapshot()
	defer func() { err = errors.Join(err, snap.Close()) }()
	a, ok, err := engine.ReadApplied(snap, x.g.id)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%w: no applied record", errSnapshotRefused)
	}
	first := encodeSnapshotHeader(&snapshotHeader{
		group: x.g.id, from: x.g.self, to: x.to, term: x.term, applied: a,
	})
	x.stream, err = x.g.h.cfg.Bus.OpenStream(x.ctx, x.node, transport.MethodRaftSnapshot, first)
	if err != nil {
		return err
	}
	spans := x.sm.SnapshotSpans(a)
	if l, ok := x.sm.(LeaseIndexer); ok {
		leased, err := l.LeaseSpans(snap, a)
		if err != nil {
			return err
		}
		spans = append(spans, leased...)
	}
	x.waits.Store(true)
	err = x.await(snapTurn)
	x.waits.Store(false)
	if err != nil {
		return err
	}
	background.Run(func() {
		_, err = snap.ExportTables(x.ctx, x.g.id, spans, x.g.h.cfg.snapshotTableBytes, x.table)
	})
	if err != nil {
		return err
	}
	return x.stream.Send(x.ctx, binary.AppendUvarint([]byte{snapEnd}, uint64(x.tables)))
}

// await waits until the receiver sends the wanted message. Before that the receiver may
// only send keepalives.
func (x *outgoingSnapshot) await(want byte) error {
	for n := 0; ; {
		m, err := x.stream.Recv(x.ctx)
		switch {
		case err != nil:
			return err
		case len(m) == 1 && m[0] == want:
			return nil
		case len(m) != 1 || m[0] != snapKeepalive:
			return fmt.Errorf("%w: answer of %d bytes", errSnapshotFormat, len(m))
		}
		if n++; n > keepalivesMax {
			return fmt.Errorf("%w: %d keepalives in a row", errSnapshotStalled, n)
		}
		x.ctx.progress()
		x.renewPin()
	}
}

// table begins the next table.
func (x *outgoingSnapshot) table(int) (io.WriteCloser, error) {
	x.sum, x.size, x.chunk = 0, 0, x.chunk[:0]
	x.tables++
	return x, nil
}

// Write adds a part of the table to the current chunk. The table writer writes block by
// block; a message for each block would cost more than its bytes.
func (x *outgoingSnapshot) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		if len(x.chunk) == 0 {
			x.chunk = append(slices.Grow(x.chunk, 1+chunkBytes), snapChunk)
		}
		part := p[n:min(len(p), n+1+chunkBytes-len(x.chunk))]
		x.chunk = append(x.chunk, part...)
		if n += len(part); len(x.chunk) > chunkBytes {
			if err := x.sendChunk(); err != nil {
				return n, err
			}
		}
	}
	return len(p), nil
}

// sendChunk sends the current chunk as fast as the node's bound allows.
func (x *outgoingSnapshot) sendChunk() error {
	if len(x.chunk) == 0 {
		return nil
	}
	part := x.chunk[1:]
	if err := x.g.h.snaps.limit.wait(x.ctx, len(part)); err != nil {
		return err
	}
	x.sum = crc32.Update(x.sum, castagnoli, part)
	if err := x.stream.Send(x.ctx, x.chunk); err != nil {
		return err
	}
	x.chunk = x.chunk[:0]
	x.size += uint64(len(part))
	x.g.h.m.snapshotBytes.Add(float64(len(part)))
	x.ctx.progress()
	x.renewPin()
	return nil
}

// Close ends the table.
func (x *outgoingSnapshot) Close() error {
	if err := x.sendChunk(); err != nil {
		return err
	}
	b := binary.AppendUvarint([]byte{snapTable}, x.size)
	return x.stream.Send(x.ctx, binary.LittleEndian.AppendUint32(b, x.sum))
}
