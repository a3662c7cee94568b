package etcdfiles

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	clientsnapshot "go.etcd.io/etcd/client/v3/snapshot"
	"go.etcd.io/etcd/etcdutl/v3/snapshot"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
)

const (
	rootPassword = "secret"
	// manyKeys are deleted in one revision.
	manyKeys = 100_000
)

// workload fills an etcd: puts, deletes, transactions that write a key more than once,
// leases, compactions, and at last users. It returns the last revision.
func workload(t *testing.T, c *clientv3.Client, rng *rand.Rand) int64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var leases []clientv3.LeaseID
	for i := range 5 {
		l, err := c.Grant(ctx, int64(1000*(i+1)))
		must(err)
		leases = append(leases, l.ID)
	}
	key := func() string { return fmt.Sprintf("k/%03d", rng.IntN(150)) }
	value := func() string { return string(bytes.Repeat([]byte{byte(rng.IntN(256))}, rng.IntN(2000))) }
	put := func() clientv3.Op {
		if rng.IntN(3) == 0 {
			return clientv3.OpPut(key(), value(), clientv3.WithLease(leases[rng.IntN(len(leases))]))
		}
		return clientv3.OpPut(key(), value())
	}
	steps := func(n int) {
		for range n {
			var op clientv3.Op
			switch k := key(); rng.IntN(6) {
			case 0:
				op = clientv3.OpDelete(k)
			case 1:
				op = clientv3.OpDelete(k, clientv3.WithRange(k[:4]+"9"))
			case 2: // a put and a delete of one key; etcd refuses the other order
				ops := []clientv3.Op{clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpPut(k, value())}, nil), clientv3.OpTxn(nil, []clientv3.Op{clientv3.OpDelete(k)}, nil)}
				op = clientv3.OpTxn(nil, append(ops, clientv3.OpPut("other", value())), nil)
			default:
				op = put()
			}
			_, err := c.Do(ctx, op)
			must(err)
		}
	}
	steps(300)
	r, err := c.Get(ctx, "k")
	must(err)
	_, err = c.Compact(ctx, r.Header.Revision-100, clientv3.WithCompactPhysical())
	must(err)
	_, err = c.Revoke(ctx, leases[0])
	must(err)
	leases = leases[1:]
	for from := 0; from < manyKeys; from += 10_000 {
		var ops []clientv3.Op
		for i := range 10_000 {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("many/%06d", from+i), "v"))
		}
		_, err := c.Txn(ctx).Then(ops...).Commit()
		must(err)
	}
	_, err = c.Delete(ctx, "many/", clientv3.WithPrefix())
	must(err)
	steps(200)
	_, err = c.RoleAdd(ctx, "root")
	must(err)
	_, err = c.UserAdd(ctx, "root", rootPassword)
	must(err)
	_, err = c.UserGrantRole(ctx, "root", "root")
	must(err)
	_, err = c.RoleAdd(ctx, "reader")
	must(err)
	_, err = c.RoleGrantPermission(ctx, "reader", "k/", "k0", clientv3.PermissionType(clientv3.PermRead))
	must(err)
	_, err = c.UserAddWithOptions(ctx, "certificate", "", &clientv3.UserAddOptions{NoPassword: true})
	must(err)
	_, err = c.UserGrantRole(ctx, "certificate", "reader")
	must(err)
	r, err = c.Get(ctx, "k")
	must(err)
	_, err = c.AuthEnable(ctx)
	must(err)
	return r.Header.Revision
}

