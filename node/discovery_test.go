package node_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node"
	"github.com/skeindb/skein/node/join"
)

// nameServer answers DNS queries on loopback.
type nameServer struct {
	conn net.PacketConn

	mu sync.Mutex
	// Guarded by mu. srv are the SRV records by their names, as HOST:PORT; hosts have addresses. failing has every query fail.
	srv     map[string][]string
	hosts   map[string][4]byte
	failing bool
}

func newNameServer(t *testing.T) *nameServer {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &nameServer{conn: conn, srv: map[string][]string{}, hosts: map[string][4]byte{"localhost": {127, 0, 0, 1}}}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if answer := s.answer(b[:n]); err == nil && answer != nil {
				_, _ = conn.WriteTo(answer, from)
			}
		}
	})
	t.Cleanup(func() { conn.Close(); wg.Wait() })
	return s
}

func (s *nameServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// answer is nil for what is no query.
func (s *nameServer) answer(query []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	var q dnsmessage.Message
	if q.Unpack(query) != nil || len(q.Questions) != 1 {
		return nil
	}
	ask := q.Questions[0]
	name := strings.TrimSuffix(ask.Name.String(), ".")
	a := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true, Authoritative: true, RecursionAvailable: true}, Questions: q.Questions}
	header := dnsmessage.ResourceHeader{Name: ask.Name, Type: ask.Type, Class: dnsmessage.ClassINET}
	ip, isHost := s.hosts[name]
	records, isService := s.srv[name]
	switch {
	case s.failing:
		a.RCode = dnsmessage.RCodeServerFailure
	case !isHost && !isService:
		a.RCode = dnsmessage.RCodeNameError
	case isHost && ask.Type == dnsmessage.TypeA:
		a.Answers = append(a.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.AResource{A: ip}})
	case ask.Type == dnsmessage.TypeSRV:
		for i, r := range records {
			u := url.URL{Host: r}
			var port uint16
			if _, err := fmt.Sscan(u.Port(), &port); err != nil {
				panic(err) // of the test
			}
			a.Answers = append(a.Answers, dnsmessage.Resource{Header: header, Body: &dnsmessage.SRVResource{
				Priority: uint16(i), Target: dnsmessage.MustNewName(u.Hostname() + "."), Port: port,
			}})
		}
	}
	b, err := a.Pack()
	if err != nil {
		panic(err) // of the test
	}
	return b
}

func (s *nameServer) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", s.conn.LocalAddr().String())
	}}
}

// founder is the configuration of a node that SRV records of skein.test are to name.
func founder(t *testing.T, name, peerURL string) *config.Config {
	t.Helper()
	u, err := url.Parse(peerURL)
	if err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	c.Name, c.DiscoverySRV, c.AdvertisePeerURLs, c.ListenPeerURLs = name, "skein.test", []url.URL{*u}, []url.URL{*u}
	c.Complete()
	return c
}

func (s *nameServer) find(ctx context.Context, c *config.Config, log *zap.Logger) (*join.Membership, error) {
	j := join.Joiner{Config: c, Resolver: s.resolver(), FS: vfs.NewMem(), Clock: clock.System(), Logger: log}
	return j.Find(ctx)
}

