package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embedtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open opens a client of endpoints, which is closed at the end of the test.
func open(t testing.TB, cfg client.Config) *client.Client {
	t.Helper()
	cfg.Etcd.Logger = zap.NewNop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := client.Open(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func at(endpoints ...string) client.Config {
	return client.Config{Etcd: clientv3.Config{Endpoints: endpoints}}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bare takes out of a message what differs between any two answers: headers. It returns the revision.
func bare(m proto.Message) int64 {
	var h *pb.ResponseHeader
	switch r := m.(type) {
	case *pb.RangeResponse:
		h, r.Header = r.GetHeader(), nil
	case *pb.PutResponse:
		h, r.Header = r.GetHeader(), nil
	case *pb.DeleteRangeResponse:
		h, r.Header = r.GetHeader(), nil
	case *pb.TxnResponse:
		h, r.Header = r.GetHeader(), nil
	}
	if h.GetMemberId() == 0 || h.GetClusterId() == 0 {
		return -1
	}
	return h.GetRevision()
}

// steps are requests of each kind, with errors among them, as functions of a prefix of keys.
func steps(prefix string) []proto.Message {
	key := func(k string) []byte { return []byte(prefix + k) }
	end := []byte(prefix + "\xff")
	putOp := func(k, v string) *pb.RequestOp {
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: key(k), Value: []byte(v)}}}
	}
	return []proto.Message{
		&pb.PutRequest{Key: key("a"), Value: []byte("1")},
		&pb.PutRequest{Key: key("a"), Value: []byte("2"), PrevKv: true},
		&pb.PutRequest{Key: key("b"), Value: []byte("3")},
		&pb.PutRequest{},
		&pb.PutRequest{Key: key("no"), IgnoreValue: true},
		&pb.PutRequest{Key: key("a"), IgnoreValue: true, Value: []byte("x")},
		&pb.PutRequest{Key: key("a"), Lease: 12345},
		&pb.PutRequest{Key: key("large"), Value: make([]byte, 3<<19)},
		&pb.RangeRequest{Key: key("a")},
		&pb.RangeRequest{Key: key(""), RangeEnd: end},
		&pb.RangeRequest{Key: key(""), RangeEnd: end, Limit: 1},
		&pb.RangeRequest{Key: key(""), RangeEnd: end, CountOnly: true},
		&pb.RangeRequest{Key: key("a"), Serializable: true, KeysOnly: true},
		&pb.RangeRequest{Key: key("a"), Revision: 1 << 40},
		&pb.RangeRequest{},
		&pb.TxnRequest{
			Compare: []*pb.Compare{{Key: key("a"), Target: pb.Compare_VALUE, TargetUnion: &pb.Compare_Value{Value: []byte("2")}}},
			Success: []*pb.RequestOp{putOp("t", "4"), {Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: key("b")}}}},
			Failure: []*pb.RequestOp{putOp("f", "5")},
		},
		&pb.TxnRequest{Success: []*pb.RequestOp{putOp("d", "1"), putOp("d", "2")}},
		&pb.TxnRequest{},
		&pb.DeleteRangeRequest{Key: key("a"), PrevKv: true},
		&pb.DeleteRangeRequest{Key: key("a")},
		&pb.DeleteRangeRequest{Key: key(""), RangeEnd: end},
		&pb.DeleteRangeRequest{},
	}
}

func byPipe(ctx context.Context, c *client.Client, m proto.Message) (proto.Message, error) {
	switch r := m.(type) {
	case *pb.RangeRequest:
		return client.Do(ctx, c, r).Range()
	case *pb.PutRequest:
		return client.Do(ctx, c, r).Put()
	case *pb.DeleteRangeRequest:
		return client.Do(ctx, c, r).Delete()
	}
	return client.Do(ctx, c, m.(*pb.TxnRequest)).Txn()
}

func byCall(ctx context.Context, c *client.Client, m proto.Message) (proto.Message, error) {
	kv := pb.NewKVClient(c.Etcd().ActiveConnection())
	switch r := m.(type) {
	case *pb.RangeRequest:
		return kv.Range(ctx, r)
	case *pb.PutRequest:
		return kv.Put(ctx, r)
	case *pb.DeleteRangeRequest:
		return kv.DeleteRange(ctx, r)
	}
	return kv.Txn(ctx, m.(*pb.TxnRequest))
}

// normal has what two runs of the same requests have in common: keys without prefix, revisions from a base on.
func normal(m proto.Message, prefix string, base int64) string {
	pair := func(kv *mvccpb.KeyValue) {
		if kv != nil {
			kv.Key = bytes.TrimPrefix(kv.GetKey(), []byte(prefix))
			kv.CreateRevision, kv.ModRevision = kv.GetCreateRevision()-base, kv.GetModRevision()-base
		}
	}
	pairs := func(m proto.Message) {
		switch r := m.(type) {
		case *pb.RangeResponse:
			for _, kv := range r.GetKvs() {
				pair(kv)
			}
		case *pb.PutResponse:
			pair(r.GetPrevKv())
		case *pb.DeleteRangeResponse:
			for _, kv := range r.GetPrevKvs() {
				pair(kv)
			}
		}
	}
	pairs(m)
	if txn, ok := m.(*pb.TxnResponse); ok {
		for _, op := range txn.GetResponses() {
			if r := op.GetResponseRange(); r != nil {
				r.Header = nil
				pairs(r)
			}
			if r := op.GetResponsePut(); r != nil {
				r.Header = nil
			}
		}
	}
	return fmt.Sprint(m)
}

