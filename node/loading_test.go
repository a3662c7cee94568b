package node

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// inProcess calls the load services of nodes without a network: one that is down is unavailable.
type inProcess struct {
	nodes []*rigNode
	next  atomic.Int64
	// before is called before each call, if it is set.
	before func(method string)
	// calls is the number of the call before which the process that calls dies, 0 for never.
	calls int64
}

type registrar struct{ srv any }

func (r *registrar) RegisterService(_ *grpc.ServiceDesc, srv any) { r.srv = srv }

func (p *inProcess) Invoke(ctx context.Context, method string, args, reply any, _ ...grpc.CallOption) error {
	if p.before != nil {
		p.before(method)
	}
	next := p.next.Add(1)
	if next == p.calls {
		return status.Error(codes.Aborted, "killed")
	}
	n := p.nodes[next%int64(len(p.nodes))]
	if n.core == nil {
		return status.Error(codes.Unavailable, "the node is down")
	}
	var r registrar
	dataapi.RegisterLoad(&r, n.core.client, n.core.router, n.core.admin)
	for _, m := range datapb.Load_ServiceDesc.Methods {
		if !strings.HasSuffix(method, "/"+m.MethodName) {
			continue
		}
		decode := func(q any) error {
			proto.Merge(q.(proto.Message), args.(proto.Message))
			return nil
		}
		a, err := m.Handler(r.srv, ctx, decode, nil)
		if err == nil {
			proto.Merge(reply.(proto.Message), a.(proto.Message))
		}
		return err
	}
	return status.Error(codes.Unimplemented, method)
}

func (p *inProcess) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "no streams")
}

// loaderOf returns the loader with the number, which calls all nodes in turn.
func (r *rig) loaderOf(number uint64) (*dataapi.Loader, *inProcess) {
	conn := &inProcess{nodes: r.nodes}
	return dataapi.NewLoader(dataapi.LoaderOptions{Conn: conn, Clock: r.nodes[0].core.o.Clock, Number: number, Source: "a test"}), conn
}

