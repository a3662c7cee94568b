package dataapi

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/router"
)

// LoadPlacement is the load as placement has it; placement's client is one.
type LoadPlacement interface {
	// Loading returns the load as of a moment after the call, KnownLoading as this node knows it; nil for none.
	Loading(ctx context.Context) (*fsm.Loading, error)
	KnownLoading() *fsm.Loading
	// ChangeLoad takes a step.
	ChangeLoad(ctx context.Context, o fsm.ChangeLoad) (*fsm.Loading, error)
}

// LoadRanges are the ranges of a cluster that is being loaded; *router.Router is one.
type LoadRanges interface {
	LoadPut(ctx context.Context, b *router.LoadBlock) error
	LoadLook(ctx context.Context, key []byte, lease keyspace.LeaseID) (*rangeapi.LoadAnswer, error)
	LoadTrim(ctx context.Context, key []byte, inc keyspace.LeaseIncarnation) (*rangeapi.LoadAnswer, error)
	LoadEnd(ctx context.Context, key []byte, inc keyspace.LeaseIncarnation, revision, compacted keyspace.Revision) (*rangeapi.LoadAnswer, error)
}

// Splitter splits ranges.
type Splitter interface {
	// SplitForLoad has a range begin at the key, until ranges are merged by themselves.
	SplitForLoad(ctx context.Context, key []byte) error
}

// RegisterLoad adds the load service to a gRPC server, such as etcdapi's.
func RegisterLoad(s grpc.ServiceRegistrar, p LoadPlacement, r LoadRanges, split Splitter) {
	datapb.RegisterLoadServer(s, &loadServer{placement: p, ranges: r, splitter: split})
}

type loadServer struct {
	datapb.UnimplementedLoadServer
	placement LoadPlacement
	ranges    LoadRanges
	splitter  Splitter
}

// Bounds of one request and answer.
const (
	maxLoadVersions = 1 << 14
	statePage       = 1000
	// registerBytes is about how many bytes of spans one step brings to placement.
	registerBytes = 256 << 10
)

func loadStatus(l *fsm.Loading) *datapb.LoadStatus {
	if l == nil {
		return &datapb.LoadStatus{}
	}
	return &datapb.LoadStatus{
		Phase: datapb.LoadPhase(l.Phase), Loader: uint64(l.Nonce), Source: l.Source, Position: int64(l.Position), StartedUnixMs: int64(l.Started),
	}
}

// loadError words an error of a load. What the loader cannot do is FailedPrecondition and says why.
func loadError(what string, err error) error {
	if kverror.IsAccessChanged(err) {
		return kverror.GRPC(err) // the caller is checked anew, and the call is repeated
	}
	switch e := kverror.Of(err); e.Kind {
	case kverror.BadRequest, kverror.LeaseNotFound, kverror.TooManyLeases, kverror.TooManyRanges:
		return status.Error(codes.FailedPrecondition, "skein: "+what+": "+e.Error())
	case kverror.RequestTooLarge: // of an entry, which holds more than --max-request-bytes can be
		return status.Error(codes.FailedPrecondition, "skein: "+what+": "+e.Error()+". "+makeSmaller)
	case kverror.NoSpace:
		return status.Error(codes.ResourceExhausted, "skein: "+what+": "+e.Error()+": make room and go on: nothing is lost")
	default:
		g := status.Convert(kverror.GRPC(err))
		return status.Error(g.Code(), "skein: "+what+": "+e.Error())
	}
}

func (s *loadServer) change(ctx context.Context, what string, o fsm.ChangeLoad) (*datapb.LoadStatus, error) {
	if o.Nonce == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "skein: %s: the loader is 0: give a random number", what)
	}
	l, err := s.placement.ChangeLoad(ctx, o)
	if err != nil {
		return nil, loadError(what, err)
	}
	return loadStatus(l), nil
}

func (s *loadServer) LoadBegin(ctx context.Context, q *datapb.LoadBeginRequest) (*datapb.LoadStatus, error) {
	if n := len(q.GetSource()); n > fsm.MaxSourceBytes {
		return nil, status.Errorf(codes.InvalidArgument, "skein: begin a load: the source's text has %d bytes, at most %d", n, fsm.MaxSourceBytes)
	}
	return s.change(ctx, "begin a load", fsm.ChangeLoad{Step: fsm.LoadBegin, Nonce: fsm.LoadNonce(q.GetLoader()), Source: q.GetSource()})
}

func (s *loadServer) LoadAbandon(ctx context.Context, q *datapb.LoadAbandonRequest) (*datapb.LoadStatus, error) {
	return s.change(ctx, "abandon the load", fsm.ChangeLoad{Step: fsm.LoadAbandon, Nonce: fsm.LoadNonce(q.GetLoader())})
}

