package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
)

// joiner returns a process that is to join the others by one of them; it is not started.
func (c *processes) joiner(name string, via ...*process) *process {
	c.t.Helper()
	ports := unusedPorts(c.t, 2)
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", ports[0]), fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	first := c.nodes[0]
	p := &process{name: name, client: client, binary: first.binary, dir: first.dir}
	var addrs []string
	for _, v := range via {
		addrs = append(addrs, strings.TrimPrefix(v.client, "http://"))
	}
	p.args = []string{
		"--name", name, "--data-dir", filepath.Join(p.dir, name),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--join", strings.Join(addrs, ","),
	}
	c.nodes = append(c.nodes, p)
	return p
}

// refused starts a process and wants it to end by itself and say why.
func (c *processes) refused(p *process, says ...string) {
	c.t.Helper()
	c.start(p)
	select {
	case <-p.exited:
	case <-time.After(time.Minute):
		c.t.Fatalf("%s runs", p.name)
	}
	b, err := os.ReadFile(p.logPath())
	if err != nil {
		c.t.Fatal(err)
	}
	for _, s := range says {
		if !strings.Contains(string(b), s) {
			c.t.Errorf("%s does not say %q:\n%s", p.name, s, tail(b, 2<<10))
		}
	}
}

// A fourth node joins three loaded ones through any of them, and a fifth one joins
// through the fourth. It serves and takes a range over. It is killed, and comes back
// while the nodes that admitted it are down.
func TestJoinByCommand(t *testing.T) {
	c := serving(t)
	h := newHistory()
	ctx, cancel := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	all := c.clientOf(c.nodes...)
	for w := range 4 {
		writers.Go(func() { h.write(ctx, t, all, w, time.Millisecond) })
	}
	// What is moved is the test's matter.
	first, err := adminapi.NewClient([]string{c.nodes[0].client}, nil)
	if err == nil {
		err = first.PlacementPause(t.Context(), true)
	}
	if err != nil {
		t.Fatal(err)
	}
	dead := &process{client: "http://127.0.0.1:1"}
	n4 := c.joiner("n4", dead, c.nodes[1])
	c.start(n4)
	c.ready()
	n5 := c.joiner("n5", n4)
	c.start(n5)
	c.ready()
	op, err := adminapi.NewClient([]string{n4.client}, nil)
	if err != nil {
		t.Fatal(err)
	}
	o := &operatorAt{t: t, c: op}
	id := o.ranges()[0].GetId()
	m, err := op.RangeMove(t.Context(), id, "n2", "n4")
	if err == nil {
		err = op.AwaitOperation(t.Context(), m.GetOperation().GetId())
	}
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	writers.Wait()
	if len(h.failed) > 0 {
		t.Errorf("of %d puts failed %v", h.count(), h.failed)
	}
	h.verify(t, c.clientOf(n4), c.clientOf(n5))
	for _, p := range []*process{n4, n5} {
		p.kill()
	}
	c.nodes[1].kill()
	c.start(n4)
	c.start(n5)
	for _, p := range []*process{n4, n5} {
		putUntil(t, p, nil, 30*time.Second)
	}
	h.verify(t, c.clientOf(n4), c.clientOf(n5))
	l, err := op.NodeList(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, n := range l.GetNodes() {
		names = append(names, n.GetName())
	}
	if want := []string{"n1", "n2", "n3", "n4", "n5"}; !slices.Equal(names, want) {
		t.Errorf("the nodes are %v, want %v", names, want)
	}
	c.refusedToJoin(l.GetNodes(), n4)
}

// A node that is decommissioned ends well, so that no supervisor starts it again. Who does is told that it
// was removed.
func TestADecommissionedNodeEndsWell(t *testing.T) {
	c := serving(t)
	n4 := c.joiner("n4", c.nodes[0])
	c.start(n4)
	c.ready()
	op, err := adminapi.NewClient([]string{c.nodes[0].client}, nil)
	if err != nil {
		t.Fatal(err)
	}
	row, err := op.ChangeNode(t.Context(), adminapi.Decommission, "n4")
	if err == nil {
		_, err = op.AwaitNode(t.Context(), adminapi.Wait{Call: 10 * time.Second, Pause: 100 * time.Millisecond, Tell: func(string) {}}, adminapi.Decommission, row)
	}
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-n4.exited:
	case <-time.After(time.Minute):
		t.Fatal("n4 goes on")
	}
	log, err := os.ReadFile(n4.logPath())
	if err != nil {
		t.Fatal(err)
	}
	if n4.exitErr != nil || strings.Contains(string(log), `"level":"error"`) || !strings.Contains(string(log), "the node has left") {
		t.Errorf("n4 ended with %v:\n%s", n4.exitErr, tail(log, 2<<10))
	}
	c.refused(n4, "the node was removed from its cluster", "let it join anew")
	// The unit of systemd knows this status, and starts it no more.
	if exit := (*exec.ExitError)(nil); !errors.As(n4.exitErr, &exit) || exit.ExitCode() != 5 {
		t.Errorf("started again, it ends with %v", n4.exitErr)
	}
}

