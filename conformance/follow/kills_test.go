package follow

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/mirror/diff"
)

// TestKills: real processes are killed with signal 9 while clients of the source write, compact, grant and revoke. They are
// the mirror, nodes of the target, the one that leads among them, and the source's leader.
// The source is an etcd or a Skein.
// Behind the cut-over no write is lost and none is there twice, every lease lives with its TTL, and the next write has the next revision.
func TestKills(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes minutes")
	}
	t.Run("etcd", func(t *testing.T) { testKills(t, "etcd", etcdArguments) })
	// A Skein leaves revisions out behind a kill.
	t.Run("skein", func(t *testing.T) { testKills(t, "skein", skeinArguments) })
}

func testKills(t *testing.T, role string, arguments func(name, dir, client, peer, initial string) []string) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	sources, from := startProcesses(t, role, arguments)
	skeins, to := startProcesses(t, "skein", skeinArguments)
	source, target := connect(ctx, t, from), connect(ctx, t, to)
	putMany(ctx, t, source)

	var stop atomic.Bool
	var done atomic.Int64
	var writers sync.WaitGroup
	defer writers.Wait()
	defer stop.Store(true)
	for w := range uint64(3) {
		writers.Go(func() { done.Add(write(ctx, source, w, &stop)) })
	}
	dir := filepath.Join(t.TempDir(), "mirror")
	m := &process{t: t, role: "mirror", args: []string{strings.Join(from, ","), strings.Join(to, ","), dir}, log: filepath.Join(t.TempDir(), "mirror.log")}
	m.start()
	t.Cleanup(m.kill)
	for round := range 8 {
		pause(ctx, t, m, time.Duration(rand.IntN(3000))*time.Millisecond)
		if round%4 != 0 {
			begun(ctx, t, m, target)
		}
		switch round % 4 {
		case 0: // the copy and the import too, in the first rounds
			m.kill()
			m.start()
		case 1:
			again(skeins[leader(ctx, t, target, to)])
		case 2:
			again(sources[leader(ctx, t, source, from)])
		case 3: // both at once, and what does not lead
			m.kill()
			again(skeins[(leader(ctx, t, target, to)+1)%members])
			m.start()
			compactBelow(ctx, t, source, dir)
		}
	}
	follows(ctx, t, m, dir)
	again(skeins[leader(ctx, t, target, to)])
	for !compactBelow(ctx, t, source, dir) { // the writers may have stood still for long where leaders were killed
		pause(ctx, t, m, 50*time.Millisecond)
	}
	// A request that reached the leader just before its death lets etcd wait for seconds, and may be done behind the cut-over.
	stop.Store(true)
	writers.Wait()
	if err := mirror.RequestCutover(vfs.Default, dir); err != nil {
		t.Fatal(err)
	}
	pause(ctx, t, m, time.Second) // the source stands still, and the mirror is killed on its way
	select {
	case err := <-m.ended:
		m.ended <- err
	default:
		m.kill()
		m.start()
	}
	select {
	case err := <-m.ended:
		m.ended <- nil // for the cleanup
		m.alive(err)
	case <-ctx.Done():
		st, err := mirror.ReadStatus(vfs.Default, dir)
		t.Fatalf("%v, %v", st, err)
	}
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil || st.Warning != "" || st.Step != mirror.Done {
		t.Fatalf("%+v, %v", st, err)
	}
	t.Logf("%d transactions up to revision %d, %.1f s frozen", done.Load(), st.Position, st.FreezeSeconds)
	settled(ctx, t, source, target, st.Position)
}

