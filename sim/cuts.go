package sim

import (
	"cmp"
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
	"github.com/skeindb/skein/sim/simconn"
)

// Cut is the reading of a cut through the whole store, as a backup makes one.
type Cut struct {
	dataapi.Cut
	// Call and Return are places in the order of the history: before the cut was asked for, and when it was made. Began
	// is the virtual time of the first.
	Call, Return int64
	Began        time.Duration
	// Parts are what was read of it. Not all of it need have been answered.
	Parts []CutPart
}

// CutPart is one selection of a cut's versions, read to its end.
type CutPart struct {
	mvcc.Cut
	// Versions are in the order of keys, revisions and operations.
	Versions []Version
	// Over says when it was read.
	Over time.Duration
}

func (p *CutPart) String() string {
	return fmt.Sprintf("the %s at revision %d after %d, read at %v", p.Select, p.At, p.After, p.Over)
}

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
	h    *History
	rng  *rand.Rand
	make *dataapi.Client // its streams do not break: nobody would know of the hold
	read *dataapi.Client
	// held is the cut from which on old versions are held, nil if there is none.
	held *Cut
	cuts []*Cut
	// full and increments count what was read whole: everything at a cut, and all versions since an earlier one.
	full, increments int
}

func newCutter(c *cluster, h *History) *cutter {
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
func (t *cutter) since(ctx context.Context, cut *Cut, rev keyspace.Revision) {
	if t.part(ctx, cut, mvcc.Cut{Select: mvcc.SelectAll, At: cut.Revision, After: rev}) != nil {
		t.increments++
	}
	t.part(ctx, cut, mvcc.Cut{Select: mvcc.SelectChanges, At: cut.Revision, After: rev})
}

// cut makes a cut that goes on from an earlier one, if that is not nil.
func (t *cutter) cut(ctx context.Context, before *Cut) (*Cut, error) {
	o := dataapi.CutOptions{Owner: "the simulator"}
	if before != nil {
		o.Hold, o.From = before.Hold, before.Revision
	}
	cut := &Cut{Call: t.h.now(), Began: t.c.elapsed()}
	made, err := t.make.Cut(ctx, o)
	if err != nil {
		return nil, err
	}
	cut.Cut, cut.Return = *made, t.h.now()
	t.cuts = append(t.cuts, cut)
	return cut, nil
}

// everything reads the keys at the cut's revision. This is a linearizable read of everything like any other, if a long
// one, and the history has it.
func (t *cutter) everything(ctx context.Context, cut *Cut) {
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
	t.h.Add(&Op{Client: cutReader, Request: readAll(), Response: resp, Call: cut.Call, Return: cut.Return, Began: cut.Began, Ended: p.Over})
}

// part reads a selection of a cut; nil if it was not answered to its end.
func (t *cutter) part(ctx context.Context, cut *Cut, what mvcc.Cut) *CutPart {
	p := CutPart{Cut: what}
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
	slices.SortStableFunc(p.Versions, compareByKey)
	cut.Parts = append(cut.Parts, p)
	return &cut.Parts[len(cut.Parts)-1]
}

func versionIn(v *mvcc.Version, key string) Version {
	return Version{
		Key: key, Value: string(v.Value), Mod: int64(v.Mod), Create: int64(v.Create), Version: v.Version, Deleted: v.Tombstone, Lease: int64(v.Lease), Sub: v.Sub,
	}
}

func compareByKey(a, b Version) int {
	return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub))
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
		rep.violate("cut: a healthy cluster makes none: %v", err)
		return false
	}
	m := n.c.standing()[0]
	for _, g := range groups {
		probe.do(m, m.current(), &pb.PutRequest{Key: fmt.Appendf(nil, "%c0", g), Value: probe.value()}, promptWithin)
	}
	o := probe.do(m, m.current(), readAll(), promptWithin)
	if o.Outcome == Answered && n.keepVersions(n.c.runs(), o.Revision()) {
		n.kept.compacted = max(n.kept.compacted, o.Revision())
		o = probe.do(m, m.current(), &pb.CompactionRequest{Revision: o.Revision()}, requestTimeout)
	}
	if _, ok := o.Request.(*pb.CompactionRequest); !ok || o.Outcome != Answered {
		rep.violate("cut: a healthy cluster does not compact beside a hold: %s", o)
		return false
	}
	n.c.sleep(heldFor)
	for _, what := range []mvcc.Cut{{Select: mvcc.SelectLatest, At: cut.Revision}, {Select: mvcc.SelectKept, At: cut.Revision, After: max(cut.Compacted, 0)}} {
		if t.part(ctx, cut, what) == nil {
			rep.violate("cut: hold %x of revision %d has not kept the %s at revision %d", uint64(cut.Hold), cut.Held, what.Select, what.At)
		}
	}
	if err := t.make.Release(ctx, cut.Hold); err != nil {
		rep.violate("cut: a healthy cluster does not end a hold: %v", err)
	}
	rep.Cuts = t.cuts
	return true
}

