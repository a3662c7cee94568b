package mirror

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/mvcc"
)

const (
	// progressEvery is how often a watch asks the source how far it is, stalledAfter how long
	// it may be silent.
	progressEvery = time.Second
	stalledAfter  = 15 * time.Second
	// askTimeout bounds a question to one member.
	askTimeout = 5 * time.Second
)

// errStalled ends a watch that brings nothing, not even an answer to how far it is.
var errStalled = errors.New("the source's watch is silent")

// Etcd is a Source that speaks etcd's API to all its endpoints.
//
// It watches through the generated client and not through clientv3's: that one keeps all that
// its user has not read yet in memory, and joins fragments.
type Etcd struct {
	cfg clientv3.Config
	c   *clientv3.Client
	clk clock.Clock
	// asked counts snapshots, so that the next try asks another member.
	asked atomic.Int64
	// kind is what the source is, 0 as long as it is not known.
	kind atomic.Int32
	// cluster is the id of the source, as Expect or the first answer said; 0 before.
	cluster atomic.Uint64
}

// What a source is.
const (
	kindEtcd int32 = iota + 1
	kindSkein
)

// sparse says whether the source is a Skein: it has a service that etcd has not.
func (e *Etcd) sparse(ctx context.Context) (bool, error) {
	if kind := e.kind.Load(); kind != 0 {
		return kind == kindSkein, nil
	}
	ctx, cancel := clock.WithTimeout(ctx, e.clk, askTimeout)
	defer cancel()
	kind, err := first(ctx, e, func(ctx context.Context, c *clientv3.Client) (int32, error) {
		_, err := datapb.NewLoadClient(c.ActiveConnection()).LoadState(ctx, &datapb.LoadStateRequest{Limit: 1})
		switch status.Code(err) {
		case codes.OK, codes.PermissionDenied, codes.Unauthenticated:
			return kindSkein, nil
		case codes.Unimplemented:
			return kindEtcd, nil
		default:
			return 0, err
		}
	})
	if err != nil {
		return false, fmt.Errorf("ask the source whether it is an etcd or a Skein: %w", err)
	}
	e.kind.Store(kind)
	return kind == kindSkein, nil
}

// NewEtcd connects to the endpoints of cfg. The caller closes the Source.
func NewEtcd(cfg clientv3.Config, clk clock.Clock) (*Etcd, error) {
	if cfg.MaxCallRecvMsgSize == 0 {
		cfg.MaxCallRecvMsgSize = diff.MaxMessageBytes
	}
	e := &Etcd{clk: clk}
	cfg.DialOptions = append(slices.Clip(cfg.DialOptions), e.Own())
	c, err := clientv3.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to the source at %q: %w", cfg.Endpoints, err)
	}
	e.cfg, e.c = cfg, c
	return e, nil
}

// Own is the option of clients that take answers of the source only. At an address of a member that is gone, one of another cluster
// may listen.
func (e *Etcd) Own() grpc.DialOption {
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, q, r any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if err := next(ctx, method, q, r, cc, opts...); err != nil {
			return err
		}
		if r, ok := r.(interface {
			GetHeader() *etcdserverpb.ResponseHeader
		}); ok {
			return e.own(r.GetHeader())
		}
		return nil
	})
}

// own is the error of an answer that is not the source's.
func (e *Etcd) own(h *etcdserverpb.ResponseHeader) error {
	cluster := h.GetClusterId()
	if cluster == 0 {
		return nil // it does not say
	}
	e.cluster.CompareAndSwap(0, cluster)
	if known := e.cluster.Load(); known != cluster {
		return elsewhere(cluster, known)
	}
	return nil
}

// elsewhere is the error of an answer of another cluster. It ends the mirror, and it can go on later.
func elsewhere(cluster, source uint64) error {
	return fmt.Errorf("a member of cluster %x answers for the source, which is cluster %x: leave its address out of --source-endpoints", cluster, source)
}

