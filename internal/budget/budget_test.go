package budget

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestStories: see testdata. Each command runs until everybody waits.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/order", func(t *testing.T, path string) {
		var b *Bytes
		var shares map[string]*Share
		var cancels map[string]context.CancelFunc
		var mu sync.Mutex
		var said strings.Builder
		synctest.Test(t, func(t *testing.T) {
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				said.Reset()
				if d.Cmd == "new" {
					var shareable, reserve int64
					d.ScanArgs(t, "shared", &shareable)
					d.ScanArgs(t, "reserve", &reserve)
					b, shares, cancels = New(shareable, reserve), map[string]*Share{}, map[string]context.CancelFunc{}
					return ""
				}
				for line := range strings.Lines(d.Input) {
					var what, name string
					var bytes int64
					if n, _ := fmt.Sscan(line, &what, &name, &bytes); n < 2 {
						t.Fatalf("%s: %q", d.Pos, line)
					}
					if shares[name] == nil {
						s := b.Share()
						shares[name] = &s
					}
					s := shares[name]
					switch what {
					case "take":
						ctx, cancel := context.WithCancel(t.Context())
						cancels[name] = cancel
						go func() {
							err := s.Take(ctx, bytes)
							mu.Lock()
							defer mu.Unlock()
							fmt.Fprintf(&said, "%s: %d", name, bytes)
							if err != nil {
								fmt.Fprintf(&said, ": %v", err)
							}
							said.WriteString("\n")
						}()
					case "add":
						if err := s.Add(bytes); err != nil {
							fmt.Fprintf(&said, "%s: %v\n", name, err)
						}
					case "try":
						fmt.Fprintf(&said, "%s: %v\n", name, s.Try(bytes))
					case "give":
						s.Give(bytes)
					case "complete":
						s.Complete()
					case "release":
						s.Release()
					case "cancel":
						cancels[name]()
					default:
						t.Fatalf("%s: %q", d.Pos, line)
					}
					synctest.Wait()
				}
				lines := slices.Sorted(strings.Lines(said.String()))
				said.Reset()
				said.WriteString(strings.Join(lines, ""))
				b.mu.Lock()
				defer b.mu.Unlock()
				fmt.Fprintf(&said, "shared %d, reserve %d, %d wait", b.shared, b.reserved, len(b.waiting))
				for name, s := range shares {
					if s == b.leader {
						fmt.Fprintf(&said, ", %s leads", name)
					}
				}
				return said.String() + "\n"
			})
			for _, cancel := range cancels {
				cancel()
			}
		})
	})
}

// TestNobodyWaitsForEver has many answers grow, give up, wait for their clients and end at random,
// in virtual time. Every answer ends, all bytes come back, and the bounds hold.
func TestNobodyWaitsForEver(t *testing.T) {
	for seed := range uint64(200) {
		synctest.Test(t, func(t *testing.T) { randomLoad(t, seed) })
	}
}

func randomLoad(t *testing.T, seed uint64) {
	t.Helper()
	const shareable, reserve, most = 100, 400, 20
	b := New(shareable, reserve)
	var wg sync.WaitGroup
	for i := range 40 {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		wg.Go(func() {
			time.Sleep(time.Duration(rng.IntN(50)) * time.Millisecond)
			s := b.Share()
			defer s.Release()
			wanted := rng.Int64N(most)
			if rng.IntN(4) == 0 {
				wanted = rng.Int64N(reserve)
			}
			ctx := t.Context()
			if rng.IntN(5) == 0 { // this client goes away
				c, cancel := context.WithTimeout(ctx, time.Duration(rng.IntN(100))*time.Millisecond)
				defer cancel()
				ctx = c
			}
			for took := int64(0); took < wanted; {
				n := min(1+rng.Int64N(most), wanted-took)
				if err := s.Take(ctx, n); err != nil {
					if ctx.Err() == nil {
						t.Errorf("seed %d: %v", seed, err)
					}
					return
				}
				took += n
				time.Sleep(time.Duration(rng.IntN(3)) * time.Millisecond)
				b.mu.Lock()
				if b.shared > shareable || b.reserved > reserve {
					t.Errorf("seed %d: %d and %d bytes are held", seed, b.shared, b.reserved)
				}
				b.mu.Unlock()
			}
			s.Complete()
			for left := s.Bytes(); left > 0; {
				time.Sleep(time.Duration(rng.IntN(5)) * time.Millisecond)
				n := min(1+rng.Int64N(most), left)
				s.Give(n)
				left -= n
			}
		})
	}
	wg.Wait() // synctest fails on a deadlock
	if b.shared != 0 || b.reserved != 0 || len(b.waiting) != 0 || b.leader != nil {
		t.Errorf("seed %d: in the end %d and %d bytes are held, %d wait, leader %v", seed, b.shared, b.reserved, len(b.waiting), b.leader)
	}
}

