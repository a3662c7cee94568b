package loadtest

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest/fakekv"
)

func kubeConfig(endpoints ...string) Config {
	cfg := smallConfig(endpoints...)
	cfg.Workload, cfg.Timeout = Kubernetes, time.Minute
	cfg.Kubernetes = KubernetesConfig{Nodes: 30, Pods: 600, Watchers: 2, Mix: DefaultMix}
	return cfg
}

// TestKubernetes: all kinds have their share, the watchers get everything once, all is there at the end, and nothing
// after the clean-up.
func TestKubernetes(t *testing.T) {
	s := &fakekv.Store{}
	// What an earlier run has left is in nobody's way, and other keys below /registry/ stay.
	for _, key := range []string{kubePrefix + "pods/ns-000/000000000", "/registry/pods/default/a"} {
		put := foreignPut()
		put.Key = []byte(key)
		if _, err := s.Direct().Put(t.Context(), put); err != nil {
			t.Fatal(err)
		}
	}
	cfg := kubeConfig(serve(t, s), serve(t, s))
	cfg.Cleanup = true
	r, err := Run(t.Context(), cfg, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil || r.Operations != 3000 {
		t.Errorf("%v, %d operations", err, r.Operations)
	}
	share, counted := map[string]int64{}, int64(0)
	for _, k := range r.Kinds {
		share[k.Kind], counted = k.Latency.Count, counted+k.Latency.Count
	}
	if counted != 3000 || share["renew"] < 1300 || share["renew"] > 1700 || share["status"] < 600 || share["event"] < 300 ||
		share["create"] < 100 || share["delete"] < 100 || share["page"] < 5 {
		t.Errorf("%d operations by kind: %v", counted, share)
	}
	w, v := r.Watch, r.Verify
	changes := 630 + counted - share["page"]
	if w.Watchers != 6 || w.Events != 2*changes || w.Progress == 0 || w.Delay.Count < 2*2500 || w.Failed != 0 {
		t.Errorf("%d changes, watched %+v", changes, w)
	}
	if want := 630 + share["create"] - share["delete"]; v.Keys != want || v.Acknowledged != want {
		t.Errorf("verified %+v, want %d objects", v, want)
	}
	if r.CleanedUp != 630+share["create"]-share["delete"]+share["event"] || s.Len() != 1 || s.Leases() != 0 {
		t.Errorf("%d keys deleted, %d left, %d leases", r.CleanedUp, s.Len(), s.Leases())
	}
}

// TestKubernetesFindings: what a server does wrong is found, by the watchers, the writers or the end, and lost answers
// are not taken for it.
func TestKubernetesFindings(t *testing.T) {
	// What happens to some pods must be found, though one of them may just be of unknown fate.
	toPods := func(n int, do func(kvs map[string]*mvccpb.KeyValue, pod *mvccpb.KeyValue)) func(kvs map[string]*mvccpb.KeyValue) {
		return func(kvs map[string]*mvccpb.KeyValue) {
			for _, key := range slices.Sorted(maps.Keys(kvs)) {
				if strings.HasPrefix(key, resourcePrefix[pods]) && n > 0 {
					do(kvs, kvs[key])
					n--
				}
			}
		}
	}
	remove := func(kvs map[string]*mvccpb.KeyValue, pod *mvccpb.KeyValue) { delete(kvs, string(pod.Key)) }
	makeOlder := func(kvs map[string]*mvccpb.KeyValue, pod *mvccpb.KeyValue) {
		kvs[string(pod.Key)] = &mvccpb.KeyValue{Key: pod.Key, Value: pod.Value, ModRevision: pod.ModRevision - 1}
	}
	of := func(n int, prefix string) func(e *mvccpb.Event) int {
		return func(e *mvccpb.Event) int {
			if e.Kv.ModRevision%200 == 77 && strings.HasPrefix(string(e.Kv.Key), prefix) {
				return n
			}
			return 1
		}
	}
	for _, c := range []struct {
		name   string
		copies func(*mvccpb.Event) int
		edit   func(kvs map[string]*mvccpb.KeyValue) // after 1,000 requests
		want   string                                // none: no finding
		check  func(*Watched) bool
	}{
		{"lost answers", nil, nil, "", func(w *Watched) bool { return w.Lost+w.Duplicate+w.Disordered+w.Unasked == 0 }},
		{"a lost event", of(0, kubePrefix), nil, "did not get", func(w *Watched) bool { return w.Lost > 0 && w.Duplicate == 0 }},
		{"a duplicate event", of(2, kubePrefix), nil, "twice", func(w *Watched) bool { return w.Duplicate > 0 && w.Lost == 0 }},
		{"pods are gone", nil, toPods(5, remove), kubePrefix, nil},
		{"pods are older", nil, toPods(5, makeOlder), "only writer", nil},
		{"all pods are gone", nil, toPods(10_000, remove), kubePrefix, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &fakekv.Store{Copies: c.copies}
			s.After = func(_ context.Context, n int64) error {
				switch {
				case n == 1000 && c.edit != nil:
					s.Edit(c.edit)
				case n > 300 && n%100 == 3:
					return status.Error(codes.Unavailable, "the answer was lost")
				}
				return nil
			}
			cfg := kubeConfig(serve(t, s))
			cfg.Kubernetes.Pods, cfg.Total = 150, 1500
			if c.check == nil {
				cfg.Kubernetes.Mix, cfg.Kubernetes.Watchers = "status=1", 0
			}
			r, err := Run(t.Context(), cfg, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			broken := fmt.Sprint(r.Broken())
			if (c.want == "") != (r.Broken() == nil) || !strings.Contains(broken+strings.Join(r.Verify.First, "\n"), c.want) {
				t.Errorf("found %v, %v, want %q", broken, r.Verify.First, c.want)
			}
			if r.Failed == 0 || r.Verify.Unknown == 0 {
				t.Errorf("%d answers were lost", r.Failed)
			}
			if c.check != nil && !c.check(r.Watch) {
				t.Errorf("%+v", r.Watch)
			}
		})
	}
}

// TestKubernetesOpenLoop: a rate holds for all kinds together, in virtual time exactly.
func TestKubernetesOpenLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Workload, cfg.Clients, cfg.Rate, cfg.Duration, cfg.Verify = Kubernetes, 20, 500, 4*time.Second, true
		cfg.Kubernetes = KubernetesConfig{Nodes: 20, Pods: 100, Mix: "renew=3,create=1,delete=1"}
		r := virtualRun(t.Context(), t, cfg, takes(10*time.Millisecond, 0, 0), io.Discard)
		if err := r.Err(); err != nil || r.Operations != 2000 || r.ElapsedSeconds != 4 || r.Watch != nil {
			t.Errorf("%v, %d operations in %g s", err, r.Operations, r.ElapsedSeconds)
		}
		rate := 0.0
		for _, k := range r.Kinds {
			rate += k.Throughput
			if !near(k.Latency.Max, 10*time.Millisecond) {
				t.Errorf("%s: %+v", k.Kind, k.Latency)
			}
		}
		// The last five are answered behind the end.
		if len(r.Kinds) != 3 || rate < 495 || rate > 500 {
			t.Errorf("%d kinds, %g/s", len(r.Kinds), rate)
		}
	})
}

