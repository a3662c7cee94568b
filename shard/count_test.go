package shard

import (
	"testing"
	"unsafe"

	"github.com/skeindb/skein/keyspace"
)

// What a node remembers of pages has a bound in bytes, however long the keys are;
// other spans are other pages.
func TestPagesHaveABoundInBytes(t *testing.T) {
	base := pageOf(1, 2, 3, keyspace.Span{Start: []byte("ab"), End: []byte("c")})
	for name, other := range map[string]pageKey{
		"range":      pageOf(2, 2, 3, keyspace.Span{Start: []byte("ab"), End: []byte("c")}),
		"generation": pageOf(1, 3, 3, keyspace.Span{Start: []byte("ab"), End: []byte("c")}),
		"revision":   pageOf(1, 2, 4, keyspace.Span{Start: []byte("ab"), End: []byte("c")}),
		"border":     pageOf(1, 2, 3, keyspace.Span{Start: []byte("a"), End: []byte("bc")}),
		"end":        pageOf(1, 2, 3, keyspace.Span{Start: []byte("ab")}),
	} {
		if other == base {
			t.Errorf("one page for two that differ in their %s", name)
		}
	}
	p := newPages(4)
	long := make([]byte, 3<<19)
	for i := range 10 {
		long[0] = byte(i)
		p.put(pageOf(1, 2, 3, keyspace.Span{Start: long}), int64(i))
	}
	if len(p.counts) != 4 || unsafe.Sizeof(base) > 64 {
		t.Fatalf("%d pages of %d bytes", len(p.counts), unsafe.Sizeof(base))
	}
	if n, ok := p.get(pageOf(1, 2, 3, keyspace.Span{Start: long})); !ok || n != 9 {
		t.Fatalf("the last page has %d, %t", n, ok)
	}
}
