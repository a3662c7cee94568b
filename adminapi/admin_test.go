package adminapi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/cockroachdb/datadriven"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeBackend answers from what a story set up.
type fakeBackend struct {
	// held is what HoldUpgrade was told.
	held bool
	// as is what the node of Survey says of itself, if not that it serves.
	as *adminpb.NodeSurvey
	// watchers is what Watchers was asked for.
	watchers string
	err      error
	empty    bool
	stale    bool
	// missing says that of the keys in the first range nobody knows who holds them.
	missing bool
	// rot has replicas in quarantine.
	rot bool
	// left is how many replicas a node holds at the next look, state what it is; back says
	// that somebody takes it back when it holds none.
	left  int64
	state string
	back  bool
	// leaves says that placement removes it when it holds none; name is that by which it was
	// changed.
	leaves bool
	// still says that no operation is under way for the node.
	still  bool
	name   string
	paused bool
	// late is for how many looks a drained node does not answer: what it leads is not known then.
	late int64
	// factor is the replication factor.
	factor int64
	// full counts the nodes that are given no replicas.
	full int64
	// after is what SetMergeAfter was told, mergeMs what the placement group says of it; below 0
	// it says nothing.
	after   string
	mergeMs int64
}

// Holds are two, the later one first.
func (f *fakeBackend) Holds(context.Context) (*adminpb.HoldListResponse, error) {
	l := &adminpb.HoldListResponse{Revision: 50}
	if f.stale {
		l.Revision = 0
	}
	if !f.empty {
		l.Holds = []*adminpb.Hold{
			{Id: "00000000000000b1", Kind: "snapshot", Owner: "node a1", Revision: 50, MadeUnixMs: 1_800_000_060_000, ExpiresUnixMs: 1_800_003_660_000},
			{Id: "00000000000000b0", Kind: "backup", Owner: "db7, process 12", Revision: 40, MadeUnixMs: 1_800_000_000_000, ExpiresUnixMs: 1_800_003_600_000},
		}
	}
	return l, f.err
}

// Survey is of a node that is alone.
func (f *fakeBackend) Survey(context.Context) (*adminpb.SurveyResponse, error) {
	if f.as != nil {
		return &adminpb.SurveyResponse{Asked: "n2", Nodes: []*adminpb.NodeSurvey{f.as}}, f.err
	}
	return &adminpb.SurveyResponse{Asked: "n1", Nodes: []*adminpb.NodeSurvey{{Node: &adminpb.Node{Name: "n1", State: "serving", Alive: true}}}}, f.err
}

// Heat is of two rows, and lacks a node.
func (f *fakeBackend) Heat(_ context.Context, q *adminpb.HeatRequest) (*adminpb.HeatResponse, error) {
	if f.empty {
		return &adminpb.HeatResponse{Columns: []*adminpb.HeatColumn{{StartUnixSeconds: 1_800_000_000, Seconds: 60}}, UnixMs: 1_800_000_060_000}, f.err
	}
	return &adminpb.HeatResponse{
		Starts: [][]byte{q.GetStart(), []byte("m")}, End: []byte{'z', 0},
		Columns: []*adminpb.HeatColumn{{StartUnixSeconds: 1_800_000_000, Seconds: 60}, {StartUnixSeconds: 1_800_000_060, Seconds: 60}},
		Writes:  []uint64{0, 60, 600, 1800}, Reads: []uint64{30, 30, 0, 0}, Bytes: []uint64{0, 6000, 1 << 20, 1 << 20},
		Missing: []*adminpb.HeatMissing{{Node: "n3", Reason: "it is not heard"}}, UnixMs: 1_800_000_100_000,
	}, f.err
}

// Series are of three nodes in no order, one of which does not answer.
func (f *fakeBackend) Series(_ context.Context, afterUnixMs int64) (*adminpb.SeriesResponse, error) {
	return &adminpb.SeriesResponse{Nodes: []*adminpb.NodeSeries{
		{Node: "n3", Error: "silent"},
		{Node: "n1", UnixMs: []int64{afterUnixMs + 1}, Series: []*adminpb.Series{{Name: "puts", Values: []float64{2}}}},
		{Node: "n2"},
	}}, f.err
}

// Watchers are of two nodes; the third one does not answer.
func (f *fakeBackend) Watchers(_ context.Context, node string, most int) (*adminpb.WatcherListResponse, error) {
	f.watchers = fmt.Sprintf("%q %d", node, most)
	return &adminpb.WatcherListResponse{Watchers: []*adminpb.Watcher{
		{Node: "n2", Client: "10.0.0.2:9", Id: 1, Key: []byte("/a/"), RangeEnd: []byte("/a0"), NoPut: true, PrevKv: true, AgeMs: 250},
		{Node: "n1", Client: "10.0.0.1:7", User: "u", Id: 3, Key: []byte("k\x00"), StartRevision: 12, Behind: 900, QueuedEvents: 4, QueuedBytes: 512, History: true, AgeMs: 90_000},
		{Node: "n1", Client: "10.0.0.1:7", User: "u", Id: 2, Key: []byte("long"), RangeEnd: []byte{0}, Cut: true, Behind: 900, QueuedEvents: 5, AgeMs: 60_000},
	}, Total: 30, Missing: []*adminpb.WatchersMissing{{Node: "n4", Reason: "no route"}, {Node: "n3", Reason: "dead"}}}, f.err
}

