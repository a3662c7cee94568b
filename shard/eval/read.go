package eval

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// ReadShared is what the Readers of a node share. All fields are required.
type ReadShared struct {
	Cache *VersionCache
	Pages *PageCounts
	// AnswerBytes bounds the keys and values of one answer. ReadByPages beyond it.
	AnswerBytes int64
	// Compacted returns the cluster's compacted revision, -1 before the first compaction.
	Compacted func() keyspace.Revision
	Metrics   *ReadMetrics
}

// ReadMetrics are summed over all Readers of a node.
type ReadMetrics struct {
	// Reads of one key that the version cache answered, and did not. Counts that scanned, and
	// that were remembered.
	CacheHits, CacheMisses prometheus.Counter
	CountScans, PagesKnown prometheus.Counter
}

// NewReadMetrics makes the metrics and registers them, if reg is not nil.
func NewReadMetrics(reg prometheus.Registerer) *ReadMetrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &ReadMetrics{
		CountScans:  counter("skein_shard_count_scans_total", "Counts that scanned."),
		PagesKnown:  counter("skein_shard_count_pages_known_total", "Counts that were remembered."),
		CacheHits:   counter("skein_shard_version_cache_hits_total", "Reads of one key that were answered from memory."),
		CacheMisses: counter("skein_shard_version_cache_misses_total", "Reads of one key that went to the store."),
	}
	if reg != nil {
		reg.MustRegister(m.CountScans, m.PagesKnown, m.CacheHits, m.CacheMisses)
	}
	return m
}

// ReadConfig is what a Reader is made of. All fields are required.
type ReadConfig struct {
	Shared *ReadShared
	Range  keyspace.RangeID
	Store  EngineStore
	// Applied counts the replica's applied batches. It is raised before the record changes.
	Applied *atomic.Uint64
	// Guard guards what the fields below point to: the range's applied record, its count of live
	// keys, what the version cache knows of the range, and whether the replica leads.
	Guard  *sync.Mutex
	Record *command.Record
	Live   *LiveCounts
	Epochs *KeyEpochs
	Leader Leader
}

// Leader says whether a replica leads.
type Leader interface {
	// Leads says so; Guard is held.
	Leads() bool
}

// Reader answers requests that change nothing from the applied state of one replica. Its caller
// sees to it that all changes at or below the revision of a read are applied, and checks
// afterwards that it was the range's to answer. It is safe for concurrent use; no method is called
// with Guard.
type Reader struct {
	shared  *ReadShared
	id      keyspace.RangeID
	store   EngineStore
	applied *atomic.Uint64
	guard   *sync.Mutex
	// Guarded by guard.
	rec    *command.Record
	live   *LiveCounts
	epochs *KeyEpochs
	leader Leader
}

// Init prepares a Reader.
func (r *Reader) Init(c ReadConfig) {
	*r = Reader{
		shared: c.Shared, id: c.Range, store: c.Store, applied: c.Applied,
		guard: c.Guard, rec: c.Record, live: c.Live, epochs: c.Epochs, leader: c.Leader,
	}
}

// Read answers a request that changes nothing at the revision; header is what the answer names as
// the current one. oldest is the lowest explicit revision inside a transaction, 0 for none.
func (r *Reader) Read(
	op proto.Message, header, at keyspace.Revision, budget *Budget,
) (resp proto.Message, oldest keyspace.Revision, err error) {
	switch o := op.(type) {
	case *pb.RangeRequest:
		resp, err := r.readRange(o, at, budget)
		if err != nil {
			return nil, 0, err
		}
		resp.Header = &pb.ResponseHeader{Revision: int64(header)}
		return resp, 0, nil
	case *rangeapi.Page:
		answer, err := r.readPage(o, at, budget)
		if err != nil {
			return nil, 0, err
		}
		answer.Header = &pb.ResponseHeader{Revision: int64(header)}
		return answer, 0, nil
	case *pb.TxnRequest:
		return r.readTxn(o, header, budget)
	}
	return nil, 0, rangeapi.BadRequest("%T is no read", op)
}

