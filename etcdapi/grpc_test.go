package etcdapi

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
)

// TestErrorTexts: every kind of error arrives at clientv3 as etcd's own error value if etcd has
// one, and with the table's code and text otherwise.
func TestErrorTexts(t *testing.T) {
	// One of the errors is answered when rights that were taken away are not heard of in time.
	r := newRig(t, "http", func(o *Options) { o.RequestTimeout = time.Millisecond })
	c := r.client(t, clientv3.Config{})
	for _, row := range kverror.Table() {
		r.kv.set(kverror.New(row.Kind, ""), false)
		_, err := c.Put(t.Context(), "k", "v")
		want := status.Convert(row.GRPC)
		ee := rpctypes.EtcdError{}
		switch {
		case errors.As(err, &ee):
			if ee.Code() != want.Code() || ee.Error() != want.Message() {
				t.Errorf("%s: got %v %q, want %v %q", row.Name, ee.Code(), ee.Error(), want.Code(), want.Message())
			}
		case want.Code() == codes.Canceled || want.Code() == codes.DeadlineExceeded:
			if status.Code(err) != want.Code() && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v", row.Name, err)
			}
		case strings.HasPrefix(want.Message(), "skein:"), row.Kind == kverror.Internal,
			row.Kind == kverror.PermissionNotGiven: // etcd's client has no value for this one of etcd's
			if !strings.Contains(err.Error(), want.Message()) {
				t.Errorf("%s: %v", row.Name, err)
			}
		default:
			t.Errorf("%s: %T %v is not etcd's error", row.Name, err, err)
		}
	}
}

// TestUnknownErrors: an error that is no kverror is Unknown with its own text.
func TestUnknownErrors(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	r.kv.set(errors.New("engine: on fire"), false)
	_, err := c.Get(t.Context(), "k")
	if status.Code(err) != codes.Unknown || !strings.Contains(err.Error(), "on fire") {
		t.Error(err)
	}
	r.kv.set(rpctypes.ErrGRPCNoSpace, false)
	if _, err = c.Get(t.Context(), "k"); !errors.Is(err, rpctypes.ErrNoSpace) {
		t.Error(err)
	}
}

func TestHeaders(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	check := func(what string, h *pb.ResponseHeader, revision int64, err error) {
		t.Helper()
		if err != nil || h.ClusterId != 0xc || h.MemberId != 0xb || h.RaftTerm != 5 || h.Revision != revision {
			t.Errorf("%s: %v, %v", what, h, err)
		}
	}
	g, err := c.Get(t.Context(), "k")
	check("Range", g.Header, 7, err)
	p, err := c.Put(t.Context(), "k", "v")
	check("Put", p.Header, 7, err)
	d, err := c.Delete(t.Context(), "k")
	check("DeleteRange", d.Header, 7, err)
	x, err := c.Txn(t.Context()).Then(clientv3.OpPut("k", "v")).Commit()
	check("Txn", x.Header, 7, err)
	o, err := c.Compact(t.Context(), 3)
	check("Compact", o.Header, 7, err)
	m, err := c.MemberList(t.Context())
	check("MemberList", m.Header, 0, err)
	if len(m.Members) != 1 || m.Members[0].Name != "n1" {
		t.Error(m)
	}
	s, err := c.Status(t.Context(), r.addr())
	check("Status", s.Header, 9, err)
	if s.Version != "3.7.3" || s.StorageVersion != "3.7.0" || s.Leader != 0xb || s.RaftTerm != 5 || s.RaftIndex != 21 ||
		s.RaftAppliedIndex != 20 || s.DbSize != 1000 || s.DbSizeInUse != 600 || s.IsLearner || len(s.Errors) != 0 {
		t.Error(s)
	}
	r.node.leader.Store(0)
	r.alarms.set(Alarm{Type: pb.AlarmType_NOSPACE, Member: 0xd})
	s, err = c.Status(t.Context(), r.addr())
	if err != nil || s.Leader != 0 || len(s.Errors) != 2 || s.Errors[0] != "etcdserver: no leader" || !strings.Contains(s.Errors[1], "NOSPACE") {
		t.Error(s, err)
	}
	a, err := c.AlarmList(t.Context())
	check("Alarm", a.Header, 9, err)
	if len(a.Alarms) != 1 || a.Alarms[0].Alarm != pb.AlarmType_NOSPACE {
		t.Error(a)
	}
}

