package dataapi

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rights"
)

// LoaderOptions are what a Loader is made of.
type LoaderOptions struct {
	// Conn reaches a node of the cluster, or several.
	Conn grpc.ClientConnInterface
	// Clock is the system's if it is nil.
	Clock clock.Clock
	// Number names the load, never 0: whoever goes on with a load that was begun gives the same.
	Number uint64
	// Source says for people where the versions come from, in at most 512 bytes.
	Source string
	// Patience is how long a call is repeated while the cluster cannot answer. Default 2 minutes.
	Patience time.Duration
}

// Loader loads a new cluster. Bulk may be called by many goroutines, everything else by one.
type Loader struct {
	o      LoaderOptions
	client datapb.LoadClient

	mu sync.Mutex
	// Guarded by mu. alive are the leases that were granted and not revoked. versions and sum are those of all
	// versions that the source had, whether they were sent or the cluster had them already.
	alive         map[keyspace.LeaseID]bool
	versions, sum uint64
	last          keyspace.Revision
	position      keyspace.Revision

	// set names the users and roles that were brought, checked says that requests are checked by them.
	set     fsm.AccessSet
	checked bool
}

// Bounds of a call with versions. A node takes messages of 2 MiB by its defaults.
const (
	blockBytes    = 768 << 10
	blockVersions = 8192
	// pauses between attempts.
	retryPauseMin = 20 * time.Millisecond
	retryPauseMax = time.Second
)

// NewLoader returns a loader. Begin comes first.
func NewLoader(o LoaderOptions) *Loader {
	if o.Clock == nil {
		o.Clock = clock.System()
	}
	if o.Patience == 0 {
		o.Patience = 2 * time.Minute
	}
	return &Loader{o: o, client: datapb.NewLoadClient(o.Conn), alive: map[keyspace.LeaseID]bool{}}
}

// call makes a call, again while the cluster cannot answer: each may be repeated.
func call[Q, A any](ctx context.Context, l *Loader, f func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) (A, error) {
	began, pause := l.o.Clock.Now(), retryPauseMin
	for {
		a, err := f(ctx, q)
		switch c := status.Code(err); {
		case c != codes.Unavailable && c != codes.DeadlineExceeded && c != codes.Unknown && c != codes.Canceled:
			return a, err
		case ctx.Err() != nil || l.o.Clock.Now().Sub(began) > l.o.Patience:
			return a, err
		}
		if clock.Sleep(ctx, l.o.Clock, pause) != nil {
			return a, err
		}
		pause = min(2*pause, retryPauseMax)
	}
}

// Begin begins the load, or goes on with it. It returns how far the load is.
func (l *Loader) Begin(ctx context.Context) (*datapb.LoadStatus, error) {
	st, err := call(ctx, l, l.client.LoadBegin, &datapb.LoadBeginRequest{Loader: l.o.Number, Source: l.o.Source})
	if err == nil {
		l.position = keyspace.Revision(st.GetPosition())
	}
	return st, servesUsers(err)
}

// servesUsers explains why a cluster asks who it is whose load it does not know to be under way.
func servesUsers(err error) error {
	if errors.Is(rpctypes.Error(err), rpctypes.ErrUserEmpty) {
		return fmt.Errorf("the cluster checks users and is not being loaded: if this load had finished before, nothing is left to do; to see that, give a user who has the role root: %w", err)
	}
	return err
}

// Split has a range begin at each of the keys.
func (l *Loader) Split(ctx context.Context, keys [][]byte) error {
	for _, k := range keys {
		if _, err := call(ctx, l, l.client.LoadSplit, &datapb.LoadSplitRequest{Loader: l.o.Number, Key: k}); err != nil {
			return err
		}
	}
	return nil
}

// LoadLease is a lease of the source. TTL is in seconds.
type LoadLease struct {
	ID  keyspace.LeaseID
	TTL int64
}

