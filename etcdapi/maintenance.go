package etcdapi

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// maintenanceServer is etcd's Maintenance service.
type maintenanceServer struct {
	s *Server
	pb.UnsafeMaintenanceServer
}

// Status reports on this node. Leader, term and indexes are the placement group's, and sizes are
// the node's own, and so is the quota. It is 0 if there is none and the file system does not tell its size.
func (m *maintenanceServer) Status(ctx context.Context, _ *pb.StatusRequest) (*pb.StatusResponse, error) {
	st := m.s.opts.Node.Status()
	resp := &pb.StatusResponse{
		Header:           m.s.own(st.Revision),
		Version:          EtcdVersion,
		StorageVersion:   StorageVersion,
		Leader:           uint64(m.s.opts.Node.Leader()),
		RaftTerm:         m.s.opts.Node.Term(),
		RaftIndex:        st.RaftIndex,
		RaftAppliedIndex: st.AppliedIndex,
		DbSize:           st.DBSizeBytes,
		DbSizeInUse:      st.DBSizeInUseBytes,
		DbSizeQuota:      st.DBQuotaBytes,
		IsLearner:        st.Learner,
		DowngradeInfo:    m.downgradeInfo(ctx),
	}
	if resp.Leader == 0 {
		resp.Errors = append(resp.Errors, rpctypes.ErrNoLeader.Error())
	}
	for _, a := range m.s.known() {
		resp.Errors = append(resp.Errors, a.member().String())
	}
	return resp, nil
}

// Alarm answers as etcd does: about alarms of all members, whichever is asked, and about members that are not
// there. The member that raises an alarm knows it when it answers.
func (m *maintenanceServer) Alarm(ctx context.Context, r *pb.AlarmRequest) (*pb.AlarmResponse, error) {
	if m.s.opts.Alarms == nil {
		return nil, notYet("Alarm", "")
	}
	ctx, _, err := m.s.permitted(ctx, r)
	if err != nil {
		return nil, err
	}
	inner, cancel, wording := m.s.bounded(ctx)
	defer cancel()
	a := Alarm{Type: r.GetAlarm(), Member: keyspace.NodeID(r.GetMemberID())}
	var told []Alarm
	switch r.GetAction() {
	case pb.AlarmRequest_GET:
		told, err = m.s.opts.Alarms.List(inner)
	case pb.AlarmRequest_ACTIVATE, pb.AlarmRequest_DEACTIVATE:
		if a.Type != pb.AlarmType_NONE {
			told, err = m.change(inner, a, r.GetAction() == pb.AlarmRequest_ACTIVATE)
		}
	default:
		// etcd ends its process here.
		return nil, status.Errorf(codes.InvalidArgument, "etcdserver: unknown action %d of an alarm request: 0 lists alarms, 1 raises and 2 ends one", r.GetAction())
	}
	if err != nil {
		return nil, wording(err)
	}
	resp := &pb.AlarmResponse{Header: m.s.own(m.s.opts.Node.Status().Revision)}
	for _, t := range told {
		if a.Type == pb.AlarmType_NONE || a.Type == t.Type {
			resp.Alarms = append(resp.Alarms, t.member())
		}
	}
	return resp, nil
}

// change raises an alarm or ends it, and returns it, or nothing where it was not raised.
func (m *maintenanceServer) change(ctx context.Context, a Alarm, raise bool) ([]Alarm, error) {
	was := true
	var err error
	if raise {
		err = m.s.opts.Alarms.Activate(ctx, a.Type, a.Member)
	} else {
		was, err = m.s.opts.Alarms.Deactivate(ctx, a.Type, a.Member)
	}
	if err != nil || !was {
		return nil, err
	}
	return []Alarm{a}, nil
}

// Defragment succeeds and does nothing: the store gives space back by itself. As in etcd, its answer has
// no header.
func (m *maintenanceServer) Defragment(context.Context, *pb.DefragmentRequest) (*pb.DefragmentResponse, error) {
	m.s.log.Info("a defragmentation was asked for: there is nothing to do, space is given back in the background")
	return &pb.DefragmentResponse{}, nil
}