// A gateway may answer with revisions that no range of its own node has heard of. Its answers about
// itself do not go below them.
func TestHeadersOfANodeDoNotGoBack(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	r.node.behind.Store(4)
	if s, err := c.Status(t.Context(), r.addr()); err != nil || s.Header.Revision != 5 {
		t.Error(s, err)
	}
	if p, err := c.Put(t.Context(), "k", "v"); err != nil || p.Header.Revision != 7 {
		t.Error(p, err)
	}
	if s, err := c.Status(t.Context(), r.addr()); err != nil || s.Header.Revision != 7 {
		t.Error(s, err)
	}
	if a, err := c.AlarmList(t.Context()); err != nil || a.Header.Revision != 7 {
		t.Error(a, err)
	}
}

// The header of a hash is this node's; hashes may take as long as the client likes. A defragmentation
// succeeds.
func TestHashesAndDefragment(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.RequestTimeout = 10 * time.Millisecond })
	c := r.client(t, clientv3.Config{})
	if _, err := c.Defragment(t.Context(), r.addr()); err != nil {
		t.Error(err)
	}
	h, err := c.HashKV(t.Context(), r.addr(), 5)
	if err != nil || h.Hash != 0xabc || h.CompactRevision != -1 || h.HashRevision != 5 ||
		h.Header.GetRevision() != 7 || h.Header.GetMemberId() != 0xb || h.Header.GetRaftTerm() != 5 {
		t.Error(h, err)
	}
	all, err := pb.NewMaintenanceClient(c.ActiveConnection()).Hash(t.Context(), &pb.HashRequest{})
	if err != nil || all.GetHash() != 0xabc || all.GetHeader().GetMemberId() != 0xb {
		t.Error(all, err)
	}
	r.kv.set(nil, true)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := c.HashKV(ctx, r.addr(), 0)
		ended <- err
	}()
	<-r.kv.entered
	time.Sleep(50 * time.Millisecond) // longer than a request may take
	select {
	case err := <-ended:
		t.Errorf("a hash ended early: %v", err)
	default:
	}
	cancel()
	if err := <-ended; status.Code(err) != codes.Canceled && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// TestNotYet: missing methods say so, and missing services are not registered.
func TestNotYet(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	for what, call := range map[string]func() error{
		"Snapshot": func() error {
			s, err := pb.NewMaintenanceClient(c.ActiveConnection()).Snapshot(t.Context(), &pb.SnapshotRequest{})
			if err == nil {
				_, err = s.Recv()
			}
			return err
		},
	} {
		if err := call(); status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), what+" is not there yet") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := c.Grant(t.Context(), 5); status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "unknown service etcdserverpb.Lease") {
		t.Error(err)
	}
}

// fakeSnapshots makes files of a few bytes, which say whether they are closed.
type fakeSnapshots struct {
	file   []byte
	open   atomic.Int64
	failed error
}

func (f *fakeSnapshots) Snapshot(context.Context) (SnapshotFile, error) {
	if f.failed != nil {
		return nil, f.failed
	}
	f.open.Add(1)
	return &fakeSnapshot{f, bytes.NewReader(f.file)}, nil
}

type fakeSnapshot struct {
	f *fakeSnapshots
	*bytes.Reader
}

func (s *fakeSnapshot) Close() error {
	s.f.open.Add(-1)
	return nil
}

