package measure

import "testing"

var sink []byte

func TestAllocated(t *testing.T) {
	const size = 4 << 20
	if got := Allocated(func() { sink = make([]byte, size) }); got < size || got > size+ClaimLimit(0) {
		t.Errorf("%d bytes allocated, want %d", got, size)
	}
	if got := Allocated(func() {}); got > ClaimLimit(0) {
		t.Errorf("%d bytes allocated by nothing", got)
	}
}

func TestCPU(t *testing.T) {
	start := CPU()
	for n := 0; CPU() == start; n++ {
		sink = append(sink[:0], byte(n))
	}
}
