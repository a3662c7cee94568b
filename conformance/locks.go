package conformance

import (
	"slices"
	"strconv"

	"go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
	"google.golang.org/protobuf/proto"
)

// lockKinds are the calls of the two services that consist of transactions, leases and
// watches. Each name has one lease, so that nobody waits for another. Their keys lie
// among those that other calls delete.
var lockKinds = []*kind{
	{
		name: "Lock", method: v3lockpb.Lock_Lock_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message {
			name, lease := s.lockName("lock")
			return &v3lockpb.LockRequest{Name: name, Lease: lease}
		},
		response: func() proto.Message { return &v3lockpb.LockResponse{} },
	},
	{
		name: "Unlock", method: v3lockpb.Lock_Unlock_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message { return &v3lockpb.UnlockRequest{Key: s.heldKey()} },
		response: func() proto.Message { return &v3lockpb.UnlockResponse{} },
	},
	{
		name: "Campaign", method: v3electionpb.Election_Campaign_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message {
			name, lease := s.lockName("elect")
			return &v3electionpb.CampaignRequest{Name: name, Lease: lease, Value: s.value()}
		},
		response: func() proto.Message { return &v3electionpb.CampaignResponse{} },
	},
	{
		name: "Proclaim", method: v3electionpb.Election_Proclaim_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message {
			return &v3electionpb.ProclaimRequest{Leader: s.leaderKey(), Value: s.value()}
		},
		response: func() proto.Message { return &v3electionpb.ProclaimResponse{} },
	},
	{
		name: "Leader", method: v3electionpb.Election_Leader_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message {
			name, _ := s.lockName("elect")
			if len(s.leaders) > 0 && !s.chance(4) {
				name = pick(s, s.leaders).GetName()
			}
			return &v3electionpb.LeaderRequest{Name: name}
		},
		response: func() proto.Message { return &v3electionpb.LeaderResponse{} },
	},
	{
		name: "Resign", method: v3electionpb.Election_Resign_FullMethodName, weight: 1, alone: true,
		generate: func(s *source) proto.Message { return &v3electionpb.ResignRequest{Leader: s.leaderKey()} },
		response: func() proto.Message { return &v3electionpb.ResignResponse{} },
	},
}

// lockName returns a name and the one lease used for it.
func (s *source) lockName(what string) (name []byte, lease int64) {
	i := s.IntN(len(leaseIDs))
	if at := slices.Index(leaseIDs, s.liveLease()); at >= 0 && !s.chance(8) {
		i = at
	}
	return []byte(groups[s.group()].prefix + what + strconv.Itoa(i)), leaseIDs[i]
}

// heldMax is how many keys of locks are remembered.
const heldMax = 8

// heldKey returns the key of an acquired lock, which may have been deleted since; now
// and then any key.
func (s *source) heldKey() []byte {
	switch {
	case s.chance(20):
		return nil
	case len(s.held) == 0 || s.chance(10):
		return s.writeKey(s.group())
	}
	return pick(s, s.held)
}

// leaderKey returns the result of a won campaign, or something similar.
func (s *source) leaderKey() *v3electionpb.LeaderKey {
	if s.chance(20) {
		return nil
	}
	if len(s.leaders) > 0 && !s.chance(8) {
		l := proto.CloneOf(pick(s, s.leaders))
		if s.chance(8) {
			l.Rev = s.near(l.Rev)
		}
		return l
	}
	name, lease := s.lockName("elect")
	return &v3electionpb.LeaderKey{Name: name, Lease: lease, Key: s.writeKey(s.group()), Rev: s.someRevision()}
}

// observeLock learns from an answer about locks.
func (s *source) observeLock(a answer) {
	switch r := a.response.(type) {
	case *v3lockpb.LockResponse:
		s.held = append(s.held, r.GetKey())
		s.held = s.held[max(0, len(s.held)-heldMax):]
	case *v3electionpb.CampaignResponse:
		s.leaders = append(s.leaders, r.GetLeader())
		s.leaders = s.leaders[max(0, len(s.leaders)-heldMax):]
	case *v3electionpb.LeaderResponse:
		s.known[string(r.GetKv().GetKey())] = r.GetKv()
	}
}