// TestSnapshot: pieces of 32 KiB that say how much remains, then the hash in a message of its own, as etcd sends them. A
// file that cannot be made is an error before the first of them.
func TestSnapshot(t *testing.T) {
	files := &fakeSnapshots{file: make([]byte, 2*snapshotPieceBytes+100+sha256.Size)}
	for i := range files.file {
		files.file[i] = byte(i / 7)
	}
	r := newRig(t, "http", func(o *Options) { o.Snapshots = files })
	c := pb.NewMaintenanceClient(r.client(t, clientv3.Config{}).ActiveConnection())
	st, err := c.Snapshot(t.Context(), &pb.SnapshotRequest{})
	must(t, err)
	var got []byte
	for _, want := range []struct{ piece, remains int }{{snapshotPieceBytes, snapshotPieceBytes + 100}, {snapshotPieceBytes, 100}, {100, 0}, {sha256.Size, 0}} {
		m, err := st.Recv()
		must(t, err)
		if len(m.GetBlob()) != want.piece || m.GetRemainingBytes() != uint64(want.remains) || m.GetVersion() != StorageVersion {
			t.Errorf("%d bytes, %d remain, version %s, want %+v", len(m.GetBlob()), m.GetRemainingBytes(), m.GetVersion(), want)
		}
		got = append(got, m.GetBlob()...)
	}
	if _, err := st.Recv(); !errors.Is(err, io.EOF) || !bytes.Equal(got, files.file) || files.open.Load() != 0 {
		t.Errorf("%v at the end, %d bytes, %d files are open", err, len(got), files.open.Load())
	}
	files.failed = kverror.New(kverror.NoSpace, "a test")
	st, err = c.Snapshot(t.Context(), &pb.SnapshotRequest{})
	must(t, err)
	if m, err := st.Recv(); m != nil || status.Code(err) != codes.ResourceExhausted {
		t.Errorf("%v, %v", m, err)
	}
}

// TestSnapshotOfAnIdleClient: a client may be slow, but one that takes nothing for snapshotPatience keeps no file.
func TestSnapshotOfAnIdleClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		files := &fakeSnapshots{file: make([]byte, 40*snapshotPieceBytes+sha256.Size)}
		server, lis := grpc.NewServer(), bufconn.Listen(1<<20)
		pb.RegisterMaintenanceServer(server, &maintenanceServer{s: &Server{opts: Options{Clock: clock.System(), Snapshots: files}, log: zap.NewNop()}})
		served := make(chan error, 1)
		go func() { served <- server.Serve(lis) }()
		conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lis.DialContext(ctx) }))
		must(t, err)
		st, err := pb.NewMaintenanceClient(conn).Snapshot(t.Context(), &pb.SnapshotRequest{})
		must(t, err)
		for range 12 { // slowly; the room for one piece may need that two are taken
			_, err := st.Recv()
			must(t, err)
			time.Sleep(snapshotPatience / 3)
		}
		synctest.Wait()
		if files.open.Load() != 1 {
			t.Errorf("%d files are open while a slow client reads", files.open.Load())
		}
		time.Sleep(snapshotPatience + time.Second)
		synctest.Wait()
		if files.open.Load() != 0 {
			t.Errorf("%d files are open of a client that takes nothing", files.open.Load())
		}
		for err == nil {
			_, err = st.Recv()
		}
		if status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), "taken nothing of its snapshot for 5m0s") {
			t.Error(err)
		}
		must(t, conn.Close())
		server.Stop()
		must(t, <-served)
	})
}

// fakeDowngrades may go back or not.
type fakeDowngrades struct{ may, held, ready bool }

func (f *fakeDowngrades) GoingBack(context.Context, bool) (may, held, ready bool, err error) {
	return f.may, f.held, f.ready, nil
}

func (f *fakeDowngrades) Hold(_ context.Context, hold bool) error {
	f.held = hold
	return nil
}

