package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// serializable answers a serializable read. It reads at the highest resolved revision of this
// node's replicas of the span, or at that of an earlier serializable read if that was higher. The
// leaders answer for ranges that are behind here. If they do not answer soon, or cannot exist for
// lack of live voters, it reads at the lowest resolved revision, which needs nobody else. It is not done if this node's replicas cannot answer; then the read is linearizable.
func (r *Router) serializable(ctx context.Context, req *pb.RangeRequest, read func(context.Context, readPoint) error) (done bool, err error) {
	local, ok := r.resolvedHere(req)
	if !ok {
		return false, nil
	}
	// A range's served revision never goes back.
	highest, lowest := max(local.highest, local.served), local.lowest
	explicit := keyspace.Revision(req.GetRevision())
	if explicit > highest {
		return false, nil
	}
	if lowest < highest && explicit <= 0 && r.mayBeLed(&local, highest) || explicit > lowest {
		soon, cancel := context.WithTimeoutCause(ctx, r.cfg.AttemptTimeout, errNotSoon)
		err := read(soon, readPoint{rev: highest, where: nearest})
		late := errors.Is(context.Cause(soon), errNotSoon)
		cancel()
		if errors.Is(err, errMemoryNotSoon) {
			// It says nothing about the leaders.
			err, late = read(ctx, readPoint{rev: highest, where: nearest}), false
		}
		if err == nil || ctx.Err() != nil || isFinal(req, err) {
			return true, err
		}
		if k := kverror.Of(err); explicit > 0 || !late && k.Retry() != kverror.RetryRouter && k.Fate() != kverror.Unknown {
			return false, nil
		}
	}
	err = read(ctx, readPoint{rev: lowest, where: localOnly})
	return err == nil || ctx.Err() != nil || isFinal(req, err), err
}

// headerRevision returns the revision for the header of a serializable read. A read that names its
// revision is no older if its header names a later one.
func (r *Router) headerRevision(req *pb.RangeRequest, at keyspace.Revision) keyspace.Revision {
	if req.GetRevision() > 0 {
		for _, rt := range r.routesOf(req) {
			at = max(at, keyspace.Revision(rt.served.Load()))
		}
	}
	return at
}

// noteServed notes the revision of a serializable answer for its ranges alone. If other ranges'
// revisions counted, a range at rest would have to ask its leader for ever.
func (r *Router) noteServed(req *pb.RangeRequest, rev keyspace.Revision) {
	if span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd()); ok {
		r.cache.noteServed(span, rev)
	}
}

// routesOf returns the known ranges of a read.
func (r *Router) routesOf(req *pb.RangeRequest) []*route {
	span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
	if !ok {
		return nil
	}
	all := r.cache.all()
	lo, hi := window(all, span)
	return all[lo:hi:hi]
}

// mayBeLed says whether each range that is not resolved here up to the revision may have a leader,
// by what this node knows of others. A member of etcd without a quorum waits for nobody either.
func (r *Router) mayBeLed(h *localRanges, at keyspace.Revision) bool {
	for _, rt := range h.routes {
		_, c, ok := r.cfg.Local.ResolvedHere(rt.desc.Range, rt.desc.Generation)
		if (!ok || c < at) && !rt.quorum(func(n keyspace.NodeID) bool { return n == r.cfg.Self || r.cfg.Alive(n) }) {
			return false
		}
	}
	return true
}

// quorum says whether enough of the range's voters are alive, in both halves of a joint
// configuration.
func (r *route) quorum(lives func(keyspace.NodeID) bool) bool {
	var all, living [2]int // of the outgoing and of the incoming configuration
	for _, rep := range r.desc.Replicas {
		n := 0
		if lives(rep.Node) {
			n = 1
		}
		if rep.Role == keyspace.RoleVoter || rep.Role == keyspace.RoleVoterOutgoing || rep.Role == keyspace.RoleVoterDemoting {
			all[0], living[0] = all[0]+1, living[0]+n
		}
		if rep.Role == keyspace.RoleVoter || rep.Role == keyspace.RoleVoterIncoming {
			all[1], living[1] = all[1]+1, living[1]+n
		}
	}
	return 2*living[0] > all[0] && 2*living[1] > all[1]
}

// localRanges is what this node's replicas know of the ranges of a read: their highest and lowest
// resolved revision. All of them can be read from revision from on, which may be above those.
// served is the highest revision at which one of them was read.
type localRanges struct {
	routes                        []*route
	from, highest, lowest, served keyspace.Revision
}

// resolvedHere returns the local ranges of a read; ok is false if this node does not have all of
// them.
func (r *Router) resolvedHere(req *pb.RangeRequest) (h localRanges, ok bool) {
	span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
	if !ok {
		return h, false
	}
	if h.routes, ok = overlapping(r.cache.all(), span); !ok {
		return h, false
	}
	for i, rt := range h.routes {
		from, c, ok := r.cfg.Local.ResolvedHere(rt.desc.Range, rt.desc.Generation)
		if !ok {
			return h, false
		}
		h.from, h.highest, h.served = max(h.from, from), max(h.highest, c), max(h.served, keyspace.Revision(rt.served.Load()))
		if i == 0 || c < h.lowest {
			h.lowest = c
		}
	}
	return h, true
}

// rangeHere is Range of a serializable request.
func (r *Router) rangeHere(ctx context.Context, req *pb.RangeRequest, reserved *reservation, encoded *[][]byte) (resp *pb.RangeResponse, done bool, err error) {
	span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
	if !ok {
		return nil, false, nil
	}
	done, err = r.serializable(ctx, req, func(ctx context.Context, at readPoint) (err error) {
		beginAnew(reserved, encoded)
		at.reserved, at.encoded = reserved, encoded
		if resp, err = r.readAt(ctx, span, req, at); err == nil {
			rev := r.headerRevision(req, at.rev)
			resp.Header = header(rev)
			r.noteServed(req, rev)
		}
		return err
	})
	return resp, done, err
}
