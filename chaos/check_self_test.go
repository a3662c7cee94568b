package chaos

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	sampleKey    = "f~/000000/0"
	sampleMarker = "f/m/0/6"
)

// sample is a small correct run. Operation i is at index i.
func sample() *evidence {
	first := kv{sampleKey, "0-2.", 3, 3, 1}
	second := kv{sampleKey, "0-3.", 3, 4, 2}
	third := kv{sampleKey, "1-1.", 6, 6, 1}
	fourth := kv{sampleKey, "1-3.", 6, 7, 2}
	ops := []*op{
		{kind: insert, key: "a/i/0/1", value: "0-1.", outcome: answered, rev: 2},
		{kind: put, key: sampleKey, value: "0-2.", outcome: answered, rev: 3},
		{kind: get, key: sampleKey, outcome: answered, rev: 3, seen: []kv{first}},
		{kind: compare, key: sampleKey, value: "0-3.", old: "0-2.", outcome: answered, rev: 4, did: true},
		{kind: compare, key: sampleKey, value: "0-4.", old: "0-2.", outcome: answered, rev: 4, seen: []kv{second}},
		{kind: remove, key: sampleKey, marker: sampleMarker, outcome: answered, rev: 5, did: true, seen: []kv{second}},
		{kind: get, key: sampleKey, outcome: answered, rev: 5},
		{kind: put, key: sampleKey, value: "1-1.", outcome: answered, rev: 6},
		{kind: scan, key: "f~/000000/0", end: "g!/000000/2", outcome: answered, rev: 6, seen: []kv{third}},
		{kind: put, key: sampleKey, value: "1-2."},
		{kind: put, key: sampleKey, value: "1-3."},
		{kind: get, key: sampleKey, outcome: answered, rev: 7, seen: []kv{fourth}},
		{kind: insert, key: "a/i/0/9", value: "0-9.", outcome: refused},
	}
	for i, o := range ops {
		o.id, o.call = i, int64(2*i+1)
		if o.outcome != unknown {
			o.ret = o.call + 1
		}
	}
	return &evidence{
		ops: ops,
		keys: map[string]kv{
			"a/i/0/1":    {"a/i/0/1", "0-1.", 2, 2, 1},
			sampleMarker: {sampleMarker, sampleKey, 5, 5, 1},
			sampleKey:    fourth,
		},
		versions: map[string][]version{sampleKey: {
			{kv: first}, {kv: second}, {kv: kv{key: sampleKey, mod: 5}, deleted: true}, {kv: third}, {kv: fourth},
		}},
	}
}

// judge returns the names of the checks that find something.
func foundIn(e *evidence) (found []string) {
	for _, c := range checks {
		if len(c.wrong(e)) > 0 {
			found = append(found, c.name)
		}
	}
	return found
}