// readTxn evaluates a transaction that can write in no branch as a read at rev.
func (r *Reader) readTxn(
	t *pb.TxnRequest, rev keyspace.Revision, budget *Budget,
) (resp proto.Message, oldest keyspace.Revision, err error) {
	var none sync.Mutex
	r.guard.Lock()
	compacted := r.rec.CompactedIn(r.shared.Compacted())
	r.guard.Unlock()
	var e Evaluation
	e.Reset(Input{
		Store: r.store, Base: rev, Overlay: NewOverlay(), Guard: &none,
		Current: rev, Compacted: compacted, Budget: budget, KnownCount: r.knownCount,
	})
	err = e.Run(t)
	var future FutureError
	var refused Refusal
	switch {
	case err == nil:
		d := e.Draft()
		d.Settle(rev, false)
		return d.Op, e.Oldest(), nil
	case errors.As(err, &future):
		return nil, 0, kverror.New(kverror.FutureRevision, "revision %d, the last one is %d", future.Revision, rev)
	case errors.As(err, &refused):
		return nil, 0, refused.Err
	}
	return nil, 0, err
}

// readRange runs a RangeRequest at the revision.
func (r *Reader) readRange(o *pb.RangeRequest, at keyspace.Revision, budget *Budget) (*pb.RangeResponse, error) {
	resp := &pb.RangeResponse{}
	s, ok := keyspace.FromEtcd(o.GetKey(), o.GetRangeEnd())
	if !ok {
		return resp, nil
	}
	var err error
	if o.GetCountOnly() {
		resp.Count, err = r.count(s, at)
		return resp, err
	}
	if len(o.GetRangeEnd()) == 0 {
		return resp, r.readKey(o, at, resp)
	}
	got, err := r.collect(o, s, at, budget)
	if err != nil {
		return nil, err
	}
	resp.Count = got.seen
	if !got.whole {
		if resp.Count, err = r.countBehind(s, at, got.kvs); err != nil {
			return nil, err
		}
	}
	total := resp.Count
	rangeapi.Shape(o, resp, got.kvs)
	if !rangeapi.Collects(o) && !rangeapi.Sorts(o) && resp.More {
		r.rememberPage(s, at, resp.Kvs, total)
	}
	return resp, r.fits(resp)
}

// fits refuses an answer that is better read by pages.
func (r *Reader) fits(resp *pb.RangeResponse) error {
	left := r.shared.AnswerBytes
	for _, kv := range resp.Kvs {
		if left -= int64(len(kv.Key) + len(kv.Value)); left < 0 {
			return kverror.New(kverror.ReadByPages, "more than %d bytes", r.shared.AnswerBytes)
		}
	}
	return nil
}

func (r *Reader) readKey(o *pb.RangeRequest, at keyspace.Revision, resp *pb.RangeResponse) error {
	kv, err := r.newestAt(o.GetKey(), at)
	if err != nil || kv == nil {
		return err
	}
	resp.Count = 1
	rangeapi.Shape(o, resp, []*mvccpb.KeyValue{kv})
	return nil
}

// newestAt returns the key as it is at the revision, up to which everything is
// applied; nil if it is not there.
func (r *Reader) newestAt(key []byte, at keyspace.Revision) (*mvccpb.KeyValue, error) {
	r.guard.Lock()
	cached, known := r.shared.Cache.Get(r.epochs.Of(key), key)
	seen := r.applied.Load()
	r.guard.Unlock()
	if known && cached.Mod <= at && (cached.Whole || !cached.Alive) {
		r.shared.Metrics.CacheHits.Inc()
		return cached.KeyValue(key), nil
	}
	r.shared.Metrics.CacheMisses.Inc()
	v, ok, err := r.store.Get(key, at)
	if err != nil || !ok {
		return nil, err
	}
	r.guard.Lock()
	// It is the newest version only if nothing is published above the revision, and
	// nothing was published meanwhile.
	if r.leader.Leads() && at >= r.rec.LastRevision && r.applied.Load() == seen {
		r.shared.Cache.Put(r.epochs.Of(key), key, CachedVersion{
			Alive: true, Version: v.Version, Lease: v.Lease, Mod: v.Mod, Create: v.Create, Value: v.Value,
		})
	}
	r.guard.Unlock()
	return KeyValue(&v), nil
}

