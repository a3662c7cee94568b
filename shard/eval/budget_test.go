package eval

import (
	"errors"
	"testing"

	"github.com/skeindb/skein/kverror"
)

// One request alone may read more than all together may; small ones hold little.
func TestReadBudget(t *testing.T) {
	n := &ReadLimit{OneBytes: 1 << 20, AllBytes: 64 << 10}
	alone := n.Budget()
	if err := alone.Take(512 << 10); err != nil {
		t.Error(err)
	}
	if err := alone.Take(100 << 10); err != nil {
		t.Error(err)
	}
	other := n.Budget()
	if err := other.Take(1); !errors.Is(err, kverror.TooManyRequests) {
		t.Errorf("beside it: %v", err)
	}
	alone.Release()
	small := make([]Budget, 16)
	for i := range small {
		small[i] = n.Budget()
		if err := small[i].Take(100); err != nil {
			t.Errorf("small read %d: %v", i, err)
		}
	}
	if err := small[0].Take(2 << 20); err == nil || n.Held() > 64<<10 {
		t.Errorf("%v, %d bytes", err, n.Held())
	}
}
