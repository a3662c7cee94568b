package node

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/raftgroup"
)

// settings are what a node is made of where the flags are args.
type settings struct {
	Node   Options
	Face   etcdapi.Options
	Groups raftgroup.Config
}

func settingsOf(t *testing.T, args ...string) settings {
	t.Helper()
	cfg, _, err := config.Load(args, nil)
	if err != nil {
		t.Fatal(err)
	}
	boot, err := cfg.Bootstrap()
	if err != nil {
		t.Fatal(err)
	}
	o := options(cfg, zap.NewNop(), nil)
	c := &Core{o: o, budget: NewBudget(o.MemoryBytes), log: zap.NewNop()}
	return settings{o, faceOptions(cfg, &join.Membership{Cluster: boot.Cluster, Self: boot.Self}), c.groupConfig()}
}

// changed are the plain fields in which two settings differ, with the new value.
func changed(a, b settings) map[string]any {
	diff := map[string]any{}
	va, vb := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range va.NumField() {
		for j := range va.Field(i).NumField() {
			f := va.Field(i).Type().Field(j)
			if !f.IsExported() || f.Type.Kind() == reflect.Func || f.Type.Kind() == reflect.Interface || f.Type.Kind() == reflect.Pointer {
				continue
			}
			if x, y := va.Field(i).Field(j).Interface(), vb.Field(i).Field(j).Interface(); !reflect.DeepEqual(x, y) {
				diff[va.Type().Field(i).Name+"."+f.Name] = y
			}
		}
	}
	return diff
}

// TestSettingsArrive follows flags that a wrong wiring would leave without effect, and
// without any other sign, to the parts of the node that they are for.
func TestSettingsArrive(t *testing.T) {
	const megabytes = 128
	budget := NewBudget(megabytes << 20)
	for _, c := range []struct {
		flag, value string
		want        map[string]any
	}{
		{"heartbeat-interval", "150", map[string]any{"Node.Heartbeat": 150 * time.Millisecond, "Groups.TickInterval": 150 * time.Millisecond}},
		{"election-timeout", "2500", map[string]any{
			"Node.Election": 2500 * time.Millisecond, "Groups.ElectionTimeout": 2500 * time.Millisecond, "Face.ElectionTimeout": 2500 * time.Millisecond,
			"Node.RequestTimeout": 10 * time.Second, "Face.RequestTimeout": 10 * time.Second,
		}},
		{"pre-vote", "false", map[string]any{"Node.NoPreVote": true, "Groups.NoPreVote": true}},
		{"lease-reads", "false", map[string]any{"Node.NoLeaseReads": true, "Groups.NoLeaseReads": true}},
		{"node-dead-after", "20m", map[string]any{"Node.NodeDeadAfter": 20 * time.Minute}},
		{"auth-token", "jwt,sign-method=HS256", map[string]any{"Node.AuthToken": "jwt,sign-method=HS256"}},
		{"auth-token-ttl", "60", map[string]any{"Node.AuthTokenTTL": time.Minute}},
		{"bcrypt-cost", "4", map[string]any{"Node.BcryptCost": 4}},
		{"grpc-keepalive-min-time", "1s", map[string]any{"Face.KeepAliveMinTime": time.Second}},
		{"grpc-keepalive-interval", "3h", map[string]any{"Face.KeepAliveInterval": 3 * time.Hour}},
		{"grpc-keepalive-timeout", "9s", map[string]any{"Face.KeepAliveTimeout": 9 * time.Second}},
		{"max-concurrent-streams", "77", map[string]any{"Face.MaxConcurrentStreams": uint32(77)}},
		{"max-request-bytes", "2000000", map[string]any{"Node.MaxRequestBytes": 2000000, "Face.MaxRequestBytes": 2000000}},
		{"max-txn-ops", "500", map[string]any{"Node.MaxTxnOps": 500, "Face.MaxTxnOps": 500}},
		{"warning-unary-request-duration", "2s", map[string]any{"Face.WarnUnaryRequest": 2 * time.Second}},
		{"warning-apply-duration", "2s", map[string]any{"Node.WarnApply": 2 * time.Second, "Groups.SlowApply": 2 * time.Second}},
		{"enable-distributed-tracing", "true", map[string]any{"Node.Traces": true}},
		{"enable-pprof", "true", map[string]any{"Face.EnablePprof": true}},
		{"range-max-bytes", "2097152", map[string]any{"Node.RangeMaxBytes": int64(2 << 20)}},
		{"range-split-load", "0", map[string]any{"Node.RangeSplitLoad": int64(-1)}},
		{"range-merge-after", "30m", map[string]any{"Node.RangeMergeAfter": 30 * time.Minute}},
		{"range-merge-after", "0", map[string]any{"Node.RangeMergeAfter": time.Duration(-1)}},
		{"copy-bytes-per-second", "4194304", map[string]any{"Node.CopyBytesPerSecond": int64(4 << 20), "Groups.SnapshotBytesPerSecond": int64(4 << 20)}},
		{"memory-budget-bytes", fmt.Sprint(megabytes << 20), map[string]any{
			"Node.MemoryBytes": int64(megabytes << 20), "Groups.MaxProposalBytes": budget.Proposals, "Groups.MaxInboundBytes": budget.Inbound,
		}},
	} {
		t.Run(c.flag, func(t *testing.T) {
			got := changed(settingsOf(t), settingsOf(t, "--"+c.flag+"="+c.value))
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("changed\n%v, want\n%v", got, c.want)
			}
		})
	}
}

// TestWithoutLeases: with --lease-reads=false nobody holds a lease, and reads and
// writes go on, also those of a gateway that leads nothing.
func TestWithoutLeases(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		bubble(t, nodes, nil, func(o *Options) { o.NoLeaseReads = true }, func(r *rig) {
			for i, n := range r.nodes {
				value := fmt.Sprint(i)
				r.mustPut(n, "k", value)
				for _, other := range r.nodes {
					r.mustGet(other, "k", value)
					for _, g := range other.core.host.Groups() {
						if _, _, held := g.Lease(); held {
							t.Errorf("node %s holds the lease of group %s", other.id, g.ID())
						}
					}
				}
			}
		})
	}
}

// TestUnauthenticatedIsExplained: why peers are not authenticated is said by the
// setting that asked for it.
func TestUnauthenticatedIsExplained(t *testing.T) {
	for _, c := range []struct {
		args []string
		why  string
	}{
		{[]string{"--listen-peer-urls=http://127.0.0.1:0"}, "http://127.0.0.1:0 is http"},
		{[]string{"--listen-peer-urls=https://127.0.0.1:0", "--initial-advertise-peer-urls=https://127.0.0.1:1", "--peer-auto-tls"}, "--peer-auto-tls"},
	} {
		cfg, _, err := config.Load(c.args, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := security(cfg)
		if !s.SelfMade || !strings.Contains(s.Why, c.why) {
			t.Errorf("%v: %+v, want SelfMade for %q", c.args, s, c.why)
		}
	}
}