// Slow are three requests of two nodes, the oldest first; the third node does not answer.
func (f *fakeBackend) Slow(context.Context) (*adminpb.SlowResponse, error) {
	return &adminpb.SlowResponse{Calls: []*adminpb.SlowCall{
		{Node: 1, NodeName: "n1", AtUnixNanos: 1_800_000_000_001_000_000, Method: "put", Micros: 60_400, Cause: "no single stage"},
		{
			Node: 0xab, AtUnixNanos: 1_800_000_000_002_000_000, Method: "/etcdserverpb.KV/Txn", RangeId: 12, Micros: 412_400, Cause: "quorum: node n3 last, 400 ms in range 12",
			Stages: []*adminpb.Stage{{Name: "queued", Micros: 12_400}, {Name: "quorum", Micros: 400_000}}, Retries: 2, RequestBytes: 30, ResponseBytes: 40,
		},
		{Node: 1, NodeName: "n1", AtUnixNanos: 1_800_000_000_003_000_000, Method: "/etcdserverpb.KV/Range", RangeId: 3, Micros: 90_000, Cause: "evaluation in range 3: 90 ms"},
	}, Missing: []*adminpb.SlowMissing{{Node: "n4", Reason: "no route"}, {Node: "n3", Reason: "dead"}}}, f.err
}

// ReleaseHold knows the older one.
func (f *fakeBackend) ReleaseHold(ctx context.Context, id string) (*adminpb.Hold, error) {
	l, err := f.Holds(ctx)
	if err != nil {
		return nil, err
	}
	if id != l.Holds[1].Id {
		return nil, &Refusal{Reason: "there is no such hold", NextStep: "skein hold list shows those that there are"}
	}
	return l.Holds[1], nil
}

func (f *fakeBackend) Ranges(_ context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	if f.err != nil || f.empty {
		return &adminpb.RangeListResponse{}, f.err
	}
	if q.GetNode() != "" || q.Key != nil {
		return &adminpb.RangeListResponse{Ranges: []*adminpb.Range{{
			Id: 3, Generation: 2, Start: q.GetKey(), Leader: q.GetNode(), Replicas: []string{"n1", "n2", "n4"}, Keys: 1, State: "awake", ConfIndex: 77,
			Members:   []*adminpb.Replica{{Node: "n1", ReplicaId: 1, Role: "voter"}, {Node: "n2", ReplicaId: 2, Role: "voter"}, {Node: "n4", ReplicaId: 9, Role: "learner"}},
			Operation: &adminpb.Operation{Id: 300, Range: 3, Kind: "move", From: "n1", To: "n4", Reason: "command", Why: "asked for"},
		}}}, nil
	}
	if f.missing {
		return &adminpb.RangeListResponse{
			Ranges:  []*adminpb.Range{{Id: 2, Generation: 4, Start: []byte("m"), End: []byte("z"), State: "awake"}},
			Missing: []*adminpb.KeySpan{{End: []byte("m")}, {Start: []byte{'z', 0, 0xff}}},
		}, nil
	}
	if f.rot {
		return &adminpb.RangeListResponse{Ranges: []*adminpb.Range{{Id: 2, Generation: 4, Leader: "n1", State: "awake", Members: []*adminpb.Replica{
			{Node: "n1", ReplicaId: 1, Role: "voter"}, {Node: "n2", ReplicaId: 2, Role: "voter", Quarantine: "corruption in data/000007.sst"},
		}}}}, nil
	}
	return &adminpb.RangeListResponse{Stale: f.stale, Ranges: []*adminpb.Range{
		{Id: 2, Generation: 4, Start: []byte("m"), Replicas: []string{"n1", "n2", "n3"}, Keys: -1, State: "splitting", Kept: true},
		{Id: 1, Generation: 1, End: []byte("m"), Leader: "n1", Replicas: []string{"n1", "n2", "n3"}, Keys: 7, Bytes: 512, State: "asleep"},
		{Id: 9, Generation: 2, Start: []byte{'z', 0, 0xff, '\\', '<'}, Replicas: nil, State: "unreachable"},
	}}, nil
}

func (f *fakeBackend) SplitRange(_ context.Context, key []byte) (left, right *adminpb.Range, err error) {
	if f.err != nil {
		return nil, nil, f.err
	}
	return &adminpb.Range{Id: 1, Generation: 2, End: key, State: "awake"}, &adminpb.Range{Id: 10, Generation: 1, Start: key, State: "awake"}, nil
}

func (f *fakeBackend) ShowRange(_ context.Context, id keyspace.RangeID) (*adminpb.RangeShowResponse, error) {
	if f.err != nil {
		return nil, f.err
	}
	shown := shownRange(id)
	if f.stale {
		shown.Leader, shown.State, shown.WaitsFor = "", StateNoQuorum, []string{"n3"}
		shown.Members = []*adminpb.Replica{{Node: "n1", Role: "voter"}, {Node: "n2", Role: "voter", Quarantine: "corruption"}, {Node: "n3", Role: "voter"}}
	}
	return &adminpb.RangeShowResponse{Range: shown, Replicas: []*adminpb.ReplicaState{
		{
			Node: "n1", ReplicaId: 1, Role: "voter", StateJson: `{"raft":{"Term":7,"IsLeader":true,"Commit":40,"Applied":40},"serving":true,"last_revision":900,"compacted":800,` +
				`"keys":12345,"counted":true,"bytes":1258291,"queued":3,"locks":2,"leases":1,"load":{"unsplit":"one key takes all the load"}}`,
		},
		{Node: "n3", ReplicaId: 3, Role: "voter", StateJson: `{"raft":{"Term":7,"Asleep":true,"Commit":38,"Applied":12},"keys":12000,"bytes":1258291}`},
		{Node: "n2", ReplicaId: 2, Role: "learner", Error: "node n2 does not answer"},
	}}, nil
}

