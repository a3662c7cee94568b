package shard

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/rangeapi"
)

// splitRig is a rig whose ranges are split by themselves by small bounds.
func splitRig(t *testing.T, maxBytes, load int64) *rig {
	t.Helper()
	r := newShardRig(t, 5, lan)
	r.limits.RangeMaxBytes, r.limits.RangeSplitLoad = maxBytes, load
	r.startAll()
	r.leader(1)
	return r
}

// ranges returns what the leaders say of all ranges, in the order of their spans.
func (r *rig) ranges() (all []RangeMeasure) {
	for _, n := range r.nodes {
		for _, m := range n.node.Load().Measures() {
			if m.Leads {
				all = append(all, m)
			}
		}
	}
	return all
}

// load sends so many puts a second for a while, to the keys that key names.
func (r *rig) load(perSecond int, during time.Duration, key func(i int) string) {
	r.t.Helper()
	var wg sync.WaitGroup
	pause := time.Second / time.Duration(perSecond)
	for i := range int(during / pause) {
		k := key(i)
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			if _, err := r.do(ctx, k, &rangeapi.Request{Op: &pb.PutRequest{Key: []byte(k), Value: []byte("v")}}); err != nil {
				r.t.Errorf("put %s: %v", k, err)
			}
		})
		time.Sleep(pause)
	}
	wg.Wait()
}

// left is how often leaders found a range that should be split and left it, by reason.
func (r *rig) left(reason string) (times float64) {
	for _, n := range r.nodes {
		var m dto.Metric
		if err := n.node.Load().metrics.load.Unsplit.WithLabelValues(reason).Write(&m); err != nil {
			r.t.Fatal(err)
		}
		times += m.GetCounter().GetValue()
	}
	return times
}

// A range with more load than its bound is split where the load divides, once it has
// lasted; the halves have less, and are left as they are.
func TestSplitsByLoad(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := splitRig(t, -1, 9)
		rng := rand.New(rand.NewPCG(1, 1))
		key := func(int) string { return fmt.Sprintf("k%02d", rng.IntN(100)) }
		r.load(12, 25*time.Second, key)
		if n := len(r.ranges()); n != 1 {
			t.Errorf("%d ranges before the load has lasted for half a minute", n)
		}
		r.load(12, 90*time.Second, key)
		all := r.ranges()
		if len(all) != 2 {
			t.Fatalf("%d ranges after two minutes of load", len(all))
		}
		for _, m := range all {
			if m.Load() < 2 || m.Load() > 9 {
				t.Errorf("range %s has %.1f requests a second", m.Descriptor.Span, m.Load())
			}
		}
		r.load(12, time.Minute, key)
		if n := len(r.ranges()); n != 2 {
			t.Errorf("%d ranges in the end", n)
		}
		time.Sleep(40 * time.Second)
		for _, m := range r.ranges() {
			if m.Load() != 0 {
				t.Errorf("range %s at rest has %.3f requests a second", m.Descriptor.Span, m.Load())
			}
		}
		r.agree()
		r.stopAll()
	})
}

// Load that no split would divide is left: one key has most of it, or it moves on along
// the keys. The range says why.
func TestLoadThatDoesNotDivide(t *testing.T) {
	for name, c := range map[string]struct {
		key   func(i int) string
		words string
	}{
		"hot-key": {func(i int) string { return fmt.Sprintf("k%02d", i%10*(i%3/2)) }, "one key has most of it"},
		"tail":    {func(i int) string { return fmt.Sprintf("k%06d", i) }, "it moves along the keys"},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				r := splitRig(t, -1, 4)
				r.load(5, 100*time.Second, c.key)
				all := r.ranges()
				if len(all) != 1 {
					t.Fatalf("%d ranges", len(all))
				}
				if !strings.Contains(all[0].Unsplit, c.words) {
					t.Errorf("it says %q", all[0].Unsplit)
				}
				if st := r.leader(1).node.Load().Replica(1).Show(); st.Load == nil || st.Load.Unsplit != all[0].Unsplit || st.Load.WritesPerSecond < 4 {
					t.Errorf("shown is %+v", st.Load)
				}
				if n := r.left(name); n != 1 {
					t.Errorf("counted %v times", n)
				}
				r.stopAll()
			})
		})
	}
}

// write puts values of so many random bytes.
func (r *rig) write(n, size int, key func(i int) string) {
	r.t.Helper()
	rng := rand.New(rand.NewPCG(9, 9))
	for i := range n {
		v := make([]byte, size)
		for k := range v {
			v[k] = byte(rng.Uint32())
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		if _, err := r.do(ctx, key(i), &rangeapi.Request{Op: &pb.PutRequest{Key: []byte(key(i)), Value: v}}); err != nil {
			r.t.Fatalf("put %s: %v", key(i), err)
		}
		cancel()
	}
}

// A range that has grown beyond its bound is split in the middle of its bytes, its halves
// again while they are too large, and then no more.
func TestSplitsBySize(t *testing.T) {
	virtually(t, func(t *testing.T) {
		const most = 256 << 10
		r := splitRig(t, most, -1)
		r.write(64, 16<<10, func(i int) string { return fmt.Sprintf("k%04d", i*37%64) })
		time.Sleep(time.Minute)
		all := r.ranges()
		if len(all) < 4 || len(all) > 8 {
			t.Errorf("%d ranges for four times the bound", len(all))
		}
		for _, m := range all {
			if m.Bytes > most || m.Bytes < most/4 {
				t.Errorf("range %s has %d bytes", m.Descriptor.Span, m.Bytes)
			}
		}
		time.Sleep(2 * time.Minute)
		if n := len(r.ranges()); n != len(all) {
			t.Errorf("%d ranges, and %d some minutes later", len(all), n)
		}
		r.agree()
		r.stopAll()
	})
}

// A range of which one key has nearly all bytes cannot be split: it is left, says so, and
// is tried again.
func TestOneKeyTooLarge(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := splitRig(t, 256<<10, -1)
		r.write(32, 16<<10, func(int) string { return "k" })
		for begin := time.Now(); r.left("one-key") == 0; time.Sleep(time.Second) {
			if time.Since(begin) > 5*time.Minute {
				t.Fatal("no leader has tried to split it")
			}
		}
		all := r.ranges()
		if len(all) != 1 || !strings.Contains(all[0].Unsplit, "one key has most of it") || r.left("one-key") != 1 {
			t.Errorf("%d ranges, %q, counted %v", len(all), all[0].Unsplit, r.left("one-key"))
		}
		// Other keys make it divisible.
		r.write(32, 16<<10, func(i int) string { return fmt.Sprintf("x%03d", i) })
		time.Sleep(3 * time.Minute)
		if n := len(r.ranges()); n < 2 {
			t.Errorf("%d ranges when it could be divided", n)
		}
		r.stopAll()
	})
}

// A split in the middle by command takes the range's bytes as they are.
func TestSplitMiddle(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := splitRig(t, -1, -1)
		r.write(64, 2<<10, func(i int) string { return fmt.Sprintf("k%02d", i) })
		l := r.leader(1)
		ds, err := r.nodes[int(l.id)%3].node.Load().Admin().Split(context.Background(), l.id, 1, 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		if at := string(ds[1].Span.Start); at < "k24" || at > "k40" {
			t.Errorf("split at %q", at)
		}
		r.leader(ds[1].Range)
		r.stopAll()
	})
}
