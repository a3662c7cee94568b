package raftgroup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// incomingSnapshot is a snapshot that is arriving. Until all its tables are here and
// verified, only the host knows of it, and not raft: a sender that dies leaves nothing
// behind but files to delete.
type incomingSnapshot struct {
	g      *Group
	sm     Snapshotter
	head   *snapshotHeader
	ctx    context.Context
	cancel context.CancelFunc
	paths  []string
	// installFailed says that an attempt to install it has failed.
	installFailed atomic.Bool
	// result receives the one outcome after raft has accepted it.
	result chan error
}

// handleSnapshot serves one snapshot stream.
func (h *Host) handleSnapshot(ctx context.Context, from keyspace.NodeID, first []byte, s transport.Stream) error {
	head, err := decodeSnapshotHeader(first)
	if err != nil {
		h.m.malformed.Inc()
		return err
	}
	g := h.Group(head.group)
	if g == nil || g.self != head.to {
		return fmt.Errorf("%w: group %s has no replica %d here", errSnapshotRefused, head.group, head.to)
	}
	r := &incomingSnapshot{g: g, head: head, result: make(chan error, 1)}
	sm, can := g.sm.(Snapshotter)
	if r.sm = sm; !can {
		return fmt.Errorf("%w: the state machine takes none", errSnapshotRefused)
	}
	if err := r.room(); err != nil {
		return err
	}
	r.ctx, r.cancel = context.WithCancel(ctx)
	defer r.cancel()
	stop := context.AfterFunc(h.ctx, r.cancel)
	defer stop()
	if !h.snaps.addReceive(r) {
		return fmt.Errorf("%w: %d are under way", errSnapshotRefused, h.cfg.SnapshotReceives)
	}
	defer h.snaps.done(nil, r)
	ended := h.m.receives.begin(from, h.cfg.Clock)
	err = r.run(from, s)
	ended(err)
	return err
}

func (r *incomingSnapshot) run(from keyspace.NodeID, s transport.Stream) error {
	if err := r.ask(func() error { return r.g.beginReceive(r) }); err != nil {
		return err
	}
	err := r.sm.AcceptSnapshot(r.head.applied)
	if err == nil {
		if err = r.fetch(s); err == nil {
			r.withKeepalives(s, func() { err = r.verify() })
		}
		if err == nil {
			err = r.ask(func() error { return r.g.stepSnapshot(r, from) })
		}
		if err != nil {
			r.sm.SnapshotDone(r.head.applied, err)
		}
	}
	if err != nil {
		// Unless raft has accepted it, nothing of it remains.
		r.removeFiles()
		r.g.w.call(r.g, func() { r.g.endReceive(r) })
		r.g.h.m.snapshotsFailed.Inc()
		r.g.zap.Info("snapshot not received", zap.Stringer("peer", from), zap.Error(err))
		return err
	}
	r.withKeepalives(s, func() {
		select {
		case err = <-r.result:
		case <-r.g.h.ctx.Done():
			err = ErrStopped
		}
	})
	if err != nil {
		return err
	}
	return s.Send(r.ctx, []byte{snapDone})
}

// withKeepalives runs do, which may take long, and sends the sender keepalives meanwhile.
// It sends none while this node's disk is the obstacle: that may last any time, and the
// sender should not hold a slot and its log for it. If the sender is gone, the context of
// r ends.
func (r *incomingSnapshot) withKeepalives(s transport.Stream, do func()) {
	ctx, stop := context.WithCancel(r.ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for clock.Sleep(ctx, r.g.h.cfg.Clock, keepaliveInterval) == nil {
			if r.installFailed.Load() || r.g.h.diskStalled.Load() {
				continue
			}
			if s.Send(ctx, []byte{snapKeepalive}) != nil && ctx.Err() == nil {
				r.cancel()
			}
		}
	})
	do()
	stop()
	wg.Wait()
}

// ask lets the group's worker decide.
func (r *incomingSnapshot) ask(f func() error) error {
	ch := make(chan error, 1)
	if !r.g.w.call(r.g, func() {
		if r.g.closed {
			ch <- ErrClosed
			return
		}
		ch <- f()
	}) {
		return ErrStopped
	}
	// The worker always answers. Leaving earlier would let it decide for a cancelled
	// snapshot.
	return <-ch
}

// beginReceive admits one snapshot at a time, and only one that is newer than this
// replica. Committed entries are applied first: an entry may have an effect that a
// snapshot of the group does not carry. A split, for example, makes another group's first
// record, and that group's log may already be in the wal.
func (g *Group) beginReceive(r *incomingSnapshot) error {
	a := &r.head.applied
	switch {
	case g.receiving != nil || g.installing != nil || g.resetting != nil:
		return fmt.Errorf("%w: another one is under way", errSnapshotRefused)
	case g.isLeader || r.head.term < g.term:
		return fmt.Errorf("%w: term %d, here %d", errSnapshotRefused, r.head.term, g.term)
	case a.Index <= g.commit:
		return fmt.Errorf("%w: at %d, committed here %d", errSnapshotRefused, a.Index, g.commit)
	case g.applied < g.commit:
		return fmt.Errorf("%w: applied %d, committed here %d", errSnapshotRefused, g.applied, g.commit)
	}
	if !hasReplica(a.Replicas, g.self) {
		return fmt.Errorf("%w: replica %d is not in it", errSnapshotRefused, g.self)
	}
	g.receiving = r
	return nil
}

func hasReplica(rs []keyspace.Replica, id keyspace.ReplicaID) bool {
	for _, r := range rs {
		if r.ID == id {
			return true
		}
	}
	return false
}

