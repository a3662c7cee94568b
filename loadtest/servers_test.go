package loadtest

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest/fakekv"
)

// serve serves a store until the test ends.
func serve(t *testing.T, s *fakekv.Store, options ...grpc.ServerOption) string {
	t.Helper()
	endpoint, stop, err := s.Serve(options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return endpoint
}

func smallConfig(endpoints ...string) Config {
	cfg := DefaultConfig()
	cfg.Endpoints = endpoints
	cfg.Conns, cfg.Clients, cfg.Keys, cfg.ValueBytes = 4, 20, 500, 64
	cfg.Duration, cfg.Total, cfg.Verify = 0, 3000, true
	return cfg
}

// TestRun does whole runs over gRPC.
func TestRun(t *testing.T) {
	s := &fakekv.Store{}
	a, b := serve(t, s), serve(t, s)
	var asked atomic.Int64
	metrics := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "# HELP x y\nother 3\nprocess_cpu_seconds_total %d.5\nprocess_resident_memory_bytes 1.048576e+06 1700000000\n", 10+3*asked.Add(1))
	}))
	defer metrics.Close()

	cfg := smallConfig(a, "http://"+b)
	cfg.Workload, cfg.Fill, cfg.ServerMetrics, cfg.DataPath = Mixed, true, []string{metrics.URL + "/metrics"}, t.TempDir()
	var out bytes.Buffer
	r, err := Run(t.Context(), cfg, &out)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Error(err)
	}
	if r.Operations != 3000 || r.Put == nil || r.Get == nil || r.Verify.Acknowledged != 500 || s.Len() != 500 {
		t.Errorf("%d operations, put %+v, get %+v, %+v, %d keys", r.Operations, r.Put, r.Get, r.Verify, s.Len())
	}
	if c := r.CPU; len(c.Servers) != 1 || c.Servers[0].Seconds != 3 || c.ServersPerOp != 1000 || c.Servers[0].ResidentBytes != 1<<20 || c.SelfPerOp <= 0 {
		t.Errorf("CPU %+v", c)
	}
	if v := r.Versions; len(v.Servers) != 2 || v.Servers[1].Version != "3.7.3" || v.Go == "" {
		t.Errorf("versions %+v", v)
	}
	if r.Machine.CPUs == 0 || r.Machine.Kernel == "" || r.Machine.MemoryBytes == 0 || r.FileSystem.Type == "" {
		t.Errorf("machine %+v, file system %+v", r.Machine, r.FileSystem)
	}
	if !strings.Contains(out.String(), "verified 500 keys") {
		t.Errorf("text:\n%s", &out)
	}
}

// TestRunFindsLoss: a server that forgets is found over gRPC too.
func TestRunFindsLoss(t *testing.T) {
	s := &fakekv.Store{}
	s.After = func(_ context.Context, n int64) error {
		if n == 2990 {
			s.Edit(func(kvs map[string]*mvccpb.KeyValue) { clear(kvs) })
		}
		return nil
	}
	r, err := Run(t.Context(), smallConfig(serve(t, s)), io.Discard)
	if err != nil || r.Broken() == nil || r.Verify.Violations < 400 || len(r.Verify.First) != maxViolations {
		t.Errorf("%v, %+v", err, r.Verify)
	}
}

func TestRunOverTLS(t *testing.T) {
	// httptest has a certificate for 127.0.0.1 and a client that trusts it.
	web := httptest.NewTLSServer(http.NotFoundHandler())
	defer web.Close()
	endpoint := serve(t, &fakekv.Store{}, grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: web.TLS.Certificates, MinVersion: tls.VersionTLS12})))
	cfg := smallConfig("https://" + endpoint)
	cfg.Total = 100
	cfg.TLS = web.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	r, err := Run(t.Context(), cfg, io.Discard)
	if err != nil || r.Err() != nil || r.Operations != 100 {
		t.Errorf("%v, %v", err, r.Err())
	}
}