// Founders whom SRV records name work out the same cluster, whatever the order of the records, and whether they know
// themselves by the host of a record or by its address.
func TestFoundersBySRVRecords(t *testing.T) {
	t.Parallel()
	s := newNameServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s.set(func() {
		s.hosts["a.skein.test"], s.hosts["b.skein.test"], s.hosts["c.skein.test"] = [4]byte{10, 0, 0, 1}, [4]byte{10, 0, 0, 2}, [4]byte{10, 0, 0, 2}
	})
	for _, service := range []string{"_etcd-server._tcp.skein.test", "_etcd-server-ssl._tcp.skein.test", "_etcd-server-ssl-x._tcp.skein.test"} {
		scheme, suffix := "http", ""
		if strings.Contains(service, "-ssl") {
			scheme = "https"
		}
		if strings.Contains(service, "-x.") {
			suffix = "x"
		}
		var clusters []keyspace.ClusterID
		var selves []keyspace.NodeID
		for i, at := range []string{"A.skein.test:2380", "10.0.0.2:2380", "10.0.0.2:2381"} {
			s.set(func() {
				records := []string{"a.skein.test:2380", "b.skein.test:2380", "c.skein.test:2381"}
				s.srv = map[string][]string{service: append(records[i:], records[:i]...)}
			})
			c := founder(t, fmt.Sprintf("n%d", i), scheme+"://"+at)
			c.DiscoverySRVName = suffix
			m, err := s.find(ctx, c, zap.NewNop())
			if err != nil {
				t.Fatal(err)
			}
			if len(m.Founders) != 3 || m.Founders[0].Name+m.Founders[1].Name+m.Founders[2].Name != "" {
				t.Errorf("%s: the founders, whose rows are to be the same everywhere: %+v", service, m.Founders)
			}
			clusters, selves = append(clusters, m.Cluster), append(selves, m.Self)
			for _, f := range m.Founders {
				if f.ID == m.Self && f.PeerURLs[0] != scheme+"://"+[]string{"a.skein.test:2380", "b.skein.test:2380", "c.skein.test:2381"}[i] {
					t.Errorf("%s: %s takes itself for the one at %s", service, at, f.PeerURLs[0])
				}
			}
		}
		slices.Sort(selves)
		if len(slices.Compact(clusters)) != 1 || len(slices.Compact(selves)) != 3 {
			t.Errorf("%s: clusters %v, nodes %v", service, clusters, selves)
		}
	}
}

// Records that do not fit are refused, and say what is to be done. A resolver that fails is asked again.
func TestSRVRecordsThatDoNotFit(t *testing.T) {
	t.Parallel()
	s := newNameServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s.set(func() { s.hosts["a.skein.test"], s.hosts["b.skein.test"] = [4]byte{10, 0, 0, 1}, [4]byte{10, 0, 0, 1} })
	const service = "_etcd-server._tcp.skein.test"
	for _, c := range []struct {
		what, at string
		records  []string
		want     string
	}{
		{"there are none", "http://10.0.0.1:2380", nil, service},
		{"they are for http", "https://10.0.0.1:2380", []string{"a.skein.test:2380"}, "_etcd-server-ssl._tcp.skein.test are to name the founders, since the peer URLs of this node are https"},
		{"another port", "http://10.0.0.1:2381", []string{"a.skein.test:2380"}, "leads to http://10.0.0.1:2381: add one for this node"},
		{"another host", "http://10.0.0.9:2380", []string{"a.skein.test:2380"}, "leads to http://10.0.0.9:2380: add one for this node"},
		{"a host that nobody knows", "http://10.0.0.9:2380", []string{"d.skein.test:2380"}, "d.skein.test"},
		{"two for this node", "http://10.0.0.1:2380", []string{"a.skein.test:2380", "b.skein.test:2380"}, "as a.skein.test:2380 and b.skein.test:2380: each founder has one"},
	} {
		s.set(func() {
			s.srv = map[string][]string{}
			if c.records != nil {
				s.srv[service] = c.records
			}
		})
		if m, err := s.find(ctx, founder(t, "n1", c.at), zap.NewNop()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %+v, %v", c.what, m, err)
		}
	}

	s.set(func() { s.srv[service], s.failing = []string{"a.skein.test:2380"}, true })
	asked := false // by one goroutine, as the log's hook
	log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(discard{}), zap.WarnLevel), zap.Hooks(func(zapcore.Entry) error {
		asked = true
		s.set(func() { s.failing = false })
		return nil
	}))
	if _, err := s.find(ctx, founder(t, "n1", "http://10.0.0.1:2380"), log); err != nil || !asked {
		t.Errorf("a resolver that has failed: %v, it said that it asks again: %t", err, asked)
	}
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

