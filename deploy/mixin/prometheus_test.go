package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/skeindb/skein/internal/leftout"
	"github.com/skeindb/skein/internal/ports"
)

// patience bounds every wait: it only has to end a test that would wait for ever.
const patience = 3 * time.Minute

// monitored is a cluster of three processes that a real Prometheus scrapes each second.
type monitored struct {
	t          *testing.T
	dir, skein string
	clients    []string
	args       [][]string
	nodes      []*exec.Cmd
	prometheus string // its URL
	// small is the first node's disk. Without it noDisk says why.
	small  *smallDisk
	noDisk error
}

// TestPrometheus: a real Prometheus scrapes three processes under load. Each query of the mixin has data, and alerts fire
// and clear as their causes come and go.
func TestPrometheus(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes")
	}
	m := newMonitored(t, leftout.Tool(t, "prometheus", "prometheus"))
	m.use()
	m.awaitData()

	m.command("placement", "pause")
	m.await("SkeinPlacementPaused", true)
	m.command("placement", "resume")
	m.await("SkeinPlacementPaused", false)

	takeNothing := m.watchWithoutTaking()
	m.await("SkeinWatchersLag", true)
	takeNothing()
	m.await("SkeinWatchersLag", false)

	m.fullDisk()
	m.slowDisk()

	m.kill(2)
	m.await("SkeinNodeDown", true)
	m.await("SkeinPeerUnreached", true)
	m.kill(1)
	m.await("SkeinMostNodesDown", true)
	m.await("SkeinNoLeader", true)
	m.await("SkeinRangesWithoutQuorum", true)
	m.start(1)
	m.await("SkeinNoLeader", false)
	m.await("SkeinRangesWithoutQuorum", false)
	m.await("SkeinMostNodesDown", false)
	m.start(2)
	for _, name := range []string{"SkeinNodeDown", "SkeinPeerUnreached"} {
		m.await(name, false)
	}

	// A process that hangs is not reached either.
	if err := m.nodes[0].Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	m.await("SkeinNodeDown", true)
	if err := m.nodes[0].Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	m.await("SkeinNodeDown", false)

	m.alarm(true)
	m.await("SkeinAlarm", true)
	m.alarm(false)
	m.await("SkeinAlarm", false)
}

func newMonitored(t *testing.T, prometheus string) *monitored {
	t.Helper()
	m := &monitored{t: t, dir: t.TempDir()}
	m.skein = m.build("skein")
	m.mountSmall()
	free, err := ports.Unused(7)
	if err != nil {
		t.Fatal(err)
	}
	var members, targets []string
	for i := range 3 {
		members = append(members, fmt.Sprintf("n%d=http://127.0.0.1:%d", i+1, free[3+i]))
		m.clients = append(m.clients, fmt.Sprintf("http://127.0.0.1:%d", free[i]))
		targets = append(targets, fmt.Sprintf("127.0.0.1:%d", free[i]))
	}
	m.nodes = make([]*exec.Cmd, 3)
	for i := range 3 {
		name, peer := fmt.Sprint("n", i+1), fmt.Sprintf("http://127.0.0.1:%d", free[3+i])
		m.args = append(m.args, []string{
			"--name", name, "--data-dir", filepath.Join(m.dir, name), "--audit-log", filepath.Join(m.dir, name+".audit"),
			"--listen-client-urls", m.clients[i], "--advertise-client-urls", m.clients[i],
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(members, ","), "--initial-ranges", "4", "--log-outputs", filepath.Join(m.dir, name+".log"),
		})
		m.start(i)
	}
	t.Cleanup(func() {
		for i := range m.nodes {
			m.kill(i)
		}
	})
	m.startPrometheus(prometheus, targets, free[6])
	return m
}