// shownRange is a range that a node is taken from.
func shownRange(id keyspace.RangeID) *adminpb.Range {
	return &adminpb.Range{
		Id: uint64(id), Generation: 4, Start: []byte("m\x00"), Leader: "n1", State: "awake", Keys: 12345, Bytes: 1258291,
		WritesPerSecond: 120.04, ReadsPerSecond: 3.5, WriteBytesPerSecond: 30 << 10, Kept: true,
		Operation: &adminpb.Operation{Id: 300, Range: uint64(id), Kind: "move", From: "n2", To: "n4", Reason: "command", Why: "asked for"},
	}
}

func (f *fakeBackend) Nodes(context.Context) (*adminpb.NodeListResponse, error) {
	if f.err != nil || f.empty {
		return &adminpb.NodeListResponse{}, f.err
	}
	if f.rot {
		return &adminpb.NodeListResponse{Nodes: []*adminpb.Node{{Id: "b", Name: "n2", Alive: true, State: "serving", Quarantined: 2}}}, nil
	}
	return &adminpb.NodeListResponse{Stale: f.stale, Nodes: []*adminpb.Node{
		{Id: "b", Name: "n2", PeerUrls: []string{"http://h:2"}, State: "unstarted"},
		{
			Id: "a", Name: "n1", ClientUrls: []string{"http://h:1"}, Alive: true, Ranges: 3, Leaders: 1, Bytes: 99, State: "serving", SinceUnixMs: 1_800_000_000_000,
			Attributes: []*adminpb.Attribute{{Key: "rack", Value: "r1"}, {Key: "zone", Value: "a"}}, Placement: true, PlacementLeader: true,
		},
	}}, nil
}

// ShowNode counts how often it is asked: what the node holds becomes less.
func (f *fakeBackend) ShowNode(_ context.Context, node string) (*adminpb.NodeShowResponse, error) {
	if f.err != nil {
		return nil, f.err
	}
	left := max(0, f.left)
	f.left--
	if f.leaves && left == 0 {
		return nil, &Refusal{Reason: "node " + node + " was removed from the cluster", NextStep: "add a new node in its place", Removed: true}
	}
	n := &adminpb.Node{
		Id: "a", Name: cmp.Or(f.name, node), Alive: true, Ranges: left, Leaders: left / 2, Placement: left > 1, PlacementLeader: left > 2,
		State: f.state, Leaves: f.leaves,
	}
	if f.back && left == 0 {
		n.State = "serving"
	}
	s := &adminpb.NodeShowResponse{Node: n, Stale: f.stale}
	if f.rot {
		n.Quarantined = 1
		s.Quarantined = []*adminpb.Quarantine{{Range: 2, ReplicaId: 7, Reason: "corruption in data/000007.sst", SinceUnixMs: 1_800_000_000_000, Outlook: "under way: remove from n2"}}
	}
	f.late--
	switch {
	case f.late >= 0:
		n.Leaders, n.PlacementLeader = 0, false
		s.Drain = &adminpb.Refusal{Reason: "node n1 cannot be drained: it has not answered in time", NextStep: "try again in a moment"}
	case n.State != "draining" || n.Leaders > 0 || n.PlacementLeader:
		s.Drain = &adminpb.Refusal{Reason: "node n1 cannot be drained: it leads all", NextStep: "add a node"}
	}
	for i := range uint64(min(left, 8)) {
		s.Ranges = append(s.Ranges, &adminpb.NodeRange{Id: i + 1, Start: []byte{'a' + byte(i)}, End: []byte{'b' + byte(i)}, Role: "voter", Leads: i == 0, Bytes: 512})
	}
	if left > 0 && !f.still {
		s.Operations = []*adminpb.Operation{{Id: 300, Range: 1, Kind: "move", From: node, To: "n4", Reason: "drain", Why: "the node is decommissioned"}}
	}
	return s, nil
}

func (f *fakeBackend) ChangeNode(_ context.Context, change NodeChange, node string) (*adminpb.Node, error) {
	states := map[NodeChange]string{Drain: "draining", Undrain: "serving", Decommission: "decommissioned", Recommission: "serving", Remove: "removed"}
	f.state, f.name = states[change], cmp.Or(f.name, node)
	return &adminpb.Node{Id: "a", Name: f.name, State: f.state}, f.err
}

func (f *fakeBackend) Pause(_ context.Context, paused bool) error {
	f.paused = paused
	return f.err
}

func (f *fakeBackend) MoveRange(_ context.Context, id keyspace.RangeID, from, to string) (*adminpb.Operation, error) {
	return &adminpb.Operation{Id: 300, Range: uint64(id), Kind: "move", From: from, To: to, Reason: "command", Why: "asked for"}, f.err
}

func (f *fakeBackend) MergeRange(_ context.Context, left keyspace.RangeID) (*adminpb.Operation, error) {
	return &adminpb.Operation{Id: 302, Range: uint64(left), Kind: "merge", Reason: "command", Why: "asked for", Right: 8, Phase: "preparing"}, f.err
}

func (f *fakeBackend) JoinNode(_ context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	return &adminpb.NodeJoinResponse{Cluster: "c1", Node: "d", NodeTable: []byte(q.GetName() + " at " + strings.Join(q.GetPeerUrls(), ","))}, f.err
}

func (f *fakeBackend) TransferLeader(context.Context, keyspace.RangeID, string) error { return f.err }

