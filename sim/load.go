package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/sim/judge"
)

// sourceLease is a lease of a source, from one revision to another one, 0 for one that lives.
type sourceLease struct {
	id, ttl    int64
	from, till int64
}

// source is a store as it comes from elsewhere.
type source struct {
	// versions are in the order of revisions, all that there ever were.
	versions []judge.Version
	leases   []*sourceLease
	// The load brings the store at bulk at once and what came since, up to last, revision by revision. It finishes at
	// revision.
	compacted, bulk, last, revision int64
}

const (
	// leaseEvery is how many revisions of the source lie between two new leases.
	leaseEvery = 7
	// A loader sends up to so many versions, or revisions, at a time, with pauses of up to loadPause.
	loadPiece = 6
	loadPause = 120 * time.Millisecond
	// killAfter is about when a loader is killed, loadWithin how long all of them have together.
	killAfter  = 3 * time.Second
	loadWithin = 5 * time.Minute
	// loadStreams is how many loaders send the bulk at a time.
	loadStreams = 3
	// maxLoaders is how many loaders the load may take. Some are killed.
	maxLoaders = 12
	maxKilled  = 4
	loadNumber = 7
)

// newSource makes a source. The clients get its leases.
func newSource(c *cluster) *source {
	s, m := &source{}, judge.NewModel()
	cl := newClient(c, nil, judge.LoaderID)
	for rev := int64(2); rev < int64(c.cfg.Load)+2; {
		if n := len(s.leases); rev%leaseEvery == 2 && (n == 0 || s.leases[n-1].from < rev) {
			l := &sourceLease{id: c.leases.next(), ttl: minTTL + cl.rng.Int64N(maxTTL-minTTL+1), from: rev}
			c.leases.add(l.id)
			s.leases = append(s.leases, l)
		}
		_, next, events := m.Run(s.draw(cl, rev), rev)
		if next == m {
			continue
		}
		for i := range events {
			events[i].Sub = uint32(i) //nolint:gosec // a few
		}
		s.versions = append(s.versions, events...)
		m, s.last = next, rev
		rev++
	}
	s.compacted, s.bulk, s.revision = s.last/3, s.last*2/3, s.last+cl.rng.Int64N(3)
	return s
}

// draw draws what happens at a revision. Leases end that no client attaches keys to any more.
func (s *source) draw(cl *client, rev int64) proto.Message {
	if n := len(s.leases) - recentLeases - 1; n >= 0 && s.leases[n].till == 0 {
		s.leases[n].till = rev
		return &pb.LeaseRevokeRequest{ID: s.leases[n].id}
	}
	switch n := cl.rng.IntN(20); {
	case n < 9:
		return cl.put(cl.key())
	case n < 12:
		return &pb.DeleteRangeRequest{Key: []byte(cl.key())}
	case n < 13:
		r := cl.span(cl.group())
		return &pb.DeleteRangeRequest{Key: r.Key, RangeEnd: r.RangeEnd}
	}
	t := cl.several(cl.group())
	t.Compare = nil
	return t
}

// sorted returns what a selection takes of the source as the load brings it: writes of one transaction to a key are
// one version.
func (s *source) sorted(cut mvcc.Cut, order func(a, b mvcc.Version) int) (out []mvcc.Version) {
	vs := judge.Takes(slices.SortedFunc(slices.Values(s.versions), judge.CompareByKey), &cut)
	for i, v := range vs {
		w := mvcc.Version{
			Key: []byte(v.Key), Value: []byte(v.Value), Mod: keyspace.Revision(v.Mod), Create: keyspace.Revision(v.Create), Version: v.Version,
			Lease: keyspace.LeaseID(v.Lease), Sub: v.Sub, Tombstone: v.Deleted,
		}
		if i > 0 && vs[i-1].Key == v.Key && vs[i-1].Mod == v.Mod {
			before := out[len(out)-1]
			w.Earlier = &before
			out = out[:len(out)-1]
		}
		out = append(out, w)
	}
	slices.SortFunc(out, order)
	return out
}

// inBulk and following are the orders of the two phases of a load.
func inBulk(a, b mvcc.Version) int {
	return cmp.Or(cmp.Compare(string(a.Key), string(b.Key)), cmp.Compare(b.Mod, a.Mod))
}