// Leases grants leases, before their versions are sent. Revoked ones attach nothing from now on; no key may be
// attached to them any more.
func (l *Loader) Leases(ctx context.Context, granted []LoadLease, revoked []keyspace.LeaseID) error {
	for len(granted)+len(revoked) > 0 {
		q := &datapb.LoadLeasesRequest{Loader: l.o.Number}
		n := min(len(granted), fsm.MaxLeaseBatch)
		for _, g := range granted[:n] {
			q.Granted = append(q.Granted, &datapb.LoadLease{Id: int64(g.ID), Ttl: g.TTL})
		}
		m := min(len(revoked), fsm.MaxLeaseBatch-n)
		for _, id := range revoked[:m] {
			q.Revoked = append(q.Revoked, int64(id))
		}
		if _, err := call(ctx, l, l.client.LoadLeases, q); err != nil {
			return err
		}
		l.mu.Lock()
		for _, g := range granted[:n] {
			l.alive[g.ID] = true
		}
		for _, id := range revoked[:m] {
			delete(l.alive, id)
		}
		l.mu.Unlock()
		granted, revoked = granted[n:], revoked[m:]
	}
	return nil
}

// Bulk loads versions in the order of keys, the newest version of a key first. What the cluster has already is left out:
// so a load goes on that was interrupted. Several calls at a time load disjoint spans, whose borders are
// borders of ranges (Split). A version that is refused is named in the error.
func (l *Loader) Bulk(ctx context.Context, versions iter.Seq2[*mvcc.Version, error]) error {
	ctx, cancel := context.WithCancel(ctx)
	b := blockWriter{l: l, phase: datapb.LoadPhase_LOAD_BULK}
	defer b.end(cancel)
	var known *datapb.LoadRange // the range of the last version that may be here already
	for v, err := range versions {
		if err != nil {
			return err
		}
		l.count(v)
		if known == nil || len(known.GetEnd()) > 0 && bytes.Compare(v.Key, known.GetEnd()) >= 0 {
			st, err := call(ctx, l, l.client.LoadState, &datapb.LoadStateRequest{From: v.Key, Limit: 1})
			if err != nil {
				return err
			}
			known = st.GetRanges()[0]
		}
		if passed(known.GetCursor(), v) {
			b.skip(v)
			continue
		}
		if err := b.add(ctx, v); err != nil {
			return err
		}
	}
	return b.flush(ctx)
}

// passed says whether a range at the cursor has the version.
func passed(c *datapb.LoadCursor, v *mvcc.Version) bool {
	at := rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: c.GetKey(), Revision: keyspace.Revision(c.GetRevision())}
	return c.GetPhase() > datapb.LoadPhase_LOAD_BULK || at.Passed(v)
}

// Follow brings versions above the position in the order of revisions, operations and keys, and moves the position
// to upTo. Versions above upTo are there and not visible until a later call moves the position to them. The first
// call ends the bulk; its upTo is the revision of the bulk, without versions.
func (l *Loader) Follow(ctx context.Context, upTo keyspace.Revision, versions []mvcc.Version) error {
	if l.position == 0 {
		return l.endBulk(ctx, upTo, versions)
	}
	ctx, cancel := context.WithCancel(ctx)
	b := blockWriter{l: l, phase: datapb.LoadPhase_LOAD_FOLLOW}
	defer b.end(cancel)
	for i := range versions {
		if m := versions[i].Mod; m <= l.position {
			return fmt.Errorf("dataapi: key %q at revision %d follows position %d", versions[i].Key, m, l.position)
		}
		if err := b.add(ctx, &versions[i]); err != nil {
			return err
		}
	}
	if err := b.flush(ctx); err != nil {
		return err
	}
	if upTo > l.position {
		if err := l.advance(ctx, upTo); err != nil {
			return err
		}
	}
	for i := range versions {
		l.count(&versions[i])
	}
	return nil
}

// EndBulk ends the bulk at its revision. A repeat does nothing.
func (l *Loader) EndBulk(ctx context.Context, at keyspace.Revision) error {
	switch {
	case l.position == 0:
		return l.endBulk(ctx, at, nil)
	case l.position == at:
		return nil
	}
	return fmt.Errorf("dataapi: the bulk is to end at revision %d, and the load follows at revision %d", at, l.position)
}

// Position returns the revision up to which the cluster is known to have everything, 0 in bulk.
func (l *Loader) Position() keyspace.Revision { return l.position }

func (l *Loader) endBulk(ctx context.Context, at keyspace.Revision, versions []mvcc.Version) error {
	if len(versions) > 0 {
		return errors.New("dataapi: the bulk has not ended: follow up to its revision first, without versions")
	}
	if l.last > at {
		return fmt.Errorf("dataapi: the bulk is to end at revision %d and has brought revision %d", at, l.last)
	}
	return l.advance(ctx, at)
}

