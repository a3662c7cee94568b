package judge

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// replay is the history of all changes in the order of revisions.
type replay struct {
	revs   []int64
	models []*Model // the state at revs[i]
	// begin is the place in both from which on clients change anything.
	begin int
	// ops are the operations known to have taken effect, with their revisions: those
	// with an answer, and those of unknown fate whose changes are on the disks.
	ops []placed
	// ends are the ends of leases. known is the highest revision known at a tick.
	ends  []leaseEnd
	known func(tick int64) int64
}

// placed is an operation with its revision. after is the revision of the last change
// before it if it is judged with others.
type placed struct {
	op    *Op
	rev   int64
	after int64
}

// at returns the state at a revision.
func (p *replay) at(rev int64) *Model {
	i, found := slices.BinarySearch(p.revs, rev)
	if !found {
		i--
	}
	return p.models[i]
}

// checkReplay runs all changes in the order of their revisions, as the disks have them,
// and compares every answer. Each event without an answer must belong to one operation
// of unknown fate, and each of those has at most one. What start has is there before.
func checkReplay(ops []*Op, vs []Version, start *Loaded) (*replay, []string) {
	p := &replay{revs: []int64{1}, models: []*Model{NewModel()}, known: highestBefore(ops)}
	grants := granted(ops)
	ops = onKeys(ops)
	p.models[0].past = p.at
	start.replay(p)
	events := map[int64][]Version{}
	for _, v := range vs {
		if v.Mod > p.revs[p.begin] {
			events[v.Mod] = append(events[v.Mod], v)
		}
	}
	for _, e := range events {
		slices.SortFunc(e, CompareVersions)
		for i := range e {
			e[i].Sub = 0 // the model knows the order but not the numbers
		}
	}
	owners := map[int64]*Op{}
	var unknown []*Op
	for _, o := range ops {
		switch {
		case o.Outcome == Unknown:
			unknown = append(unknown, o)
		case o.Outcome == Answered && o.Changes():
			owners[o.Revision()] = o
			if _, ok := events[o.Revision()]; !ok {
				events[o.Revision()] = nil
			}
		}
	}
	claims := newClaims(unknown, p.known)
	for _, rev := range slices.Sorted(maps.Keys(events)) {
		now := p.models[len(p.models)-1]
		if owners[rev] == nil && p.endLease(now, rev, events[rev], grants, claims) {
			continue
		}
		next, wrong := step(now, rev, events[rev], owners[rev], claims)
		if wrong != "" {
			return p, []string{"replay: " + wrong}
		}
		p.revs, p.models = append(p.revs, rev), append(p.models, next)
		if o := owners[rev]; o != nil {
			p.ops = append(p.ops, placed{op: o, rev: rev})
		}
	}
	made, wrong := claims.settle()
	p.ops = append(p.ops, made...)
	if wrong != "" {
		return p, []string{"replay: " + wrong}
	}
	return p, p.checkReads(ops)
}

// endLease takes a revision as the end of a granted lease if it can be one. If an
// operation of unknown fate may have made it too, neither is certain.
func (p *replay) endLease(now *Model, rev int64, events []Version, grants map[int64]*Op, claims *claims) bool {
	id := endOf(now, events)
	grant := grants[id]
	if grant == nil {
		return false
	}
	p.ends = append(p.ends, leaseEnd{id: id, rev: rev, sure: len(claims.makers(now, rev, events)) == 0})
	p.revs, p.models = append(p.revs, rev), append(p.models, write(now, rev, events))
	end := &Op{ID: grant.ID, Client: Holders, Request: &pb.LeaseRevokeRequest{ID: id}, Call: grant.Call, Began: grant.Began, Outcome: Unknown, Err: errNoAnswer}
	p.ops = append(p.ops, placed{op: end, rev: rev})
	return true
}

// step is one revision: the owner's request must produce its answer and its events.
func step(now *Model, rev int64, events []Version, owner *Op, claims *claims) (next *Model, wrong string) {
	if owner == nil {
		if !claims.add(now, rev, events) {
			return nil, fmt.Sprintf("revision %d: nobody asked for %+v", rev, events)
		}
		return write(now, rev, events), ""
	}
	resp, next, d := now.Run(owner.Request, rev)
	if !sameAnswer(resp, owner.Response) {
		return nil, fmt.Sprintf("revision %d: the answer should be %s: %s", rev, show(resp), owner)
	}
	if !slices.Equal(d, events) {
		return nil, fmt.Sprintf("revision %d: the disks have %+v, and the operation makes %+v: %s", rev, events, d, owner)
	}
	return next, ""
}