// TestDowngrade: etcd's calls, as etcdctl downgrade makes them, hold the cluster version where the release
// before reads it. That release is etcd's version one below the one that Skein reports.
func TestDowngrade(t *testing.T) {
	d := &fakeDowngrades{}
	r := newRig(t, "http", func(o *Options) { o.Downgrades = d })
	c := r.client(t, clientv3.Config{})
	const validate, enable, cancel = clientv3.DowngradeValidate, clientv3.DowngradeEnable, clientv3.DowngradeCancel
	for i, s := range []struct {
		action         clientv3.DowngradeAction
		version        string
		ready, may     bool
		held, holdsNow bool
		err            error
	}{
		{action: validate, version: "3", ready: true, may: true, err: rpctypes.ErrWrongDowngradeVersionFormat},
		{action: enable, version: "three.six", ready: true, may: true, err: rpctypes.ErrWrongDowngradeVersionFormat},
		{action: validate, version: "3.6.0", err: rpctypes.ErrClusterVersionUnavailable},
		{action: validate, version: "3.5.0", ready: true, may: true, err: rpctypes.ErrInvalidDowngradeTargetVersion},
		{action: validate, version: "0.1.0", ready: true, may: true, err: rpctypes.ErrInvalidDowngradeTargetVersion},
		{action: validate, version: "3.7.0", ready: true, may: true, err: rpctypes.ErrInvalidDowngradeTargetVersion},
		{action: validate, version: "3.6.0", ready: true, err: rpctypes.ErrInvalidDowngradeTargetVersion},
		{action: enable, version: "3.6.0", ready: true, err: rpctypes.ErrInvalidDowngradeTargetVersion},
		{action: validate, version: "3.6.0", ready: true, may: true},
		{action: validate, version: "3.6", ready: true, may: true},
		{action: validate, version: "3.6.7-rc.1", ready: true, may: true},
		{action: enable, version: "3.6.0", ready: true, may: true, holdsNow: true},
		{action: validate, version: "3.6.0", ready: true, may: true, held: true, holdsNow: true, err: rpctypes.ErrDowngradeInProcess},
		{action: enable, version: "3.6.0", ready: true, may: true, held: true, holdsNow: true, err: rpctypes.ErrDowngradeInProcess},
		{action: cancel, ready: true, may: true, held: true},
		{action: cancel, ready: true, may: true}, // as etcd
	} {
		*d = fakeDowngrades{may: s.may, held: s.held, ready: s.ready}
		resp, err := c.Downgrade(t.Context(), s.action, s.version)
		if !errors.Is(err, s.err) || err == nil && (resp.Version != "3.7" || resp.Header.GetMemberId() != 0xb) || d.held != s.holdsNow {
			t.Errorf("%d: %d to %q: %v, %v, held %t", i, s.action, s.version, resp, err, d.held)
		}
		st, err := c.Status(t.Context(), r.addr())
		if err != nil || st.DowngradeInfo.Enabled != s.holdsNow || st.DowngradeInfo.Enabled && st.DowngradeInfo.TargetVersion != "3.6.0" {
			t.Errorf("%d: status %v, %v", i, st, err)
		}
	}
	if _, err := pb.NewMaintenanceClient(c.ActiveConnection()).Downgrade(t.Context(), &pb.DowngradeRequest{Action: 9}); status.Code(err) != codes.Unknown {
		t.Error(err)
	}
}

// TestCompressedCalls: compressed requests are understood and answered uncompressed. The compressor
// comes from this package, not from the test.
func TestCompressedCalls(t *testing.T) {
	r := newRig(t, "http", nil)
	seen := &encodings{}
	c := r.client(t, clientv3.Config{DialOptions: []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.UseCompressor("gzip")), grpc.WithStatsHandler(seen),
	}})
	if _, err := c.Put(t.Context(), "k", strings.Repeat("v", 1<<10)); err != nil {
		t.Fatal(err)
	}
	health, err := grpc_health_v1.NewHealthClient(c.ActiveConnection()).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := health.Recv(); err != nil {
		t.Fatal(err)
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if len(seen.out) < 2 || slices.ContainsFunc(seen.out, func(e string) bool { return e != "gzip" }) {
		t.Errorf("requests were encoded as %q", seen.out)
	}
	if len(seen.in) < 2 || slices.ContainsFunc(seen.in, func(e string) bool { return e == "gzip" }) {
		t.Errorf("answers were encoded as %q", seen.in)
	}
}

// TestPlainCalls: as with etcd, answers to uncompressed requests do not mention compression.
func TestPlainCalls(t *testing.T) {
	seen := &encodings{}
	c := newRig(t, "http", nil).client(t, clientv3.Config{DialOptions: []grpc.DialOption{grpc.WithStatsHandler(seen)}})
	if _, err := c.Put(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if len(seen.in) == 0 || slices.ContainsFunc(seen.in, func(e string) bool { return e != "" }) {
		t.Errorf("answers were encoded as %q", seen.in)
	}
}

// TestCompressedIsBounded: a message that is small only while compressed is refused.
func TestCompressedIsBounded(t *testing.T) {
	c := newRig(t, "http", nil).client(t, clientv3.Config{DialOptions: []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.UseCompressor("gzip")),
	}, MaxCallSendMsgSize: 64 << 20})
	if _, err := c.Put(t.Context(), "k", strings.Repeat("v", 16<<20)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("a put of 16 MiB of one letter: %v", err)
	}
}