func (s *loadServer) LoadAdvance(ctx context.Context, q *datapb.LoadAdvanceRequest) (*datapb.LoadStatus, error) {
	return s.change(ctx, "advance the load", fsm.ChangeLoad{
		Step: fsm.LoadAdvance, Nonce: fsm.LoadNonce(q.GetLoader()), Phase: fsm.LoadPhase(q.GetPhase()), Position: keyspace.Revision(q.GetPosition()),
	})
}

func (s *loadServer) LoadLeases(ctx context.Context, q *datapb.LoadLeasesRequest) (st *datapb.LoadStatus, err error) {
	const what = "leases of the load"
	if n := len(q.GetGranted()) + len(q.GetRevoked()); n == 0 || n > fsm.MaxLeaseBatch {
		return nil, status.Errorf(codes.InvalidArgument, "skein: %s: %d leases in one call, from 1 to %d", what, n, fsm.MaxLeaseBatch)
	}
	grant := fsm.ChangeLoad{Step: fsm.LoadGrant, Nonce: fsm.LoadNonce(q.GetLoader())}
	for _, l := range q.GetGranted() {
		if l.GetTtl() < 1 || l.GetTtl() > fsm.MaxLeaseTTL {
			return nil, status.Errorf(codes.InvalidArgument, "skein: %s: lease %x has a TTL of %d s, from 1 to %d", what, l.GetId(), l.GetTtl(), int64(fsm.MaxLeaseTTL))
		}
		grant.Leases = append(grant.Leases, fsm.LoadedLease{ID: keyspace.LeaseID(l.GetId()), TTL: l.GetTtl()})
	}
	revoke := fsm.ChangeLoad{Step: fsm.LoadRevoke, Nonce: grant.Nonce}
	for _, id := range q.GetRevoked() {
		revoke.Leases = append(revoke.Leases, fsm.LoadedLease{ID: keyspace.LeaseID(id)})
	}
	for _, o := range []fsm.ChangeLoad{grant, revoke} {
		if len(o.Leases) == 0 {
			continue
		}
		if st, err = s.change(ctx, what, o); err != nil {
			return nil, err
		}
	}
	return st, nil
}

func (s *loadServer) LoadAccess(ctx context.Context, q *datapb.LoadAccessRequest) (*datapb.LoadStatus, error) {
	o := fsm.ChangeLoad{Step: fsm.LoadAccess, Nonce: fsm.LoadNonce(q.GetLoader()), Set: fsm.AccessSet(q.GetSet())}
	for _, r := range q.GetRows() {
		o.Access = append(o.Access, fsm.AccessRow{Key: r.GetKey(), Value: r.GetValue()})
	}
	if err := fsm.CheckAccessPiece(o.Access); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "skein: users and roles of the load: %v", err)
	}
	return s.change(ctx, "users and roles of the load", o)
}

// mine returns the load if it is the loader's and says so by known, else as placement has it now.
func (s *loadServer) mine(ctx context.Context, loader uint64, known func(*fsm.Loading) bool) (*fsm.Loading, error) {
	if l := s.placement.KnownLoading(); l != nil && uint64(l.Nonce) == loader && known(l) {
		return l, nil
	}
	return s.mineNow(ctx, loader, known)
}

// mineNow is mine by what placement has now: this node may hear of a phase later.
func (s *loadServer) mineNow(ctx context.Context, loader uint64, known func(*fsm.Loading) bool) (*fsm.Loading, error) {
	l, err := s.placement.Loading(ctx)
	switch {
	case err != nil:
		return nil, err
	case l == nil:
		return nil, kverror.New(kverror.BadRequest, "no load has begun here")
	case uint64(l.Nonce) != loader:
		return nil, kverror.New(kverror.BadRequest, "this cluster belongs to the load of %s by loader %016x, and not %016x", l.Source, uint64(l.Nonce), loader)
	case !known(l):
		return nil, kverror.New(kverror.BadRequest, "the load is in phase %s at position %d", l.Phase, l.Position)
	}
	return l, nil
}

func (s *loadServer) LoadSplit(ctx context.Context, q *datapb.LoadSplitRequest) (*datapb.LoadSplitResponse, error) {
	if _, err := s.mine(ctx, q.GetLoader(), func(l *fsm.Loading) bool { return l.Phase == fsm.PhaseBulk }); err != nil {
		return nil, loadError("split for the load", err)
	}
	if len(q.GetKey()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "skein: split for the load: the first range begins at the empty key anyway")
	}
	if err := s.splitter.SplitForLoad(ctx, q.GetKey()); err != nil {
		return nil, loadError("split for the load", err)
	}
	return &datapb.LoadSplitResponse{}, nil
}

