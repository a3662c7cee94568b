package router

import (
	"context"
	"errors"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// serializable answers a serializable read at a revision up to which the ranges of its
// span are complete in this node's replicas: the highest of these, or that of an earlier
// such read of one of them if it was higher, for which ranges that are not complete up to
// there here are asked at their leaders; or, where these do not answer soon, or too few nodes
// live for them to have one, the lowest, which needs nobody else. done is false where nothing can be said by what is here, and the read is made like
// others.
func (r *Router) serializable(ctx context.Context, req *pb.RangeRequest, read func(context.Context, readPoint) error) (done bool, err error) {
	local, ok := r.resolvedHere(req)
	if !ok {
		return false, nil
	}
	// What is told of a range does not go back.
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

// headerRevision is the header's revision of a serializable read that was made at a moment: one that
// names its revision is no older for a header that tells of later ones.
func (r *Router) headerRevision(req *pb.RangeRequest, at keyspace.Revision) keyspace.Revision {
	if req.GetRevision() > 0 {
		for _, rt := range r.routesOf(req) {
			at = max(at, keyspace.Revision(rt.served.Load()))
		}
	}
	return at
}

// tell notes the revision that a serializable read is answered with, of its ranges alone: a
// range at rest is not known to be complete here up to what is told of others, and would be
// asked at its leader for ever.
func (r *Router) noteServed(req *pb.RangeRequest, rev keyspace.Revision) {
	if span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd()); ok {
		r.cache.noteServed(span, rev)
	}
}

// routesOf returns the ranges of a read, as far as they are known.
func (r *Router) routesOf(req *pb.RangeRequest) []*route {
	span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
	if !ok {
		return nil
	}
	all := r.cache.all()
	lo, hi := window(all, span)
	return all[lo:hi:hi]
}

// mayBeLed says whether each of the ranges that are not complete here up to the revision may
// have a leader, for all that this node hears of others. A member of etcd without a quorum
// waits for nobody either.
func (r *Router) mayBeLed(h *localRanges, at keyspace.Revision) bool {
	for _, rt := range h.routes {
		_, c, ok := r.cfg.Local.ResolvedHere(rt.desc.Range, rt.desc.Generation)
		if (!ok || c < at) && !rt.quorum(func(n keyspace.NodeID) bool { return n == r.cfg.Self || r.cfg.Alive(n) }) {
			return false
		}
	}
	return true
}

// quorum says whether enough of the range's voters live, in both halves of a joint
// configuration.
func (r *route) quorum(lives func(keyspace.NodeID) bool) bool {
	var all, living [2]int // of the configuration that goes, and of the one that comes
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

// errNotSoon is why a serializable read waits for no leader any more.
var errNotSoon = errors.New("router: no leader answers soon")

// localRanges is what this node's replicas hold of the ranges of a read: the highest and the
// lowest revision up to which they are complete, and that from which on all of them can be
// read, which may be above. told is the highest at which one of them was read.
type localRanges struct {
	routes                        []*route
	from, highest, lowest, served keyspace.Revision
}

// resolvedHere returns what is held here of a read; ok is false where this node has not all
// of its ranges.
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
func (r *Router) rangeHere(ctx context.Context, req *pb.RangeRequest) (resp *pb.RangeResponse, done bool, err error) {
	span, ok := keyspace.FromEtcd(req.GetKey(), req.GetRangeEnd())
	if !ok {
		return nil, false, nil
	}
	done, err = r.serializable(ctx, req, func(ctx context.Context, at readPoint) (err error) {
		var reserved reservation
		defer r.releaseAll(&reserved)
		at.reserved = &reserved
		if resp, err = r.readAt(ctx, span, req, at); err == nil {
			rev := r.headerRevision(req, at.rev)
			resp.Header = header(rev)
			r.noteServed(req, rev)
		}
		return err
	})
	return resp, done, err
}
