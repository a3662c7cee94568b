package adminapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// A look has the rates since the one before of each node that tells its metrics, and names why another one's are missing.
func TestTopLooks(t *testing.T) {
	var scrapes atomic.Int64
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := scrapes.Add(1)
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
		}
		fmt.Fprintf(w, "# HELP x y\n%s %d\n%s %d\n%s{a=\"b\"} 7\n", putsMetric, 1000*n, getsMetric, 500*n, cpuMetric)
		fmt.Fprintf(w, "%s 1e+03\n%s 990\n", committedMetric, appliedMetric)
	}))
	defer node.Close()
	b := &bundler{name: "n1", survey: &adminpb.SurveyResponse{Nodes: []*adminpb.NodeSurvey{
		{Node: &adminpb.Node{Id: "a", Name: "n1", State: "serving", Alive: true, ClientUrls: []string{"unix:/x", "http://" + closedAddress(t), node.URL}}},
		{Node: &adminpb.Node{Id: "b", Name: "n2", State: "serving", Alive: true, ClientUrls: []string{"http://" + closedAddress(t)}}},
		{Node: &adminpb.Node{Id: "c", Name: "n3", State: StateDead}},
	}}}
	c, err := NewClient([]string{serveBackend(t, b)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	top := NewTop(c)
	defer top.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	first, err := top.Look(ctx)
	if err != nil || len(first.Nodes) != 3 || first.Nodes[0].Puts != nil || first.Nodes[0].Lag == nil || *first.Nodes[0].Lag != 10 {
		t.Fatalf("%+v, %v", first, err)
	}
	second, err := top.Look(ctx)
	if err != nil {
		t.Fatal(err)
	}
	n := second.Nodes
	if n[0].Puts == nil || n[0].Gets == nil || *n[0].Puts <= 0 || *n[0].Puts != 2**n[0].Gets || n[0].CPU != nil || n[0].Error != "" {
		t.Errorf("%+v", n[0])
	}
	if n[1].Error == "" || n[1].Puts != nil || n[2].Error != "" || n[2].State != StateDead {
		t.Errorf("%+v", n[1:])
	}
	if len(second.Slow) != 3 || second.Slow[0].Method != "/etcdserverpb.KV/Range" {
		t.Errorf("slow requests: %+v", second.Slow)
	}
	scrapes.Store(0) // a new process counts from its start
	if third, err := top.Look(ctx); err != nil || third.Nodes[0].Puts != nil {
		t.Errorf("%+v, %v", third, err)
	}
	if _, err := readMetrics(strings.NewReader(putsMetric + " x\n")); err == nil {
		t.Error("a metric that is no number is taken")
	}
}

// Beside --listen-client-http-urls the client URLs speak gRPC alone. A look says so.
func TestTopWithoutHTTP(t *testing.T) {
	b := &bundler{name: "n1"}
	at := serveBackend(t, b)
	b.survey = &adminpb.SurveyResponse{Nodes: []*adminpb.NodeSurvey{{Node: &adminpb.Node{Id: "a", Name: "n1", State: "serving", Alive: true, ClientUrls: []string{"http://" + at}}}}}
	c, err := NewClient([]string{at}, nil)
	if err != nil {
		t.Fatal(err)
	}
	top := NewTop(c)
	defer top.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	look, err := top.Look(ctx)
	if err != nil || len(look.Nodes) != 1 || !strings.Contains(look.Nodes[0].Error, "--listen-client-http-urls") {
		t.Errorf("%+v, %v", look, err)
	}
	_, err = top.metricsAt(ctx, "http://"+closedAddress(t))
	if err == nil || strings.Contains(err.Error(), "--listen-client-http-urls") {
		t.Errorf("nobody is there: %v", err)
	}
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	defer secure.Close()
	if _, err = top.metricsAt(ctx, secure.URL); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an authority that is not known: %v", err)
	}
	if err = noHTTP("https://h:1", errors.New("remote error: tls: no application protocol")); !strings.Contains(err.Error(), "--listen-client-http-urls") {
		t.Error(err)
	}
}