func following(a, b mvcc.Version) int {
	return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub), cmp.Compare(string(a.Key), string(b.Key)))
}

// bulkCut and followCut are what the two phases bring.
func (s *source) bulkCut() mvcc.Cut {
	return mvcc.Cut{Select: mvcc.SelectKept, At: keyspace.Revision(s.bulk), After: keyspace.Revision(s.compacted)}
}

func (s *source) followCut() mvcc.Cut {
	return mvcc.Cut{Select: mvcc.SelectAll, At: keyspace.Revision(s.last), After: keyspace.Revision(s.bulk)}
}

// loaded is what the cluster has when the load has finished.
func (s *source) loaded() *judge.Loaded {
	byKey := slices.SortedFunc(slices.Values(s.versions), judge.CompareByKey)
	bulk, follow := s.bulkCut(), s.followCut()
	vs := slices.SortedFunc(slices.Values(slices.Concat(judge.Takes(byKey, &bulk), judge.Takes(byKey, &follow))), judge.CompareVersions)
	return &judge.Loaded{Versions: vs, Compacted: s.compacted, Revision: s.revision}
}

// sum is what the cluster must have at the end.
func (s *source) sum() (sum dataapi.Sum) {
	for _, v := range slices.Concat(s.sorted(s.bulkCut(), inBulk), s.sorted(s.followCut(), following)) {
		for w := &v; w != nil; w = w.Earlier {
			sum.Versions++
			sum.Hashes += mvcc.HashWrite(w)
		}
	}
	return sum
}

// loading is the load of a source.
type loading struct {
	*source
	c *cluster
	// calm, if it is not nil, is closed when all faults are over. The load finishes then.
	calm chan struct{}
	// finishing is when the load may have finished at the earliest. refused says that it was not finished with a wrong sum.
	finishing time.Duration
	refused   bool
	wrong     []string

	mu  sync.Mutex
	rng *rand.Rand // guarded by mu
}

func (l *loading) draw(n int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.Int64N(n)
}

func (l *loading) pause() { l.c.sleep(time.Duration(l.draw(int64(loadPause)))) }

// loadStore loads a source into the cluster under faults, and lets the history begin with it.
func loadStore(rep *Report, c *cluster, n *nemesis) bool {
	l := &loading{source: newSource(c), c: c, rng: rand.New(rand.NewPCG(c.cfg.Seed, 20))}
	if c.cfg.Seed%2 == 0 {
		l.calm = make(chan struct{})
	}
	// Only a new cluster is loaded, and one that has lost its sequencer is none.
	if _, err := l.loader(rand.New(rand.NewPCG(c.cfg.Seed, 29))).Begin(context.Background()); err != nil {
		rep.Violate("load: a new cluster: %v", err)
		return false
	}
	reads := &judge.History{}
	done, stop := make(chan struct{}), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { newClient(c, reads, judge.LoaderID+1).readUntil(stop) })
	var err error
	killed := 0
	wg.Go(func() {
		defer close(done)
		killed, err = l.run()
	})
	healed := n.whileLoaded(done)
	if l.calm != nil {
		close(l.calm)
	}
	<-done
	close(stop)
	wg.Wait()
	if l.calm != nil && len(n.c.cfg.LoadFaults) > 0 && len(n.happened) == 0 {
		rep.Violate("load: no fault happened")
	}
	n.happened[Killed] = killed
	n.loadHappened, n.loadSplits = maps.Clone(n.happened), n.splits.Load()
	rep.Violations = append(rep.Violations, l.wrong...)
	if err = errors.Join(healed, err); err != nil {
		rep.Violate("load: %v", err)
		return false
	}
	start := l.loaded()
	start.Reads = reads.Ops()
	l.begin(rep.History, start)
	if l.calm != nil {
		probe := newClient(c, rep.History, judge.LoaderID)
		o := probe.ask(&pb.PutRequest{Key: []byte(hotKeys[0]), Value: probe.value()}, requestTimeout)
		if o == nil || o.Outcome != judge.Answered || o.Revision() != l.revision+1 {
			rep.Violate("load: the first write of a cluster that was loaded up to revision %d: %v", l.revision, o)
		}
	}
	return len(rep.Violations) == 0
}

