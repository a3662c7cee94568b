package client_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/embedtest"
)

// TestPython runs the client of examples/python, as its first lines and docs/PIPE.md say. So whoever knows only these can use the
// pipe. Where protoc or Python's grpcio is missing it is left out, or fails with SKEIN_NOTHING_LEFT_OUT.
func TestPython(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes, one of which it builds")
	}
	protoc, err := exec.LookPath("protoc")
	if err != nil {
		leaveOut(t, "%v: Debian has it as protobuf-compiler", err)
	}
	python := pythonWithGRPC(t)
	dir := t.TempDir()
	etcd, set := filepath.Join(dir, "etcd.binpb"), filepath.Join(dir, "pipe.binpb")
	run(t, "sh", "-c", `exec go run ./api/descriptors > "$0"`, etcd)
	run(t, protoc, "--descriptor_set_in="+etcd, "-I", "api", "--include_imports", "--descriptor_set_out="+set, "pipepb/pipe.proto")
	s := embedtest.New(t)
	out := run(t, python, "examples/python/pipe.py", set, s.Endpoints()[0])
	if !strings.Contains(out, "a put without a key: True, etcdserver: key is not provided\nall is well\n") {
		t.Error(out)
	}
	got, err := pb.NewKVClient(s.Client().ActiveConnection()).Range(t.Context(), &pb.RangeRequest{Key: []byte("job/"), RangeEnd: []byte("job0"), CountOnly: true})
	if err != nil || got.GetCount() != 2000 {
		t.Errorf("%v, %d jobs", err, got.GetCount())
	}
}

// pythonWithGRPC returns a Python that has grpcio and protobuf. Debian's packages are those of its own Python alone.
func pythonWithGRPC(t *testing.T) string {
	t.Helper()
	for _, python := range []string{"python3", "/usr/bin/python3"} {
		if exec.CommandContext(t.Context(), python, "-c", "import grpc, google.protobuf").Run() == nil {
			return python
		}
	}
	leaveOut(t, "no Python with grpcio: Debian has it as python3-grpcio")
	return ""
}

// leaveOut skips a test that this machine cannot run, or fails it if nothing may be left out.
func leaveOut(t *testing.T, format string, args ...any) {
	t.Helper()
	leave := t.Skipf
	if os.Getenv("SKEIN_NOTHING_LEFT_OUT") != "" {
		leave = t.Fatalf
	}
	leave("left out: "+format, args...)
}

// run runs a command at the top of the tree, and returns what it prints.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = ".."
	var out, wrong bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &wrong
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s%s", cmd, err, &out, &wrong)
	}
	return out.String()
}