// TestSameAnswers: the same requests have the same answers, errors and effects by the pipe as by etcd's calls.
func TestSameAnswers(t *testing.T) {
	c := open(t, at(embedtest.New(t).Endpoints()...))
	type run func(context.Context, *client.Client, proto.Message) (proto.Message, error)
	var got [2][]string
	for i, do := range []run{byPipe, byCall} {
		prefix := []string{"pipe/", "call/"}[i]
		first, err := c.Etcd().Get(t.Context(), "x")
		must(t, err)
		base := first.Header.Revision
		for _, m := range steps(prefix) {
			resp, err := do(t.Context(), c, m)
			text := ""
			if err != nil {
				s := status.Convert(err)
				if e := (rpctypes.EtcdError{}); errors.As(rpctypes.Error(err), &e) {
					text = fmt.Sprintf("%s: %s", e.Code(), e.Error())
				} else {
					text = fmt.Sprintf("%s: %s", s.Code(), s.Message())
				}
			} else {
				revision := bare(resp) - base
				text = fmt.Sprintf("+%d %s", revision, normal(resp, prefix, base))
			}
			got[i] = append(got[i], text)
		}
	}
	for i, m := range steps("") {
		if got[0][i] != got[1][i] {
			t.Errorf("%T %.100v:\nby the pipe %s\nby a call   %s", m, m, got[0][i], got[1][i])
		}
	}
	if joined := strings.Join(got[1], "\n"); strings.Count(joined, "etcdserver:") < 8 {
		t.Errorf("the requests do not have the errors that they are for:\n%s", joined)
	}
}

// TestCompareAndPut: it puts only at the revision, and says what there is.
func TestCompareAndPut(t *testing.T) {
	c := open(t, at(embedtest.New(t).Endpoints()...))
	for i, step := range []struct {
		at   func(last int64) int64
		want bool
	}{{func(int64) int64 { return 0 }, true}, {func(int64) int64 { return 0 }, false}, {func(last int64) int64 { return last }, true}, {func(last int64) int64 { return last + 1 }, false}} {
		now, err := c.Get(t.Context(), "k")
		must(t, err)
		var last int64
		if kvs := now.GetKvs(); len(kvs) > 0 {
			last = kvs[0].GetModRevision()
		}
		got, err := c.CompareAndPut(t.Context(), "k", fmt.Sprint("v", i), step.at(last))
		must(t, err)
		if got.GetSucceeded() != step.want {
			t.Errorf("step %d: %v", i, got)
		}
		if !step.want && got.GetResponses()[0].GetResponseRange().GetKvs()[0].GetModRevision() != last {
			t.Errorf("step %d does not say what there is: %v", i, got)
		}
	}
}

// TestManyAtOnce: many goroutines and futures have each their own answer.
func TestManyAtOnce(t *testing.T) {
	c := open(t, at(embedtest.New(t).Endpoints()...))
	var wg sync.WaitGroup
	for g := range 50 {
		wg.Go(func() {
			var futures []*client.Future
			for i := range 40 {
				key := fmt.Appendf(nil, "k/%03d/%03d", g, i)
				futures = append(futures, client.Do(t.Context(), c, &pb.PutRequest{Key: key, Value: key}))
			}
			for _, f := range futures {
				if err := f.Err(); err != nil {
					t.Error(err)
				}
			}
			for i := range 40 {
				key := fmt.Sprintf("k/%03d/%03d", g, i)
				if r, err := c.Get(t.Context(), key); err != nil || len(r.GetKvs()) != 1 || string(r.GetKvs()[0].GetValue()) != key {
					t.Error(key, r, err)
				}
			}
		})
	}
	wg.Wait()
	n := 0
	for kv, err := range c.Range(t.Context(), &pb.RangeRequest{Key: []byte("k/"), RangeEnd: []byte("k0")}) {
		must(t, err)
		if want := fmt.Sprintf("k/%03d/%03d", n/40, n%40); string(kv.GetKey()) != want {
			t.Fatalf("key %d is %q, want %q", n, kv.GetKey(), want)
		}
		n++
	}
	if n != 2000 {
		t.Errorf("%d keys in all pages", n)
	}
}

