package node

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/shard"
	"github.com/skeindb/skein/sim/simclock"
)

// heat returns what all nodes have served by a node's word, of keys that begin with h, and the nodes that are missing.
func (r *rig) heat(n *rigNode, since time.Time) (writes, reads uint64, missing []string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	m, err := n.core.Admin().Heat(ctx, &adminpb.HeatRequest{FromUnixSeconds: since.Unix(), Start: []byte("h"), End: []byte("i")})
	if err != nil {
		r.t.Fatal(err)
	}
	for i := range m.GetWrites() {
		writes, reads = writes+m.GetWrites()[i], reads+m.GetReads()[i]
	}
	for _, l := range m.GetMissing() {
		missing = append(missing, l.GetNode())
	}
	return writes, reads, missing
}

// heatLoad puts and reads keys that begin with h, and counts that.
type heatLoad struct {
	r      *rig
	begun  time.Time
	writes uint64
	reads  uint64
}

func (l *heatLoad) some(gateways ...*rigNode) {
	l.r.t.Helper()
	for i := range 60 {
		key := fmt.Sprintf("h%02d", i*7%50)
		n := gateways[i%len(gateways)]
		l.r.mustPut(n, key, "v")
		l.writes++
		if i%3 == 0 {
			req := &pb.RangeRequest{Key: []byte(key), Serializable: i%2 == 0}
			if _, err := n.core.KV().Range(l.r.t.Context(), req); err != nil {
				l.r.t.Fatal(err)
			}
			l.reads++
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// check compares what the nodes count with what was done.
func (l *heatLoad) check(what string, gateways ...*rigNode) {
	l.r.t.Helper()
	time.Sleep(2 * time.Second)
	for _, n := range gateways {
		writes, reads, missing := l.r.heat(n, l.begun)
		if writes != l.writes || reads != l.reads || len(missing) > 0 {
			l.r.t.Errorf("%s: by node %s, without %v, %d writes and %d reads, and %d and %d were made", what, n.id, missing, writes, reads, l.writes, l.reads)
		}
	}
}

// Whatever happens to the ranges and to the clocks, each write and each read counts once, those of followers too, and all nodes
// say the same.
func TestHeatCountsOnce(t *testing.T) {
	clocks := map[keyspace.NodeID]*simclock.Clock{}
	bubble(t, 4, nil, func(o *Options) {
		clocks[o.Self] = simclock.New(0, 1)
		o.Clock = clocks[o.Self]
	}, func(r *rig) {
		r.pause()
		l := &heatLoad{r: r, begun: clocks[1].Wall().Add(-10 * time.Minute)}
		a := r.nodes[0].core.Admin()
		step := func(what string, f func() error) {
			r.t.Helper()
			if err := f(); err != nil {
				r.t.Fatalf("%s: %v", what, err)
			}
			l.some(r.nodes...)
			l.check(what, r.nodes...)
		}
		stepClocks := func(d time.Duration) {
			for _, c := range clocks {
				c.StepWall(d)
			}
		}
		step("at first", func() error { return nil })
		step("split", func() error {
			_, _, err := a.SplitRange(r.t.Context(), []byte("h25"))
			return err
		})
		step("split again", func() error {
			_, _, err := a.SplitRange(r.t.Context(), []byte("h4"))
			return err
		})
		step("another leader", func() error { return a.TransferLeader(r.t.Context(), 1, "n2") })
		step("moved", func() error {
			from, to := r.nodes[2], r.nodes[3]
			if slices.ContainsFunc(to.summaries(), func(s shard.Summary) bool { return s.Descriptor.Range == 1 }) {
				r.t.Fatal("the fourth node holds the range")
			}
			r.mustMove(1, from, to)
			r.wait(time.Minute, "the range has moved", func() bool { return len(to.summaries()) == 1 })
			return nil
		})
		step("merged", func() error {
			_, err := a.MergeRange(r.t.Context(), 1)
			r.wait(time.Minute, "two ranges are one", func() bool { return len(r.borders()) == 1 })
			return err
		})
		step("the clocks are set ahead", func() error {
			stepClocks(3 * time.Minute)
			return nil
		})
		stepClocks(-3 * time.Minute)
		l.some(r.nodes...)
		time.Sleep(3 * time.Minute) // what was served meanwhile lies in the future until then
		step("the clocks are set back", func() error { return nil })
		step("a node stops and starts", func() error {
			r.stop(r.nodes[1])
			r.start(r.nodes[1])
			r.wait(time.Minute, "it is heard", func() bool {
				_, _, missing := r.heat(r.nodes[0], l.begun)
				return len(missing) == 0
			})
			return nil
		})
	})
}

// Without a quorum a node answers what it has, and names those that do not.
func TestHeatWithoutAQuorum(t *testing.T) {
	bubble(t, 3, borders(3), nil, func(r *rig) {
		l := &heatLoad{r: r, begun: time.Now().Add(-time.Minute)}
		l.some(r.nodes...)
		l.check("all live", r.nodes...)
		r.crash(r.nodes[1:]...)
		time.Sleep(10 * time.Second)
		asked := time.Now()
		writes, _, missing := r.heat(r.nodes[0], l.begun)
		if took := time.Since(asked); took > time.Second {
			r.t.Errorf("it took %v", took)
		}
		if !slices.Equal(missing, []string{"n2", "n3"}) || writes > l.writes {
			r.t.Errorf("%d of %d writes, without %v", writes, l.writes, missing)
		}
	})
}

// A crash takes the last minutes of the map, and no more. That holds for reads alone too, for which nothing else has the store
// write.
func TestHeatOutlivesACrash(t *testing.T) {
	bubble(t, 1, nil, nil, func(r *rig) {
		begun, made := time.Now().Add(-time.Minute), uint64(0)
		const pause, lost = time.Second, 8 * time.Minute
		r.mustPut(r.nodes[0], "h", "v")
		for time.Since(begun) < 20*time.Minute {
			r.mustGet(r.nodes[0], "h", "v")
			made++
			time.Sleep(pause)
		}
		r.crash(r.nodes[0])
		r.start(r.nodes[0])
		if writes, got, _ := r.heat(r.nodes[0], begun); got > made || got < made-uint64(lost/pause) || writes != 1 {
			r.t.Errorf("%d of %d reads are left, and %d of 1 write", got, made, writes)
		}
	})
}