// refusedToJoin: what cannot be admitted ends with what to do instead.
func (c *processes) refusedToJoin(nodes []*adminpb.Node, n4 *process) {
	c.t.Helper()
	id := nodes[slices.IndexFunc(nodes, func(n *adminpb.Node) bool { return n.GetName() == "n4" })].GetId()
	named := c.joiner("n3", n4)
	named.dir = c.t.TempDir() // neither its log nor its data are the other n3's
	named.args[slices.Index(named.args, "--data-dir")+1] = filepath.Join(named.dir, "n3")
	c.refused(named, "is named n3 already", "give another --name")
	n4.kill()
	if err := os.RemoveAll(filepath.Join(n4.dir, "n4")); err != nil {
		c.t.Fatal(err)
	}
	n4.args[len(n4.args)-1] = strings.TrimPrefix(c.nodes[0].client, "http://")
	c.refused(n4, "has run before", "node decommission "+id)
}

// A member that etcd's clients have added starts as etcd's do, with the peer URLs of the
// others, and its own, and is updated, listed and removed by them.
func TestAddedMemberStarts(t *testing.T) {
	c := serving(t)
	n4 := c.joiner("n4")
	i := slices.Index(n4.args, "--join")
	peer := n4.args[slices.Index(n4.args, "--listen-peer-urls")+1]
	initial := c.nodes[0].args[slices.Index(c.nodes[0].args, "--initial-cluster")+1]
	n4.args = append(n4.args[:i:i], "--initial-cluster", initial+",n4="+peer, "--initial-cluster-state", "existing", "--node-attributes", "zone=a,rack=b")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cl := c.clientOf(c.nodes[:3]...)
	added, err := cl.MemberAdd(ctx, []string{peer})
	if err != nil {
		t.Fatal(err)
	}
	c.start(n4)
	c.ready()
	list := func() map[string]uint64 {
		t.Helper()
		l, err := cl.MemberList(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ids := map[string]uint64{}
		for _, m := range l.Members {
			ids[m.Name] = m.ID
		}
		return ids
	}
	if ids := list(); len(ids) != 4 || ids["n4"] != added.Member.ID {
		t.Errorf("members %v, added was %x", ids, added.Member.ID)
	}
	op, err := adminapi.NewClient([]string{n4.client}, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := op.NodeList(ctx)
	if err != nil || len(l.GetNodes()) != 4 {
		t.Fatalf("%v, %v", l, err)
	}
	st, err := cl.Status(ctx, n4.client)
	if err != nil {
		t.Fatal(err)
	}
	leader := c.nodes[slices.IndexFunc(c.nodes, func(p *process) bool { return list()[p.name] == st.Leader })]
	other := c.nodes[(slices.Index(c.nodes, leader)+1)%3]
	if _, err := c.clientOf(other).MoveLeader(ctx, list()[other.name]); !errors.Is(err, rpctypes.ErrNotLeader) {
		t.Errorf("a node that does not lead: %v", err)
	}
	if _, err := c.clientOf(leader).MoveLeader(ctx, added.Member.ID); !errors.Is(err, rpctypes.ErrBadLeaderTransferee) {
		t.Errorf("to a node that holds nothing: %v", err)
	}
	if _, err := c.clientOf(leader).MoveLeader(ctx, list()[other.name]); err != nil {
		t.Errorf("to %s: %v", other.name, err)
	}
	if st, err := cl.Status(ctx, other.client); err != nil || st.Leader != list()[other.name] {
		t.Errorf("%s is to lead: %v, %v", other.name, st, err)
	}
	// A new leader of placement decides nothing before each node has reported to it. That may take
	// as long as a request waits, so the same request is repeated.
	for {
		_, err := cl.MemberRemove(ctx, added.Member.ID)
		if err == nil || errors.Is(err, rpctypes.ErrMemberNotFound) {
			break
		}
		if !strings.Contains(err.Error(), "the same request again waits for that") {
			t.Fatal(err)
		}
	}
	select {
	case <-n4.exited:
	case <-time.After(time.Minute):
		t.Error("a member that was removed runs")
	}
	if ids := list(); len(ids) != 3 {
		t.Errorf("members %v", ids)
	}
	c.refused(n4, "was removed")
}

// Two machines come at once under one name and one peer URL. One is admitted, and the
// other ends with advice, whether they come by --join or as an added member.
func TestTwoMachinesUnderOneName(t *testing.T) {
	c := serving(t)
	for _, added := range []bool{false, true} {
		name := map[bool]string{false: "n4", true: "n5"}[added]
		a := c.joiner(name, c.nodes[0])
		b := *a
		b.client = fmt.Sprint("http://127.0.0.1:", unusedPorts(t, 1)[0])
		b.dir = t.TempDir()
		b.args = slices.Clone(a.args)
		set := func(p *process, flag, value string) { p.args[slices.Index(p.args, flag)+1] = value }
		set(&b, "--data-dir", filepath.Join(b.dir, name))
		set(&b, "--listen-client-urls", b.client)
		set(&b, "--advertise-client-urls", b.client)
		set(&b, "--listen-peer-urls", fmt.Sprint("http://127.0.0.1:", unusedPorts(t, 1)[0]))
		c.nodes = append(c.nodes, &b)
		if added {
			peer := a.args[slices.Index(a.args, "--listen-peer-urls")+1]
			initial := c.nodes[0].args[slices.Index(c.nodes[0].args, "--initial-cluster")+1]
			for _, p := range []*process{a, &b} {
				i := slices.Index(p.args, "--join")
				p.args = append(p.args[:i:i], "--initial-cluster", initial+","+name+"="+peer, "--initial-cluster-state", "existing")
			}
			if _, err := c.clientOf(c.nodes[:3]...).MemberAdd(t.Context(), []string{peer}); err != nil {
				t.Fatal(err)
			}
		}
		c.start(a)
		c.start(&b)
		out, in := a, &b
		select {
		case <-a.exited:
		case <-b.exited:
			out, in = &b, a
		case <-time.After(time.Minute):
			t.Fatal("both run")
		}
		said, err := os.ReadFile(out.logPath())
		// Where the other one was quick it serves by now.
		if err != nil || !strings.Contains(string(said), "another directory has been admitted as node") && !strings.Contains(string(said), "has run before") {
			t.Errorf("the one that ended: %v\n%s", err, tail(said, 2<<10))
		}
		putUntil(t, in, nil, 30*time.Second)
		in.kill()
	}
}

// The nodes of --join are asked over TLS where clients use it.
func TestJoinWithCertificates(t *testing.T) {
	ca := newAuthority(t, "ours")
	c := newProcesses(t)
	for _, p := range c.nodes {
		cert, key := ca.issue(p.name)
		p.useTLS(cert, key, ca.caFile())
	}
	c.startAll()
	clientCert, clientKey := ca.issue("client")
	tlsConfig := ca.clientTLS(clientCert, clientKey)
	putUntil(t, c.nodes[0], tlsConfig, 30*time.Second)
	n4 := c.joiner("n4", c.nodes[0])
	cert, key := ca.issue("n4")
	n4.useTLS(cert, key, ca.caFile())
	c.start(n4)
	putUntil(t, n4, tlsConfig, 30*time.Second)
}
