package judge

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// leaseEnd is a revision at which all keys of a lease were deleted, nothing else
// happened, and no answer of an operation on keys claims it. If an operation of unknown
// fate may have made it too, it is not certain.
type leaseEnd struct {
	id, rev int64
	sure    bool
}

// life is the history of one lease.
type life struct {
	id    int64
	grant *Op
	ttl   time.Duration
	// shown are the operations whose answers show that the lease exists. renewals
	// restarted its TTL. gone show that it does not exist. revokes may have ended it.
	shown, renewals, gone, revokes []*Op
}

// lives collects the leases whose grant was answered. If several had one id, what is
// said of the id counts for the one whose holder was told last.
func lives(ops []*Op) []*life {
	by := map[int64]*life{}
	var all []*life
	for _, o := range ops {
		if _, ok := o.Request.(*pb.LeaseGrantRequest); ok && o.Outcome == Answered {
			ttl := time.Duration(o.Response.(*pb.LeaseGrantResponse).GetTTL()) * time.Second
			l := &life{id: LeaseOf(o), grant: o, ttl: ttl, shown: []*Op{o}, renewals: []*Op{o}}
			if b := by[l.id]; b == nil || b.grant.Return < o.Return {
				by[l.id] = l
			}
			all = append(all, l)
		}
	}
	for _, o := range ops {
		if l := by[cmp.Or(LeaseOf(o), attached(o))]; l != nil && o != l.grant {
			l.take(o)
		}
	}
	return all
}

// take records what an operation says of the lease. "No such lease" means that it has
// ended if the question came after the grant's answer; otherwise it may mean that
// nothing was granted yet.
func (l *life) take(o *Op) {
	if _, ok := o.Request.(*pb.LeaseRevokeRequest); ok && o.Outcome != Refused {
		l.revokes = append(l.revokes, o)
	}
	switch {
	case o.Outcome == Unknown:
	case o.Outcome == Refused:
		if errors.Is(o.Err, kverror.LeaseNotFound) && o.Call > l.grant.Return {
			l.gone = append(l.gone, o)
		}
	case isGone(o.Response):
		if o.Call > l.grant.Return {
			l.gone = append(l.gone, o)
		}
	default:
		switch r := o.Response.(type) {
		case *pb.LeaseRevokeResponse:
			return
		case *pb.LeaseKeepAliveResponse:
			l.renewals = append(l.renewals, o)
		case *pb.TxnResponse:
			if !r.GetSucceeded() {
				return
			}
		}
		l.shown = append(l.shown, o)
	}
}

// isGone says whether an answer says that a lease is not there.
func isGone(resp proto.Message) bool {
	switch r := resp.(type) {
	case *pb.LeaseKeepAliveResponse:
		return r.GetTTL() <= 0
	case *pb.LeaseTimeToLiveResponse:
		return r.GetGrantedTTL() == 0
	}
	return false
}

// safe is until when the lease lives if nobody revokes it: its TTL after the call of
// the last acknowledged renewal, on the fastest possible clock.
func (l *life) safe() (until time.Duration, by *Op) {
	for _, o := range l.renewals {
		if t := o.Began + time.Duration(float64(l.ttl)/(1+MaxDrift)); t > until {
			until, by = t, o
		}
	}
	return until, by
}

// revokedBefore says whether somebody may have revoked the lease before a moment.
func (l *life) revokedBefore(t time.Duration) bool {
	return slices.ContainsFunc(l.revokes, func(o *Op) bool { return o.Began <= t })
}

// checkLeases checks that every lease lasts as long as its holder was told, and that all its
// keys end with it at once and stay gone. p is nil if there is no replay.
func checkLeases(ops []*Op, vs []Version, p *replay, drained bool) (bad []string) {
	all := lives(ops)
	ends := map[int64][]leaseEnd{}
	if p != nil {
		for _, e := range p.ends {
			ends[e.id] = append(ends[e.id], e)
		}
	}
	first := firstSeen(ops)
	for _, l := range all {
		bad = append(bad, l.checkEarly(ends[l.id], first)...)
		bad = append(bad, l.checkAfter(ops)...)
		if p != nil {
			bad = append(bad, l.checkKeys(p, vs, ends[l.id])...)
		}
	}
	if p != nil && drained {
		for _, kv := range p.models[len(p.models)-1].keys {
			if kv.GetLease() != 0 {
				bad = append(bad, fmt.Sprintf("leases: no lease is left, and a key of one: %v", kv))
			}
		}
	}
	return bad
}

// checkGrants checks that no id is granted while a lease has it, whether clients choose
// it or nodes do.
func checkGrants(ops []*Op) (bad []string) {
	by := map[int64][]*life{}
	for _, l := range lives(ops) {
		for _, before := range by[l.id] {
			if !before.overBefore(l) && !l.overBefore(before) {
				bad = append(bad, fmt.Sprintf("leases: lease %d is granted twice: %s and %s", l.id, before.grant, l.grant))
			}
		}
		by[l.id] = append(by[l.id], l)
	}
	return bad
}

// overBefore says whether the lease may have been granted and have ended before another
// one with its id was granted.
func (l *life) overBefore(other *life) bool {
	if l.grant.Call > other.grant.Return {
		return false
	}
	until, _ := l.safe()
	return other.grant.Ended >= until || l.revokedBefore(other.grant.Ended) || other.revokedBefore(other.grant.Ended)
}

