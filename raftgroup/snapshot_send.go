package raftgroup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sending is one snapshot on its way to a follower. It runs in a goroutine of its
// own, of which there are at most SnapshotSends.
type sending struct {
	g      *Group
	sm     Snapshotter
	to     keyspace.ReplicaID
	node   keyspace.NodeID
	term   uint64
	ctx    *watch
	stream transport.Stream
	// The table under way; piece is what is gathered of it for the next message, with its
	// kind in front, or empty.
	sum     uint32
	size    uint64
	piece   []byte
	renewed clock.Time
	tables  int
}

// maySendSnapshot says whether raft may be given a snapshot to send.
func (g *Group) maySendSnapshot() bool {
	_, can := g.sm.(Snapshotter)
	return can && len(g.conf.replicas) > 0 && g.w.now >= g.snapshotAgain && g.h.snaps.mayAdd()
}

// sendSnapshot takes raft's MsgSnap as the order to send one. The log behind it
// stays pinned meanwhile.
func (g *Group) sendSnapshot(m *pb.Message) {
	x := &sending{
		g: g, to: keyspace.ReplicaID(m.GetTo()), node: g.nodeOf(keyspace.ReplicaID(m.GetTo())),
		term: m.GetTerm(), renewed: g.w.now,
	}
	sm, can := g.sm.(Snapshotter)
	x.sm = sm
	x.ctx = newWatch(g.h.ctx, g.h.cfg.Clock)
	if !can || x.node == 0 {
		_ = x.ctx.end(nil)
		g.snapshotEnded(x.to, errSnapshotRefused)
		return
	}
	if !g.h.snaps.addSend(x) {
		_ = x.ctx.end(nil)
		g.snapshotEnded(x.to, errSnapshotWaits)
		return
	}
	g.trunc.pins = append(g.trunc.pins, pin{x.to, m.GetSnapshot().GetMetadata().GetIndex(), g.w.now.Add(pinTTL)})
	g.h.wg.Go(x.run)
}

// snapshotEnded tells raft what became of a snapshot. After a success the log
// stays pinned a little longer, until the follower has said where it stands.
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
	// Who found no place asks again at the next heartbeat: nothing has failed, and with many
	// small snapshots places become free all the time.
	if err != nil && !errors.Is(err, errSnapshotWaits) {
		g.snapshotAgain = g.w.now.Add(g.h.cfg.ElectionTimeout)
	}
	g.rn.ReportSnapshot(uint64(to), status)
}

func (x *sending) run() {
	start := x.g.h.cfg.Clock.Now()
	err := x.ctx.end(x.send())
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

// logFailure says why the snapshot was not sent, and does not repeat itself: a node whose disk is
// full refuses one of each of its groups in every election timeout, for as long as it is full.
func (x *sending) logFailure(err error) {
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

// send sends the present state, which may be newer than what raft asked for, and waits until it
// is installed.
func (x *sending) send() (err error) {
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
func (x *sending) export() (err error) {
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
	if err := x.await(snapTurn); err != nil {
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

// await waits until the receiver sends the given message. Until then the receiver may only
// tell the sender to wait.
func (x *sending) await(want byte) error {
	for told := 0; ; {
		m, err := x.stream.Recv(x.ctx)
		switch {
		case err != nil:
			return err
		case len(m) == 1 && m[0] == want:
			return nil
		case len(m) != 1 || m[0] != snapWait:
			return fmt.Errorf("%w: answer of %d bytes", errSnapshotFormat, len(m))
		}
		if told++; told > waitsTold {
			return fmt.Errorf("%w: told to wait for the %dth time", errSnapshotStalled, told)
		}
		x.ctx.progress()
		x.renewPin()
	}
}

// table begins the next table.
func (x *sending) table(int) (io.WriteCloser, error) {
	x.sum, x.size, x.piece = 0, 0, x.piece[:0]
	x.tables++
	return x, nil
}

// Write takes a part of the table. A table is written block by block, each of them and what
// ends it for itself; as messages they would cost more than their bytes do.
func (x *sending) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		if len(x.piece) == 0 {
			x.piece = append(slices.Grow(x.piece, 1+chunkBytes), snapChunk)
		}
		part := p[n:min(len(p), n+1+chunkBytes-len(x.piece))]
		x.piece = append(x.piece, part...)
		if n += len(part); len(x.piece) > chunkBytes {
			if err := x.sendPiece(); err != nil {
				return n, err
			}
		}
	}
	return len(p), nil
}

// sendPiece sends what is gathered, as fast as the node's bound allows.
func (x *sending) sendPiece() error {
	if len(x.piece) == 0 {
		return nil
	}
	part := x.piece[1:]
	if err := x.g.h.snaps.limit.wait(x.ctx, len(part)); err != nil {
		return err
	}
	x.sum = crc32.Update(x.sum, castagnoli, part)
	if err := x.stream.Send(x.ctx, x.piece); err != nil {
		return err
	}
	x.piece = x.piece[:0]
	x.size += uint64(len(part))
	x.g.h.m.snapshotBytes.Add(float64(len(part)))
	x.ctx.progress()
	x.renewPin()
	return nil
}

// Close ends the table.
func (x *sending) Close() error {
	if err := x.sendPiece(); err != nil {
		return err
	}
	b := binary.AppendUvarint([]byte{snapTable}, x.size)
	return x.stream.Send(x.ctx, binary.LittleEndian.AppendUint32(b, x.sum))
}

// renewPin keeps the log pinned while there is progress.
func (x *sending) renewPin() {
	now := x.g.h.cfg.Clock.Now()
	if now.Sub(x.renewed) < pinTTL/4 {
		return
	}
	x.renewed = now
	x.g.w.call(x.g, func() {
		for i := range x.g.trunc.pins {
			if p := &x.g.trunc.pins[i]; p.to == x.to {
				p.until = x.g.w.now.Add(pinTTL)
			}
		}
	})
}
