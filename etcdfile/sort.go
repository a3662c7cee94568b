package etcdfile

import (
	"bytes"
	"cmp"
	"container/heap"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

const (
	// DefaultRunBytes is the memory in which versions are sorted before they go to a file.
	DefaultRunBytes = 128 << 20
	// minRunBytes is what two blocks take.
	minRunBytes = 2 << 20
	// entryBytes is what the index of a sorter takes for a write, while it grows too.
	entryBytes = 64

	// ctxEvery is after how many records a context is looked at.
	ctxEvery = 1024

	blockBytes = 1 << 20
	// maxBlockedBytes bounds what lies in a block with others.
	maxBlockedBytes = blockBytes / 8

	runBufferBytes = 1 << 20
	minBufferBytes = 16 << 10
)

// SorterOptions say how a Sorter sorts.
type SorterOptions struct {
	Order Order
	// TempDir is the directory of the temporary file. Empty is the system's. What fits into
	// RunBytes makes no file.
	TempDir string
	// RunBytes bounds the memory while versions are added; a larger key or value passes
	// through in addition. Afterwards less is in use. 0 is DefaultRunBytes; less than 2 MiB
	// counts as 2 MiB.
	RunBytes int64
	// Compacted drops the earlier writes of versions at or below it, as etcd's compaction does.
	Compacted keyspace.Revision
}

// Sorter sorts versions outside of memory: Add all, then Next until io.EOF, then Close. It is
// used by one goroutine.
type Sorter struct {
	o SorterOptions
	// blocks hold the writes of the run that is being collected, large those that would waste
	// much of a block, and index says where. The first used blocks have some.
	blocks, large [][]byte
	used          int
	index         []entry
	// bytes is the memory of the run.
	bytes int64

	file   *runFile // nil: all is in memory
	merge  *merge   // since the first Next
	v      mvcc.Version
	closed bool
}

// entry is a write in memory, without pointers, of which the garbage collector would have
// to follow millions.
type entry struct {
	mod keyspace.Revision
	sub uint32
	// block is one of blocks, or -1-block one of large.
	block int32
	at    uint32
	bytes uint32
}

// NewSorter returns an empty sorter.
func NewSorter(o SorterOptions) *Sorter {
	if o.Order != ByKey && o.Order != ByRevision {
		panic(fmt.Sprintf("etcdfile: order %d", o.Order))
	}
	if o.RunBytes == 0 {
		o.RunBytes = DefaultRunBytes
	}
	o.RunBytes = max(o.RunBytes, minRunBytes)
	return &Sorter{o: o}
}

// Add adds a version and its earlier writes. It keeps nothing that v refers to.
func (s *Sorter) Add(v *mvcc.Version) error {
	if s.merge != nil || s.closed {
		panic(fmt.Sprintf("etcdfile: version of key %q is added behind the end", v.Key))
	}
	for w := v; w != nil; w = w.Earlier {
		if w != v && w.Mod <= s.o.Compacted {
			break
		}
		if err := s.add(w); err != nil {
			return err
		}
	}
	return nil
}

func (s *Sorter) add(w *mvcc.Version) error {
	if len(w.Key) > maxSortedBytes || len(w.Value) > maxSortedBytes {
		return fmt.Errorf("sort: key of %d bytes with a value of %d bytes, and neither may have more than %d", len(w.Key), len(w.Value), maxSortedBytes)
	}
	need := len(w.Key) + len(w.Value) + 6*binary.MaxVarintLen64
	if s.bytes+int64(need)+entryBytes > s.o.RunBytes && len(s.index) > 0 {
		if err := s.spill(); err != nil {
			return err
		}
	}
	block, i := s.room(need)
	at := len(*block)
	*block = appendWrite(*block, w)
	s.index = append(s.index, entry{mod: w.Mod, sub: w.Sub, block: i, at: uint32(at), bytes: uint32(len(*block) - at)})
	s.bytes += entryBytes
	return nil
}

// room returns a block with so much room, and its number in an entry.
func (s *Sorter) room(need int) (block *[]byte, i int32) {
	if need > maxBlockedBytes {
		s.large = append(s.large, make([]byte, 0, need))
		s.bytes += int64(need)
		return &s.large[len(s.large)-1], int32(-len(s.large))
	}
	if s.used == 0 || cap(s.blocks[s.used-1])-len(s.blocks[s.used-1]) < need {
		if s.used == len(s.blocks) {
			s.blocks = append(s.blocks, make([]byte, 0, blockBytes))
		}
		s.used++
		s.bytes += blockBytes
	}
	return &s.blocks[s.used-1], int32(s.used - 1)
}

// data returns a write in memory.
func (s *Sorter) data(e *entry) []byte {
	block := s.large
	i := -1 - e.block
	if e.block >= 0 {
		block, i = s.blocks, e.block
	}
	return block[i][e.at : uint64(e.at)+uint64(e.bytes)]
}

func (s *Sorter) place(e *entry) place {
	b := s.data(e)
	n, head := binary.Uvarint(b)
	return place{key: b[head : head+int(n)], mod: e.mod, sub: e.sub}
}

func (s *Sorter) sort() {
	slices.SortFunc(s.index, func(a, b entry) int {
		if s.o.Order == ByRevision && a.mod != b.mod {
			return cmp.Compare(a.mod, b.mod)
		}
		left, right := s.place(&a), s.place(&b)
		return s.o.Order.compare(&left, &right)
	})
}

// spill writes what is collected as a run.
func (s *Sorter) spill() error {
	if s.file == nil {
		var err error
		if s.file, err = createRuns(s.o.TempDir); err != nil {
			return err
		}
	}
	s.sort()
	err := s.file.add(func(yield func([]byte) bool) {
		for i := range s.index {
			if !yield(s.data(&s.index[i])) {
				return
			}
		}
	})
	for i := range s.blocks {
		s.blocks[i] = s.blocks[i][:0]
	}
	s.large, s.index, s.used, s.bytes = nil, s.index[:0], 0, 0
	return err
}

// Next returns the next version, valid until the next call; io.EOF is the end. By key a
// version has its earlier writes. By revision each write is a version of its own, without
// Earlier. Two writes of a key that are one operation of one revision are an error.
func (s *Sorter) Next() (*mvcc.Version, error) {
	if s.closed {
		panic("etcdfile: a version is asked of a closed sorter")
	}
	if s.merge == nil {
		if err := s.begin(); err != nil {
			return nil, err
		}
	}
	if s.merge.Len() == 0 {
		return nil, io.EOF
	}
	s.v.Earlier = nil
	if err := s.merge.take(&s.v); err != nil {
		return nil, err
	}
	for last := &s.v; s.merge.same(&s.v); {
		top := s.merge.sources[0]
		if top.sub == last.Sub {
			return nil, fmt.Errorf("%w: key %q has two writes at revision %d, operation %d", ErrCorrupt, s.v.Key, s.v.Mod, last.Sub)
		}
		if s.o.Order == ByRevision {
			break
		}
		w := new(mvcc.Version)
		if err := s.merge.take(w); err != nil {
			return nil, err
		}
		last.Earlier, last = w, w
	}
	return &s.v, nil
}

// begin ends the adding.
func (s *Sorter) begin() error {
	s.merge = &merge{order: s.o.Order}
	if s.file == nil {
		s.sort()
		m := &memoryRun{Sorter: s}
		src := &source{in: m}
		for i := range s.index {
			src.left += int64(s.index[i].bytes)
		}
		return s.merge.add(src)
	}
	if err := s.spill(); err != nil {
		return err
	}
	s.blocks, s.index = nil, nil // the merge has room for its buffers
	buffer := int(min(max(s.o.RunBytes/int64(4*len(s.file.runs)), minBufferBytes), runBufferBytes))
	for _, r := range s.file.runs {
		if err := s.merge.add(s.file.source(r, buffer)); err != nil {
			return err
		}
	}
	return nil
}

// TempBytes is the size of the temporary file.
func (s *Sorter) TempBytes() int64 {
	if s.file == nil {
		return 0
	}
	return s.file.end
}

// Close frees memory and the temporary file.
func (s *Sorter) Close() {
	if !s.closed && s.file != nil {
		s.file.f.Close()
	}
	s.blocks, s.large, s.index, s.merge, s.closed = nil, nil, nil, nil, true
}

// memoryRun reads a sorter's only run.
type memoryRun struct {
	*Sorter
	next int
	rest []byte
}

func (m *memoryRun) fill() error {
	for len(m.rest) == 0 {
		if m.next == len(m.index) {
			return io.EOF
		}
		m.rest = m.data(&m.index[m.next])
		m.next++
	}
	return nil
}

func (m *memoryRun) ReadByte() (byte, error) {
	if err := m.fill(); err != nil {
		return 0, err
	}
	c := m.rest[0]
	m.rest = m.rest[1:]
	return c, nil
}

func (m *memoryRun) Read(b []byte) (int, error) {
	if err := m.fill(); err != nil {
		return 0, err
	}
	n := copy(b, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

// merge is a heap of runs by their next writes.
type merge struct {
	order   Order
	sources []*source
}

func (m *merge) Len() int { return len(m.sources) }
func (m *merge) Less(i, j int) bool {
	return m.order.compare(&m.sources[i].place, &m.sources[j].place) < 0
}
func (m *merge) Swap(i, j int) { m.sources[i], m.sources[j] = m.sources[j], m.sources[i] }
func (m *merge) Push(x any)    { m.sources = append(m.sources, x.(*source)) } //nolint:forcetypeassert // only add pushes
func (m *merge) Pop() any {
	last := m.sources[len(m.sources)-1]
	m.sources = m.sources[:len(m.sources)-1]
	return last
}

func (m *merge) add(s *source) error {
	switch err := s.next(); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	heap.Push(m, s)
	return nil
}

// take moves the next write to v, whose Key and Value are reused.
func (m *merge) take(v *mvcc.Version) error {
	top := m.sources[0]
	key, value := append(v.Key[:0], top.key...), v.Value
	value, err := top.value(value[:0])
	if err != nil {
		return err
	}
	*v = top.v
	v.Key, v.Value = key, value
	switch err := top.next(); {
	case errors.Is(err, io.EOF):
		heap.Pop(m)
	case err != nil:
		return err
	default:
		heap.Fix(m, 0)
	}
	return nil
}

// same says whether the next write is one of v's key and revision.
func (m *merge) same(v *mvcc.Version) bool {
	return len(m.sources) > 0 && m.sources[0].mod == v.Mod && bytes.Equal(m.sources[0].key, v.Key)
}