// lateBy is how late a lease may end without failures: the first attempt to end it may
// wait for transactions that lock its keys, and so may the second.
const lateBy = 2 * time.Second

// checkLate looks for leases that exist after they must have expired, in a run without
// failures.
func checkLate(ops []*Op) (bad []string) {
	unsure := map[int64]bool{}
	for _, o := range ops {
		if _, ok := o.Request.(*pb.LeaseKeepAliveRequest); ok && o.Outcome == Unknown {
			unsure[LeaseOf(o)] = true // it may have renewed the lease at any time
		}
	}
	for _, l := range lives(ops) {
		if unsure[l.id] {
			continue
		}
		over := time.Duration(0)
		for _, o := range l.renewals {
			over = max(over, o.Ended+time.Duration(float64(l.ttl)*(1+MaxDrift)))
		}
		for _, o := range l.shown {
			if o.Began > over+lateBy {
				bad = append(bad, fmt.Sprintf("leases: lease %d expires at %v at the latest; it is there %v later: %s", l.id, over, o.Began-over, o))
			}
		}
	}
	return bad
}

// checkEarly looks for a sign that the lease ended before its time.
func (l *life) checkEarly(ends []leaseEnd, first func(int64) *Op) (bad []string) {
	signs := slices.Clone(l.gone)
	for _, e := range ends {
		if o := first(e.rev); e.sure && o != nil {
			signs = append(signs, o)
		}
	}
	until, by := l.safe()
	for _, o := range signs {
		if o.Ended < until && !l.revokedBefore(o.Ended) {
			return []string{fmt.Sprintf("leases: lease %d lives until %v at least, by %s; it has ended, by %s", l.id, until, by, o)}
		}
	}
	return nil
}

// checkAfter looks for signs of life after the end was answered: a renewal, an attached
// key, or a read key.
func (l *life) checkAfter(ops []*Op) (bad []string) {
	over := int64(math.MaxInt64)
	var end *Op
	for _, o := range l.gone {
		if o.Return < over {
			over, end = o.Return, o
		}
	}
	for _, o := range l.revokes {
		if o.Outcome == Answered && o.Return < over {
			over, end = o.Return, o
		}
	}
	if end == nil {
		return nil
	}
	for _, o := range l.shown {
		if o.Call > over {
			bad = append(bad, fmt.Sprintf("leases: lease %d is there after its end %s: %s", l.id, end, o))
		}
	}
	for _, o := range ops {
		r, ok := o.Request.(*pb.RangeRequest)
		if !ok || o.Outcome != Answered || o.Call <= over || r.GetRevision() != 0 {
			continue
		}
		if slices.ContainsFunc(o.Response.(*pb.RangeResponse).GetKvs(), func(kv *mvccpb.KeyValue) bool { return kv.GetLease() == l.id }) {
			return append(bad, fmt.Sprintf("leases: lease %d has keys after its end %s: %s", l.id, end, o))
		}
	}
	return bad
}

// checkKeys checks that nothing is attached after the revision of the end, and the keys
// that answers name.
func (l *life) checkKeys(p *replay, vs []Version, ends []leaseEnd) (bad []string) {
	over := int64(math.MaxInt64)
	for _, e := range ends {
		if e.sure {
			over = min(over, e.rev)
		}
	}
	for _, o := range l.revokes {
		if o.Outcome != Answered {
			continue
		}
		over = min(over, o.Revision())
		if keys := keysOf(p.at(o.Revision()), l.id); len(keys) > 0 {
			bad = append(bad, fmt.Sprintf("leases: lease %d has the keys %q at the revision of its end: %s", l.id, keys, o))
		}
	}
	for i := range vs {
		if vs[i].Lease == l.id && vs[i].Mod > over {
			bad = append(bad, fmt.Sprintf("leases: lease %d ended at revision %d, and this is attached: %+v", l.id, over, vs[i]))
		}
	}
	for _, o := range l.shown {
		r, ok := o.Response.(*pb.LeaseTimeToLiveResponse)
		if !ok || !o.Request.(*pb.LeaseTimeToLiveRequest).GetKeys() {
			continue
		}
		if key, wrong := p.misnamed(o, r); wrong {
			bad = append(bad, fmt.Sprintf("leases: whether lease %d has the key %q is answered wrong: %s", l.id, key, o))
		}
	}
	return bad
}

// misnamed returns a key that an answer names wrongly, or wrongly omits. The ranges are
// asked one after the other. A key must be named if it was attached from before the
// question up to the answer's revision. A key may be named if it was attached at some
// time since the question.
func (p *replay) misnamed(o *Op, r *pb.LeaseTimeToLiveResponse) (key string, wrong bool) {
	from, found := slices.BinarySearch(p.revs, p.known(o.Call))
	if !found {
		from = max(0, from-1)
	}
	always, ever := map[string]bool{}, map[string]bool{}
	for _, k := range keysOf(p.models[from], r.GetID()) {
		always[k], ever[k] = true, true
	}
	for i := from + 1; i < len(p.revs); i++ {
		for _, k := range keysOf(p.models[i], r.GetID()) {
			ever[k] = true
		}
		if p.revs[i] <= o.Revision() {
			maps.DeleteFunc(always, func(k string, _ bool) bool { return p.models[i].keys[k].GetLease() != r.GetID() })
		}
	}
	for _, k := range r.GetKeys() {
		if !ever[string(k)] {
			return string(k), true
		}
		delete(always, string(k))
	}
	for k := range always {
		return k, true
	}
	return "", false
}
