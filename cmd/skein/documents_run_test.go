//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/ports"
)

var runDocuments = flag.Bool("documents", false, "run the commands of the documents on a cluster of processes")

// elsewhere are the commands of documents that TestDocumentedCommandsRun does not run, and why: first what the commands
// begin with, as PAGE: COMMAND. Each begins one at least.
var elsewhere = [][2]string{
	{"README: go run ./cmd/skein demo ", "the tests of package demo run both"},
	{"README: make ", "it builds or tests this tree"},
	{"README: bin/release/skein", "it uses etcd's own ports and the directory that it is in; deploy's TestImageRoot runs this program"},
	{"README: sudo ", "it changes the machine; deploy's TestDebInstalls unpacks the package"},
	{"README: skein etcdctl put a 1", "it speaks to the node of the Debian package"},
	{"README: docker ", "it needs docker; deploy's TestCompose runs those of compose, and TestImageRoot what is in the image"},
	{"README: helm ", "it needs Kubernetes; deploy/helm's TestDocumentedCommands renders it"},
	{"README: bin/skein cert create-ca ", "TestSecureQuickStart runs this block as it is"},
	{"README: for i in 1 2 3; do bin/skein ", "TestSecureQuickStart"},
	{"README: bin/skein cert create-client root --certs-dir certs --out root", "TestSecureQuickStart"},
	{"README: export ETCDCTL_ENDPOINTS=https:", "TestSecureQuickStart"},
	{"README: etcdctl user add root ", "TestSecureQuickStart"},
	{"README: bin/skein node list", "TestSecureQuickStart"},
	{"README: bin/skein import etcd ", "only a new cluster is loaded; TestMigrationDocument runs it"},
	{"OPERATIONS: bin/skein --name n1 --data-dir d1 --discovery-srv ", "it asks DNS for records of a domain; node/join's tests have such records"},
	{"OPERATIONS: bin/release/skein grpc-proxy ", "it is a module of its own; deploy's TestImageRoot and TestProxyWithCertificates run it"},
	{"OPERATIONS: bin/skein cert create-client proxy ", "deploy's TestProxyWithCertificates runs it"},
	{"OPERATIONS: bin/skein cert create-ca --certs-dir outer", "TestProxyWithCertificates"},
	{"OPERATIONS: bin/skein cert create-node proxy ", "TestProxyWithCertificates"},
	{"OPERATIONS: bin/skein cert create-client app ", "TestProxyWithCertificates"},
	{"OPERATIONS: sudo ", "it changes the machine; deploy's TestUnit has systemd read the drop-in, and TestLogIsMoved moves a log"},
	{"OPERATIONS: bin/skein placement add ", "it takes seven nodes; node/operate's TestVotersOfPlacementByHand has them"},
	{"OPERATIONS: bin/skein placement remove ", "it takes seven nodes; node/operate's TestVotersOfPlacementByHand has them"},
	{"OPERATIONS: bin/skein node recommission n4 ", "the node may be removed before; package node's TestNodeStates has one that is not"},
	{"OPERATIONS: bin/skein --name n1 --certs-dir n1 ", "it is of another machine; TestSecureQuickStart starts nodes in this way"},
	{"OPERATIONS: etcdctl --endpoints https://n1.example.com:2379 ", "it is of another machine; TestSecureQuickStart uses certificates in this way"},
	{"KUBERNETES: kube-apiserver ", "it is of another machine; conformance/apiserver runs its storage on Skein"},
	{"KUBERNETES: make ", "it builds this tree"},
	{"KUBERNETES: docker ", "it needs docker and a registry"},
	{"KUBERNETES: helm ", "it needs Kubernetes; deploy/helm's TestDocumentedCommands renders it"},
	{"KUBERNETES: kubectl rollout ", "it needs Kubernetes"},
	{"KUBERNETES: kubectl create ", "it needs Kubernetes"},
	{"KUBERNETES: kubectl exec skein-0 -- skein node decommission ", "its node is a pod; OPERATIONS.md has the command too"},
	{"KUBERNETES: kubectl exec skein-0 -- etcdctl member remove ", "its node is a pod; OPERATIONS.md has the command too"},
	{"KUBERNETES: kubectl delete ", "it needs Kubernetes"},
	{"KUBERNETES: kubectl port-forward ", "it needs Kubernetes"},
	{"KUBERNETES: for i in 0 1 2 3 4; do", "it needs Kubernetes; deploy/helm's TestRunWithSecrets makes such certificates"},
	{"KUBERNETES: skein restore 's3:", "it needs a bucket; package backup's tests have one"},
	{"TROUBLESHOOTING: skein import etcd ", "only a new cluster is loaded; TestMigrationDocument runs it"},
	{"TROUBLESHOOTING: skein mirror status ", "it needs a mirror; TestMirrorDocument runs it"},
	{"TROUBLESHOOTING: skein restore ", "only a new cluster is loaded; TestBackupDocument runs it"},
	{"TROUBLESHOOTING: chown ", "it needs root, and a user skein"},
	{"BACKUP: ", "TestBackupDocument runs all of the page"},
	{"MIGRATION: ", "TestMigrationDocument and TestMirrorDocument run all of the page"},
	{"RECOVERY: ", "package recovery's TestDocument and TestForceNewCluster run all of the page"},
}

