package sim

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// compareVersions orders versions as watchers receive them.
func compareVersions(a, b Version) int {
	return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value))
}

// Check judges a run and returns its violations, nil if there are none. It asks
// porcupine only if nothing else found a violation, because porcupine may take long
// over a wrong history.
func Check(r *Report) []string {
	bad, p := checkAnswers(r)
	if len(bad) > 0 {
		return bad
	}
	return checkOrder(r, p)
}

// checkAnswers runs every check but the searches for an order. The replay is nil if
// there is none or it is wrong.
func checkAnswers(r *Report) (bad []string, p *replay) {
	bad = slices.Clone(r.Violations)
	ops := r.History.Ops()
	bad = append(bad, checkDefinite(ops)...)
	bad = append(bad, checkRealTime(ops)...)
	bad = append(bad, checkCompactions(ops)...)
	bad = append(bad, checkGrants(ops)...)
	if len(r.Config.Faults) == 0 {
		bad = append(bad, checkLate(ops)...)
	}
	if len(r.Versions) == 0 {
		bad = append(bad, checkLeases(ops, nil, nil, false)...)
		bad = append(bad, checkAccess(r.Access, ops, nil)...)
		return bad, nil // the run did not reach its end
	}
	start := r.History.Start()
	bad = append(bad, start.check(r.Versions)...)
	p, wrong := checkReplay(ops, r.Versions, start)
	bad = append(bad, start.checkReads(p)...)
	bad = append(bad, wrong...)
	bad = append(bad, checkGaps(ops, r.Versions, start.last()+1, r.Failures, r.Rebooted)...)
	bad = append(bad, checkCuts(r.Cuts, ops, r.Versions)...)
	bad = append(bad, checkWatchers(r.Watchers, r.Versions, compactedAt(ops))...)
	if len(wrong) > 0 {
		p = nil
	}
	bad = append(bad, checkLeases(ops, r.Versions, p, r.Drained)...)
	bad = append(bad, checkAccess(r.Access, ops, p)...)
	return bad, p
}

// checkOrder has porcupine search an order that explains the answers: for each key
// alone, and for all keys in windows of revisions.
func checkOrder(r *Report, p *replay) []string {
	ops := r.History.Ops()
	if p == nil {
		return checkKeys(ops, r.Versions, nil, r.History.Start())
	}
	return append(checkKeys(p.decided(ops), r.Versions, p, r.History.Start()), checkWindows(p)...)
}

// decided returns the operations with those of unknown fate decided. An operation that
// changed something, according to the replay, returned before anybody was told of its
// revision. The others did nothing. If all stayed open for ever, porcupine would try
// every subset of the deletions.
func (p *replay) decided(ops []*Op) []*Op {
	made := map[*Op]int64{}
	for _, o := range p.ops {
		made[o.op] = o.rev
	}
	first := firstSeen(ops)
	var out []*Op
	for _, o := range ops {
		if o.Outcome != Unknown {
			out = append(out, o)
			continue
		}
		rev, ok := made[o]
		if !ok {
			continue
		}
		if told := first(rev); told != nil {
			o = clone(o)
			o.Return = told.Return
		}
		out = append(out, o)
	}
	return out
}

func clone(o *Op) *Op {
	c := *o
	return &c
}

// CheckUnfinished judges the partial history of a run that does not end.
func CheckUnfinished(h *History) []string {
	ops := h.Ops()
	bad := append(checkRealTime(ops), checkCompactions(ops)...)
	bad = append(bad, checkGrants(ops)...)
	bad = append(bad, checkLeases(ops, nil, nil, false)...)
	if len(bad) == 0 {
		bad = checkKeys(ops, nil, nil, h.Start())
	}
	return bad
}

// minDefinite is how many of a hundred operations must have a definite answer for a
// run to count.
const minDefinite = 80

// checkDefinite says whether enough outcomes are known for the other checks to mean
// anything.
func checkDefinite(ops []*Op) []string {
	definite, answered := 0, 0
	for _, o := range ops {
		if o.Definite() {
			definite++
		}
		if o.Outcome == Answered {
			answered++
		}
	}
	if len(ops) == 0 || definite*100 < len(ops)*minDefinite {
		return []string{fmt.Sprintf("definite: only %d of %d operations have a definite answer", definite, len(ops))}
	}
	if answered*2 < len(ops) {
		return []string{fmt.Sprintf("definite: only %d of %d operations succeeded", answered, len(ops))}
	}
	return nil
}

// checkRealTime checks the revisions against real time: a change has a greater revision
// than everything that returned before it began, reads never go back, and no two
// changes share a revision.
func checkRealTime(ops []*Op) (bad []string) {
	before := highestBefore(ops)
	owner := map[int64]*Op{}
	for _, o := range ops {
		if o.Outcome != Answered {
			continue
		}
		rev, known := o.Revision(), before(o.Call)
		if rev < known || o.Changes() && rev <= known {
			bad = append(bad, fmt.Sprintf("real time: revision %d was known before this began: %s", known, o))
		}
		if !o.Changes() {
			continue
		}
		if other := owner[rev]; other != nil {
			bad = append(bad, fmt.Sprintf("real time: one revision for two changes: %s; %s", other, o))
		}
		owner[rev] = o
	}
	return bad
}

