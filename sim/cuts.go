package sim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/sim/judge"
	"github.com/skeindb/skein/sim/simconn"
)

// Bounds of a reader of cuts.
const (
	cutEvery    = 1200 * time.Millisecond
	cutPatience = 12 * time.Second
	callTimeout = 3 * time.Second
	// cutBreaks is after how many messages a stream breaks at most: most readings are on several nodes.
	cutBreaks = 6
	// heldFor is how long after a compaction a hold is tried: the ranges would be compacted by then, though reads pin them
	// for up to 20 s.
	heldFor = 25 * time.Second
	// cutReader is the id of the reader as a client, beyond all others.
	cutReader = 900
)

// conn is a connection to any node that takes calls. Of lose answers one is lost; streams break after so many messages.
func (c *cluster) conn(rng *rand.Rand, lose, breaks int) *simconn.Conn {
	return simconn.New(simconn.Options{
		Rand: rng, Timeout: callTimeout, Lose: lose, Break: breaks,
		Pick: func(n int) *simconn.Peer {
			for i := range c.machines {
				if r := c.machines[(n+i)%len(c.machines)].current(); r != nil && r.api != nil && r.enter() {
					return &simconn.Peer{Conn: r.api.Conn(), Life: r.ctx, Leave: r.leave}
				}
			}
			return nil
		},
	})
}

// cutter makes cuts and reads them while everything else goes on. One goroutine uses it.
type cutter struct {
	c    *cluster
	h    *judge.History
	rng  *rand.Rand
	make *dataapi.Client // its streams do not break: nobody would know of the hold
	read *dataapi.Client
	// held is the cut from which on old versions are held, nil if there is none.
	held *judge.Cut
	cuts []*judge.Cut
	// full and increments count what was read whole: everything at a cut, and all versions since an earlier one.
	full, increments int
}

func newCutter(c *cluster, h *judge.History) *cutter {
	rng := rand.New(rand.NewPCG(c.cfg.Seed, 10))
	return &cutter{
		c: c, h: h, rng: rng, make: dataapi.NewClient(c.conn(rand.New(rand.NewPCG(c.cfg.Seed, 11)), 0, 0), c.time),
		read: dataapi.NewClient(c.conn(rand.New(rand.NewPCG(c.cfg.Seed, 12)), 0, cutBreaks), c.time),
	}
}

// cutLoop has the cutter work now and then until stop is closed.
func (n *nemesis) cutLoop(stop <-chan struct{}, wg *sync.WaitGroup) {
	n.beside(stop, wg, repeat{times: n.c.cfg.Cuts, least: cutEvery, spread: cutEvery, stream: 13}, func(*rand.Rand) { n.cutter.step() })
}

// step makes a full cut, or one that goes on from the last one and reads what came since. Sometimes the hold ends
// then, and later somebody reads on by it all the same: what is removed meanwhile must be refused.
func (t *cutter) step() {
	ctx, cancel := context.WithTimeout(context.Background(), cutPatience)
	defer cancel()
	before := t.held
	cut, err := t.cut(ctx, before)
	if err != nil {
		t.c.logf("cut: %v", err)
		if t.held = nil; before != nil {
			_ = t.make.Release(ctx, before.Hold)
		}
		return
	}
	t.held = cut
	t.everything(ctx, cut)
	t.part(ctx, cut, mvcc.Cut{Select: mvcc.SelectKept, At: cut.Revision, After: max(cut.Compacted, 0)})
	if before != nil && cut.Revision > before.Revision {
		t.since(ctx, cut, before.Revision)
	}
	if t.rng.IntN(4) > 0 {
		return
	}
	t.held = nil
	_ = t.make.Release(ctx, cut.Hold)
	t.c.sleep(time.Duration(t.rng.Int64N(int64(4 * time.Second))))
	late, end := context.WithTimeout(context.Background(), cutPatience)
	defer end()
	t.part(late, cut, mvcc.Cut{Select: mvcc.SelectLatest, At: cut.Revision})
	if before != nil && cut.Revision > before.Revision {
		t.since(late, cut, before.Revision)
	}
}

// since reads what came after a revision: all versions, and the last ones.
func (t *cutter) since(ctx context.Context, cut *judge.Cut, rev keyspace.Revision) {
	if t.part(ctx, cut, mvcc.Cut{Select: mvcc.SelectAll, At: cut.Revision, After: rev}) != nil {
		t.increments++
	}
	t.part(ctx, cut, mvcc.Cut{Select: mvcc.SelectChanges, At: cut.Revision, After: rev})
}