// encodings notes how a client's requests and their answers are encoded.
type encodings struct {
	mu      sync.Mutex
	out, in []string
}

func (e *encodings) HandleRPC(_ context.Context, s stats.RPCStats) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch h := s.(type) {
	case *stats.OutHeader:
		e.out = append(e.out, h.Compression)
	case *stats.InHeader:
		e.in = append(e.in, h.Compression)
	}
}

func (*encodings) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*encodings) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*encodings) HandleConn(context.Context, stats.ConnStats)                       {}

// TestTimeouts: the server's bound gives etcd's timeout, and the client's own end stays what it is.
func TestTimeouts(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.RequestTimeout = 50 * time.Millisecond })
	c := r.client(t, clientv3.Config{})
	r.kv.set(kverror.Timeout, false)
	if _, err := c.Put(t.Context(), "k", "v"); !errors.Is(err, rpctypes.ErrTimeout) {
		t.Error(err)
	}
	r.kv.set(nil, true)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	// Both sides watch the same deadline, and the first to see it words the error.
	if _, err := c.Put(ctx, "k", "v"); !errors.Is(err, context.DeadlineExceeded) && status.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	if _, err := c.Put(ctx, "k", "v"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	// A kind that says more than the context's end is kept.
	inner, stop, wording := r.bounded(t.Context())
	defer stop()
	<-inner.Done()
	if err := wording(kverror.TimeoutLeaderFail); !errors.Is(err, rpctypes.ErrGRPCTimeoutDueToLeaderFail) {
		t.Error(err)
	}
	if err := wording(status.FromContextError(inner.Err()).Err()); !errors.Is(err, rpctypes.ErrGRPCTimeout) {
		t.Error(err)
	}
}

func TestRequireLeader(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.ElectionTimeout = 20 * time.Millisecond })
	c := r.client(t, clientv3.Config{})
	health := grpc_health_v1.NewHealthClient(c.ActiveConnection())
	demanding, err := health.Watch(clientv3.WithRequireLeader(t.Context()), &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	patient, err := health.Watch(ctx, &grpc_health_v1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []grpc_health_v1.Health_WatchClient{demanding, patient} {
		if got, err := s.Recv(); err != nil || got.Status != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Fatal(got, err)
		}
	}
	if _, err := c.Get(clientv3.WithRequireLeader(t.Context()), "k"); err != nil {
		t.Fatal(err)
	}
	r.node.leader.Store(0)
	if _, err := demanding.Recv(); !strings.Contains(err.Error(), "etcdserver: no leader") || status.Code(err) != codes.Unavailable {
		t.Error(err)
	}
	if _, err := c.Get(clientv3.WithRequireLeader(t.Context()), "k"); !errors.Is(err, rpctypes.ErrNoLeader) {
		t.Error(err)
	}
	if s, err := health.Watch(clientv3.WithRequireLeader(t.Context()), &grpc_health_v1.HealthCheckRequest{}); err == nil {
		if _, err = s.Recv(); !strings.Contains(err.Error(), "etcdserver: no leader") {
			t.Error(err)
		}
	}
	if _, err := c.Get(t.Context(), "k"); err != nil {
		t.Error(err)
	}
}