func (f *fakeBackend) PlacementGroup(context.Context) (*adminpb.PlacementShowResponse, error) {
	if f.err != nil || f.empty {
		return &adminpb.PlacementShowResponse{}, f.err
	}
	p := &adminpb.PlacementShowResponse{Leader: "n2", Term: 9, Stale: f.stale, Replicas: []*adminpb.PlacementReplica{
		{Node: "n1", ReplicaId: 1, Role: "voter"}, {Node: "n2", ReplicaId: 2, Role: "voter"}, {Node: "n4", ReplicaId: 12, Role: "learner"},
	}}
	if f.mergeMs >= 0 {
		p.MergeAfterMs = &f.mergeMs
	}
	if f.factor > 0 { // the ranges that have fewer voters become less with each look
		left := max(0, f.left)
		f.left--
		p.Replication = &adminpb.Replication{Factor: f.factor, Ranges: 12, Fewer: left, Silent: left / 2, Operations: min(left, 1), Paused: f.paused}
		for i := range f.full {
			p.Replication.Declining = append(p.Replication.Declining, &adminpb.Declining{Node: fmt.Sprintf("n%d", i+4), Why: "its disk is 93 % full"})
		}
		if f.back && left == 0 {
			p.Replication.Factor = 3
		}
	}
	return p, nil
}

func (f *fakeBackend) MovePlacement(_ context.Context, from, to string) (*adminpb.Operation, error) {
	return &adminpb.Operation{Id: 302, Kind: "move", From: from, To: to, Reason: "command", Why: "asked for"}, f.err
}

func (f *fakeBackend) TransferPlacement(context.Context, string) error { return f.err }

func (f *fakeBackend) SetReplication(_ context.Context, factor int, _ bool) (*adminpb.PlacementSetReplicationResponse, error) {
	f.factor = int64(factor)
	return &adminpb.PlacementSetReplicationResponse{
		Before: 3, After: f.factor, Ranges: 12, Added: 24, Bytes: 7 << 30, Notes: []string{"some share a zone"},
	}, f.err
}

func (f *fakeBackend) ClusterVersion(context.Context) (*adminpb.ClusterShowResponse, error) {
	return &adminpb.ClusterShowResponse{Version: 3, Next: 4, Held: f.held, Stale: f.stale, Nodes: []*adminpb.NodeVersions{
		{Name: "n1", Build: "0.2.0", Oldest: 3, Newest: 4, SinceUnixMs: 1_800_000_000_000}, {Name: "n2"},
	}}, f.err
}

func (f *fakeBackend) Upgrade(context.Context) (uint32, error) { return 4, f.err }

func (f *fakeBackend) HoldUpgrade(_ context.Context, hold bool) error {
	f.held = hold
	return f.err
}

func (f *fakeBackend) SetMergeAfter(_ context.Context, after *time.Duration) error {
	f.after = "what the nodes say"
	if after != nil {
		f.after = after.String()
	}
	return f.err
}

func (f *fakeBackend) Operations(context.Context) (*adminpb.OperationListResponse, error) {
	if f.err != nil || f.empty {
		return &adminpb.OperationListResponse{}, f.err
	}
	return &adminpb.OperationListResponse{Paused: f.paused, Stale: f.stale, Operations: []*adminpb.Operation{{Id: 300, Range: 1, Kind: "move", From: "n1", To: "n4", Reason: "command", Why: "asked for"}, {Id: 301, Range: 2, Kind: "remove", From: "n2", Reason: "learner", Why: "a learner that no operation has"}}}, nil
}

// TestStories walks testdata: each command is what an operator types, sent over a
// real connection.
//
//	each: [error=KIND] [refuse] [empty] [stale] [missing] [paused] [left=N] [late=N] [state=S] [back] [leaves] [still] [merge-ms=N] [full=N]
//	range-list [json] [node=NODE] [key=K] / node-list [json]
//	node-show node=NODE [json]
//	drain|undrain|decommission|recommission|remove node=NODE [json] [wait]
//	pause|resume
//	range-split [json] key=K
//	range-show [json] id=N
//	range-move [json] id=N from=NODE to=NODE
//	range-merge [json] id=N
//	range-transfer id=N to=NODE
//	operations [json]
//	placement-show [json]
//	placement-move [json] from=NODE to=NODE
//	placement-transfer to=NODE
//	set-replication factor=N [json] [wait]
//	set-merge-after [after=DURATION]
//	heat [top=N] [json] [empty]
func TestStories(t *testing.T) {
	datadriven.RunTest(t, "testdata/admin", func(t *testing.T, d *datadriven.TestData) string {
		b := &fakeBackend{}
		format := Table
		if d.HasArg("json") {
			format = JSON
		}
		if d.HasArg("empty") {
			b.empty = true
		}
		b.missing, b.rot = d.HasArg("missing"), d.HasArg("rot")
		b.stale, b.paused, b.back, b.leaves, b.still = d.HasArg("stale"), d.HasArg("paused"), d.HasArg("back"), d.HasArg("leaves"), d.HasArg("still")
		d.MaybeScanArgs(t, "left", &b.left)
		d.MaybeScanArgs(t, "full", &b.full)
		d.MaybeScanArgs(t, "late", &b.late)
		d.MaybeScanArgs(t, "factor", &b.factor)
		b.mergeMs = -1
		d.MaybeScanArgs(t, "merge-ms", &b.mergeMs)
		b.state = "serving"
		d.MaybeScanArgs(t, "state", &b.state)
		if d.HasArg("refuse") {
			b.err = fmt.Errorf("wrapped: %w", &Refusal{Reason: "a range begins there already", NextStep: "look at skein range list"})
		}
		var kind string
		if d.MaybeScanArgs(t, "error", &kind) {
			for _, row := range kverror.Table() {
				if strings.ReplaceAll(row.Name, " ", "-") == kind {
					b.err = kverror.New(row.Kind, "of the backend")
				}
			}
		}
		c, stop := serve(t, b)
		defer stop()
		if d.Cmd == "set-merge-after" {
			return answerMergeAfter(t, c, d, b)
		}
		out, err := runStory(t, c, d, format)
		if r := (*Refusal)(nil); errors.As(err, &r) {
			return fmt.Sprintf("refused: %s\nnext: %s\n", r.Reason, r.NextStep)
		} else if err != nil {
			return "error: " + err.Error() + "\n"
		}
		return out
	})
}

