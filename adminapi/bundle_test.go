package adminapi

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/api/adminpb"
)

// bundler is a node that makes its part of bundles.
type bundler struct {
	fakeBackend
	name   string
	survey *adminpb.SurveyResponse
	part   func(ctx context.Context, q *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error
}

func (b *bundler) Survey(context.Context) (*adminpb.SurveyResponse, error) {
	s := &adminpb.SurveyResponse{Asked: b.name, Nodes: b.survey.GetNodes()}
	return s, nil
}

func (b *bundler) Bundle(ctx context.Context, q *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error {
	return b.part(ctx, q, send)
}

// serveBackend serves a backend, and who checks users if somebody does, and returns its address.
func serveBackend(t *testing.T, b Backend, users ...etcdserverpb.AuthServer) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	Register(s, b)
	for _, u := range users {
		etcdserverpb.RegisterAuthServer(s, u)
	}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

// closedAddress is one at which nobody listens.
func closedAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// unpack returns the files of an archive by their names.
func unpack(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, twice := files[h.Name]; twice || h.Mode != 0o600 {
			t.Errorf("%s: twice %t, mode %o", h.Name, twice, h.Mode)
		}
		files[h.Name] = string(b)
	}
}

// Whoever has the address of a dead node is asked for its part and gets no password, unless the operator has named that address.
func TestBundleLogsInNowhereElse(t *testing.T) {
	survey := &adminpb.SurveyResponse{}
	answers := func(name string) *bundler {
		return &bundler{name: name, survey: survey, part: func(_ context.Context, _ *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error {
			return send(&adminpb.BundleResponse{Node: name, File: "log.jsonl", About: "the log", Data: []byte("x"), Last: true})
		}}
	}
	n1, named := serveBackend(t, answers("n1"), &logins{}), serveBackend(t, answers("n2"), &logins{})
	n3 := serveBackend(t, answers("n3"), stranger{t: t})
	elsewhere := serveBackend(t, answers("n2"), stranger{t: t})
	survey.Nodes = []*adminpb.NodeSurvey{
		{Node: &adminpb.Node{Id: "a1", Name: "n1", State: "serving", Alive: true, ClientUrls: []string{"http://" + n1}}},
		{Node: &adminpb.Node{Id: "a2", Name: "n2", State: StateDead, ClientUrls: []string{"http://" + elsewhere}}},
		{Node: &adminpb.Node{Id: "a3", Name: "n3", State: StateDead, ClientUrls: []string{"http://" + n3}}},
	}
	c, err := NewClient([]string{n1, named}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.As("root", "secret")
	nodes, err := c.WriteBundle(t.Context(), io.Discard, BundleOptions{Name: "b", Told: func(*BundledNode) {}})
	if err != nil || len(nodes) != 3 {
		t.Fatal(nodes, err)
	}
	for _, n := range nodes {
		if n.Files != 1 {
			t.Errorf("%+v", n)
		}
	}
}

// A bundle has the parts of the nodes that answer, each with all its pieces, and names the others: one that is closed, and
// one that goes away in the middle.
func TestBundle(t *testing.T) {
	survey := &adminpb.SurveyResponse{}
	whole := func(name string) *bundler {
		return &bundler{name: name, survey: survey, part: func(_ context.Context, q *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error {
			if q.GetProfileMs() != 1500 || string(q.GetSalt()) != "salt" {
				t.Errorf("%v", q)
			}
			return errors.Join(
				send(&adminpb.BundleResponse{Node: name, File: "log.jsonl", About: "the log", Data: []byte("one\n")}),
				send(&adminpb.BundleResponse{Node: name, File: "log.jsonl", Data: []byte("two\n"), Last: true}),
				send(&adminpb.BundleResponse{Node: name, File: "../../evil", About: "a name that leads elsewhere", Data: []byte("x"), Last: true}),
				send(&adminpb.BundleResponse{Node: name, File: "metrics.txt", About: "metrics", Error: "hangs", Last: true}),
			)
		}}
	}
	broken := &bundler{name: "n3", survey: survey, part: func(_ context.Context, _ *adminpb.BundleRequest, send func(*adminpb.BundleResponse) error) error {
		return errors.Join(
			send(&adminpb.BundleResponse{Node: "n3", File: "log.jsonl", About: "the log", Data: []byte("half"), Last: false}),
			errors.New("the disk is gone"),
		)
	}}
	n1, n2, n3, closed := serveBackend(t, whole("n1")), serveBackend(t, whole("n2")), serveBackend(t, broken), closedAddress(t)
	for i, urls := range [][]string{{"http://" + closed}, {"http://" + closed, "http://" + n2}, {"http://" + n3}, {"http://" + closed}, nil} {
		name, state := []string{"n1", "n2", "n3", "n4", "n5"}[i], []string{"serving", "serving", "serving", StateDead, "unstarted"}[i]
		survey.Nodes = append(survey.Nodes, &adminpb.NodeSurvey{Node: &adminpb.Node{Name: name, State: state, Alive: i < 3, ClientUrls: urls}})
	}
	c, err := NewClient([]string{closed, n1}, nil) // n1's own URLs lead nowhere: it is asked where it was given
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	var told []string
	o := BundleOptions{Name: "b", Profile: 1500 * time.Millisecond, Salt: []byte("salt"), Told: func(n *BundledNode) { told = append(told, n.Node) }}
	nodes, err := c.WriteBundle(t.Context(), &out, o)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(told)
	if strings.Join(told, " ") != "n1 n2 n3 n4" || len(nodes) != 4 {
		t.Fatalf("%v, %+v", told, nodes)
	}
	for i, want := range []struct {
		files int
		err   string
	}{{3, ""}, {3, ""}, {1, "the disk is gone"}, {0, "no endpoint can be reached"}} {
		if n := nodes[i]; n.Files != want.files || (n.Error == "") != (want.err == "") || !strings.Contains(n.Error, want.err) {
			t.Errorf("%+v", n)
		}
	}
	files := unpack(t, out.Bytes())
	// Who is dead is asked why at its client URL, as doctor does.
	for _, name := range []string{"b/cluster/doctor.txt", "b/cluster/status.txt", "b/cluster/status.json"} {
		if !strings.Contains(files[name], "nothing listens at http://"+closed) {
			t.Errorf("%s: %s", name, files[name])
		}
	}
	for name, want := range map[string]string{
		"b/nodes/n1/log.jsonl": "one\ntwo\n", "b/nodes/n2/log.jsonl": "one\ntwo\n", "b/nodes/n3/log.jsonl": "half", "b/nodes/n1/_.._evil": "x",
	} {
		if files[name] != want {
			t.Errorf("%s: %q", name, files[name])
		}
	}
	index := files["b/index.txt"]
	for name := range files {
		if short := strings.TrimPrefix(name, "b/"); short != "index.txt" && !strings.Contains(index, "| "+short+" ") {
			t.Errorf("the index lacks %s", short)
		}
	}
	for _, want := range []string{"nodes/n1/metrics.txt", "hangs", "not whole", "the disk is gone", "no endpoint can be reached", "the log"} {
		if !strings.Contains(index, want) {
			t.Errorf("the index lacks %q:\n%s", want, index)
		}
	}
	for _, name := range []string{"cluster/status.txt", "cluster/status.json", "cluster/doctor.txt", "cluster/ranges.json", "cluster/ranges/9.json"} {
		if files["b/"+name] == "" {
			t.Errorf("%s is missing", name)
		}
	}
	if strings.Contains(files["b/cluster/ranges.json"], `"start":"m"`) {
		t.Errorf("a key: %s", files["b/cluster/ranges.json"])
	}
	// Some nodes alone, and a name that nobody has.
	o.Nodes, o.Told = []string{"n2"}, func(*BundledNode) {}
	if nodes, err = c.WriteBundle(t.Context(), io.Discard, o); err != nil || len(nodes) != 1 || nodes[0].Node != "n2" {
		t.Errorf("%+v, %v", nodes, err)
	}
	o.Nodes = []string{"n9"}
	if _, err = c.WriteBundle(t.Context(), io.Discard, o); err == nil || !strings.Contains(err.Error(), `no node "n9"`) {
		t.Error(err)
	}
}

// Where a node falls silent at one of its addresses, the next one begins anew, and nothing is there twice.
func TestBundlePartBeginsAnew(t *testing.T) {
	var out bytes.Buffer
	a := newBundleArchive(&out, &BundleOptions{Name: "b"})
	p := bundlePart{archive: a, node: &bundleNode{name: "n1"}, taken: map[string]bool{}}
	for _, piece := range []*adminpb.BundleResponse{
		{File: "a", About: "a", Data: []byte("all of a"), Last: true},
		{File: "b", About: "b", Data: []byte("half of b")},
		{File: "a", About: "a", Data: []byte("a again"), Last: true},
		{File: "b", About: "b", Data: []byte("all of ")},
		{File: "b", Data: []byte("b"), Last: true},
	} {
		if err := p.take(piece); err != nil {
			t.Fatal(err)
		}
	}
	p.end(nil)
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	if files := unpack(t, out.Bytes()); len(files) != 2 || files["b/nodes/n1/a"] != "all of a" || files["b/nodes/n1/b"] != "all of b" {
		t.Errorf("%q", files)
	}
	p = bundlePart{archive: newBundleArchive(io.Discard, &BundleOptions{}), node: &bundleNode{}, taken: map[string]bool{}, bytes: bundleNodeBytes}
	if err := p.take(&adminpb.BundleResponse{File: "a", About: "a", Data: []byte("x")}); err == nil || !strings.Contains(err.Error(), "larger") {
		t.Errorf("a part beyond its bound: %v", err)
	}
}

// Nobody answers, or the backend makes no bundles: there is an error and no bundle.
func TestNoBundle(t *testing.T) {
	for _, c := range []struct{ address, want string }{
		{closedAddress(t), "no endpoint can be reached"}, {serveBackend(t, &fakeBackend{}), "Bundle not implemented"},
	} {
		client, err := NewClient([]string{c.address}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		told := 0
		_, err = client.WriteBundle(t.Context(), io.Discard, BundleOptions{Told: func(*BundledNode) { mu.Lock(); told++; mu.Unlock() }})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v", err)
		}
	}
}

func TestTroubledRanges(t *testing.T) {
	all := []*adminpb.Range{
		{Id: 1, Leader: "n1"},
		{Id: 2, Leader: "n1", WritesPerSecond: 1},
		{Id: 3, Leader: "n1", ReadsPerSecond: 5},
		{Id: 4, Leader: "n1", Operation: &adminpb.Operation{}},
		{Id: 5, Leader: "n1", Members: []*adminpb.Replica{{Quarantine: "rot"}}},
		{Id: 6},
		{Id: 7, WaitsFor: []string{"n2"}},
	}
	var ids []uint64
	for _, r := range troubled(all) {
		ids = append(ids, r.GetId())
	}
	if !slices.Equal(ids, []uint64{7, 6, 5, 4, 3, 2}) {
		t.Error(ids)
	}
	many := slices.Repeat(all[5:6], 200)
	if n := len(troubled(many)); n != troubledRanges {
		t.Error(n)
	}
}
