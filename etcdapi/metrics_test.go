package etcdapi

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestOperationMetrics: what clients do is counted by etcd's names: each operation of a transaction that was
// executed, and transactions of more than one.
func TestOperationMetrics(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	if _, err := c.Put(t.Context(), "k", "value"); err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"", "l"} {
		if _, err := c.Get(t.Context(), "k", clientv3.WithRange(end)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Delete(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	want := func(ranges, puts, deletes, txns, bytes float64) {
		t.Helper()
		m := r.metrics
		for _, c := range []struct {
			name      string
			got, want float64
		}{
			{"ranges", testutil.ToFloat64(m.Ranges), ranges},
			{"puts", testutil.ToFloat64(m.Puts), puts},
			{"deletes", testutil.ToFloat64(m.Deletes), deletes},
			{"transactions", testutil.ToFloat64(m.Txns), txns},
			{"bytes", testutil.ToFloat64(m.PutBytes), bytes},
		} {
			if c.got != c.want {
				t.Errorf("%v %s, want %v", c.got, c.name, c.want)
			}
		}
	}
	want(2, 1, 1, 0, 6)

	put := &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte("a"), Value: []byte("b")}}}
	get := &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte("a")}}}
	del := &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("a")}}}
	inner := &pb.TxnRequest{Success: []*pb.RequestOp{put, put}, Failure: []*pb.RequestOp{del}}
	outer := &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestTxn{RequestTxn: inner}}, get}, Failure: []*pb.RequestOp{get}}
	answer := func(inner bool) *pb.TxnResponse {
		return &pb.TxnResponse{Succeeded: true, Responses: []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseTxn{ResponseTxn: &pb.TxnResponse{Succeeded: inner}}}, {}}}
	}
	r.metrics.countTxn(outer, answer(true))
	want(3, 3, 1, 1, 10)
	r.metrics.countTxn(outer, answer(false))
	want(4, 3, 2, 2, 10)
	r.metrics.countTxn(outer, &pb.TxnResponse{}) // a transaction of one get
	want(5, 3, 2, 2, 10)
}

// TestAlarmMetrics: each alarm is told once, and no more when it has ended.
func TestAlarmMetrics(t *testing.T) {
	r := newRig(t, "http", nil)
	r.alarms.set(Alarm{pb.AlarmType_NOSPACE, 0xb, true}, Alarm{pb.AlarmType_NOSPACE, 0xb, false}, Alarm{pb.AlarmType_CORRUPT, 0xc, true})
	want := `# HELP etcd_debugging_server_alarms Alarms for every member in cluster. 1 for 'server_id' label with current ID. 2 for 'alarm_type' label with type of this alarm
# TYPE etcd_debugging_server_alarms gauge
etcd_debugging_server_alarms{alarm_type="CORRUPT",server_id="c"} 1
etcd_debugging_server_alarms{alarm_type="NOSPACE",server_id="b"} 1
`
	if err := testutil.GatherAndCompare(r.reg, strings.NewReader(want), "etcd_debugging_server_alarms"); err != nil {
		t.Error(err)
	}
	r.alarms.set()
	if n, err := testutil.GatherAndCount(r.reg, "etcd_debugging_server_alarms"); err != nil || n != 0 {
		t.Errorf("%d alarms are told, %v", n, err)
	}
}

// TestExtensiveMetrics: the times of all methods are there if they were asked for, and not otherwise.
func TestExtensiveMetrics(t *testing.T) {
	for _, extensive := range []bool{false, true} {
		r := newRig(t, "http", func(o *Options) {
			if extensive {
				o.Metrics.TimeMethods(o.Gatherer.(prometheus.Registerer))
			}
		})
		c := r.client(t, clientv3.Config{})
		if _, err := c.Put(t.Context(), "k", "value"); err != nil {
			t.Fatal(err)
		}
		families, err := r.reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		puts := uint64(0)
		for _, f := range families {
			if f.GetName() != "grpc_server_handling_seconds" {
				continue
			}
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if l.GetName() == "grpc_method" && l.GetValue() == "Put" {
						puts += m.GetHistogram().GetSampleCount()
					}
				}
			}
		}
		if want := uint64(map[bool]int{true: 1}[extensive]); puts != want {
			t.Errorf("extensive %v: %d puts were timed, want %d", extensive, puts, want)
		}
	}
}
