package backup

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/keyspace"
)

// Kind says which versions a backup has.
type Kind string

// The kinds.
const (
	// Full has all versions at its revision that the compacted revision leaves.
	Full Kind = "full"
	// Versions has all versions above the previous backup's revision, up to its own. Any
	// revision between can be restored.
	Versions Kind = "versions"
	// Tombstones has of each key that was changed since the previous backup the newest
	// version, tombstones included.
	Tombstones Kind = "tombstones"
)

// A Cut is one state of a cluster, and what its backup says beside the versions.
type Cut struct {
	Kind Kind `json:"kind"`
	// Revision is that of the state. Previous is that of the backup before in the chain, 0
	// for a full one. Compacted is the cluster's compacted revision.
	Revision  keyspace.Revision `json:"revision"`
	Previous  keyspace.Revision `json:"previous,omitempty"`
	Compacted keyspace.Revision `json:"compacted"`
	// Time is when the state was taken.
	Time time.Time `json:"time"`
	// Points say which revision the cluster had at which time, both ascending.
	Points []Point `json:"points,omitempty"`
	Leases []Lease `json:"leases,omitempty"`
	// Users are the cluster's; only a cluster reads them.
	Users []byte `json:"users,omitempty"`
	// Hold is the cluster's name of what keeps the versions of the cut until the backup is finished, 0 for nothing.
	Hold uint64 `json:"hold,omitempty,string"`
}

// A Point is a revision that the cluster had at a time.
type Point struct {
	Time     time.Time         `json:"time"`
	Revision keyspace.Revision `json:"revision"`
}

// A Lease is a lease that was alive at the cut.
type Lease struct {
	ID keyspace.LeaseID `json:"id,string"`
	// TTLSeconds is what was granted, RemainingSeconds what was left of it.
	TTLSeconds       int64 `json:"ttlSeconds"`
	RemainingSeconds int64 `json:"remainingSeconds"`
}

// A Manifest is the whole of a backup but for the versions. It is written last: a backup
// without one does not count.
type Manifest struct {
	Cluster string `json:"cluster"`
	Chain   string `json:"chain"`
	// Number is the backup's place in its chain, from 1.
	Number int `json:"number"`
	Cut
	// PreviousManifest is the SHA-256 of the file of the manifest before, in hexadecimal.
	PreviousManifest string `json:"previousManifest,omitempty"`
	// Spans are those in which the keyspace was read, ascending. Together they are all of it.
	Spans []SpanFiles `json:"spans"`
	// Sum is that of all versions, StoredBytes the size of all segments.
	Sum         block.Sum `json:"sum"`
	StoredBytes int64     `json:"storedBytes"`
	// Finished is when the manifest was written; nothing depends on it.
	Finished time.Time `json:"finished,omitzero"`
}

// SpanFiles are the segments of a span, in the order of keys.
type SpanFiles struct {
	Start    []byte    `json:"start,omitempty"`
	End      []byte    `json:"end,omitempty"`
	Segments []Segment `json:"segments,omitempty"`
}

// A Segment is a file of versions. The versions of a key are never in two of one backup.
type Segment struct {
	// File is its name below the folder of the backup.
	File string `json:"file"`
	// Bytes and SHA256 (in hexadecimal) are those of the file as it is stored.
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
	// First and Last are the lowest and the highest key.
	First []byte    `json:"first"`
	Last  []byte    `json:"last"`
	Sum   block.Sum `json:"sum"`
}

// A record says that a segment of an unfinished backup is whole. It lets another run go on.
type record struct {
	// Span and Index say where in the manifest the segment will be.
	Span  int `json:"span"`
	Index int `json:"index"`
	// Segment is nil if the span has nothing more.
	Segment *Segment `json:"segment,omitempty"`
	// Done says that it is the span's last record.
	Done bool `json:"done"`
}

const (
	// format is the version of manifests, drafts and records.
	format = 1
	// maxManifestBytes bounds what is read as a manifest: enough for 16 TiB of segments.
	maxManifestBytes = 128 << 20
)

// ErrForeign says that a file is not of the backup in whose place it lies.
var ErrForeign = errors.New("the file belongs to another backup")

// envelope is around the body of a manifest, a draft or a record.
type envelope struct {
	Format int `json:"format"`
	// SHA256 is that of the bytes of the body, in hexadecimal.
	SHA256 string          `json:"sha256"`
	Body   json.RawMessage `json:"body"`
}

// encode returns the bytes of a manifest, a draft or a record.
func encode(v any) []byte {
	body, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		panic(fmt.Sprintf("backup: encode %T: %v", v, err))
	}
	return enclose(body)
}

// enclose returns the bytes of a file with the body.
func enclose(body []byte) []byte {
	return fmt.Appendf(nil, "{\"format\": %d, \"sha256\": \"%x\", \"body\":\n%s}\n", format, sha256.Sum256(body), body)
}