// begin begins a load once all nodes write the version that knows them.
func (r *rig) begin(l *dataapi.Loader) {
	r.t.Helper()
	r.publish(r.nodes...)
	if _, err := l.Begin(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

// The store that the tests load: keys with three versions each, every tenth of which is deleted and every fourth of
// which has the lease 77. It lives; lease 78, which every fifth key has in an old version, does not.
func storeOf(keys int) (bulk []mvcc.Version, last keyspace.Revision) {
	last = keyspace.Revision(1 + 3*keys)
	for i := range keys {
		key := fmt.Appendf(nil, "k%04d/%06d", i%1000, i)
		rev := keyspace.Revision(2 + 3*i)
		newest := mvcc.Version{Key: key, Mod: rev + 2, Create: rev, Version: 3, Value: fmt.Appendf(nil, "value-%d", i)}
		if i%4 == 0 {
			newest.Lease = 77
		}
		if i%10 == 9 {
			newest = mvcc.Version{Key: key, Mod: rev + 2, Tombstone: true}
		}
		old := mvcc.Version{Key: key, Mod: rev, Create: rev, Version: 1}
		if i%5 == 0 {
			old.Lease = 78
		}
		bulk = append(bulk, newest, mvcc.Version{Key: key, Mod: rev + 1, Create: rev, Version: 2, Value: bytes.Repeat([]byte("x"), 100)}, old)
	}
	sortStore(bulk)
	return bulk, last
}

func each(vs []mvcc.Version) iter.Seq2[*mvcc.Version, error] {
	return func(yield func(*mvcc.Version, error) bool) {
		for i := range vs {
			if !yield(&vs[i], nil) {
				return
			}
		}
	}
}

// A whole store comes in with its revisions and leases, while nodes crash and ranges split, and the cluster serves it
// then as if it had been written here: reads, old revisions, watches, the next revision, leases and compaction.
// Nothing is written meanwhile. Trap 123: a second loader is told whose load it is.
func TestLoadedCluster(t *testing.T) {
	keys := fewer(4_000, 2_000)
	bubble(t, 3, borders(3), nil, func(r *rig) {
		ctx := r.t.Context()
		vs, last := storeOf(keys)
		first, _ := r.loaderOf(7)
		r.begin(first)
		other, _ := r.loaderOf(8)
		if _, err := other.Begin(ctx); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "belongs to the load of a test by loader 0000000000000007") {
			r.t.Errorf("a second loader: %v", err)
		}
		if err := first.Leases(ctx, []dataapi.LoadLease{{ID: 77, TTL: 60}, {ID: 79, TTL: 60}}, []keyspace.LeaseID{79}); err != nil {
			r.t.Fatal(err)
		}
		if err := first.Split(ctx, [][]byte{[]byte("k0500")}); err != nil {
			r.t.Fatal(err)
		}
		r.whileLoaded(kverror.Loading)

		// The loader is lost in the middle, and another process goes on with its number.
		if err := first.Bulk(ctx, each(vs[:len(vs)/2])); err != nil {
			r.t.Fatal(err)
		}
		l, conn := r.loaderOf(7)
		r.begin(l)
		if err := l.Leases(ctx, []dataapi.LoadLease{{ID: 77, TTL: 60}}, nil); err != nil {
			r.t.Fatal(err)
		}
		calls := 0
		conn.before = func(method string) {
			switch calls++; calls {
			case 4:
				r.splitAt("k0800")
			case 6:
				r.crash(r.nodes[1])
			case 9:
				r.start(r.nodes[1])
			}
		}
		if err := l.Bulk(ctx, each(vs)); err != nil {
			r.t.Fatal(err)
		}
		conn.before = nil
		if r.nodes[1].core == nil {
			r.start(r.nodes[1])
		}
		last = r.follow(l, last, vs)
		// Whoever goes on with the load sees which leases it has.
		leases, _, err := r.nodes[1].core.Placement().ListLeases(ctx)
		if err != nil || len(leases) != 1 || leases[0].ID != 77 || leases[0].TTL != 60 {
			r.t.Errorf("leases of the load: %+v, %v", leases, err)
		}
		last = r.endALease(l, last)
		r.crash(r.nodes[2])
		if err := l.Finish(ctx, last+2, 3); err != nil {
			r.t.Fatal(err)
		}
		r.start(r.nodes[2])
		r.learnsOfTheEnd(r.nodes[2])
		if err := l.Finish(ctx, last+2, 3); err != nil {
			r.t.Errorf("finished again: %v", err)
		}
		r.asWritten(int64(last+2), keys)
		r.sameLease(80)
		r.stop(r.nodes...)
	})
}

// learnsOfTheEnd checks that a node which was down when a load ended knows of it before it refuses a request.
func (r *rig) learnsOfTheEnd(n *rigNode) {
	r.t.Helper()
	before := n.core.client.KnownLoading()
	n.core.learnLoad(r.t.Context())
	if after := n.core.client.KnownLoading(); after == nil || after.Active() {
		r.t.Errorf("node %v knew %+v of the load, and now %+v", n.id, before, after)
	}
}

// whileLoaded checks that no node answers clients.
func (r *rig) whileLoaded(want kverror.Kind) {
	r.t.Helper()
	for _, n := range r.nodes {
		_, err := n.put(r.t.Context(), keyOf(1), "v")
		r.wantKind("a put while the cluster is loaded", err, want)
		_, err = n.core.Leases().Grant(r.t.Context(), &pb.LeaseGrantRequest{TTL: 60})
		r.wantKind("a grant while the cluster is loaded", err, want)
		_, err = n.core.KV().Compact(r.t.Context(), &pb.CompactionRequest{Revision: 1})
		r.wantKind("a compaction while the cluster is loaded", err, want)
	}
}

// follow brings some more revisions, one of them with many keys in one revision, and checks that reads show the
// position and nothing above it.
func (r *rig) follow(l *dataapi.Loader, last keyspace.Revision, vs []mvcc.Version) keyspace.Revision {
	r.t.Helper()
	ctx := r.t.Context()
	if err := l.Follow(ctx, last, nil); err != nil {
		r.t.Fatal(err)
	}
	key := vs[0].Key // k0000/000000, with lease 77
	r.mustGet(r.nodes[2], string(key), "value-0")
	next := mvcc.Version{Key: key, Mod: last + 1, Create: vs[0].Create, Version: 4, Value: []byte("followed")}
	many := []mvcc.Version{next}
	for i := range 500 {
		many = append(many, mvcc.Version{Key: fmt.Appendf(nil, "k%04d/m", 2*i), Mod: last + 2, Create: last + 2, Version: 1, Sub: uint32(i)})
	}
	// A revision that comes in parts is visible with the last one.
	if err := l.Follow(ctx, last, many[:200]); err != nil {
		r.t.Fatal(err)
	}
	r.mustGet(r.nodes[1], string(key), "value-0")
	if err := l.Follow(ctx, last+2, many[200:]); err != nil {
		r.t.Fatal(err)
	}
	resp, err := r.nodes[0].core.KV().Range(ctx, &pb.RangeRequest{Key: key})
	if err != nil || string(resp.Kvs[0].Value) != "followed" || resp.Kvs[0].Lease != 0 || resp.Header.Revision != int64(last+2) {
		r.t.Fatalf("%v, %v", resp, err)
	}
	return last + 2
}

// endALease has a lease come, get keys in two ranges, and end at the source, whose keys go with it. The cluster
// finishes only once the revision came that deletes them.
func (r *rig) endALease(l *dataapi.Loader, last keyspace.Revision) keyspace.Revision {
	r.t.Helper()
	ctx := r.t.Context()
	if err := l.Leases(ctx, []dataapi.LoadLease{{ID: 80, TTL: 60}}, nil); err != nil {
		r.t.Fatal(err)
	}
	put, gone := make([]mvcc.Version, 2), make([]mvcc.Version, 2)
	for i, key := range []string{"k0001/leased", "k0999/leased"} {
		put[i] = mvcc.Version{Key: []byte(key), Mod: last + 1, Sub: uint32(i), Create: last + 1, Version: 1, Lease: 80}
		gone[i] = mvcc.Version{Key: []byte(key), Mod: last + 2, Sub: uint32(i), Tombstone: true}
	}
	if err := l.Follow(ctx, last+1, put); err != nil {
		r.t.Fatal(err)
	}
	if err := l.Leases(ctx, nil, []keyspace.LeaseID{80}); err != nil {
		r.t.Fatal(err)
	}
	if err := l.Finish(ctx, last+1, 3); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "keys of lease 50") {
		r.t.Errorf("finished with keys of a lease that is gone: %v", err)
	}
	if err := l.Follow(ctx, last+2, gone); err != nil {
		r.t.Fatal(err)
	}
	return last + 2
}

