package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest"
	"github.com/skeindb/skein/loadtest/fakekv"
	"github.com/skeindb/skein/loadtest/results"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func loadtestCommand(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = execute(t.Context(), args, &out, &err)
	return code, out.String(), err.String()
}

// TestUsageErrors: a wrong command line ends with code 2 and says what is wrong.
func TestUsageErrors(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"walk", "unknown command"},
		{"run --slo p99", `slo: "p99": is no clause; understood are clauses like p99<10ms`},
		{"kubernetes --slo errors<3", `slo: "errors<3": the bound of errors is a percentage`},
		{"run --no-such-flag", "unknown flag"},
		{"run --clients many", "--clients"},
		{"run positional", "positional"},
		{"run --clients 10 --conns 100", "conns: 100 is not between 1 and the number of clients, 10"},
		{"run --clients 0", "clients: 0"},
		{"run --api grpc", `api: "grpc" is none of etcd, pipe`},
		{"run --api pipe --workload lease", "api: the pipe carries no leases"},
		{"reads --api pipe", "unknown flag: --api"},
		{"run --max-failures -1", "max-failures: -1"},
		{"run --dist zipf --zipf-skew 0", "zipf-skew: 0"},
		{"run --user root", "--user without a name or a password"},
		{"run --user :secret", "--user without a name or a password"},
		{"run --password secret", "--password without a user"},
		{"reads --user root", "--user without a name or a password"},
		{"idle --cert c.pem", "--cert and --key go together"},
		{"kubernetes --mix scale=1", `mix: "scale=1"`},
		{"kubernetes --nodes 63", "nodes: 63"},
		{"kubernetes --keys 5", "unknown flag"},
		{"run --duration 1s --total 5", "duration and total"},
		{"run --duration 0", "duration and total"},
		{"run --workload scan", `workload: "scan"`},
		{"run --dist normal", `dist: "normal"`},
		{"run --rate -1", "rate: -1"},
		{"run --key-size 2", "key-size: 2 bytes"},
		{"run --verify --value-size 8", "value-size: 8"},
		{"run --server-metrics localhost", "server-metrics:"},
		{"run --cert c.pem", "--cert and --key go together"},
		{"run --cacert no-such-file", "no-such-file"},
		{"run --data-dir no-such-dir", "data-dir: stat no-such-dir"},
		{"reads --clients -1", "clients: -1"},
		{"reads --answer-size 10 --value-size 20", "answer-size: 10 bytes"},
		{"reads --duration 0", "duration: 0s"},
		{"reads --value-size 0", "value-size: 0"},
		{"reads positional", "positional"},
		{"idle --connections -1", "connections and watchers: -1 and 0"},
		{"idle --streams 0", "streams: 0"},
		{"idle --pause -1s", "pause: -1s"},
		{"idle positional", "positional"},
		{"empty --value-size -1", "value-size: -1"},
		{"empty positional", "positional"},
		{"sweep --over depth", `over: "depth"`},
		{"sweep --steps 4,2", "steps: 2 after 4 does not grow"},
		{"sweep --rate 5", "rate: a sweep over clients sets it itself"},
		{"sweep --max-failures 5", "unknown flag"},
		{"report a.html", "requires at least 2 arg(s)"},
		{"report a.json b.json", "a.json looks like a report"},
		{"run --workload txn --txn-keys 129", "txn-keys: 129 is not between 1 and 128"},
		{"run --workload txn --txn-keys 3 --keys 2", "more than the number of keys, 2"},
		{"run --workload txn --txn-keys 2 --verify", "verify: it knows transactions of one key only"},
		{"run --workload range --page-keys 0", "page-keys: 0"},
		{"run --dist hot --hot-keys 0", "hot-keys: 0"},
		{"run --dist hot --hot-percent 101", "hot-percent: 101"},
		{"run --dist hot --hot-move -1s", "hot-move: -1s"},
		{"run --dist tail --fill", "fill: with dist tail"},
		{"run --dist tail --workload get", "dist: tail makes new keys"},
		{"run --workload lease --verify", "verify: workload lease leaves no key"},
		{"run --watchers -1", "watchers: -1"},
		{"run --watchers 1 --workload range", "watchers: workload range puts nothing"},
		{"run --watchers 1 --verify", "watchers: they and verify"},
		{"run --watchers 1 --value-size 8", "value-size: 8 is less than the 16 bytes by which watchers"},
		{"merge a.json", "requires at least 2 arg(s)"},
		{"compare a.json", "accepts 2 arg(s), received 1"},
	} {
		code, stdout, stderr := loadtestCommand(t, strings.Fields(c.args)...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, c.want) {
			t.Errorf("loadtest %s: code %d, stdout %q, stderr %q, want %q", c.args, code, stdout, stderr, c.want)
		}
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{}, {"run", "--help"}, {"kubernetes", "--help"}, {"empty", "--help"}, {"reads", "--help"}, {"idle", "--help"}, {"compare", "--help"}, {"sweep", "--help"}, {"report", "--help"}, {"merge", "--help"}} {
		code, stdout, _ := loadtestCommand(t, args...)
		if code != 0 || !strings.Contains(stdout, "Usage:") || !strings.Contains(stdout, "Examples:") {
			t.Errorf("loadtest %v: code %d\n%s", args, code, stdout)
		}
	}
	_, stdout, _ := loadtestCommand(t, "run", "--help")
	for _, flag := range strings.Fields("endpoints api conns clients duration total rate workload read-percent key-size value-size " +
		"keys dist warmup json server-metrics cacert cert key insecure-skip-tls-verify user password cleanup max-failures slo") {
		if !strings.Contains(stdout, "--"+flag+" ") {
			t.Errorf("--%s is not explained", flag)
		}
	}
}

