package conformance

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// alarmKind lists, raises and ends alarms. etcd lists them in no order.
var alarmKind = &kind{
	name: "Alarm", method: pb.Maintenance_Alarm_FullMethodName,
	do: func(ctx context.Context, conn *grpc.ClientConn, req proto.Message) answer {
		resp, err := pb.NewMaintenanceClient(conn).Alarm(ctx, req.(*pb.AlarmRequest))
		if err != nil {
			return failed(err)
		}
		slices.SortFunc(resp.Alarms, func(a, b *pb.AlarmMember) int {
			return cmp.Or(cmp.Compare(a.GetAlarm(), b.GetAlarm()), cmp.Compare(a.GetMemberID(), b.GetMemberID()))
		})
		return answer{response: resp}
	},
}

// TestAlarms: etcd and Skein answer alike to calls about alarms, and to changes under them. The alarms are of
// members that neither cluster has: the ids of its own differ.
func TestAlarms(t *testing.T) {
	t.Parallel()
	p := newPair(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), callTimeout)
	defer cancel()
	alarm := func(action pb.AlarmRequest_AlarmAction, member uint64, kind pb.AlarmType) *pb.AlarmRequest {
		return &pb.AlarmRequest{Action: action, MemberID: member, Alarm: kind}
	}
	const get, activate, deactivate = pb.AlarmRequest_GET, pb.AlarmRequest_ACTIVATE, pb.AlarmRequest_DEACTIVATE
	const all, noSpace, corrupt = pb.AlarmType_NONE, pb.AlarmType_NOSPACE, pb.AlarmType_CORRUPT
	// The cluster gets its version a moment after its start.
	for {
		a := do(ctx, p.skein.conns[0], &call{kind: alarmKind, request: alarm(deactivate, 77, noSpace)})
		if a.code != codes.InvalidArgument {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	changes := func() []proto.Message {
		return []proto.Message{
			put("k", "v"), del("k", ""), then(put("k", "w"), get1("k")), then(del("k", "")), then(get1("k")), then(then(get1("k"))), then(then(put("k", "x"))),
			get1("k"), grant(5, 600), keep(5), &pb.LeaseTimeToLiveRequest{ID: 5}, revoke(5), revoke(6), &pb.CompactionRequest{Revision: 1 << 40},
			put("", "v"), put("k", strings.Repeat("v", 2<<20)),
		}
	}
	steps := slices.Concat(
		[]proto.Message{
			alarm(get, 0, all), alarm(activate, 77, noSpace), alarm(activate, 77, noSpace), alarm(get, 0, all), alarm(get, 5, noSpace), alarm(get, 0, corrupt),
		}, changes(), []proto.Message{
			alarm(activate, 0, corrupt), alarm(get, 0, all),
		}, changes(), []proto.Message{
			alarm(deactivate, 77, corrupt), alarm(deactivate, 77, noSpace), alarm(deactivate, 77, noSpace), alarm(get, 0, all),
		}, changes(), []proto.Message{
			alarm(activate, 0, all), alarm(activate, 78, 9), alarm(get, 0, 9), alarm(deactivate, 0, all), alarm(deactivate, 0, corrupt), alarm(get, 0, all),
		}, changes(), []proto.Message{
			alarm(deactivate, 78, 9), alarm(get, 0, all),
		}, changes(),
	)
	for i, m := range steps {
		c, gateway := &call{kind: alarmKind, request: m}, 0
		_, isAlarm := m.(*pb.AlarmRequest)
		if isAlarm {
			// The header has what the node knows.
			if err := p.step(ctx, &call{kind: kindNamed(t, "Range"), request: get1("k")}, gateway); err != nil {
				t.Error(err)
			}
		} else {
			c.kind, gateway = kindOf(t, m), i%skeinNodes
		}
		if err := p.step(ctx, c, gateway); err != nil {
			t.Errorf("step %d: %v", i, err)
		}
		if isAlarm {
			p.awaitAlarms(ctx, t)
		}
	}
}

func get1(key string) *pb.RangeRequest { return get(key, "") }

// awaitAlarms waits until all nodes say in their Status what etcd does.
func (p *pair) awaitAlarms(ctx context.Context, t *testing.T) {
	t.Helper()
	says := func(conn *grpc.ClientConn) string {
		st, err := pb.NewMaintenanceClient(conn).Status(ctx, &pb.StatusRequest{})
		if err != nil {
			return err.Error()
		}
		slices.Sort(st.Errors)
		return fmt.Sprint(st.Errors)
	}
	want := says(p.etcd.conns[0])
	for i, conn := range p.skein.conns {
		for says(conn) != want {
			if ctx.Err() != nil {
				t.Fatalf("Status of node %d says %s, etcd's %s", i+1, says(conn), want)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}
