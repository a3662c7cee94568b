package raftgroup

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"

	"github.com/skeindb/skein/keyspace"
)

// TestEtcdNames: the metrics that etcd's dashboards read have etcd's names and types.
func TestEtcdNames(t *testing.T) {
	reg := prometheus.NewRegistry()
	NewMetrics(reg)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	types := map[string]dto.MetricType{}
	for _, f := range families {
		types[f.GetName()] = f.GetType()
	}
	for name, want := range map[string]dto.MetricType{
		"committed_total": dto.MetricType_GAUGE, "applied_total": dto.MetricType_GAUGE,
		"pending": dto.MetricType_GAUGE, "failed_total": dto.MetricType_COUNTER,
	} {
		if got, ok := types["etcd_server_proposals_"+name]; !ok || got != want {
			t.Errorf("etcd_server_proposals_%s: there %v, a %v, want a %v", name, ok, got, want)
		}
	}
}

// TestProposalMetrics: etcd's four proposal metrics are sums over the groups of a node,
// agree with each other, and count what waits and what failed.
func TestProposalMetrics(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		const groups = 3
		r := newRig(t, 3, nil)
		r.startAll()
		defer r.close()
		r.bootstrap(1, groups, voters(3))
		committed := func(n *testNode) float64 { return testutil.ToFloat64(n.host.m.committed) }
		applied := func(n *testNode) float64 { return testutil.ToFloat64(n.host.m.applied) }
		pending := func(n *testNode) float64 { return testutil.ToFloat64(n.host.m.pending) }
		failed := func(n *testNode) float64 { return testutil.ToFloat64(n.host.m.failed) }
		settle := func() {
			time.Sleep(2 * time.Second)
			synctest.Wait()
		}
		settle()
		before := map[*testNode]float64{}
		for _, n := range r.nodes {
			before[n] = committed(n)
		}
		const writes = 10
		for g := range groups {
			for i := range writes {
				r.write(keyspace.GroupID(1+g), fmt.Sprint(i))
			}
		}
		settle()
		for id, n := range r.nodes {
			if got := committed(n); got < before[n]+groups*writes || got != applied(n) {
				t.Errorf("node %s: %v committed after %v, %v applied", id, got, before[n], applied(n))
			}
			if pending(n) != 0 || failed(n) != 0 {
				t.Errorf("node %s: %v pending, %v failed", id, pending(n), failed(n))
			}
		}

		// A leader that is cut off keeps its proposals, and loses them with its
		// leadership.
		l := r.leader(1)
		r.bus.isolate(l.id, true)
		for i := range writes {
			r.must(l.propose(1, fmt.Sprint("lost", i)))
		}
		time.Sleep(2 * l.host.cfg.TickInterval)
		synctest.Wait()
		if got := pending(l); got != writes {
			t.Errorf("%v proposals are pending, want %d", got, writes)
		}
		r.eventually("the node that is cut off leads no more", 20*time.Second, func() bool { return !l.host.Group(1).Status().IsLeader })
		r.bus.isolate(l.id, false)
		r.write(1, "after")
		r.equal(1)
		settle()
		if got := failed(l); got < writes {
			t.Errorf("%v proposals have failed, want at least %d", got, writes)
		}

		// A restarted node counts entries that it has to apply again as committed.
		l.stop()
		l.start()
		r.write(1, "again")
		r.equal(1)
		settle()
		if got := committed(l); got == 0 || got != applied(l) || pending(l) != 0 {
			t.Errorf("after a restart %v are committed, %v applied, %v pending", got, applied(l), pending(l))
		}
	})
}
