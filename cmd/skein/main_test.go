package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

// fakeBackend is a cluster of one node with one range, which refuses to split at "m".
type fakeBackend struct{}

func (fakeBackend) Ranges(_ context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	if q.GetNode() == "n9" {
		return nil, &adminapi.Refusal{Reason: "there is no node n9", NextStep: "see skein node list"}
	}
	if string(q.GetKey()) == "\x00" {
		return &adminpb.RangeListResponse{}, nil
	}
	return &adminpb.RangeListResponse{Ranges: []*adminpb.Range{{Id: 1, Generation: 1, Leader: "n1", Replicas: []string{"n1"}, State: "asleep"}}}, nil
}

func (fakeBackend) SplitRange(_ context.Context, key []byte) (left, right *adminpb.Range, err error) {
	if string(key) == "m" {
		return nil, nil, &adminapi.Refusal{Reason: "range 1 begins there already", NextStep: "see skein range list"}
	}
	return &adminpb.Range{Id: 1, End: key}, &adminpb.Range{Id: 2, Start: key}, nil
}

func (fakeBackend) ShowRange(_ context.Context, id keyspace.RangeID) (*adminpb.RangeShowResponse, error) {
	if id != 1 {
		return nil, &adminapi.Refusal{Reason: "there is no range " + id.String(), NextStep: "see skein range list"}
	}
	// A move from n5 to n4 has been given up.
	return &adminpb.RangeShowResponse{Range: &adminpb.Range{Id: 1, Leader: "n4", Replicas: []string{"n4", "n5"}, Members: []*adminpb.Replica{{Node: "n4", Role: "voter"}, {Node: "n5", Role: "voter"}}}}, nil
}

func (fakeBackend) Nodes(context.Context) (*adminpb.NodeListResponse, error) {
	return nil, kverror.NoLeader
}

func (fakeBackend) MoveRange(_ context.Context, id keyspace.RangeID, from, to string) (*adminpb.Operation, error) {
	if to != "n4" {
		return nil, &adminapi.Refusal{Reason: "there is no node " + to, NextStep: "see skein node list"}
	}
	return &adminpb.Operation{Id: 7, Range: uint64(id), Kind: "move", From: from, To: to, Why: "asked for"}, nil
}

func (fakeBackend) MergeRange(context.Context, keyspace.RangeID) (*adminpb.Operation, error) {
	return &adminpb.Operation{}, nil
}

func (fakeBackend) JoinNode(context.Context, *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	return nil, kverror.NoLeader
}

func (fakeBackend) TransferLeader(context.Context, keyspace.RangeID, string) error { return nil }

func (fakeBackend) PlacementGroup(context.Context) (*adminpb.PlacementShowResponse, error) {
	return &adminpb.PlacementShowResponse{Leader: "n1", Term: 3, Replicas: []*adminpb.PlacementReplica{{Node: "n1", ReplicaId: 1, Role: "voter"}}, Replication: &adminpb.Replication{Factor: 3, Ranges: 2}}, nil
}

// MovePlacement succeeds to n1, which has the replica, and is given up to n4. So does a removal
// from n3, and is given up from n1.
func (fakeBackend) MovePlacement(_ context.Context, from, to string) (*adminpb.Operation, error) {
	if to != "n4" && to != "n1" && (to != "" || from == "n9") {
		return nil, &adminapi.Refusal{Reason: "there is no node " + cmp.Or(to, from), NextStep: "see skein node list"}
	}
	return &adminpb.Operation{Id: 8, Kind: "move", From: from, To: to, Why: "asked for"}, nil
}

func (fakeBackend) TransferPlacement(context.Context, string) error { return nil }

// SetReplication takes three and five.
func (fakeBackend) SetReplication(_ context.Context, factor int, _ bool) (*adminpb.PlacementSetReplicationResponse, error) {
	if factor != 3 && factor != 5 {
		return nil, &adminapi.Refusal{Reason: "7 voters need 7 nodes", NextStep: "add 2"}
	}
	return &adminpb.PlacementSetReplicationResponse{Before: 3, After: int64(factor), Ranges: 2, Added: int64(factor-3) * 2}, nil
}