// TestRunRefuses: a run that cannot be done fails at the start.
func TestRunRefuses(t *testing.T) {
	t.Parallel()
	if _, err := Run(t.Context(), Config{}, io.Discard); err == nil || !strings.Contains(err.Error(), "endpoints") {
		t.Errorf("no settings: %v", err)
	}
	endpoint, stop, err := (&fakekv.Store{}).Serve()
	if err != nil {
		t.Fatal(err)
	}
	stop()
	for name, run := range map[string]func(Access) error{
		"run": func(a Access) error {
			cfg := smallConfig(endpoint)
			cfg.Access = a
			_, err := Run(t.Context(), cfg, io.Discard)
			return err
		},
		"reads": func(a Access) error {
			_, err := Reads(t.Context(), ReadsConfig{Access: a, Endpoint: "http://" + endpoint, AnswerBytes: 1, ValueBytes: 1, Duration: 1, Clock: clock.System()})
			return err
		},
		"idle": func(a Access) error {
			_, err := Idle(t.Context(), IdleConfig{Access: a, Endpoint: "http://" + endpoint, Streams: 1, Clock: clock.System()})
			return err
		},
	} {
		for _, a := range []Access{{}, {User: "root", Password: "secret"}} {
			if err := run(a); err == nil || !strings.Contains(err.Error(), "nobody listens at "+endpoint) {
				t.Errorf("%s: nobody there: %v", name, err)
			}
		}
	}
	// A page of metrics that is none.
	s := &fakekv.Store{}
	blind := smallConfig(serve(t, s))
	blind.ServerMetrics = []string{"http://" + endpoint + "/metrics"}
	if _, err := Run(t.Context(), blind, io.Discard); err == nil || !strings.Contains(err.Error(), "server-metrics "+blind.ServerMetrics[0]+": ") || s.Len() > 0 {
		t.Errorf("no metrics there: %v; %d keys were put", err, s.Len())
	}
	// A server that speaks no TLS, and one that speaks nothing else.
	plain := smallConfig("https://" + serve(t, &fakekv.Store{}))
	web := httptest.NewTLSServer(http.NotFoundHandler())
	defer web.Close()
	secure := smallConfig(strings.Replace(web.URL, "https://", "http://", 1))
	for _, cfg := range []Config{plain, secure} {
		if _, err := Run(t.Context(), cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "somebody listens there") {
			t.Errorf("%s: %v", cfg.Endpoints[0], err)
		}
	}
}

// TestLogin: with a user each connection logs in, and a wrong password is told at the start.
func TestLogin(t *testing.T) {
	s := &fakekv.Store{User: "root", Password: "secret"}
	cfg := smallConfig(serve(t, s))
	if _, err := Run(t.Context(), cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "user name is empty") {
		t.Errorf("without a user: %v", err)
	}
	cfg.User, cfg.Password = "root", "wrong"
	if _, err := Run(t.Context(), cfg, io.Discard); err == nil || !strings.Contains(err.Error(), "log in as root: etcdserver: authentication failed") {
		t.Errorf("with a wrong password: %v", err)
	}
	cfg.Password = "secret"
	if r, err := Run(t.Context(), cfg, io.Discard); err != nil || r.Err() != nil || r.Operations != 3000 {
		t.Errorf("%v, %v, %d operations", err, r.Err(), r.Operations)
	}
}