// build returns the path of a program of the tree.
func (m *monitored) build(name string) string {
	m.t.Helper()
	path := filepath.Join(m.dir, name)
	if out, err := exec.Command("go", "build", "-tags", "invariants", "-o", path, "../../cmd/"+name).CombinedOutput(); err != nil {
		m.t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	return path
}

func (m *monitored) start(i int) {
	m.t.Helper()
	m.nodes[i] = exec.Command(m.skein, m.args[i]...)
	if err := m.nodes[i].Start(); err != nil {
		m.t.Fatal(err)
	}
}

// kill ends a node without a warning.
func (m *monitored) kill(i int) {
	if c := m.nodes[i]; c != nil {
		_ = c.Process.Kill()
		_ = c.Wait() // it says that the process was killed
	}
	m.nodes[i] = nil
}

// startPrometheus has the rules of the mixin, with alerts that fire after two seconds and that look back for 20 of them, not for
// five minutes.
func (m *monitored) startPrometheus(binary string, targets []string, port int) {
	m.t.Helper()
	quick := alerts()
	for i := range quick {
		quick[i].lasts = min(quick[i].lasts, 2*time.Second)
		quick[i].expr = strings.ReplaceAll(quick[i].expr, "[5m]", "[20s]")
	}
	at := func(name string) string { return filepath.Join(m.dir, name) }
	config := fmt.Sprintf("global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [%q, %q]\nscrape_configs:\n"+
		"  - {job_name: skein, static_configs: [{targets: [%s]}]}\n", at("alerts.yaml"), at("rules.yaml"), strings.Join(targets, ", "))
	for name, text := range map[string]string{"alerts.yaml": alertsFile(quick), "rules.yaml": rulesFile(), "prometheus.yaml": config} {
		if err := os.WriteFile(at(name), []byte(text), 0o600); err != nil {
			m.t.Fatal(err)
		}
	}
	listen := fmt.Sprintf("127.0.0.1:%d", port)
	m.prometheus = "http://" + listen
	var log bytes.Buffer
	c := exec.Command(binary, "--config.file", at("prometheus.yaml"), "--storage.tsdb.path", at("tsdb"), "--web.listen-address", listen, "--log.level", "warn")
	c.Stdout, c.Stderr = &log, &log
	if err := c.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait() // it says that the process was killed
		if m.t.Failed() {
			m.t.Logf("prometheus:\n%s", log.String())
		}
	})
}

// command runs skein, again while the cluster cannot answer yet.
func (m *monitored) command(args ...string) {
	m.t.Helper()
	m.until(strings.Join(args, " "), func() error {
		out, err := exec.Command(m.skein, append(args, "--endpoints", strings.TrimPrefix(m.clients[0], "http://"))...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

// watchWithoutTaking begins a watcher whose client takes no event, until end is called.
func (m *monitored) watchWithoutTaking() (end func()) {
	m.t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(m.clients[0], "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(64<<10))
	if err != nil {
		m.t.Fatal(err)
	}
	stream, err := pb.NewWatchClient(conn).Watch(m.t.Context())
	if err == nil {
		create := &pb.WatchCreateRequest{Key: []byte{0}, RangeEnd: []byte{0}}
		err = stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}})
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return func() { _ = conn.Close() } // nothing was to come
}

// alarm has a client raise the alarm that a store is full, or end it.
func (m *monitored) alarm(raised bool) {
	m.t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: m.clients, Logger: zap.NewNop()})
	if err != nil {
		m.t.Fatal(err)
	}
	defer c.Close()
	action := pb.AlarmRequest_DEACTIVATE
	if raised {
		action = pb.AlarmRequest_ACTIVATE
	}
	m.until("alarm", func() error {
		status, err := c.Status(m.t.Context(), m.clients[0])
		if err != nil {
			return err
		}
		r := &pb.AlarmRequest{Action: action, MemberID: status.Header.MemberId, Alarm: pb.AlarmType_NOSPACE}
		_, err = clientv3.RetryMaintenanceClient(c, c.ActiveConnection()).Alarm(m.t.Context(), r)
		return err
	})
}

// use has a client do some of everything until the test ends.
func (m *monitored) use() {
	m.t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: m.clients, Logger: zap.NewNop()})
	if err != nil {
		m.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	m.t.Cleanup(func() {
		cancel()
		<-done
		_ = c.Close() // nothing is lost
	})
	go func() {
		defer close(done)
		for n := 0; ctx.Err() == nil; n++ {
			once, end := context.WithTimeout(ctx, 5*time.Second)
			err := everything(once, c, n)
			end()
			if err != nil { // nodes are down now and then
				select {
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond):
				}
			}
		}
	}()
	watch := c.Watch(ctx, "", clientv3.WithPrefix())
	go func() {
		for range watch { // until ctx ends
			continue
		}
	}()
}

