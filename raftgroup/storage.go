package raftgroup

import (
	"errors"
	"fmt"

	"go.etcd.io/raft/v3"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// storage is what raft sees of the wal. It is used by the group's worker alone.
type storage struct {
	g *Group
	// hard and conf are raft's initial state; they are not looked at again.
	hard *pb.HardState
	conf *pb.ConfState
}

var _ raft.Storage = (*storage)(nil)

func (s *storage) InitialState() (*pb.HardState, *pb.ConfState, error) {
	return s.hard, s.conf, nil
}

// Entries reads the log. It is the one place where a worker may wait for the
// disk: a lagging follower, or what is committed and was not applied before a
// restart, needs entries that are no longer in memory. When the pass has read its
// share it returns none: raft then sends a MsgApp without entries, whose answer
// makes it try again, and hands nothing out for now (see ready).
func (s *storage) Entries(lo, hi, maxSize uint64) ([]*pb.Entry, error) {
	g := s.g
	if ents, ok := g.log.EntriesCached(lo, hi, maxSize); ok {
		return ents, nil
	}
	if g.w.readBytes >= g.h.cfg.passReadBytes && s.mayPutOff() {
		g.readPutOff = true
		g.h.m.logReadsPutOff.Inc()
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

// damaged deals with entries that the disk does not give back. The node must stop and
// say which: raft would send a snapshot instead and hide the damage, and panic over
// entries that are to be applied. Until the node has stopped they count as put off.
func (s *storage) damaged(err error) error {
	g := s.g
	g.h.fail(fmt.Errorf("raftgroup: group %s: %w", g.id, err))
	if !s.mayPutOff() {
		return err
	}
	g.readPutOff = true
	return nil
}

// mayPutOff says whether raft asks for what it can do without: entries to send or to
// hand out, and not those that it looks through before it campaigns.
func (s *storage) mayPutOff() bool {
	return s.g.inReady || s.g.rn.BasicStatus().RaftState == raft.StateLeader
}

func (s *storage) Term(i uint64) (uint64, error) { return s.g.log.Term(i) }

func (s *storage) LastIndex() (uint64, error) { return s.g.log.LastIndex(), nil }

func (s *storage) FirstIndex() (uint64, error) { return s.g.log.FirstIndex(), nil }

// Snapshot returns where the group stands, without data: the tables follow on a
// stream (snapshot_send.go), and what the receiver steps into its raft names the
// state that they really hold.
func (s *storage) Snapshot() (*pb.Snapshot, error) {
	g := s.g
	if !g.maySendSnapshot() {
		return nil, raft.ErrSnapshotTemporarilyUnavailable
	}
	return snapshotAt(g.applied, g.appliedTerm, g.conf.replicas), nil
}

// raftLogger passes raft's log on. Raft tells each election at Info; with many
// groups that is Debug here.
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

// Panic reports a broken invariant; there is nothing to go on with.
func (l raftLogger) Panic(v ...any) {
	l.atArgs(zap.ErrorLevel, v)
	panic("raftgroup: raft: " + fmt.Sprint(v...))
}

// Panicf reports a broken invariant.
func (l raftLogger) Panicf(f string, v ...any) {
	l.at(zap.ErrorLevel, f, v)
	panic("raftgroup: raft: " + fmt.Sprintf(f, v...))
}