func TestClientVersion(t *testing.T) {
	r := newRig(t, "http", nil)
	conn, err := grpc.NewClient(r.addr(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	call := func(version string) error {
		ctx := metadata.AppendToOutgoingContext(t.Context(), rpctypes.MetadataClientAPIVersionKey, version)
		_, err := pb.NewKVClient(conn).Range(ctx, &pb.RangeRequest{Key: []byte("k")})
		return err
	}
	if err := call("3.7"); err != nil {
		t.Error(err)
	}
	if got := testutil.ToFloat64(r.metrics.ClientRequests.WithLabelValues("unary", "3.7")); got != 1 {
		t.Errorf("%v requests of 3.7", got)
	}
	for i := range 2 * maxClientVersions {
		if err := call(strings.Repeat("x", i+1)); err != nil {
			t.Error(err)
		}
	}
	if n := testutil.CollectAndCount(r.metrics.ClientRequests); n > maxClientVersions+1 {
		t.Errorf("%d versions are counted apart", n)
	}
	// gRPC refuses to send text that is not valid, so the check is called as gRPC would.
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(rpctypes.MetadataClientAPIVersionKey, "\xff"))
	if _, err := r.admit(ctx, "unary"); !errors.Is(err, rpctypes.ErrGRPCInvalidClientAPIVersion) {
		t.Error(err)
	}
}

// TestSizes: the limit is on changes in the form in which etcd measures them. gRPC ends messages
// that are larger still.
func TestSizes(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.MaxRequestBytes = 4096 })
	c := r.client(t, clientv3.Config{})
	big, huge := strings.Repeat("v", 4097), strings.Repeat("v", 4096+grpcOverheadBytes)
	if _, err := c.Put(t.Context(), "k", big); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		t.Error(err)
	}
	if _, err := c.Txn(t.Context()).Then(clientv3.OpPut("k", big)).Commit(); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		t.Error(err)
	}
	if _, err := c.Delete(t.Context(), big); !errors.Is(err, rpctypes.ErrRequestTooLarge) {
		t.Error(err)
	}
	if n := r.kv.called(); n != 0 {
		t.Errorf("%d requests passed", n)
	}
	// Reads are not measured.
	if _, err := c.Get(t.Context(), big); err != nil {
		t.Error(err)
	}
	if _, err := c.Txn(t.Context()).If(clientv3.Compare(clientv3.Value(big), "=", "")).Then(clientv3.OpGet(big)).Commit(); err != nil {
		t.Error(err)
	}
	if _, err := c.Put(t.Context(), "k", huge); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
}

func TestMaxConcurrentStreams(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.MaxConcurrentStreams = 2; o.RequestTimeout = time.Minute })
	c := r.client(t, clientv3.Config{})
	r.kv.set(nil, true)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	for range 2 {
		go func() { _, err := c.Get(ctx, "k"); done <- err }()
		<-r.kv.entered
	}
	third, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if _, err := c.Get(third, "k"); !errors.Is(err, context.DeadlineExceeded) || r.kv.called() != 2 {
		t.Errorf("%d calls at a time, the third: %v", r.kv.called(), err)
	}
	cancel()
	for range 2 {
		if err := <-done; status.Code(err) != codes.Canceled && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

func TestReflectionAndHealth(t *testing.T) {
	r := newRig(t, "http", nil)
	c := r.client(t, clientv3.Config{})
	s, err := grpc_reflection_v1.NewServerReflectionClient(c.ActiveConnection()).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}); err != nil {
		t.Fatal(err)
	}
	got, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, svc := range got.GetListServicesResponse().Service {
		names = append(names, svc.Name)
	}
	want := "etcdserverpb.Auth etcdserverpb.Cluster etcdserverpb.KV etcdserverpb.Maintenance grpc.health.v1.Health grpc.reflection.v1.ServerReflection grpc.reflection.v1alpha.ServerReflection"
	if strings.Join(names, " ") != want {
		t.Error(names)
	}
	_ = s.CloseSend()
	if _, err := s.Recv(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	h, err := grpc_health_v1.NewHealthClient(c.ActiveConnection()).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
	if err != nil || h.Status != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Error(h, err)
	}
}

// TestStop: running calls may end, and the others are cut off.
func TestStop(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.RequestTimeout = time.Minute })
	c := r.client(t, clientv3.Config{})
	r.kv.set(nil, true)
	done := make(chan error, 1)
	go func() { _, err := c.Put(t.Context(), "k", "v"); done <- err }()
	<-r.kv.entered
	silent := dial(t, r.addr())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	r.Stop(ctx)
	if err := <-done; status.Code(err) != codes.Unavailable && !errors.Is(err, context.Canceled) {
		t.Errorf("%T %v", err, err)
	}
	if _, err := silent.Read(make([]byte, 1)); err == nil {
		t.Error("a silent connection outlived the server")
	}
}

