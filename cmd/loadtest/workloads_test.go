package main

import (
	"encoding/json"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embedtest"
	"github.com/skeindb/skein/loadtest"
)

// TestWorkloads: each workload and distribution does what its name says, on a cluster with several ranges.
func TestWorkloads(t *testing.T) {
	s := embedtest.New(t, embedtest.WithConfig(func(c *config.Config) { c.InitialRanges = 4 }))
	run := func(args string) loadtest.Report {
		t.Helper()
		all := append([]string{"run", "--endpoints", strings.Join(s.Endpoints(), ","), "--clients", "4", "--json", "-"}, strings.Fields(args)...)
		code, stdout, stderr := loadtestCommand(t, all...)
		var r loadtest.Report
		if err := json.Unmarshal([]byte(stdout), &r); code != 0 || err != nil || r.Failed != 0 {
			t.Fatalf("loadtest run %s: code %d, %v\n%s", args, code, err, stderr)
		}
		return r
	}
	stored := func() *clientv3.GetResponse {
		t.Helper()
		got, err := s.Client().Get(t.Context(), "", clientv3.WithFromKey())
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	empty := func() {
		t.Helper()
		if _, err := s.Client().Delete(t.Context(), "", clientv3.WithFromKey()); err != nil {
			t.Fatal(err)
		}
	}

	r := run("--key-prefix= --keys 8 --fill=false --workload txn --txn-keys 8 --total 20")
	got := stored()
	if r.Put.Count != 20 || len(got.Kvs) != 8 {
		t.Errorf("txn: %d, %d keys", r.Put.Count, len(got.Kvs))
	}
	for _, kv := range got.Kvs {
		if kv.Version != 20 || kv.ModRevision != got.Kvs[0].ModRevision {
			t.Errorf("a transaction over all keys: %q has version %d at revision %d", kv.Key, kv.Version, kv.ModRevision)
		}
	}
	empty()

	r = run("--keys 100 --workload range --page-keys 30 --total 50 --cleanup")
	if len(r.Kinds) != 1 || r.Kinds[0].Kind != "page" || r.Kinds[0].Latency.Count != 50 || r.CleanedUp != 100 {
		t.Errorf("range: %+v, %d cleaned up", r.Kinds, r.CleanedUp)
	}

	r = run("--keys 100 --workload lease --total 62 --cleanup")
	leases, err := s.Client().Leases(t.Context())
	if err != nil || len(leases.Leases) != 0 || len(stored().Kvs) != 0 {
		t.Errorf("leases that are left: %v, %v; %d keys", leases, err, len(stored().Kvs))
	}
	counts := map[string]int64{}
	for _, k := range r.Kinds {
		counts[k.Kind] = k.Latency.Count
	}
	if n := counts["grant"] + counts["attach"] + counts["revoke"]; n != 62 || counts["grant"] < counts["attach"] || counts["attach"] < counts["revoke"] || counts["revoke"] < 18 {
		t.Errorf("lease churn: %v", counts)
	}

	r = run("--keys 100 --watchers 5 --total 50")
	if w := r.Watch; w.Watchers != 5 || w.Events != 250 || w.Delay.Count != 250 || w.Lost+w.Disordered+w.Failed != 0 || r.Histograms["delay"].Count() != 250 {
		t.Errorf("watch: %+v", w)
	}
	r = run("--key-prefix= --keys 100 --watchers 2 --workload txn --txn-keys 4 --fill=false --total 20")
	if w := r.Watch; w.Events != 160 || w.Lost+w.Disordered+w.Failed != 0 {
		t.Errorf("watch of transactions: %+v", w)
	}
	empty()

	run("--keys 1000 --dist hot --hot-percent 100 --total 40")
	if got := stored(); len(got.Kvs) != 1 || got.Kvs[0].Version != 40 {
		t.Errorf("a hot key: %d keys", len(got.Kvs))
	}
	empty()

	run("--keys 1000 --workload mixed --dist tail --total 60")
	run("--keys 1000 --dist tail --total 60")
	got = stored()
	if len(got.Kvs) != 60 {
		t.Errorf("a tail of %d keys", len(got.Kvs))
	}
}

// TestWorkloadsByPipe: so they do by the pipe.
func TestWorkloadsByPipe(t *testing.T) {
	s := embedtest.New(t, embedtest.WithConfig(func(c *config.Config) { c.InitialRanges = 4 }))
	for _, c := range []struct {
		args string
		keys int
		// version is that of each key.
		version int64
	}{
		{"--keys 1000 --dist sequential --total 60", 60, 1},
		{"--keys 10 --workload mixed --dist sequential --read-percent 0 --fill=false --total 60", 10, 6},
		{"--keys 10 --workload get --total 60", 10, 1},
		{"--keys 100 --workload range --page-keys 30 --total 50", 100, 1},
		{"--key-prefix= --keys 8 --fill=false --workload txn --txn-keys 8 --total 20", 8, 20},
		{"--keys 1000 --dist hot --hot-percent 100 --total 40", 1, 40},
		{"--keys 1000 --dist tail --total 60", 60, 1},
		{"--keys 10 --watchers 3 --dist sequential --total 60", 10, 6},
	} {
		args := append([]string{"run", "--api", "pipe", "--endpoints", strings.Join(s.Endpoints(), ","), "--clients", "4", "--json", "-"}, strings.Fields(c.args)...)
		code, stdout, stderr := loadtestCommand(t, args...)
		var r loadtest.Report
		if err := json.Unmarshal([]byte(stdout), &r); code != 0 || err != nil || r.Failed != 0 || r.Settings.API != loadtest.APIPipe || r.Settings.Conns != len(s.Endpoints()) {
			t.Fatalf("loadtest run %s: code %d, %v\n%s", c.args, code, err, stderr)
		}
		if w := r.Watch; w != nil && (w.Events != 180 || w.Lost+w.Disordered+w.Failed != 0) {
			t.Errorf("%s: %+v", c.args, w)
		}
		got, err := s.Client().Get(t.Context(), "", clientv3.WithFromKey())
		if err != nil || len(got.Kvs) != c.keys {
			t.Fatalf("%s: %v, %d keys", c.args, err, len(got.Kvs))
		}
		for _, kv := range got.Kvs {
			if kv.Version != c.version {
				t.Errorf("%s: %q has version %d", c.args, kv.Key, kv.Version)
			}
		}
		if _, err := s.Client().Delete(t.Context(), "", clientv3.WithFromKey()); err != nil {
			t.Fatal(err)
		}
	}
}