// Hash is HashKV at the current revision: there is nothing else to compare. etcd's takes in leases and
// its own records too.
func (m *maintenanceServer) Hash(ctx context.Context, _ *pb.HashRequest) (*pb.HashResponse, error) {
	h, err := m.HashKV(ctx, &pb.HashKVRequest{})
	if err != nil {
		return nil, err
	}
	return &pb.HashResponse{Header: h.GetHeader(), Hash: h.GetHash()}, nil
}

// HashKV hashes the data. As in etcd nothing but the client's deadline bounds it.
func (m *maintenanceServer) HashKV(ctx context.Context, r *pb.HashKVRequest) (*pb.HashKVResponse, error) {
	return serve(ctx, m.s, r, m.s.opts.Hashes.HashKV)
}

const (
	// snapshotPieceBytes is how much of a file a message has, as in etcd.
	snapshotPieceBytes = 32 << 10
	// snapshotPatience is how long a client may take nothing of a file, which takes room on the node's disk.
	snapshotPatience = 5 * time.Minute
)

// Snapshot sends the store as a database file of etcd's, and its hash in a message of its own, as etcd does. The file is
// made before anything is sent, so that there is no half of one where the disk has no room. A slow client may take as
// long as it needs; one that takes nothing for snapshotPatience gets an error, and the file goes.
func (m *maintenanceServer) Snapshot(_ *pb.SnapshotRequest, st pb.Maintenance_SnapshotServer) (err error) {
	if m.s.opts.Snapshots == nil {
		return notYet("Snapshot", "")
	}
	f, err := m.s.opts.Snapshots.Snapshot(st.Context())
	if err != nil {
		return kverror.GRPC(err)
	}
	taken, ended := make(chan struct{}, 1), make(chan error, 1)
	// A blocked Send ends when this method returns: gRPC ends the stream's context then.
	go func() {
		err := m.sendSnapshot(f, st, taken)
		if cerr := f.Close(); cerr != nil {
			m.s.log.Warn("the file of a snapshot that was sent could not be removed", zap.Error(cerr))
		}
		ended <- err
	}()
	patience := m.s.opts.Clock.NewTimer(snapshotPatience)
	defer patience.Stop()
	for {
		select {
		case err := <-ended:
			return err
		case <-taken:
			patience.Reset(snapshotPatience)
		case <-patience.C():
			m.s.log.Warn("a client takes nothing of its snapshot, which ends", zap.Duration("for", snapshotPatience))
			return status.Errorf(codes.DeadlineExceeded, "skein: the client has taken nothing of its snapshot for %v, and the file is removed: ask for another one, and read it as it comes", snapshotPatience)
		}
	}
}

// sendSnapshot sends a file and its hash. taken gets a token, unless it has one, when gRPC takes a message.
func (m *maintenanceServer) sendSnapshot(f SnapshotFile, st pb.Maintenance_SnapshotServer, taken chan<- struct{}) error {
	send := func(r *pb.SnapshotResponse) error {
		if err := st.Send(r); err != nil {
			return err
		}
		select {
		case taken <- struct{}{}:
		default:
		}
		return nil
	}
	left := f.Size() - sha256.Size
	if left < 0 {
		return kverror.GRPC(kverror.New(kverror.Internal, "a snapshot of %d bytes", f.Size()))
	}
	for left > 0 {
		// Each message has a buffer of its own: gRPC may still hold the last one.
		piece := make([]byte, min(left, snapshotPieceBytes))
		if _, err := io.ReadFull(f, piece); err != nil {
			return kverror.GRPC(kverror.New(kverror.Internal, "read the file of a snapshot, of which %d bytes are left: %v", left, err))
		}
		left -= int64(len(piece))
		if err := send(&pb.SnapshotResponse{RemainingBytes: uint64(left), Blob: piece, Version: StorageVersion}); err != nil {
			return err
		}
	}
	hash := make([]byte, sha256.Size)
	if _, err := io.ReadFull(f, hash); err != nil {
		return kverror.GRPC(kverror.New(kverror.Internal, "read the hash of a snapshot: %v", err))
	}
	return send(&pb.SnapshotResponse{Blob: hash, Version: StorageVersion})
}

