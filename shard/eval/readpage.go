package eval

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// maxPageSeen bounds the keys that a page scans without finding one that passes
// the filters, and so the cost of the page.
const maxPageSeen = 1 << 17

// pageBuffers are what pages are gathered in before their size is known.
var pageBuffers = sync.Pool{New: func() any { return new([]byte) }}

// keptPageBytes is the largest buffer that is kept for the next page.
const keptPageBytes = 2 << 20

// pageScan gathers a page.
type pageScan struct {
	p        *rangeapi.Page
	filtered bool
	buf      []byte
	answer   rangeapi.PageAnswer
	budget   *Budget
	// last is where in buf the last key value begins.
	last int
}

// add takes one key, or ends the scan with ErrStop before it.
func (c *pageScan) add(v *mvcc.Version) error {
	a := &c.answer
	if c.filtered && c.leavesOut(v) {
		if a.Seen >= maxPageSeen {
			a.Next = bytes.Clone(v.Key)
			return ErrStop
		}
		a.Seen++
		return nil
	}
	n := rangeapi.SizeOfKey(v, rangeapi.BareKeys(c.p.RangeRequest))
	limit := c.p.GetLimit()
	if limit > 0 && a.N >= limit || a.N > 0 && len(c.buf)+n > c.p.MaxBytes || c.filtered && a.Seen >= maxPageSeen {
		a.More = true
		a.Next = c.behindLast(v)
		return ErrStop
	}
	if err := c.budget.Take(int64(n)); err != nil {
		return err
	}
	c.last = len(c.buf)
	c.buf = rangeapi.AppendKey(c.buf, v, rangeapi.BareKeys(c.p.RangeRequest))
	a.N++
	a.Seen++
	return nil
}

func (c *pageScan) leavesOut(v *mvcc.Version) bool {
	return rangeapi.FilteredOut(c.p.RangeRequest, &mvccpb.KeyValue{ModRevision: int64(v.Mod), CreateRevision: int64(v.Create)})
}

// behindLast is where the next page begins if this one ends before v: behind its last
// key. A client's next page begins there as well, so that both find the same count.
func (c *pageScan) behindLast(v *mvcc.Version) []byte {
	if c.filtered {
		return bytes.Clone(v.Key)
	}
	kvs, err := rangeapi.DecodeKeys(c.buf[c.last:], 1)
	if err != nil {
		panic(fmt.Sprintf("eval: a key value that was just encoded: %v: %x", err, c.buf[c.last:]))
	}
	return bytes.Clone(keyspace.Next(kvs[0].Key))
}

// readPage answers a page from the store: everything at or below the revision is there.
func (r *Reader) readPage(p *rangeapi.Page, at keyspace.Revision, budget *Budget) (*rangeapi.PageAnswer, error) {
	s, ok := keyspace.FromEtcd(p.GetKey(), p.GetRangeEnd())
	if !ok {
		return &rangeapi.PageAnswer{RangeResponse: &pb.RangeResponse{}}, nil
	}
	scratch := pageBuffers.Get().(*[]byte) //nolint:forcetypeassert // nothing else is put there
	c := pageScan{
		p: p, filtered: rangeapi.Filtered(p.RangeRequest), buf: (*scratch)[:0], budget: budget,
		answer: rangeapi.PageAnswer{RangeResponse: &pb.RangeResponse{}},
	}
	a := &c.answer
	err := r.store.Scan(s, at, p.GetKeysOnly(), c.add)
	a.Room = append(make([]byte, rangeapi.PageHeadroom, rangeapi.PageHeadroom+len(c.buf)), c.buf...)
	a.Keys = a.Room[rangeapi.PageHeadroom:]
	if cap(c.buf) <= keptPageBytes {
		*scratch = c.buf
		pageBuffers.Put(scratch)
	}
	if err != nil && !errors.Is(err, ErrStop) {
		if _, told := errors.AsType[*kverror.Error](err); told {
			return nil, err
		}
		return nil, fmt.Errorf("eval: range %s: read %s at %d: %w", r.id, s, at, err)
	}
	if p.WithCount {
		err = r.countPage(a, s, at)
		return a, err
	}
	return a, nil
}

// countPage fills in how many keys the span has, and remembers what is behind the page.
func (r *Reader) countPage(a *rangeapi.PageAnswer, s keyspace.Span, at keyspace.Revision) error {
	if len(a.Next) == 0 {
		a.Count = a.Seen
		return nil
	}
	rest := keyspace.Span{Start: a.Next, End: s.End}
	if n, known := r.knownCount(s, at); known {
		a.Count = n
		r.rememberCount(rest, at, n-a.Seen)
		return nil
	}
	n, err := r.count(rest, at)
	a.Count = a.Seen + n
	return err
}
