package judge

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// judgeTimeout is how long porcupine may search for one key or window, in real time. If
// it has no result by then, the run fails.
const judgeTimeout = 20 * time.Second

// fact is the content of an operation for one key: the value before and the value after
// it. "" means that the key does not exist; no value is empty.
type fact struct {
	// is holds if known is set, and the key exists if exists is set; otherwise the value
	// before is unknown. not is a value that it does not have.
	known, exists bool
	is, not       string
	// writes says that the key has the value after the operation.
	writes bool
	value  string
	// unless: if the value before does not fit, the operation does nothing instead of
	// being impossible.
	unless bool
}

func (f *fact) holds(value string) bool {
	return (!f.known || value == f.is) && (!f.exists || value != "") && (f.not == "" || value != f.not)
}

// keyModel is a register that can be absent.
var keyModel = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, input, _ any) (bool, any) {
		f, value := input.(fact), state.(string)
		if !f.holds(value) {
			return f.unless, value
		}
		if f.writes {
			return true, f.value
		}
		return true, value
	},
}

// checkKeys checks that each key alone is linearizable, by the values in all answers
// and without revisions. If the whole is linearizable, so is each of its parts.
//
// No two operations write the same value. If an operation of unknown fate has no
// version on the disks, it wrote nothing; this spares porcupine most of its attempts.
// If many operations overlap, porcupine may not end in its time. Then it is asked again
// with the narrower intervals that the replay gives, if there is a replay.
func checkKeys(ops []*Op, vs []Version, p *replay, start *Loaded) (bad []string) {
	written := map[string]bool{"": true}
	for _, v := range vs {
		written[v.Value] = true
	}
	leased := leasedKeys(ops)
	start.leased(leased)
	for _, key := range allKeys() {
		if len(vs) == 0 && leased[key] {
			continue // nobody can say when its lease has ended
		}
		if len(bad) > 0 {
			break // one violation is enough, and the next may take the whole time
		}
		h := append(historyOf(ops, vs, written, key), start.written(key)...)
		verdict := porcupine.CheckOperationsTimeout(keyModel, h, judgeTimeout)
		if verdict == porcupine.Unknown && p != nil {
			h = append(historyOf(p.narrowed(ops), vs, written, key), start.written(key)...)
			verdict = porcupine.CheckOperationsTimeout(keyModel, h, judgeTimeout)
		}
		switch verdict {
		case porcupine.Illegal:
			bad = append(bad, fmt.Sprintf("linearizability: key %s is not linearizable", key))
		case porcupine.Unknown:
			bad = append(bad, fmt.Sprintf("linearizability: porcupine does not know about key %s (%d operations)", key, len(h)))
		case porcupine.Ok:
		}
	}
	return bad
}

// historyOf returns porcupine's input for a key. written are the existing values.
func historyOf(ops []*Op, vs []Version, written map[string]bool, key string) []porcupine.Operation {
	h := endsOf(ops, vs, key)
	for _, o := range ops {
		f, ok := factOf(o, key)
		if !ok || o.Outcome == Unknown && len(vs) > 0 && !written[f.value] {
			continue
		}
		end := o.Return
		if o.Outcome == Unknown && end == 0 {
			end = math.MaxInt64
		}
		h = append(h, porcupine.Operation{ClientId: o.Client, Input: f, Call: o.Call, Return: end, Metadata: o})
	}
	return h
}