// Expect implements Source.
func (e *Etcd) Expect(cluster uint64) { e.cluster.Store(cluster) }

var _ Source = (*Etcd)(nil)

// Data reads the source's keys and leases.
func (e *Etcd) Data() diff.Reader { return data{diff.NewEndpoint(e.c), e} }

// data reads a source.
type data struct {
	*diff.Endpoint
	e *Etcd
}

// Leases implements diff.Reader. A member of etcd lists the leases that it knows itself, also where it lags or is cut off.
// So one is asked that has just answered a linearizable read: it knows all that were granted before.
func (d data) Leases(ctx context.Context) ([]keyspace.LeaseID, error) {
	return first(ctx, d.e, func(ctx context.Context, c *clientv3.Client) ([]keyspace.LeaseID, error) {
		return diff.NewEndpoint(c).Leases(ctx)
	})
}

// first asks all members of the source at once that answer a linearizable read, and returns the first answer: the source's clients may
// be waiting, and a member that is silent keeps them for no moment.
func first[T any](within context.Context, e *Etcd, ask func(context.Context, *clientv3.Client) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(within)
	defer cancel()
	type answer struct {
		what T
		err  error
	}
	answers := make(chan answer)
	for _, endpoint := range e.cfg.Endpoints {
		go func() {
			what, err := askMember(ctx, e, endpoint, ask)
			answers <- answer{what, err}
		}()
	}
	var first *answer
	var last answer
	for range e.cfg.Endpoints {
		if last = <-answers; last.err == nil && first == nil {
			first = &answer{what: last.what}
			cancel()
		}
	}
	if first == nil && errors.Is(context.Cause(within), context.DeadlineExceeded) {
		// By the error of a client that was still getting its token nobody would see that it is worth another try.
		return last.what, fmt.Errorf("%w: %w", context.DeadlineExceeded, last.err)
	}
	if first == nil {
		return last.what, last.err
	}
	return first.what, nil
}

// askMember asks one member.
func askMember[T any](ctx context.Context, e *Etcd, endpoint string, ask func(context.Context, *clientv3.Client) (T, error)) (T, error) {
	var none T
	cfg := e.cfg
	cfg.Endpoints, cfg.Context = []string{endpoint}, ctx
	c, err := clientv3.New(cfg)
	if err != nil {
		return none, fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	defer c.Close()
	if _, _, err := e.nowBy(ctx, c); err != nil {
		return none, fmt.Errorf("%s: %w", endpoint, err)
	}
	return ask(ctx, c)
}

// Close closes the connections.
func (e *Etcd) Close() error { return e.c.Close() }

// Now implements Source.
func (e *Etcd) Now(ctx context.Context) (cluster uint64, revision keyspace.Revision, err error) {
	return e.nowBy(ctx, e.c)
}

// nowBy is Now by a client.
func (e *Etcd) nowBy(ctx context.Context, c *clientv3.Client) (cluster uint64, revision keyspace.Revision, err error) {
	ctx, cancel := clock.WithTimeout(ctx, e.clk, askTimeout)
	defer cancel()
	r, err := c.Get(ctx, "\x00", clientv3.WithKeysOnly())
	if err != nil {
		if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
			err = context.DeadlineExceeded
		}
		return 0, 0, fmt.Errorf("ask the source for its revision: %w", err)
	}
	return r.Header.ClusterId, keyspace.Revision(r.Header.Revision), nil
}

// everything is the request for a watch of all keys.
func everything(from keyspace.Revision) *etcdserverpb.WatchRequest {
	return &etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{CreateRequest: &etcdserverpb.WatchCreateRequest{
		Key: []byte{0}, RangeEnd: []byte{0}, StartRevision: int64(from), ProgressNotify: true, Fragment: true,
	}}}
}