func (g *Group) endReceive(r *incomingSnapshot) {
	if g.receiving == r {
		g.receiving = nil
	}
}

// fetch waits for its turn and writes the tables to files.
func (r *incomingSnapshot) fetch(s transport.Stream) error {
	turn := r.g.h.snaps.queue()
	defer r.g.h.snaps.leave(turn)
	var err error
	r.withKeepalives(s, func() {
		select {
		case <-turn:
		case <-r.ctx.Done():
			err = context.Cause(r.ctx)
		}
	})
	if err != nil {
		return err
	}
	w := newWatchdog(r.ctx, r.g.h.cfg.Clock)
	if err := s.Send(w, []byte{snapTurn}); err != nil {
		return w.end(err)
	}
	background.Run(func() { err = r.fetchTables(w, s) })
	return w.end(err)
}

func (r *incomingSnapshot) fetchTables(w *watchdog, s transport.Stream) error {
	for {
		m, err := s.Recv(w)
		if err != nil {
			return unexpectedEnd(err)
		}
		w.progress()
		switch {
		case len(m) > 1 && m[0] == snapChunk && len(r.paths) < snapshotTablesMax:
			if err := r.fetchTable(w, s, m); err != nil {
				return err
			}
		case len(m) > 1 && m[0] == snapEnd:
			if n, rest, err := wire.Uvarint(m[1:]); err != nil || len(rest) > 0 || n != uint64(len(r.paths)) {
				return fmt.Errorf("%w: end after %d tables", errSnapshotFormat, len(r.paths))
			}
			return nil
		default:
			return fmt.Errorf("%w: message of %d bytes", errSnapshotFormat, len(m))
		}
	}
}

func unexpectedEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// fetchTable writes one table, which begins with the chunk in m.
func (r *incomingSnapshot) fetchTable(w *watchdog, s transport.Stream, m []byte) (err error) {
	fs := r.g.h.cfg.Engine.FS()
	name := fmt.Sprintf("%d-%d.sst", uint64(r.g.id), r.g.h.snaps.nextFile())
	path := fs.PathJoin(r.g.h.cfg.Engine.StagingDir(), name)
	f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	r.paths = append(r.paths, path)
	defer func() {
		if err == nil {
			err = f.Sync()
		}
		err = errors.Join(err, f.Close())
	}()
	sum, size := uint32(0), uint64(0)
	for {
		if err = r.room(); err != nil {
			return err
		}
		chunk := m[1:]
		// Before the write: a file system may modify the buffer until the write returns.
		sum = crc32.Update(sum, castagnoli, chunk)
		if _, err = f.Write(chunk); err != nil {
			return err
		}
		size += uint64(len(chunk))
		transport.Recycle(m)
		w.progress()
		if err := r.g.h.snaps.limitIn.wait(w, len(chunk)); err != nil {
			return err
		}
		if m, err = s.Recv(w); err != nil {
			return unexpectedEnd(err)
		}
		switch {
		case len(m) > 1 && m[0] == snapChunk:
		case len(m) > 5 && m[0] == snapTable:
			n, rest, err := wire.Uvarint(m[1:])
			if err != nil || len(rest) != 4 || n != size || binary.LittleEndian.Uint32(rest) != sum {
				return fmt.Errorf("%w: table %d: %d bytes, checksum %08x", errSnapshotFormat, len(r.paths), size, sum)
			}
			return nil
		default:
			return fmt.Errorf("%w: message of %d bytes", errSnapshotFormat, len(m))
		}
	}
}

func (r *incomingSnapshot) verify() error {
	var a engine.Applied
	var err error
	background.Run(func() { a, err = r.g.h.cfg.Engine.VerifyTables(r.ctx, r.ingest()) })
	if err != nil {
		return err
	}
	if a.Index != r.head.applied.Index || a.Term != r.head.applied.Term {
		return fmt.Errorf("%w: tables at %d, announced %d", errSnapshotFormat, a.Index, r.head.applied.Index)
	}
	return nil
}

func (r *incomingSnapshot) removeFiles() {
	for _, p := range r.paths {
		// The engine's next start removes files that cannot be removed now.
		_ = r.g.h.cfg.Engine.FS().Remove(p)
	}
}

// stepSnapshot gives raft a complete and verified snapshot. Raft may have no use for it
// any more.
func (g *Group) stepSnapshot(r *incomingSnapshot, from keyspace.NodeID) error {
	if g.receiving != r || g.installing != nil {
		return fmt.Errorf("%w: overtaken", errSnapshotRefused)
	}
	a := &r.head.applied
	m := &message{group: g.id, kind: pb.MsgSnap, to: g.self, from: r.head.from, term: r.head.term, node: from}
	if !g.checkSender(m) {
		return fmt.Errorf("%w: replica %d is not on node %s", errSnapshotRefused, m.from, from)
	}
	g.ready() // earlier work first, so that the snapshot is not mixed with it
	if g.applied < g.commit {
		return fmt.Errorf("%w: applied %d, committed here %d", errSnapshotRefused, g.applied, g.commit)
	}
	g.wake()
	g.heardLeader(m)
	_ = g.rn.Step(&pb.Message{
		Type: pb.MsgSnap.Enum(), To: ptr(uint64(g.self)), From: ptr(uint64(m.from)), Term: ptr(m.term),
		Snapshot: snapshotAt(a.Index, a.Term, a.Replicas),
	})
	g.ready()
	if g.receiving == r {
		return fmt.Errorf("%w: raft has no use for it", errSnapshotRefused)
	}
	return nil
}
