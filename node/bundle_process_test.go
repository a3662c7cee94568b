package node_test

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// run runs a command of skein, and returns its exit code and what it has said.
func (c *processes) run(env []string, args ...string) (code int, said string) {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), c.nodes[0].binary, args...)
	cmd.Env = append(os.Environ(), env...)
	b, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		c.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(b)
}

// unpackBundle returns the files of a bundle, profiles unpacked too.
func unpackBundle(t *testing.T, path string) map[string]string {
	t.Helper()
	inflate := func(r io.Reader) io.Reader {
		z, err := gzip.NewReader(r)
		if err != nil {
			t.Fatal(err)
		}
		return z
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := map[string]string{}
	for r := tar.NewReader(inflate(f)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		from := io.Reader(r)
		if strings.HasSuffix(h.Name, ".gz") {
			from = inflate(r)
		}
		b, err := io.ReadAll(from)
		if err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(h.Name, "/")
		files[name] = string(b)
	}
}

// plant leaves keys and secrets wherever a node might remember them.
func (c *processes) plant(key, password, s3 string) (token string) {
	t := c.t
	t.Helper()
	cl := c.clientOf(c.nodes...)
	for i := range 50 {
		if _, err := cl.Put(t.Context(), fmt.Sprintf("/%s/%d", key, i), key); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"range", "split", "/" + key + "/25"}, {"range", "split", "/" + key + "/25"}, {"range", "list", "--holding", key}} {
		c.run(nil, append(args, "--endpoints", c.nodes[0].client)...)
	}
	_, err := cl.Txn(t.Context()).Then(clientv3.OpPut("/"+key+"/1", key), clientv3.OpPut("/"+key+"/9", key)).Commit()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = cl.Put(t.Context(), "/"+key+"/large", strings.Repeat("x", 3<<20)) // refused
	_, _ = cl.Get(t.Context(), "/"+key, clientv3.WithRev(1<<40))             // as well
	watch, stop := context.WithCancel(t.Context())
	defer stop()
	<-cl.Watch(watch, "/"+key, clientv3.WithPrefix(), clientv3.WithRev(1))
	c.run([]string{"AWS_ACCESS_KEY_ID=k", "AWS_SECRET_ACCESS_KEY=" + s3}, "backup", "list", "s3://"+key+"/x?endpoint=http://127.0.0.1:1&region=r")
	for _, do := range []func() error{
		func() error { _, err := cl.UserAdd(t.Context(), "root", password); return err },
		func() error { _, err := cl.UserGrantRole(t.Context(), "root", "root"); return err },
		func() error { _, err := cl.UserAdd(t.Context(), "u", password); return err },
		func() error { _, err := cl.AuthEnable(t.Context()); return err },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := grpc.NewClient("dns:///"+strings.TrimPrefix(c.nodes[0].client, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	auth := etcdserverpb.NewAuthClient(conn)
	_, _ = auth.Authenticate(t.Context(), &etcdserverpb.AuthenticateRequest{Name: "root", Password: password + "-wrong"})
	a, err := auth.Authenticate(t.Context(), &etcdserverpb.AuthenticateRequest{Name: "root", Password: password})
	if err != nil {
		t.Fatal(err)
	}
	return a.GetToken()
}

// Traps: a planted key, a password, a secret of a bucket and a token are nowhere in a bundle of three processes; a process
// that hangs costs its own part, and a lost quorum none.
func TestBundleOfProcesses(t *testing.T) {
	c := newProcesses(t)
	c.startAll()
	c.ready()
	const key, password, s3 = "planted-key-5d21", "planted-password-77", "planted-secret-3c"
	token := c.plant(key, password, s3)
	dir := t.TempDir()
	bundle := func(name string, want int, args ...string) (map[string]string, string) {
		t.Helper()
		file := filepath.Join(dir, name+".tar.gz")
		all := append([]string{"debug", "bundle", "-o", file, "--cpu", "1s", "--endpoints", c.nodes[0].client + "," + c.nodes[1].client + "," + c.nodes[2].client}, args...)
		code, said := c.run(nil, all...)
		if code != want {
			t.Fatalf("%s: exit %d\n%s", name, code, said)
		}
		if code != 0 {
			if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: there is a file: %v", name, err)
			}
			return nil, said
		}
		return unpackBundle(t, file), said
	}
	if _, said := bundle("nobody", 1); !strings.Contains(said, "names no user") {
		t.Errorf("without a user:\n%s", said)
	}
	if _, said := bundle("user", 1, "--user", "u:"+password); !strings.Contains(said, "may not") {
		t.Errorf("as a user:\n%s", said)
	}
	root := []string{"--user", "root:" + password}
	files, _ := bundle("plain", 0, append(root, "--redact", "none")...)
	if !strings.Contains(files["cluster/ranges.json"], key) || !strings.Contains(files["nodes/n1/log.jsonl"]+files["nodes/n2/log.jsonl"]+files["nodes/n3/log.jsonl"], key) {
		t.Error("with --redact=none the key is neither in the ranges nor in any log: nothing is proven here")
	}
	wantNothing(t, files, password, s3, token)
	files, _ = bundle("redacted", 0, root...)
	wantNothing(t, files, key, password, s3, token)
	for _, n := range c.nodes {
		for _, name := range []string{"build.txt", "config.txt", "process.txt", "log.jsonl", "slow.json", "metrics.txt", "goroutines.txt", "heap.pb.gz", "cpu.pb.gz", "trace.out"} {
			if files["nodes/"+n.name+"/"+name] == "" {
				t.Errorf("%s of %s is missing:\n%s", name, n.name, files["index.txt"])
			}
		}
	}

	if err := c.nodes[2].cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c.awaitLogin("root", password, c.nodes[:2]...)
	files, said := bundle("hanging", 0, root...)
	if files["nodes/n1/trace.out"] == "" || files["nodes/n2/trace.out"] == "" || files["nodes/n3/build.txt"] != "" || !strings.Contains(said, "n3: ") {
		t.Errorf("a process hangs:\n%s\n%s", said, files["index.txt"])
	}
}

// awaitLogin waits until a user can log in at each of the nodes: it takes an election where the one that led placement hangs.
func (c *processes) awaitLogin(name, password string, nodes ...*process) {
	c.t.Helper()
	for _, n := range nodes {
		for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			cl, err := clientv3.New(clientv3.Config{Endpoints: []string{n.client}, Username: name, Password: password, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
			if err == nil {
				ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
				_, err = cl.Get(ctx, "k")
				cancel()
				_ = cl.Close()
			}
			if err == nil {
				break
			}
			if time.Since(began) > time.Minute {
				c.t.Fatalf("%s cannot log in at %s: %v", name, n.name, err)
			}
		}
	}
}

// A bundle needs no quorum.
func TestBundleWithoutAQuorum(t *testing.T) {
	c := serving(t)
	c.nodes[1].kill()
	c.nodes[2].kill()
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	code, said := c.run(nil, "debug", "bundle", "-o", file, "--cpu", "0", "--endpoints", c.nodes[0].client+","+c.nodes[1].client)
	if code != 0 || !strings.Contains(said, "n2: ") || !strings.Contains(said, "n3: ") {
		t.Fatalf("exit %d\n%s", code, said)
	}
	files := unpackBundle(t, file)
	if files["nodes/n1/metrics.txt"] == "" || files["nodes/n1/trace.out"] != "" || !strings.Contains(files["index.txt"], "| n2 ") || files["cluster/status.txt"] == "" {
		t.Errorf("%s", files["index.txt"])
	}
}

// wantNothing wants none of some texts in any file, plain or encoded.
func wantNothing(t *testing.T, files map[string]string, planted ...string) {
	t.Helper()
	for name, text := range files {
		for _, p := range planted {
			for _, form := range []string{p, hex.EncodeToString([]byte(p)), base64.StdEncoding.EncodeToString([]byte(p))[:len(p)]} {
				if i := strings.Index(text, form); i >= 0 {
					t.Errorf("%s has %s: %s", name, form, text[max(0, i-200):min(len(text), i+200)])
				}
			}
		}
	}
	if !strings.Contains(files["index.txt"], "cluster/status.txt") {
		t.Errorf("the index:\n%s", files["index.txt"])
	}
}
