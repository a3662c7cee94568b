package router

import (
	"bytes"
	"cmp"
	"context"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// Loads brings versions to the ranges of a new cluster; *rangeapi.Client does.
type Loads interface {
	// Load sends a request about a load to the replica of its range on a node.
	Load(ctx context.Context, node keyspace.NodeID, q *rangeapi.LoadRequest) (*rangeapi.LoadAnswer, error)
}

// LoadBlock is some versions of a load, in the order of the stage.
type LoadBlock struct {
	Stage rangeapi.LoadStage
	// After is the version before the first one, of a bulk.
	After       rangeapi.LoadCursor
	Incarnation keyspace.LeaseIncarnation
	// Alive are the leases of the versions that live.
	Alive    []keyspace.LeaseID
	Versions []mvcc.Version
}

// loadParallel bounds the ranges that take parts of one block at a time.
const loadParallel = 8

// LoadPut brings a block to its ranges. All of it is on quorums when it returns. It can be repeated, also after an
// error. It is bounded by ctx alone.
func (r *Router) LoadPut(ctx context.Context, b *LoadBlock) error {
	alive := slices.Clone(b.Alive)
	slices.Sort(alive)
	alive = slices.Compact(alive)
	parts, err := r.loadParts(ctx, b)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(loadParallel)
	for _, p := range parts {
		g.Go(func() error { return r.loadPart(ctx, b, p, alive) })
	}
	return g.Wait()
}

// loadParts divides a block by the ranges that are there now: each part has the indexes of its versions.
func (r *Router) loadParts(ctx context.Context, b *LoadBlock) (parts [][]int, err error) {
	byRange := map[keyspace.RangeID]int{}
	var rt *route
	for i := range b.Versions {
		k := b.Versions[i].Key
		if rt == nil || !rt.desc.Span.Contains(k) {
			if rt, err = r.holder(ctx, k); err != nil {
				return nil, err
			}
		}
		n, known := byRange[rt.desc.Range]
		if !known {
			n = len(parts)
			byRange[rt.desc.Range] = n
			parts = append(parts, nil)
		}
		parts[n] = append(parts[n], i)
	}
	return parts, nil
}

// loadPart brings the versions of one range, which may have become several by now.
func (r *Router) loadPart(ctx context.Context, b *LoadBlock, part []int, alive []keyspace.LeaseID) error {
	for len(part) > 0 {
		var sent, rest []int
		_, err := r.load(ctx, b.Versions[part[0]].Key, func(d *keyspace.Descriptor) *rangeapi.LoadRequest {
			q := &rangeapi.LoadRequest{Step: rangeapi.LoadPut, Stage: b.Stage, Incarnation: b.Incarnation}
			sent, rest = sent[:0], nil
			size := 0
			for _, i := range part {
				size += rangeapi.StoredSize(&b.Versions[i])
			}
			q.Versions = make([]byte, 0, min(size, rangeapi.MaxLoadBytes+size/len(part)))
			for n, i := range part {
				if v := &b.Versions[i]; !d.Span.Contains(v.Key) {
					rest = append(rest, i)
					continue
				}
				if len(q.Versions) > rangeapi.MaxLoadBytes {
					rest = append(rest, part[n:]...)
					break
				}
				q.Versions = rangeapi.AppendStoredVersion(q.Versions, &b.Versions[i])
				if l := b.Versions[i].Lease; l != 0 {
					if at, is := slices.BinarySearch(alive, l); is {
						q.Alive = append(q.Alive, alive[at])
					}
				}
				sent = append(sent, i)
			}
			slices.SortFunc(q.Alive, func(x, y keyspace.LeaseID) int { return cmp.Compare(x, y) })
			q.Alive, q.Count = slices.Compact(q.Alive), len(sent)
			if b.Stage == rangeapi.LoadBulk {
				q.After = b.After
				if first := sent[0]; first > 0 {
					q.After = b.Stage.At(&b.Versions[first-1])
				}
			}
			return q
		})
		if err != nil {
			return err
		}
		part = rest
	}
	return nil
}

// LoadLook asks the range that holds the key what it has taken. The leases in the answer begin at lease.
func (r *Router) LoadLook(ctx context.Context, key []byte, lease keyspace.LeaseID) (*rangeapi.LoadAnswer, error) {
	return r.load(ctx, key, func(*keyspace.Descriptor) *rangeapi.LoadRequest {
		return &rangeapi.LoadRequest{Step: rangeapi.LoadLook, Lease: lease}
	})
}

// LoadTrim has the range that holds the key forget the leases of which it has no key any more.
func (r *Router) LoadTrim(ctx context.Context, key []byte, inc keyspace.LeaseIncarnation) (*rangeapi.LoadAnswer, error) {
	return r.load(ctx, key, func(*keyspace.Descriptor) *rangeapi.LoadRequest {
		return &rangeapi.LoadRequest{Step: rangeapi.LoadTrim, Incarnation: inc}
	})
}

// LoadEnd ends the load of the range that holds the key: the store has the revision, and is compacted up to another.
func (r *Router) LoadEnd(ctx context.Context, key []byte, inc keyspace.LeaseIncarnation, revision, compacted keyspace.Revision) (*rangeapi.LoadAnswer, error) {
	return r.load(ctx, key, func(*keyspace.Descriptor) *rangeapi.LoadRequest {
		return &rangeapi.LoadRequest{Step: rangeapi.LoadEnd, Incarnation: inc, Revision: revision, Compacted: compacted}
	})
}

// load sends a request to the leader of the range that holds the key, until it is answered or fails for good. Any of
// them can be repeated.
func (r *Router) load(ctx context.Context, key []byte, build func(*keyspace.Descriptor) *rangeapi.LoadRequest) (*rangeapi.LoadAnswer, error) {
	var a retryState
	for {
		rt, err := r.holder(ctx, key)
		if err != nil {
			return nil, err
		}
		q := build(&rt.desc)
		q.Range, q.Generation = rt.desc.Range, rt.desc.Generation
		node := a.choose(rt, r.cfg.Self, r.cfg.Alive)
		alive := r.whileAlive(ctx, node)
		answer, err := r.cfg.Loads.Load(alive, node, q)
		alive.End()
		if err == nil {
			if known := rt.leader(); known != node {
				r.cache.setLeader(rt.desc.Range, node, known)
			}
			return answer, nil
		}
		e := kverror.Of(err)
		if ctx.Err() != nil || e.Kind == kverror.Corrupt || e.Retry() != kverror.RetryRouter && e.Fate() != kverror.Unknown {
			return nil, err
		}
		if err := r.learn(ctx, &a, rt, node, e); err != nil {
			return nil, err
		}
	}
}

// LoadEach calls f with what each range has taken, in the order of keys. ask gets the first key of each.
func LoadEach(ask func(key []byte) (*rangeapi.LoadAnswer, error), f func(*rangeapi.LoadAnswer) error) error {
	var key []byte
	for {
		a, err := ask(key)
		if err != nil {
			return err
		}
		if bytes.Compare(a.Span.Start, key) > 0 {
			return kverror.New(kverror.Internal, "the range of key %q begins at %q", key, a.Span.Start)
		}
		if err := f(a); err != nil {
			return err
		}
		if key = a.Span.End; len(key) == 0 {
			return nil
		}
	}
}
