package loadtest

import (
	"math"
	"strings"
	"testing"
	"time"
)

// TestValidate: each wrong setting is refused with its name, and the default
// settings with an endpoint are not.
func TestValidate(t *testing.T) {
	good := DefaultConfig()
	good.Endpoints = []string{"127.0.0.1:2379"}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.Endpoints = nil }, "endpoints:"},
		{func(c *Config) { c.Endpoints = []string{"a", ""} }, "endpoints:"},
		{func(c *Config) { c.API = "" }, "api:"},
		{func(c *Config) { c.API, c.Workload = APIPipe, Lease }, "api: the pipe carries no leases"},
		{func(c *Config) { c.Clients = 0 }, "clients:"},
		{func(c *Config) { c.Clients = maxClients + 1 }, "clients:"},
		{func(c *Config) { c.Conns = 0 }, "conns:"},
		{func(c *Config) { c.Conns = c.Clients + 1 }, "conns:"},
		{func(c *Config) { c.Duration = 0 }, "duration and total"},
		{func(c *Config) { c.Total = 5 }, "duration and total"},
		{func(c *Config) { c.Duration = -time.Second }, "duration:"},
		{func(c *Config) { c.Duration = maxDuration + 1 }, "duration:"},
		{func(c *Config) { c.Duration, c.Total = 0, -1 }, "total:"},
		{func(c *Config) { c.Rate = -1 }, "rate:"},
		{func(c *Config) { c.Rate = math.NaN() }, "rate:"},
		{func(c *Config) { c.Rate = math.Inf(1) }, "rate:"},
		{func(c *Config) { c.Warmup = -1 }, "warmup:"},
		{func(c *Config) { c.Timeout = 0 }, "timeout:"},
		{func(c *Config) { c.Clock = nil }, "clock:"},
		{func(c *Config) { c.Workload = "scan" }, "workload:"},
		{func(c *Config) { c.ReadPercent = 101 }, "read-percent:"},
		{func(c *Config) { c.Dist = "normal" }, "dist:"},
		{func(c *Config) { c.Dist, c.ZipfSkew = Zipf, 0 }, "zipf-skew:"},
		{func(c *Config) { c.Dist, c.ZipfSkew = Zipf, math.NaN() }, "zipf-skew:"},
		{func(c *Config) { c.ValueBytes = -1 }, "value-size:"},
		{func(c *Config) { c.ValueBytes = maxValueBytes + 1 }, "value-size:"},
		{func(c *Config) { c.ValueBytes, c.Verify = 15, true }, "value-size:"},
		{func(c *Config) { c.Keys = 0 }, "keys:"},
		{func(c *Config) { c.Keys = maxKeys + 1 }, "keys:"},
		{func(c *Config) { c.Keys, c.Verify = maxVerifyKeys+1, true }, "keys:"},
		{func(c *Config) { c.KeyBytes = 2 }, "key-size:"},
		{func(c *Config) { c.KeyBytes = 0 }, "key-size:"},
		{func(c *Config) { c.KeyBytes = maxKeyBytes + 1 }, "key-size:"},
		{func(c *Config) { c.KeyPrefix = strings.Repeat("p", 32) }, "key-size:"},
		{func(c *Config) { c.Workload, c.Kubernetes.Nodes = Kubernetes, c.Clients-1 }, "nodes:"},
		{func(c *Config) { c.Workload, c.Kubernetes.Pods = Kubernetes, -1 }, "pods:"},
		{func(c *Config) { c.Workload, c.Kubernetes.Watchers = Kubernetes, -1 }, "watchers:"},
		{func(c *Config) { c.Workload, c.Kubernetes.Mix = Kubernetes, "" }, "mix:"},
		{func(c *Config) { c.Workload, c.Kubernetes.Mix = Kubernetes, "renew=0" }, "mix: no kind"},
		{func(c *Config) { c.Workload, c.Kubernetes.Mix = Kubernetes, "renew=1,scale=2" }, `mix: "scale=2"`},
		{func(c *Config) { c.Workload, c.Kubernetes.Mix = Kubernetes, "renew=-1" }, "mix:"},
		{func(c *Config) { c.ServerMetrics = []string{"127.0.0.1:2379/metrics"} }, "server-metrics:"},
	} {
		cfg := good
		c.change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s got %v", c.want, err)
		}
	}
	bad := good
	bad.Conns, bad.Workload, bad.Keys = 0, "", 0
	if err := bad.Validate(); strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("three wrong settings, told as: %v", err)
	}
}
