package shard

import (
	"testing"
	"unsafe"
)

// A call, which every put takes memory for, is as large as it was before there were locks and
// leases: one byte more is the allocator's next class.
func TestWhatAPutTakes(t *testing.T) {
	if n := unsafe.Sizeof(call{}); n > 288 {
		t.Errorf("a call takes %d bytes", n)
	}
}