// cut makes a cut that goes on from an earlier one, if that is not nil.
func (t *cutter) cut(ctx context.Context, before *judge.Cut) (*judge.Cut, error) {
	o := dataapi.CutOptions{Owner: "the simulator"}
	if before != nil {
		o.Hold, o.From = before.Hold, before.Revision
	}
	cut := &judge.Cut{Call: t.h.Now(), Began: t.c.elapsed()}
	made, err := t.make.Cut(ctx, o)
	if err != nil {
		return nil, err
	}
	cut.Cut, cut.Return = *made, t.h.Now()
	t.cuts = append(t.cuts, cut)
	return cut, nil
}

// everything reads the keys at the cut's revision. This is a linearizable read of everything like any other, if a long
// one, and the history has it.
func (t *cutter) everything(ctx context.Context, cut *judge.Cut) {
	p := t.part(ctx, cut, mvcc.Cut{Select: mvcc.SelectLatest, At: cut.Revision})
	if p == nil {
		return
	}
	t.full++
	resp := &pb.RangeResponse{Header: &pb.ResponseHeader{Revision: int64(cut.Revision)}, Count: int64(len(p.Versions))}
	for _, v := range p.Versions {
		resp.Kvs = append(resp.Kvs, &mvccpb.KeyValue{
			Key: []byte(v.Key), Value: []byte(v.Value), ModRevision: v.Mod, CreateRevision: v.Create, Version: v.Version, Lease: v.Lease,
		})
	}
	t.h.Add(&judge.Op{Client: cutReader, Request: readAll(), Response: resp, Call: cut.Call, Return: cut.Return, Began: cut.Began, Ended: p.Over})
}

// part reads a selection of a cut; nil if it was not answered to its end.
func (t *cutter) part(ctx context.Context, cut *judge.Cut, what mvcc.Cut) *judge.CutPart {
	p := judge.CutPart{Cut: what}
	vs := t.read.Read(ctx, dataapi.ReadOptions{Cut: what})
	defer vs.Close()
	for {
		v, err := vs.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.c.logf("cut: %v: %v", &p, err)
			return nil
		}
		for w := v; w != nil; w = w.Earlier {
			p.Versions = append(p.Versions, versionIn(w, string(v.Key)))
			if what.Select == mvcc.SelectLatest {
				break // nobody sees what the same transaction has replaced
			}
		}
	}
	p.Over = t.c.elapsed()
	slices.SortStableFunc(p.Versions, judge.CompareByKey)
	cut.Parts = append(cut.Parts, p)
	return &cut.Parts[len(cut.Parts)-1]
}

func versionIn(v *mvcc.Version, key string) judge.Version {
	return judge.Version{
		Key: key, Value: string(v.Value), Mod: int64(v.Mod), Create: int64(v.Create), Version: v.Version, Deleted: v.Tombstone, Lease: int64(v.Lease), Sub: v.Sub,
	}
}

// heldStays checks, when all is healed, that a hold keeps what it promises: a compaction goes past it, and its cut is
// read as before.
func (n *nemesis) heldStays(rep *Report, probe *client) bool {
	t, ctx := n.cutter, context.Background()
	if t == nil {
		return true
	}
	if t.held != nil {
		_ = t.make.Release(ctx, t.held.Hold)
	}
	cut, err := t.cut(ctx, nil)
	if err != nil {
		rep.Violate("cut: a healthy cluster makes none: %v", err)
		return false
	}
	m := n.c.standing()[0]
	for _, g := range judge.Groups {
		probe.do(m, m.current(), &pb.PutRequest{Key: fmt.Appendf(nil, "%c0", g), Value: probe.value()}, promptWithin)
	}
	o := probe.do(m, m.current(), readAll(), promptWithin)
	if o.Outcome == judge.Answered && n.keepVersions(n.c.runs(), o.Revision()) {
		n.kept.compacted = max(n.kept.compacted, o.Revision())
		o = probe.do(m, m.current(), &pb.CompactionRequest{Revision: o.Revision()}, requestTimeout)
	}
	if _, ok := o.Request.(*pb.CompactionRequest); !ok || o.Outcome != judge.Answered {
		rep.Violate("cut: a healthy cluster does not compact beside a hold: %s", o)
		return false
	}
	n.c.sleep(heldFor)
	for _, what := range []mvcc.Cut{{Select: mvcc.SelectLatest, At: cut.Revision}, {Select: mvcc.SelectKept, At: cut.Revision, After: max(cut.Compacted, 0)}} {
		if t.part(ctx, cut, what) == nil {
			rep.Violate("cut: hold %x of revision %d has not kept the %s at revision %d", uint64(cut.Hold), cut.Held, what.Select, what.At)
		}
	}
	if err := t.make.Release(ctx, cut.Hold); err != nil {
		rep.Violate("cut: a healthy cluster does not end a hold: %v", err)
	}
	rep.Cuts = t.cuts
	return true
}
