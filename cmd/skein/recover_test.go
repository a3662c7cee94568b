package main

import (
	"bytes"
	"context"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/recovery"
)

// recoveredBackend is a cluster behind a recovery: one range up to a key, with a leader or without one.
type recoveredBackend struct {
	fakeBackend
	leader, end string
}

func (b recoveredBackend) Ranges(context.Context, *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	return &adminpb.RangeListResponse{Ranges: []*adminpb.Range{{Id: 1, End: []byte(b.end), Leader: b.leader, Replicas: []string{"n1"}}}}, nil
}

// serveRecovered serves the cluster, which is at revision 7, and returns its address.
func serveRecovered(t *testing.T, b recoveredBackend) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	adminapi.Register(s, b)
	etcdserverpb.RegisterKVServer(s, &oneKey{})
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// TestVerifyExitCodes: a script tells a cluster that is as the plan says from one that is not yet so, and from one that
// never will be.
func TestVerifyExitCodes(t *testing.T) {
	nobody, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	planOf := func(ceiling keyspace.Revision) string {
		p := &recovery.Plan{
			Ceiling: ceiling, Survivors: []recovery.NodeRow{{Node: 1, Name: "n1", State: "serving"}},
			Groups: []recovery.Verdict{{Verdict: recovery.Safe, Node: 1}, {Range: 1, Verdict: recovery.Safe, Node: 1}},
		}
		b, err := p.Encode()
		path := filepath.Join(dir, strconv.Itoa(int(ceiling)))
		if err == nil {
			err = writeNew(path, b)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	led, unled := serveRecovered(t, recoveredBackend{leader: "n1"}), serveRecovered(t, recoveredBackend{})
	gap := serveRecovered(t, recoveredBackend{end: "m"})
	for _, c := range []struct {
		endpoint string
		ceiling  keyspace.Revision
		code     int
		want     []string
	}{
		{led, 7, 0, []string{"all ranges have leaders and cover all keys", "above 7\n"}},
		{unled, 7, exitNotYet, []string{"NOT YET range 1", "has no leader yet: its replicas are on n1", "run verify again"}},
		{led, 8, exitRefused, []string{"WRONG   the revision is 7", "in 1 points"}},
		{gap, 7, exitRefused, []string{"WRONG   no range answers for", "NOT YET range 1", "in 1 points, which will not pass by themselves; 1 more wait"}},
		{"127.0.0.1:" + strconv.Itoa(nobody[0]), 7, exitRefused, []string{"its log says for whom it waits"}},
	} {
		var out, errs bytes.Buffer
		args := []string{"recover", "verify", "--endpoints", c.endpoint, "--plan", planOf(c.ceiling), "--command-timeout", "2s"}
		code := execute(t.Context(), args, nil, &out, &errs)
		text := out.String() + errs.String()
		for _, want := range c.want {
			if !strings.Contains(text, want) {
				t.Errorf("ceiling %d: %q lacks %q", c.ceiling, text, want)
			}
		}
		if code != c.code {
			t.Errorf("ceiling %d: exit code %d, want %d: %s", c.ceiling, code, c.code, text)
		}
	}
}