// documents are those whose commands are run, and told the parts that come before all others: their commands make what those of
// the others need.
var (
	documents = []string{"README", "LOADTEST", "OPERATIONS", "MONITORING", "TROUBLESHOOTING", "KUBERNETES", "BACKUP", "MIGRATION", "RECOVERY"}
	told      = []string{
		"README: Run a cluster", "README: Use it", "README: Operate it", "README: Bring data in and out",
		"OPERATIONS: Plan a cluster", "OPERATIONS: See what is wrong", "OPERATIONS: Run it by systemd or docker",
		"OPERATIONS: Look at ranges and nodes, split, change a leader", "OPERATIONS: Keep an audit log", "OPERATIONS: Add a node",
	}
)

// step is what a command of a document needs, and says beyond its success.
type step struct {
	// before returns what in the line is to be replaced by what, in pairs.
	before  func(*story) []string
	after   func(*story)
	replace []string
	// says is in its output. unwell permits it to find something wrong.
	says   string
	unwell bool
}

// steps are those that commands need, by what these begin with.
var steps = map[string]step{
	"README: etcdctl --endpoints 127.0.0.1:22379 watch ": {says: "PUT\na\n1\n"},
	"README: etcdctl --endpoints 127.0.0.1:12379,":       {says: "STORAGE VERSION"},
	"README: skein status":                               {unwell: true, says: "| n3 "},
	// Less of the same loads, with objectives that a busy machine meets too.
	"README: loadtest run ":                    {replace: []string{"--total 100000", "--total 2000"}, says: " operations in "},
	"README: loadtest kubernetes ":             {replace: smallLoad, says: " operations in "},
	"LOADTEST: loadtest run ":                  {replace: smallLoad, says: " operations in "},
	"LOADTEST: loadtest kubernetes ":           {replace: smallLoad, says: " operations in "},
	"LOADTEST: loadtest sweep ":                {replace: smallLoad, says: "knee"},
	"LOADTEST: loadtest compare --different ":  {before: copies("run.json", "etcd.json"), says: "api"},
	"LOADTEST: loadtest compare before.json ":  {before: copies("run.json", "before.json", "after.json")},
	"LOADTEST: loadtest compare --paired ":     {before: copies("run.json", "etcd-1.json", "etcd-2.json", "skein-1.json", "skein-2.json")},
	"LOADTEST: loadtest merge ":                {before: copies("run.json", "one.json", "two.json")},
	"OPERATIONS: skein doctor":                 {unwell: true},
	"OPERATIONS: skein status":                 {unwell: true, says: "| n3 "},
	"OPERATIONS: skein debug bundle":           {replace: []string{"debug bundle", "debug bundle --cpu 200ms"}, says: "wrote skein-bundle-"},
	"OPERATIONS: skein gateway start":          {after: throughGateway},
	"OPERATIONS: skein range list":             {says: "| KEPT |"},
	"OPERATIONS: skein range show 1":           {says: "revisions   compacted at"},
	"OPERATIONS: skein node list":              {says: "| serving "},
	"OPERATIONS: skein range heat --endpoints": {says: "| SHARE |"},
	"OPERATIONS: skein audit check":            {before: rotateAudit, says: "audit.log: "},
	// From here on nothing moves but what is told to.
	"OPERATIONS: skein --name n4 --data-dir d4 --listen-":                    {before: first("skein placement pause")},
	"OPERATIONS: skein range move 1":                                         {says: "n4"},
	"OPERATIONS: skein placement show":                                       {says: "nobody: paused"},
	"OPERATIONS: skein placement move --from n1":                             {says: "| n4 ", after: then("skein placement move --from n4 --to n1")},
	"OPERATIONS: skein placement set-replication 5 --dry-run":                {before: first("skein placement resume")},
	"OPERATIONS: skein placement set-replication 5 --endpoints":              {after: then("skein placement set-replication 3")},
	"OPERATIONS: skein config show":                                          {says: "file: data-dir"},
	"OPERATIONS: skein explain":                                              {says: "clients get  etcdserver: request timed out, possibly"},
	"OPERATIONS: skein cert check":                                           {says: "can be used by the node n1"},
	"OPERATIONS: skein cert revoke SERIAL":                                   {before: serial},
	"OPERATIONS: skein --name n1 --data-dir d1 --enable-distributed-tracing": {before: alone, after: func(s *story) { s.settle(); s.kill("n1 alone") }},
	"OPERATIONS: etcdctl --endpoints 127.0.0.1:22379 member remove ID":       {before: lost("n1"), says: "removed from cluster"},
	"OPERATIONS: skein node decommission n4": {says: "| removed ", after: func(s *story) {
		s.ends("n4")
		then("rm -r d4")(s)
	}},
	"OPERATIONS: etcdctl --endpoints 127.0.0.1:12379 member remove ID": {before: lost("n5"), says: "removed from cluster"},
	"TROUBLESHOOTING: skein status":                                    {unwell: true},
	"TROUBLESHOOTING: skein doctor":                                    {unwell: true},
	"TROUBLESHOOTING: skein node drain n2":                             {after: then("skein node undrain n2")},
	"TROUBLESHOOTING: etcdctl compact 12345":                           {before: revision, says: "compacted revision"},
	"TROUBLESHOOTING: etcdctl member remove ID":                        {before: lost("n4"), says: "removed from cluster"},
	"TROUBLESHOOTING: skein node list --user root": {before: users, after: func(s *story) {
		s.extra = ""
		then("etcdctl --user root:secret auth disable")(s)
	}},
	"KUBERNETES: kubectl exec skein-0 -- skein status": {unwell: true},
	"KUBERNETES: skein cert create-ca ":                {before: first("rm -r certs", "rm -r root")},
}