func (s *loadServer) LoadPut(ctx context.Context, q *datapb.LoadPutRequest) (*datapb.LoadPutResponse, error) {
	const what = "versions of the load"
	phase, position := fsm.LoadPhase(q.GetPhase()), keyspace.Revision(q.GetPosition())
	l, err := s.mine(ctx, q.GetLoader(), func(l *fsm.Loading) bool { return l.Phase == phase && l.Position == position && l.Active() })
	if err != nil {
		return nil, loadError(what, err)
	}
	if n := q.GetCount(); n == 0 || n > maxLoadVersions || len(q.GetAlive()) > int(n) {
		return nil, status.Errorf(codes.InvalidArgument, "skein: %s: %d in one call, with %d leases; from 1 to %d, with no more leases", what, n, len(q.GetAlive()), maxLoadVersions)
	}
	b := &router.LoadBlock{Stage: rangeapi.LoadBulk, Incarnation: l.Incarnation, Versions: make([]mvcc.Version, q.GetCount())}
	if phase == fsm.PhaseFollow {
		b.Stage = rangeapi.LoadFollow
	} else if a := q.GetAfter(); len(a.GetKey()) > 0 {
		b.After = rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: a.GetKey(), Revision: keyspace.Revision(a.GetRevision())}
	}
	for _, id := range q.GetAlive() {
		b.Alive = append(b.Alive, keyspace.LeaseID(id))
	}
	at, rest := rangeapi.LoadCursor{Stage: b.Stage, Revision: position, Sub: 1<<32 - 1}, q.GetVersions()
	if b.Stage == rangeapi.LoadBulk {
		at = rangeapi.LoadCursor{Stage: b.Stage}
	}
	for i := range b.Versions {
		v := &b.Versions[i]
		if rest, err = rangeapi.DecodeStoredVersion(rest, v); err != nil {
			return nil, status.Errorf(codes.InvalidArgument, "skein: %s: version %d of %d: %v", what, i, q.GetCount(), err)
		}
		if at.Passed(v) {
			return nil, status.Errorf(codes.InvalidArgument, "skein: %s: key %q at revision %d, operation %d, is not behind %s", what, v.Key, v.Mod, v.Sub, &at)
		}
		at = b.Stage.At(v)
	}
	if len(rest) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "skein: %s: %d bytes behind %d of them", what, len(rest), q.GetCount())
	}
	if err := s.ranges.LoadPut(ctx, b); err != nil {
		return nil, loadError(what, err)
	}
	return &datapb.LoadPutResponse{}, nil
}

var stages = map[rangeapi.LoadStage]datapb.LoadPhase{
	rangeapi.LoadBulk: datapb.LoadPhase_LOAD_BULK, rangeapi.LoadFollow: datapb.LoadPhase_LOAD_FOLLOW, rangeapi.LoadEnded: datapb.LoadPhase_LOAD_FINISHED,
}

func (s *loadServer) LoadState(ctx context.Context, q *datapb.LoadStateRequest) (*datapb.LoadStateResponse, error) {
	const what = "the state of the load"
	l, err := s.placement.Loading(ctx)
	if err != nil {
		return nil, loadError(what, err)
	}
	resp := &datapb.LoadStateResponse{Status: loadStatus(l)}
	limit := int(q.GetLimit())
	if limit <= 0 || limit > statePage {
		limit = statePage
	}
	for key := q.GetFrom(); ; {
		a, err := s.ranges.LoadLook(ctx, key, keyspace.LeaseID(-1<<63))
		if err != nil {
			return nil, loadError(what, err)
		}
		resp.Ranges = append(resp.Ranges, &datapb.LoadRange{
			Start: a.Span.Start, End: a.Span.End, Versions: a.Versions, Sum: a.Sum, LastRevision: int64(a.LastRevision),
			Cursor: &datapb.LoadCursor{Phase: stages[a.Stage], Key: a.Key, Revision: int64(a.Revision), Sub: a.Sub},
		})
		if key = a.Span.End; len(key) == 0 || len(resp.Ranges) == limit {
			resp.More = len(key) > 0
			return resp, nil
		}
	}
}

