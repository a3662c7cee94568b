package raftgroup

import (
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
)

// install is a snapshot that raft has accepted and that must enter the engine.
type install struct {
	g   *Group
	r   *incomingSnapshot
	msg *pb.Message // raft's MsgStorageAppend, whose responses wait for the install
}

func (s *snapshots) start() {
	for range s.h.cfg.SnapshotReceives {
		s.wg.Go(s.installLoop)
	}
}

// startInstall hands the install to one of the loops, or abandons it if those have ended.
func (s *snapshots) startInstall(i *install) {
	s.mu.Lock()
	ended := s.mu.ended
	if !ended {
		s.install <- i // there is a slot for each receive
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

// abandonInstalls releases the groups whose installs will not happen. Only callbacks can
// wait behind an install, since raft hands out no entries before it.
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
	s.h.m.installing.Inc()
	defer s.h.m.installing.Dec()
	for {
		err := s.ingest(i)
		if err == nil {
			break
		}
		i.r.installFailed.Store(true)
		i.g.zap.Error("snapshot install failed; retrying", zap.Error(err))
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
	i.g.durableTo(a.Index) // an ingest makes nothing of other groups durable
	i.r.sm.SnapshotDone(a, nil)
	i.g.w.call(i.g, func() { i.g.finishInstall(i) })
	i.g.a.release(i.g)
}

// ingest returns nil once the snapshot is durable in the engine, even if an earlier
// attempt that reported an error did it.
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

func (r *incomingSnapshot) ingest() engine.Ingest {
	return engine.Ingest{Group: r.g.id, Spans: r.sm.SnapshotSpans(r.head.applied), Paths: r.paths}
}
