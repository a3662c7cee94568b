package command

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// sampleLoads are entries of each stage.
func sampleLoads() map[string][]byte {
	head := func() []byte { return AppendHeader(nil, Header{KindLoad, 5, 3}) }
	bulk := AppendLoad(head(), &Load{Stage: rangeapi.LoadBulk, Hash: 0xa1, From: rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: []byte("j"), Revision: 7}, Incarnation: 40, Versions: 3})
	bulk = AppendLoadVersion(bulk, &mvcc.Version{Key: []byte("j"), Mod: 4, Create: 4, Version: 1, Value: []byte("v")}, LoadPrior{Old: true})
	twice := &mvcc.Version{Key: []byte("k"), Mod: 9, Sub: 2, Tombstone: true}
	twice.Earlier = &mvcc.Version{Key: twice.Key, Mod: 9, Create: 9, Version: 1}
	bulk = AppendLoadVersion(bulk, twice, LoadPrior{})
	bulk = AppendLoadVersion(bulk, &mvcc.Version{Key: []byte("l"), Mod: 300, Create: 290, Version: 4, Lease: -9, Value: []byte("w")}, LoadPrior{Attach: true})
	follow := AppendLoad(head(), &Load{Stage: rangeapi.LoadFollow, From: rangeapi.LoadCursor{Stage: rangeapi.LoadFollow, Revision: 300, Sub: 1, Key: []byte("l")}, Incarnation: 40, Versions: 2})
	follow = AppendLoadVersion(follow, &mvcc.Version{Key: []byte("m"), Mod: 300, Sub: 1, Tombstone: true}, LoadPrior{Prior: Prior{Lived: true, Lease: 8}})
	follow = AppendLoadVersion(follow, &mvcc.Version{Key: []byte("a"), Mod: 301, Create: 301, Version: 1, Lease: 4}, LoadPrior{})
	return map[string][]byte{
		"load-bulk.v7": bulk, "load-follow.v7": follow,
		"load-ended.v7": AppendLoad(head(), &Load{Stage: rangeapi.LoadEnded, Hash: 1, From: rangeapi.LoadCursor{Stage: rangeapi.LoadBulk}, Incarnation: 40, Revision: 310, Compacted: 200}),
		"load-trim.v7":  AppendLoad(head(), &Load{Stage: rangeapi.LoadFollow, Hash: 1, From: rangeapi.LoadCursor{Stage: rangeapi.LoadFollow, Revision: 300, Key: []byte("l")}, Incarnation: 40, Unused: []keyspace.LeaseID{-9, 7, 300}}),
	}
}

func sampleLoadStates() map[string]rangeapi.LoadState {
	return map[string]rangeapi.LoadState{
		"record-load-bulk.v4":   {LoadCursor: rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: []byte("k"), Revision: 9}, Versions: 12, Sum: 0xfe},
		"record-load-follow.v4": {LoadCursor: rangeapi.LoadCursor{Stage: rangeapi.LoadFollow, Key: []byte("b"), Revision: 301, Sub: 7}, Versions: 300, Sum: 1},
		"record-load-ended.v4":  {LoadCursor: rangeapi.LoadCursor{Stage: rangeapi.LoadEnded, Revision: 310}, Versions: 300, Sum: 1},
	}
}

func goldenLoad() map[string][]byte {
	all := maps.Clone(sampleLoads())
	for name, l := range sampleLoadStates() {
		rec := sampleRecord()
		rec.Load = l
		all[name] = AppendRecord(nil, &rec)
	}
	return all
}

// What a load brings, and how far it is, survives the way through log and record. Truncated forms are refused.
func TestLoadFormats(t *testing.T) {
	want := map[string]string{
		"load-bulk.v7":   `term=5 load bulk on bulk "j"@7 j@4 old k@9† twice l@300 attached`,
		"load-follow.v7": `term=5 load follow on follow 300.1 "l" m@300† lived was=8 a@301`,
		"load-ended.v7":  `term=5 load ended on bulk ""@0 to 310 compacted=200`,
		"load-trim.v7":   `term=5 load follow on follow 300.0 "l" unused=[-9 7 300]`,
	}
	for name, b := range sampleLoads() {
		if got := Describe(5, b); got != want[name] {
			t.Errorf("%s: %s", name, got)
		}
		for n := range b {
			if text := Describe(5, b[:n]); !strings.HasPrefix(text, "broken") {
				t.Errorf("%s of %d bytes: %s", name, n, text)
			}
		}
	}
	for name, l := range sampleLoadStates() {
		rec := sampleRecord()
		rec.Load = l
		b := AppendRecord(nil, &rec)
		if got, err := DecodeRecord(b); err != nil || fmt.Sprint(got) != fmt.Sprint(rec) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		for n := range b {
			if _, err := DecodeRecord(b[:n]); err == nil {
				t.Errorf("%s: a record of %d bytes of %d", name, n, len(b))
			}
		}
	}
}

// A load out of order is refused: a version at or before the cursor, an older version that does not say so,
// one that says so and is not.
func TestLoadOrder(t *testing.T) {
	v := func(key string, mod keyspace.Revision) *mvcc.Version {
		return &mvcc.Version{Key: []byte(key), Mod: mod, Create: 1, Version: 1}
	}
	from := rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: []byte("k"), Revision: 5}
	for what, x := range map[string]struct {
		stage rangeapi.LoadStage
		v     *mvcc.Version
		old   bool
		ok    bool
	}{
		"the cursor again":     {rangeapi.LoadBulk, v("k", 5), true, false},
		"a newer version":      {rangeapi.LoadBulk, v("k", 6), true, false},
		"a key before":         {rangeapi.LoadBulk, v("j", 1), false, false},
		"older, unsaid":        {rangeapi.LoadBulk, v("k", 4), false, false},
		"older":                {rangeapi.LoadBulk, v("k", 4), true, true},
		"a new key as older":   {rangeapi.LoadBulk, v("l", 4), true, false},
		"a new key":            {rangeapi.LoadBulk, v("l", 9), false, true},
		"the first to follow":  {rangeapi.LoadFollow, v("a", 1), false, true},
		"history when follows": {rangeapi.LoadFollow, v("k", 1), true, false},
	} {
		c := Load{Stage: x.stage, From: from, Incarnation: 1, Versions: 1}
		err := VisitLoad(&c, AppendLoadVersion(nil, x.v, LoadPrior{Old: x.old}), func(*mvcc.Version, LoadPrior) error { return nil })
		if (err == nil) != x.ok {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// FuzzLoad: a load that is accepted is the same when it is written again, and the store takes its versions.
func FuzzLoad(f *testing.F) {
	for _, b := range sampleLoads() {
		_, body, err := DecodeHeader(b)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var again []byte
		measure.Claims(t, b, func() {
			c, rest, err := DecodeLoad(b)
			if err != nil {
				return
			}
			out := AppendLoad(nil, &c)
			if VisitLoad(&c, rest, func(v *mvcc.Version, before LoadPrior) error {
				out = AppendLoadVersion(out, v, before) // panics on a version that the store does not take
				return nil
			}) == nil {
				again = out
			}
		})
		if again == nil {
			return
		}
		if got, want := describeBody(t, again), describeBody(t, b); got != want {
			t.Fatalf("%s became %s", want, got)
		}
	})
}

func describeBody(t *testing.T, body []byte) string {
	t.Helper()
	s, err := describeLoad(body)
	if err != nil {
		t.Fatalf("%x: %v", body, err)
	}
	return s
}