func runStory(t *testing.T, c *Client, d *datadriven.TestData, f Format) (string, error) {
	t.Helper()
	var out bytes.Buffer
	switch d.Cmd {
	case "range-list":
		q, key := &adminpb.RangeListRequest{}, ""
		d.MaybeScanArgs(t, "node", &q.Node)
		if d.MaybeScanArgs(t, "key", &key) {
			q.Key = []byte(key)
		}
		r, err := c.RangeListOf(t.Context(), q)
		if err != nil {
			return "", err
		}
		err = WriteRanges(&out, &out, f, QuotedKeys, r)
		return out.String(), err
	case "heat":
		top := 20
		d.MaybeScanArgs(t, "top", &top)
		r, err := c.Heat(t.Context(), &adminpb.HeatRequest{Start: []byte("a")})
		if err != nil {
			return "", err
		}
		if d.HasArg("earlier") { // such a build does not say its time
			r.UnixMs = 0
		}
		err = WriteHeat(&out, &out, f, QuotedKeys, top, r)
		return out.String(), err
	case "node-list":
		n, err := c.NodeList(t.Context())
		if err != nil {
			return "", err
		}
		err = WriteNodes(&out, &out, f, n)
		return out.String(), err
	case "range-split":
		key := ""
		d.MaybeScanArgs(t, "key", &key)
		s, err := c.RangeSplit(t.Context(), []byte(key))
		if err != nil {
			return "", err
		}
		err = WriteSplit(&out, f, QuotedKeys, s)
		return out.String(), err
	case "range-move", "range-merge", "range-transfer", "operations", "placement-show", "placement-move", "placement-transfer", "set-replication":
		return runMoveStory(t, c, d, f)
	case "range-show":
		var id uint64
		d.ScanArgs(t, "id", &id)
		s, err := c.RangeShow(t.Context(), id)
		if err != nil {
			return "", err
		}
		err = WriteShow(&out, f, QuotedKeys, s)
		return out.String(), err
	}
	return runNodeStory(t, c, d, f)
}

func runNodeStory(t *testing.T, c *Client, d *datadriven.TestData, f Format) (string, error) {
	t.Helper()
	var out bytes.Buffer
	var node string
	d.MaybeScanArgs(t, "node", &node)
	switch change := NodeChange(d.Cmd); change {
	case Drain, Undrain, Decommission, Recommission, Remove:
		n, err := c.ChangeNode(t.Context(), change, node)
		if err == nil && d.HasArg("wait") {
			n, err = c.AwaitNode(t.Context(), Wait{
				Call: time.Minute, Pause: time.Millisecond,
				Tell: func(text string) { fmt.Fprintln(&out, text) },
			}, change, n)
		}
		if err == nil {
			err = WriteNode(&out, f, n)
		}
		return out.String(), err
	case "cluster":
		r, err := c.ClusterShow(t.Context())
		if err == nil {
			err = WriteCluster(&out, &out, f, r)
		}
		return out.String(), err
	case "cluster-upgrade":
		v, err := c.ClusterUpgrade(t.Context())
		return fmt.Sprintf("version %d\n", v), err
	case "cluster-hold":
		err := c.ClusterHold(t.Context(), !d.HasArg("off"))
		if err == nil {
			r, _ := c.ClusterShow(t.Context())
			fmt.Fprintf(&out, "held: %v\n", r.GetHeld())
		}
		return out.String(), err
	case "node-show":
		s, err := c.NodeShow(t.Context(), node)
		if err == nil {
			err = WriteNodeShow(&out, &out, f, QuotedKeys, s)
		}
		return out.String(), err
	case "pause", "resume":
		return "ok\n", c.PlacementPause(t.Context(), d.Cmd == "pause")
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return "", nil
}

func runMoveStory(t *testing.T, c *Client, d *datadriven.TestData, f Format) (string, error) {
	t.Helper()
	var out bytes.Buffer
	var id uint64
	var from, to string
	d.MaybeScanArgs(t, "id", &id)
	d.MaybeScanArgs(t, "from", &from)
	d.MaybeScanArgs(t, "to", &to)
	switch d.Cmd {
	case "range-move":
		m, err := c.RangeMove(t.Context(), id, from, to)
		if err != nil {
			return "", err
		}
		err = WriteOperations(&out, &out, f, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{m.GetOperation()}})
		return out.String(), err
	case "range-merge":
		m, err := c.RangeMerge(t.Context(), id)
		if err != nil {
			return "", err
		}
		err = WriteOperations(&out, &out, f, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{m.GetOperation()}})
		return out.String(), err
	case "range-transfer":
		return "ok\n", c.RangeTransferLeader(t.Context(), id, to)
	case "placement-show":
		p, err := c.PlacementShow(t.Context())
		if err != nil {
			return "", err
		}
		err = WritePlacement(&out, &out, f, p)
		return out.String(), err
	case "set-replication":
		return runReplicationStory(t, c, d, f)
	case "placement-move":
		m, err := c.PlacementMove(t.Context(), from, to)
		if err != nil {
			return "", err
		}
		err = WriteOperations(&out, &out, f, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{m.GetOperation()}})
		return out.String(), err
	case "placement-transfer":
		return "ok\n", c.PlacementTransferLeader(t.Context(), to)
	}
	l, err := c.OperationList(t.Context())
	if err != nil {
		return "", err
	}
	err = WriteOperations(&out, &out, f, l)
	return out.String(), err
}

