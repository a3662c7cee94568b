package rangeapi

import (
	"encoding/binary"
	"fmt"
	"math"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// pageWireVersion is the first byte of bus method 24's messages; docs/format/rangeapi.md has the
// bytes.
const pageWireVersion = 2

// Flags of a page and of its answer.
const (
	pageWithCount = 1 << iota
	pageForTxn
)

const pageMore = 1

// AppendPageRequest appends the binary form of a Request of a Page.
func AppendPageRequest(dst []byte, q *Request, p *Page) ([]byte, error) {
	dst = append(dst, pageWireVersion, wire.Flag(p.WithCount, pageWithCount)|wire.Flag(q.Txn != nil, pageForTxn))
	dst = appendRange(dst, q.Range, q.Generation)
	dst = binary.AppendUvarint(dst, uint64(q.ReadRevision))
	dst = binary.AppendUvarint(dst, q.ReadTerm)
	if q.Txn != nil {
		dst = AppendName(dst, *q.Txn)
	}
	dst = binary.AppendUvarint(dst, uint64(p.MaxBytes))
	dst, err := marshal.MarshalAppend(dst, p.RangeRequest)
	if err != nil {
		return dst, BadRequest("encode %T: %v", p.RangeRequest, err)
	}
	return dst, nil
}

// DecodePageRequest decodes what AppendPageRequest wrote. Keys may be parts of b.
func DecodePageRequest(b []byte) (*Request, error) {
	c := NewReader(b)
	if v := c.Byte(); c.OK() && v != pageWireVersion {
		return nil, fmt.Errorf("rangeapi: version %d of a page, want %d", v, pageWireVersion)
	}
	f := c.Flags(pageWithCount | pageForTxn)
	q := &Request{Range: keyspace.RangeID(c.Uvarint()), Generation: keyspace.Generation(c.Uvarint()), ReadRevision: c.Revision(), ReadTerm: c.Uvarint()}
	if f&pageForTxn != 0 {
		name := c.Name()
		q.Txn = &name
		if c.OK() && (name.IsZero() || q.ReadRevision == 0) {
			c.Fail(fmt.Errorf("rangeapi: a page at %d for transaction %v", q.ReadRevision, name))
		}
	}
	p := &Page{RangeRequest: &pb.RangeRequest{}, WithCount: f&pageWithCount != 0}
	if n := c.Uvarint(); n <= MaxPageBytes {
		p.MaxBytes = int(n)
	} else {
		c.Fail(fmt.Errorf("rangeapi: a page of %d bytes", n))
	}
	if c.OK() {
		if err := unmarshal.Unmarshal(c.Rest(), p.RangeRequest); err != nil {
			c.Fail(fmt.Errorf("rangeapi: decode %T: %w", p.RangeRequest, err))
		}
	}
	q.Op = p
	return q, c.Err()
}

// pageOverheadBytes bounds the bytes of an answer beside its keys and Next.
const pageOverheadBytes = 3 + 5*binary.MaxVarintLen64

// AppendPageAnswer appends the binary form of the answer to a page, or of the error if it is not
// nil.
func AppendPageAnswer(dst []byte, a *PageAnswer, failed error) []byte {
	dst = append(dst, pageWireVersion)
	if failed != nil {
		return kverror.Append(append(dst, StatusError), kverror.Of(failed))
	}
	dst = append(dst, StatusOK, wire.Flag(a.GetMore(), pageMore))
	dst = binary.AppendUvarint(dst, uint64(a.GetHeader().GetRevision()))
	for _, n := range [...]int64{a.GetCount(), a.N, a.Seen} {
		dst = binary.AppendUvarint(dst, uint64(n))
	}
	return append(wire.AppendBytes(dst, a.Next), a.Keys...)
}

// EncodePage returns the binary form of the answer to a page, and takes over its keys.
func EncodePage(a *PageAnswer) []byte {
	bare := *a
	bare.Keys = nil
	head := AppendPageAnswer(make([]byte, 0, pageOverheadBytes+len(a.Next)), &bare, nil)
	if at := PageHeadroom - len(head); at >= 0 && len(a.Room) == PageHeadroom+len(a.Keys) {
		copy(a.Room[at:], head)
		return a.Room[at:]
	}
	return append(head, a.Keys...)
}

// DecodePageAnswer decodes what AppendPageAnswer wrote: an answer, or the range's error in failed.
// It does not look into the keys.
func DecodePageAnswer(b []byte) (a *PageAnswer, failed *kverror.Error, err error) {
	c := NewReader(b)
	if v := c.Byte(); c.OK() && v != pageWireVersion {
		return nil, nil, fmt.Errorf("rangeapi: version %d of a page's answer, want %d", v, pageWireVersion)
	}
	switch s := c.Byte(); {
	case !c.OK():
		return nil, nil, c.Err()
	case s == StatusError:
		failed, err = kverror.Decode(c.Rest())
		return nil, failed, err
	case s != StatusOK:
		return nil, nil, fmt.Errorf("rangeapi: status %d of a page's answer", s)
	}
	more := c.Flags(pageMore) != 0
	rev := c.Revision()
	a = &PageAnswer{RangeResponse: &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: int64(rev)}, More: more}}
	for _, n := range [...]*int64{&a.Count, &a.N, &a.Seen} {
		v := c.Uvarint()
		if v > math.MaxInt64 {
			c.Fail(fmt.Errorf("rangeapi: %d keys", v))
		}
		*n = int64(v)
	}
	a.Next = orNil(c.Bytes())
	if a.N > a.Seen {
		c.Fail(fmt.Errorf("rangeapi: a page with %d of %d keys", a.N, a.Seen))
	}
	if !c.OK() {
		return nil, nil, c.Err()
	}
	a.Keys = c.Rest()
	return a, nil, nil
}

// txnNameBytes is more than a transaction's name takes.
const txnNameBytes = 8 + 4*binary.MaxVarintLen64