// Every check finds its kind of error, and none rejects a correct run.
func TestChecksFindWhatIsWrong(t *testing.T) {
	if found := foundIn(sample()); len(found) > 0 {
		t.Fatalf("a good run: %q", found)
	}
	drop := func(e *evidence, rev int64) {
		e.versions[sampleKey] = slices.DeleteFunc(e.versions[sampleKey], func(v version) bool { return v.mod == rev })
	}
	const (
		definite, fates, once, unique     = 0, 1, 2, 3
		chains, realTime, answers, linear = 4, 5, 6, 7
	)
	for _, c := range []struct {
		what  string
		spoil func(e *evidence)
		by    int // the check that must find it
	}{
		{"too little is known", func(e *evidence) {
			for _, o := range e.ops[:4] {
				o.outcome = unknown
			}
		}, definite},
		{"an acknowledged insert is lost", func(e *evidence) { delete(e.keys, "a/i/0/1") }, fates},
		{"an acknowledged put is lost", func(e *evidence) { drop(e, 6) }, fates},
		{"an acknowledged compare is lost", func(e *evidence) { drop(e, 4) }, fates},
		{"an acknowledged deletion is lost", func(e *evidence) { drop(e, 5) }, fates},
		{"a marker is lost", func(e *evidence) { delete(e.keys, sampleMarker) }, fates},
		{"a write has another revision than was told", func(e *evidence) { e.ops[0].rev = 8 }, fates},
		{"a refused write is there", func(e *evidence) { e.keys["a/i/0/9"] = kv{"a/i/0/9", "0-9.", 8, 8, 1} }, fates},
		{"a compare in vain has written", func(e *evidence) {
			e.versions[sampleKey] = append(e.versions[sampleKey], version{kv: kv{sampleKey, "0-4.", 6, 8, 3}})
		}, fates},
		{"an insert is applied twice", func(e *evidence) { e.keys["a/i/0/1"] = kv{"a/i/0/1", "0-1.", 2, 8, 2} }, once},
		{"a put of unknown fate is applied twice", func(e *evidence) {
			e.versions[sampleKey] = append(e.versions[sampleKey], version{kv: kv{sampleKey, "1-3.", 6, 8, 3}})
		}, once},
		{"a key that nobody wrote", func(e *evidence) { e.keys["z/i/9/9"] = kv{"z/i/9/9", "9-9.", 8, 8, 1} }, once},
		{"another value than was written", func(e *evidence) { e.keys["a/i/0/1"] = kv{"a/i/0/1", "0-x.", 2, 2, 1} }, once},
		{"two keys at one revision", func(e *evidence) { e.keys["a/i/0/1"] = kv{"a/i/0/1", "0-1.", 6, 6, 1} }, unique},
		{"one revision told twice", func(e *evidence) { e.ops[0].rev = 3 }, unique},
		{"a version is skipped", func(e *evidence) { e.versions[sampleKey][1].version = 3 }, chains},
		{"a new key keeps its old creation", func(e *evidence) { e.versions[sampleKey][3].create = 3 }, chains},
		{"a read steps back", func(e *evidence) { e.ops[6].rev, e.ops[6].seen = 3, e.ops[2].seen }, realTime},
		{"a change shares the revision of a read before it", func(e *evidence) { e.ops[6].rev = 6 }, realTime},
		{"a write of unknown fate took effect before it began", func(e *evidence) { e.ops[8].rev = 7 }, realTime},
		{"a read of an old value at a new revision", func(e *evidence) { e.ops[11].seen = e.ops[8].seen }, answers},
		{"a scan misses a key", func(e *evidence) { e.ops[8].seen = nil }, answers},
		{"a read of a dead key", func(e *evidence) { e.ops[6].seen = e.ops[2].seen }, answers},
		{"a compare succeeded on another value", func(e *evidence) { e.ops[3].old = "0-x." }, answers},
		{"a stale read", func(e *evidence) { e.ops[11].seen = e.ops[4].seen }, linear},
		{"a read of a value not yet written", func(e *evidence) { e.ops[2].seen = e.ops[4].seen }, linear},
		{"a put that found another value", func(e *evidence) { e.ops[7].seen = e.ops[4].seen }, linear},
	} {
		e := sample()
		c.spoil(e)
		if found := foundIn(e); !slices.Contains(found, checks[c.by].name) {
			t.Errorf("%s: found by %q, want %q", c.what, found, checks[c.by].name)
		}
	}
}

// Errors that the server gives only if nothing was done are refusals; others are not.
func TestRefusals(t *testing.T) {
	for text, want := range map[string]bool{
		"etcdserver: mvcc: database space exceeded": true,
		"etcdserver: too many requests":             true,
		"etcdserver: request timed out":             false,
		"etcdserver: leader changed":                false,
		"connection refused":                        false,
	} {
		if got := refusals()[text]; got != want {
			t.Errorf("%s: %t", text, got)
		}
	}
}

// Only a node whose last words are that it was removed may end by itself.
func TestRemovedNodeSaysSo(t *testing.T) {
	const word = "the node was removed from its cluster: node 1 of cluster 2 is never admitted again\n"
	for text, want := range map[string]bool{
		"": false, "panic: 1\n": false, word: true, strings.Repeat("a line\n", 1000) + word: true,
		word + "panic: 1\n" + strings.Repeat("goroutine 1\n", 1000): false,
	} {
		log := filepath.Join(t.TempDir(), "log")
		if err := os.WriteFile(log, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if removed(log) != want {
			t.Errorf("%.60q: %t, want %t", text, !want, want)
		}
	}
}
