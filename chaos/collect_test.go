package chaos

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// collectPatience bounds one read at the end. agreePatience bounds the time until
	// the replicas are equal.
	collectPatience = 30 * time.Second
	agreePatience   = time.Minute
	page            = 2000
	walkers         = 16
)

// collect reads back what is stored: all keys through each node at one revision, and
// the history of each register.
func (r *run) collect(ctx context.Context) (*evidence, error) {
	e := &evidence{ops: r.h.ops(), versions: map[string][]version{}}
	gctx, cancel := context.WithTimeout(ctx, collectPatience)
	now, err := r.c.nodes[0].client.Get(gctx, "a")
	cancel()
	if err != nil {
		return nil, fmt.Errorf("the revision of the end: %w", err)
	}
	rev := now.Header.Revision
	for i, n := range r.c.nodes {
		keys, err := readAll(ctx, n.client, rev)
		if err != nil {
			return nil, fmt.Errorf("all keys through %s at revision %d: %w", n.name, rev, err)
		}
		if i == 0 {
			e.keys = keys
		} else if !maps.Equal(keys, e.keys) {
			r.c.blame("nodes: %s and %s answer differently at revision %d", r.c.nodes[0].name, n.name, rev)
		}
	}
	if err := r.walk(ctx, e, rev); err != nil {
		return nil, err
	}
	return e, nil
}

// readAll reads all keys at a revision, page by page.
func readAll(ctx context.Context, cl *clientv3.Client, rev int64) (map[string]kv, error) {
	keys := map[string]kv{}
	for from := "\x00"; ; {
		ctx, cancel := context.WithTimeout(ctx, collectPatience)
		resp, err := cl.Get(ctx, from, clientv3.WithFromKey(), clientv3.WithRev(rev), clientv3.WithLimit(page))
		cancel()
		if err != nil {
			return nil, err
		}
		for _, p := range resp.Kvs {
			keys[string(p.Key)] = kvOf(p)
			from = string(p.Key) + "\x00"
		}
		if !resp.More {
			return keys, nil
		}
	}
}

// walk reads the history of every register that an operation named.
func (r *run) walk(ctx context.Context, e *evidence, rev int64) error {
	removals := map[string][]int64{} // the revisions of the markers of each register
	for key, k := range e.keys {
		switch {
		case isRegister(key):
			e.versions[key] = nil
		case isRegister(k.value):
			e.versions[k.value] = nil
			removals[k.value] = append(removals[k.value], k.mod)
		}
	}
	for _, o := range e.ops {
		if o.kind.writes() && o.kind != insert {
			e.versions[o.key] = nil
		}
	}
	all := slices.Sorted(maps.Keys(e.versions))
	work := make(chan string)
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	for i := range walkers {
		cl := r.c.nodes[i%nodes].client
		wg.Go(func() {
			for key := range work {
				vs, err := walkKey(ctx, cl, key, rev, removals[key])
				mu.Lock()
				if e.versions[key] = vs; err != nil {
					failed = fmt.Errorf("the history of %s: %w", key, err)
				}
				mu.Unlock()
			}
		})
	}
	for _, key := range all {
		work <- key
	}
	close(work)
	wg.Wait()
	return failed
}

// walkKey reads a register's versions downwards from a revision. At a removal it goes
// on before it.
func walkKey(ctx context.Context, cl *clientv3.Client, key string, rev int64, removals []int64) (vs []version, err error) {
	slices.Sort(removals)
	for removed := int64(0); rev > 1; {
		gctx, cancel := context.WithTimeout(ctx, collectPatience)
		resp, err := cl.Get(gctx, key, clientv3.WithRev(rev))
		cancel()
		if err != nil {
			return nil, fmt.Errorf("at revision %d: %w", rev, err)
		}
		if len(resp.Kvs) > 0 {
			if removed != 0 {
				vs = append(vs, version{kv: kv{key: key, mod: removed}, deleted: true})
			}
			vs = append(vs, version{kv: kvOf(resp.Kvs[0])})
			rev, removed = resp.Kvs[0].ModRevision-1, 0
			continue
		}
		i, _ := slices.BinarySearch(removals, rev+1)
		if i == 0 {
			break
		}
		removed = removals[i-1]
		rev = removed - 1
	}
	slices.Reverse(vs)
	return vs, nil
}

// agree waits until all replicas of each range have the same applied index and hash.
func (r *run) agree(ctx context.Context) {
	term := r.c.still.term(agreePatience, "that the replicas are equal")
	for {
		differs, err := r.differs(ctx)
		if err == nil && differs == "" {
			return
		}
		if term.over() {
			r.c.verdict(err != nil, "hashes: %s differ after %v: %v", differs, agreePatience, err)
			return
		}
		r.sleep(ctx, 200*time.Millisecond)
	}
}

// differs says which replicas are not equal, "" if all are.
func (r *run) differs(ctx context.Context) (string, error) {
	c, err := takeCensus(ctx, r.c.admin)
	if err != nil {
		return "", err
	}
	return strings.Join(c.wrong(nodes), "; "), nil
}