// Three nodes that know only the domain become a cluster whose members have their names, and start again without a
// resolver.
func TestAClusterBySRVRecords(t *testing.T) {
	if testing.Short() {
		t.Skip("starts three nodes")
	}
	t.Parallel()
	const nodes = 3
	s := newNameServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ports, dir := unusedPorts(t, 2*nodes), t.TempDir()
	start := func(i int) (*node.Node, error) {
		c := founder(t, fmt.Sprintf("n%d", i+1), fmt.Sprintf("http://127.0.0.1:%d", ports[nodes+i]))
		client := url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", ports[i])}
		c.ListenClientURLs, c.AdvertiseClientURLs = []url.URL{client}, []url.URL{client}
		c.DataDir, c.WALDir, c.MemoryBytes = filepath.Join(dir, c.Name), filepath.Join(dir, c.Name, "wal"), 256<<20
		if err := c.Validate(); err != nil {
			return nil, err
		}
		return node.StartWith(ctx, c, zap.NewNop(), node.StartOptions{Resolver: s.resolver()})
	}
	s.set(func() {
		for _, p := range ports[nodes:] {
			s.srv["_etcd-server._tcp.skein.test"] = append(s.srv["_etcd-server._tcp.skein.test"], fmt.Sprintf("localhost:%d", p))
		}
	})
	var all [nodes]*node.Node
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() {
			n, err := start(i)
			if err != nil {
				t.Error(err)
				return
			}
			all[i] = n
		})
	}
	wg.Wait()
	defer func() {
		for _, n := range all {
			if n != nil {
				_ = n.Stop(ctx)
			}
		}
	}()
	announced := func(n *node.Node) {
		t.Helper()
		if n == nil {
			t.FailNow()
		}
		select {
		case <-n.Announced():
		case <-ctx.Done():
			t.Fatal("no quorum has taken the node")
		}
	}
	for _, n := range all {
		announced(n)
	}
	cl, err := clientv3.New(clientv3.Config{Endpoints: []string{fmt.Sprintf("127.0.0.1:%d", ports[1])}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	if _, err := cl.Put(ctx, "k", "v"); err != nil {
		t.Fatal(err)
	}
	members, err := cl.MemberList(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range members.Members {
		names = append(names, m.GetName())
	}
	if slices.Sort(names); !slices.Equal(names, []string{"n1", "n2", "n3"}) {
		t.Errorf("members %q", names)
	}

	s.conn.Close()
	if err := all[0].Stop(ctx); err != nil {
		t.Error(err)
	}
	if all[0], err = start(0); err != nil {
		t.Fatal(err)
	}
	announced(all[0])
}

// A founder that was ended before its cluster had a majority, and finds its name server failing when it is started again,
// waits for it and founds the cluster.
func TestAFounderThatIsNotAdmittedYetStartsAgain(t *testing.T) {
	t.Parallel()
	s := newNameServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const service = "_etcd-server._tcp.skein.test"
	ports, dir := unusedPorts(t, 2), t.TempDir()
	s.set(func() { s.srv[service] = []string{fmt.Sprintf("localhost:%d", ports[1])} })
	c := founder(t, "n1", fmt.Sprintf("http://127.0.0.1:%d", ports[1]))
	client := url.URL{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", ports[0])}
	c.ListenClientURLs, c.AdvertiseClientURLs = []url.URL{client}, []url.URL{client}
	c.DataDir, c.WALDir, c.MemoryBytes = filepath.Join(dir, "n1"), filepath.Join(dir, "n1", "wal"), 256<<20
	m, err := s.find(ctx, c, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	// As far as the start gets that is ended.
	lock, err := engine.OpenDir(vfs.Default, c.DataDir, c.WALDir, engine.Identity{Cluster: m.Cluster, Node: m.Self}, keyspace.OwnVersions())
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	s.set(func() { s.failing = true })
	log := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(discard{}), zap.WarnLevel), zap.Hooks(func(e zapcore.Entry) error {
		if strings.Contains(e.Message, "asking again") {
			s.set(func() { s.failing = false })
		}
		return nil
	}))
	n, err := node.StartWith(ctx, c, log, node.StartOptions{Resolver: s.resolver(), SurelyNew: true})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-n.Announced():
	case <-ctx.Done():
		t.Error("the node is no member")
	}
	if err := n.Stop(context.WithoutCancel(ctx)); err != nil {
		t.Error(err)
	}
}