// highestBefore returns a function that gives the highest revision among the answers
// that had returned at a tick.
func highestBefore(ops []*Op) func(tick int64) int64 {
	type point struct{ tick, rev int64 }
	var ps []point
	for _, o := range ops {
		if o.Outcome == Answered {
			ps = append(ps, point{o.Return, o.Revision()})
		}
	}
	slices.SortFunc(ps, func(a, b point) int { return cmp.Compare(a.tick, b.tick) })
	for i := 1; i < len(ps); i++ {
		ps[i].rev = max(ps[i].rev, ps[i-1].rev)
	}
	return func(tick int64) int64 {
		i, _ := slices.BinarySearchFunc(ps, tick, func(p point, t int64) int { return cmp.Compare(p.tick, t) })
		if i == 0 {
			return 0
		}
		return ps[i-1].rev
	}
}

// maxGap is how many revisions a crashed sequencer may leave unused.
const maxGap = 10_000

// checkGaps checks that every revision from the first one on is used, except those that failures may leave
// unused. A stop of all nodes at once may skip revisions above rebooted, which was known
// before it; 0 says that there was none.
func checkGaps(ops []*Op, vs []Version, first int64, failures int, rebooted int64) []string {
	used := map[int64]bool{}
	for _, v := range vs {
		used[v.Mod] = true
	}
	last := known(ops)
	if len(vs) > 0 {
		last = max(last, vs[len(vs)-1].Mod)
	}
	gaps, skipped := int64(0), int64(0)
	for rev := first; rev <= last; rev++ {
		switch {
		case used[rev]:
		case rebooted > 0 && rev > rebooted && skipped < maxGap:
			skipped++
		case failures == 0:
			return []string{fmt.Sprintf("gaps: nothing failed, and revision %d of %d bears no event", rev, last)}
		default:
			gaps++
		}
	}
	if gaps > int64(failures)*2*maxGap {
		return []string{fmt.Sprintf("gaps: %d revisions bear no event after %d failures", gaps, failures)}
	}
	return nil
}

// known returns the highest revision that an answer has told.
func known(ops []*Op) int64 {
	last := int64(1)
	for _, o := range ops {
		if o.Outcome == Answered {
			last = max(last, o.Revision())
		}
	}
	return last
}

// replay is the history of all changes in the order of revisions.
type replay struct {
	revs   []int64
	models []*model // the state at revs[i]
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
func (p *replay) at(rev int64) *model {
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
	p := &replay{revs: []int64{1}, models: []*model{newModel()}, known: highestBefore(ops)}
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
		slices.SortFunc(e, compareVersions)
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
func (p *replay) endLease(now *model, rev int64, events []Version, grants map[int64]*Op, claims *claims) bool {
	id := endOf(now, events)
	grant := grants[id]
	if grant == nil {
		return false
	}
	p.ends = append(p.ends, leaseEnd{id: id, rev: rev, sure: len(claims.makers(now, rev, events)) == 0})
	p.revs, p.models = append(p.revs, rev), append(p.models, write(now, rev, events))
	end := &Op{ID: grant.ID, Client: holders, Request: &pb.LeaseRevokeRequest{ID: id}, Call: grant.Call, Began: grant.Began, Outcome: Unknown, Err: errNoAnswer}
	p.ops = append(p.ops, placed{op: end, rev: rev})
	return true
}

// step is one revision: the owner's request must produce its answer and its events.
func step(now *model, rev int64, events []Version, owner *Op, claims *claims) (next *model, wrong string) {
	if owner == nil {
		if !claims.add(now, rev, events) {
			return nil, fmt.Sprintf("revision %d: nobody asked for %+v", rev, events)
		}
		return write(now, rev, events), ""
	}
	resp, next, d := now.run(owner.Request, rev)
	if !sameAnswer(resp, owner.Response) {
		return nil, fmt.Sprintf("revision %d: the answer should be %s: %s", rev, show(resp), owner)
	}
	if !slices.Equal(d, events) {
		return nil, fmt.Sprintf("revision %d: the disks have %+v, and the operation makes %+v: %s", rev, events, d, owner)
	}
	return next, ""
}

// write returns the state with the events of a revision.
func write(now *model, rev int64, events []Version) *model {
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
	return &model{rev: rev, keys: keys, past: now.past}
}

// versionOf returns the version of a key on a disk.
func versionOf(kv *mvccpb.KeyValue) Version {
	return Version{
		Key: string(kv.GetKey()), Value: string(kv.GetValue()), Mod: kv.GetModRevision(), Create: kv.GetCreateRevision(),
		Version: kv.GetVersion(), Lease: kv.GetLease(),
	}
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
func (c *claims) add(now *model, rev int64, events []Version) bool {
	can := c.makers(now, rev, events)
	c.revs, c.can = append(c.revs, rev), append(c.can, can)
	return len(can) > 0
}

// makers returns the indexes of the operations that make these events of this state.
func (c *claims) makers(now *model, rev int64, events []Version) (can []int) {
	for i, o := range c.unknown {
		if rev <= c.before(o.Call) {
			continue // the revision was known before the operation began
		}
		_, next, d := now.run(o.Request, rev)
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
