package rangeapi

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

func sampleLoadRequests() map[string]*LoadRequest {
	v := AppendStoredVersion(nil, &mvcc.Version{Key: []byte("k"), Mod: 300, Create: 290, Version: 4, Lease: 7, Value: []byte("v")})
	v = AppendStoredVersion(v, &mvcc.Version{Key: []byte("l"), Mod: 9, Tombstone: true})
	return map[string]*LoadRequest{
		"load-put.v1": {
			Range: 7, Generation: 3, Step: LoadPut, Stage: LoadBulk, After: LoadCursor{Stage: LoadBulk, Key: []byte("j"), Revision: 5},
			Incarnation: 44, Alive: []keyspace.LeaseID{-2, 7}, Count: 2, Versions: v,
		},
		"load-look.v1": {Range: 7, Generation: 3, Step: LoadLook, Lease: -9, Versions: []byte{}},
		"load-end.v1":  {Range: 7, Generation: 3, Step: LoadEnd, Incarnation: 44, Revision: 300, Compacted: 200, Versions: []byte{}},
		"load-trim.v1": {Range: 7, Generation: 3, Step: LoadTrim, Incarnation: 44, Versions: []byte{}},
	}
}

func sampleLoadAnswer() *LoadAnswer {
	return &LoadAnswer{
		LoadState: LoadState{LoadCursor: LoadCursor{Stage: LoadFollow, Key: []byte("k"), Revision: 300, Sub: 2}, Versions: 12, Sum: 0xfe},
		Span:      keyspace.Span{Start: []byte("a"), End: []byte("m")}, LastRevision: 301, Leases: []keyspace.LeaseID{-2, 7}, More: true,
	}
}

// The forms of method 26 are held still, come back as they were, and are refused where they are cut off.
func TestLoadForms(t *testing.T) {
	formats := map[string][]byte{
		"load-answer.v1": AppendLoadAnswer(nil, sampleLoadAnswer(), nil),
		"load-error.v1":  AppendLoadAnswer(nil, nil, kverror.New(kverror.Busy, "a split")),
	}
	for name, q := range sampleLoadRequests() {
		b := q.encode()
		formats[name] = b
		if got, err := DecodeLoadRequest(b); err != nil || !reflect.DeepEqual(got, q) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		for n := range len(b) - len(q.Versions) {
			if _, err := DecodeLoadRequest(b[:n]); err == nil {
				t.Errorf("%s of %d bytes is read", name, n)
			}
		}
	}
	if got, failed, err := DecodeLoadAnswer(formats["load-answer.v1"]); err != nil || failed != nil || !reflect.DeepEqual(got, sampleLoadAnswer()) {
		t.Errorf("%+v, %v, %v", got, failed, err)
	}
	if _, failed, err := DecodeLoadAnswer(formats["load-error.v1"]); err != nil || failed.Kind != kverror.Busy {
		t.Errorf("%v, %v", failed, err)
	}
	golden.Formats(t, formats)
}

// A cursor says what is behind it in the order of its stage.
func TestLoadCursor(t *testing.T) {
	bulk, follow := LoadCursor{Stage: LoadBulk, Key: []byte("k"), Revision: 5}, LoadCursor{Stage: LoadFollow, Key: []byte("k"), Revision: 5, Sub: 2}
	for _, x := range []struct {
		c      LoadCursor
		key    string
		mod    keyspace.Revision
		sub    uint32
		passed bool
	}{
		{bulk, "j", 1, 0, true},
		{bulk, "k", 6, 0, true},
		{bulk, "k", 5, 0, true},
		{bulk, "k", 4, 9, false},
		{bulk, "l", 9, 0, false},
		{LoadCursor{Stage: LoadBulk}, "a", 9, 0, false},
		{LoadCursor{}, "a", 9, 0, false},
		{LoadCursor{Stage: LoadEnded}, "a", 9, 0, true},
		{follow, "z", 4, 9, true},
		{follow, "z", 5, 1, true},
		{follow, "k", 5, 2, true},
		{follow, "l", 5, 2, false},
		{follow, "a", 5, 3, false},
		{follow, "a", 6, 0, false},
	} {
		if got := x.c.Passed(&mvcc.Version{Key: []byte(x.key), Mod: x.mod, Sub: x.sub}); got != x.passed {
			t.Errorf("%s has passed %s@%d.%d: %t", &x.c, x.key, x.mod, x.sub, got)
		}
	}
	whole := LoadState{LoadCursor: bulk, Versions: 3, Sum: 4}
	for key, want := range map[string]string{"a": `bulk "k"@5`, "k": `bulk "k"@5`, "l": `bulk ""@0`} {
		child := whole.Cut([]byte(key))
		if child.LoadCursor.String() != want || child.Versions != 0 {
			t.Errorf("the child from %s on is at %s with %d versions", key, &child.LoadCursor, child.Versions)
		}
	}
}

func FuzzLoadRequest(f *testing.F) {
	for _, q := range sampleLoadRequests() {
		f.Add(q.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		measure.Claims(t, b, func() {
			q, err := DecodeLoadRequest(b)
			if err != nil {
				return
			}
			if again, err := DecodeLoadRequest(q.encode()); err != nil || fmt.Sprint(again) != fmt.Sprint(q) {
				t.Fatalf("%+v became %+v, %v", q, again, err)
			}
		})
	})
}

func FuzzLoadAnswer(f *testing.F) {
	f.Add(AppendLoadAnswer(nil, sampleLoadAnswer(), nil))
	f.Add(AppendLoadAnswer(nil, nil, kverror.New(kverror.Busy, "a split")))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, failed, err := DecodeLoadAnswer(b)
		if err != nil || failed != nil {
			return
		}
		if again, _, err := DecodeLoadAnswer(AppendLoadAnswer(nil, a, nil)); err != nil || fmt.Sprint(again) != fmt.Sprint(a) {
			t.Fatalf("%+v became %+v, %v", a, again, err)
		}
	})
}
