package chaos

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
)

// version is the content of a register at one revision.
type version struct {
	kv
	deleted bool
}

// evidence is the result of a run: what the clients were told, and what is stored.
type evidence struct {
	ops []*op
	// keys are all keys at the end, versions those of every register, ascending by
	// revision.
	keys     map[string]kv
	versions map[string][]version
}

// checks judge a run; each returns what is wrong.
var checks = []struct {
	name  string
	wrong func(e *evidence) []string
}{
	{"enough is known", checkDefinite},
	{"no acknowledged write lost, no refused one there", checkFates},
	{"nothing applied twice, nothing that nobody wrote", checkOnce},
	{"no revision twice", checkUnique},
	{"versions count up", checkChains},
	{"revisions follow real time", checkRealTime},
	{"answers are the state at their revision", checkAnswers},
	{"each key is linearizable", checkLinearizable},
}

// at is the state of a register at a revision.
func (e *evidence) at(key string, rev int64) kv {
	vs := e.versions[key]
	i, _ := slices.BinarySearchFunc(vs, rev+1, func(v version, r int64) int { return cmp.Compare(v.mod, r) })
	if i == 0 || vs[i-1].deleted {
		return kv{}
	}
	return vs[i-1].kv
}

// made is the version of a register at a revision, if there is one.
func (e *evidence) made(key string, rev int64) (version, bool) {
	vs := e.versions[key]
	i, found := slices.BinarySearchFunc(vs, rev, func(v version, r int64) int { return cmp.Compare(v.mod, r) })
	if !found {
		return version{}, false
	}
	return vs[i], true
}

// effect is the revision at which an operation took effect, found by its value or key
// alone and not by the client's answer; 0 if it had no effect.
func (e *evidence) effect(o *op) int64 {
	switch o.kind {
	case insert:
		return e.keys[o.key].mod
	case remove:
		return e.keys[o.marker].mod
	case put, compare:
		for _, v := range e.versions[o.key] {
			if v.value == o.value {
				return v.mod
			}
		}
	default: // it changes nothing
	}
	return 0
}

// minDefinite is how many of a hundred operations must have an answer or a refusal.
const minDefinite = 80

func checkDefinite(e *evidence) []string {
	var n [3]int
	for _, o := range e.ops {
		n[o.outcome]++
	}
	if all := len(e.ops); all == 0 || n[unknown]*100 > all*(100-minDefinite) || n[answered]*2 < all {
		return []string{fmt.Sprintf("of %d operations %d were answered and %d refused", all, n[answered], n[refused])}
	}
	return nil
}

// checkFates compares what each writer was told with the stored data.
func checkFates(e *evidence) (bad []string) {
	for _, o := range e.ops {
		if !o.kind.writes() {
			continue
		}
		rev := e.effect(o)
		switch {
		case o.outcome == answered && o.changes() && rev == 0:
			bad = append(bad, fmt.Sprintf("lost: %s", o))
		case o.outcome == answered && o.changes() && rev != o.rev:
			bad = append(bad, fmt.Sprintf("it is there at revision %d: %s", rev, o))
		case (o.outcome == refused || o.outcome == answered && !o.changes()) && rev != 0:
			bad = append(bad, fmt.Sprintf("it is there at revision %d, and must not be: %s", rev, o))
		}
		if o.kind != remove || rev == 0 {
			continue
		}
		// All of a transaction or nothing: a marker, and a deletion of the old value.
		if _, gone := e.made(o.key, rev); gone != (e.at(o.key, rev-1).mod != 0) {
			bad = append(bad, fmt.Sprintf("half of a transaction at revision %d: %s", rev, o))
		}
	}
	return bad
}

// checkOnce checks that every key and every value exists once and belongs to an
// operation.
func checkOnce(e *evidence) (bad []string) {
	private, values := map[string]string{}, map[string]*op{}
	for _, o := range e.ops {
		switch o.kind {
		case insert:
			private[o.key] = o.value
		case remove:
			private[o.marker] = o.key
		case put, compare:
			values[o.value] = o
		default: // it writes nothing
		}
	}
	for key, k := range e.keys {
		if isRegister(key) {
			continue
		}
		if want, known := private[key]; !known || k.value != want {
			bad = append(bad, fmt.Sprintf("nobody wrote %s", k))
		}
		if k.version != 1 || k.create != k.mod {
			bad = append(bad, fmt.Sprintf("applied more than once: %s", k))
		}
	}
	for key, vs := range e.versions {
		seen := map[string]bool{}
		for _, v := range vs {
			if v.deleted {
				continue
			}
			if o := values[v.value]; o == nil || o.key != key {
				bad = append(bad, fmt.Sprintf("nobody wrote %s", v.kv))
			}
			if seen[v.value] {
				bad = append(bad, fmt.Sprintf("applied more than once: %s", v.kv))
			}
			seen[v.value] = true
		}
	}
	return bad
}

// checkUnique checks that every revision belongs to one operation: one key, or a marker
// and the register that the marker names.
func checkUnique(e *evidence) (bad []string) {
	private := map[int64]kv{}
	for key, k := range e.keys {
		if isRegister(key) {
			continue
		}
		if other, twice := private[k.mod]; twice {
			bad = append(bad, fmt.Sprintf("one revision for %s and %s", k, other))
		}
		private[k.mod] = k
	}
	registers := map[int64]kv{}
	for _, vs := range e.versions {
		for _, v := range vs {
			if other, twice := registers[v.mod]; twice {
				bad = append(bad, fmt.Sprintf("one revision for %s and %s", v.kv, other))
			}
			registers[v.mod] = v.kv
			if p, both := private[v.mod]; both && (!v.deleted || p.value != v.key) {
				bad = append(bad, fmt.Sprintf("one revision for %s and %s", v.kv, p))
			}
		}
	}
	told := map[int64]*op{}
	for _, o := range e.ops {
		if o.outcome != answered || !o.changes() {
			continue
		}
		if other := told[o.rev]; other != nil {
			bad = append(bad, fmt.Sprintf("one revision was received twice: %s; %s", o, other))
		}
		told[o.rev] = o
	}
	return bad
}

