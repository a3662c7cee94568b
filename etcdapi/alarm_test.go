package etcdapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// fakeAlarms are the alarms of a cluster, and what the node knows of them.
type fakeAlarms struct {
	mu         sync.Mutex
	all, known []Alarm
	// asked counts the questions for all of them, which err answers if it is not nil.
	asked int
	err   error
}

// set has these alarms raised, and the node know them.
func (f *fakeAlarms) set(all ...Alarm) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all, f.known, f.asked, f.err = all, all, 0, nil
}

func (f *fakeAlarms) Known() []Alarm {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.known
}

func (f *fakeAlarms) Sticky() []Alarm {
	return slices.DeleteFunc(slices.Clone(f.Known()), func(a Alarm) bool { return !a.Sticky })
}

func (f *fakeAlarms) List(context.Context) ([]Alarm, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return f.all, f.err
}

func (f *fakeAlarms) Activate(_ context.Context, t pb.AlarmType, member keyspace.NodeID) error {
	_, _ = f.Deactivate(context.Background(), t, member)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = append(f.all, Alarm{t, member, true})
	return f.err
}

func (f *fakeAlarms) Deactivate(_ context.Context, t pb.AlarmType, member keyspace.NodeID) (was bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.all)
	f.all = slices.DeleteFunc(slices.Clone(f.all), func(a Alarm) bool { return a.Type == t && a.Member == member })
	return len(f.all) < n, f.err
}

// TestAlarmCalls: the answers are etcd's. Some alarms are raised or ended twice, some are of members that are not
// there, as 0, and some of unknown types.
func TestAlarmCalls(t *testing.T) {
	r := newRig(t, "http", nil)
	m := pb.NewMaintenanceClient(r.client(t, clientv3.Config{}).ActiveConnection())
	const get, activate, deactivate = pb.AlarmRequest_GET, pb.AlarmRequest_ACTIVATE, pb.AlarmRequest_DEACTIVATE
	r.alarms.set(Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xd})
	for i, s := range []struct {
		action pb.AlarmRequest_AlarmAction
		member uint64
		alarm  pb.AlarmType
		want   string
	}{
		{get, 0, 0, "d NOSPACE"},
		{get, 7, pb.AlarmType_NOSPACE, "d NOSPACE"}, // as in etcd, the member does not count
		{get, 0xd, pb.AlarmType_CORRUPT, ""},
		{activate, 0xb, pb.AlarmType_CORRUPT, "b CORRUPT"},
		{activate, 0xb, pb.AlarmType_CORRUPT, "b CORRUPT"},
		{activate, 0, pb.AlarmType_CORRUPT, "0 CORRUPT"},
		{activate, 99, 9, "63 9"},
		{activate, 99, 0, ""},
		{get, 0, pb.AlarmType_CORRUPT, "b CORRUPT, 0 CORRUPT"},
		{deactivate, 0xb, pb.AlarmType_NOSPACE, ""},
		{deactivate, 0xb, 0, ""},
		{deactivate, 0xb, pb.AlarmType_CORRUPT, "b CORRUPT"},
		{deactivate, 0xb, pb.AlarmType_CORRUPT, ""},
		{deactivate, 0xd, pb.AlarmType_NOSPACE, "d NOSPACE"},
		{get, 0, 0, "0 CORRUPT, 63 9"},
	} {
		resp, err := m.Alarm(t.Context(), &pb.AlarmRequest{Action: s.action, MemberID: s.member, Alarm: s.alarm})
		if err != nil || resp.GetHeader().GetRevision() != 9 || resp.GetHeader().GetMemberId() != 0xb {
			t.Fatalf("%d: %v, %v", i, resp, err)
		}
		var got []string
		for _, a := range resp.GetAlarms() {
			got = append(got, fmt.Sprintf("%x %s", a.GetMemberID(), a.GetAlarm()))
		}
		if strings.Join(got, ", ") != s.want {
			t.Errorf("%d, %s of %x: %q, want %q", i, s.action, s.member, got, s.want)
		}
	}
	if _, err := m.Alarm(t.Context(), &pb.AlarmRequest{Action: 7}); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
	r.alarms.err = kverror.Timeout
	if _, err := m.Alarm(t.Context(), &pb.AlarmRequest{Action: activate, Alarm: 1}); status.Convert(err).Message() != "etcdserver: request timed out" {
		t.Error(err)
	}
}

