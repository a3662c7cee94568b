package mirror

import (
	"errors"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestEndOfWatch: what ends a watch at a source is waited out only if it goes away by itself.
func TestEndOfWatch(t *testing.T) {
	for _, c := range []struct {
		reason string
		again  bool
	}{
		{rpctypes.ErrGRPCNoLeader.Error(), true},
		{"etcdserver: no leader", true},
		{rpctypes.ErrGRPCInvalidAuthToken.Error(), true},
		{rpctypes.ErrGRPCPermissionDenied.Error(), false},
		{"", false},
	} {
		err := canceled(&etcdserverpb.WatchResponse{Canceled: true, CancelReason: c.reason})
		if err == nil || transient(err) != c.again {
			t.Errorf("%q: %v, again: %v", c.reason, err, err != nil && transient(err))
		}
	}
	var compacted *CompactedError
	if err := canceled(&etcdserverpb.WatchResponse{Canceled: true, CompactRevision: 9}); !errors.As(err, &compacted) || compacted.Compacted != 9 || transient(err) {
		t.Errorf("%v", err)
	}
	if err := canceled(&etcdserverpb.WatchResponse{}); err != nil {
		t.Errorf("%v", err)
	}
	for err, again := range map[error]bool{
		rpctypes.ErrLeaderChanged:                          true,
		rpctypes.ErrTooManyRequests:                        true,
		status.Error(codes.Unavailable, "connection lost"): true,
		rpctypes.ErrPermissionDenied:                       false,
		rpctypes.ErrAuthFailed:                             false,
		errors.New("checksum"):                             false,
	} {
		if transient(err) != again {
			t.Errorf("%v: again %v", err, !again)
		}
	}
}