// LoadFinish checks that the ranges have what the loader says, has the ranges forget leases that have no key any more
// and the other leases' records list the ranges, ends the load of each range and then that of the cluster. Each
// part can be repeated.
func (s *loadServer) LoadFinish(ctx context.Context, q *datapb.LoadFinishRequest) (*datapb.LoadStatus, error) {
	const what = "finish the load"
	at, compacted := keyspace.Revision(q.GetRevision()), keyspace.Revision(q.GetCompactedRevision())
	finish := fsm.ChangeLoad{
		Step: fsm.LoadFinish, Nonce: fsm.LoadNonce(q.GetLoader()), Position: at, Compacted: compacted, Set: fsm.AccessSet(q.GetAccessSet()),
	}
	if at < 1 || at >= keyspace.MaxRevision || compacted < 0 || compacted > at {
		return nil, status.Errorf(codes.InvalidArgument, "skein: %s: revision %d, compacted %d", what, at, compacted)
	}
	l, err := s.mineNow(ctx, q.GetLoader(), func(l *fsm.Loading) bool { return l.Phase != fsm.PhaseAbandoned })
	if err != nil {
		return nil, loadError(what, err)
	}
	if l.Phase == fsm.PhaseFinished {
		return s.change(ctx, what, finish)
	}
	if at < l.Position {
		return nil, status.Errorf(codes.FailedPrecondition, "skein: %s: at revision %d, and the load is at %d", what, at, l.Position)
	}
	if l.Set != finish.Set {
		return s.change(ctx, what, finish) // refused before any range ends, with the reason
	}
	if err := s.check(ctx, q, at); err != nil {
		return nil, err
	}
	if err := s.trim(ctx, l.Incarnation); err != nil {
		return nil, loadError(what+": leases without keys", err)
	}
	if err := s.register(ctx, l.Nonce); err != nil {
		return nil, loadError(what+": leases", err)
	}
	err = router.LoadEach(func(key []byte) (*rangeapi.LoadAnswer, error) {
		return s.ranges.LoadEnd(ctx, key, l.Incarnation, at, compacted)
	}, func(*rangeapi.LoadAnswer) error { return nil })
	if err != nil {
		return nil, loadError(what, err)
	}
	return s.change(ctx, what, finish)
}

// check compares what the ranges have with what the loader says.
func (s *loadServer) check(ctx context.Context, q *datapb.LoadFinishRequest, at keyspace.Revision) error {
	var versions, sum uint64
	var last keyspace.Revision
	err := router.LoadEach(func(key []byte) (*rangeapi.LoadAnswer, error) {
		return s.ranges.LoadLook(ctx, key, keyspace.LeaseID(-1<<63))
	}, func(a *rangeapi.LoadAnswer) error {
		versions, sum, last = versions+a.Versions, sum+a.Sum, max(last, a.LastRevision)
		return nil
	})
	switch {
	case err != nil:
		return loadError("compare the load with its source", err)
	case (versions != q.GetVersions() || sum != q.GetSum()) && !mutation.Is(mutation.LoadUnchecked):
		return status.Errorf(codes.FailedPrecondition, "skein: finish the load: the cluster has %d versions of sum %016x, the source %d of sum %016x: something was left out, or the source has changed: abandon the load and begin anew in a new cluster", versions, sum, q.GetVersions(), q.GetSum())
	case last > at:
		return status.Errorf(codes.FailedPrecondition, "skein: finish the load: the cluster has revision %d, and is to finish at %d", last, at)
	}
	return nil
}

// trim has the ranges forget leases that have no key any more.
func (s *loadServer) trim(ctx context.Context, inc keyspace.LeaseIncarnation) error {
	return router.LoadEach(func(key []byte) (*rangeapi.LoadAnswer, error) {
		return s.ranges.LoadTrim(ctx, key, inc)
	}, func(*rangeapi.LoadAnswer) error { return nil })
}

// register has the records of leases list the ranges that have keys of them.
func (s *loadServer) register(ctx context.Context, nonce fsm.LoadNonce) error {
	step := fsm.ChangeLoad{Step: fsm.LoadRegister, Nonce: nonce}
	size := 0
	flush := func() error {
		if len(step.Leases) == 0 {
			return nil
		}
		_, err := s.placement.ChangeLoad(ctx, step)
		step.Leases, size = nil, 0
		return err
	}
	err := router.LoadEach(func(key []byte) (*rangeapi.LoadAnswer, error) {
		from := keyspace.LeaseID(-1 << 63)
		for {
			a, err := s.ranges.LoadLook(ctx, key, from)
			if err != nil {
				return nil, err
			}
			for _, id := range a.Leases {
				step.Leases = append(step.Leases, fsm.LoadedLease{ID: id, Spans: []keyspace.Span{a.Span}})
				if size += 24 + len(a.Span.Start) + len(a.Span.End); size >= registerBytes || len(step.Leases) == fsm.MaxLeaseBatch {
					if err := flush(); err != nil {
						return nil, err
					}
				}
			}
			if !a.More {
				return a, nil
			}
			from = a.Leases[len(a.Leases)-1] + 1
		}
	}, func(*rangeapi.LoadAnswer) error { return nil })
	if err != nil {
		return err
	}
	return flush()
}