// TestRun: a run against a server, with its report as text and as JSON.
func TestRun(t *testing.T) {
	endpoint, stop, err := (&fakekv.Store{}).Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	file := filepath.Join(t.TempDir(), "report.json")
	small := []string{"run", "--endpoints", endpoint, "--conns", "2", "--clients", "8", "--keys", "100", "--total", "500", "--verify"}
	code, stdout, stderr := loadtestCommand(t, append(small, "--workload", "get", "--json", file)...)
	if code != 0 || stderr != "" || !strings.Contains(stdout, "500 operations") {
		t.Fatalf("code %d\n%s%s", code, stdout, stderr)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var r loadtest.Report
	if err := json.Unmarshal(text, &r); err != nil || r.Operations != 500 || r.Get.Count != 500 || !r.Settings.Fill || r.Settings.Duration != 0 {
		t.Errorf("%v\n%s", err, text)
	}
	code, stdout, stderr = loadtestCommand(t, append(small, "--json", "-")...)
	if code != 0 || !strings.Contains(stderr, "500 operations") || json.Unmarshal([]byte(stdout), &r) != nil || r.Settings.Fill {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
}

// TestDefaults: few clients need no other flag, the keys lie below a prefix of their own, and --cleanup leaves none.
func TestDefaults(t *testing.T) {
	s := &fakekv.Store{}
	endpoint, stop, err := s.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	args := []string{"run", "--endpoints", endpoint, "--clients", "5", "--keys", "50", "--total", "100"}
	if code, stdout, stderr := loadtestCommand(t, args...); code != 0 || !strings.Contains(stdout, "5 clients, 5 connections") {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	s.Edit(func(kvs map[string]*mvccpb.KeyValue) {
		for key := range kvs {
			if !strings.HasPrefix(key, "loadtest/") {
				t.Errorf("key %q", key)
			}
		}
	})
	if code, stdout, stderr := loadtestCommand(t, append(args, "--cleanup")...); code != 0 || s.Len() != 0 || !strings.Contains(stdout, "cleaned up") {
		t.Errorf("code %d, %d keys are left\n%s%s", code, s.Len(), stdout, stderr)
	}
	args = []string{"kubernetes", "--endpoints", endpoint, "--clients", "5", "--nodes", "10", "--pods", "20", "--total", "200", "--verify", "--cleanup"}
	if code, stdout, stderr := loadtestCommand(t, args...); code != 0 || s.Len() != 0 || !strings.Contains(stdout, "9 watchers: ") || !strings.Contains(stdout, "renew, ") {
		t.Errorf("code %d, %d keys are left\n%s%s", code, s.Len(), stdout, stderr)
	}
}

// TestAccess: flags and environment say who the user is, as etcdctl's do.
func TestAccess(t *testing.T) {
	s := &fakekv.Store{User: "load", Password: "secret"}
	endpoint, stop, err := s.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	small := []string{"--clients", "2", "--total", "10"}
	for _, args := range [][]string{{"--user", "load:secret"}, {"--user", "load", "--password", "secret"}} {
		if code, _, stderr := loadtestCommand(t, append(append([]string{"run", "--endpoints", endpoint}, args...), small...)...); code != 0 {
			t.Errorf("%v: code %d, %s", args, code, stderr)
		}
	}
	reads := []string{"reads", "--endpoint", endpoint, "--clients", "1", "--answer-size", "10", "--value-size", "10", "--duration", "10ms", "--json", "-"}
	code, stdout, stderr := loadtestCommand(t, append(reads, "--user", "load:secret")...)
	var report loadtest.ReadsReport
	if err := json.Unmarshal([]byte(stdout), &report); code != 0 || err != nil || report.Answers == 0 || report.Config.User != "load" || !strings.Contains(stderr, " answers in ") {
		t.Errorf("reads: code %d, %v\n%s%s", code, err, stdout, stderr)
	}
	if strings.Contains(stdout, "secret") {
		t.Error("the password is part of the report")
	}
	if code, _, stderr := loadtestCommand(t, append(reads, "--user", "load:wrong")...); code != exitFailed || !strings.Contains(stderr, "log in as load") {
		t.Errorf("wrong password: code %d, %s", code, stderr)
	}
	t.Setenv("ETCDCTL_ENDPOINTS", endpoint)
	t.Setenv("ETCDCTL_USER", "load")
	t.Setenv("ETCDCTL_PASSWORD", "secret")
	if code, stdout, stderr := loadtestCommand(t, append([]string{"run"}, small...)...); code != 0 {
		t.Errorf("by the environment: code %d\n%s%s", code, stdout, stderr)
	}
	t.Setenv("ETCDCTL_INSECURE_SKIP_TLS_VERIFY", "perhaps")
	if code, _, stderr := loadtestCommand(t, "run"); code != exitUsage || !strings.Contains(stderr, "ETCDCTL_INSECURE_SKIP_TLS_VERIFY") {
		t.Errorf("a wrong variable: code %d, %s", code, stderr)
	}
}

// TestFailures: code 1 for servers that lose acknowledged writes, that refuse
// everything, or that do not exist.
func TestFailures(t *testing.T) {
	args := func(endpoint string) []string {
		return []string{"run", "--endpoints", endpoint, "--conns", "1", "--clients", "2", "--keys", "10", "--total", "20", "--verify"}
	}
	s := &fakekv.Store{}
	s.After = func(_ context.Context, n int64) error {
		if n == 20 {
			s.Edit(func(kvs map[string]*mvccpb.KeyValue) { clear(kvs) })
		}
		return nil
	}
	endpoint, stop, err := s.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if code, stdout, stderr := loadtestCommand(t, args(endpoint)...); code != exitFailed || !strings.Contains(stderr, "promises broken") || !strings.Contains(stdout, "VIOLATION") {
		t.Errorf("loss: code %d\n%s%s", code, stdout, stderr)
	}

	// A report that cannot be written is said before the load and not after it.
	code, stdout, stderr := loadtestCommand(t, append(args("127.0.0.1:1"), "--json", filepath.Join(t.TempDir(), "no", "such"))...)
	if code != exitFailed || stdout != "" || !strings.HasPrefix(stderr, "loadtest: json: open ") {
		t.Errorf("report: code %d\n%s%s", code, stdout, stderr)
	}

	refusing := &fakekv.Store{Before: func(context.Context, int64) error { return os.ErrPermission }}
	endpoint, stop, err = refusing.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if code, _, stderr := loadtestCommand(t, args(endpoint)[:len(args(endpoint))-1]...); code != exitFailed || !strings.Contains(stderr, "no operation succeeded") {
		t.Errorf("refusal: code %d\n%s", code, stderr)
	}
	// Some failures make the status 1 too, unless they are accepted.
	some := &fakekv.Store{Before: func(_ context.Context, n int64) error {
		if n%10 == 0 {
			return os.ErrPermission
		}
		return nil
	}}
	mostly, stopMostly, err := some.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stopMostly()
	run := []string{"run", "--endpoints", mostly, "--clients", "2", "--keys", "10", "--total", "20"}
	if code, stdout, stderr := loadtestCommand(t, run...); code != exitFailed || !strings.Contains(stderr, "2 of 20 operations failed; --max-failures accepts 0") || !strings.Contains(stdout, "18 operations") {
		t.Errorf("failures: code %d\n%s%s", code, stdout, stderr)
	}
	if code, stdout, stderr := loadtestCommand(t, append(run, "--max-failures", "2")...); code != 0 {
		t.Errorf("accepted failures: code %d\n%s%s", code, stdout, stderr)
	}
	// So does a rate that the servers cannot do.
	slow := &fakekv.Store{Before: func(ctx context.Context, _ int64) error { return clock.Sleep(ctx, clock.System(), 20*time.Millisecond) }}
	busy, stopBusy, err := slow.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stopBusy()
	if code, stdout, stderr := loadtestCommand(t, "run", "--endpoints", busy, "--clients", "1", "--rate", "1000", "--duration", "300ms"); code != exitFailed ||
		!strings.Contains(stderr, "of 300 operations failed") || !strings.Contains(stdout, "never sent: the servers are slower") {
		t.Errorf("overload: code %d\n%s%s", code, stdout, stderr)
	}
	if code, _, stderr := loadtestCommand(t, append(args(endpoint), "--fill")...); code != exitFailed || !strings.HasPrefix(stderr, "loadtest: fill: ") {
		t.Errorf("refusal of the fill: code %d\n%s", code, stderr)
	}
}

// TestSLO: the status tells clauses that are not met from failures, and each clause is printed with its figure.
func TestSLO(t *testing.T) {
	some := &fakekv.Store{Before: func(_ context.Context, n int64) error {
		if n%10 == 0 {
			return os.ErrPermission
		}
		return nil
	}}
	endpoint, stop, err := some.Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	run := []string{"run", "--endpoints", endpoint, "--clients", "2", "--keys", "10", "--total", "20", "--slo"}
	for _, c := range []struct {
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{[]string{"errors<=10%,put.p99<1h"}, 0, "  met      errors<=10%: 10%\n", ""},
		{[]string{"errors<10%, p50<1h"}, exitSLO, "  NOT MET  errors<10%: 10%\n  met      p50<1h: ", "loadtest: slo not met: errors<10%: 10%\n"},
		{[]string{"p50<1h"}, exitFailed, "  met      p50<1h: ", "2 of 20 operations failed; --max-failures accepts 0"},
		{[]string{"errors<50%", "--max-failures", "1"}, exitFailed, "  met      errors<50%: 10%", "--max-failures accepts 1"},
		{[]string{"get.p99<1h", "--max-failures", "9"}, exitSLO, "  NOT MET  get.p99<1h: no operation of this kind succeeded", "slo not met"},
	} {
		code, stdout, stderr := loadtestCommand(t, append(run, c.args...)...)
		if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%v: code %d\n%s%s", c.args, code, stdout, stderr)
		}
	}
}

// TestCompare: what run has written can be compared, and a run of other settings only if that is asked for.
func TestCompare(t *testing.T) {
	endpoint, stop, err := (&fakekv.Store{}).Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	dir := t.TempDir()
	for _, c := range []struct{ name, clients string }{{"a1", "2"}, {"a2", "2"}, {"b1", "2"}, {"b2", "2"}, {"other", "3"}} {
		args := []string{"run", "--endpoints", endpoint, "--clients", c.clients, "--keys", "10", "--total", "50", "--json", filepath.Join(dir, c.name+".json")}
		if code, stdout, stderr := loadtestCommand(t, args...); code != 0 {
			t.Fatalf("code %d\n%s%s", code, stdout, stderr)
		}
	}
	a, b, other := filepath.Join(dir, "a*.json"), filepath.Join(dir, "b*.json"), filepath.Join(dir, "other.json")
	if code, stdout, stderr := loadtestCommand(t, "compare", "--paired", a, b); code != 0 || !strings.Contains(stdout, "2 and 2 runs, compared as pairs") || !strings.Contains(stdout, "\nput p99 ") {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	if code, _, stderr := loadtestCommand(t, "compare", a, other); code != exitFailed || !strings.Contains(stderr, "\n  clients: 2 and 3\n") {
		t.Errorf("code %d\n%s", code, stderr)
	}
	page := filepath.Join(dir, "out.html")
	if code, stdout, stderr := loadtestCommand(t, "report", page, other, filepath.Join(dir, "a1.json")); code != 0 || stdout != "" {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "Latencies by kind") || !strings.Contains(string(text), "other.json") {
		t.Errorf("%v\n%s", err, text)
	}
	code, stdout, stderr := loadtestCommand(t, "compare", "--different", a, other, "--json", "-")
	if code != 0 || !strings.Contains(stderr, "clients: 2 and 3") || !json.Valid([]byte(stdout)) {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
}

// TestSweep: the knee's status, table and JSON, and the status where no step is good.
func TestSweep(t *testing.T) {
	endpoint, stop, err := (&fakekv.Store{}).Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	args := []string{"sweep", "--endpoints", endpoint, "--keys", "10", "--total", "20", "--steps", "1,2", "--json", "-", "--p99"}
	code, stdout, stderr := loadtestCommand(t, append(args, "1h")...)
	var r loadtest.SweepReport
	if err := json.Unmarshal([]byte(stdout), &r); code != 0 || err != nil || len(r.Steps) != 2 || r.Steps[0].Report.Operations != 20 || !strings.Contains(stderr, "\nknee: clients ") {
		t.Errorf("code %d, %v\n%s%s", code, err, stdout, stderr)
	}
	code, stdout, stderr = loadtestCommand(t, append(args, "1ns")...)
	if code != exitFailed || json.Unmarshal([]byte(stdout), &r) != nil || r.Knee != -1 || !strings.HasSuffix(stderr, "loadtest: no step was good\n") {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
}

// TestMerge: what ran at a time becomes one report, and what ran one after the other does not.
func TestMerge(t *testing.T) {
	endpoint, stop, err := (&fakekv.Store{}).Serve()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	dir := t.TempDir()
	one, two, both := filepath.Join(dir, "one.json"), filepath.Join(dir, "two.json"), filepath.Join(dir, "both.json")
	for _, name := range []string{one, two} {
		args := []string{"run", "--endpoints", endpoint, "--clients", "2", "--keys", "10", "--total", "50", "--slo", "throughput>0,max<1h", "--json", name}
		if code, stdout, stderr := loadtestCommand(t, args...); code != 0 {
			t.Fatalf("code %d\n%s%s", code, stdout, stderr)
		}
	}
	if code, _, stderr := loadtestCommand(t, "merge", one, two); code != exitFailed || !strings.Contains(stderr, "did not run at a time: all of them ran for 0s of the ") {
		t.Errorf("code %d\n%s", code, stderr)
	}
	a, err := results.Read(one)
	if err != nil {
		t.Fatal(err)
	}
	b, err := results.Read(two)
	if err != nil {
		t.Fatal(err)
	}
	b.Measured, b.ElapsedSeconds = a.Measured, a.ElapsedSeconds
	if err := b.WriteJSON(two, nil); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := loadtestCommand(t, "merge", one, two, "--json", both); code != 0 || !strings.Contains(stdout, "put: 4 clients") || !strings.Contains(stdout, "  met      max<1h") {
		t.Errorf("code %d\n%s%s", code, stdout, stderr)
	}
	r, err := results.Read(both)
	if err != nil || r.Operations != a.Operations+b.Operations || r.Histograms["put"].Count() != r.Operations || len(r.Generators) != 2 {
		t.Errorf("%v, %+v", err, r)
	}
}

// TestExamples: each example of the help and of the guide is a command line, with objectives that are understood.
func TestExamples(t *testing.T) {
	guide, err := os.ReadFile("../../docs/LOADTEST.md")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	texts := []string{string(guide), strings.ReplaceAll(string(readme), "\\\n", " "), newRoot().Example}
	for _, c := range newRoot().Commands() {
		texts = append(texts, c.Example)
	}
	examples := regexp.MustCompile(`(?m)^ *(?:bin/)?loadtest (.*)$`).FindAllStringSubmatch(strings.Join(texts, "\n"), -1)
	if len(examples) < 40 {
		t.Errorf("only %d examples", len(examples))
	}
	for _, example := range examples {
		line, _, _ := strings.Cut(example[1], " & ")
		var args []string
		for _, arg := range regexp.MustCompile(`'[^']*'|\S+`).FindAllString(line, -1) {
			args = append(args, strings.Trim(arg, "'"))
		}
		c, rest, err := newRoot().Find(args)
		if err == nil {
			err = c.ParseFlags(rest)
		}
		if err == nil {
			err = c.ValidateArgs(c.Flags().Args())
		}
		if f := c.Flags().Lookup("slo"); err == nil && f != nil && f.Value.String() != "" {
			_, err = loadtest.ParseObjectives(f.Value.String())
		}
		if err != nil || !c.HasParent() {
			t.Errorf("%s: %v", line, err)
		}
	}
}
