package shard

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/pipeline"
)

const (
	// doubtPauseMin and doubtPauseMax lie between two questions to the other voters. The leader proposes
	// nothing meanwhile, so after a few milliseconds all have applied the same batches.
	doubtPauseMin = 20 * time.Millisecond
	doubtPauseMax = time.Second
	// doubtSilence is how long callers wait. A majority is found in a moment if it is there.
	doubtSilence = 3 * time.Second
)

// differs is called if a batch names another hash than this replica has. It returns an error if
// this replica proposed the batch, or no other one votes: it is the one that is wrong then.
func (r *Replica) differs(c *command.Batch) error {
	s := &r.applying
	what := fmt.Sprintf("hash %#x here and %#x at the leader behind batch %d of term %d (revision %d)",
		s.rec.Hash, c.Hash, s.rec.Last.Number, s.rec.Last.Term, s.rec.LastRevision)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.doubt == nil || !r.doubt.found {
		r.log.Error("REPLICAS DISAGREE: this replica's hash differs from its leader's", zap.String("what", what))
	}
	if r.leader.IsLeader && r.leader.Term == s.term || len(s.replicas) == 1 {
		return &kverror.Error{Kind: kverror.Corrupt, Detail: what}
	}
	r.doubtLocked(true)
	return nil
}

// doubtLocked begins a doubt.
func (r *Replica) doubtLocked(found bool) {
	switch {
	case r.stopped || r.rec.Generation == 0:
	case r.doubt != nil:
		r.doubt.found = r.doubt.found || found
	default:
		r.doubt = &doubt{found: found, since: r.store.cfg.Clock.Now(), pause: doubtPauseMin}
		r.store.metrics.doubts.Inc()
		r.feeds.End(r.doubtedLocked())
		r.store.after(0, r.judge)
	}
}

// judge asks all other voters for their hashes. Replicas that stand behind the same batch have the same
// hash unless one is wrong. If a majority agrees with this replica, the doubt ends. If it agrees on
// another hash, this replica goes into quarantine: those who have answered are a quorum without it. With
// no majority it asks again.
func (r *Replica) judge() {
	r.mu.Lock()
	if r.doubt == nil {
		r.mu.Unlock()
		return
	}
	found, replicas, rec := r.doubt.found, r.replicas, r.rec
	r.mu.Unlock()
	hashes := r.store.askHashes(&rec, replicas, found)
	if right, ok := agreed(replicas, hashes); ok && right != fmtHash(rec.Hash) {
		r.store.cfg.Groups.Quarantine(r.id.Group(), fmt.Sprintf("its hash is %s, and that of a majority %s, behind batch %d of term %d",
			fmtHash(rec.Hash), right, rec.Last.Number, rec.Last.Term))
		return // it ends the doubt
	} else if ok {
		r.log.Info("a majority of the replicas has this one's hash", zap.String("hash", right))
		r.mu.Lock()
		r.endDoubtLocked()
		r.mu.Unlock()
		return
	}
	var out pipeline.Answers
	r.mu.Lock()
	if r.doubt != nil {
		if !r.doubt.loud && r.store.cfg.Clock.Now().Sub(r.doubt.since) >= doubtSilence {
			r.doubt.loud = true
			r.log.Error("REPLICAS DISAGREE, and no majority agrees: nobody answers until one does", zap.Any("hashes", hashes))
			r.pipe.Refuse(&out, r.doubtedLocked())
			r.notifyLocked()
		}
		r.doubt.pause = min(2*r.doubt.pause, doubtPauseMax)
		r.store.after(r.doubt.pause, r.judge)
	}
	r.mu.Unlock()
	r.pipe.Send(&out)
}

// agreed returns the hash on which a majority agrees.
func agreed(replicas []keyspace.Replica, hashes map[keyspace.NodeID]string) (string, bool) {
	for _, h := range hashes {
		if majority(replicas, func(n keyspace.NodeID) bool { x, ok := hashes[n]; return ok && x == h }) {
			return h, true
		}
	}
	return "", false
}

// askHashes returns the hashes of the replicas that stand behind the same batch as rec, which is this
// node's, by their nodes.
func (s *Store) askHashes(rec *command.Record, replicas []keyspace.Replica, spread bool) map[keyspace.NodeID]string {
	ctx, cancel := clock.WithTimeout(s.ctx, s.cfg.Clock, doubtPauseMax)
	defer cancel()
	hashes := map[keyspace.NodeID]string{s.cfg.Self: fmtHash(rec.Hash)}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, m := range replicas {
		if m.Node == s.cfg.Self {
			continue
		}
		wg.Go(func() {
			st, err := s.admins.vouch(ctx, m.Node, rec.RangeID, spread)
			if err != nil || st.Descriptor.Generation != rec.Generation || st.LastBatchTerm != rec.Last.Term || st.LastBatchNumber != rec.Last.Number {
				return
			}
			if is, ok := st.Descriptor.ReplicaOn(m.Node); !ok || is.ID != m.ID {
				return
			}
			mu.Lock()
			hashes[m.Node] = st.Hash
			mu.Unlock()
		})
	}
	wg.Wait()
	return hashes
}

// majority says whether those voters are a quorum who agree, in both halves of a joint configuration.
func majority(replicas []keyspace.Replica, agrees func(keyspace.NodeID) bool) bool {
	var was, wasFor, is, isFor int
	for _, m := range replicas {
		yes := 0
		if agrees(m.Node) {
			yes = 1
		}
		switch m.Role {
		case keyspace.RoleVoter:
			was, wasFor, is, isFor = was+1, wasFor+yes, is+1, isFor+yes
		case keyspace.RoleVoterIncoming:
			is, isFor = is+1, isFor+yes
		case keyspace.RoleVoterOutgoing, keyspace.RoleVoterDemoting:
			was, wasFor = was+1, wasFor+yes
		case keyspace.RoleLearner:
		}
	}
	return 2*wasFor > was && 2*isFor > is
}
