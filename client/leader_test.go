package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/pipepb"
	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embedtest"
)

// fakeCluster has nodes that say who leads a key.
type fakeCluster struct {
	members []*fakeMember

	mu sync.Mutex
	// Guarded by mu. leads has the index of the node that leads the keys with the first byte, and elsewhere the URLs that a node is
	// said to have instead of its own.
	leads     map[byte]int
	elsewhere map[int][]string
}

// fakeMember is a node of a fakeCluster.
type fakeMember struct {
	pipepb.UnsafePipeServer
	c      *fakeCluster
	index  int
	addr   string
	server *grpc.Server

	mu sync.Mutex
	// Guarded by mu. served counts the operations by the first bytes of their keys, and silent those that ask for no place.
	served, silent map[byte]int
}

func newFakeCluster(t *testing.T, nodes int) *fakeCluster {
	t.Helper()
	c := &fakeCluster{leads: map[byte]int{}, elsewhere: map[int][]string{}}
	for i := range nodes {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		m := &fakeMember{c: c, index: i, addr: l.Addr().String(), server: grpc.NewServer(), served: map[byte]int{}, silent: map[byte]int{}}
		pipepb.RegisterPipeServer(m.server, m)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = m.server.Serve(l) // ends by Stop
		}()
		t.Cleanup(func() {
			m.server.Stop()
			<-done
		})
		c.members = append(c.members, m)
	}
	return c
}

// lead has a node lead the keys with a first byte.
func (c *fakeCluster) lead(first byte, node int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leads[first] = node
}

// move has a node be reached elsewhere.
func (c *fakeCluster) move(node int, urls []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.elsewhere[node] = urls
}

// place returns where a key is led.
func (c *fakeCluster) place(key []byte) (node int, p *pipepb.Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	node = c.leads[key[0]]
	urls := c.elsewhere[node]
	if urls == nil {
		urls = []string{"http://" + c.members[node].addr}
	}
	return node, &pipepb.Place{Node: uint64(node + 1), ClientUrls: urls, Key: key[:1], RangeEnd: []byte{key[0] + 1}}
}

// Open implements pipepb.PipeServer.
func (m *fakeMember) Open(s grpc.BidiStreamingServer[pipepb.ClientFrame, pipepb.ServerFrame]) error {
	if err := s.Send(&pipepb.ServerFrame{Window: &pipepb.Window{Operations: 16, Bytes: 1 << 20, FrameBytes: 1 << 16, Node: uint64(m.index + 1)}}); err != nil {
		return err
	}
	for {
		f, err := s.Recv()
		if err != nil {
			return nil //nolint:nilerr // the client's side is closed
		}
		out := &pipepb.ServerFrame{}
		for _, op := range f.GetOperations() {
			a := answer(op)
			key := op.GetPut().GetKey()
			m.mu.Lock()
			m.served[key[0]]++
			if !op.GetLocate() {
				m.silent[key[0]]++
			}
			m.mu.Unlock()
			if leader, p := m.c.place(key); op.GetLocate() && leader != m.index {
				a.Place = p
			}
			out.Answers = append(out.Answers, a)
		}
		if err := s.Send(out); err != nil {
			return err
		}
	}
}

// counts returns how many operations on keys with a first byte came, and how many of them have asked for no place.
func (m *fakeMember) counts(first byte) (served, silent int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.served[first], m.silent[first]
}

// putUntil puts keys with a first byte until ready. Puts of unknown fate are let pass where a node has gone.
func putUntil(t *testing.T, c *client.Client, first byte, ready func() bool) {
	t.Helper()
	for i := 0; !ready(); i++ {
		if _, err := c.Put(t.Context(), fmt.Sprintf("%c/%d", first, i), "v"); err != nil && !errors.Is(err, client.ErrUnknownFate) {
			t.Fatal(err)
		}
	}
}

// reaches puts keys with a first byte until a node has one of them.
func reaches(t *testing.T, c *client.Client, first byte, m *fakeMember) {
	t.Helper()
	before, _ := m.counts(first)
	putUntil(t, c, first, func() bool {
		now, _ := m.counts(first)
		return now > before
	})
}

// TestSendsToLeaders: what a node that is not an endpoint leads goes there once a put has told so, and the rest stays where it was.
func TestSendsToLeaders(t *testing.T) {
	f := newFakeCluster(t, 3)
	f.lead('b', 1)
	f.lead('c', 2)
	c := open(t, at(f.members[0].addr))
	for first, node := range map[byte]int{'a': 0, 'b': 1, 'c': 2} {
		reaches(t, c, first, f.members[node])
		before := 0
		for _, m := range f.members {
			n, _ := m.counts(first)
			before += n
		}
		own, _ := f.members[node].counts(first)
		const more = 30
		for i := range more {
			_, err := c.Put(t.Context(), fmt.Sprintf("%c/x%d", first, i), "v")
			must(t, err)
		}
		if now, _ := f.members[node].counts(first); now != own+more {
			t.Errorf("%d of %d puts of %c reach node %d, which leads it", now-own, more, first, node)
		}
	}
}

// TestLeaderMoves: a node that does not lead a key any more says so, and serves it. The client goes on to the next one, be it the one
// that it began with.
func TestLeaderMoves(t *testing.T) {
	f := newFakeCluster(t, 3)
	c := open(t, at(f.members[0].addr))
	for _, node := range []int{1, 2, 0, 1} {
		f.lead('b', node)
		reaches(t, c, 'b', f.members[node])
	}
}