// answerMergeAfter sets it and tells what the backend was told.
func answerMergeAfter(t *testing.T, c *Client, d *datadriven.TestData, b *fakeBackend) string {
	t.Helper()
	var after *time.Duration
	if text := ""; d.MaybeScanArgs(t, "after", &text) {
		v, err := time.ParseDuration(text)
		if err != nil {
			t.Fatal(err)
		}
		after = &v
	}
	err := c.PlacementSetMergeAfter(t.Context(), after)
	if r := (*Refusal)(nil); errors.As(err, &r) {
		return fmt.Sprintf("refused: %s\nnext: %s\n", r.Reason, r.NextStep)
	} else if err != nil {
		return "error: " + err.Error() + "\n"
	}
	return b.after + "\n"
}

func runReplicationStory(t *testing.T, c *Client, d *datadriven.TestData, f Format) (string, error) {
	t.Helper()
	var out bytes.Buffer
	var factor int
	d.ScanArgs(t, "factor", &factor)
	plan, err := c.SetReplication(t.Context(), factor, false)
	if err == nil {
		err = WriteSetReplication(&out, &out, f, plan)
	}
	if err == nil && d.HasArg("wait") {
		_, err = c.AwaitReplication(t.Context(), WaitReplication{
			Call: time.Minute, Pause: time.Millisecond,
			Tell: func(r *adminpb.Replication) { fmt.Fprintln(&out, ReplicationProgress(r)) },
		}, factor)
	}
	return out.String(), err
}

