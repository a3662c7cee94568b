package follow

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/mirror/diff"
)

const members = 3

// maxTxnOps is how many operations a transaction may have.
const maxTxnOps = 256

// startEtcds starts an etcd of three members.
func startEtcds(t *testing.T) (all []*embed.Etcd, endpoints []string) {
	t.Helper()
	all = make([]*embed.Etcd, members)
	p, err := ports.Unused(2 * members)
	if err != nil {
		t.Fatal(err)
	}
	at := func(i int) []url.URL { return []url.URL{{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", p[i])}} }
	var initial []string
	for i := range members {
		initial = append(initial, fmt.Sprintf("m%d=%s", i, at(i)[0].String()))
		endpoints = append(endpoints, at(members + i)[0].String())
	}
	var wg sync.WaitGroup
	for i := range members {
		cfg := embed.NewConfig()
		cfg.Name, cfg.Dir = fmt.Sprint("m", i), filepath.Join(t.TempDir(), fmt.Sprint("m", i))
		cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = at(i), at(i)
		cfg.ListenClientUrls, cfg.AdvertiseClientUrls = at(members+i), at(members+i)
		cfg.InitialCluster, cfg.UnsafeNoFsync = strings.Join(initial, ","), true
		cfg.MaxTxnOps = maxTxnOps
		cfg.BcryptCost = 4 // with the race detector a login takes seconds otherwise, and a mirror logs in at each member at once
		cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
		wg.Go(func() {
			e, err := embed.StartEtcd(cfg)
			if err != nil {
				t.Error(err)
				return
			}
			<-e.Server.ReadyNotify()
			all[i] = e
		})
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, e := range all {
			if e != nil {
				e.Close()
			}
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return all, endpoints
}

// clientConfig is that of a client of the source.
func clientConfig(endpoints []string) clientv3.Config {
	return clientv3.Config{
		Endpoints: endpoints, DialTimeout: 10 * time.Second, DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second, Logger: zap.NewNop(),
		MaxCallRecvMsgSize: diff.MaxMessageBytes,
	}
}

// write writes at random until stop is set. A transaction that fails while the leader is away may
// have happened or not: the source knows.
func write(ctx context.Context, c *clientv3.Client, seed uint64, stop *atomic.Bool) (done int64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	key := func() string { return fmt.Sprintf("k%04d", rng.IntN(500)) }
	for i := 0; !stop.Load() && ctx.Err() == nil; i++ {
		value := fmt.Sprint(seed, ".", i)
		var err error
		switch rng.IntN(10) {
		case 0:
			var l *clientv3.LeaseGrantResponse
			if l, err = c.Grant(ctx, 600); err == nil {
				_, err = c.Put(ctx, key(), value, clientv3.WithLease(l.ID))
				if rng.IntN(3) == 0 {
					_, err = c.Revoke(ctx, l.ID)
				}
			}
		case 1:
			_, err = c.Delete(ctx, key())
		case 2:
			from := key()
			_, err = c.Delete(ctx, from, clientv3.WithRange(from+"z"))
		case 3: // put and delete of a key in one transaction (trap 112)
			k := key()
			_, err = c.Txn(ctx).Then(
				clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpPut(k, value), clientv3.OpPut(k+"a", value)}, nil),
				clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpDelete(k)}, nil)).Commit()
		case 4:
			_, err = c.Put(ctx, key(), strings.Repeat("x", rng.IntN(20000)))
		default:
			_, err = c.Txn(ctx).Then(clientv3.OpPut(key(), value), clientv3.OpPut(key()+"b", value)).Commit()
		}
		if err == nil {
			done++
		}
	}
	return done
}

// TestFollow: an etcd of three members is mirrored while clients write and compact. The mirror is
// killed again and again, and the source's leader once. Nothing is lost, nothing comes twice, and
// a range of 20,000 keys that is deleted in one revision (trap 116) goes as a whole.
func TestFollow(t *testing.T) {
	etcds, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	client, err := clientv3.New(clientConfig(endpoints))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	putMany(ctx, t, client)

	var stop atomic.Bool
	var done atomic.Int64
	var writers sync.WaitGroup
	defer writers.Wait()
	defer stop.Store(true)
	for w := range uint64(4) {
		writers.Go(func() { done.Add(write(ctx, client, w, &stop)) })
	}
	d, dir := newTarget(), filepath.Join(t.TempDir(), "mirror")
	run := func(ctx context.Context) chan error {
		ended := make(chan error, 1)
		go func() {
			source, err := mirror.NewEtcd(clientConfig(endpoints), clock.System())
			if err == nil {
				err = errors.Join(mirror.Run(ctx, mirror.Options{
					FS: vfs.Default, Dir: dir, Clock: clock.System(), Source: source, Target: d, SourceData: source.Data(), TargetData: d,
					SnapshotRevision: fileRevision, Nonce: "n",
				}), source.Close())
			}
			ended <- err
		}()
		return ended
	}
	for kills := range 6 {
		running, kill := context.WithCancel(ctx)
		ended := run(running)
		select {
		case err := <-ended:
			t.Fatalf("the mirror ends: %v", err)
		case <-time.After(time.Duration(1+kills%2) * time.Second):
		}
		if kills == 2 {
			// A slow machine lets a request of 20,000 keys time out.
			for _, err := client.Delete(ctx, "many", clientv3.WithPrefix()); err != nil; _, err = client.Delete(ctx, "many", clientv3.WithPrefix()) {
				if ctx.Err() != nil {
					t.Fatal(err)
				}
			}
		}
		if kills == 3 {
			killLeader(ctx, t, etcds)
		}
		if kills >= 4 {
			compact(ctx, t, client, d)
		}
		kill()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Fatalf("the mirror ends: %v", err)
		}
	}
	ended := run(ctx)
	stepped(ctx, t, dir, ended)
	// A request that reached the leader just before its death lets etcd wait for seconds, and may be done behind the cut-over.
	stop.Store(true)
	writers.Wait()
	if err := mirror.RequestCutover(vfs.Default, dir); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	st, err := mirror.ReadStatus(vfs.Default, dir)
	if err != nil || st.Warning != "" || st.Step != mirror.Done {
		t.Fatalf("%+v, %v", st, err)
	}
	t.Logf("%d transactions up to revision %d; %d versions followed in %d batches; %v s frozen", done.Load(), st.Position, d.versions, d.batches, st.FreezeSeconds)
	compare(ctx, t, client, d)
}