// sameLease checks that a lease that has the id of one that ended in the load deletes its keys when it is revoked. A range
// that has still an attachment of the first one would take them without telling the lease's record.
func (r *rig) sameLease(id int64) {
	r.t.Helper()
	ctx := r.t.Context()
	if _, err := r.nodes[0].core.Leases().Grant(ctx, &pb.LeaseGrantRequest{ID: id, TTL: 600}); err != nil {
		r.t.Fatal(err)
	}
	keys := []string{"k0001/again", "k0999/again"}
	for i, key := range keys {
		if _, err := r.nodes[i].core.KV().Put(ctx, &pb.PutRequest{Key: []byte(key), Lease: id}); err != nil {
			r.t.Fatal(err)
		}
	}
	r.wantLeased(r.nodes[1], id, len(keys))
	if _, err := r.nodes[2].core.Leases().Revoke(ctx, &pb.LeaseRevokeRequest{ID: id}, func([][]byte) error { return nil }); err != nil {
		r.t.Fatal(err)
	}
	for _, key := range keys {
		if resp, err := r.nodes[0].core.KV().Range(ctx, &pb.RangeRequest{Key: []byte(key)}); err != nil || len(resp.Kvs) > 0 {
			r.t.Errorf("after the revoke: %v, %v", resp, err)
		}
	}
}