// TestRangeIsOfOneRevision: pages that come after a change do not have it, and a limit is that of all pages.
func TestRangeIsOfOneRevision(t *testing.T) {
	cfg := at(embedtest.New(t).Endpoints()...)
	cfg.PageKeys = 2
	c := open(t, cfg)
	for i := range 7 {
		_, err := c.Put(t.Context(), fmt.Sprint("k", i), "old")
		must(t, err)
	}
	all := &pb.RangeRequest{Key: []byte("k"), RangeEnd: []byte("l")}
	n := 0
	for kv, err := range c.Range(t.Context(), all) {
		must(t, err)
		if n == 0 {
			_, err := c.Put(t.Context(), "k6", "new")
			must(t, err)
		}
		if string(kv.GetValue()) != "old" {
			t.Error(kv)
		}
		n++
	}
	if n != 7 {
		t.Errorf("%d keys, want 7", n)
	}
	n, all.Limit = 0, 5
	for _, err := range c.Range(t.Context(), all) {
		must(t, err)
		n++
	}
	if n != 5 {
		t.Errorf("%d keys within a limit of 5", n)
	}
	for _, err := range c.Range(t.Context(), &pb.RangeRequest{}) {
		if !errors.Is(err, rpctypes.ErrEmptyKey) {
			t.Error(err)
		}
	}
}

// TestContexts: a call whose context has ended before is not sent, and one without time gets the context's error.
func TestContexts(t *testing.T) {
	c := open(t, at(embedtest.New(t).Endpoints()...))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Get(ended, "k"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	r, err := c.Get(t.Context(), "k")
	if err != nil || len(r.GetKvs()) != 0 {
		t.Error(r, err)
	}
}

// TestClosedClient: nothing hangs.
func TestClosedClient(t *testing.T) {
	s := embedtest.New(t)
	cfg := at(s.Endpoints()...)
	cfg.Etcd.Logger = zap.NewNop()
	c, err := client.Open(t.Context(), cfg)
	must(t, err)
	var futures []*client.Future
	for range 100 {
		futures = append(futures, client.Do(t.Context(), c, &pb.PutRequest{Key: []byte("k")}))
	}
	must(t, c.Close())
	for _, f := range futures {
		if err := f.Err(); err != nil && !errors.Is(err, client.ErrClosed) && !errors.Is(err, client.ErrUnknownFate) {
			t.Error(err)
		}
	}
	if _, err := c.Put(t.Context(), "k", "v"); !errors.Is(err, client.ErrClosed) {
		t.Error(err)
	}
}

// TestNobodyThere: Open ends with its context, and says what is wrong.
func TestNobodyThere(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	cfg := at("127.0.0.1:1")
	cfg.Etcd.Logger = zap.NewNop()
	if c, err := client.Open(ctx, cfg); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Error(c, err)
	}
}

// TestUsers: a pipe has the rights of its user, and a right that is taken away is not there for the next operation of an open
// pipe. A wrong password opens none.
func TestUsers(t *testing.T) {
	s := embedtest.New(t, embedtest.WithConfig(func(c *config.Config) { c.BcryptCost = 4 }))
	root := s.Client()
	for _, user := range []string{"root", "u"} {
		_, err := root.UserAdd(t.Context(), user, "pw")
		must(t, err)
		_, err = root.RoleAdd(t.Context(), user)
		must(t, err)
		_, err = root.UserGrantRole(t.Context(), user, user)
		must(t, err)
	}
	_, err := root.RoleGrantPermission(t.Context(), "u", "k", "l", clientv3.PermissionType(clientv3.PermReadWrite))
	must(t, err)
	nobody := open(t, at(s.Endpoints()...)) // before users are checked
	_, err = root.AuthEnable(t.Context())
	must(t, err)
	if _, err := nobody.Put(t.Context(), "k", "v"); !errors.Is(err, rpctypes.ErrUserEmpty) {
		t.Error(err)
	}
	as := func(user, password string) client.Config {
		cfg := at(s.Endpoints()...)
		cfg.Etcd.Username, cfg.Etcd.Password = user, password
		return cfg
	}
	admin, c := open(t, as("root", "pw")), open(t, as("u", "pw"))
	_, err = c.Put(t.Context(), "k", "v")
	must(t, err)
	if _, err := c.Put(t.Context(), "x", "v"); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Error(err)
	}
	if _, err := c.Txn(t.Context(), &pb.TxnRequest{Compare: []*pb.Compare{{Key: []byte("x")}}}); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Error(err)
	}
	for range 3 { // each change makes the tokens old
		_, err = admin.Etcd().RoleRevokePermission(t.Context(), "u", "k", "l")
		must(t, err)
		if _, err := c.Put(t.Context(), "k", "v"); !errors.Is(err, rpctypes.ErrPermissionDenied) {
			t.Error(err)
		}
		if _, err := c.Get(t.Context(), "k"); !errors.Is(err, rpctypes.ErrPermissionDenied) {
			t.Error(err)
		}
		_, err := admin.Etcd().RoleGrantPermission(t.Context(), "u", "k", "l", clientv3.PermissionType(clientv3.PermReadWrite))
		must(t, err)
		_, err = c.Put(t.Context(), "k", "v")
		must(t, err)
	}
	wrong := as("u", "wrong")
	wrong.Etcd.Logger = zap.NewNop()
	if _, err := client.Open(t.Context(), wrong); !errors.Is(err, rpctypes.ErrAuthFailed) {
		t.Error(err)
	}
}