const manyKeys = 20_000

func putMany(ctx context.Context, t *testing.T, c *clientv3.Client) {
	t.Helper()
	const each = 250
	for i := 0; i < manyKeys; i += each {
		ops := make([]clientv3.Op, each)
		for j := range ops {
			ops[j] = clientv3.OpPut(fmt.Sprintf("many%06d", i+j), "v")
		}
		for {
			_, err := c.Txn(ctx).Then(ops...).Commit()
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				t.Fatal(err)
			}
		}
	}
}

// killLeader stops the member that leads, in no order. On a slow machine none may lead for a while.
func killLeader(ctx context.Context, t *testing.T, etcds []*embed.Etcd) {
	t.Helper()
	for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		for i, e := range etcds {
			if e.Server.Leader() == e.Server.MemberID() {
				e.Server.HardStop()
				e.Close()
				etcds[i] = nil
				return
			}
		}
	}
	t.Fatal("no member leads")
}

// compact removes history that the target has.
func compact(ctx context.Context, t *testing.T, c *clientv3.Client, d *target) {
	t.Helper()
	_, rev, _ := d.State(ctx, "")
	for ; ; time.Sleep(50 * time.Millisecond) {
		_, err := c.Compact(ctx, int64(rev)-100)
		switch {
		case err == nil:
			return
		case errors.Is(err, rpctypes.ErrCompacted):
			return // the mirror has got no further since the last compaction
		case ctx.Err() != nil || errors.Is(err, rpctypes.ErrFutureRev):
			t.Fatal(err)
		}
		// The source's leader has just died. It may refuse a compaction for a moment.
	}
}

// compare compares source and target at revisions between the compacted and the last one.
func compare(ctx context.Context, t *testing.T, c *clientv3.Client, d *target) {
	t.Helper()
	source := diff.NewEndpoint(c)
	compared := 0
	for rev := d.rev; rev > d.rev-2000 && rev > 0; rev -= 1 + (d.rev-rev)/20 {
		r, err := diff.Compare(ctx, source, d, diff.Options{Revision: rev, Show: 5})
		if errors.Is(err, diff.ErrCompacted) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if !r.Equal() {
			var b strings.Builder
			r.Write(&b)
			t.Fatalf("revision %d: %s", rev, b.String())
		}
		if rev == d.rev && (r.KeysA == 0 || r.LeasesA == 0) {
			t.Errorf("there is nothing to compare: %+v", r)
		}
		compared++
	}
	if compared < 10 {
		t.Errorf("only %d revisions were compared", compared)
	}
}

// TestCompactedBelowThePosition: what a real etcd answers where history is gone, and where there is none yet.
func TestCompactedBelowThePosition(t *testing.T) {
	_, endpoints := startEtcds(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	source, err := mirror.NewEtcd(clientConfig(endpoints), clock.System())
	if err != nil {
		t.Fatal(err)
	}
	defer source.Close()
	client, err := clientv3.New(clientConfig(endpoints))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if rev, err := source.Compacted(ctx); err != nil || rev != 0 {
		t.Errorf("an empty source is compacted at %d: %v", rev, err)
	}
	var last int64
	for i := range 20 {
		r, err := client.Put(ctx, "a", fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		last = r.Header.Revision
	}
	if rev, err := source.Compacted(ctx); err != nil || rev != 0 {
		t.Errorf("a source is compacted at %d: %v", rev, err)
	}
	if _, err := client.Compact(ctx, last-5); err != nil {
		t.Fatal(err)
	}
	if rev, err := source.Compacted(ctx); err != nil || rev != keyspace.Revision(last-5) {
		t.Errorf("the source is compacted at %d, not %d: %v", rev, last-5, err)
	}
	// A watch below it says so (trap 124), and a page is ErrCompacted.
	var c *mirror.CompactedError
	if err := source.Watch(ctx, keyspace.Revision(last-9), make(chan mirror.Part, 100)); !errors.As(err, &c) || c.Compacted != keyspace.Revision(last-5) {
		t.Errorf("%v", err)
	}
	if _, err := source.Data().Page(ctx, nil, nil, keyspace.Revision(last-9), 10); !errors.Is(err, diff.ErrCompacted) {
		t.Errorf("%v", err)
	}
	// No member has a revision that the cluster has not (trap 125).
	if err := source.Snapshot(ctx, keyspace.Revision(last+1), nil); !errors.Is(err, mirror.ErrLagging) {
		t.Errorf("%v", err)
	}
}
