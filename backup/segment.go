package backup

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// segmentMagic begins each segment; its last byte is the format's version.
const segmentMagic = "skeinseg\x01"

// maxBlockBytes bounds what a segment's length of a block may claim.
const maxBlockBytes = block.MaxVersionBytes + 1<<20

// segmentWriter uploads a segment while it is written.
type segmentWriter struct {
	seg   Segment
	plain io.WriteCloser
	pipe  *io.PipeWriter
	hash  hash.Hash
	done  chan error
}

// newSegment begins the segment with the name below the folder.
func (r *Repository) newSegment(ctx context.Context, folder, file string) (*segmentWriter, error) {
	pr, pw := io.Pipe()
	w := &segmentWriter{seg: Segment{File: file}, pipe: pw, hash: sha256.New(), done: make(chan error, 1)}
	go func() {
		err := r.target.Put(ctx, folder+file, pr)
		// What is written from now on fails with the upload's error.
		_ = pr.CloseWithError(err)
		w.done <- err
	}()
	var err error
	if w.plain, err = r.keys.seal(writerFunc(w.stored)); err == nil {
		_, err = io.WriteString(w.plain, segmentMagic)
	}
	if err != nil {
		return nil, w.abort(err)
	}
	return w, nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// stored takes bytes as they are in the file.
func (w *segmentWriter) stored(b []byte) (int, error) {
	_, _ = w.hash.Write(b)
	w.seg.Bytes += int64(len(b))
	return w.pipe.Write(b)
}

// add appends a block of versions.
func (w *segmentWriter) add(b []byte, vs []mvcc.Version, sum block.Sum) error {
	if w.seg.First == nil {
		w.seg.First = bytes.Clone(vs[0].Key)
	}
	w.seg.Last = append(w.seg.Last[:0], vs[len(vs)-1].Key...)
	w.seg.Sum.Merge(sum)
	var size [binary.MaxVarintLen64]byte
	if _, err := w.plain.Write(size[:binary.PutUvarint(size[:], uint64(len(b)))]); err != nil {
		return err
	}
	_, err := w.plain.Write(b)
	return err
}

// finish waits until the segment is durable.
func (w *segmentWriter) finish() (*Segment, error) {
	if err := w.plain.Close(); err != nil {
		return nil, w.abort(err)
	}
	_ = w.pipe.Close()
	if err := <-w.done; err != nil {
		return nil, err
	}
	w.seg.SHA256 = hex.EncodeToString(w.hash.Sum(nil))
	return &w.seg, nil
}

// abort ends the upload, and returns err or what is behind it.
func (w *segmentWriter) abort(err error) error {
	_ = w.pipe.CloseWithError(err)
	if putErr := <-w.done; putErr != nil {
		return putErr
	}
	return err
}

// segmentReader reads a segment from its beginning and checks it.
type segmentReader struct {
	seg   *Segment
	limit limits
	body  io.ReadCloser
	hash  hash.Hash
	bytes int64
	raw   io.Reader // the file, on its way into hash
	plain *bufio.Reader
	dec   block.Decoder
	buf   []byte
	sum   block.Sum
	last  []byte // the highest key so far
}

// limits are what versions of a backup must keep to.
type limits struct {
	span            keyspace.Span
	above, revision keyspace.Revision
	onePerKey       bool
}

func (c *Cut) limits(s keyspace.Span) limits {
	return limits{span: s, above: c.Previous, revision: c.Revision, onePerKey: c.Kind == Tombstones}
}

// check refuses versions that do not belong to the backup. last is the key before them.
func (l *limits) check(vs []mvcc.Version, last []byte) error {
	for i := range vs {
		v := &vs[i]
		switch {
		case !l.span.Contains(v.Key):
			return fmt.Errorf("key %.64q is outside of span %s", v.Key, l.span)
		case v.Mod <= l.above || v.Mod > l.revision:
			return fmt.Errorf("key %.64q at revision %d, outside of (%d, %d]", v.Key, v.Mod, l.above, l.revision)
		case l.onePerKey && last != nil && bytes.Equal(last, v.Key):
			return fmt.Errorf("key %.64q at revision %d is there twice", v.Key, v.Mod)
		}
		last = v.Key
	}
	return nil
}

// openSegment opens a segment of a backup with the manifest in the folder.
func (r *Repository) openSegment(ctx context.Context, folder string, seg *Segment, l limits) (*segmentReader, error) {
	body, err := r.target.Get(ctx, folder+seg.File, 0)
	if err != nil {
		return nil, err
	}
	s := &segmentReader{seg: seg, limit: l, body: body, hash: sha256.New()}
	s.raw = io.TeeReader(body, writerFunc(func(b []byte) (int, error) {
		s.bytes += int64(len(b))
		return s.hash.Write(b)
	}))
	plain, err := r.keys.open(s.raw)
	if err != nil {
		_ = body.Close()
		return nil, s.failed(err)
	}
	s.plain = bufio.NewReaderSize(plain, 64<<10)
	magic := make([]byte, len(segmentMagic))
	if _, err := io.ReadFull(s.plain, magic); err != nil || string(magic[:len(magic)-1]) != segmentMagic[:len(magic)-1] {
		_ = body.Close()
		return nil, s.failed(errors.Join(errors.New("not a segment of a backup, or damaged"), err))
	}
	if got, known := magic[len(magic)-1], segmentMagic[len(magic)-1]; got != known {
		_ = body.Close()
		return nil, s.failed(fmt.Errorf("format %d, this program reads format %d: use a newer program", got, known))
	}
	return s, nil
}

func (s *segmentReader) failed(err error) error { return fmt.Errorf("segment %s: %w", s.seg.File, err) }

func (s *segmentReader) close() error { return s.body.Close() }

// next returns the versions of the next block, which are valid until the call after, or
// io.EOF once the whole segment has been found to be what the manifest says.
func (s *segmentReader) next() ([]mvcc.Version, error) {
	size, err := binary.ReadUvarint(s.plain)
	switch {
	case errors.Is(err, io.EOF):
		return nil, s.end()
	case err != nil:
		return nil, s.failed(err)
	case size > maxBlockBytes:
		return nil, s.failed(fmt.Errorf("a block of %d bytes", size))
	}
	if s.buf, err = readBlock(s.plain, s.buf[:0], int(size)); err != nil {
		return nil, s.failed(err)
	}
	first := s.sum.Versions == 0
	vs, err := s.dec.Decode(s.buf)
	if err != nil {
		return nil, s.failed(err)
	}
	if err := s.limit.check(vs, s.last); err != nil {
		return nil, s.failed(err)
	}
	if first && !bytes.Equal(vs[0].Key, s.seg.First) || bytes.Compare(vs[len(vs)-1].Key, s.seg.Last) > 0 {
		return nil, s.failed(fmt.Errorf("keys %.64q to %.64q, noted %.64q to %.64q", vs[0].Key, vs[len(vs)-1].Key, s.seg.First, s.seg.Last))
	}
	for i := range vs {
		s.sum.Add(&vs[i])
	}
	s.last = append(s.last[:0], vs[len(vs)-1].Key...)
	return vs, nil
}

// readBlock appends size bytes to b, and takes memory only for what is there.
func readBlock(r io.Reader, b []byte, size int) ([]byte, error) {
	for size > 0 {
		n := min(size, block.MaxBytes)
		at := len(b)
		b = append(b, make([]byte, n)...)
		if _, err := io.ReadFull(r, b[at:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return b, err
		}
		size -= n
	}
	return b, nil
}

// end compares the whole with the manifest.
func (s *segmentReader) end() error {
	if _, err := io.Copy(io.Discard, s.raw); err != nil {
		return s.failed(err)
	}
	got := hex.EncodeToString(s.hash.Sum(nil))
	switch {
	case s.bytes != s.seg.Bytes || got != s.seg.SHA256:
		return s.failed(fmt.Errorf("%d bytes with SHA-256 %s, the manifest has %d bytes with %s", s.bytes, got, s.seg.Bytes, s.seg.SHA256))
	case s.sum != s.seg.Sum:
		return s.failed(fmt.Errorf("%s, the manifest has %s", s.sum, s.seg.Sum))
	}
	return io.EOF
}