// TestLeaderDies: without a leader the endpoint serves what it has led. If it comes back, be it elsewhere, it is found.
func TestLeaderDies(t *testing.T) {
	f := newFakeCluster(t, 3)
	f.lead('b', 1)
	c := open(t, at(f.members[0].addr))
	reaches(t, c, 'b', f.members[1])
	f.members[1].server.Stop()
	reaches(t, c, 'b', f.members[0])
	reaches(t, c, 'b', f.members[0])
	f.move(1, []string{"http://" + f.members[2].addr})
	reaches(t, c, 'b', f.members[2])
}

// TestUnreachableLeader: where a leader's URLs cannot be reached, or must not be used, everything goes by the endpoint, which is not asked
// again each time.
func TestUnreachableLeader(t *testing.T) {
	for name, urls := range map[string][]string{
		"nobody listens": {"http://127.0.0.1:1"}, "another scheme": {"https://127.0.0.1:1", "ftp://127.0.0.1:1", "127.0.0.1:1", "http://", "\x00"}, "none": {},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeCluster(t, 2)
			f.lead('b', 1)
			f.move(1, urls)
			c := open(t, at(f.members[0].addr))
			putUntil(t, c, 'b', func() bool {
				_, silent := f.members[0].counts('b')
				return silent >= 5
			})
			if served, _ := f.members[1].counts('b'); served != 0 {
				t.Errorf("%d puts have reached it", served)
			}
		})
	}
}

// TestSecondURL: a node is reached by the URL that can be.
func TestSecondURL(t *testing.T) {
	f := newFakeCluster(t, 2)
	f.lead('b', 1)
	f.move(1, []string{"http://127.0.0.1:1", "http://" + f.members[1].addr})
	reaches(t, open(t, at(f.members[0].addr)), 'b', f.members[1])
}

// TestEndpointsOnly: a client that keeps to its endpoints asks nothing. Who has etcd's client learn endpoints keeps to them.
func TestEndpointsOnly(t *testing.T) {
	for name, set := range map[string]func(*client.Config){
		"set": func(c *client.Config) { c.EndpointsOnly = true }, "by AutoSyncInterval": func(c *client.Config) { c.Etcd.AutoSyncInterval = time.Hour },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeCluster(t, 2)
			f.lead('b', 1)
			cfg := at(f.members[0].addr)
			set(&cfg)
			c := open(t, cfg)
			const puts = 50
			for i := range puts {
				_, err := c.Put(t.Context(), fmt.Sprint("b", i), "v")
				must(t, err)
			}
			if served, silent := f.members[0].counts('b'); served != puts || silent != puts {
				t.Errorf("%d of %d puts come, %d without a question", served, puts, silent)
			}
		})
	}
}

// operationsAt returns how many operations have come to a node by pipes.
func operationsAt(t *testing.T, n *embedtest.Node) string {
	t.Helper()
	r, err := http.Get("http://" + n.Endpoint() + "/metrics")
	must(t, err)
	defer r.Body.Close()
	all, err := io.ReadAll(r.Body)
	must(t, err)
	_, rest, _ := strings.Cut(string(all), "\nskein_pipe_frame_operations_sum ")
	n1, _, _ := strings.Cut(rest, "\n")
	return n1
}

// refusesNobody waits until a node knows that users are checked.
func refusesNobody(t *testing.T, n *embedtest.Node) {
	t.Helper()
	nobody, err := clientv3.New(at(n.Endpoint()).Etcd)
	must(t, err)
	defer nobody.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	for {
		_, err := nobody.Get(ctx, "b")
		if errors.Is(err, rpctypes.ErrUserEmpty) {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("the node does not check users: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestLeadersOfACluster: a user's puts go to whichever node leads the range, by pipes that the user's token opens.
func TestLeadersOfACluster(t *testing.T) {
	if testing.Short() {
		t.Skip("three nodes")
	}
	s := embedtest.New(t, embedtest.Nodes(3), embedtest.WithConfig(func(c *config.Config) { c.BcryptCost, c.InitialRanges = 4, 4 }))
	root := s.Client()
	for _, user := range []string{"root", "u"} {
		_, err := root.UserAdd(t.Context(), user, "pw")
		must(t, err)
		_, err = root.RoleAdd(t.Context(), user)
		must(t, err)
		_, err = root.UserGrantRole(t.Context(), user, user)
		must(t, err)
	}
	_, err := root.RoleGrantPermission(t.Context(), "u", "b", "c", clientv3.PermissionType(clientv3.PermReadWrite))
	must(t, err)
	_, err = root.AuthEnable(t.Context())
	must(t, err)
	for n := range 3 {
		refusesNobody(t, s.Node(n))
	}
	admin, err := adminapi.NewClient(s.Endpoints(), nil)
	must(t, err)
	admin.As("root", "pw")
	ranges, err := admin.RangeList(t.Context())
	must(t, err)
	var id uint64
	for _, r := range ranges.GetRanges() {
		if string(r.GetStart()) <= "b" && (len(r.GetEnd()) == 0 || string(r.GetEnd()) > "b") {
			id = r.GetId()
		}
	}
	cfg := at(s.Node(0).Endpoint())
	cfg.Etcd.Username, cfg.Etcd.Password = "u", "pw"
	c := open(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	for _, node := range []int{1, 2} {
		before := operationsAt(t, s.Node(node))
		for i := 0; operationsAt(t, s.Node(node)) == before; i++ {
			// Either may be refused while the range is on its way, and placement may move it as well.
			moved := admin.RangeTransferLeader(ctx, id, fmt.Sprintf("n%d", node+1))
			if _, err := c.Put(ctx, fmt.Sprint("b", i), "v"); ctx.Err() != nil {
				t.Fatalf("no put comes to node %d: %v, %v", node, moved, err)
			}
		}
	}
	if _, err := c.Put(ctx, "x", "v"); !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Error(err)
	}
}