// everything makes some requests of each kind.
func everything(ctx context.Context, c *clientv3.Client, n int) error {
	key := fmt.Sprint("abkqz"[n%5:n%5+1], n%1000)
	lease, err := c.Grant(ctx, 60)
	if err != nil {
		return err
	}
	_, err1 := c.Put(ctx, key, strings.Repeat("v", 1000), clientv3.WithLease(lease.ID))
	_, err2 := c.Get(ctx, "a", clientv3.WithRange("z"), clientv3.WithLimit(10))
	_, err3 := c.Txn(ctx).Then(clientv3.OpPut("a", "1"), clientv3.OpPut("z", "1")).Commit()
	_, err4 := c.Delete(ctx, key)
	_, err5 := c.Revoke(ctx, lease.ID)
	return errors.Join(err1, err2, err3, err4, err5)
}

// answer is what Prometheus says.
type answer struct {
	Status, Error string
	Data          struct {
		Result []struct {
			Metric map[string]string
		}
	}
}

// ask has Prometheus evaluate a query now.
func (m *monitored) ask(q string) (*answer, error) {
	r, err := http.NewRequestWithContext(m.t.Context(), http.MethodGet, m.prometheus+"/api/v1/query?query="+url.QueryEscape(q), http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return nil, err
	}
	var a answer
	if err := json.Unmarshal(b, &a); err != nil {
		return nil, fmt.Errorf("%w: %s", err, b)
	}
	if a.Status != "success" {
		return nil, fmt.Errorf("%s: %s", q, a.Error)
	}
	return &a, nil
}

// until calls f until it succeeds.
func (m *monitored) until(what string, f func() error) {
	m.t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(250 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	m.t.Fatalf("%s: %v", what, err)
}

// await waits until an alert fires, or does not fire any more.
func (m *monitored) await(name string, fires bool) {
	m.t.Helper()
	if !slices.ContainsFunc(alerts(), func(a alert) bool { return a.name == name }) {
		m.t.Fatalf("there is no alert %s", name)
	}
	m.until(fmt.Sprintf("%s fires: %v", name, fires), func() error {
		a, err := m.ask(fmt.Sprintf(`ALERTS{alertname=%q,alertstate="firing"}`, name))
		if err == nil && len(a.Data.Result) > 0 != fires {
			err = fmt.Errorf("%d fire", len(a.Data.Result))
		}
		return err
	})
}

// withoutData are metrics that a cluster shows only once something has happened.
var withoutData = []string{"etcd_debugging_server_alarms", "skein_etcdapi_rejected_connections_total"}

// awaitData waits until each query has data. Of an alert's, each metric has.
func (m *monitored) awaitData() {
	m.t.Helper()
	choose := strings.NewReplacer("$job", "skein", "$instance", ".+", "$__rate_interval", "10s")
	for what, q := range queries() {
		if strings.HasPrefix(what, "alert ") {
			for _, s := range selected.FindAllStringSubmatch(q, -1) {
				if !slices.Contains(withoutData, s[1]) {
					m.hasData(what, fmt.Sprintf("%s{%s}", s[1], selector))
				}
			}
			continue
		}
		// Failures need not have happened.
		m.hasData(what, regexp.MustCompile(`,grpc_code=~"[^"]*"`).ReplaceAllString(choose.Replace(q), ""))
	}
}

func (m *monitored) hasData(what, q string) {
	m.t.Helper()
	m.until(what, func() error {
		a, err := m.ask(q)
		if err == nil && len(a.Data.Result) == 0 {
			err = fmt.Errorf("no data: %s", q)
		}
		return err
	})
}
