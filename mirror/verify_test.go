package mirror

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/mirror/diff"
)

// paged is a mirror that compares a page each second or so.
type paged struct {
	s *source
	d *target

	mu     sync.Mutex
	status Status // guarded by mu
}

// now is the newest status, at most a second old.
func (p *paged) now() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

// pages runs f beside a mirror of so many pages, once the first of them is compared.
func pages(t *testing.T, n int, f func(p *paged)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := &paged{s: newSource(1), d: newTarget()}
		var puts []op
		for i := range n * diff.PageKeys {
			puts = append(puts, op{fmt.Sprintf("key-%06d", i), "value", 0})
		}
		p.s.txn(puts...)
		o := options(p.s, p.d, simdisk.New())
		o.VerifyBytesPerSecond = diff.PageKeys * (int64(len("key-000000value")) + eventBytes)
		o.Progress = func(st Status) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.status = st
		}
		ctx, kill := context.WithCancel(t.Context())
		defer kill()
		ended := start(ctx, o)
		for p.now().VerifiedPages == 0 {
			time.Sleep(100 * time.Millisecond)
		}
		f(p)
		kill()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestCompactionBetweenPages: pages have one position for a while. If the source compacts it meanwhile, the next page has
// another one at once.
func TestCompactionBetweenPages(t *testing.T) {
	pages(t, 4, func(p *paged) {
		rev := p.s.txn(op{"key-000000", "again", 0})
		time.Sleep(500 * time.Millisecond) // the target has it
		p.s.mu.Lock()
		p.s.compacted = rev
		p.s.mu.Unlock()
		time.Sleep(6 * time.Second) // less than a stretch
		if st := p.now(); st.Passes != 1 {
			t.Errorf("%d passes and %d pages of 4, waits for %q", st.Passes, st.VerifiedPages, st.Waiting)
		}
	})
}

// TestPagesYield: while more than a batch waits for the target, pages come slower, and go on.
func TestPagesYield(t *testing.T) {
	const many = 60
	pages(t, many, func(p *paged) {
		var mu sync.Mutex
		away := true
		p.d.onCall(func(what string) error {
			mu.Lock()
			defer mu.Unlock()
			if away && what == "follow" {
				return rpctypes.ErrNoLeader
			}
			return nil
		})
		for range batchRevisions + 10 {
			p.s.txn(op{"key-000000", "again", 0})
		}
		time.Sleep(3 * time.Second)
		before := p.now().VerifiedPages
		time.Sleep(30 * time.Second)
		if n := p.now().VerifiedPages - before; n < 2 || n > 4 {
			t.Errorf("%d pages in 30 s while the target lags, want about 3", n)
		}
		mu.Lock()
		away = false
		mu.Unlock()
		time.Sleep(20 * time.Second)
		before = p.now().VerifiedPages
		time.Sleep(10 * time.Second)
		if n := p.now().VerifiedPages - before; n < 8 {
			t.Errorf("%d pages in 10 s after that, want about 10", n)
		}
	})
}
