package eval

import (
	"encoding/binary"
	"testing"
)

// BenchmarkVersionCacheNewKeys looks for keys that are new, and puts them into a full cache of 256 MiB.
func BenchmarkVersionCacheNewKeys(b *testing.B) {
	c := NewVersionCache(256 << 20)
	e := c.begin()
	value, key, n := make([]byte, 256), make([]byte, 40), uint64(0)
	put := func() {
		n++
		binary.BigEndian.PutUint64(key[20:], n*0x9e3779b97f4a7c15)
		if _, ok := c.Get(e, key); ok {
			b.Fatal("a new key is there")
		}
		c.Put(e, key, CachedVersion{Alive: true, Version: 1, Value: value})
	}
	for range 1_000_000 {
		put()
	}
	b.ReportAllocs()
	for b.Loop() {
		put()
	}
}
