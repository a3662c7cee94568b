package node_test

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/audit"
)

// faceAddress returns an address of this machine that is not its loopback.
func faceAddress(t *testing.T) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	t.Skip("this machine has no address but its loopback")
	return ""
}

// A node takes commands over its loopback, and over the network only with --insecure-admin. The audit log
// has the commands, and goes on over a restart.
func TestCommandsOverTheNetwork(t *testing.T) {
	c := newProcessesOf(t, 1)
	p := c.nodes[0]
	_, port, _ := strings.Cut(strings.TrimPrefix(p.client, "http://"), ":")
	far, log := "http://"+net.JoinHostPort(faceAddress(t), port), filepath.Join(p.dir, "audit")
	at := slices.Index(p.args, "--listen-client-urls") + 1
	p.args[at] = p.client + "," + far
	p.args = append(p.args, "--audit-log", log)
	pause := func(endpoint string) error {
		op, err := adminapi.NewClient([]string{endpoint}, nil)
		if err != nil {
			t.Fatal(err)
		}
		return op.PlacementPause(t.Context(), false)
	}
	c.startAll()
	c.ready()
	if err := pause(p.client); err != nil {
		t.Errorf("over loopback: %v", err)
	}
	err := pause(far)
	for _, way := range []string{"auth enable", "--insecure-admin"} {
		if err == nil || !strings.Contains(err.Error(), way) {
			t.Errorf("over the network: %v", err)
		}
	}
	c.stopAll()
	p.args = append(p.args, "--insecure-admin")
	c.startAll()
	c.ready()
	if err := pause(far); err != nil {
		t.Errorf("with --insecure-admin: %v", err)
	}
	c.stopAll()
	b, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	r, err := audit.Check(bytes.NewReader(b))
	if err != nil || r.Lines != 5 || bytes.Count(b, []byte(`"outcome":"ok"`)) != 2 || bytes.Count(b, []byte("PermissionDenied")) != 1 {
		t.Errorf("%+v, %v\n%s", r, err, b)
	}
}