// begin lets the history begin with the load: everything is known that it has finished with. Its leases are as if
// they were granted then.
func (l *loading) begin(h *judge.History, start *judge.Loaded) {
	h.BeginWith(start)
	header := &pb.ResponseHeader{Revision: l.revision}
	add := func(req, resp proto.Message) {
		h.Add(&judge.Op{Client: judge.LoaderID, Request: req, Response: resp, Call: h.Now(), Return: h.Now(), Began: l.finishing, Ended: l.c.elapsed()})
	}
	add(&pb.CompactionRequest{Revision: l.compacted}, &pb.CompactionResponse{Header: header})
	for _, s := range l.leases {
		if s.till == 0 {
			add(&pb.LeaseGrantRequest{ID: s.id, TTL: s.ttl}, &pb.LeaseGrantResponse{Header: header, ID: s.id, TTL: s.ttl})
		}
	}
}

// readUntil reads until stop is closed.
func (c *client) readUntil(stop <-chan struct{}) {
	for !closed(stop) {
		req := &pb.RangeRequest{Key: []byte(c.key())}
		if c.rng.IntN(2) == 0 {
			req = readAll()
		}
		c.ask(req, time.Second)
		c.c.sleep(time.Duration(c.rng.Int64N(int64(loadPause))))
	}
}

// whileLoaded injects faults and splits ranges until all the configured ones have happened, or the load is done.
func (n *nemesis) whileLoaded(done <-chan struct{}) error {
	rng := rand.New(rand.NewPCG(n.c.cfg.Seed, 21))
	for _, f := range n.c.cfg.LoadFaults {
		n.c.sleep(n.between(200*time.Millisecond, time.Second))
		key := fmt.Appendf(nil, "%c%d", judge.Groups[rng.IntN(len(judge.Groups))], rng.IntN(judge.KeysPerGroup))
		n.ask(rng, func(ctx context.Context, r *run, ds []keyspace.Descriptor) { n.split(ctx, r, ds, key) })
		if closed(done) {
			break
		}
		h := n.inject(f)
		n.c.sleep(n.between(200*time.Millisecond, 1500*time.Millisecond))
		if err := h(); err != nil {
			return err
		}
	}
	return nil
}

// run has loaders work until the load has finished. Most are killed.
func (l *loading) run() (killed int, err error) {
	within, cancel := context.WithTimeout(context.Background(), loadWithin)
	defer cancel()
	for {
		life := killAfter/2 + time.Duration(l.draw(int64(killAfter)))
		if killed >= maxKilled {
			life = loadWithin
		}
		ctx, cancel := context.WithTimeout(within, life)
		err := l.once(ctx, rand.New(rand.NewPCG(l.c.cfg.Seed, 30+uint64(killed)))) //nolint:gosec // a few
		cancel()
		if err == nil {
			return killed, nil
		}
		// A late call of the loader before may have moved the load. Then this one is refused, and the next one is not.
		if killed++; killed == maxLoaders || within.Err() != nil {
			return killed, fmt.Errorf("%d loaders have not loaded it: %w", killed, err)
		}
		l.c.logf("load: the %d. loader is killed: %v", killed, err)
	}
}

// once is one loader, which goes on where the last one was.
func (l *loading) once(ctx context.Context, rng *rand.Rand) error {
	d := l.loader(rng)
	if _, err := d.Begin(ctx); err != nil {
		return err
	}
	at := max(int64(d.Position()), l.bulk)
	if err := d.Leases(ctx, l.granted(0, at), nil); err != nil {
		return err
	}
	if d.Position() == 0 {
		if err := l.bulkAll(ctx, d); err != nil {
			return err
		}
		if err := d.EndBulk(ctx, keyspace.Revision(l.bulk)); err != nil {
			return err
		}
	}
	if err := l.follow(ctx, d, at); err != nil {
		return err
	}
	return l.finish(ctx, d)
}

// loader returns another loader of the load.
func (l *loading) loader(rng *rand.Rand) *dataapi.Loader {
	return dataapi.NewLoader(dataapi.LoaderOptions{Conn: l.c.conn(rng, 8, 0), Clock: l.c.time, Number: loadNumber, Source: "the simulator"})
}

