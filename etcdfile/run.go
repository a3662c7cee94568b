package etcdfile

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"math"
	"os"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Order is an order of versions.
type Order byte

const (
	// ByKey is by key, a key's newest version first.
	ByKey Order = iota + 1
	// ByRevision is by revision, then by operation.
	ByRevision
)

// place is where a write stands in both orders.
type place struct {
	key []byte
	mod keyspace.Revision
	sub uint32
}

func (o Order) compare(a, b *place) int {
	if o == ByRevision {
		return cmp.Or(cmp.Compare(a.mod, b.mod), cmp.Compare(a.sub, b.sub), bytes.Compare(a.key, b.key))
	}
	return cmp.Or(bytes.Compare(a.key, b.key), cmp.Compare(b.mod, a.mod), cmp.Compare(b.sub, a.sub))
}

// A write in a run: one version without earlier writes. All numbers are uvarints:
//
//	length of the key, key, revision, operation number * 2 + 1 for a tombstone
//	unless a tombstone: revision - create, version, lease, length of the value, value
//
// Runs live as long as their sorter, so this is no format.
func appendWrite(dst []byte, v *mvcc.Version) []byte {
	dst = append(binary.AppendUvarint(dst, uint64(len(v.Key))), v.Key...)
	dst = binary.AppendUvarint(dst, uint64(v.Mod))
	mark := uint64(v.Sub) << 1
	if v.Tombstone {
		return binary.AppendUvarint(dst, mark|1)
	}
	dst = binary.AppendUvarint(dst, mark)
	dst = binary.AppendUvarint(dst, uint64(v.Mod-v.Create))
	dst = binary.AppendUvarint(dst, uint64(v.Version))
	dst = binary.AppendUvarint(dst, uint64(v.Lease))
	return append(binary.AppendUvarint(dst, uint64(len(v.Value))), v.Value...)
}

// source reads the writes of one sorted run.
type source struct {
	place
	v          mvcc.Version // without Key and Value
	valueBytes uint64
	in         interface {
		io.Reader
		io.ByteReader
	}
	// left are the bytes of the run that are not read yet.
	left int64
	// sum is that of the bytes read, want that of the run. nil for one in memory.
	sum  hash.Hash32
	want uint32
}

// maxSortedBytes bounds a key or a value in a run.
const maxSortedBytes = math.MaxInt32

// next moves to the next write, whose value is read by value. io.EOF is the end.
func (s *source) next() error {
	if s.left == 0 {
		if s.sum != nil && s.sum.Sum32() != s.want {
			return fmt.Errorf("a sorted run has checksum %08x and was written with %08x", s.sum.Sum32(), s.want)
		}
		return io.EOF
	}
	n := s.number()
	if n > maxSortedBytes || int64(n) > s.left {
		return fmt.Errorf("a sorted run has a key of %d bytes before its last %d bytes", n, s.left)
	}
	s.key = grown(s.key, int(n))
	s.read(s.key)
	s.mod = keyspace.Revision(s.number())
	mark := s.number()
	s.sub = uint32(mark >> 1)
	s.v, s.valueBytes = mvcc.Version{Mod: s.mod, Sub: s.sub, Tombstone: mark&1 != 0}, 0
	if !s.v.Tombstone {
		s.v.Create = s.mod - keyspace.Revision(s.number())
		s.v.Version = int64(s.number())
		s.v.Lease = keyspace.LeaseID(s.number())
		s.valueBytes = s.number()
	}
	if s.left < 0 || s.valueBytes > maxSortedBytes || int64(s.valueBytes) > s.left {
		return fmt.Errorf("a sorted run has a value of %d bytes before its last %d bytes", s.valueBytes, s.left)
	}
	return nil
}

// value reads the value of the write into buf.
func (s *source) value(buf []byte) ([]byte, error) {
	buf = grown(buf, int(s.valueBytes))
	s.read(buf)
	if s.left < 0 {
		return nil, errors.New("a sorted run ends within a value")
	}
	return buf, nil
}

// number and read leave left negative when the run cannot be read.
func (s *source) number() uint64 {
	u := uint64(0)
	for shift := 0; shift < 64; shift += 7 {
		c, err := s.in.ReadByte()
		if s.left--; err != nil || s.left < 0 {
			s.left = math.MinInt64 / 2
			return 0
		}
		u |= uint64(c&0x7f) << shift
		if c < 0x80 {
			return u
		}
	}
	s.left = math.MinInt64 / 2
	return 0
}

func (s *source) read(b []byte) {
	n, err := io.ReadFull(s.in, b)
	if s.left -= int64(n); err != nil {
		s.left = math.MinInt64 / 2
	}
}

// runFile is the temporary file with all runs of a sorter. It has no name any more: it
// goes when it is closed, also with its process.
type runFile struct {
	f    *os.File
	dir  string
	end  int64
	runs []runSection
}

type runSection struct {
	at, bytes int64
	sum       uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// createRuns makes the file in a directory, empty for the system's.
func createRuns(dir string) (*runFile, error) {
	if dir == "" {
		dir = os.TempDir()
	}
	f, err := os.CreateTemp(dir, "etcdfile-sort-")
	if err != nil {
		return nil, fmt.Errorf("temporary file for sorting: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, fmt.Errorf("temporary file for sorting: %w", err)
	}
	return &runFile{f: f, dir: dir}, nil
}

// add writes a run.
func (r *runFile) add(writes func(yield func([]byte) bool)) error {
	s := runSection{at: r.end}
	w := bufio.NewWriterSize(io.NewOffsetWriter(r.f, r.end), runBufferBytes)
	var err error
	for b := range writes {
		s.sum = crc32.Update(s.sum, castagnoli, b)
		s.bytes += int64(len(b))
		if _, err = w.Write(b); err != nil {
			break
		}
	}
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return fmt.Errorf("sort: write %d bytes to a temporary file in %s: %w. Sorting needs about as much room there as keys and values have bytes; give a directory with room",
			s.bytes, r.dir, err)
	}
	r.end += s.bytes
	r.runs = append(r.runs, s)
	return nil
}

// source reads a run by a buffer.
func (r *runFile) source(s runSection, bufferBytes int) *source {
	sum := crc32.New(castagnoli)
	in := io.TeeReader(io.NewSectionReader(r.f, s.at, s.bytes), sum)
	return &source{in: bufio.NewReaderSize(in, bufferBytes), left: s.bytes, sum: sum, want: s.sum}
}