// narrowed returns the operations with narrower intervals: each lies between the last
// call of those before it by revision and the first return of those after it. If there
// is an order by revisions, and the replay has found one, it is an order of these too.
// An operation without a revision keeps its interval.
func (p *replay) narrowed(ops []*Op) []*Op {
	// Changes have even places; reads have odd ones behind the changes that they see.
	place := map[*Op]int64{}
	known := map[int]*Op{} // by number, because those of unknown fate have been cloned
	for _, o := range ops {
		known[o.ID] = o
	}
	var sorted []*Op
	for _, at := range p.ops {
		o := known[at.op.ID]
		if o == nil || at.op.Client == Holders {
			continue
		}
		place[o] = 2 * at.rev
		if o.Outcome == Answered && !o.Changes() {
			place[o]++
		}
		sorted = append(sorted, o)
	}
	slices.SortFunc(sorted, func(a, b *Op) int { return cmp.Compare(place[a], place[b]) })
	earliest, latest := map[int64]int64{}, map[int64]int64{}
	call := int64(0)
	for i := 0; i < len(sorted); {
		at, next := place[sorted[i]], call
		for earliest[at] = call; i < len(sorted) && place[sorted[i]] == at; i++ {
			next = max(next, sorted[i].Call)
		}
		call = next
	}
	end := int64(math.MaxInt64)
	for i := len(sorted) - 1; i >= 0; {
		at, next := place[sorted[i]], end
		for latest[at] = end; i >= 0 && place[sorted[i]] == at; i-- {
			if o := sorted[i]; o.Return != 0 {
				next = min(next, o.Return)
			}
		}
		end = next
	}
	out := slices.Clone(ops)
	for i, o := range ops {
		at, ok := place[o]
		if !ok {
			continue
		}
		c := clone(o)
		c.Call = max(c.Call, earliest[at])
		if c.Return = min(cmp.Or(c.Return, math.MaxInt64), latest[at]); c.Call > c.Return {
			continue // against the order of time, which porcupine will find
		}
		out[i] = c
	}
	return out
}

// factOf returns the content of an operation for one key; ok is false if it has none.
func factOf(o *Op, key string) (f fact, ok bool) {
	switch {
	case o.Outcome == Refused:
		return f, false
	case o.Outcome == Unknown:
		return unknownFact(o.Request, key)
	}
	ok = observe(&f, o.Request, o.Response, key)
	return f, ok
}

// unknownFact is a possible effect of an operation.
func unknownFact(req proto.Message, key string) (f fact, ok bool) {
	f.unless = true
	switch r := req.(type) {
	case *pb.PutRequest:
		f.writes, f.value = true, string(r.GetValue())
		return f, string(r.GetKey()) == key
	case *pb.DeleteRangeRequest:
		f.writes = true
		return f, Covers(r.GetKey(), r.GetRangeEnd(), key)
	case *pb.TxnRequest:
		// If one compare on this key holds and another does not, the operation may do
		// what it does in any case. It may also be placed at the end.
		for _, op := range r.GetSuccess() {
			if p := op.GetRequestPut(); p != nil && string(p.GetKey()) == key {
				f.writes, f.value, ok = true, string(p.GetValue()), true
			}
			if d := op.GetRequestDeleteRange(); d != nil && Covers(d.GetKey(), d.GetRangeEnd(), key) {
				f.writes, f.value, ok = true, "", true
			}
		}
	}
	return f, ok
}

// observe adds what an answer says of the key, in the order of operations.
func observe(f *fact, req, resp proto.Message, key string) (ok bool) {
	switch r := req.(type) {
	case *pb.RangeRequest:
		return observeRange(f, r, resp.(*pb.RangeResponse), key)
	case *pb.PutRequest:
		if string(r.GetKey()) != key {
			return false
		}
		if r.GetPrevKv() {
			f.before(string(resp.(*pb.PutResponse).GetPrevKv().GetValue()))
		}
		f.writes, f.value = true, string(r.GetValue())
		return true
	case *pb.DeleteRangeRequest:
		return observeDelete(f, r, resp.(*pb.DeleteRangeResponse), key)
	case *pb.TxnRequest:
		return observeTxn(f, r, resp.(*pb.TxnResponse), key)
	}
	return false
}

// before records the value before the operation, unless the operation itself has
// written it.
func (f *fact) before(value string) {
	if !f.writes {
		f.known, f.is = true, value
	}
}

