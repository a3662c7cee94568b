package eval

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// An entry holds what its bound says, also where a version brings earlier ones of its revision along.
func TestLoadEntries(t *testing.T) {
	var q rangeapi.LoadRequest
	q.Stage = rangeapi.LoadBulk
	long := bytes.Repeat([]byte("v"), 400)
	for i := range 10 {
		v := mvcc.Version{Key: fmt.Appendf(nil, "k%d", i), Mod: 9, Sub: 1, Tombstone: true}
		v.Earlier = &mvcc.Version{Key: v.Key, Mod: 9, Create: 9, Version: 1, Value: long}
		q.Versions = rangeapi.AppendStoredVersion(q.Versions, &v)
		q.Count++
	}
	rec := command.Record{}
	for brought := 0; brought < q.Count; {
		l := LoadWriter{Record: &rec, Request: &q, Limit: 1000}
		if err := l.Versions(nil); err != nil {
			t.Fatal(err)
		}
		brought += l.Count
		if len(l.Body) > l.Limit || l.Count != 2 || l.More != (brought < q.Count) {
			t.Fatalf("%d versions in %d bytes, more %t, with %d of %d", l.Count, len(l.Body), l.More, brought, q.Count)
		}
		rec.Load.LoadCursor = rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: fmt.Appendf(nil, "k%d", brought-1), Revision: 9}
	}
	l := LoadWriter{Record: &command.Record{}, Request: &q, Limit: 300}
	if err := l.Versions(nil); !errors.Is(err, kverror.RequestTooLarge) {
		t.Errorf("a version that fits into no entry: %v", err)
	}
}