// What a look is like for people.
func TestTopScreen(t *testing.T) {
	f := &TopFrame{
		At: time.Date(2026, 11, 28, 20, 0, 0, 0, time.UTC), Total: 12, NoQuorum: 1, Stale: true,
		Nodes: []TopNode{
			{Node: "n1", State: "serving", CPU: new(151.2), Puts: new(1234.5), Gets: new(3.0), Lag: new(0.0), Leaders: 4, DiskUsed: 30, DiskSize: 100, FsyncP99Us: 1900},
			{Node: "n2", State: "dead"},
		},
		Ranges:   []TopRange{{7, []byte("/a/\x00"), "n1", 812.25, 3, 2 << 20}, {1, nil, "", 0.5, 0, 0}},
		Slow:     []slowCallJSON{{At: "2026-11-28T19:59:58.250Z", Node: "n1", Method: "/etcdserverpb.KV/Txn", Range: 7, Micros: 412_400, Cause: "quorum: node n2 last, 400 ms in range 7", Retries: 1}},
		Findings: []Finding{{Critical, "nodes", "n2 is dead", "start it"}},
	}
	var out bytes.Buffer
	if err := WriteTop(&out, Table, QuotedKeys, f); err != nil {
		t.Fatal(err)
	}
	want := `20:00:00Z  2 nodes, 12 ranges, 1 without a quorum; 1234 puts/s, 3 gets/s; no quorum answers: this is what one node knew last
+------+---------+-------+--------+--------+---------+-----+------+-----------+--+
| NODE | STATE   | CPU   | PUTS/S | GETS/S | LEADERS | LAG | DISK | FSYNC P99 |  |
+------+---------+-------+--------+--------+---------+-----+------+-----------+--+
| n1   | serving | 151 % | 1234   | 3      | 4       | 0   | 30 % | 1.9 ms    |  |
| n2   | dead    | ?     | ?      | ?      | 0       | ?   |      |           |  |
+------+---------+-------+--------+--------+---------+-----+------+-----------+--+
+-------+---------------+--------+----------+---------+-----------+
| RANGE | FROM          | LEADER | WRITES/S | READS/S | WRITTEN/S |
+-------+---------------+--------+----------+---------+-----------+
| 7     | "/a/\x00"     | n1     | 812.2    | 3.0     | 2.0 MiB   |
| 1     | the first key |        | 0.5      | 0.0     | 0 B       |
+-------+---------------+--------+----------+---------+-----------+
+--------------------------+------+----------------------+-------+-------+---------+-----------------------------------------+
| AT                       | NODE | METHOD               | TOOK  | RANGE | RETRIES | CAUSE                                   |
+--------------------------+------+----------------------+-------+-------+---------+-----------------------------------------+
| 2026-11-28T19:59:58.250Z | n1   | /etcdserverpb.KV/Txn | 412ms | 7     | 1       | quorum: node n2 last, 400 ms in range 7 |
+--------------------------+------+----------------------+-------+-------+---------+-----------------------------------------+
critical: n2 is dead
skein doctor says what to do about each
`
	if out.String() != want {
		t.Errorf("\n%s", &out)
	}
	if h := hottest([]*adminpb.Range{{Id: 1}, {Id: 2, ReadsPerSecond: 1}, {Id: 3, WritesPerSecond: 9}}); len(h) != 2 || h[0].ID != 3 {
		t.Errorf("%+v", h)
	}
	var slow []slowCallJSON
	for age := range 2 * topSlow { // in minutes
		slow = append(slow, slowCallJSON{At: f.At.Add(-time.Duration(age) * time.Minute).Format(time.RFC3339), Retries: uint32(age)})
	}
	if s := newest(slow, f.At); len(s) != 5 || s[4].Retries != 4 {
		t.Errorf("of ten slow requests: %+v", s)
	}
	if s := newest(slow, f.At.Add(topSlowTime)); len(s) != 0 {
		t.Errorf("old slow requests: %+v", s)
	}
}