// smallLoad makes a load small that loadtest's guide shows.
var smallLoad = []string{
	"--duration 30s", "--duration 2s", "--duration 1m", "--duration 2s", "--duration 5s", "--duration 1s", "--warmup 5s", "--warmup 1s",
	"--clients 256", "--clients 32", "--rate 1000", "--rate 50", "--rate 2000", "--rate 50",
	"p99<10ms", "p99<10s", "p99.9<50ms", "p99.9<50s", "throughput>1900", "throughput>9",
	"--steps 16,64,256,1024", "--steps 8,16 --duration 1s", "--steps 1000,2000,4000,8000", "--steps 20,40 --duration 1s", "--p99 10ms", "--p99 10s",
	"--p99 50ms", "--p99 10s --steps 8,16",
	"--api pipe --endpoints", "--duration 2s --api pipe --endpoints",
	"--workload get", "--workload get --keys 1000", "--workload mixed", "--workload mixed --keys 1000", // all of which are filled first
}

// copies has a file that is there under other names too.
func copies(from string, to ...string) func(*story) []string {
	return func(s *story) []string {
		b, err := os.ReadFile(from)
		for _, name := range to {
			err = errors.Join(err, os.WriteFile(name, b, 0o600))
		}
		if err != nil {
			s.t.Fatal(err)
		}
		return nil
	}
}

