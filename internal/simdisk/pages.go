package simdisk

import "encoding/binary"

// pageSize is the block of a disk: a crash keeps or loses one of what was not synced.
const pageSize = 4096

// page is a block of a file. A page that is synced or shared with another disk never
// changes again: a write replaces it by a copy.
type page [pageSize]byte

// contents are the bytes of a file. A nil page holds zeros: a log may reserve its segments
// by writing zeros, and that costs nothing.
type contents struct {
	size  int64
	pages []*page
	// own says which pages no sync and no clone has seen yet.
	own []bool
}

// write changes the bytes from off on, and returns which pages became own ones.
func (c *contents) write(p []byte, off int64) (fresh []int) {
	end := off + int64(len(p))
	for need := int((end + pageSize - 1) / pageSize); len(c.pages) < need; {
		c.pages = append(c.pages, nil)
		c.own = append(c.own, false)
	}
	c.size = max(c.size, end)
	for len(p) > 0 {
		i, at := int(off/pageSize), int(off%pageSize)
		n := min(len(p), pageSize-at)
		switch {
		case c.own[i]:
		case c.pages[i] == nil && zeros(p[:n]):
			p, off = p[n:], off+int64(n)
			continue
		default:
			c.pages[i], c.own[i] = copyPage(c.pages[i]), true
			fresh = append(fresh, i)
		}
		move(c.pages[i][at:], p[:n])
		p, off = p[n:], off+int64(n)
	}
	return fresh
}

// read fills p with the bytes from off on, which must not lie behind the end.
func (c *contents) read(p []byte, off int64) (n int) {
	p = p[:min(int64(len(p)), c.size-off)]
	for n < len(p) {
		i, at := int(off/pageSize), int(off%pageSize)
		k := min(len(p)-n, pageSize-at)
		if c.pages[i] == nil {
			clear(p[n : n+k])
		} else {
			move(p[n:n+k], c.pages[i][at:])
		}
		n, off = n+k, off+int64(k)
	}
	return n
}

// The race detector does not instrument the functions below: it would take many times as
// long for the bytes of a disk as the disk does. It still finds a buffer that is used on
// both sides, for a file touches the buffer's first and last byte.

// chunk is what is moved at once: the assignment of an array, unlike the builtin copy,
// calls nothing that is instrumented.
const chunk = 128

// move copies all of src to the beginning of dst, or as much as fits.
//
//go:norace
func move(dst, src []byte) {
	n := min(len(dst), len(src))
	i := 0
	for ; n-i >= chunk; i += chunk {
		*(*[chunk]byte)(dst[i:]) = *(*[chunk]byte)(src[i:])
	}
	for ; i < n; i++ {
		dst[i] = src[i]
	}
}

// zeros compares words, for the comparison of arrays is instrumented here too.
//
//go:norace
func zeros(p []byte) bool {
	for ; len(p) >= 8; p = p[8:] {
		if binary.NativeEndian.Uint64(p) != 0 {
			return false
		}
	}
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

//go:norace
func copyPage(from *page) *page {
	to := new(page)
	if from != nil {
		*to = *from
	}
	return to
}

// given tells the race detector that the disk reads p, filled that it writes it.
//
//go:noinline
func given(p []byte) byte {
	if len(p) == 0 {
		return 0
	}
	return p[0] ^ p[len(p)-1]
}

func filled(p []byte) {
	if len(p) > 0 {
		first, last := p[0], p[len(p)-1]
		p[0], p[len(p)-1] = first, last
	}
}