func observeRange(f *fact, r *pb.RangeRequest, resp *pb.RangeResponse, key string) bool {
	if !Covers(r.GetKey(), r.GetRangeEnd(), key) || r.GetRevision() != 0 || r.GetCountOnly() {
		return false
	}
	for _, kv := range resp.GetKvs() {
		if string(kv.GetKey()) != key {
			continue
		}
		if r.GetKeysOnly() {
			f.exists = f.exists || !f.writes
		} else {
			f.before(string(kv.GetValue()))
		}
		return true
	}
	if n := len(resp.GetKvs()); resp.GetMore() && (n == 0 || string(resp.GetKvs()[n-1].GetKey()) < key) {
		return false // behind the page
	}
	f.before("")
	return true
}

func observeDelete(f *fact, r *pb.DeleteRangeRequest, resp *pb.DeleteRangeResponse, key string) bool {
	if !Covers(r.GetKey(), r.GetRangeEnd(), key) {
		return false
	}
	switch {
	case r.GetPrevKv():
		value := ""
		for _, kv := range resp.GetPrevKvs() {
			if string(kv.GetKey()) == key {
				value = string(kv.GetValue())
			}
		}
		f.before(value)
	case resp.GetDeleted() == 0:
		f.before("")
	case len(r.GetRangeEnd()) == 0:
		f.exists = f.exists || !f.writes
	}
	f.writes, f.value = true, ""
	return true
}

func observeTxn(f *fact, r *pb.TxnRequest, resp *pb.TxnResponse, key string) (ok bool) {
	ops := r.GetFailure()
	if resp.GetSucceeded() {
		ops = r.GetSuccess()
	}
	for _, c := range r.GetCompare() {
		if string(c.GetKey()) != key || c.GetResult() != pb.Compare_EQUAL {
			continue
		}
		absent := c.GetTarget() == pb.Compare_VERSION && c.GetVersion() == 0
		switch value := c.GetTarget() == pb.Compare_VALUE; {
		case resp.GetSucceeded() && value:
			f.before(string(c.GetValue()))
		case resp.GetSucceeded() && absent:
			f.before("")
		case resp.GetSucceeded():
			f.exists = true
		case len(r.GetCompare()) > 1:
			continue // it may have been another one that did not hold
		case value:
			f.not = string(c.GetValue())
		case absent:
			f.exists = true
		default:
			continue
		}
		ok = true
	}
	for i, op := range ops {
		var req proto.Message
		switch q := op.GetRequest().(type) {
		case *pb.RequestOp_RequestRange:
			req = q.RequestRange
		case *pb.RequestOp_RequestPut:
			req = q.RequestPut
		case *pb.RequestOp_RequestDeleteRange:
			req = q.RequestDeleteRange
		}
		if observe(f, req, Inner(resp.GetResponses()[i]), key) {
			ok = true
		}
	}
	return ok
}

// windowRevisions is how many changes one window of the whole-keyspace check has.
const windowRevisions = 60

// checkWindows checks that all answers together are linearizable, one window of
// revisions at a time. Each window begins with the replay's state. Mostly the order of revisions
// is an order that fits, and proves it. Otherwise porcupine looks for one. It may not end in its
// time where many operations overlap, as behind a node that stood still.
func checkWindows(p *replay) (bad []string) {
	sortPlaced(p.ops)
	for from := p.begin; from < len(p.revs) && len(bad) == 0; from += windowRevisions {
		begin := p.revs[from]
		end := int64(math.MaxInt64)
		if from+windowRevisions < len(p.revs) {
			end = p.revs[from+windowRevisions]
		}
		var h []porcupine.Operation
		for _, o := range p.ops {
			if o.rev <= begin || o.rev > end {
				continue
			}
			if o.after = p.at(o.rev).rev; o.op.Outcome == Unknown || o.op.Changes() {
				o.after = p.at(o.rev - 1).rev
			}
			ret := o.op.Return
			if o.op.Outcome == Unknown {
				ret = math.MaxInt64
			}
			h = append(h, porcupine.Operation{ClientId: o.op.Client, Input: o, Call: o.op.Call, Return: ret})
		}
		m := windowModel(p.models[from])
		out := misfit(m, h)
		if out == "" {
			continue
		}
		switch porcupine.CheckOperationsTimeout(m, h, judgeTimeout) {
		case porcupine.Illegal:
			bad = append(bad, fmt.Sprintf("linearizability: revisions %d to %d are not linearizable; in their order %s", begin, end, out))
		case porcupine.Unknown:
			bad = append(bad, fmt.Sprintf("linearizability: porcupine does not know about revisions %d to %d (%d operations); in their order %s", begin, end, len(h), out))
		case porcupine.Ok:
		}
	}
	return bad
}

