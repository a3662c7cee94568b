package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/internal/ports"
)

// oneKey is a store with the key "a". It has no users and no leases.
type oneKey struct {
	etcdserverpb.UnimplementedKVServer
	etcdserverpb.UnimplementedLeaseServer
	value string
}

func (s *oneKey) Range(_ context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	a := &etcdserverpb.RangeResponse{Header: &etcdserverpb.ResponseHeader{Revision: 7}}
	if string(r.Key) <= "a" && (string(r.RangeEnd) == "\x00" || string(r.RangeEnd) > "a") {
		a.Kvs, a.Count = []*mvccpb.KeyValue{{Key: []byte("a"), Value: []byte(s.value), CreateRevision: 2, ModRevision: 2, Version: 1}}, 1
	}
	return a, nil
}

func (s *oneKey) LeaseLeases(context.Context, *etcdserverpb.LeaseLeasesRequest) (*etcdserverpb.LeaseLeasesResponse, error) {
	return &etcdserverpb.LeaseLeasesResponse{}, nil
}

// serve serves a store and returns its address.
func serve(t *testing.T, s *oneKey) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	etcdserverpb.RegisterKVServer(server, s)
	etcdserverpb.RegisterLeaseServer(server, s)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// TestDiffExitCodes: a script tells equal sides, different ones, one that cannot be read and wrong
// usage apart.
func TestDiffExitCodes(t *testing.T) {
	a, same, other := serve(t, &oneKey{value: "1"}), serve(t, &oneKey{value: "1"}), serve(t, &oneKey{value: "2"})
	nobody, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{a + " " + same, 0, "A at revision 7: 1 keys; B at revision 7: 1 keys\nleases: 0 in A, 0 in B\nequal\n"},
		{a + " " + other, exitDiffers, `key "a": unequal: value "1" and "2"`},
		{a + " " + other + " --show 0", exitDiffers, "and 1 more\n"},
		{a + " " + other + " --prefix b", 0, "leases were not compared: with --prefix only keys are\nequal\n"},
		{fmt.Sprint(a, " 127.0.0.1:", nobody[0]), exitRefused, "does not answer: context deadline exceeded"},
		{a, exitUsage, "accepts 2 arg(s), received 1"},
		{a + " " + same + " --revision -1", exitUsage, "--revision -1: a revision is above 0"},
		{a + " " + same + " --prefix YQ== --key-format base64", 0, "A at revision 7: 1 keys"},
		{a + " " + same + ` --prefix "\x62"`, 0, "A at revision 7: 0 keys"},
		{a + " " + same + " --prefix YQ= --key-format base64", exitUsage, "YQ= is no base64 key"},
		{a + " " + same + " --key-format octal", exitUsage, "there are quoted, hex and base64"},
		{a + " " + same + " --b-cacert /nowhere", exitUsage, "store B: --cacert: open /nowhere"},
		{a + " " + same + " --a-password x", exitUsage, "store A: --password without a user"},
	} {
		var out, errs bytes.Buffer
		code := execute(t.Context(), append([]string{"diff"}, strings.Fields(c.args)...), nil, &out, &errs)
		if text := out.String() + errs.String(); code != c.code || !strings.Contains(text, c.want) {
			t.Errorf("skein diff %s: code %d: %s", c.args, code, text)
		}
	}
}