// granted are the leases that were granted behind a revision and up to another one, where they live.
func (l *loading) granted(after, at int64) (out []dataapi.LoadLease) {
	for _, s := range l.leases {
		if s.from > after && s.from <= at && (s.till == 0 || s.till > after && after > 0 || s.till > at) {
			out = append(out, dataapi.LoadLease{ID: keyspace.LeaseID(s.id), TTL: s.ttl})
		}
	}
	return out
}

// bulkAll sends the store at the bulk's revision in several streams.
func (l *loading) bulkAll(ctx context.Context, d *dataapi.Loader) error {
	vs := l.sorted(l.bulkCut(), inBulk)
	var borders [][]byte
	for i := 1; i < loadStreams; i++ {
		borders = append(borders, []byte{judge.Groups[i*len(judge.Groups)/loadStreams]})
	}
	if err := d.Split(ctx, borders); err != nil {
		return err
	}
	errs := make([]error, loadStreams)
	var wg sync.WaitGroup
	for i := range loadStreams {
		var mine []mvcc.Version
		for _, v := range vs {
			if (i == 0 || string(v.Key) >= string(borders[i-1])) && (i == loadStreams-1 || string(v.Key) < string(borders[i])) {
				mine = append(mine, v)
			}
		}
		wg.Go(func() {
			for len(mine) > 0 && errs[i] == nil {
				n := min(len(mine), 1+int(l.draw(loadPiece)))
				errs[i] = d.Bulk(ctx, each(mine[:n]))
				mine = mine[n:]
				l.pause()
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func each(vs []mvcc.Version) iter.Seq2[*mvcc.Version, error] {
	return func(yield func(*mvcc.Version, error) bool) {
		for i := range vs {
			if !yield(&vs[i], nil) {
				return
			}
		}
	}
}

// follow brings what came after a revision, some revisions at a time, and sometimes a part of what is to be seen
// later.
func (l *loading) follow(ctx context.Context, d *dataapi.Loader, at int64) error {
	vs := slices.DeleteFunc(l.sorted(l.followCut(), following), func(v mvcc.Version) bool { return int64(v.Mod) <= at })
	for at < l.last {
		next := min(l.last, at+1+l.draw(loadPiece))
		if err := d.Leases(ctx, l.granted(at, next), nil); err != nil {
			return err
		}
		n := slices.IndexFunc(vs, func(v mvcc.Version) bool { return int64(v.Mod) > next })
		if n < 0 {
			n = len(vs)
		}
		if part := int(l.draw(int64(n))); part > 0 {
			if err := d.Follow(ctx, keyspace.Revision(at), vs[:part]); err != nil {
				return err
			}
			vs, n = vs[part:], n-part
			l.pause()
		}
		if err := d.Follow(ctx, keyspace.Revision(next), vs[:n]); err != nil {
			return err
		}
		var ended []keyspace.LeaseID
		for _, s := range l.leases {
			if s.till > at && s.till <= next {
				ended = append(ended, keyspace.LeaseID(s.id))
			}
		}
		if err := d.Leases(ctx, nil, ended); err != nil {
			return err
		}
		vs, at = vs[n:], next
		l.pause()
	}
	return nil
}

// finish finishes the load, at first as somebody whose source has more.
func (l *loading) finish(ctx context.Context, d *dataapi.Loader) error {
	if l.calm != nil {
		<-l.calm
	}
	if l.finishing == 0 {
		l.finishing = l.c.elapsed()
	}
	if !l.refused {
		more := l.sum()
		more.Versions++
		d.SetSum(more)
		// Only the answer says that it was refused. The next loader asks again where there was none.
		switch err := d.Finish(ctx, keyspace.Revision(l.revision), keyspace.Revision(l.compacted)); {
		case err == nil:
			l.wrong = append(l.wrong, fmt.Sprintf("load: it finishes although the source has %d versions", more.Versions))
		case status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "the source has changed"):
			return err
		}
		l.refused = true
	}
	d.SetSum(l.sum())
	return d.Finish(ctx, keyspace.Revision(l.revision), keyspace.Revision(l.compacted))
}