// first has lines run before a command, and then has them run after it.
func first(lines ...string) func(*story) []string {
	return func(s *story) []string { then(lines...)(s); return nil }
}

func then(lines ...string) func(*story) {
	return func(s *story) {
		s.t.Helper()
		for _, line := range lines {
			s.does(line, step{})
		}
	}
}

// patience is for a command, or the start of a node, on a busy machine.
const patience = 10 * time.Minute

// story is a cluster of processes that does what the documents say, a command after the other.
type story struct {
	t *testing.T
	// told are pairs of what documents say and what it is here: ports, paths, variables.
	told []string
	// nodes are the processes of nodes and gateways, by name, with the flags of their first start.
	nodes map[string]*exec.Cmd
	flags map[string]string
	// starting are URLs of nodes that have not been seen to serve.
	starting []string
	// loadtest is the path of that program.
	loadtest string
	// extra is a further variable of commands. last is what the last of them has printed.
	extra string
	last  string
}

// TestDocumentedCommandsRun: the commands of the documents work as they are written, but for ports and paths: in a cluster of
// processes, one after the other. Those that cannot are named, with the reason.
func TestDocumentedCommandsRun(t *testing.T) {
	if !*runDocuments {
		t.Skip("left out: it runs with -documents alone")
	}
	all := documentLines(t)
	s := newStory(t)
	for _, c := range all {
		if c.runs {
			s.does(c.line, c.step)
		}
	}
}