// FuzzBytes: whatever is done, the areas hold what the answers hold, and nobody waits without need.
func FuzzBytes(f *testing.F) {
	f.Add([]byte{0, 90, 4, 20, 8, 20, 2, 10, 1, 0})
	f.Add([]byte{0, 200, 1, 200, 2, 200, 3, 5})
	f.Fuzz(func(t *testing.T, ops []byte) {
		b := New(100, 250)
		var shares [4]Share
		var waits [4]*waiter
		complete := [4]bool{}
		for i := range shares {
			shares[i] = b.Share()
		}
		for len(ops) >= 2 {
			i, what, n := ops[0]%4, ops[0]/4%6, int64(ops[1])
			ops = ops[2:]
			s := &shares[i]
			if w := waits[i]; w != nil {
				select {
				case <-w.granted:
					waits[i] = nil
				default:
					if what == 0 && !b.giveUp(w) {
						t.Fatal("it was not granted, and cannot be given up")
					} else if what == 0 {
						waits[i] = nil
					}
					continue
				}
			}
			switch what {
			case 0, 1:
				if complete[i] {
					continue
				}
				w, err := b.take(s, n)
				if (err != nil) != (errors.Is(err, ErrTooLarge) && s.bytes+n > b.reserve) {
					t.Fatal(err)
				}
				waits[i] = w
			case 2:
				s.Give(min(n, s.bytes))
			case 3:
				s.Complete()
				complete[i] = true
			case 4:
				s.Release()
				complete[i] = false
			case 5:
				s.Try(n)
			}
			checkBytes(t, b, shares[:])
		}
	})
}

func checkBytes(t *testing.T, b *Bytes, shares []Share) {
	t.Helper()
	var shared, reserved int64
	for i := range shares {
		if shares[i].inReserve {
			reserved += shares[i].bytes
		} else {
			shared += shares[i].bytes
		}
	}
	if b.shared != shared || b.reserved != reserved || shared > b.shareable || reserved > b.reserve {
		t.Fatalf("%d and %d are held, but the answers hold %d and %d", b.shared, b.reserved, shared, reserved)
	}
	for i, w := range b.waiting {
		if i > 0 && b.waiting[i-1].share.begun > w.share.begun {
			t.Fatal("one that began later waits in front")
		}
		if i == 0 && w.share != b.leader && (b.leader == nil || shared+w.bytes <= b.shareable) {
			t.Fatalf("%d bytes are not granted, of %d only %d are held", w.bytes, b.shareable, shared)
		}
	}
}

// No wake-up is lost between those that give and those that begin to wait.
func TestHammer(t *testing.T) {
	b := New(10, 20)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 2000 {
				s := b.Share()
				for range 1 + i%4 {
					if err := s.Take(t.Context(), 4); err != nil {
						t.Error(err)
					}
				}
				s.Complete()
				s.Release()
			}
		})
	}
	wg.Wait()
	if b.Held() != 0 || b.Waiting() != 0 {
		t.Errorf("%d bytes are held, %d wait", b.Held(), b.Waiting())
	}
}