// progress asks for the revision that the watch has come to.
func progress() *etcdserverpb.WatchRequest {
	return &etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_ProgressRequest{ProgressRequest: &etcdserverpb.WatchProgressRequest{}}}
}

// A stream is one watch, with what it receives.
type stream struct {
	etcdserverpb.Watch_WatchClient
	received chan *etcdserverpb.WatchResponse
	ended    chan error // gets one error
}

// open begins a watch. It ends with ctx.
func (e *Etcd) open(ctx context.Context, from keyspace.Revision) (*stream, error) {
	w, err := etcdserverpb.NewWatchClient(e.c.ActiveConnection()).Watch(clientv3.WithRequireLeader(ctx), grpc.MaxCallRecvMsgSize(e.cfg.MaxCallRecvMsgSize))
	if err != nil {
		return nil, err
	}
	if err := w.Send(everything(from)); err != nil {
		return nil, err
	}
	s := &stream{w, make(chan *etcdserverpb.WatchResponse), make(chan error, 1)}
	go func() {
		for {
			r, err := w.Recv()
			if err == nil {
				err = e.own(r.Header)
			}
			if err != nil {
				s.ended <- err
				return
			}
			select {
			case s.received <- r:
			case <-ctx.Done():
				s.ended <- ctx.Err()
				return
			}
		}
	}()
	return s, nil
}

