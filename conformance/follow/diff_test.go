package follow

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
)

// TestDiff: a real etcd is compared with itself at two revisions, and through a client that takes
// only small messages, so that pages are asked for again with fewer keys.
func TestDiff(t *testing.T) {
	_, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	open := func(most int) *clientv3.Client {
		cfg := clientConfig(endpoints)
		cfg.MaxCallRecvMsgSize, cfg.MaxCallSendMsgSize = most, most
		c, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	c, small := open(diff.MaxMessageBytes), open(1<<20)
	put := func(key, value string, opts ...clientv3.OpOption) int64 {
		r, err := c.Put(ctx, key, value, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return r.Header.Revision
	}
	lease, err := c.Grant(ctx, 500)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		put(fmt.Sprintf("a%03d", i), strings.Repeat("x", 100<<10))
	}
	for i := range 200 {
		put(fmt.Sprintf("b%03d", i), "v", clientv3.WithLease(lease.ID))
	}
	before := put("b007", "w")
	a, b := diff.NewEndpoint(c), diff.NewEndpoint(small)
	r, err := diff.Compare(ctx, a, b, diff.Options{})
	if err != nil || !r.Equal() || r.KeysA != 300 || r.KeysB != 300 || r.LeasesA != 1 || r.RevisionA != keyspace.Revision(before) {
		t.Fatalf("%+v, %v", r, err)
	}
	// As many keys as may be looked up at once, whose values would be too large for the small one.
	keys, written := make([][]byte, diff.LookupKeys), make([]keyspace.Revision, diff.LookupKeys)
	for i := range keys {
		keys[i], written[i] = fmt.Appendf(nil, "a%03d", i), keyspace.Revision(i)+2
	}
	keys[5], written[5] = []byte("none"), 0
	keys[7], written[7] = []byte("b007"), keyspace.Revision(before)
	if got, err := b.Written(ctx, keys); err != nil || !slices.Equal(got, written) {
		t.Errorf("%v, %v, want %v", got, err, written)
	}
	put("b007", "w2")
	put("c", "new")
	r, err = diff.Compare(ctx, at{a, keyspace.Revision(before)}, b, diff.Options{Show: 9})
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	r.Write(&text)
	want := fmt.Sprintf(`key "b007": unequal: mod revision %d and %d, version 2 and 3, value "w" and "w2"
key "c": only in B: create revision %d, mod revision %d, version 1
A at revision %d: 300 keys; B at revision %d: 301 keys
leases: 1 in A, 1 in B
different: 1 only in B, 1 unequal
`, before, before+1, before+2, before+2, before, before+2)
	if text.String() != want {
		t.Errorf("%s\nnot\n%s", text.String(), want)
	}
}

// at is a side that is read at one revision where the other is read as it is now.
type at struct {
	diff.Reader
	revision keyspace.Revision
}

func (a at) Page(ctx context.Context, from, end []byte, _ keyspace.Revision, limit int) (diff.Page, error) {
	return a.Reader.Page(ctx, from, end, a.revision, limit)
}