// decode reads what encode wrote.
func decode(r io.Reader, v any) error {
	b, err := io.ReadAll(io.LimitReader(r, maxManifestBytes+1))
	if err != nil {
		return err
	}
	if len(b) > maxManifestBytes {
		return fmt.Errorf("more than %d bytes", maxManifestBytes)
	}
	var e envelope
	if err := json.Unmarshal(b, &e); err != nil {
		return fmt.Errorf("not a file of a backup, or damaged: %w", err)
	}
	switch {
	case e.Format < 1:
		return errors.New("not a file of a backup: no format")
	case e.Format > format: // it may look otherwise
		return fmt.Errorf("format %d, this program reads format %d: use a newer program", e.Format, format)
	}
	if got := sha256.Sum256(e.Body); hex.EncodeToString(got[:]) != e.SHA256 {
		return fmt.Errorf("damaged: its body has SHA-256 %x, noted %s", got, e.SHA256)
	}
	d := json.NewDecoder(bytes.NewReader(e.Body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("not what is wanted here: %w", err)
	}
	return nil
}

// ClusterID returns the id of the cluster.
func (m *Manifest) ClusterID() (keyspace.ClusterID, error) {
	id, err := strconv.ParseUint(m.Cluster, 16, 64)
	if err != nil || keyspace.ClusterID(id).String() != m.Cluster {
		return 0, fmt.Errorf("cluster %q is not an id", m.Cluster)
	}
	return keyspace.ClusterID(id), nil
}

// check refuses a manifest that contradicts itself.
func (m *Manifest) check() error {
	if _, err := m.ClusterID(); err != nil {
		return err
	}
	if err := m.Cut.check(); err != nil {
		return err
	}
	if m.Number < 1 || (m.Number == 1) != (m.Kind == Full) || (m.PreviousManifest == "") != (m.Kind == Full) {
		return fmt.Errorf("number %d, kind %s, previous manifest %q", m.Number, m.Kind, m.PreviousManifest)
	}
	var sum block.Sum
	var stored int64
	if len(m.Spans) == 0 || len(m.Spans[0].Start) != 0 {
		return errors.New("the spans do not begin with the first key")
	}
	for i := range m.Spans {
		s := &m.Spans[i]
		last := i == len(m.Spans)-1
		if last != (len(s.End) == 0) || !last && (!bytes.Equal(s.End, m.Spans[i+1].Start) || bytes.Compare(s.Start, s.End) >= 0) {
			return fmt.Errorf("span %d, %s, is not followed by the next", i, s.span())
		}
		if err := s.check(); err != nil {
			return fmt.Errorf("span %d, %s: %w", i, s.span(), err)
		}
		for j := range s.Segments {
			sum.Merge(s.Segments[j].Sum)
			stored += s.Segments[j].Bytes
		}
	}
	if sum != m.Sum || stored != m.StoredBytes {
		return fmt.Errorf("the segments have %s in %d bytes, noted %s in %d bytes", sum, stored, m.Sum, m.StoredBytes)
	}
	return nil
}

func (s *SpanFiles) span() keyspace.Span { return keyspace.Span{Start: s.Start, End: s.End} }

func (s *SpanFiles) check() error {
	for j := range s.Segments {
		g := &s.Segments[j]
		switch {
		case g.File == "" || g.Bytes <= 0 || len(g.SHA256) != 64 || g.Sum.Versions <= 0:
			return fmt.Errorf("segment %q of %d bytes, %d versions, SHA-256 %q", g.File, g.Bytes, g.Sum.Versions, g.SHA256)
		case !s.span().Contains(g.First) || !s.span().Contains(g.Last) || bytes.Compare(g.First, g.Last) > 0:
			return fmt.Errorf("segment %s: keys %.64q to %.64q", g.File, g.First, g.Last)
		case j > 0 && bytes.Compare(s.Segments[j-1].Last, g.First) >= 0:
			return fmt.Errorf("segment %s begins with %.64q, the one before ends with %.64q", g.File, g.First, s.Segments[j-1].Last)
		}
	}
	return nil
}

func (c *Cut) check() error {
	switch {
	case c.Kind != Full && c.Kind != Versions && c.Kind != Tombstones:
		return fmt.Errorf("unknown kind %q", c.Kind)
	case c.Revision < 1 || c.Revision > keyspace.MaxRevision || c.Compacted < 0 || c.Compacted > c.Revision:
		return fmt.Errorf("revision %d, compacted %d", c.Revision, c.Compacted)
	case (c.Kind == Full) != (c.Previous == 0) || c.Previous < 0 || c.Previous > c.Revision:
		return fmt.Errorf("a backup %s at revision %d on one at revision %d", c.Kind, c.Revision, c.Previous)
	}
	for i, p := range c.Points {
		if p.Revision < 1 || p.Revision > c.Revision || i > 0 && (p.Revision < c.Points[i-1].Revision || p.Time.Before(c.Points[i-1].Time)) {
			return fmt.Errorf("point %d, revision %d at %s", i, p.Revision, p.Time.Format(time.RFC3339))
		}
	}
	return nil
}