// TestDocumentedCommandsAreKnown: testdata/documents lists the commands of the documents in the order in which
// TestDocumentedCommandsRun runs them, and those that it leaves out. A command that is new there has to be run, or left out for a
// reason.
func TestDocumentedCommandsAreKnown(t *testing.T) {
	var list strings.Builder
	for _, c := range documentLines(t) {
		does := "runs"
		if !c.runs {
			does = "leaves out"
		}
		fmt.Fprintln(&list, does, c.at)
	}
	const path = "testdata/documents"
	if os.Getenv("SKEIN_REWRITE") != "" {
		if err := os.WriteFile(path, []byte(list.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, now := strings.Split(string(was), "\n"), strings.Split(list.String(), "\n")
	for i := range max(len(before), len(now)) {
		if i < len(before) && i < len(now) && before[i] == now[i] {
			continue
		}
		t.Fatalf("line %d of cmd/skein/%s and the documents differ from here on:\nthe list: %q\nthe documents: %q\nsee with make documents that the commands work "+
			"(steps and elsewhere say what they need, and which are left out), and then write the list: SKEIN_REWRITE=1 go test ./cmd/skein -run TestDocumentedCommandsAreKnown",
			i+1, path, before[min(i, len(before)):min(i+1, len(before))], now[min(i, len(now)):min(i+1, len(now))])
	}
}

// documentLine is a command of a document. at is the line with its page before it.
type documentLine struct {
	at, line string
	runs     bool
	step     step
}

// documentLines returns the commands of the documents in the order in which they are run.
func documentLines(t *testing.T) (all []documentLine) {
	t.Helper()
	parts := map[string][]string{}
	order := slices.Clone(told)
	for _, doc := range documents {
		path := "../../docs/" + doc + ".md"
		if doc == "README" {
			path = "../../README.md"
		}
		for _, p := range pages(t, path) {
			part := doc + ": " + strings.TrimPrefix(p.heading, "# ")
			for _, block := range p.blocks {
				parts[part] = append(parts[part], commandsOf(block)...)
			}
			if !slices.Contains(order, part) {
				order = append(order, part)
			}
		}
	}
	used := map[string]bool{}
	for _, part := range order {
		if len(parts[part]) == 0 && slices.Contains(told, part) {
			t.Errorf("%s: no such part, or no commands", part)
		}
		doc, _, _ := strings.Cut(part, ":")
		for _, line := range parts[part] {
			at := doc + ": " + line
			if i := slices.IndexFunc(elsewhere, func(row [2]string) bool { return strings.HasPrefix(at, row[0]) }); i >= 0 {
				used[elsewhere[i][0]] = true
				all = append(all, documentLine{at: at, line: line})
				continue
			}
			key := strings.Replace(at, ": bin/", ": ", 1)
			var st step
			for begin, its := range steps {
				if strings.HasPrefix(key, begin) {
					st, used[begin] = its, true
				}
			}
			all = append(all, documentLine{at: at, line: line, runs: true, step: st})
		}
	}
	for _, row := range elsewhere {
		if !used[row[0]] {
			t.Errorf("no command begins with %q", row[0])
		}
	}
	for begin := range steps {
		if !used[begin] {
			t.Errorf("no command begins with %q", begin)
		}
	}
	return all
}

// commandsOf returns the commands of a document's block, and none of one with anything else.
func commandsOf(block []string) (all []string) {
	first, _, _ := strings.Cut(block[0], " ")
	if first == "" || (first == "go" || first == "ini") && len(block[0]) == len(first) || strings.HasSuffix(first, ":") || strings.ContainsAny(first[:1], `-"`) {
		return nil
	}
	text := regexp.MustCompile(`\\\n *`).ReplaceAllString(strings.Join(block, "\n"), "")
	text = regexp.MustCompile(`(?s)\n  .*?\ndone`).ReplaceAllString(text, "") // a loop is one command
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "  #")
		if line = strings.TrimSpace(line); line != "" {
			all = append(all, line)
		}
	}
	return all
}

func newStory(t *testing.T) *story {
	t.Helper()
	free, err := ports.Unused(14)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := &story{t: t, nodes: map[string]*exec.Cmd{}, flags: map[string]string{}, loadtest: filepath.Join(t.TempDir(), "loadtest")}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-tags", "invariants", "-o", s.loadtest, "../loadtest").CombinedOutput(); err != nil {
		t.Fatalf("build loadtest: %v\n%s", err, out)
	}
	t.Chdir(dir)
	for i, port := range []int{12379, 22379, 32379, 42379, 52379, 12380, 22380, 32380, 42380, 52380, 23790, 4317} {
		s.told = append(s.told, fmt.Sprint(":", port), fmt.Sprint(":", free[i]))
	}
	s.told = append(s.told, "--endpoints 127.0.0.1:23790", fmt.Sprint("--endpoints 127.0.0.1:", free[10])) // before its first digits
	s.told = append(s.told, "--endpoints 127.0.0.1:2379", fmt.Sprint("--endpoints 127.0.0.1:", free[0]))   // of a guide without a cluster
	s.told = append(s.told, "file:///var/backups/skein", "file://"+dir+"/backups", "/var/lib/skein", dir+"/lib", "/etc/skein/n1.yaml", dir+"/n1.yaml")
	if err := os.WriteFile("n1.yaml", []byte("name: n1\ndata-dir: "+dir+"/d9\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir("lib", 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for name := range s.nodes {
			s.kill(name)
		}
	})
	return s
}

// here is a text of a document with the ports and paths of this cluster.
func (s *story) here(text string) string { return strings.NewReplacer(s.told...).Replace(text) }

// does does what a line of a document says.
func (s *story) does(line string, st step) {
	s.t.Helper()
	began := time.Now()
	defer func() { s.t.Logf("%s %s\n%s", time.Since(began), line, s.last) }()
	if st.before != nil {
		line = strings.NewReplacer(st.before(s)...).Replace(line)
	}
	line = strings.NewReplacer(st.replace...).Replace(line)
	if name, value, ok := strings.Cut(line, "="); ok && name == "CLUSTER" {
		s.told = append(s.told, "$CLUSTER", s.here(value))
		return
	}
	code := s.runs(line)
	for code != 0 && strings.Contains(s.last, "the same request again waits for that") { // as a member says that is being removed
		code = s.runs(line)
	}
	if code != 0 && (code != 1 || !st.unwell) || !strings.Contains(s.last, st.says) {
		s.t.Errorf("%s: exit code %d, and %q is to be said:\n%s", line, code, st.says, s.last)
	}
	if st.after != nil {
		st.after(s)
	}
}

