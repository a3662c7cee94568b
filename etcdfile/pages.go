package etcdfile

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"io"
)

// The pages of a bbolt file. A file is read by its pages and not by bbolt itself, which
// maps the file: a rotten page then ends the process (a fault, or a descent without an
// end), a file that is cut meanwhile too, and the whole file counts as memory of the
// process. The format has not changed since bbolt's first release.
const (
	boltMagic   = 0xED0CDAED
	boltVersion = 2

	pageHeaderBytes = 16 // id 8, flags 2, count 2, overflow 4
	elementBytes    = 16 // of a branch: pos 4, key 4, page 8; of a leaf: flags 4, pos 4, key 4, value 4
	metaBytes       = 64
	bucketBytes     = 16 // root 8, sequence 8

	flagBranch = 0x01
	flagLeaf   = 0x02
	flagMeta   = 0x04

	elementBucket = 0x01

	minPageBytes = 512
	maxPageBytes = 64 << 10
	// maxSpanBytes bounds a page with its overflow. bbolt puts up to four large values in one.
	maxSpanBytes = 128 << 20
	maxDepth     = 32
)

// pages reads the tree of one state of a bbolt file, that of its newest valid meta page.
type pages struct {
	r io.ReaderAt
	// size is that of the database, without a hash behind it.
	size      int64
	pageBytes int64
	// high is the first page that the state does not have.
	high uint64
	root uint64
}

// bucket is a bucket's tree: the page of its root, or for a small one its only page.
type bucket struct {
	root   uint64
	inline []byte
}

// openPages finds the newest state.
func openPages(r io.ReaderAt, size int64) (*pages, error) {
	p := &pages{r: r, size: size}
	var newest uint64
	found := false
	try := func(at int64) error {
		buf := make([]byte, pageHeaderBytes+metaBytes)
		if at+int64(len(buf)) > size {
			return nil
		}
		if _, err := r.ReadAt(buf, at); err != nil {
			return fmt.Errorf("read the meta page at byte %d: %w", at, err)
		}
		m, ok := decodeMeta(buf)
		if ok && (!found || m.transaction > newest) {
			found, newest = true, m.transaction
			p.pageBytes, p.high, p.root = int64(m.pageBytes), m.high, m.root
		}
		return nil
	}
	if err := try(0); err != nil {
		return nil, err
	}
	if found {
		if err := try(p.pageBytes); err != nil {
			return nil, err
		}
	} else { // the first one is torn, and with it the size of a page
		for at := int64(minPageBytes); at <= maxPageBytes && !found; at *= 2 {
			if err := try(at); err != nil {
				return nil, err
			}
		}
	}
	if !found {
		return nil, fmt.Errorf("%w: no valid meta page: this is no database of etcd", ErrCorrupt)
	}
	if need := int64(p.high) * p.pageBytes; need > size {
		return nil, fmt.Errorf("%w: it has %d pages of %d bytes, which are %d bytes, and the file has %d: it is cut", ErrCorrupt, p.high, p.pageBytes, need, size)
	}
	return p, nil
}

type meta struct {
	pageBytes               uint32
	root, high, transaction uint64
}

// decodeMeta decodes a meta page. Not ok: it is not valid.
func decodeMeta(page []byte) (meta, bool) {
	b := page[pageHeaderBytes:]
	m := meta{
		pageBytes: binary.LittleEndian.Uint32(b[8:]), root: binary.LittleEndian.Uint64(b[16:]),
		high: binary.LittleEndian.Uint64(b[40:]), transaction: binary.LittleEndian.Uint64(b[48:]),
	}
	ok := binary.LittleEndian.Uint16(page[8:])&flagMeta != 0 &&
		binary.LittleEndian.Uint32(b) == boltMagic && binary.LittleEndian.Uint32(b[4:]) == boltVersion &&
		binary.LittleEndian.Uint64(b[56:]) == metaChecksum(b) &&
		m.pageBytes >= minPageBytes && m.pageBytes <= maxPageBytes && m.pageBytes&(m.pageBytes-1) == 0 &&
		m.high < 1<<47
	return m, ok
}