// collected are the keys of a scan that pass the filters.
type collected struct {
	kvs []*mvccpb.KeyValue
	// seen are the keys that the scan went past, whole says that these are all.
	seen  int64
	whole bool
}

// collect scans the span until the limit is reached.
func (r *Reader) collect(o *pb.RangeRequest, s keyspace.Span, at keyspace.Revision, budget *Budget) (c collected, err error) {
	limit, tail := rangeapi.ScanLimit(o), tailOf(o)
	needValues := !o.GetKeysOnly() || o.GetSortTarget() == pb.RangeRequest_VALUE
	c.whole = true
	err = r.store.Scan(s, at, !needValues, func(v *mvcc.Version) error {
		if limit > 0 && int64(len(c.kvs)) >= limit {
			c.whole = false
			return ErrStop
		}
		c.seen++
		kv := KeyValue(v)
		if rangeapi.FilteredOut(o, kv) {
			return nil
		}
		if err := budget.Take(kvBytes(kv)); err != nil {
			return err
		}
		kv.Key, kv.Value = bytes.Clone(v.Key), bytes.Clone(v.Value)
		c.kvs = append(c.kvs, kv)
		if tail > 0 && len(c.kvs) >= 2*tail {
			c.keepLast(tail, budget)
		}
		return nil
	})
	switch {
	case err == nil || errors.Is(err, ErrStop):
		return c, nil
	case budget.Exceeded():
		return c, kverror.New(kverror.ReadByPages, "%v", err)
	}
	return c, fmt.Errorf("eval: range %s: read %s at %d: %w", r.id, s, at, err)
}

// kvBytes is about what a key value takes in memory.
func kvBytes(kv *mvccpb.KeyValue) int64 { return int64(len(kv.Key)+len(kv.Value)) + kvOverheadBytes }

// kvOverheadBytes is about what a key value takes beside its key and value.
const kvOverheadBytes = 160

// keepLast forgets all but the last n keys.
func (c *collected) keepLast(n int, budget *Budget) {
	gone := c.kvs[:len(c.kvs)-n]
	for _, kv := range gone {
		budget.GiveBack(kvBytes(kv))
	}
	copy(c.kvs, c.kvs[len(gone):])
	clear(c.kvs[n:])
	c.kvs = c.kvs[:n]
}

// tailOf is how many of the last keys are enough for the answer; 0 is all. One more than
// asked for says whether there are more.
func tailOf(o *pb.RangeRequest) int {
	l := o.GetLimit()
	if o.GetSortTarget() != pb.RangeRequest_KEY || o.GetSortOrder() != pb.RangeRequest_DESCEND || l <= 0 || l > math.MaxInt32 {
		return 0
	}
	return int(l) + 1
}

// countBehind returns the count of the span, of which kvs are the first keys.
func (r *Reader) countBehind(s keyspace.Span, at keyspace.Revision, kvs []*mvccpb.KeyValue) (int64, error) {
	if n, ok := r.knownCount(s, at); ok {
		return n, nil
	}
	rest := keyspace.Span{Start: keyspace.Next(kvs[len(kvs)-1].Key), End: s.End}
	if !keyBelowEnd(rest) {
		return int64(len(kvs)), nil
	}
	n, err := r.count(rest, at)
	return n + int64(len(kvs)), err
}

// keyBelowEnd says whether a span that was cut at its front still holds a key.
func keyBelowEnd(s keyspace.Span) bool {
	return len(s.End) == 0 || bytes.Compare(s.Start, s.End) < 0
}

// rememberPage keeps the count of what is behind a page.
func (r *Reader) rememberPage(s keyspace.Span, at keyspace.Revision, kvs []*mvccpb.KeyValue, total int64) {
	rest := keyspace.Span{Start: keyspace.Next(kvs[len(kvs)-1].Key), End: s.End}
	r.rememberCount(rest, at, total-int64(len(kvs)))
}