// asWritten checks that the cluster serves what was loaded.
func (r *rig) asWritten(at int64, keys int) {
	r.t.Helper()
	ctx := r.t.Context()
	living := int64(keys - keys/10 + 500)
	if n, rev := r.total(r.nodes[0]); n != living || rev != at {
		r.t.Errorf("%d keys at revision %d, want %d at %d", n, rev, living, at)
	}
	r.wantHash("after the load", at, r.hash(r.nodes[0], at).GetHash())
	resp, err := r.nodes[1].core.KV().Range(ctx, &pb.RangeRequest{Key: []byte("k0011/000011"), Revision: 36})
	if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].ModRevision != 36 || resp.Kvs[0].CreateRevision != 35 || resp.Kvs[0].Version != 2 {
		r.t.Errorf("at an old revision: %v, %v", resp, err)
	}
	if _, err = r.nodes[1].core.KV().Range(ctx, &pb.RangeRequest{Key: []byte("k"), Revision: 2}); kverror.Of(err) == nil || kverror.Of(err).Kind != kverror.Compacted {
		r.t.Errorf("below the compacted revision: %v", err)
	}
	if rev := r.mustPut(r.nodes[2], "k0011/000011", "next"); rev != at+1 {
		r.t.Errorf("the next put has revision %d, want %d", rev, at+1)
	}
	resp, err = r.nodes[0].core.KV().Range(ctx, &pb.RangeRequest{Key: []byte("k0011/000011")})
	if err != nil || resp.Kvs[0].CreateRevision != 35 || resp.Kvs[0].Version != 4 {
		r.t.Errorf("after the next put: %v, %v", resp, err)
	}
	// Of every 20 keys 5 have the lease, and none of these is deleted; the first was written without it.
	leased := keys/4 - 1
	r.wantLeased(r.nodes[0], 77, leased)
	time.Sleep(90 * time.Second)
	r.wait(2*time.Minute, "the lease expires", func() bool {
		n, _ := r.total(r.nodes[0])
		return n == living-int64(leased)
	})
	now := r.mustPut(r.nodes[0], "k0011/000011", "last")
	if _, err := r.nodes[0].core.KV().Compact(ctx, &pb.CompactionRequest{Revision: now, Physical: true}); err != nil {
		r.t.Error(err)
	}
	r.wantHash("after a compaction", now, r.hash(r.nodes[2], now).GetHash())
}

// A load that lacks something does not finish, and an abandoned one never serves.
func TestLoadedClusterLacksSomething(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		ctx := r.t.Context()
		vs, last := storeOf(100)
		l, _ := r.loaderOf(7)
		r.begin(l)
		if err := l.Bulk(ctx, each(vs)); err != nil {
			r.t.Fatal(err)
		}
		l, _ = r.loaderOf(7)
		r.begin(l)
		if err := l.Bulk(ctx, each(vs[:len(vs)-1])); err != nil { // the source has changed
			r.t.Fatal(err)
		}
		if err := l.Finish(ctx, last, 0); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "the cluster has 300 versions") {
			r.t.Errorf("finished with something else: %v", err)
		}
		if err := l.Abandon(ctx); err != nil {
			r.t.Fatal(err)
		}
		r.whileLoaded(kverror.Loading)
		r.stop(r.nodes...)
		r.start(r.nodes...)
		r.whileLoaded(kverror.Loading)
		if err := l.Finish(ctx, last, 0); status.Code(err) != codes.FailedPrecondition {
			r.t.Errorf("finished an abandoned load: %v", err)
		}
		r.stop(r.nodes...)
	})
}

// A cluster that was used is not loaded, and serves on.
func TestUsedClusterIsNotLoaded(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		r.mustPut(r.nodes[0], "k", "v")
		r.publish(r.nodes...)
		l, _ := r.loaderOf(7)
		_, err := l.Begin(r.t.Context())
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "only a new cluster can be loaded: this one may have used revisions up to") {
			r.t.Errorf("%v", err)
		}
		r.mustPut(r.nodes[0], "k", "w")
		r.stop(r.nodes...)
	})
}

// sortStore sorts versions as a bulk brings them.
func sortStore(vs []mvcc.Version) {
	slices.SortFunc(vs, func(a, b mvcc.Version) int {
		return cmp.Or(bytes.Compare(a.Key, b.Key), cmp.Compare(b.Mod, a.Mod))
	})
}