// checkCuts compares every reading of a cut with the history at its revision, and leases.
func checkCuts(cuts []*Cut, ops []*Op, vs []Version) (bad []string) {
	vs = slices.SortedFunc(slices.Values(vs), compareByKey)
	ls := lives(ops)
	for _, c := range cuts {
		for i := range c.Parts {
			p := &c.Parts[i]
			if d := firstDifference(takes(vs, &p.Cut), p.Versions); d != "" {
				bad = append(bad, fmt.Sprintf("cut: %v: the history, then the cut: %s", p, d))
			}
		}
		bad = append(bad, c.restores(cuts)...)
		bad = append(bad, c.checkLeases(ls)...)
	}
	return bad
}

// takes returns what a selection takes of a store, which is in the order of keys, revisions and operations.
func takes(vs []Version, c *mvcc.Cut) (out []Version) {
	at, after := int64(c.At), int64(c.After)
	vs = slices.DeleteFunc(slices.Clone(vs), func(v Version) bool { return v.Mod > at })
	for i, v := range vs {
		// The writes of one transaction to a key go or stay as a whole, and the last one says what the key is then.
		last, newest, newestOld := v, true, true
		for _, w := range vs[i+1:] {
			if w.Key != v.Key {
				break
			}
			if w.Mod == v.Mod {
				last = w
				continue
			}
			newest, newestOld = false, newestOld && w.Mod > after
		}
		var takes bool
		switch c.Select {
		case mvcc.SelectLatest:
			takes = newest && !v.Deleted && v == last
		case mvcc.SelectKept:
			takes = v.Mod > after || newestOld && (!last.Deleted || v.Mod == after) // a watch may begin at a tombstone
		case mvcc.SelectChanges:
			takes = newest && v.Mod > after
		case mvcc.SelectAll:
			takes = v.Mod > after
		}
		if takes {
			out = append(out, v)
		}
	}
	return out
}

// restores checks that the keys at an earlier cut and all versions since are the keys at this one, without the history.
func (c *Cut) restores(cuts []*Cut) (bad []string) {
	latest := func(c *Cut) *CutPart {
		i := slices.IndexFunc(c.Parts, func(p CutPart) bool { return p.Select == mvcc.SelectLatest })
		if i < 0 {
			return nil
		}
		return &c.Parts[i]
	}
	want := latest(c)
	for _, p := range c.Parts {
		i := slices.IndexFunc(cuts, func(b *Cut) bool { return b.Revision == p.After && latest(b) != nil })
		if p.Select != mvcc.SelectAll || i < 0 || want == nil {
			continue
		}
		union := slices.SortedFunc(slices.Values(slices.Concat(latest(cuts[i]).Versions, p.Versions)), compareByKey)
		if d := firstDifference(takes(union, &want.Cut), want.Versions); d != "" {
			bad = append(bad, fmt.Sprintf("cut: revision %d restored from revision %d and the versions since, then the cut: %s", c.Revision, p.After, d))
		}
	}
	return bad
}

// checkLeases checks that the cut has each lease that was there all the time while it was made, with its TTL.
func (c *Cut) checkLeases(ls []*life) (bad []string) {
	for _, l := range ls {
		i := slices.IndexFunc(c.Leases, func(has dataapi.Lease) bool { return int64(has.ID) == l.id })
		lives := l.grant.Return < c.Call && slices.ContainsFunc(l.shown, func(o *Op) bool { return o.Call > c.Return })
		switch {
		case i < 0 && lives:
			bad = append(bad, fmt.Sprintf("cut: at revision %d without lease %d, which was there all the time: %s", c.Revision, l.id, l.grant))
		case i >= 0 && (l.grant.Call > c.Return || c.Leases[i].TTL != int64(l.ttl/time.Second)):
			bad = append(bad, fmt.Sprintf("cut: at revision %d with %+v: %s", c.Revision, c.Leases[i], l.grant))
		}
	}
	return bad
}