// serve starts the service on a free port and returns a client whose first endpoint
// nobody listens on: the kernel gives that port to nobody.
func serve(t *testing.T, b Backend) (*Client, func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	Register(s, b)
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	c, err := NewClient([]string{"127.0.0.1:1", " http://" + l.Addr().String()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return c, func() { s.Stop(); <-done }
}

// TestWaitingEnds: with its context, at any moment, with what is left to do; and where
// nobody answers for long.
func TestWaitingEnds(t *testing.T) {
	c, stop := serve(t, &fakeBackend{left: 1 << 40, state: "decommissioned"})
	n1 := &adminpb.Node{Id: "a", Name: "n1"}
	ctx, cancel := context.WithCancel(t.Context())
	w := Wait{Call: time.Minute, Pause: time.Millisecond, Tell: func(string) { cancel() }}
	_, err := c.AwaitNode(ctx, w, Decommission, n1)
	r := (*Refusal)(nil)
	if !errors.As(err, &r) || !strings.Contains(r.Reason, "holds 1099511627776 replicas") || !strings.Contains(r.NextStep, "skein node recommission n1") {
		t.Errorf("%v", err)
	}
	_, err = c.AwaitNode(ctx, w, Drain, n1)
	if !errors.As(err, &r) || !strings.Contains(r.Reason, "could not be looked at") || !strings.Contains(r.NextStep, "skein node undrain n1") {
		t.Errorf("%v", err)
	}
	stop()
	if _, err = c.AwaitNode(t.Context(), w, Drain, n1); !errors.As(err, &r) || !strings.Contains(r.NextStep, "--endpoints") {
		t.Errorf("%v", err)
	}
}

// oldBackend lost its quorum before it heard of the change, and has it again at the next look.
type oldBackend struct {
	fakeBackend
	looked bool
}

func (b *oldBackend) ShowNode(ctx context.Context, node string) (*adminpb.NodeShowResponse, error) {
	s, err := b.fakeBackend.ShowNode(ctx, node)
	if !b.looked {
		b.looked, s.Stale, s.Node.State = true, true, "serving"
	}
	return s, err
}

// A node that does not know the change yet does not say that it was taken back.
func TestWaitingBesideOldNews(t *testing.T) {
	for change, want := range map[NodeChange]string{Drain: "draining", Decommission: "removed"} {
		c, stop := serve(t, &oldBackend{})
		n, err := c.ChangeNode(t.Context(), change, "n1")
		if err == nil {
			n, err = c.AwaitNode(t.Context(), Wait{Call: time.Minute, Pause: time.Millisecond, Tell: func(string) {}}, change, n)
		}
		if err != nil || n.GetState() != want {
			t.Errorf("%s: the node is %q, %v; want %q", change, n.GetState(), err, want)
		}
		stop()
	}
}

func TestNoEndpointAnswers(t *testing.T) {
	c, stop := serve(t, &fakeBackend{})
	stop()
	_, err := c.RangeList(t.Context())
	r := (*Refusal)(nil)
	if !errors.As(err, &r) || !strings.Contains(r.NextStep, "--endpoints") {
		t.Errorf("%v", err)
	}
}

// silentBackend answers nothing before it has to.
type silentBackend struct{ fakeBackend }

func (*silentBackend) PlacementGroup(ctx context.Context) (*adminpb.PlacementShowResponse, error) {
	<-ctx.Done()
	return nil, kverror.New(kverror.Timeout, "the placement group has no leader")
}

// registrar keeps what is registered.
type registrar struct {
	desc *grpc.ServiceDesc
	srv  any
}

// RegisterService implements grpc.ServiceRegistrar.
func (r *registrar) RegisterService(desc *grpc.ServiceDesc, srv any) { r.desc, r.srv = desc, srv }

// A question that takes all its time still answers before its caller's time is over. There
// is no connection in between: its time would depend on what else the machine does.
func TestAnswerInTime(t *testing.T) {
	for _, tc := range []struct{ given, want time.Duration }{
		{10 * time.Second, 9750 * time.Millisecond},
		{500 * time.Millisecond, 450 * time.Millisecond},
		{0, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			var r registrar
			Register(&r, &silentBackend{})
			i := slices.IndexFunc(r.desc.Methods, func(m grpc.MethodDesc) bool { return m.MethodName == "PlacementShow" })
			ctx, cancel := context.WithTimeout(t.Context(), tc.given)
			defer cancel()
			begun := time.Now()
			_, err := r.desc.Methods[i].Handler(r.srv, ctx, func(any) error { return nil }, nil)
			if took := time.Since(begun); took != tc.want {
				t.Errorf("of %s it took %s, want %s", tc.given, took, tc.want)
			}
			if got := refusal(err); got == nil || !strings.Contains(got.Reason, "the placement group has no leader") || !strings.Contains(got.NextStep, "skein node list") {
				t.Errorf("of %s: %v", tc.given, err)
			}
		})
	}
}

func TestNotASkein(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	defer func() { s.Stop(); <-done }()
	c, err := NewClient([]string{l.Addr().String()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = c.NodeList(t.Context()); err == nil || !strings.Contains(err.Error(), "not an etcd member") {
		t.Errorf("%v", err)
	}
}

func TestEndpoints(t *testing.T) {
	for _, tc := range []struct{ in, target, err string }{
		{in: "127.0.0.1:2379", target: "dns:///127.0.0.1:2379"},
		{in: "http://h:1", target: "dns:///h:1"},
		{in: "https://h:1", target: "dns:///h:1"},
		{in: "unix:///tmp/s", target: "unix:/tmp/s"},
		{in: "unix:/tmp/s", target: "unix:/tmp/s"},
		{in: "ftp://h:1", err: "the scheme must be"},
		{in: "http://h:1/path", err: "not of the form"},
		{in: "", err: "no endpoints"},
	} {
		c, err := NewClient([]string{tc.in}, nil)
		switch {
		case tc.err != "":
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("%s: %v, want %s", tc.in, err, tc.err)
			}
		case err != nil || c.endpoints[0].target != tc.target:
			t.Errorf("%s: %+v, %v", tc.in, c, err)
		}
	}
}

// TestNextSteps: every kind of error has a next step.
func TestNextSteps(t *testing.T) {
	for _, row := range kverror.Table() {
		if nextStep(row.Kind, readAgain) == "" {
			t.Errorf("%s has none", row.Name)
		}
	}
	// The clock of the command and that of gRPC run out together.
	for _, c := range []codes.Code{codes.DeadlineExceeded, codes.Canceled} {
		if r := (*Refusal)(nil); !errors.As(asRefusal(endpoint{name: "e"}, status.Error(c, "too late")), &r) || !strings.Contains(r.NextStep, "--command-timeout") {
			t.Errorf("%s: %+v", c, r)
		}
	}
}

func FuzzKeyText(f *testing.F) {
	f.Add([]byte("a\\\x00\xff\u00e4"))
	f.Add([]byte(`"a"`))
	f.Add([]byte("--a b"))
	f.Add([]byte("\ufffd"))
	f.Fuzz(func(t *testing.T, key []byte) {
		var out bytes.Buffer
		if err := WriteRanges(&out, io.Discard, JSON, QuotedKeys, &adminpb.RangeListResponse{Ranges: []*adminpb.Range{{Start: key}}}); err != nil {
			t.Fatal(err)
		}
		if !json.Valid(out.Bytes()) {
			t.Fatalf("%s", &out)
		}
		for _, f := range []KeyFormat{QuotedKeys, HexKeys, Base64Keys} {
			text := f.Text(key)
			got, err := f.Key(text)
			if err != nil || !bytes.Equal(got, key) {
				t.Fatalf("%q is printed as %s, which is read as %q, %v", key, text, got, err)
			}
			if strings.ContainsAny(text, "\n\x00") || strings.HasPrefix(text, "-") || !utf8.ValidString(text) {
				t.Fatalf("%q is printed as %q", key, text)
			}
		}
	})
}

// movedBackend tells of a move that is over what its looks have, one after the other.
type movedBackend struct {
	fakeBackend
	ranges     []*adminpb.Range
	groups     []*adminpb.PlacementShowResponse
	operations []*adminpb.OperationListResponse
}

// nextOf is the next of all, the last one again and again.
func nextOf[T any](all *[]T) T {
	next := (*all)[0]
	if len(*all) > 1 {
		*all = (*all)[1:]
	}
	return next
}

func (b *movedBackend) ShowRange(context.Context, keyspace.RangeID) (*adminpb.RangeShowResponse, error) {
	return &adminpb.RangeShowResponse{Range: nextOf(&b.ranges)}, nil
}

func (b *movedBackend) PlacementGroup(context.Context) (*adminpb.PlacementShowResponse, error) {
	return nextOf(&b.groups), nil
}

func (b *movedBackend) Operations(context.Context) (*adminpb.OperationListResponse, error) {
	return nextOf(&b.operations), nil
}

// TestWhatHasComeOfAMove: only a leader or a quorum says whether a finished move succeeded or
// was given up. A late map or a replica without a quorum says nothing.
func TestWhatHasComeOfAMove(t *testing.T) {
	move := &adminpb.Operation{Id: 7, Range: 3, Kind: "move", From: "n1", To: "n4"}
	before := []*adminpb.Replica{{Node: "n1", Role: "voter"}, {Node: "n2", Role: "voter"}}
	after := []*adminpb.Replica{{Node: "n4", Role: "voter"}, {Node: "n2", Role: "voter"}}
	ofGroup := func(all []*adminpb.Replica) (out []*adminpb.PlacementReplica) {
		for _, m := range all {
			out = append(out, &adminpb.PlacementReplica{Node: m.GetNode(), Role: m.GetRole()})
		}
		return out
	}
	type look struct {
		members []*adminpb.Replica
		known   bool // by the leader's word, or a quorum's
	}
	for _, tc := range []struct {
		what   string
		looks  []look
		refuse string
	}{
		{"it has moved", []look{{after, true}}, ""},
		{"the map is late for long", []look{{before, false}, {before, false}, {before, false}, {before, false}, {before, false}, {before, false}, {after, true}}, ""},
		{"it was given up", []look{{before, true}, {after, true}}, "was given up"},
		{"nobody who knows answers", []look{{before, false}}, "is not known yet"},
		{"nobody who knows answers, though it seems to have moved", []look{{after, false}}, "is not known yet"},
	} {
		t.Run(tc.what, func(t *testing.T) {
			t.Parallel()
			b := &movedBackend{}
			for _, l := range tc.looks {
				r := &adminpb.Range{Id: 3, Members: l.members}
				if l.known {
					r.Leader = "n2"
				}
				b.ranges = append(b.ranges, r)
				b.groups = append(b.groups, &adminpb.PlacementShowResponse{Replicas: ofGroup(l.members), Stale: !l.known})
			}
			c, stop := serve(t, b)
			defer stop()
			for what, moved := range map[string]func(context.Context) error{
				"range":     func(ctx context.Context) error { _, err := c.RangeMoved(ctx, move); return err },
				"placement": func(ctx context.Context) error { _, err := c.PlacementMoved(ctx, move); return err },
			} {
				ctx, cancel := context.WithTimeout(t.Context(), 10*movePoll)
				err := moved(ctx)
				cancel()
				if r := (*Refusal)(nil); tc.refuse == "" && err != nil || tc.refuse != "" && (!errors.As(err, &r) || !strings.Contains(r.Reason, tc.refuse) || r.NextStep == "") {
					t.Errorf("%s: %v, want %q", what, err, tc.refuse)
				}
			}
		})
	}
}

// TestWhatHasComeOfAnAddition: one half of a move is all that an addition or a removal comes to.
func TestWhatHasComeOfAnAddition(t *testing.T) {
	group := []*adminpb.PlacementReplica{{Node: "n1", Role: "voter"}, {Node: "n2", Role: "voter"}, {Node: "n3", Role: "learner"}}
	for _, tc := range []struct{ from, to, refuse string }{
		{to: "n2"},
		{to: "n3", refuse: "n3 has no voter now"},
		{to: "n4", refuse: "n4 has no voter now"},
		{from: "n4"},
		{from: "n1", refuse: "n1 still has its replica now"},
	} {
		err := Moved(&adminpb.Operation{Id: 7, From: tc.from, To: tc.to}, group)
		if (err != nil) != (tc.refuse != "") || err != nil && !strings.Contains(err.Error(), tc.refuse) {
			t.Errorf("from %q to %q: %v, want %q", tc.from, tc.to, err, tc.refuse)
		}
	}
}

// TestAnOldListEndsNoOperation: what a replica knew of it before the quorum was lost is no word
// that it is over.
func TestAnOldListEndsNoOperation(t *testing.T) {
	b := &movedBackend{operations: []*adminpb.OperationListResponse{{Stale: true}, {Operations: []*adminpb.Operation{{Id: 7}}}, {Stale: true}, {}}}
	c, stop := serve(t, b)
	defer stop()
	if err := c.AwaitOperation(t.Context(), 7); err != nil || len(b.operations) != 1 {
		t.Errorf("it ended with %d answers left, %v", len(b.operations), err)
	}
}

// TestOldNewsEndNoReplication: nor that ranges have as many voters as they are to have.
func TestOldNewsEndNoReplication(t *testing.T) {
	b := &movedBackend{groups: []*adminpb.PlacementShowResponse{
		{Stale: true, Replication: &adminpb.Replication{Factor: 5}},
		{Stale: true, Replication: &adminpb.Replication{Factor: 3}},
		{Replication: &adminpb.Replication{Factor: 5, Fewer: 1}},
		{Replication: &adminpb.Replication{Factor: 5}},
	}}
	c, stop := serve(t, b)
	defer stop()
	r, err := c.AwaitReplication(t.Context(), WaitReplication{Call: time.Minute, Pause: time.Millisecond, Tell: func(*adminpb.Replication) {}}, 5)
	if err != nil || r.GetFewer() > 0 || len(b.groups) != 1 {
		t.Errorf("it ended at %v with %d answers left, %v", r, len(b.groups), err)
	}
}