// settled compares the two sides behind a cut-over.
func settled(ctx context.Context, t *testing.T, source, target *clientv3.Client, last keyspace.Revision) {
	t.Helper()
	same(ctx, t, source, target, last)
	ids, err := diff.NewEndpoint(source).Leases(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want, err := diff.TTLs(ctx, diff.NewEndpoint(source), ids)
	if err != nil {
		t.Fatal(err)
	}
	for id, ttl := range want {
		l, err := target.TimeToLive(ctx, clientv3.LeaseID(id), clientv3.WithAttachedKeys())
		if err != nil || l.GrantedTTL != ttl || l.TTL <= 0 {
			t.Errorf("lease %x: %v, %v, want a TTL of %d s", int64(id), l, err, ttl)
			continue
		}
		at, err := source.TimeToLive(ctx, clientv3.LeaseID(id), clientv3.WithAttachedKeys())
		if err != nil {
			t.Fatal(err)
		}
		if had, has := sortedKeys(at.Keys), sortedKeys(l.Keys); !slices.Equal(had, has) {
			keys := slices.Compact(slices.Sorted(slices.Values(append(had, has...))))
			t.Errorf("lease %x has the keys %q, not %q\n%s%s", int64(id), l.Keys, at.Keys,
				attachments(ctx, "source", source, clientv3.LeaseID(id), keys), attachments(ctx, "target", target, clientv3.LeaseID(id), keys))
		}
	}
	listed, err := diff.NewEndpoint(target).Leases(ctx)
	if err != nil || len(listed) != len(ids) || len(ids) == 0 {
		t.Errorf("%d leases, not %d: %v", len(listed), len(ids), err)
	}
	put, err := target.Put(ctx, "next", "")
	if err != nil || keyspace.Revision(put.Header.Revision) != last+1 {
		t.Errorf("%v, %v, want revision %d", put, err, last+1)
	}
}

// attachments says what a side, and each of its members, answers about a lease and keys of it.
func attachments(ctx context.Context, side string, c *clientv3.Client, id clientv3.LeaseID, keys []string) string {
	var b strings.Builder
	ask := func(name string, c *clientv3.Client) {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if l, err := c.TimeToLive(ctx, id, clientv3.WithAttachedKeys()); err != nil {
			fmt.Fprintf(&b, "%s: %v\n", name, err)
		} else {
			fmt.Fprintf(&b, "%s, revision %d: %d s of %d s are left, keys %q\n", name, l.Revision, l.TTL, l.GrantedTTL, l.Keys)
		}
		for _, k := range keys {
			r, err := c.Get(ctx, k)
			if err != nil {
				fmt.Fprintf(&b, "%s, key %q: %v\n", name, k, err)
				continue
			}
			fmt.Fprintf(&b, "%s, revision %d: key %q is there %d times\n", name, r.Header.Revision, k, r.Count)
			for _, kv := range r.Kvs {
				fmt.Fprintf(&b, "\tlease %x, created at %d, modified at %d, version %d\n", kv.Lease, kv.CreateRevision, kv.ModRevision, kv.Version)
			}
		}
	}
	ask(side, c)
	for _, endpoint := range c.Endpoints() {
		one, err := clientv3.New(clientConfig([]string{endpoint}))
		if err != nil {
			fmt.Fprintf(&b, "%s: %v\n", endpoint, err)
			continue
		}
		ask(side+" at "+endpoint, one)
		if err := one.Close(); err != nil {
			fmt.Fprintf(&b, "%s: %v\n", endpoint, err)
		}
	}
	return b.String()
}

func sortedKeys(keys [][]byte) (out []string) {
	for _, k := range keys {
		out = append(out, string(k))
	}
	slices.Sort(out)
	return out
}

// again kills a process and starts it again.
func again(p *process) {
	p.t.Helper()
	p.kill()
	p.start()
}

// connect returns a client of endpoints that answer.
func connect(ctx context.Context, t *testing.T, endpoints []string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientConfig(endpoints))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	for {
		if _, err := c.Get(ctx, "ready"); err == nil {
			return c
		} else if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}

// pause waits for a time, and fails if the mirror ends meanwhile with an error.
func pause(ctx context.Context, t *testing.T, m *process, d time.Duration) {
	t.Helper()
	select {
	case err := <-m.ended:
		m.ended <- nil
		m.alive(err)
	case <-time.After(d):
	case <-ctx.Done():
		t.Fatal(ctx.Err())
	}
}

// begun waits until the load of the target has begun. A new cluster whose first leader of placement dies before may have used
// revisions, and cannot be loaded.
func begun(ctx context.Context, t *testing.T, m *process, target *clientv3.Client) {
	t.Helper()
	for {
		a, err := datapb.NewLoadClient(target.ActiveConnection()).LoadState(ctx, &datapb.LoadStateRequest{Limit: 1})
		if err == nil && a.GetStatus().GetPhase() != datapb.LoadPhase_LOAD_NONE {
			return
		}
		pause(ctx, t, m, 50*time.Millisecond)
	}
}

// follows waits until the mirror follows and has compared all keys.
func follows(ctx context.Context, t *testing.T, m *process, dir string) {
	t.Helper()
	for {
		st, err := mirror.ReadStatus(vfs.Default, dir)
		if err == nil && st.Running && st.Step == mirror.Following && st.Passes > 0 {
			t.Log(st)
			return
		}
		pause(ctx, t, m, 50*time.Millisecond)
	}
}

// compactBelow removes history that the target has.
func compactBelow(ctx context.Context, t *testing.T, c *clientv3.Client, dir string) (done bool) {
	t.Helper()
	const kept = 200
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil || st.Position < 2*kept {
		return false // it does not follow yet
	}
	for {
		_, err := c.Compact(ctx, int64(st.Position)-kept)
		if err == nil || errors.Is(err, rpctypes.ErrCompacted) {
			return true // an earlier try may have done it
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
}
