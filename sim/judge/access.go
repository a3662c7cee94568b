package judge

import (
	"cmp"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// use is a group of keys that a request uses.
type use struct {
	group byte
	write bool
}

// usesOf returns the groups that a request uses, as etcd checks it.
func usesOf(req proto.Message) (all []use) {
	switch q := req.(type) {
	case *pb.RangeRequest:
		return []use{{q.GetKey()[0], false}}
	case *pb.PutRequest:
		all = []use{{q.GetKey()[0], true}}
		if q.GetPrevKv() {
			all = append(all, use{q.GetKey()[0], false})
		}
	case *pb.DeleteRangeRequest:
		all = []use{{q.GetKey()[0], true}}
		if q.GetPrevKv() {
			all = append(all, use{q.GetKey()[0], false})
		}
	case *pb.TxnRequest:
		for _, c := range q.GetCompare() {
			all = append(all, use{c.GetKey()[0], false})
		}
		for _, o := range slices.Concat(q.GetSuccess(), q.GetFailure()) {
			switch o := o.GetRequest().(type) {
			case *pb.RequestOp_RequestPut:
				all = append(all, usesOf(o.RequestPut)...)
			case *pb.RequestOp_RequestRange:
				all = append(all, usesOf(o.RequestRange)...)
			case *pb.RequestOp_RequestDeleteRange:
				all = append(all, usesOf(o.RequestDeleteRange)...)
			}
		}
	}
	return all
}

// may says whether a user may have had all that a request uses, at some moment from one to another, ends included, by
// the order that at gives.
func (r *Rights) may(who Actor, uses []use, from, to int64, at func(Moment) int64) bool {
	meets := func(fs ...Fact) bool {
		a, b := from, to
		for _, f := range fs {
			a, b = max(a, at(f.May)), min(b, at(f.MayNot))
		}
		return a <= b
	}
	for _, f := range r.Off {
		if meets(*f) {
			return true
		}
	}
	return slices.ContainsFunc(r.Identities, func(id *Identity) bool {
		return id.User == who.User && id.Password == who.Password && meets(id.Fact) && !slices.ContainsFunc(uses, func(u use) bool {
			return !slices.ContainsFunc(r.Rights, func(g *Right) bool {
				return g.User == who.User && g.Group == u.group && (g.Write || !u.write) && meets(id.Fact, g.Fact)
			})
		})
	})
}

// must says whether a user surely had all that a request uses, from one moment to another.
func (r *Rights) must(who Actor, uses []use, from, to int64) bool {
	covers := func(f *Fact) bool { return f.Must.Tick < from && to < f.MustNot.Tick }
	if slices.ContainsFunc(r.Off, covers) {
		return true
	}
	return r.known(who, from, to) && !slices.ContainsFunc(uses, func(u use) bool {
		return !slices.ContainsFunc(r.Rights, func(g *Right) bool {
			return g.User == who.User && g.Group == u.group && (g.Write || !u.write) && covers(&g.Fact)
		})
	})
}

// known says whether a password surely was a user's, from one moment to another.
func (r *Rights) known(who Actor, from, to int64) bool {
	return slices.ContainsFunc(r.Identities, func(id *Identity) bool {
		return id.User == who.User && id.Password == who.Password && id.Must.Tick < from && to < id.MustNot.Tick
	})
}

func tickOf(m Moment) int64 { return m.Tick }

func timeOf(m Moment) int64 { return int64(m.At) }

// checkAccess judges what users did by the order of the changes of their rights, of their calls, and of revisions.
//
// A change was allocated its revision after everything with a lower one had begun, and before the first answer with
// it or a higher one returned. Some moment between must be one at which the user may have had the rights. A
// serializable read, and an event, asks no sequencer. So it must not come later, in virtual time, than the
// acknowledgement of a change that takes the right. Of what comes from far away only the begin counts: when the read
// was asked for, and what was called before the event's revision was allocated. Where clocks may stand still neither
// is judged, because such a node may go by rights that are taken.
func checkAccess(a *Access, ops []*Op, p *replay) (bad []string) {
	if a == nil {
		return nil
	}
	if len(a.ops) == 0 || len(a.told) == 0 || len(a.Rights.Rights) == 0 {
		bad = append(bad, fmt.Sprintf("access: the run missed its purpose: %d operations of users, %d events, %d rights", len(a.ops), len(a.told), len(a.Rights.Rights)))
	}
	r := &a.Rights
	made := map[*Op]int64{}
	if p != nil {
		for _, o := range p.ops {
			made[o.op] = o.rev
		}
	}
	begun, told := boundsOf(ops)
	for _, o := range a.ops {
		uses := usesOf(o.Request)
		if o.Outcome == Refused {
			if kind := kverror.Of(Fated(o.Err)).Kind; kind == kverror.PermissionDenied && r.must(o.Actor, uses, o.Call, o.Return) {
				bad = append(bad, fmt.Sprintf("access: %v had the right, and was denied: %s", o.Actor, o.Op))
			}
			continue
		}
		q, _ := o.Request.(*pb.RangeRequest)
		if q.GetSerializable() {
			if !a.PausedClocks && !a.mayRead(o, uses) {
				bad = append(bad, fmt.Sprintf("access: %v had not the right when this was answered: %s", o.Actor, o.Op))
			}
			continue
		}
		from, to, rev := o.Call, o.Return, int64(0)
		switch {
		case o.Outcome == Unknown:
			if rev = made[o.Op]; rev == 0 || !puts(o.Request) {
				continue // it has changed nothing, or somebody else's delete may have
			}
			to = Never.Tick
		case o.Changes():
			rev = o.Revision()
		}
		if rev > 0 {
			from, to = max(from, begun(rev)), min(to, told(rev))
		}
		if !r.may(o.Actor, uses, from, to, tickOf) {
			bad = append(bad, fmt.Sprintf("access: %v had not the right from %d to %d, when this was done with revision %d: %s", o.Actor, from, to, rev, o.Op))
		}
	}
	for _, l := range a.logins {
		switch {
		case l.OK && !r.may(l.Actor, nil, l.Begun.Tick, l.Over.Tick, tickOf):
			bad = append(bad, fmt.Sprintf("access: this is no password of the user: %+v", l))
		case l.Refused && r.known(l.Actor, l.Begun.Tick, l.Over.Tick):
			bad = append(bad, fmt.Sprintf("access: this is the password of the user, and was refused: %+v", l))
		}
	}
	for _, e := range a.told {
		may := r.may(e.Actor, []use{{e.Group, false}}, int64(e.At.At), int64(e.At.At), timeOf)
		if a.Remote {
			may = a.PausedClocks || r.may(e.Actor, []use{{e.Group, false}}, begun(e.Revision), e.At.Tick, tickOf)
		}
		if !may {
			bad = append(bad, fmt.Sprintf("access: a watcher without the right is told events: %+v", e))
		}
	}
	return bad
}

// mayRead says whether a serializable read may have been answered.
func (a *Access) mayRead(o UserOp, uses []use) bool {
	if a.Remote {
		return a.may(o.Actor, uses, o.Call, o.Return, tickOf)
	}
	return a.may(o.Actor, uses, int64(o.Began), int64(o.Ended), timeOf) && a.may(o.Actor, uses, int64(o.Ended), int64(o.Ended), timeOf)
}

// puts says whether a request puts a value, which is nobody else's.
func puts(req proto.Message) bool {
	switch req.(type) {
	case *pb.PutRequest, *pb.TxnRequest:
		return true // transactions of users put in any case
	}
	return false
}

// boundsOf returns when a revision was allocated: after begun and before told. begun is the last call of those with a
// lower revision. told is the first return of those with this one or a higher one.
func boundsOf(ops []*Op) (begun, told func(rev int64) int64) {
	type point struct{ rev, call, ret int64 }
	var ps []point
	for _, o := range ops {
		if o.Outcome == Answered && o.Revision() > 0 {
			ps = append(ps, point{o.Revision(), o.Call, o.Return})
		}
	}
	slices.SortFunc(ps, func(a, b point) int { return cmp.Compare(a.rev, b.rev) })
	calls, rets := make([]int64, len(ps)+1), make([]int64, len(ps)+1)
	rets[len(ps)] = Never.Tick
	for i := range ps {
		calls[i+1] = max(calls[i], ps[i].call)
	}
	for i := len(ps) - 1; i >= 0; i-- {
		rets[i] = min(rets[i+1], ps[i].ret)
	}
	at := func(rev int64) int {
		i, _ := slices.BinarySearchFunc(ps, rev, func(p point, rev int64) int { return cmp.Compare(p.rev, rev) })
		return i
	}
	return func(rev int64) int64 { return calls[at(rev)] }, func(rev int64) int64 { return rets[at(rev)] }
}
