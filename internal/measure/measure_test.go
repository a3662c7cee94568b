package measure

import "testing"

var sink []byte

func TestExcess(t *testing.T) {
	const size = 4 << 20
	if got := Excess(100, func() { sink = make([]byte, size) }); got < size {
		t.Errorf("%d bytes allocated for a claim of %d", got, size)
	}
	if got := Excess(size, func() { sink = make([]byte, size) }); got != 0 {
		t.Errorf("%d bytes allocated for %d that came", got, size)
	}
	runs := 0
	if got := Excess(0, func() {
		if runs++; runs == 1 {
			sink = make([]byte, size)
		}
	}); got != 0 || runs != 2 {
		t.Errorf("%d bytes after %d runs", got, runs)
	}
}

func TestCPU(t *testing.T) {
	start := CPU()
	for n := 0; CPU() == start; n++ {
		sink = append(sink[:0], byte(n))
	}
}