// write returns the state with the events of a revision.
func write(now *Model, rev int64, events []Version) *Model {
	keys := maps.Clone(now.keys)
	for _, v := range events {
		if v.Deleted {
			delete(keys, v.Key)
			continue
		}
		keys[v.Key] = &mvccpb.KeyValue{
			Key: []byte(v.Key), Value: []byte(v.Value), ModRevision: v.Mod, CreateRevision: v.Create, Version: v.Version, Lease: v.Lease,
		}
	}
	return &Model{rev: rev, keys: keys, past: now.past}
}

// checkReads compares every answer that changed nothing with the state at its revision.
func (p *replay) checkReads(ops []*Op) (bad []string) {
	for _, o := range ops {
		if o.Outcome != Answered || o.Changes() {
			continue
		}
		rev := o.Revision()
		if rev < 1 {
			bad = append(bad, fmt.Sprintf("replay: an answer without a revision: %s", o))
			continue
		}
		p.ops = append(p.ops, placed{op: o, rev: rev})
		resp, next := p.at(rev).apply(o.Request, rev)
		if !sameAnswer(resp, o.Response) {
			bad = append(bad, fmt.Sprintf("replay: the answer should be %s: %s", show(resp), o))
		} else if next.rev == rev && next != p.at(rev) {
			bad = append(bad, fmt.Sprintf("replay: changed nothing, and would have: %s", o))
		}
	}
	return bad
}

// claims assigns the revisions without an answer to operations of unknown fate, at most
// one to each.
type claims struct {
	unknown []*Op
	before  func(tick int64) int64
	revs    []int64
	// can has, for each of revs, the indexes of the operations that may have made it.
	can [][]int
}

func newClaims(unknown []*Op, before func(int64) int64) *claims {
	return &claims{unknown: unknown, before: before}
}

// add searches operations that make these events in this state, and says whether there
// is one.
func (c *claims) add(now *Model, rev int64, events []Version) bool {
	can := c.makers(now, rev, events)
	c.revs, c.can = append(c.revs, rev), append(c.can, can)
	return len(can) > 0
}

// makers returns the indexes of the operations that make these events of this state.
func (c *claims) makers(now *Model, rev int64, events []Version) (can []int) {
	for i, o := range c.unknown {
		if rev <= c.before(o.Call) {
			continue // the revision was known before the operation began
		}
		_, next, d := now.Run(o.Request, rev)
		if next != now && slices.Equal(d, events) {
			can = append(can, i)
		}
	}
	return can
}

// settle assigns each revision an operation of its own.
func (c *claims) settle() (made []placed, wrong string) {
	taken := map[int]int{} // operation -> place in revs
	var give func(at int, tried map[int]bool) bool
	give = func(at int, tried map[int]bool) bool {
		for _, i := range c.can[at] {
			if tried[i] {
				continue
			}
			tried[i] = true
			if other, ok := taken[i]; !ok || give(other, tried) {
				taken[i] = at
				return true
			}
		}
		return false
	}
	for at := range c.revs {
		if !give(at, map[int]bool{}) {
			var who []string
			for _, i := range c.can[at] {
				who = append(who, c.unknown[i].String())
			}
			return nil, fmt.Sprintf("revision %d: applied twice: %s", c.revs[at], strings.Join(who, "; "))
		}
	}
	for i, at := range taken {
		made = append(made, placed{op: c.unknown[i], rev: c.revs[at]})
	}
	return made, ""
}

// replay has the replay begin with the states of the source.
func (l *Loaded) replay(p *replay) {
	if l == nil {
		return
	}
	for vs := l.Versions; len(vs) > 0; {
		n := slices.IndexFunc(vs, func(v Version) bool { return v.Mod > vs[0].Mod })
		if n < 0 {
			n = len(vs)
		}
		p.revs, p.models = append(p.revs, vs[0].Mod), append(p.models, write(p.models[len(p.models)-1], vs[0].Mod, vs[:n]))
		vs = vs[n:]
	}
	if p.begin = len(p.revs) - 1; p.revs[p.begin] < l.Revision {
		p.revs, p.models = append(p.revs, l.Revision), append(p.models, write(p.models[p.begin], l.Revision, nil))
		p.begin++
	}
}

// checkReads compares what was read while the load followed with the source at the revisions of the answers.
func (l *Loaded) checkReads(p *replay) (bad []string) {
	if l == nil {
		return nil
	}
	bad = append(bad, checkRealTime(l.Reads)...)
	for _, o := range l.Reads {
		if o.Outcome != Answered {
			continue
		}
		if want, _ := p.at(o.Revision()).apply(o.Request, o.Revision()); o.Revision() > l.Revision || !sameAnswer(want, o.Response) {
			bad = append(bad, fmt.Sprintf("load: the answer should be %s: %s", show(want), o))
		}
	}
	return bad
}
