package node_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// A load comes into three real nodes over their client ports, through the kill of one of them, and a client of etcd goes
// on with the next revision. The test prints how fast it was (bars: 60,000 versions and 25 MB a second).
func TestLoadIntoProcesses(t *testing.T) {
	c := newProcesses(t)
	c.startAll() // and no write: only a new cluster can be loaded
	ctx := t.Context()
	cl := c.clientOf(c.nodes...)
	l := dataapi.NewLoader(dataapi.LoaderOptions{Conn: cl.ActiveConnection(), Number: 7, Source: "a test"})
	if _, err := l.Begin(ctx); err != nil {
		t.Fatal(err)
	}
	if err := l.Leases(ctx, []dataapi.LoadLease{{ID: 77, TTL: 3600}}, nil); err != nil {
		t.Fatal(err)
	}
	const parts, keys = 4, 60_000
	var splits [][]byte
	for i := 1; i < parts; i++ {
		splits = append(splits, fmt.Appendf(nil, "p%d/", i))
	}
	if err := l.Split(ctx, splits); err != nil {
		t.Fatal(err)
	}
	value := bytes.Repeat([]byte("value of 256 bytes, or so "), 10)[:256]
	load := func(part int) error {
		return l.Bulk(ctx, func(yield func(*mvcc.Version, error) bool) {
			for i := range keys / parts {
				rev := keyspace.Revision(2 + part*keys/parts + i)
				v := &mvcc.Version{Key: fmt.Appendf(nil, "p%d/%08d", part, i), Mod: rev, Create: rev, Version: 1, Value: value}
				if i%100 == 0 {
					v.Lease = 77
				}
				if !yield(v, nil) {
					return
				}
			}
		})
	}
	began := time.Now()
	var all sync.WaitGroup
	for part := range parts {
		all.Go(func() {
			if err := load(part); err != nil {
				t.Errorf("part %d: %v", part, err)
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	t.Logf("%d versions and %.1f MB in %v: %.0f versions and %.1f MB a second", keys, float64(keys*len(value))/1e6, took, keys/took.Seconds(), float64(keys*len(value))/1e6/took.Seconds())
	c.nodes[2].kill()
	if err := l.Finish(ctx, keys+1, 0); err != nil {
		t.Fatal(err)
	}
	c.start(c.nodes[2])
	put, err := cl.Put(ctx, "next", "v")
	if err != nil || put.Header.Revision != keys+2 {
		t.Fatalf("%v, %v, want revision %d", put, err, keys+2)
	}
	got, err := cl.Get(ctx, "p", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil || got.Count != keys {
		t.Fatalf("%v, %v", got, err)
	}
	// Lists begin the watch of a controller: it sees each write again from a revision of before.
	w := cl.Watch(ctx, "p3/", clientv3.WithPrefix(), clientv3.WithRev(keys-8))
	for rev := int64(keys - 8); rev <= keys+1; {
		r := <-w
		if r.Err() != nil {
			t.Fatal(r.Err())
		}
		for _, e := range r.Events {
			if e.Kv.ModRevision != rev {
				t.Fatalf("%v, want revision %d", e, rev)
			}
			rev++
		}
	}
	if ttl, err := cl.TimeToLive(ctx, 77, clientv3.WithAttachedKeys()); err != nil || len(ttl.Keys) != keys/100 {
		t.Errorf("%v, %v", ttl, err)
	}
}
