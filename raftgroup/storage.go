package raftgroup

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// storage is raft's view of the wal. Only the group's worker uses it.
type storage struct {
	g *Group
	// hard and conf are raft's initial state; raft reads them once.
	hard *pb.HardState
	conf *pb.ConfState
}

var _ raft.Storage = (*storage)(nil)

func (s *storage) InitialState() (*pb.HardState, *pb.ConfState, error) {
	return s.hard, s.conf, nil
}

// Entries reads the log. Only here may a worker wait for the disk: a lagging follower, or
// entries that a restart has to apply, may need entries that are no longer in memory.
// When the pass has read its share, Entries returns none. Raft then sends a MsgApp
// without entries, whose response makes it try again, and hands out nothing to apply for
// now (see ready).
func (s *storage) Entries(lo, hi, maxSize uint64) ([]*pb.Entry, error) {
	g := s.g
	if ents, ok := g.log.EntriesCached(lo, hi, maxSize); ok {
		return ents, nil
	}
	if g.w.readBytes >= g.h.cfg.passReadBytes && s.mayDefer() {
		g.readDeferred = true
		g.h.m.logReadsDeferred.Inc()
		return nil, nil
	}
	g.h.m.logReads.Inc()
	ents, err := g.log.Entries(lo, hi, maxSize)
	g.w.readBytes += entriesBytes(ents)
	if err != nil && !errors.Is(err, raft.ErrCompacted) && !errors.Is(err, raft.ErrUnavailable) {
		return nil, s.damaged(err)
	}
	return ents, err
}

// damaged handles entries that the disk does not return. The node must stop and name
// them. Otherwise raft would hide the damage by sending a snapshot, or panic over entries
// that are to be applied. Until the node has stopped they count as deferred.
func (s *storage) damaged(err error) error {
	g := s.g
	g.h.fail(fmt.Errorf("raftgroup: group %s: %w", g.id, err))
	if !s.mayDefer() {
		return err
	}
	g.readDeferred = true
	return nil
}

// mayDefer reports whether raft can do without the entries for now: those to send or to
// apply, but not those that it scans before it campaigns.
func (s *storage) mayDefer() bool {
	return s.g.inReady || s.g.rn.BasicStatus().RaftState == raft.StateLeader
}

func (s *storage) Term(i uint64) (uint64, error) { return s.g.log.Term(i) }

func (s *storage) LastIndex() (uint64, error) { return s.g.log.LastIndex(), nil }

func (s *storage) FirstIndex() (uint64, error) { return s.g.log.FirstIndex(), nil }

// Snapshot returns the group's position, without data. The tables follow on a stream
// (snapshot_send.go), and the message that the receiver steps into its raft names the
// state that the tables really hold.
func (s *storage) Snapshot() (*pb.Snapshot, error) {
	g := s.g
	if !g.maySendSnapshot() {
		return nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	return snapshotAt(g.applied, g.appliedTerm, g.conf.replicas), nil
}

// raftLogger forwards raft's log. Raft logs each election at Info, which is Debug here
// because there are many groups.
type raftLogger struct{ l *zap.Logger }

var _ raft.Logger = raftLogger{}

func (l raftLogger) at(level zapcore.Level, format string, v []any) {
	if ce := l.l.Check(level, "raft"); ce != nil {
		ce.Write(zap.String("text", fmt.Sprintf(format, v...)))
	}
}

func (l raftLogger) atArgs(level zapcore.Level, v []any) {
	if ce := l.l.Check(level, "raft"); ce != nil {
		ce.Write(zap.String("text", fmt.Sprint(v...)))
	}
}

func (l raftLogger) Debug(v ...any)              { l.atArgs(zap.DebugLevel, v) }
func (l raftLogger) Debugf(f string, v ...any)   { l.at(zap.DebugLevel, f, v) }
func (l raftLogger) Info(v ...any)               { l.atArgs(zap.DebugLevel, v) }
func (l raftLogger) Infof(f string, v ...any)    { l.at(zap.DebugLevel, f, v) }
func (l raftLogger) Warning(v ...any)            { l.atArgs(zap.DebugLevel, v) }
func (l raftLogger) Warningf(f string, v ...any) { l.at(zap.DebugLevel, f, v) }
func (l raftLogger) Error(v ...any)              { l.atArgs(zap.ErrorLevel, v) }
func (l raftLogger) Errorf(f string, v ...any)   { l.at(zap.ErrorLevel, f, v) }
func (l raftLogger) Fatal(v ...any)              { l.Panic(v...) }
func (l raftLogger) Fatalf(f string, v ...any)   { l.Panicf(f, v...) }

// Panic reports a broken invariant from which raft cannot continue.
func (l raftLogger) Panic(v ...any) {
	l.atArgs(zap.ErrorLevel, v)
	panic("raftgroup: raft: " + fmt.Sprint(v...))
}

// Panicf reports a broken invariant.
func (l raftLogger) Panicf(f string, v ...any) {
	l.at(zap.ErrorLevel, f, v)
	panic("raftgroup: raft: " + fmt.Sprintf(f, v...))
}