func TestStopWithoutStart(t *testing.T) {
	r := newRig(t, "http", nil)
	s := New(Options{Users: everybody(t), KV: r.kv, Members: r.node, Node: r.node, Clock: r.opts.Clock})
	if err := s.Bind(nil, nil); err != nil {
		t.Fatal(err)
	}
	s.Stop(t.Context())
	s.Stop(t.Context())
}

// TestMetrics: calls are counted by method and code, and bytes in both directions.
func TestMetrics(t *testing.T) {
	r := newRig(t, "http", func(o *Options) { o.WarnUnaryRequest = time.Nanosecond })
	c := r.client(t, clientv3.Config{})
	if _, err := c.Put(t.Context(), "k", "value"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(t.Context(), ""); !errors.Is(err, rpctypes.ErrEmptyKey) {
		t.Fatal(err)
	}
	m := r.metrics
	if got := testutil.ToFloat64(m.Handled.WithLabelValues("unary", "etcdserverpb.KV", "Put", "OK")); got != 1 {
		t.Errorf("%v puts", got)
	}
	if got := testutil.ToFloat64(m.Handled.WithLabelValues("unary", "etcdserverpb.KV", "Range", "InvalidArgument")); got != 1 {
		t.Errorf("%v refused reads", got)
	}
	if got := testutil.ToFloat64(m.MessagesReceived.WithLabelValues("unary", "etcdserverpb.KV", "Range")); got != 1 {
		t.Errorf("%v messages of reads received", got)
	}
	if got := testutil.ToFloat64(m.MessagesSent.WithLabelValues("unary", "etcdserverpb.KV", "Range")); got != 0 {
		t.Errorf("%v messages sent for a refused read", got)
	}
	if got := testutil.ToFloat64(m.MessagesSent.WithLabelValues("unary", "etcdserverpb.KV", "Put")); got != 1 {
		t.Errorf("%v messages sent for puts", got)
	}
	if got := testutil.ToFloat64(m.ServerID.WithLabelValues("b")); got != 1 {
		t.Errorf("etcd_server_id of this node is %v", got)
	}
	if testutil.ToFloat64(m.ReceivedBytes) < 8 || testutil.ToFloat64(m.SentBytes) < 8 {
		t.Error("bytes are not counted")
	}
	if testutil.ToFloat64(m.SlowRequests) != 2 || testutil.ToFloat64(m.OpenConnections) != 1 {
		t.Errorf("%v slow, %v open", testutil.ToFloat64(m.SlowRequests), testutil.ToFloat64(m.OpenConnections))
	}
	if problems, err := testutil.GatherAndLint(r.reg, "skein_etcdapi_open_connections", "skein_etcdapi_slow_requests_total"); err != nil || len(problems) > 0 {
		t.Error(problems, err)
	}
}

func BenchmarkPut(b *testing.B) {
	r := newRig(b, "http", nil)
	c := r.client(b, clientv3.Config{})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Put(b.Context(), "k", "v"); err != nil {
			b.Fatal(err)
		}
	}
}

// fakeStream is a stream whose messages fail with err.
type fakeStream struct {
	grpc.ServerStream
	err error
}

func (s fakeStream) SendMsg(any) error { return s.err }
func (s fakeStream) RecvMsg(any) error { return s.err }

// TestStreamMessages: the messages of a stream are counted, its end is not.
func TestStreamMessages(t *testing.T) {
	m := NewMetrics(nil)
	table := methodTable(m, map[string]grpc.ServiceInfo{"s": {Methods: []grpc.MethodInfo{{Name: "m", IsClientStream: true, IsServerStream: true}}}})
	for _, err := range []error{nil, nil, io.EOF} {
		s := countedStream{fakeStream{err: err}, table["/s/m"]}
		if got := s.SendMsg(nil); got != err { //nolint:errorlint // the very same
			t.Error(got)
		}
		if got := s.RecvMsg(nil); got != err { //nolint:errorlint // the very same
			t.Error(got)
		}
	}
	sent, received := m.MessagesSent.WithLabelValues("bidi_stream", "s", "m"), m.MessagesReceived.WithLabelValues("bidi_stream", "s", "m")
	if testutil.ToFloat64(sent) != 2 || testutil.ToFloat64(received) != 2 {
		t.Errorf("%v sent, %v received, want 2 and 2", testutil.ToFloat64(sent), testutil.ToFloat64(received))
	}
}