// runs runs a line and returns its exit code. A node or a gateway goes on.
func (s *story) runs(line string) (code int) {
	s.t.Helper()
	line = strings.TrimPrefix(strings.TrimPrefix(line, "kubectl exec skein-0 -- "), "bin/")
	words := shellWords(s.t, s.here(line))
	s.last = ""
	if words[0] == "skein" && strings.HasPrefix(words[1], "--") {
		s.start(words)
		return 0
	}
	s.settle()
	switch {
	case words[0] == "skein" && words[1] == "gateway":
		s.begins("gateway", words)
		return 0
	case words[0] == "skein":
		ctx, cancel := context.WithTimeout(s.t.Context(), patience)
		defer cancel()
		var out bytes.Buffer
		code = execute(ctx, words[1:], append(s.environ(line), "SKEIN_COMMAND_TIMEOUT="+patience.String()), &out, &out)
		s.last = out.String()
	case words[0] == "loadtest":
		code = s.prints(line, exec.CommandContext(s.t.Context(), s.loadtest, words[1:]...))
	case words[0] == "etcdctl" && slices.Contains(words, "watch"):
		s.watches(words)
	case words[0] == "etcdctl":
		// Most of its commands begin to count before they read the variable of that.
		words = append(words, "--command-timeout", patience.String(), "--dial-timeout", patience.String())
		code = s.prints(line, program(s.t, words[0], nil, words[1:]...))
	case words[0] == "rm" && words[1] == "-r" && len(words) == 3 && filepath.IsLocal(words[2]):
		if err := os.RemoveAll(words[2]); err != nil {
			s.t.Fatal(err)
		}
		s.last = ""
	default:
		s.t.Fatalf("nobody runs %q here, and it is not among those that are left out", line)
	}
	return code
}

// prints runs a program of a line, and returns its exit code.
func (s *story) prints(line string, c *exec.Cmd) (code int) {
	s.t.Helper()
	if c.Env == nil {
		c.Env = os.Environ()
	}
	c.Env = append(c.Env, s.environ(line)...)
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		s.t.Fatalf("%s: %v", line, err)
	} else if err != nil {
		code = exit.ExitCode()
	}
	s.last = string(out)
	return code
}

// environ has the endpoints for a line without them: etcdctl takes no flag beside its variable.
func (s *story) environ(line string) []string {
	if strings.Contains(line, "--endpoints") {
		return []string{s.extra}
	}
	all := s.here("127.0.0.1:22379,127.0.0.1:32379")
	return []string{"SKEIN_ENDPOINTS=" + all, "ETCDCTL_ENDPOINTS=" + all, s.extra}
}

// start starts a node. Three points in its line are the flags of its first start.
func (s *story) start(words []string) {
	s.t.Helper()
	name, dir := words[2], words[4]
	switch i := slices.Index(words, "..."); {
	case i >= 0:
		words = slices.Concat(words[:i], strings.Fields(s.flags[name]), words[i+1:])
	case dir == "alone":
		name = "n1 alone"
	default:
		s.flags[name] = regexp.MustCompile(` --(initial-ranges|join) .*`).ReplaceAllString(strings.Join(words[5:], " "), "")
	}
	if dir == "d1" {
		words = append(words, "--audit-log", "audit.log")
	}
	s.begins(name, words)
	s.starting = append(s.starting, words[slices.Index(words, "--advertise-client-urls")+1])
}