// checkChains checks that the versions of a register count up from its creation.
func checkChains(e *evidence) (bad []string) {
	for _, vs := range e.versions {
		var before kv
		for _, v := range vs {
			switch {
			case v.deleted:
				v.kv = kv{}
			case before.mod == 0 && (v.version != 1 || v.create != v.mod),
				before.mod != 0 && (v.version != before.version+1 || v.create != before.create):
				bad = append(bad, fmt.Sprintf("%s after %s", v.kv, before))
			}
			before = v.kv
		}
	}
	return bad
}

// checkRealTime checks that no revision is below one known before the
// operation began, and that a change's revision is above it.
func checkRealTime(e *evidence) (bad []string) {
	type heard struct{ tick, rev int64 }
	var all []heard
	for _, o := range e.ops {
		if o.outcome == answered {
			all = append(all, heard{o.ret, o.rev})
		}
	}
	slices.SortFunc(all, func(a, b heard) int { return cmp.Compare(a.tick, b.tick) })
	for i := 1; i < len(all); i++ {
		all[i].rev = max(all[i].rev, all[i-1].rev)
	}
	for _, o := range e.ops {
		rev, change := o.rev, o.changes()
		if o.outcome != answered {
			if rev, change = e.effect(o), true; rev == 0 {
				continue
			}
		}
		i, _ := slices.BinarySearchFunc(all, o.call, func(h heard, t int64) int { return cmp.Compare(h.tick, t) })
		if i == 0 {
			continue
		}
		if known := all[i-1].rev; rev < known || change && rev == known {
			bad = append(bad, fmt.Sprintf("revision %d, and %d was known before it began: %s", rev, known, o))
		}
	}
	return bad
}

// checkAnswers compares every answer with the state at its revision.
func checkAnswers(e *evidence) (bad []string) {
	keys := slices.Sorted(maps.Keys(e.versions))
	for _, o := range e.ops {
		if o.outcome != answered || o.kind == insert {
			continue
		}
		rev := o.rev
		if o.changes() {
			rev--
		}
		if o.kind == scan {
			if want := e.scan(keys, o.key, o.end, rev); !slices.Equal(o.seen, want) {
				bad = append(bad, fmt.Sprintf("the state has %v: %s", want, o))
			}
			continue
		}
		is := e.at(o.key, rev)
		wrong := o.found() != is || len(o.seen) > 1
		switch o.kind {
		case compare:
			wrong = o.did && is.value != o.old || !o.did && (wrong || is.value == o.old)
		case remove:
			wrong = wrong || o.did != (is.mod != 0)
		default: // the values it found are its whole answer
		}
		if wrong {
			bad = append(bad, fmt.Sprintf("the state has %s: %s", is, o))
		}
	}
	return bad
}

// scan is the state of the registers from one key to another at a revision.
func (e *evidence) scan(sorted []string, from, to string, rev int64) (out []kv) {
	i, _ := slices.BinarySearch(sorted, from)
	for ; i < len(sorted) && sorted[i] < to; i++ {
		if k := e.at(sorted[i], rev); k.mod != 0 {
			out = append(out, k)
		}
	}
	return out
}

// fact is the content of an operation for its one key: the value before it (or a value
// that it was not), and the value after it. "" means no key.
type fact struct {
	checked, unequal bool
	before           string
	writes           bool
	after            string
}

// register is porcupine's model of a key.
var register = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, input, _ any) (bool, any) {
		f := input.(fact)
		if f.checked && (state == f.before) == f.unequal {
			return false, state
		}
		if f.writes {
			return true, f.after
		}
		return true, state
	},
	DescribeOperation: func(input, _ any) string { return fmt.Sprintf("%+v", input) },
}

// factOf is the content of an operation for its key, without revisions. An operation of
// unknown fate counts if its effect is stored.
func factOf(e *evidence, o *op) (f fact, ok bool) {
	if o.kind == insert || o.kind == scan || o.outcome == refused {
		return f, false
	}
	if o.outcome == unknown {
		f = fact{checked: o.kind == compare, before: o.old, writes: true, after: o.value}
		return f, o.kind.writes() && e.effect(o) != 0
	}
	f = fact{checked: true, before: o.found().value, writes: o.changes(), after: o.value}
	if o.kind == compare && o.did {
		f.before = o.old
	}
	return f, true
}

// judgeTimeout is how long porcupine may think about one key.
const judgeTimeout = 20 * time.Second

// checkLinearizable asks porcupine about each register.
func checkLinearizable(e *evidence) (bad []string) {
	byKey := map[string][]porcupine.Operation{}
	for _, o := range e.ops {
		f, ok := factOf(e, o)
		if !ok {
			continue
		}
		ret := o.ret
		if o.outcome == unknown {
			ret = math.MaxInt64
		}
		byKey[o.key] = append(byKey[o.key], porcupine.Operation{ClientId: o.client, Input: f, Call: o.call, Return: ret})
	}
	for key, h := range byKey {
		switch porcupine.CheckOperationsTimeout(register, h, judgeTimeout) {
		case porcupine.Illegal:
			bad = append(bad, fmt.Sprintf("%s is not linearizable (%d operations)", key, len(h)))
		case porcupine.Unknown:
			bad = append(bad, fmt.Sprintf("porcupine does not know about %s (%d operations)", key, len(h)))
		case porcupine.Ok:
		}
	}
	return bad
}