func metaChecksum(b []byte) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(b[:56])
	return h.Sum64()
}

// page is one page in memory.
type page struct {
	id   uint64
	data []byte // with its overflow
	leaf bool
	n    int
}

// read reads a page into buf, which may grow.
func (p *pages) read(id uint64, buf *[]byte) (page, error) {
	if id < 2 || id >= p.high {
		return page{}, fmt.Errorf("%w: page %d is not one of 2 to %d", ErrCorrupt, id, p.high-1)
	}
	at := int64(id) * p.pageBytes
	*buf = grown(*buf, int(p.pageBytes))
	if _, err := p.r.ReadAt(*buf, at); err != nil {
		return page{}, fmt.Errorf("read page %d: %w", id, err)
	}
	overflow := binary.LittleEndian.Uint32((*buf)[12:])
	if whole := (int64(overflow) + 1) * p.pageBytes; overflow > 0 {
		if uint64(overflow) >= p.high-id || whole > maxSpanBytes {
			return page{}, fmt.Errorf("%w: page %d with %d further pages, of %d pages", ErrCorrupt, id, overflow, p.high)
		}
		*buf = grown(*buf, int(whole))
		if _, err := p.r.ReadAt(*buf, at); err != nil {
			return page{}, fmt.Errorf("read page %d with %d further pages: %w", id, overflow, err)
		}
	}
	if got := binary.LittleEndian.Uint64(*buf); got != id {
		return page{}, fmt.Errorf("%w: page %d says that it is page %d", ErrCorrupt, id, got)
	}
	return parsePage(id, *buf)
}

func grown(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n)
	}
	return b[:n]
}

// parsePage checks a page's header. Its elements are checked as they are read.
func parsePage(id uint64, data []byte) (page, error) {
	if len(data) < pageHeaderBytes {
		return page{}, fmt.Errorf("%w: page %d of %d bytes", ErrCorrupt, id, len(data))
	}
	flags := binary.LittleEndian.Uint16(data[8:])
	pg := page{id: id, data: data, leaf: flags == flagLeaf, n: int(binary.LittleEndian.Uint16(data[10:]))}
	if flags != flagLeaf && flags != flagBranch {
		return page{}, fmt.Errorf("%w: page %d has flags %#x, which are neither a branch's nor a leaf's", ErrCorrupt, id, flags)
	}
	if pageHeaderBytes+pg.n*elementBytes > len(data) {
		return page{}, fmt.Errorf("%w: page %d with %d elements in %d bytes", ErrCorrupt, id, pg.n, len(data))
	}
	if !pg.leaf && pg.n == 0 {
		return page{}, fmt.Errorf("%w: branch page %d without elements", ErrCorrupt, id)
	}
	return pg, nil
}

// element is one of a page: a key with the page below it, or with its value.
type element struct {
	key, value []byte
	child      uint64
	bucket     bool
}

func (pg *page) element(i int) (element, error) {
	at := pageHeaderBytes + i*elementBytes
	b := pg.data[at:]
	word := func(n int) uint64 { return uint64(binary.LittleEndian.Uint32(b[4*n:])) }
	var e element
	pos, keyLen, valueLen := word(0), word(1), uint64(0)
	if pg.leaf {
		e.bucket = word(0)&elementBucket != 0
		pos, keyLen, valueLen = word(1), word(2), word(3)
	} else {
		e.child = binary.LittleEndian.Uint64(b[8:])
	}
	if pos > uint64(len(b)) || pos+keyLen+valueLen > uint64(len(b)) {
		return e, fmt.Errorf("%w: element %d of page %d lies outside of it", ErrCorrupt, i, pg.id)
	}
	e.key, e.value = b[pos:pos+keyLen:pos+keyLen], b[pos+keyLen:pos+keyLen+valueLen:pos+keyLen+valueLen]
	return e, nil
}