// TestCleanup: the run's keys are deleted at the end, of an interrupted run too, and those of others stay.
func TestCleanup(t *testing.T) {
	cleaned := func(interrupted bool) {
		s := &fakekv.Store{}
		if _, err := s.Direct().Put(t.Context(), foreignPut()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		s.After = func(_ context.Context, n int64) error {
			if interrupted && n == 1000 {
				cancel()
			}
			return nil
		}
		cfg := smallConfig(serve(t, s))
		cfg.Keys, cfg.Cleanup = 250, true // two full transactions of deletions and a half
		var out bytes.Buffer
		r, err := Run(ctx, cfg, &out)
		if err != nil || r.Interrupted != interrupted || s.Len() != 1 {
			t.Errorf("interrupted %v: %v, %d keys are left of 1", interrupted, err, s.Len())
		}
		if !interrupted && (r.CleanedUp != 250 || !strings.Contains(out.String(), "cleaned up: 250 keys deleted")) {
			t.Errorf("%d keys deleted\n%s", r.CleanedUp, &out)
		}
	}
	cleaned(false)
	cleaned(true)
	// Reads too leaves nothing behind.
	s := &fakekv.Store{}
	cfg := ReadsConfig{Endpoint: serve(t, s), Clients: 1, AnswerBytes: 100, ValueBytes: 10, Duration: 50 * time.Millisecond, Cleanup: true, Clock: clock.System()}
	if r, err := Reads(t.Context(), cfg); err != nil || r.Answers == 0 || s.Len() != 0 {
		t.Errorf("reads: %v, %d keys are left", err, s.Len())
	}
}

// TestMetricsOfALostServer: a server that has gone or restarted has no CPU time, and
// then neither has the sum.
func TestMetricsOfALostServer(t *testing.T) {
	r := newRun(smallConfig("x"), []kv{nil}, noMeter{}, 1, io.Discard)
	r.cfg.ServerMetrics = []string{"a", "b", "c", "d"}
	r.report.Operations = 1000
	r.summariseCPU(time.Second,
		[]usage{{cpuSeconds: 1}, {cpuSeconds: 5}, {err: io.ErrUnexpectedEOF}, {cpuSeconds: 1, startSeconds: 100}},
		[]usage{{cpuSeconds: 2}, {cpuSeconds: 1}, {cpuSeconds: 1}, {cpuSeconds: 9, startSeconds: 200}})
	c := r.report.CPU
	if c.SelfPerOp != 1000 || c.ServersPerOp != 0 || c.Servers[0].PerOp != 1000 || c.Servers[1].Error == "" || c.Servers[2].Error == "" || c.Servers[3].Error == "" {
		t.Errorf("%+v", c)
	}
}

func TestUsagesOverHTTP(t *testing.T) {
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprintln(w, "process_cpu_seconds_total 1.25\nprocess_start_time_seconds 7")
	}))
	defer web.Close()
	s, err := dial(&Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	got := s.usages(t.Context(), []string{web.URL + "/metrics", web.URL + "/other", "http://127.0.0.1:1/metrics"})
	if got[0].err != nil || got[0].cpuSeconds != 1.25 || got[0].startSeconds != 7 || got[1].err == nil || got[2].err == nil {
		t.Errorf("%+v", got)
	}
}

// FuzzParseUsage: a metrics page is bytes from the wire.
func FuzzParseUsage(f *testing.F) {
	f.Add("process_cpu_seconds_total 12.5\n")
	f.Add("process_cpu_seconds_total 1e300 1700000000\nprocess_resident_memory_bytes NaN")
	f.Add("process_cpu_seconds_total\n")
	f.Add("# TYPE process_cpu_seconds_total counter\n")
	f.Fuzz(func(t *testing.T, page string) {
		u, err := parseUsage(strings.NewReader(page))
		if err == nil && !strings.Contains(page, "process_cpu_seconds_total") {
			t.Errorf("%q gives %+v", page, u)
		}
	})
}

func TestParseMount(t *testing.T) {
	at, fs, ok := parseMount(`36 35 98:0 / /mnt/two\040words rw,noatime master:1 - ext4 /dev/root rw,errors=continue`)
	if !ok || at != "/mnt/two words" || fs.Type != "ext4" || fs.Source != "/dev/root" || fs.Options != "rw,noatime,rw,errors=continue" {
		t.Errorf("%q %+v %v", at, fs, ok)
	}
	for _, line := range []string{"", "a b c - ext4", "1 2 3 4 5 6 7"} {
		if _, _, ok := parseMount(line); ok {
			t.Errorf("%q passes as a mount", line)
		}
	}
	if fs := fileSystemOf("/proc/self"); fs.Type != "proc" {
		t.Errorf("/proc/self lies on %+v", fs)
	}
	if _, err := os.Stat("/proc/cpuinfo"); err == nil && thisMachine().OS != "linux" {
		t.Error("not a Linux machine")
	}
}

// BenchmarkClient is the load generator's own cost of each operation, without gRPC:
// key, value, ledger, schedule and histogram.
func BenchmarkClient(b *testing.B) {
	for _, verify := range []bool{false, true} {
		b.Run(fmt.Sprintf("verify=%v", verify), func(b *testing.B) {
			cfg := DefaultConfig()
			cfg.Endpoints, cfg.Verify = []string{"none"}, verify
			r := newRun(cfg, []kv{instant{}}, noMeter{}, 1, io.Discard)
			p := r.newPhase("run", time.Hour, 0, 0)
			b.ReportAllocs()
			now := cfg.Clock.Now()
			for b.Loop() {
				n, due, _ := p.schedule.draw(now)
				kind, err := r.clients[0].operate(b.Context(), p, n)
				if err != nil {
					b.Fatal(err)
				}
				now = cfg.Clock.Now()
				p.recorder.record(0, kind, now.Sub(due), true)
			}
		})
	}
}
