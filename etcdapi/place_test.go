package etcdapi

import (
	"testing"
	"testing/synctest"

	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/keyspace"
)

// TestPlace: who leads a key is told with as much of the span as the user may read, and only where it is another node.
func TestPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var span keyspace.Span
		leader := keyspace.NodeID(0xa)
		s, users := virtualServer(t, func(o *Options) {
			o.Place = func([]byte) (keyspace.Span, keyspace.NodeID, []string) { return span, leader, []string{"http://a:1"} }
		})
		defer s.Stop(t.Context())
		o := newOperations(s)
		place := func(user, key, start, end string) *pipepb.Place {
			span = keyspace.Span{Start: []byte(start), End: []byte(end)}
			return o.Place(users.incoming(t, user), []byte(key))
		}
		for _, c := range []struct{ user, key, start, end, wantKey, wantEnd string }{
			{"u", "k", "a", "z", "k", ""},        // that key alone may be read
			{"u", "r1", "a", "z", "r", "s"},      // and these
			{"u", "r1", "r0", "r5", "r0", "r5"},  // all of the range
			{"u", "r1", "", "r5", "r", "r5"},     // a part
			{"u", "r1", "r1", "", "r1", "s"},     // another one
			{"u", "w", "a", "z", "w", ""},        // it may be written, and not be read
			{"u", "x", "a", "z", "x", ""},        // neither
			{"root", "x", "a", "z", "a", "z"},    // everything
			{"root", "x", "", "z", "", "z"},      // from the first key on
			{"root", "x", "a", "", "a", "\x00"},  // to the last one
			{"root", "x", "x", "x\x00", "x", ""}, // a range of one key
		} {
			want := &pipepb.Place{Node: 0xa, ClientUrls: []string{"http://a:1"}, Key: []byte(c.wantKey), RangeEnd: []byte(c.wantEnd)}
			if got := place(c.user, c.key, c.start, c.end); !proto.Equal(got, want) {
				t.Errorf("%v: %v", c, got)
			}
		}
		if got := place("u", "k", "l", "z"); got != nil {
			t.Errorf("a range without the key: %v", got)
		}
		for _, leader = range []keyspace.NodeID{0, 0xb} {
			if got := place("root", "x", "a", "z"); got != nil {
				t.Errorf("led by node %s: %v", leader, got)
			}
		}
		leader = 0xa
		users.do(t, "disable")
		if got := place("u", "x", "a", "z"); string(got.GetKey()) != "a" || string(got.GetRangeEnd()) != "z" {
			t.Errorf("while checks are off: %v", got)
		}
		s.opts.Place = nil
		if got := place("u", "x", "a", "z"); got != nil {
			t.Errorf("where nobody knows: %v", got)
		}
	})
}