// sortPlaced sorts operations by revision. Those that change nothing stand behind the change that they see, in the
// order of their calls: any other order of theirs may contradict time.
func sortPlaced(ops []placed) {
	reads := func(o *Op) int {
		if o.Outcome == Answered && !o.Changes() {
			return 1
		}
		return 0
	}
	slices.SortFunc(ops, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.rev, b.rev), reads(a.op)-reads(b.op), cmp.Compare(a.op.Call, b.op.Call))
	})
}

// misfit says which of the operations, done one after the other as they stand, does not fit the
// state that those before it leave, or had returned before one of those began. Without one they are
// linearizable.
func misfit(m porcupine.Model, ops []porcupine.Operation) string {
	state, last := m.Init(), -1 // the last one to be called
	for i := range ops {
		ok, next := m.Step(state, ops[i].Input, nil)
		if !ok {
			return fmt.Sprintf("%s does not fit", ops[i].Input.(placed).op)
		}
		if last >= 0 && ops[i].Return < ops[last].Call {
			return fmt.Sprintf("%s had returned before %s was called", ops[i].Input.(placed).op, ops[last].Input.(placed).op)
		}
		if state = next; last < 0 || ops[i].Call > ops[last].Call {
			last = i
		}
	}
	return ""
}

// windowModel is the whole keyspace from a state on. An operation fits where its
// revision does.
func windowModel(from *Model) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return from },
		Step: func(state, input, _ any) (bool, any) {
			m, o := state.(*Model), input.(placed)
			if m.rev < o.after || m.rev > o.rev {
				return false, m // spares the search an order that cannot fit
			}
			resp, next := m.apply(o.op.Request, o.rev)
			if o.op.Outcome == Unknown {
				return o.rev > m.rev && next != m, next
			}
			if !sameAnswer(resp, o.op.Response) {
				return false, m
			}
			if o.op.Changes() {
				return o.rev > m.rev && next != m, next
			}
			// The revision of a read also bounds the operations after it.
			return o.rev >= m.rev && next == m, &Model{rev: o.rev, keys: m.keys, past: m.past}
		},
		Equal: func(a, b any) bool {
			x, y := a.(*Model), b.(*Model)
			return x.rev == y.rev && maps.Equal(x.keys, y.keys)
		},
	}
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

// endsOf returns, for the check of one key, the deletions that came with the end of its
// lease and that no answer claims. Each was made after its version was requested, and
// before anybody was told of its revision.
func endsOf(ops []*Op, vs []Version, key string) (h []porcupine.Operation) {
	owned := map[int64]bool{}
	asked := map[string]int64{}
	for _, o := range onKeys(ops) {
		if o.Outcome == Answered && o.Changes() {
			owned[o.Revision()] = true
		}
		if f, ok := factOf(o, key); ok && f.writes {
			asked[f.value] = o.Call
		}
	}
	first := firstSeen(ops)
	var last *Version
	for i := range vs {
		v := &vs[i]
		if v.Key != key {
			continue
		}
		if v.Deleted && last != nil && last.Mod < v.Mod && last.Lease != 0 && !owned[v.Mod] {
			end := int64(math.MaxInt64)
			if o := first(v.Mod); o != nil {
				end = o.Return
			}
			f := fact{known: true, is: last.Value, unless: true, writes: true}
			h = append(h, porcupine.Operation{ClientId: Holders, Input: f, Call: asked[last.Value], Return: end})
		}
		last = v
	}
	return h
}