// begins starts a process that goes on.
func (s *story) begins(name string, words []string) {
	s.t.Helper()
	s.kill(name)
	c := program(s.t, words[0], nil, words[1:]...)
	log, err := os.OpenFile(name+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.nodes[name] = c
}

func (s *story) kill(name string) {
	if c := s.nodes[name]; c != nil {
		_ = c.Process.Kill()
		_ = c.Wait()
		delete(s.nodes, name)
	}
}

// ends waits for the end of a node that is to end by itself.
func (s *story) ends(name string) {
	s.t.Helper()
	if err := s.nodes[name].Wait(); err != nil {
		s.t.Errorf("%s: %v", name, err)
	}
	delete(s.nodes, name)
}

// settle waits until all nodes serve that were started.
func (s *story) settle() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	for _, url := range s.starting {
		for ready := false; !ready; time.Sleep(20 * time.Millisecond) {
			q, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/readyz", http.NoBody)
			if err != nil {
				s.t.Fatal(err)
			}
			if r, err := http.DefaultClient.Do(q); err == nil {
				r.Body.Close()
				ready = r.StatusCode == http.StatusOK
			} else if ctx.Err() != nil {
				s.t.Fatalf("%s: %v", url, err)
			}
		}
	}
	s.starting = nil
}

// watches runs a watch until it has shown an event.
func (s *story) watches(words []string) {
	s.t.Helper()
	c := program(s.t, words[0], nil, words[1:]...)
	out, err := c.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		s.t.Fatal(err)
	}
	b := make([]byte, len("PUT\na\n1\n"))
	n, _ := io.ReadFull(out, b)
	s.last = string(b[:n])
	_ = c.Process.Kill()
	_ = c.Wait()
}

// rotateAudit moves the audit log away, as the page says, and has the node begin a new one.
func rotateAudit(s *story) []string {
	s.t.Helper()
	for _, name := range []string{"audit.log.1", "audit.log"} {
		s.runs("skein range split " + name + " --endpoints 127.0.0.1:12379")
		awaits(s.t, "a line of the audit log", func() bool { b, _ := os.ReadFile("audit.log"); return bytes.HasSuffix(b, []byte("\n")) })
		if name == "audit.log.1" {
			if err := os.Rename("audit.log", name); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	return nil
}

// found returns what the last command has printed at the brackets of an expression.
func (s *story) found(expression string) string {
	s.t.Helper()
	m := regexp.MustCompile(expression).FindStringSubmatch(s.last)
	if m == nil {
		s.t.Fatalf("there is no %s in\n%s", expression, s.last)
	}
	return m[1]
}

// serial is that of the client of which the last command has said that there is one.
func serial(s *story) []string {
	s.t.Helper()
	return []string{"SERIAL", s.found(`client +root .* ([0-9a-f]{32}) `)}
}

// lost ends a node, which is to be removed then.
func lost(name string) func(*story) []string {
	return func(s *story) []string {
		s.t.Helper()
		s.kill(name)
		then("etcdctl member list")(s)
		return []string{"ID", s.found(`(?m)^([0-9a-f]+), started, ` + name + `,`)}
	}
}

// revision is the cluster's.
func revision(s *story) []string {
	s.t.Helper()
	then("etcdctl get a -w fields")(s)
	return []string{"12345", s.found(`"Revision" : (\d+)`)}
}

// users has users checked.
func users(s *story) []string {
	s.t.Helper()
	then("etcdctl user add root:secret", "etcdctl role add root", "etcdctl user grant-role root root", "etcdctl auth enable")(s)
	s.extra = "SKEIN_PASSWORD=secret"
	return nil
}

// throughGateway has a client reach the cluster by the gateway, which begins to listen meanwhile.
func throughGateway(s *story) {
	s.t.Helper()
	awaits(s.t, "the gateway", func() bool {
		c, err := net.Dial("tcp", s.here("127.0.0.1:23790"))
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	then("etcdctl --endpoints 127.0.0.1:23790 put b 2")(s)
}

// alone is a node of a cluster of its own.
func alone(s *story) []string {
	s.t.Helper()
	free, err := ports.Unused(2)
	if err != nil {
		s.t.Fatal(err)
	}
	at := func(i int) string { return fmt.Sprint("http://127.0.0.1:", free[i]) }
	return []string{" d1 ", fmt.Sprintf(" alone --listen-client-urls %s --advertise-client-urls %[1]s --listen-peer-urls %s --initial-advertise-peer-urls %[2]s --initial-cluster n1=%[2]s ", at(0), at(1))}
}
