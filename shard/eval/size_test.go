package eval

import (
	"testing"
	"unsafe"
)

// What a put takes memory for is as large as it was before there were locks and leases: one
// byte more is the allocator's next class.
func TestWhatAPutTakes(t *testing.T) {
	if n := unsafe.Sizeof(onePut{}); n > 256 {
		t.Errorf("a put's version and answer take %d bytes", n)
	}
}
