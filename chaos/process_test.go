package chaos

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
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/internal/ports"
)

// nodes is how many there are.
const nodes = 3

// borders are the keys at which the second and later ranges begin.
var borders = []string{"g", "n", "t"}

// node is one server process with its disk, network and ports.
type node struct {
	name, binary, log, url string
	args                   []string
	data                   *disk  // nil if it has none of its own
	space                  *space // its network; nil if that is this process's
	client                 *clientv3.Client
	mount                  string // where data is mounted, or a plain directory
	mutation               string // the number of its mutation
	clock                  string // the file that says how far its clock lags; empty if it cannot
	lag                    time.Duration
	// busy is held by whoever breaks the machine inside or replaces the node on it. away
	// says that the machine has no node of the cluster. leaves says that its node is
	// being removed and may end by itself.
	busy         sync.Mutex
	away, leaves atomic.Bool

	mu sync.Mutex
	// cmd is the process, nil while there is none. exited is closed when it has ended.
	// wanted says that its end is intended. All guarded by mu.
	cmd    *exec.Cmd
	exited chan struct{}
	wanted bool
}

// cluster is three nodes.
type cluster struct {
	t     *testing.T
	nodes []*node
	admin *adminapi.Client
	still *standstills
	told  *tellings // messages to watchers, nil without them
	// root is who operates a cluster that checks requests; nil for one that does not. tokens are the nodes' flags then.
	root   *login
	tokens []string

	mu sync.Mutex
	// Guarded by mu: violations that the rig itself saw. wrong are nodes that ended by
	// themselves, tardy the times in which the cluster did not serve.
	wrong, tardy []string
}

// blame records a violation.
func (c *cluster) blame(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// late records something that took too long. It counts if the run is judged by time.
func (c *cluster) late(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tardy = append(c.tardy, fmt.Sprintf(format, args...))
}

// verdict records an error as late if it is only that, and otherwise as wrong.
func (c *cluster) verdict(late bool, format string, args ...any) {
	if late {
		c.late(format, args...)
		return
	}
	c.blame(format, args...)
}

// blames are all records so far.
func (c *cluster) blames() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Concat(c.wrong, c.tardy)
}

// judged are the records that count. unjudged says why late ones do not; aside are
// those.
func (c *cluster) judged() (bad, aside []string, unjudged error) {
	if unjudged = c.still.unjudged(); unjudged == nil {
		return c.blames(), nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.wrong), slices.Clone(c.tardy), unjudged
}