// MoveLeader makes another node lead, if this one leads. As in etcd, its answer has no header.
func (m *maintenanceServer) MoveLeader(ctx context.Context, r *pb.MoveLeaderRequest) (*pb.MoveLeaderResponse, error) {
	if m.s.opts.Node.Leader() != m.s.opts.Self {
		return nil, rpctypes.ErrGRPCNotLeader
	}
	inner, cancel, wording := m.s.bounded(ctx)
	defer cancel()
	if err := m.s.opts.Node.MoveLeader(inner, keyspace.NodeID(r.GetTargetID())); err != nil {
		return nil, wording(err)
	}
	return &pb.MoveLeaderResponse{}, nil
}

// Downgrade says whether the release before may still be started (VALIDATE), and keeps it so (ENABLE)
// until CANCEL. Nodes go back when an operator starts the older build; nothing else happens here. The
// cluster version in the answer is etcd's, and stays.
func (m *maintenanceServer) Downgrade(ctx context.Context, r *pb.DowngradeRequest) (*pb.DowngradeResponse, error) {
	if m.s.opts.Downgrades == nil {
		return nil, notYet("Downgrade", "")
	}
	ctx, cancel, wording := m.s.bounded(ctx)
	defer cancel()
	var err error
	switch r.GetAction() {
	case pb.DowngradeRequest_VALIDATE:
		err = m.validateDowngrade(ctx, r.GetVersion(), wording)
	case pb.DowngradeRequest_ENABLE:
		if err = m.validateDowngrade(ctx, r.GetVersion(), wording); err == nil {
			err = m.hold(ctx, true, wording)
		}
	case pb.DowngradeRequest_CANCEL:
		// etcd answers the same where nothing was enabled.
		err = m.hold(ctx, false, wording)
	default:
		err = status.Error(codes.Unknown, "etcdserver: unknown method")
	}
	if err != nil {
		return nil, err
	}
	return &pb.DowngradeResponse{Header: m.s.own(m.s.opts.Node.Status().Revision), Version: strings.TrimSuffix(ClusterVersion, ".0")}, nil
}

// hold is Downgrades.Hold with etcd's errors.
func (m *maintenanceServer) hold(ctx context.Context, hold bool, wording func(error) error) error {
	if err := m.s.opts.Downgrades.Hold(ctx, hold); err != nil {
		return wording(err)
	}
	return nil
}

// validateDowngrade refuses, in etcd's order and words.
func (m *maintenanceServer) validateDowngrade(ctx context.Context, target string, wording func(error) error) error {
	to, ok := minorVersion(target)
	if !ok {
		return rpctypes.ErrGRPCWrongDowngradeVersionFormat
	}
	may, held, ready, err := m.s.opts.Downgrades.GoingBack(ctx, true)
	switch {
	case err != nil:
		return wording(err)
	case !ready:
		return rpctypes.ErrGRPCClusterVersionUnavailable
	case to != PreviousVersion || !may:
		return rpctypes.ErrGRPCInvalidDowngradeTargetVersion
	case held:
		return rpctypes.ErrGRPCDowngradeInProcess
	}
	return nil
}

// minorVersion returns a version with 0 for its patch level. As with etcd it may have none.
func minorVersion(v string) (string, bool) {
	var number [3]uint64
	parts := strings.SplitN(v, ".", 3)
	if len(parts) < 2 {
		return "", false
	}
	for i, p := range parts {
		if i == 2 {
			p = strings.SplitN(strings.SplitN(p, "-", 2)[0], "+", 2)[0] // what follows names a build
		}
		n, err := strconv.ParseUint(p, 10, 32)
		if err != nil {
			return "", false
		}
		number[i] = n
	}
	return fmt.Sprintf("%d.%d.0", number[0], number[1]), true
}

// downgradeInfo is what Status says of a downgrade.
func (m *maintenanceServer) downgradeInfo(ctx context.Context) *pb.DowngradeInfo {
	if m.s.opts.Downgrades != nil {
		if may, held, _, err := m.s.opts.Downgrades.GoingBack(ctx, false); err == nil && may && held {
			return &pb.DowngradeInfo{Enabled: true, TargetVersion: PreviousVersion}
		}
	}
	return &pb.DowngradeInfo{}
}