// again reads a file and writes it again for an etcd.
func again(t *testing.T, path string, forEtcd etcdfile.EtcdVersion, latest bool) (string, *etcdfile.Info) {
	t.Helper()
	f, err := etcdfile.Open(t.Context(), path, etcdfile.Options{SkipHashCheck: filepath.Base(path) == "db"})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	vs, err := f.Versions(t.Context(), etcdfile.ReadOptions{Latest: latest, TempDir: t.TempDir(), RunBytes: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer vs.Close()
	s := etcdfile.NewSorter(etcdfile.SorterOptions{Order: etcdfile.ByRevision, TempDir: t.TempDir(), RunBytes: 4 << 20, Compacted: vs.Compacted()})
	defer s.Close()
	for v, err := vs.Next(); !errors.Is(err, io.EOF); v, err = vs.Next() {
		if err == nil {
			err = s.Add(v)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	i := f.Info()
	state, err := i.Auth.Rights()
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "again.db")
	w, err := etcdfile.Create(to, etcdfile.Header{
		Revision: i.Revision, Compacted: vs.Compacted(), EtcdVersion: forEtcd, Leases: i.Leases, Auth: etcdfile.AuthOf(state), TransactionBytes: 2 << 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Abort(); err != nil {
			t.Error(err)
		}
	}()
	if err := w.AddAll(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Finish(t.Context()); err != nil {
		t.Fatal(err)
	}
	return to, i
}

// content is what clients see of an etcd.
type content struct {
	hash      uint32
	compacted int64
	// atCompacted and atEnd are the states; events are those between them.
	atCompacted, atEnd []string
	events             []string
	leases, auth       []string
}

// look returns all that clients see, from the compacted revision on.
func look(t *testing.T, c *clientv3.Client, compacted, end int64) content {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var all content
	h, err := c.HashKV(ctx, c.Endpoints()[0], end)
	must(err)
	all.hash, all.compacted = h.Hash, h.CompactRevision
	state := func(rev int64) (texts []string) {
		r, err := c.Get(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(rev))
		must(err)
		if r.Header.Revision != end {
			t.Errorf("the revision is %d, want %d", r.Header.Revision, end)
		}
		for _, kv := range r.Kvs {
			texts = append(texts, textOf(kv))
		}
		return texts
	}
	all.atEnd = state(0)
	if compacted > 0 {
		all.atCompacted = state(compacted)
	}
	if compacted < end {
		all.events = events(ctx, t, c, compacted+1, end)
	}
	leases, err := c.Leases(ctx)
	must(err)
	for _, l := range leases.Leases {
		ttl, err := c.TimeToLive(ctx, l.ID, clientv3.WithAttachedKeys())
		must(err)
		slices.SortFunc(ttl.Keys, bytes.Compare)
		all.leases = append(all.leases, fmt.Sprintf("%x granted %d keys %q", int64(l.ID), ttl.GrantedTTL, ttl.Keys))
	}
	slices.Sort(all.leases)
	users, err := c.UserList(ctx)
	must(err)
	for _, u := range users.Users {
		got, err := c.UserGet(ctx, u)
		must(err)
		all.auth = append(all.auth, fmt.Sprintf("user %s: %v", u, got.Roles))
	}
	roles, err := c.RoleList(ctx)
	must(err)
	for _, r := range roles.Roles {
		got, err := c.RoleGet(ctx, r)
		must(err)
		if r == "root" { // etcd 3.5 shows no permission of it, 3.6 one that stands in no record
			got.Perm = nil
		}
		all.auth = append(all.auth, fmt.Sprintf("role %s: %v", r, got.Perm))
	}
	status, err := c.AuthStatus(ctx)
	must(err)
	all.auth = append(all.auth, fmt.Sprintf("enabled %t, revision %d", status.Enabled, status.AuthRevision))
	return all
}

func textOf(kv *mvccpb.KeyValue) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(kv)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// events returns all events of a span of revisions.
func events(ctx context.Context, t *testing.T, c *clientv3.Client, from, to int64) (texts []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for r := range c.Watch(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(from)) {
		if err := r.Err(); err != nil {
			t.Fatal(err)
		}
		for _, e := range r.Events {
			texts = append(texts, fmt.Sprint(e.Type, textOf(e.Kv)))
		}
		if n := len(r.Events); n > 0 && r.Events[n-1].Kv.ModRevision >= to {
			return texts
		}
	}
	t.Fatalf("the watch ended after %d events: %v", len(texts), ctx.Err())
	return nil
}

func differ(t *testing.T, what string, got, want []string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d, want %d", what, len(got), len(want))
	}
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			t.Errorf("%s: number %d is %q, want %q", what, i, got[i], want[i])
			return
		}
	}
}

// TestAgain is the whole way: an etcd's snapshot, read by key, sorted by revision, written,
// restored by etcd's tools. Each etcd on it answers as the one on the original.
func TestAgain(t *testing.T) {
	origin := startEmbedded(t, filepath.Join(t.TempDir(), "origin"))
	rev := workload(t, origin.dial(t, "", ""), rand.New(rand.NewPCG(1, 2)))
	original := filepath.Join(t.TempDir(), "original.db")
	if _, err := clientsnapshot.SaveWithVersion(t.Context(), zap.NewNop(), clientv3.Config{
		Endpoints: []string{origin.endpoint}, Username: "root", Password: rootPassword, Logger: zap.NewNop(),
	}, original); err != nil {
		t.Fatal(err)
	}
	origin.close()
	first := version{name: "3.7"}.start(t, original)
	status, err := snapshot.NewV3(zap.NewNop()).Status(original)
	if err != nil {
		t.Fatal(err)
	}
	firstClient := first.dial(t, "root", rootPassword)
	var want content
	for _, v := range versions(t) {
		t.Run(v.name, func(t *testing.T) {
			file, info := again(t, original, etcdfile.EtcdVersion(v.name), false)
			if int64(info.Revision) != rev || info.Compacted == 0 {
				t.Errorf("revision %d, compacted %d, want revision %d", info.Revision, info.Compacted, rev)
			}
			got, err := snapshot.NewV3(zap.NewNop()).Status(file)
			if err != nil || got.Revision != rev || got.TotalKey != status.TotalKey {
				t.Errorf("etcdutl's status is %+v, %v, and %+v for the original", got, err, status)
			}
			if want.events == nil {
				want = look(t, firstClient, int64(info.Compacted), rev)
			}
			compare(t, v.start(t, file), want, info, rev)
		})
	}
	t.Run("latest", func(t *testing.T) {
		file, info := again(t, original, etcdfile.Etcd35, true)
		info.Compacted = keyspace.Revision(rev)
		latest := want
		latest.events, latest.atCompacted, latest.compacted = nil, want.atEnd, rev
		latest.hash = 0
		compare(t, version{name: "3.7"}.start(t, file), latest, info, rev)
	})
}

// TestBumped is traps 111 and 113 by etcd's own hands. etcdutl restores with a revision that
// is higher, and schedules a compaction there. Its directory is read before an etcd has run on
// it and again after.
func TestBumped(t *testing.T) {
	const bump = 1_000_000
	original := filepath.Join(t.TempDir(), "original.db")
	s := startEmbedded(t, filepath.Join(t.TempDir(), "origin"))
	c := s.dial(t, "", "")
	sample(t, c)
	if _, err := clientsnapshot.SaveWithVersion(t.Context(), zap.NewNop(), clientv3.Config{
		Endpoints: []string{s.endpoint}, Username: "root", Password: rootPassword, Logger: zap.NewNop(),
	}, original); err != nil {
		t.Fatal(err)
	}
	s.close()
	dir := restoreEmbedded(t, original, bump)
	db := filepath.Join(dir, "member", "snap", "db")
	before, info := again(t, db, etcdfile.Etcd37, false)
	rev := int64(info.Revision)
	if rev <= bump || info.Compacted != info.Revision {
		t.Errorf("revision %d, compacted %d", info.Revision, info.Compacted)
	}
	running := startEmbedded(t, dir)
	want := look(t, running.dial(t, "root", rootPassword), rev, rev)
	running.close()
	want.hash = 0 // the record with the empty key is not written again: the compaction says the revision
	after, _ := again(t, db, etcdfile.Etcd37, false)
	for _, file := range []string{before, after} {
		compare(t, version{name: "3.7"}.start(t, file), want, info, rev)
	}
}

// compare compares the content of an etcd, and then writes to it.
func compare(t *testing.T, s *server, want content, info *etcdfile.Info, rev int64) {
	t.Helper()
	c := s.dial(t, "root", rootPassword)
	got := look(t, c, int64(info.Compacted), rev)
	if want.hash != 0 && (got.hash != want.hash) {
		t.Errorf("HashKV is %08x, want %08x", got.hash, want.hash)
	}
	if got.compacted != want.compacted {
		t.Errorf("compacted revision %d, want %d", got.compacted, want.compacted)
	}
	differ(t, "state at the end", got.atEnd, want.atEnd)
	differ(t, "state at the compacted revision", got.atCompacted, want.atCompacted)
	differ(t, "events", got.events, want.events)
	differ(t, "leases", got.leases, want.leases)
	differ(t, "rights", got.auth, want.auth)
	if len(want.leases) == 0 || len(want.atEnd) == 0 {
		t.Errorf("the original has %d leases and %d keys", len(want.leases), len(want.atEnd))
	}
	put, err := c.Put(t.Context(), "next", "")
	if err != nil || put.Header.Revision != rev+1 {
		t.Errorf("the next write: %v, %v, want revision %d", put, err, rev+1)
	}
}