// TestStickyAlarmsRefuse: what clients have raised refuses what etcd's refuses. Observed alarms refuse nothing
// here, and neither do those that were ended since the node heard of them.
func TestStickyAlarmsRefuse(t *testing.T) {
	leases := &fakeLeases{}
	r := newRig(t, "http", func(o *Options) { o.Leases, o.MaxRequestBytes = leases, 1000 })
	c := r.client(t, clientv3.Config{})
	put, get, del := clientv3.OpPut("k", "v"), clientv3.OpGet("k"), clientv3.OpDelete("k")
	txn := func(then, otherwise clientv3.Op) func() error {
		return func() error {
			_, err := c.Txn(t.Context()).Then(then).Else(otherwise).Commit()
			return err
		}
	}
	noSpace := Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xd, Sticky: true}
	corrupt := Alarm{Type: pb.AlarmType_CORRUPT, Member: 0, Sticky: true}
	for _, s := range []struct {
		what          string
		full, corrupt bool // whether it is refused
		call          func() error
	}{
		{"put", true, true, func() error { _, err := c.Put(t.Context(), "k", "v"); return err }},
		{"delete", false, true, func() error { _, err := c.Delete(t.Context(), "k"); return err }},
		{"get", false, false, func() error { _, err := c.Get(t.Context(), "k"); return err }},
		{"compact", false, true, func() error { _, err := c.Compact(t.Context(), 3); return err }},
		{"grant", true, true, func() error { _, err := c.Grant(t.Context(), 60); return err }},
		{"revoke", false, true, func() error { _, err := c.Revoke(t.Context(), 5); return err }},
		{"keepalive", false, false, func() error { _, err := c.KeepAliveOnce(t.Context(), 5); return err }},
		{"time to live", false, false, func() error { _, err := c.TimeToLive(t.Context(), 5); return err }},
		{"txn that reads", false, false, txn(get, get)},
		{"txn that deletes", false, true, txn(get, del)},
		{"txn that puts", true, true, txn(put, get)},
		{"txn that puts otherwise", true, true, txn(get, put)},
		{"txn in a txn that reads", false, true, txn(get, clientv3.OpTxn(nil, []clientv3.Op{get}, nil))},
		{"txn in a txn that puts", true, true, txn(get, clientv3.OpTxn(nil, []clientv3.Op{get}, []clientv3.Op{put}))},
	} {
		check := func(where string, want error) {
			t.Helper()
			if err := s.call(); !errors.Is(err, want) {
				t.Errorf("%s, %s: %v, want %v", s.what, where, err, want)
			}
		}
		either := func(refused bool, err error) error {
			if refused {
				return err
			}
			return nil
		}
		r.alarms.set()
		check("no alarm", nil)
		if r.alarms.asked > 0 {
			t.Errorf("%s asks placement for alarms", s.what)
		}
		r.alarms.set(Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xb}, Alarm{Type: pb.AlarmType_CORRUPT, Member: 0xb}, Alarm{Type: 9, Sticky: true})
		check("observed alarms, and an unknown one", nil)
		r.alarms.set(noSpace)
		check("NOSPACE", either(s.full, rpctypes.ErrNoSpace))
		r.alarms.set(noSpace, corrupt)
		check("both", either(s.corrupt, rpctypes.ErrCorrupt))
		r.alarms.all = nil
		check("both were ended", nil)
		r.alarms.err = kverror.Timeout
		check("placement does not answer", either(s.full || s.corrupt, rpctypes.ErrTimeout))
	}
	r.alarms.set(corrupt)
	if _, err := c.Put(t.Context(), "k", strings.Repeat("v", 1000)); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		t.Errorf("a large put while there is an alarm: %v", err)
	}
	if _, err := c.Put(t.Context(), "", "v"); !errors.Is(err, rpctypes.ErrEmptyKey) {
		t.Errorf("a put without a key while there is an alarm: %v", err)
	}
}