// Watch implements Source.
func (e *Etcd) Watch(ctx context.Context, from keyspace.Revision, out chan<- Part) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	sparse, err := e.sparse(ctx)
	if err != nil {
		return err
	}
	s, err := e.open(ctx, from)
	if err != nil {
		return fmt.Errorf("watch from revision %d: %w", from, err)
	}
	tick := e.clk.NewTimer(progressEvery)
	defer tick.Stop()
	heard := e.clk.Now()
	for {
		select {
		case r := <-s.received:
			if err := canceled(r); err != nil {
				return err
			}
			p := part(r)
			if p.Sparse = sparse; sparse && !r.Created && len(r.Events) == 0 {
				p.Through = p.Revision // that of progress
			}
			select {
			case out <- p:
			case <-ctx.Done():
				return ctx.Err()
			}
			heard = e.clk.Now() // what waited for out was no silence of the source
		case <-tick.C():
			if silent := e.clk.Now().Sub(heard); silent > stalledAfter {
				return fmt.Errorf("%w for %v", errStalled, silent)
			}
			if err := s.Send(progress()); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			tick.Reset(progressEvery)
		case err := <-s.ended:
			return fmt.Errorf("watch from revision %d: %w", from, err)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// canceled is the error of a watch that the source has ended.
func canceled(r *etcdserverpb.WatchResponse) error {
	switch {
	case r.CompactRevision != 0:
		return &CompactedError{keyspace.Revision(r.CompactRevision)}
	case r.Canceled:
		for _, known := range []error{rpctypes.ErrNoLeader, rpctypes.ErrInvalidAuthToken} {
			// The reason is the text of a gRPC error, or only its description.
			if strings.Contains(r.CancelReason, rpctypes.ErrorDesc(known)) {
				return known
			}
		}
		return fmt.Errorf("the source has ended the watch: %s", r.CancelReason)
	}
	return nil
}

// part is an answer of a watch in our words.
func part(r *etcdserverpb.WatchResponse) Part {
	p := Part{Cluster: r.Header.GetClusterId(), Revision: keyspace.Revision(r.Header.GetRevision()), More: r.Fragment, Events: make([]mvcc.Version, len(r.Events))}
	for i, e := range r.Events {
		p.Events[i] = mvcc.Version{Key: e.Kv.Key, Mod: keyspace.Revision(e.Kv.ModRevision)}
		if v := &p.Events[i]; e.Type == mvccpb.Event_DELETE {
			v.Tombstone = true
		} else {
			v.Create, v.Version = keyspace.Revision(e.Kv.CreateRevision), e.Kv.Version
			v.Lease, v.Value = keyspace.LeaseID(e.Kv.Lease), e.Kv.Value
		}
	}
	return p
}

// Compacted implements Source. A read at the first revision is refused if anything is compacted, and a
// watch from there says up to where. Without a compaction such a watch would have the source read all of
// its history, while its clients wait for the cut-over.
func (e *Etcd) Compacted(ctx context.Context) (keyspace.Revision, error) {
	ctx, cancel := clock.WithTimeout(ctx, e.clk, askTimeout)
	defer cancel()
	_, err := e.c.Get(ctx, "\x00", clientv3.WithKeysOnly(), clientv3.WithRev(1))
	switch {
	case err == nil:
		return 0, nil
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		return 0, fmt.Errorf("ask the source for its compacted revision: %w", context.DeadlineExceeded)
	case !errors.Is(err, rpctypes.ErrCompacted):
		return 0, fmt.Errorf("ask the source for its compacted revision: %w", err)
	}
	s, err := e.open(ctx, 1)
	if err != nil {
		return 0, fmt.Errorf("ask the source for its compacted revision: %w", err)
	}
	for {
		select {
		case r := <-s.received:
			if err := canceled(r); err != nil {
				if c := (*CompactedError)(nil); errors.As(err, &c) {
					return c.Compacted, nil
				}
				return 0, fmt.Errorf("ask the source for its compacted revision: %w", err)
			}
		case err := <-s.ended:
			return 0, fmt.Errorf("ask the source for its compacted revision: %w", err)
		}
	}
}

// member is an endpoint that may give a snapshot.
type member struct {
	endpoint string
	leads    bool
}

// Snapshot implements Source. It asks first a member that does not lead, if one
// is far enough, and another one the next time.
func (e *Etcd) Snapshot(ctx context.Context, atLeast keyspace.Revision, w io.Writer) error {
	cluster, _, err := e.Now(ctx)
	if err != nil {
		return err
	}
	able := e.able(ctx, cluster, atLeast)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if len(able) == 0 {
		return fmt.Errorf("revision %d: %w", atLeast, ErrLagging)
	}
	slices.SortStableFunc(able, func(a, b member) int {
		switch {
		case a.leads == b.leads:
			return 0
		case a.leads:
			return 1
		}
		return -1
	})
	turn := int(e.asked.Add(1)-1) % len(able)
	return e.snapshotOf(ctx, able[turn].endpoint, w)
}

// able asks all members at once, and returns those of the cluster that have a revision.
func (e *Etcd) able(ctx context.Context, cluster uint64, atLeast keyspace.Revision) []member {
	ctx, cancel := clock.WithTimeout(ctx, e.clk, askTimeout)
	defer cancel()
	answers := make([]*clientv3.StatusResponse, len(e.cfg.Endpoints))
	var wg sync.WaitGroup
	for i, endpoint := range e.cfg.Endpoints {
		wg.Go(func() {
			if s, err := e.c.Status(ctx, endpoint); err == nil {
				answers[i] = s
			}
		})
	}
	wg.Wait()
	var able []member
	for i, s := range answers {
		if s != nil && s.Header.ClusterId == cluster && keyspace.Revision(s.Header.Revision) >= atLeast {
			able = append(able, member{e.cfg.Endpoints[i], s.Leader == s.Header.MemberId})
		}
	}
	return able
}

// snapshotOf copies the database of one member.
func (e *Etcd) snapshotOf(ctx context.Context, endpoint string, w io.Writer) error {
	cfg := e.cfg
	cfg.Endpoints = []string{endpoint}
	c, err := clientv3.New(cfg)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", endpoint, err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := c.Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("snapshot of %s: %w", endpoint, err)
	}
	defer r.Close()
	if _, err := io.Copy(w, r); err != nil {
		return fmt.Errorf("snapshot of %s: %w", endpoint, err)
	}
	return nil
}