func (l *Loader) advance(ctx context.Context, to keyspace.Revision) error {
	_, err := call(ctx, l, l.client.LoadAdvance, &datapb.LoadAdvanceRequest{Loader: l.o.Number, Phase: datapb.LoadPhase_LOAD_FOLLOW, Position: int64(to)})
	if err == nil {
		l.position = to
	}
	return err
}

// count takes a version of the source into the sum that the cluster must have at the end.
func (l *Loader) count(v *mvcc.Version) {
	var n, sum uint64
	for w := v; w != nil; w = w.Earlier {
		n++
		sum += mvcc.HashWrite(w)
	}
	l.mu.Lock()
	l.versions, l.sum, l.last = l.versions+n, l.sum+sum, max(l.last, v.Mod)
	l.mu.Unlock()
}

// A Sum is what the cluster must have at the end: the number of versions and the sum of their hashes
// (mvcc.HashWrite), with earlier writes of a transaction.
type Sum struct{ Versions, Hashes uint64 }

// Sum returns the sum of what came by this Loader. SetSum replaces it: a Loader that goes on in the follow phase does
// not know what came by others, and whoever has read the source does.
func (l *Loader) Sum() Sum {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Sum{l.versions, l.sum}
}

// SetSum replaces the sum.
func (l *Loader) SetSum(s Sum) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.versions, l.sum = s.Versions, s.Hashes
}

// Access brings the users and roles of the source, nil for none, in the place of those that an earlier call has brought.
// They are checked, if they are at the source, before the cluster serves anybody. Finish demands that those of the last call
// are there. If a node is down that may not know of them, the error names it.
func (l *Loader) Access(ctx context.Context, s *rights.State) error {
	var pieces [][]fsm.AccessRow
	l.set, l.checked = 0, false
	if s != nil {
		pieces = fsm.AccessPieces(s)
		sum := xxhash.New()
		for _, rows := range pieces {
			_, _ = sum.Write(fsm.AppendAccessRows(nil, rows)) // never fails
		}
		l.set, l.checked = max(1, fsm.AccessSet(sum.Sum64())), s.Enabled
	} else {
		pieces = [][]fsm.AccessRow{nil}
	}
	for _, rows := range pieces {
		q := &datapb.LoadAccessRequest{Loader: l.o.Number, Set: uint64(l.set)}
		for _, r := range rows {
			q.Rows = append(q.Rows, &datapb.AccessRow{Key: r.Key, Value: r.Value})
		}
		if _, err := call(ctx, l, l.client.LoadAccess, q); err != nil {
			return err
		}
	}
	return nil
}

// Finish lets the cluster serve from the revision on, compacted up to another one, 0 for none. It fails if the cluster
// has anything else than the sum. One that got half-way pins the load to its revision: ranges that have
// ended take no more versions, and none ends at another revision. Repeat it with the same revisions, and with
// the same leases.
func (l *Loader) Finish(ctx context.Context, revision, compacted keyspace.Revision) error {
	_, err := call(ctx, l, l.client.LoadFinish, &datapb.LoadFinishRequest{
		Loader: l.o.Number, Revision: int64(revision), CompactedRevision: int64(compacted), Versions: l.versions, Sum: l.sum, AccessSet: uint64(l.set),
	})
	if l.checked && errors.Is(rpctypes.Error(err), rpctypes.ErrUserEmpty) {
		return nil // the answer to the call before was lost: while it is loaded the cluster asks its loader for no user
	}
	return err
}

// Abandon ends the load for good: the cluster never serves.
func (l *Loader) Abandon(ctx context.Context) error {
	_, err := call(ctx, l, l.client.LoadAbandon, &datapb.LoadAbandonRequest{Loader: l.o.Number})
	return err
}

// State returns how far the load is, and what each range has taken.
func (l *Loader) State(ctx context.Context) (st *datapb.LoadStatus, ranges []*datapb.LoadRange, err error) {
	var from []byte
	for {
		a, err := call(ctx, l, l.client.LoadState, &datapb.LoadStateRequest{From: from})
		if err != nil {
			return nil, nil, servesUsers(err)
		}
		ranges = append(ranges, a.GetRanges()...)
		if !a.GetMore() {
			return a.GetStatus(), ranges, nil
		}
		if len(a.GetRanges()) == 0 {
			return nil, nil, io.ErrUnexpectedEOF
		}
		from = ranges[len(ranges)-1].GetEnd()
	}
}