// rootBucket is the bucket of buckets.
func (p *pages) rootBucket() bucket { return bucket{root: p.root} }

// bucket finds a bucket by its name.
func (p *pages) bucket(name string) (b bucket, ok bool, err error) {
	err = p.walk(p.rootBucket(), func(e element) error {
		if string(e.key) != name {
			return nil
		}
		if !e.bucket || len(e.value) < bucketBytes {
			return fmt.Errorf("%w: %q is no bucket", ErrCorrupt, name)
		}
		ok = true
		b.root = binary.LittleEndian.Uint64(e.value)
		if b.root == 0 {
			b.inline = bytes.Clone(e.value[bucketBytes:])
		}
		return nil
	})
	if err != nil {
		return bucket{}, false, fmt.Errorf("bucket %q: %w", name, err)
	}
	return b, ok, nil
}

// walk hands all elements of a bucket's leaves to visit in the order of their keys. They
// are valid until visit returns. Keys must ascend and the depth is bounded, so a rotten
// tree ends the walk.
func (p *pages) walk(b bucket, visit func(element) error) error {
	w := walker{pages: p, visit: visit}
	if b.root == 0 {
		pg, err := inlinePage(b.inline)
		if err != nil {
			return err
		}
		return w.leaf(&pg)
	}
	return w.descend(b.root, 0)
}

func inlinePage(data []byte) (page, error) {
	pg, err := parsePage(0, data)
	if err == nil && !pg.leaf {
		err = fmt.Errorf("%w: a bucket without pages has a branch", ErrCorrupt)
	}
	return pg, err
}

type walker struct {
	*pages
	visit func(element) error
	last  []byte
	begun bool
	// buffers has one for each depth.
	buffers [maxDepth][]byte
}

func (w *walker) descend(id uint64, depth int) error {
	if depth == maxDepth {
		return fmt.Errorf("%w: page %d lies %d pages deep", ErrCorrupt, id, depth)
	}
	pg, err := w.read(id, &w.buffers[depth])
	if err != nil {
		return err
	}
	if pg.leaf {
		if pg.n == 0 && depth > 0 {
			return fmt.Errorf("%w: leaf page %d without elements", ErrCorrupt, id)
		}
		return w.leaf(&pg)
	}
	for i := range pg.n {
		e, err := pg.element(i)
		if err != nil {
			return err
		}
		if err := w.descend(e.child, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (w *walker) leaf(pg *page) error {
	for i := range pg.n {
		e, err := pg.element(i)
		if err != nil {
			return err
		}
		if w.begun && bytes.Compare(e.key, w.last) <= 0 {
			return fmt.Errorf("%w: page %d: key %x after key %x", ErrCorrupt, pg.id, e.key, w.last)
		}
		w.begun, w.last = true, append(w.last[:0], e.key...)
		if err := w.visit(e); err != nil {
			return err
		}
	}
	return nil
}

// last returns the last key of a bucket, nil if it is empty.
func (p *pages) last(b bucket) ([]byte, error) {
	var buf []byte
	pg, err := inlinePage(b.inline)
	if b.root != 0 {
		pg, err = p.read(b.root, &buf)
	}
	for depth := 0; ; depth++ {
		switch {
		case err != nil:
			return nil, err
		case depth == maxDepth:
			return nil, fmt.Errorf("%w: page %d lies %d pages deep", ErrCorrupt, pg.id, depth)
		case pg.n == 0:
			return nil, nil
		}
		e, err2 := pg.element(pg.n - 1)
		if err2 != nil {
			return nil, err2
		}
		if pg.leaf {
			return bytes.Clone(e.key), nil
		}
		pg, err = p.read(e.child, &buf)
	}
}
