package raftgroup

import (
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/zap"
)

// Bounds that are not configurable.
const (
	// passGroupsMax bounds how many groups one pass of a worker visits, so that a
	// heartbeat does not wait behind everything else.
	passGroupsMax = 256
	// frameBytesMax is where a frame is closed and the next one begun.
	frameBytesMax = 256 << 10
	// groupMessagesMax bounds the messages of one group that its worker has not processed
	// yet. Those with entries are bounded in bytes as well.
	groupMessagesMax = 4096
	// passReadMax is how many bytes a pass may read from the log's files: the heartbeats
	// of the worker's other groups must not wait longer.
	passReadMax = 4 << 20
	// headStartTicks is the head start of the chosen candidate after the promises expire.
	// It campaigns within two ticks and is then elected before the others' timeouts.
	headStartTicks = 3
	// campaignAsks is how often a candidate asks for pre-votes: promises end up to two heartbeats later than its own.
	campaignAsks = 5
	// campaignLagMax is how many committed entries a campaigning replica may still have
	// to apply: raft scans all of them at once before it campaigns.
	campaignLagMax = 4096
	// readyRoundsMax bounds how many Readys one visit handles before the next group gets
	// its turn.
	readyRoundsMax = 8
	// applyBytesMax bounds the entries in one engine batch, beyond the first.
	applyBytesMax = 4 << 20
	// maxEntryBytes bounds one proposal, in addition to the wal's own bound.
	maxEntryBytes = 16 << 20
	// DefaultClockDrift is Config.MaxClockDrift's default.
	DefaultClockDrift = 0.01

	// entryOverheadBytes is the accounted cost of an entry beyond its data.
	entryOverheadBytes = 64
	// maxSizePerMsg, maxCommittedPerReady and maxInflightMsgs are raft's bounds: on one
	// MsgApp, on entries handed out and not yet applied, and on unanswered MsgApps to one
	// follower.
	maxSizePerMsg        = 256 << 10
	maxCommittedPerReady = 1 << 20
	maxInflightMsgs      = 256
	// bufferedGroupsMax and bufferedPerGroupMax bound the votes kept for groups that are
	// not open here.
	bufferedGroupsMax   = 4096
	bufferedPerGroupMax = 16
	// learnedRoutesMax bounds the senders that a replica remembers before its
	// configuration names them.
	learnedRoutesMax = 16
)

// fill checks the configuration and sets defaults.
func (c *Config) fill() error {
	if c.Node == 0 || c.Clock == nil || c.WAL == nil || c.Engine == nil || c.Bus == nil {
		return errors.New("raftgroup: Config needs Node, Clock, WAL, Engine and Bus")
	}
	orDefault(&c.TickInterval, 100*time.Millisecond)
	orDefault(&c.ElectionTimeout, 10*c.TickInterval)
	orDefault(&c.LivenessTimeout, c.ElectionTimeout)
	orDefault(&c.SlowApply, 100*time.Millisecond)
	orDefault(&c.SleepAfter, 10*c.TickInterval)
	orDefault(&c.AwakeFree, 64)
	orDefault(&c.MaxClockDrift, DefaultClockDrift)
	orDefault(&c.WakesPerSecond, 2000)
	orDefault(&c.Workers, runtime.GOMAXPROCS(0))
	orDefault(&c.Appliers, runtime.GOMAXPROCS(0))
	orDefault(&c.MaxGroupInflightBytes, 16<<20)
	orDefault(&c.MaxProposalBytes, 256<<20)
	orDefault(&c.MaxInboundBytes, 128<<20)
	orDefault(&c.MaxPeerInflightBytes, 4<<20)
	orDefault(&c.MaxLagBytes, 64<<20)
	orDefault(&c.MaxWALBytes, 3<<29)
	orDefault(&c.MaxReads, 1<<16)
	orDefault(&c.passReadBytes, passReadMax)
	orDefault(&c.SnapshotBytesPerSecond, 64<<20)
	orDefault(&c.SnapshotSends, 16)
	orDefault(&c.SnapshotReceives, 16)
	if c.Rand == nil {
		c.Rand = rand.Reader
	}
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics(nil)
	}
	return c.check()
}

func (c *Config) check() error {
	switch {
	case c.TickInterval < time.Millisecond:
		return fmt.Errorf("raftgroup: tick of %v, at least 1ms", c.TickInterval)
	case c.ElectionTimeout < 5*c.TickInterval:
		return fmt.Errorf("raftgroup: election timeout %v, at least five ticks of %v", c.ElectionTimeout, c.TickInterval)
	case c.ElectionTimeout > promiseMax:
		return fmt.Errorf("raftgroup: election timeout %v, at most %v", c.ElectionTimeout, promiseMax)
	case c.MaxClockDrift < 0 || c.MaxClockDrift >= 0.5:
		return fmt.Errorf("raftgroup: clock drift %v, want [0, 0.5)", c.MaxClockDrift)
	case c.MaxPeerInflightBytes < maxSizePerMsg:
		return fmt.Errorf("raftgroup: %d bytes in flight per peer, at least %d", c.MaxPeerInflightBytes, maxSizePerMsg)
	case c.Workers < 1 || c.Appliers < 1 || c.WakesPerSecond < 1 || c.MaxReads < 1 ||
		c.SnapshotSends < 1 || c.SnapshotReceives < 1 || c.SnapshotBytesPerSecond < 1 ||
		c.MaxGroupInflightBytes < 1 || c.MaxProposalBytes < 1 || c.MaxInboundBytes < 1 ||
		c.MaxLagBytes < 1 || c.MaxWALBytes < 1:
		return errors.New("raftgroup: Config has a bound below 1")
	}
	return nil
}

// electionTicks is ElectionTimeout in ticks, rounded up: raft's timeout must not be
// shorter than the promise.
func (c *Config) electionTicks() int {
	return int((c.ElectionTimeout + c.TickInterval - 1) / c.TickInterval)
}

// sleepTicksMin is after how many idle ticks a group falls asleep at the soonest: the heartbeat of the first gives reads a lease.
const sleepTicksMin = 2

// sleepTicks is after how many idle ticks a leader's group falls asleep, where a host has so many awake groups. With
// twice as many each has half the time. A range that gets few puts spends more on the ticks and heartbeats after a put than on the put.
func (c *Config) sleepTicks(awake int) int64 {
	after := c.idleTicks()
	return min(after, max(sleepTicksMin, after*int64(max(0, c.AwakeFree))/int64(max(1, awake))))
}

// idleTicks is SleepAfter in ticks.
func (c *Config) idleTicks() int64 {
	return int64((c.SleepAfter + c.TickInterval - 1) / c.TickInterval)
}

// retryTicks is after how many ticks a follower repeats an unanswered request.
func (c *Config) retryTicks() int { return max(1, c.electionTicks()/3) }

func orDefault[T int | int64 | uint64 | float64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

func entriesBytes(ents []*pb.Entry) (n int64) {
	for _, e := range ents {
		n += int64(len(e.GetData())) + entryOverheadBytes
	}
	return n
}

// livenessEvery is how many ticks lie between two rounds of liveness messages. Five fit into the
// timeout, so one lost message does not make a node dead.
func (c *Config) livenessEvery() uint64 {
	return uint64(max(1, c.LivenessTimeout/5/c.TickInterval))
}

func (c *Config) livenessInterval() time.Duration {
	return time.Duration(c.livenessEvery()) * c.TickInterval
}