// newCluster makes three nodes, each with a disk of diskBytes, and starts them. missing
// says why they have no disks of their own.
func newCluster(t *testing.T, diskBytes int64) (c *cluster, missing error) {
	t.Helper()
	dir := t.TempDir()
	binary := build(t)
	splits := filepath.Join(dir, "split-keys")
	if err := os.WriteFile(splits, []byte(strings.Join(borders, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ports, err := ports.Unused(2 * nodes)
	if err != nil {
		t.Fatal(err)
	}
	var members, urls []string
	for i := range nodes {
		members = append(members, fmt.Sprintf("n%d=http://127.0.0.1:%d", i+1, ports[nodes+i]))
	}
	c = &cluster{t: t, still: newStandstills(t.Logf)}
	t.Cleanup(c.still.watch(t.Context()))
	for i := range nodes {
		n := &node{name: fmt.Sprintf("n%d", i+1), binary: binary, url: fmt.Sprintf("http://127.0.0.1:%d", ports[i])}
		n.log = filepath.Join(t.ArtifactDir(), n.name+".log")
		mount, peer := filepath.Join(dir, n.name), fmt.Sprintf("http://127.0.0.1:%d", ports[nodes+i])
		if missing == nil {
			n.data, missing = newDisk(t, mount, diskBytes)
		}
		n.args = []string{
			"--name", n.name, "--data-dir", filepath.Join(mount, "data"),
			"--listen-client-urls", n.url, "--advertise-client-urls", n.url,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(members, ","), "--initial-split-keys", splits, "--memory-budget-bytes", "1073741824",
		}
		urls = append(urls, n.url)
		c.nodes = append(c.nodes, n)
	}
	admin, err := adminapi.NewClient(urls, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.admin = admin
	// After the disks were made: cleanups run in reverse order.
	t.Cleanup(c.close)
	for _, n := range c.nodes {
		n.client = c.connect(n.url)
		c.start(n)
	}
	return c, missing
}

// urls are the client URLs of all present nodes, names their names now.
func (c *cluster) urls() (all []string) {
	for _, n := range c.nodes {
		if !n.away.Load() {
			all = append(all, n.url)
		}
	}
	return all
}

func (c *cluster) names() (all []string) {
	for _, n := range c.nodes {
		if !n.away.Load() {
			all = append(all, n.is())
		}
	}
	return all
}

// is is the name of the node; another node may take its place.
func (n *node) is() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.name
}

func (n *node) rename(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.log = filepath.Join(filepath.Dir(n.log), name+".log")
	n.name = name
}

// peerURL is that of the node of a machine.
func peerURL(machine int) string { return fmt.Sprintf("http://%s:2380", address(machine)) }

// arguments are the arguments of every node of a network, on one machine.
func (c *cluster) arguments(machine int) []string {
	n, peer := c.nodes[machine], peerURL(machine)
	return append([]string{
		"--name", n.is(), "--data-dir", filepath.Join(n.mount, "data"),
		"--listen-client-urls", n.url, "--advertise-client-urls", n.url,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--watch-progress-notify-interval", stormNotify.String(),
		fmt.Sprintf("--lease-reads=%t", n.clock == ""), "--memory-budget-bytes", "1073741824",
	}, c.tokens...)
}

// losePower cuts the power of a node's machine; heal restores it.
func (n *node) losePower(c *cluster) (heal func() error, err error) {
	n.expectEnd()
	if err := n.data.cutPower(); err != nil {
		return nil, err
	}
	n.kill()
	return func() error {
		if err := errors.Join(n.data.unmount(), n.data.mount()); err != nil {
			return err
		}
		c.start(n)
		return nil
	}, nil
}

// build builds the server's command with the tests' build tags, once for all tests: linking takes longer than some
// storms' checks.
func build(t *testing.T) (binary string) {
	t.Helper()
	dir := os.Getenv(inside)
	if dir == "" {
		dir = t.TempDir() // there is no parent process that removes it
	}
	binary = filepath.Join(dir, "skein")
	if _, err := os.Stat(binary); err == nil {
		return binary
	}
	start := time.Now()
	if err := outside(func() error { return command("", "go", "build", "-tags", buildTags, "-o", binary, "../cmd/skein") }); err != nil {
		t.Fatal(err)
	}
	t.Logf("built in %v", time.Since(start).Round(time.Millisecond))
	return binary
}

// close ends all processes, whatever their state, and shows the ends of their logs if
// the test failed.
func (c *cluster) close() {
	for _, n := range c.nodes {
		n.kill()
		if n.client != nil {
			n.client.Close()
		}
		if c.t.Failed() {
			log, _ := os.ReadFile(n.log)
			c.t.Logf("--- the end of %s\n%s", n.log, log[max(0, len(log)-8<<10):])
		}
	}
}

// dialling are the options of a connection that soon finds a node that has returned.
func dialling() []grpc.DialOption {
	pause := backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, Jitter: 0.2, MaxDelay: time.Second}
	return []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{Backoff: pause, MinConnectTimeout: time.Second})}
}

// connect makes a client of the operator.
func (c *cluster) connect(urls ...string) *clientv3.Client { return c.connectAs(c.root, urls...) }

