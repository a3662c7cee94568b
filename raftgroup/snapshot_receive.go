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
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// receive is a snapshot that is arriving. It is a job of this host until all its
// tables are here and verified; raft hears of it only then, so that a sender that
// dies leaves nothing behind but files to delete.
type receive struct {
	g      *Group
	sm     Snapshotter
	head   *snapshotHeader
	ctx    context.Context
	cancel context.CancelFunc
	paths  []string
	// troubled says that an attempt to install it has failed.
	troubled atomic.Bool
	// result gets the one outcome after raft has been asked.
	result chan error
}

// install is a snapshot that raft has taken in: it must get into the engine.
type install struct {
	g   *Group
	r   *receive
	msg *pb.Message // raft's MsgStorageAppend, whose answers wait for the install
}

// handleSnapshot serves one snapshot's stream.
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
	r := &receive{g: g, head: head, result: make(chan error, 1)}
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
	return r.run(from, s)
}

// room refuses a snapshot where the disk is full: what is left belongs to what makes
// room, and its tables could not be ingested.
func (r *receive) room() error {
	if r.g.h.cfg.Engine.Space() == engine.SpaceFull {
		return fmt.Errorf("%w: %w", errSnapshotRefused, engine.ErrNoSpace)
	}
	return nil
}

func (r *receive) run(from keyspace.NodeID, s transport.Stream) error {
	if err := r.ask(func() error { return r.g.beginReceive(r) }); err != nil {
		return err
	}
	err := r.sm.AcceptSnapshot(r.head.applied)
	if err == nil {
		if err = r.fetch(s); err == nil {
			r.telling(s, func() { err = r.verify() })
		}
		if err == nil {
			err = r.ask(func() error { return r.g.stepSnapshot(r, from) })
		}
		if err != nil {
			r.sm.SnapshotDone(r.head.applied, err)
		}
	}
	if err != nil {
		// Unless raft has taken it, nothing of it is left.
		r.removeFiles()
		r.g.w.call(r.g, func() { r.g.endReceive(r) })
		r.g.h.m.snapshotsFailed.Inc()
		r.g.zap.Info("snapshot not received", zap.Stringer("peer", from), zap.Error(err))
		return err
	}
	r.telling(s, func() {
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

// telling does something that may take long, and tells the sender meanwhile that it is to wait.
// It does not where this node's disk is in the way: that may take any time, for which the sender
// is not to keep a place and its log. Where there is no sender any more the context of r ends.
func (r *receive) telling(s transport.Stream, do func()) {
	ctx, stop := context.WithCancel(r.ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for clock.Sleep(ctx, r.g.h.cfg.Clock, waitTold) == nil {
			if r.troubled.Load() || r.g.h.stuck.Load() {
				continue
			}
			if s.Send(ctx, []byte{snapWait}) != nil && ctx.Err() == nil {
				r.cancel()
			}
		}
	})
	do()
	stop()
	wg.Wait()
}

// ask lets the group's worker decide something.
func (r *receive) ask(f func() error) error {
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
	// The worker always answers; a cancelled job must not leave it deciding.
	return <-ch
}

// beginReceive lets one snapshot at a time come, and only one that is news. What is
// committed here is applied first: an entry may do what a snapshot of the group does
// not carry, as a split makes another group's first record, whose log may stand in
// the wal already.
func (g *Group) beginReceive(r *receive) error {
	a := &r.head.applied
	switch {
	case g.receiving != nil || g.installing != nil || g.settling != nil:
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

func (g *Group) endReceive(r *receive) {
	if g.receiving == r {
		g.receiving = nil
	}
}

// fetch waits for its turn and writes the tables to files.
func (r *receive) fetch(s transport.Stream) error {
	turn := r.g.h.snaps.queue()
	defer r.g.h.snaps.leave(turn)
	var err error
	r.telling(s, func() {
		select {
		case <-turn:
		case <-r.ctx.Done():
			err = context.Cause(r.ctx)
		}
	})
	if err != nil {
		return err
	}
	w := newWatch(r.ctx, r.g.h.cfg.Clock)
	if err := s.Send(w, []byte{snapTurn}); err != nil {
		return w.end(err)
	}
	background.Run(func() { err = r.fetchTables(w, s) })
	return w.end(err)
}

func (r *receive) fetchTables(w *watch, s transport.Stream) error {
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
			if n, w := binary.Uvarint(m[1:]); w != len(m)-1 || n != uint64(len(r.paths)) {
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

// fetchTable writes one table, which begins with the chunk in the message.
func (r *receive) fetchTable(w *watch, s transport.Stream, m []byte) (err error) {
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
		// Before the write: a file system may use the buffer as it likes until that is done.
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
			n, w := binary.Uvarint(m[1:])
			if w <= 0 || len(m) != 1+w+4 || n != size || binary.LittleEndian.Uint32(m[1+w:]) != sum {
				return fmt.Errorf("%w: table %d: %d bytes, checksum %08x", errSnapshotFormat, len(r.paths), size, sum)
			}
			return nil
		default:
			return fmt.Errorf("%w: message of %d bytes", errSnapshotFormat, len(m))
		}
	}
}

func (r *receive) ingest() engine.Ingest {
	return engine.Ingest{Group: r.g.id, Spans: r.sm.SnapshotSpans(r.head.applied), Paths: r.paths}
}

func (r *receive) verify() error {
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

func (r *receive) removeFiles() {
	for _, p := range r.paths {
		// What cannot be removed now is removed by the engine's next start.
		_ = r.g.h.cfg.Engine.FS().Remove(p)
	}
}

// stepSnapshot gives raft a snapshot that is here and verified. Raft may have no
// use for it any more.
func (g *Group) stepSnapshot(r *receive, from keyspace.NodeID) error {
	if g.receiving != r || g.installing != nil {
		return fmt.Errorf("%w: overtaken", errSnapshotRefused)
	}
	a := &r.head.applied
	m := &message{group: g.id, kind: pb.MsgSnap, to: g.self, from: r.head.from, term: r.head.term, node: from}
	if !g.knows(m) {
		return fmt.Errorf("%w: replica %d is not on node %s", errSnapshotRefused, m.from, from)
	}
	g.ready() // what was before, so that the snapshot is not mixed with it
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

// beginInstall sends raft's snapshot to the engine, behind everything of the group
// that is still being applied. Nothing of this append is answered, and no later
// append is written, before that is durable.
func (g *Group) beginInstall(m *pb.Message) {
	r := g.receiving
	index := m.GetSnapshot().GetMetadata().GetIndex()
	if r == nil || r.head.applied.Index != index {
		panic(fmt.Sprintf("raftgroup: group %s: raft wants to install a snapshot at %d that is not here", g.id, index))
	}
	g.receiving, g.installing = nil, &install{g: g, r: r, msg: m}
	g.setConf(r.head.applied.Replicas, r.head.applied.ConfIndex)
	g.last = index
	g.w.kick(g, applyTask{kind: taskInstall, install: g.installing})
}

// startInstall gives the install to one of the loops, or abandons it where those have
// ended.
func (s *snapshots) startInstall(i *install) {
	s.mu.Lock()
	ended := s.mu.ended
	if !ended {
		s.install <- i // there is a place for each receive
	}
	s.mu.Unlock()
	if ended {
		s.abandon(i)
	}
}

// installLoop is one of the goroutines that put snapshots into the engine.
func (s *snapshots) installLoop() {
	for {
		select {
		case i := <-s.install:
			s.installOne(i)
		case <-s.h.ctx.Done():
			s.abandonInstalls()
			return
		}
	}
}

// abandonInstalls lets the groups go whose installs will not be done: only
// callbacks can stand behind them, since raft hands out no entries before.
func (s *snapshots) abandonInstalls() {
	s.mu.Lock()
	s.mu.ended = true
	s.mu.Unlock()
	for {
		select {
		case i := <-s.install:
			s.abandon(i)
		default:
			return
		}
	}
}

func (s *snapshots) abandon(i *install) {
	i.r.result <- ErrStopped
	i.g.a.release(i.g)
}

// installOne ingests until it succeeds: raft cannot go back.
func (s *snapshots) installOne(i *install) {
	for {
		err := s.ingest(i)
		if err == nil {
			break
		}
		i.r.troubled.Store(true)
		i.g.zap.Error("snapshot cannot be installed; trying again", zap.Error(err))
		if clock.Sleep(s.h.ctx, s.h.cfg.Clock, installRetry) != nil {
			s.abandon(i)
			return
		}
	}
	a := i.r.head.applied
	st := &i.g.apply
	st.at = Position{a.Index, a.Term}
	st.replicas, st.confIndex, st.payload = a.Replicas, a.ConfIndex, a.Payload
	i.g.public.applying.Store(a.Index)
	i.g.durableTo(a.Index) // and nothing of another group has changed
	i.r.sm.SnapshotDone(a, nil)
	i.g.w.call(i.g, func() { i.g.finishInstall(i) })
	i.g.a.release(i.g)
}

// ingest returns nil once the snapshot is durable in the engine, be it by an
// earlier attempt that had reported an error.
func (s *snapshots) ingest(i *install) error {
	e := s.h.cfg.Engine
	if a, ok, err := e.Applied(i.g.id); err != nil {
		return err
	} else if ok && a.Index == i.r.head.applied.Index {
		return e.Flush(s.h.ctx)
	}
	_, err := e.IngestTables(s.h.ctx, i.r.ingest())
	return err
}

// finishInstall lets the log begin anew behind the snapshot, with raft's answers
// waiting for that, and lets go what was held back.
func (g *Group) finishInstall(i *install) {
	if g.closed {
		i.r.result <- ErrClosed
		return
	}
	a := &i.r.head.applied
	var hs *pb.HardState
	if i.msg.GetTerm() != 0 {
		hs = &pb.HardState{Term: i.msg.Term, Vote: i.msg.Vote, Commit: i.msg.Commit}
		g.saved.note(hs)
	}
	g.w.walBatch().Reset(g.id, a.Index, a.Term, hs)
	g.trunc.marks, g.trunc.bytes = nil, 0
	g.appends++
	g.w.afterDurable(g, i.msg.GetResponses(), true)
	g.installing = nil
	g.settling = i.r
	held := g.held
	g.held = nil
	for _, m := range held {
		g.append(m)
	}
}

// installed takes note that raft's snapshot is durable in engine and wal.
func (g *Group) installed(s *pb.Snapshot) {
	index := s.GetMetadata().GetIndex()
	if d := g.public.applying.Load(); d < index {
		panic(fmt.Sprintf("raftgroup: group %s: snapshot at %d is answered, installed %d", g.id, index, d))
	}
	if index > g.applied {
		g.h.applied.Add(int64(index - g.applied))
		g.applied, g.appliedTerm = index, s.GetMetadata().GetTerm()
	}
	g.h.m.snapshotsReceived.Inc()
	if r := g.settling; r != nil {
		g.settling = nil
		r.result <- nil
	}
}