// blockWriter gathers versions into calls. One call is under way while the versions of the next are gathered.
type blockWriter struct {
	l     *Loader
	phase datapb.LoadPhase
	body  []byte
	count uint32
	alive map[keyspace.LeaseID]bool
	// after is the version before the first one. lastKey and lastRevision are the last one.
	after        *datapb.LoadCursor
	lastKey      []byte
	lastRevision keyspace.Revision
	// sent gets the outcome of the call under way, nil if there is none. Its versions are in sending.
	sent    chan error
	sending []byte
}

// skip notes a version that the cluster has.
func (b *blockWriter) skip(v *mvcc.Version) { b.noteAfter(v.Key, v.Mod) }

func (b *blockWriter) noteAfter(key []byte, rev keyspace.Revision) {
	b.after = &datapb.LoadCursor{Phase: b.phase, Key: bytes.Clone(key), Revision: int64(rev)}
}

// add takes a version, and sends what was gathered where there is enough.
func (b *blockWriter) add(ctx context.Context, v *mvcc.Version) error {
	if b.count > 0 && (len(b.body)+len(v.Key)+len(v.Value) > blockBytes || b.count == blockVersions) {
		if err := b.send(ctx); err != nil {
			return err
		}
	}
	b.body = rangeapi.AppendStoredVersion(b.body, v)
	b.count++
	if v.Lease != 0 && !b.alive[v.Lease] {
		b.l.mu.Lock()
		alive := b.l.alive[v.Lease]
		b.l.mu.Unlock()
		if alive {
			if b.alive == nil {
				b.alive = map[keyspace.LeaseID]bool{}
			}
			b.alive[v.Lease] = true
		}
	}
	b.lastKey, b.lastRevision = append(b.lastKey[:0], v.Key...), v.Mod
	return nil
}

// send sends what was gathered, once the call before has succeeded. wait tells how it ended.
func (b *blockWriter) send(ctx context.Context) error {
	if err := b.wait(); err != nil || b.count == 0 {
		return err
	}
	q := &datapb.LoadPutRequest{Loader: b.l.o.Number, Phase: b.phase, Position: int64(b.l.position), Count: b.count, Versions: b.body}
	if b.phase == datapb.LoadPhase_LOAD_BULK {
		q.After = b.after
	}
	for id := range b.alive {
		q.Alive = append(q.Alive, int64(id))
	}
	b.noteAfter(b.lastKey, b.lastRevision)
	sent, last := make(chan error, 1), b.after
	go func() {
		_, err := call(ctx, b.l, b.l.client.LoadPut, q)
		sent <- tooLarge(err, len(q.Versions), last)
	}()
	b.sent, b.body, b.sending = sent, b.sending[:0], b.body
	b.count, b.alive = 0, nil
	return nil
}

// tooLarge says what to do about a call with so many bytes of versions that is larger than what nodes take. Where no
// setting helps, nearly all of them are the last version's: one that makes a call so large ends it.
func tooLarge(err error, size int, last *datapb.LoadCursor) error {
	s := status.Convert(err)
	switch {
	case s.Code() != codes.ResourceExhausted || !strings.Contains(s.Message(), "message larger than max"):
		return err
	case size > rangeapi.MaxRequestBytes:
		return fmt.Errorf("no cluster takes key %.200q at revision %d, of about %d bytes: --max-request-bytes is %d at most. %s: %w",
			last.GetKey(), last.GetRevision(), size, rangeapi.MaxRequestBytes, makeSmaller, err)
	}
	return fmt.Errorf("the nodes take no call with %d bytes of versions: raise --max-request-bytes of all to %[1]d, and go on with the same load: %w", size, err)
}

// makeSmaller is what to do about a version that no cluster takes. A file with history has it until it is compacted.
const makeSmaller = "Make the value smaller or delete the key at the source, compact the source, and begin anew with an empty cluster"

// wait waits for the end of the call under way.
func (b *blockWriter) wait() error {
	if b.sent == nil {
		return nil
	}
	err := <-b.sent
	b.sent = nil
	return err
}

// flush sends what was gathered and waits until all is there.
func (b *blockWriter) flush(ctx context.Context) error {
	if err := b.send(ctx); err != nil {
		return err
	}
	return b.wait()
}

// end waits for a call that was begun before something failed. cancel cancels it.
func (b *blockWriter) end(cancel context.CancelFunc) {
	cancel()
	_ = b.wait() // what failed is known
}
