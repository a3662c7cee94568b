package config

import (
	"strings"
	"testing"
)

// A client or peer URL without TLS counts if others than this machine reach it.
func TestInsecure(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"", ""},
		{"--listen-client-urls=http://127.0.0.1:1 --advertise-client-urls=http://localhost:1", ""},
		{"--listen-client-urls=http://[::1]:1 --advertise-client-urls=http://[::1]:1", ""},
		{"--listen-client-urls=unix://sock:1 --advertise-client-urls=http://127.0.0.2:1", ""},
		{"--listen-client-urls=http://0.0.0.0:1 --advertise-client-urls=http://localhost:1", "http://0.0.0.0:1"},
		{"--listen-client-urls=http://127.0.0.1:1 --advertise-client-urls=http://n.example:1", "http://n.example:1"},
		{"--listen-client-urls=http://10.0.0.1:1 --advertise-client-urls=http://10.0.0.1:1", "http://10.0.0.1:1"},
		{"--listen-client-urls=http://10.0.0.1:1,http://127.0.0.1:2 --advertise-client-urls=http://n.example:1", "http://10.0.0.1:1 http://n.example:1"},
		{"--listen-client-urls=https://10.0.0.1:1 --advertise-client-urls=https://10.0.0.1:1 --auto-tls", ""},
		{"--listen-peer-urls=http://10.0.0.1:1 --initial-advertise-peer-urls=http://10.0.0.1:1", "http://10.0.0.1:1"},
		{"--listen-peer-urls=https://10.0.0.1:1 --initial-advertise-peer-urls=https://10.0.0.1:1 --peer-auto-tls", ""},
		{"--listen-metrics-urls=http://10.0.0.1:1", ""}, // probes have no certificates
		{"--listen-console-urls=http://10.0.0.1:1", "http://10.0.0.1:1"},
	} {
		c, _ := mustLoad(t, append([]string{"--name=node1"}, strings.Fields(test.args)...))
		if got := strings.Join(c.Insecure(), " "); got != test.want {
			t.Errorf("%s: %q, want %q", test.args, got, test.want)
		}
	}
}
