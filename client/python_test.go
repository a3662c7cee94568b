package client_test

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/embedtest"
	"github.com/skeindb/skein/internal/leftout"
)

// TestPython runs the client of examples/python, as its first lines and docs/PIPE.md say. So whoever knows only these can use the
// pipe. Where protoc or Python's grpcio is missing it is left out, or fails with SKEIN_NOTHING_LEFT_OUT.
func TestPython(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes, one of which it builds")
	}
	protoc := leftout.Tool(t, "protoc", "protobuf-compiler")
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
	leftout.Because(t, "no Python with grpcio (Debian: apt-get install python3-grpcio)")
	return ""
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