// SetMergeAfter takes what is at least five minutes.
func (fakeBackend) ClusterVersion(context.Context) (*adminpb.ClusterShowResponse, error) {
	return &adminpb.ClusterShowResponse{Version: 3, Next: 4, Nodes: []*adminpb.NodeVersions{{Name: "n1", Build: "0.2.0", Oldest: 3, Newest: 4}}}, nil
}

func (fakeBackend) Upgrade(context.Context) (uint32, error) {
	return 0, &adminapi.Refusal{Reason: "the cluster is not raised to version 4", NextStep: "skein cluster show says what each node reads"}
}

func (fakeBackend) Holds(context.Context) (*adminpb.HoldListResponse, error) {
	return &adminpb.HoldListResponse{Revision: 9, Holds: []*adminpb.Hold{{Id: "00000000000000b0", Kind: "backup", Owner: "db7", Revision: 4}}}, nil
}

// Series are none.
func (fakeBackend) Series(context.Context, int64) (*adminpb.SeriesResponse, error) {
	return &adminpb.SeriesResponse{}, nil
}

// Survey is of three nodes, two of which are dead.
func (fakeBackend) Survey(context.Context) (*adminpb.SurveyResponse, error) {
	row := func(name string, since int64) *adminpb.NodeSurvey {
		n := &adminpb.NodeSurvey{Node: &adminpb.Node{Name: name, State: "serving", Alive: true, Ranges: 1, Placement: true}}
		if since != 0 {
			n.Node.State, n.Node.Alive, n.Node.SinceUnixMs, n.Error = adminapi.StateDead, false, since, "no route"
		}
		return n
	}
	const now = 1_800_000_000_000
	return &adminpb.SurveyResponse{
		Asked: "n1", UnixMs: now, Stale: true, Nodes: []*adminpb.NodeSurvey{row("n3", now-15_000), row("n1", 0), row("n2", now-12_000)}, Ranges: 1,
		Outages: []*adminpb.Outage{{Placement: true, WaitsFor: []string{"n2", "n3"}}, {Ranges: 1, Ids: []uint64{1}, WaitsFor: []string{"n2", "n3"}}},
	}, nil
}

// Heat has one column, as wide as the time that was asked for. Where the time was to begin by the clock of who asks, it refuses.
func (fakeBackend) Heat(_ context.Context, q *adminpb.HeatRequest) (*adminpb.HeatResponse, error) {
	if q.GetFromUnixSeconds() != 0 || q.GetToUnixSeconds() != 0 {
		return nil, &adminapi.Refusal{Reason: "the clocks differ", NextStep: "ask for a length of time"}
	}
	return &adminpb.HeatResponse{
		Starts: [][]byte{[]byte("k")}, Columns: []*adminpb.HeatColumn{{StartUnixSeconds: 1_800_000_000, Seconds: uint32(q.GetLastSeconds())}},
		Writes: []uint64{600}, Reads: []uint64{0}, Bytes: []uint64{6000}, UnixMs: 1_800_000_100_000,
	}, nil
}

func (fakeBackend) Watchers(context.Context, string, int) (*adminpb.WatcherListResponse, error) {
	return &adminpb.WatcherListResponse{Watchers: []*adminpb.Watcher{{Node: "n1", Client: "127.0.0.1:4711", Key: []byte("k"), Behind: 7}}, Total: 1}, nil
}

func (fakeBackend) Slow(context.Context) (*adminpb.SlowResponse, error) {
	return &adminpb.SlowResponse{Calls: []*adminpb.SlowCall{{Node: 1, NodeName: "n1", AtUnixNanos: 1_800_000_000_000_000_000, Method: "/etcdserverpb.KV/Put", RangeId: 4, Micros: 412_000, Cause: "quorum: node n3 last"}}}, nil
}

