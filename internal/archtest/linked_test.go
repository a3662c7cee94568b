package archtest

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// ofEtcdsServer are the packages of etcd's server that skein may have: generated code and glue, and the TCP proxy. They
// import nothing of etcd's but its api and client.
var ofEtcdsServer = []string{
	"etcdserver/api/v3election", "etcdserver/api/v3election/v3electionpb", "etcdserver/api/v3election/v3electionpb/gw",
	"etcdserver/api/v3lock", "etcdserver/api/v3lock/v3lockpb", "etcdserver/api/v3lock/v3lockpb/gw",
	"lease/leasepb", "proxy/grpcproxy/adapter", "proxy/tcpproxy",
}

// A node has nothing of etcd's own storage, consensus or embedding: etcdctl and the gateway in the same program do not
// bring them in.
func TestEtcdsServerIsNotLinked(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./cmd/skein")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	linked := strings.Fields(string(out))
	var found []string
	for _, p := range linked {
		if name, ok := strings.CutPrefix(p, "go.etcd.io/etcd/server/v3/"); ok {
			found = append(found, name)
			if !slices.Contains(ofEtcdsServer, name) {
				t.Errorf("skein has %s of etcd's server", name)
			}
		}
	}
	if !slices.Contains(found, "proxy/tcpproxy") || !slices.Contains(linked, "go.etcd.io/etcd/etcdctl/v3/ctlv3") {
		t.Errorf("skein has only %v of etcd's server, or no etcdctl", found)
	}
}
