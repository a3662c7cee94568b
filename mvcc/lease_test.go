package mvcc

import (
	"errors"
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// TestAttached: the index shows the keys of one lease in a span, in order, and no other
// keys.
func TestAttached(t *testing.T) {
	e := openTest(t)
	b := e.NewBatch()
	var x LeaseIndex
	for _, err := range []error{
		x.Attach(b, 7, []byte("b")), x.Attach(b, 7, []byte("a\x00")), x.Attach(b, 7, []byte("a")), x.Attach(b, 8, []byte("ab")),
		x.Attach(b, -1, []byte("z")), x.Attach(b, 7, []byte("gone")), x.Detach(b, 7, []byte("gone")), b.Commit(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		lease keyspace.LeaseID
		span  keyspace.Span
		want  string
	}{
		{7, keyspace.Span{}, `["a" "a\x00" "b"]`},
		{7, keyspace.Span{Start: []byte("a\x00"), End: []byte("b")}, `["a\x00"]`},
		{7, keyspace.Span{Start: []byte("b")}, `["b"]`},
		{8, keyspace.Span{}, `["ab"]`},
		{-1, keyspace.Span{}, `["z"]`},
		{9, keyspace.Span{}, `[]`},
	} {
		var got []string
		err := Attached(e, c.lease, c.span, func(key []byte) error {
			got = append(got, string(key))
			return nil
		})
		if s := fmt.Sprintf("%q", got); err != nil || s != c.want {
			t.Errorf("keys of lease %d in %s: %s, %v, want %s", c.lease, c.span, s, err, c.want)
		}
	}
	stop := errors.New("stop")
	if err := Attached(e, 7, keyspace.Span{}, func([]byte) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("stopped with %v", err)
	}
}