func (fakeBackend) ReleaseHold(context.Context, string) (*adminpb.Hold, error) {
	return nil, &adminapi.Refusal{Reason: "there is no such hold", NextStep: "skein hold list shows those that there are"}
}

func (fakeBackend) HoldUpgrade(context.Context, bool) error { return nil }

func (fakeBackend) SetMergeAfter(_ context.Context, after *time.Duration) error {
	if after != nil && *after != 0 && *after < 5*time.Minute {
		return &adminapi.Refusal{Reason: "ranges cannot be merged after " + after.String(), NextStep: "give more"}
	}
	return nil
}

func (fakeBackend) Operations(context.Context) (*adminpb.OperationListResponse, error) {
	return &adminpb.OperationListResponse{Paused: true}, nil
}

// ShowNode is of n2, which is drained and leads nothing, and of n3, which is decommissioned
// and never becomes empty.
func (fakeBackend) ShowNode(_ context.Context, node string) (*adminpb.NodeShowResponse, error) {
	switch node {
	case "n2", "b":
		return &adminpb.NodeShowResponse{Node: &adminpb.Node{Id: "b", Name: "n2", State: "draining", Ranges: 1}}, nil
	case "n3", "c":
		return &adminpb.NodeShowResponse{Node: &adminpb.Node{Id: "c", Name: "n3", State: "decommissioned", Ranges: 1}}, nil
	}
	return nil, &adminapi.Refusal{Reason: "there is no node " + node, NextStep: "see skein node list"}
}

func (fakeBackend) ChangeNode(_ context.Context, change adminapi.NodeChange, node string) (*adminpb.Node, error) {
	if node == "n1" {
		return nil, &adminapi.Refusal{Reason: "no other node is there to lead", NextStep: "add one"}
	}
	id := map[string]string{"n2": "b", "n3": "c"}[node]
	return &adminpb.Node{Id: id, Name: node, State: "after " + string(change)}, nil
}

func (fakeBackend) Pause(context.Context, bool) error { return nil }

// replaceRun puts f in the place of the node for one test.
func replaceRun(t *testing.T, f func(context.Context, *config.Config, *zap.Logger) error) {
	t.Helper()
	old := run
	run = f
	t.Cleanup(func() { run = old })
}

