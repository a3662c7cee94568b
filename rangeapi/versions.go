package rangeapi

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// VersionsRequest asks a replica for the first versions of a cut through its range, from a place on. The replica
// answers if it has everything that there will ever be of the range up to the cut's revision, and if nothing
// that the cut takes may be removed; HoldEnded says that something may be.
type VersionsRequest struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	Cut        mvcc.Cut
	// From is where the versions begin, End where they end at the latest; empty is the end of all keys. The
	// end of the range ends them too.
	From mvcc.VersionCursor
	End  []byte
	// MaxBytes bounds keys and values of the answer, between 1 and MaxPageBytes. One version always fits.
	MaxBytes int
	// Position is as in a HashRequest.
	Position FeedPosition
}

// VersionsPage is a part of a cut, in the order of keys, and the versions of a key newest first.
type VersionsPage struct {
	// N versions are in Body; see Each.
	N    int64
	Body []byte
	// Next is where the next page begins, nil where the range, or what was asked of it, ends. A page may be
	// empty and have a next one.
	Next *mvcc.VersionCursor
}

// versionsVersion leads the messages of method 27; docs/format/rangeapi.md has the bytes.
const versionsVersion = 1

// Add appends a version to the page. last is the key of the version before, nil for the first one.
func (p *VersionsPage) Add(last []byte, v *mvcc.StoredVersion) {
	if p.N > 0 && string(last) == string(v.Key) {
		p.Body = append(p.Body, 0)
	} else {
		p.Body = wire.AppendBytes(p.Body, v.Key)
	}
	p.Body = wire.AppendBytes(binary.AppendUvarint(p.Body, uint64(v.Mod)), v.Value)
	p.N++
}

// Each calls f with the versions of the page. What f gets is a part of the page. It ends with f's first error.
func (p *VersionsPage) Each(f func(*mvcc.StoredVersion) error) error {
	c := NewReader(p.Body)
	var v mvcc.StoredVersion
	for range p.N {
		if key := c.Bytes(); len(key) > 0 {
			v.Key = key
		}
		v.Mod, v.Value = c.Revision(), c.Bytes()
		switch {
		case !c.OK():
			return fmt.Errorf("rangeapi: versions: %w", c.Err())
		case len(v.Key) == 0 || v.Mod == 0:
			return fmt.Errorf("rangeapi: version %d of key %q", v.Mod, v.Key)
		}
		if err := f(&v); err != nil {
			return err
		}
	}
	if err := c.End(); err != nil {
		return fmt.Errorf("rangeapi: versions: %w", err)
	}
	return nil
}

// Check refuses a request that makes no sense.
func (q *VersionsRequest) Check() error {
	if err := q.Cut.Check(); err != nil {
		return BadRequest("%v", err)
	}
	if q.MaxBytes < 1 || q.MaxBytes > MaxPageBytes || len(q.End) > 0 && string(q.From.Key) >= string(q.End) {
		return BadRequest("versions from %q to %q, %d bytes", q.From.Key, q.End, q.MaxBytes)
	}
	return nil
}

// Encode returns the request's bytes.
func (q *VersionsRequest) Encode() []byte {
	dst := appendRange([]byte{versionsVersion, byte(q.Cut.Select)}, q.Range, q.Generation)
	dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(q.Cut.At)), uint64(q.Cut.After))
	dst = wire.AppendBytes(appendCursor(dst, &q.From), q.End)
	return appendFeedPosition(binary.AppendUvarint(dst, uint64(q.MaxBytes)), q.Position)
}

func appendCursor(dst []byte, c *mvcc.VersionCursor) []byte {
	return binary.AppendUvarint(wire.AppendBytes(dst, c.Key), uint64(c.Below))
}

func (c *Reader) cursor() mvcc.VersionCursor {
	return mvcc.VersionCursor{Key: orNil(c.Bytes()), Below: c.Revision()}
}

// DecodeVersionsRequest decodes what Encode wrote, and checks it. Keys stay parts of b.
func DecodeVersionsRequest(b []byte) (*VersionsRequest, error) {
	c := NewReader(b)
	if v := c.Byte(); c.OK() && v != versionsVersion {
		return nil, fmt.Errorf("rangeapi: version %d of a request for versions, want %d", v, versionsVersion)
	}
	q := &VersionsRequest{}
	q.Cut.Select = mvcc.Selection(c.Byte())
	q.Range, q.Generation = keyspace.RangeID(c.Uvarint()), keyspace.Generation(c.Uvarint())
	q.Cut.At, q.Cut.After, q.From, q.End = c.Revision(), c.Revision(), c.cursor(), orNil(c.Bytes())
	if n := c.Uvarint(); n <= MaxPageBytes {
		q.MaxBytes = int(n)
	}
	q.Position = FeedPosition{c.Uvarint(), c.Uvarint()}
	if err := c.End(); err != nil {
		return nil, fmt.Errorf("rangeapi: request for versions: %w", err)
	}
	return q, q.Check()
}

// AppendVersionsPage appends the binary form of a page, or of the error if it is not nil.
func AppendVersionsPage(dst []byte, p *VersionsPage, failed error) []byte {
	dst = append(dst, versionsVersion)
	if failed != nil {
		return kverror.Append(append(dst, StatusError), kverror.Of(failed))
	}
	dst = append(dst, StatusOK, wire.Flag(p.Next != nil, versionsMore))
	if p.Next != nil {
		dst = appendCursor(dst, p.Next)
	}
	return append(binary.AppendUvarint(dst, uint64(p.N)), p.Body...)
}

// versionsMore says that a page has a next one.
const versionsMore = 1

// versionMinBytes is the least that a version takes in a page.
const versionMinBytes = 3

// DecodeVersionsPage decodes a page, or the replica's error in failed. It does not look into the versions.
func DecodeVersionsPage(b []byte) (p *VersionsPage, failed *kverror.Error, err error) {
	c := NewReader(b)
	if v := c.Byte(); c.OK() && v != versionsVersion {
		return nil, nil, fmt.Errorf("rangeapi: version %d of a page of versions, want %d", v, versionsVersion)
	}
	switch s := c.Byte(); {
	case !c.OK():
		return nil, nil, c.Err()
	case s == StatusError:
		failed, err = kverror.Decode(c.Rest())
		return nil, failed, err
	case s != StatusOK:
		return nil, nil, fmt.Errorf("rangeapi: status %d of a page of versions", s)
	}
	p = &VersionsPage{}
	if c.Flags(versionsMore) != 0 {
		next := c.cursor()
		p.Next = &next
	}
	n := c.Uvarint()
	p.Body = c.Rest()
	if n > uint64(len(p.Body)/versionMinBytes) {
		c.Fail(errors.New("rangeapi: more versions than a page has room for"))
	}
	p.N = int64(n) //nolint:gosec // below the length of the page
	if err := c.Err(); err != nil {
		return nil, nil, err
	}
	return p, nil, nil
}
