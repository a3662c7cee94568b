package eval

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/kverror"
)

// One request alone may read more than all together may; another one waits for it. Small ones hold
// little.
func TestReadBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewReadLimit(1<<20, 64<<10)
		alone := n.Budget(t.Context())
		if err := alone.Take(512 << 10); err != nil {
			t.Error(err)
		}
		if err := alone.Take(100 << 10); err != nil {
			t.Error(err)
		}
		small := make([]Budget, 16)
		for i := range small {
			small[i] = n.Budget(t.Context())
			if err := small[i].Take(100); err != nil {
				t.Errorf("small read %d: %v", i, err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		other := n.Budget(ctx)
		if err := other.Take(100 << 10); !errors.Is(err, kverror.DeadlineExceeded) {
			t.Errorf("beside it: %v", err)
		}
		other.Release()
		worker := n.AtOnce()
		if err := worker.Take(100 << 10); err != nil {
			t.Errorf("a worker beside it: %v", err)
		}
		kept := worker.Keep()
		ended := make(chan error, 1)
		other = n.Budget(t.Context())
		go func() { ended <- other.Take(100 << 10) }()
		synctest.Wait()
		if len(ended) > 0 {
			t.Errorf("it does not wait: %v", <-ended)
		}
		alone.Release()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := small[0].Take(2 << 20); !errors.Is(err, kverror.AnswerTooLarge) || !small[0].Exceeded() {
			t.Errorf("too much: %v", err)
		}
		other.Release()
		for i := range small {
			small[i].Release()
		}
		kept.Release()
		if n.Held() != 0 {
			t.Errorf("%d bytes are held in the end", n.Held())
		}
	})
}