// TestMix: kinds are drawn by their weights, and those without one never.
func TestMix(t *testing.T) {
	m, err := parseMix("page=1, renew=8,delete=1,status=0")
	if err != nil {
		t.Fatal(err)
	}
	counts, rng := map[class]int{}, rand.New(rand.NewPCG(1, 1))
	for range 10_000 {
		counts[m.draw(rng)]++
	}
	if len(counts) != 3 || counts[classRenew] < 7500 || counts[classRenew] > 8500 || counts[classPage] < 800 || counts[classDelete] < 800 {
		t.Errorf("drawn %v", counts)
	}
}

// TestEventLeases: a lease is given to a thousand events, for a minute.
func TestEventLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, l, c := &fakekv.Store{}, kubeLeases{}, clock.Virtual()
		for range 2*leaseObjects + 1 {
			if _, err := l.one(t.Context(), c, s.Direct()); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(leaseReuse)
		if _, err := l.one(t.Context(), c, s.Direct()); err != nil || s.Leases() != 4 {
			t.Errorf("%v, %d leases", err, s.Leases())
		}
		if err := l.revoke(t.Context(), &Config{Timeout: time.Second}, s.Direct()); err != nil || s.Leases() != 0 {
			t.Errorf("%v, %d leases are left", err, s.Leases())
		}
	})
}

// losing loses the answers to grants of leases.
type losing struct{ kv }

func (l losing) LeaseGrant(ctx context.Context, in *etcdserverpb.LeaseGrantRequest, o ...grpc.CallOption) (*etcdserverpb.LeaseGrantResponse, error) {
	if _, err := l.kv.LeaseGrant(ctx, in, o...); err != nil {
		return nil, err
	}
	return nil, status.Error(codes.Unavailable, "the answer was lost")
}

// TestLeasesOfLostAnswers: a lease whose grant was not acknowledged is revoked too, as at the end of a run.
func TestLeasesOfLostAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, c := &fakekv.Store{}, clock.Virtual()
		l := &newKubeRun(&Config{Kubernetes: KubernetesConfig{Mix: DefaultMix}}, nil, math.MaxUint64).leases
		if _, err := l.one(t.Context(), c, losing{s.Direct()}); err == nil || s.Leases() != 1 {
			t.Fatalf("%v, %d leases", err, s.Leases())
		}
		if id, err := l.one(t.Context(), c, s.Direct()); err != nil || id <= 0 || s.Leases() != 2 {
			t.Errorf("%d, %v, %d leases", id, err, s.Leases())
		}
		if err := l.revoke(t.Context(), &Config{Timeout: time.Second}, s.Direct()); err != nil || s.Leases() != 0 {
			t.Errorf("%v, %d leases are left", err, s.Leases())
		}
	})
}

func TestRevisionSet(t *testing.T) {
	a, b := revisionSet{base: 100}, revisionSet{base: 100}
	for _, r := range []int64{100, 163, 164, 5000} {
		if !a.add(r) || a.add(r) || !a.has(r) || a.has(r+1) && r != 163 {
			t.Errorf("revision %d", r)
		}
	}
	// Neither what is below nor what a broken server says.
	for _, r := range []int64{99, -1, 100 + maxRevisions, 1 << 62} {
		if a.add(r) || a.has(r) {
			t.Errorf("revision %d is taken", r)
		}
	}
	b.add(100)
	b.add(164)
	if n, first := a.without(&b); n != 2 || first != 163 {
		t.Errorf("%d, the first %d", n, first)
	}
	if n, _ := b.without(&a); n != 0 {
		t.Errorf("%d", n)
	}
}