// connectAs makes a client that calls in the name of a user.
func (c *cluster) connectAs(who *login, urls ...string) *clientv3.Client {
	c.t.Helper()
	options := append(dialling(), who.options()...)
	if c.told != nil {
		options = append(options, grpc.WithChainStreamInterceptor(c.told.intercept))
	}
	cl, err := clientv3.New(clientv3.Config{
		Endpoints: urls, Logger: zap.NewNop(),
		// Rare enough for the server, which disconnects clients that ping more often than
		// every 5 s.
		DialKeepAliveTime: 6 * time.Second, DialKeepAliveTimeout: 3 * time.Second,
		DialOptions: options,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return cl
}

// start starts a node's process. An unrequested end is a violation.
func (c *cluster) start(n *node) {
	log, err := os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	cmd := exec.Command(n.binary, n.args...)
	cmd.Stdout, cmd.Stderr = log, log
	// The operator of a network is on another machine. A variable and no flag, because a release before it does not
	// know the flag, and passes over the variable.
	if cmd.Env = append(environment(), "SKEIN_INSECURE_ADMIN=true"); n.mutation != "" {
		cmd.Env = append(cmd.Env, "SKEIN_MUTATION="+n.mutation)
	}
	if n.clock != "" {
		cmd.Env = append(cmd.Env, "SKEIN_CLOCK_PAUSED="+n.clock)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	begin := cmd.Start
	if n.space != nil {
		begin = func() error { return n.space.do(cmd.Start) }
	}
	if err := begin(); err != nil {
		c.t.Error(err)
		return
	}
	exited := make(chan struct{})
	n.cmd, n.exited, n.wanted = cmd, exited, false
	go func() {
		err := cmd.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		if !n.wanted && !(n.leaves.Load() && removed(n.log)) {
			c.blame("processes: %s ended by itself: %v", n.name, err)
		}
		close(exited)
	}()
}

// removed says whether a node has ended since its removal from its cluster.
func removed(log string) bool {
	words, err := os.ReadFile(log)
	return err == nil && strings.Contains(string(words[max(0, len(words)-1<<10):]), "the node was removed from its cluster: ")
}

// environment is this process's, without variables that Skein's commands would read as
// flags.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "SKEIN_") || strings.HasPrefix(v, "ETCD")
	})
}

// expectEnd says that the end of a node's process is intended, however it comes.
func (n *node) expectEnd() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wanted = true
}

// unexpectEnd says that a node that runs is to run on.
func (n *node) unexpectEnd() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wanted = false
}

// ended says whether a node's process has ended.
func (n *node) ended() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	select {
	case <-n.exited:
		return true
	default:
		return false
	}
}

// kill ends a node's process with -9 and waits until it has ended.
func (n *node) kill() {
	n.expectEnd()
	n.signal(syscall.SIGKILL)
	n.mu.Lock()
	exited := n.exited
	n.mu.Unlock()
	if exited != nil {
		<-exited
	}
}

func (n *node) signal(s syscall.Signal) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cmd != nil {
		_ = n.cmd.Process.Signal(s) // it may have ended
	}
}

// stands says whether a signal has stopped the node's process.
func (n *node) stands() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.cmd == nil {
		return false
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.cmd.Process.Pid))
	// The state follows the command, which stands in parentheses.
	_, after, _ := strings.Cut(string(text), ") ")
	return err == nil && strings.HasPrefix(after, "T")
}

// stopPatience bounds how long a clean stop may take on a busy machine.
const stopPatience = time.Minute

// stop ends all nodes by SIGTERM at the same moment and requires a clean exit of each.
func (c *cluster) stop() {
	running := slices.DeleteFunc(slices.Clone(c.nodes), func(n *node) bool { return n.away.Load() })
	for _, n := range running {
		n.expectEnd()
		n.signal(syscall.SIGTERM)
	}
	ctx, cancel := c.still.term(stopPatience, "the end of the nodes").context(c.t.Context())
	defer cancel()
	for _, n := range running {
		select {
		case <-n.exited:
		case <-ctx.Done():
		}
		select { // even if it is too late for one of them, others have ended
		case <-n.exited:
			if s := n.cmd.ProcessState; !s.Success() {
				c.blame("processes: %s was asked to stop and ended with %v", n.name, s)
			}
		default:
			c.late("processes: %s was asked to stop and did not in %v", n.name, stopPatience)
		}
	}
}

// leader is the node that the others call the leader, the first if none does.
func (c *cluster) leader(ctx context.Context) int {
	for i, n := range c.nodes {
		if n.away.Load() {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		st, err := n.client.Status(ctx, n.url)
		cancel()
		if err == nil && st.Leader == st.Header.MemberId {
			return i
		}
	}
	return 0
}
