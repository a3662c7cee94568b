package eval

import (
	"testing"
	"unsafe"
)

// A put's version and answer fill the allocator's class of 256 bytes: one byte more costs every
// put the next class.
func TestWhatAPutTakes(t *testing.T) {
	if n := unsafe.Sizeof(onePut{}); n > 256 {
		t.Errorf("a put's version and answer take %d bytes", n)
	}
}