// serveWithUsers serves the admin service to root, whose password is secret. It returns
// its address.
func serveWithUsers(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	guard := func(ctx context.Context, q any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		token := metadata.ValueFromIncomingContext(ctx, "token")
		switch {
		case strings.HasPrefix(info.FullMethod, "/etcdserverpb.Auth/"):
		case len(token) == 0:
			return nil, rpctypes.ErrGRPCUserEmpty
		case token[0] != "root":
			return nil, rpctypes.ErrGRPCPermissionDenied
		}
		return handle(ctx, q)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(guard))
	adminapi.Register(s, fakeBackend{})
	etcdserverpb.RegisterAuthServer(s, fakeAuth{})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

// fakeAuth knows the users root and u.
type fakeAuth struct {
	etcdserverpb.UnimplementedAuthServer
}

func (fakeAuth) Authenticate(_ context.Context, q *etcdserverpb.AuthenticateRequest) (*etcdserverpb.AuthenticateResponse, error) {
	if q.GetPassword() != "secret" && q.GetPassword() != "with:colon" {
		return nil, rpctypes.ErrGRPCAuthFailed
	}
	return &etcdserverpb.AuthenticateResponse{Token: q.GetName()}, nil
}

// TestStories walks testdata/skein: the input's lines are the arguments of one
// command, lines that begin with "env " its environment; ADDR stands for the address of
// a node, DIR for a directory. The output is the exit code, standard output and standard error.
func TestStories(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	adminapi.Register(s, fakeBackend{})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	defer func() { s.Stop(); <-done }()
	guarded := serveWithUsers(t)
	replaceRun(t, func(_ context.Context, c *config.Config, _ *zap.Logger) error {
		if c.Name == "broken" {
			return errors.New("wal: disk on fire")
		}
		return nil
	})
	dir := t.TempDir()
	datadriven.RunTest(t, "testdata/skein", func(t *testing.T, d *datadriven.TestData) string {
		log := filepath.Join(t.TempDir(), "log")
		args, env := []string{}, []string{"ETCD_LOG_OUTPUTS=" + log}
		for line := range strings.Lines(d.Input) {
			line = strings.NewReplacer("\n", "", "GUARDED", guarded, "ADDR", l.Addr().String(), "DIR", dir).Replace(line)
			if v, ok := strings.CutPrefix(line, "env "); ok {
				env = append(env, v)
			} else if line != "" {
				args = append(args, line)
			}
		}
		var stdout, stderr bytes.Buffer
		code := execute(t.Context(), args, env, &stdout, &stderr)
		out := fmt.Sprintf("exit %d\n%s", code, stdout.String())
		if stderr.Len() > 0 {
			out += "stderr:\n" + stderr.String()
		}
		out = strings.NewReplacer(guarded, "GUARDED", l.Addr().String(), "ADDR", dir, "DIR", log, "LOG").Replace(out)
		out = regexp.MustCompile(`\b[0-9a-f]{32}\b`).ReplaceAllString(out, "SERIAL")
		out = regexp.MustCompile(`\b2\d\d\d-\d\d-\d\d(T[0-9:]*Z)?\b`).ReplaceAllString(out, "DAY")
		out = regexp.MustCompile(`"(go|platform)":"[^"]*"`).ReplaceAllString(out, `"$1":"..."`)
		return regexp.MustCompile(`(?m)^(Go Version|Go OS/Arch|Commit): .*`).ReplaceAllString(out, "$1: ...")
	})
}

// TestHelp: the help names every command, and that of start the honoured flags.
func TestHelp(t *testing.T) {
	for want, args := range map[string][]string{"range": {"--help"}, "node": {"-h"}, "--initial-ranges": {"start", "--help"}, "--key-format": {"range", "split", "-h"}, "completion": {"-h"}, "not split": {"range", "show", "-h"}} {
		var stdout, stderr bytes.Buffer
		if code := execute(t.Context(), args, nil, &stdout, &stderr); code != 0 || !strings.Contains(stdout.String(), want) || stderr.Len() > 0 {
			t.Errorf("%v: exit %d\n%s%s", args, code, &stdout, &stderr)
		}
	}
}

// TestStartPassesConfig: the node gets what the command line says, and the context
// that a signal ends.
func TestStartPassesConfig(t *testing.T) {
	for _, args := range [][]string{{"--name=n9", "--max-txn-ops=5"}, {"start", "-name", "n9", "-max-txn-ops", "5"}} {
		log := filepath.Join(t.TempDir(), "log")
		ctx, cancel := context.WithCancel(t.Context())
		started := make(chan struct{})
		replaceRun(t, func(ctx context.Context, c *config.Config, logger *zap.Logger) error {
			if c.Name != "n9" || c.MaxTxnOps != 5 {
				t.Errorf("got %+v", c)
			}
			logger.Info("node is up")
			close(started)
			<-ctx.Done()
			return nil
		})
		code := make(chan int)
		var stderr bytes.Buffer
		go func() {
			code <- execute(ctx, append(args, "--log-outputs="+log), []string{"SKEIN_NO_SUCH=1"}, &bytes.Buffer{}, &stderr)
		}()
		select {
		case <-started:
		case c := <-code:
			t.Fatalf("exit %d: %s", c, &stderr)
		case <-time.After(10 * time.Second):
			t.Fatal("the node was not started")
		}
		cancel()
		if c := <-code; c != 0 {
			t.Errorf("exit %d: %s", c, &stderr)
		}
		b, err := os.ReadFile(log)
		if err != nil || !strings.Contains(string(b), "SKEIN_NO_SUCH") || !strings.Contains(string(b), "node is up") {
			t.Errorf("%s, %v", b, err)
		}
	}
}
