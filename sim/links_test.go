package sim

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/watch"
)

// Bounds of broken links, in virtual time.
const (
	// aroundWithin: this long after a link broke, every node that reaches a majority serves
	// every key.
	aroundWithin = 3 * time.Second
	// brokenFor is how long links stay broken.
	brokenFor = 8 * time.Second
	// servedWithin is how long one request may take then, and how late an event may be.
	servedWithin = 500 * time.Millisecond
	// someOf is how many sets of broken links of five nodes are tried of those that there are, shortOf with -short.
	// make links tries all.
	someOf  = 10
	shortOf = 4
)

// A link is broken, in one direction or in both, while all nodes run. Each node that reaches
// a majority writes and reads every range, also by transactions over all of them, and watches
// everything. So do all while two links are broken, but for a node without any.
func TestBrokenLinks(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{3, 5} {
		for placement := range nodes { // who leads placement
			if testing.Short() && placement > 0 {
				continue
			}
			t.Run(fmt.Sprintf("%d nodes, placement at n%d", nodes, placement+1), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { report(t, brokenLinks(t, nodes, placement, singleLinks(nodes))) })
			})
		}
		t.Run(fmt.Sprintf("%d nodes, two links", nodes), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				report(t, brokenLinks(t, nodes, 0, twoLinks(nodes)))
			})
		})
	}
	// Any two nodes are two links apart, and any three have a link among them.
	t.Run("5 nodes, a ring", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			var set []link
			for a := range 5 {
				set = append(set, link{a, (a + 2) % 5}, link{a, (a + 3) % 5})
			}
			report(t, brokenLinks(t, 5, 0, [][]link{set, set, set}))
		})
	})
}

// link is one direction between two machines, by their places.
type link struct{ from, to int }

func (l link) String() string { return fmt.Sprintf("n%d to n%d", l.from+1, l.to+1) }

func singleLinks(nodes int) (all [][]link) {
	for a := range nodes {
		for b := range nodes {
			if a != b {
				all = append(all, []link{{a, b}})
			}
			if a < b {
				all = append(all, []link{{a, b}, {b, a}})
			}
		}
	}
	return all
}

// twoLinks are all pairs of links. They break in both directions.
func twoLinks(nodes int) (all [][]link) {
	var links []link
	for a := range nodes {
		for b := range a {
			links = append(links, link{b, a})
		}
	}
	for i, l := range links {
		for _, m := range links[:i] {
			all = append(all, []link{l, {l.to, l.from}, m, {m.to, m.from}})
		}
	}
	return all
}

// report complains of what was wrong.
func report(t *testing.T, wrong []string) {
	t.Helper()
	if len(wrong) > 0 {
		t.Errorf("%d complaints; the first: %s", len(wrong), strings.Join(wrong[:min(8, len(wrong))], "\n\t"))
	}
}

// brokenLinks breaks sets of links, one set after the other, until something is wrong, and
// returns that.
func brokenLinks(t *testing.T, nodes, placement int, sets [][]link) (wrong []string) {
	t.Helper()
	var said bytes.Buffer
	trace := NewTrace(&said)
	seed, set := number(t, "SKEIN_SIM_SEED")
	if !set {
		seed = rand.Uint64()
	}
	if nodes > 3 && os.Getenv("SKEIN_LINKS_ALL") == "" {
		sets = slices.Clone(sets)
		rand.New(rand.NewPCG(seed, 2)).Shuffle(len(sets), func(i, j int) { sets[i], sets[j] = sets[j], sets[i] })
		some := someOf
		if testing.Short() {
			some = shortOf
		}
		sets = sets[:min(some, len(sets))]
	}
	cfg := Config{Seed: seed, Nodes: nodes, Borders: []string{"b", "c", "d", "e"}[:nodes-1]}
	c := newCluster(cfg, rand.New(rand.NewPCG(cfg.Seed, 1)), trace)
	defer func() { c.crash(0, c.machines...) }()
	if err := c.bootAll(); err != nil {
		t.Fatal(err)
	}
	for i, set := range sets {
		r := &linkRound{t: t, c: c, number: i, set: set}
		if !r.layOut(placement) {
			t.Fatalf("%v: the leaders are not where they should be", set)
		}
		r.run()
		if len(r.wrong) > 0 {
			t.Logf("seed %d, broken: %v", seed, set)
			if dir := os.Getenv("SKEIN_LINKS_LOGS"); dir != "" {
				_ = os.WriteFile(filepath.Join(dir, fmt.Sprintf("links-%d-%d-%d.log", nodes, placement, i)), said.Bytes(), 0o644)
			}
			return r.wrong
		}
	}
	return nil
}

// linkRound is one set of broken links.
type linkRound struct {
	t      *testing.T
	c      *cluster
	number int
	set    []link
	from   time.Duration // when the links broke

	mu sync.Mutex
	// Guarded by mu. written is the revision of each key of the round.
	wrong   []string
	written map[string]int64
}

func (r *linkRound) complain(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wrong = append(r.wrong, fmt.Sprintf("%v: ", r.c.elapsed()-r.from)+fmt.Sprintf(format, args...))
}

// layOut waits until all is well, and has placement led by one machine and each range by
// another one.
func (r *linkRound) layOut(placement int) bool {
	c := r.c
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		if r.laidOut(ctx, placement) {
			return true
		}
		c.sleep(200 * time.Millisecond)
	}
	return false
}

func (r *linkRound) laidOut(ctx context.Context, placement int) bool {
	core := r.c.machines[0].current().core
	if want := r.c.machines[placement].id(); core.Placement().Leader() != want {
		_ = core.Placement().TransferLeader(ctx, want)
		return false
	}
	_ = core.KV().Refresh(ctx)
	rs, err := core.KV().Locate(ctx, keyspace.Span{})
	if err != nil || len(rs) != r.c.cfg.Nodes {
		return false
	}
	for i := range rs {
		d := &rs[i].Descriptor
		want := r.c.machines[(i+r.number)%r.c.cfg.Nodes].id()
		if _, has := d.ReplicaOn(want); !has {
			want = d.Replicas[(i+r.number)%len(d.Replicas)].Node
		}
		led := false
		for _, m := range d.Replicas {
			st, err := core.Ranges().Show(ctx, m.Node, d.Range)
			if err != nil {
				return false
			}
			if st.Serving && m.Node != want {
				_ = core.Ranges().TransferTo(ctx, m.Node, d.Range, want)
				return false
			}
			led = led || st.Serving
		}
		if !led {
			return false
		}
	}
	return true
}

// connected says whether the machine reaches a majority while the links are broken.
func (r *linkRound) connected(at int) bool {
	reached := 1
	for o := range r.c.cfg.Nodes {
		if o != at && !slices.ContainsFunc(r.set, func(l link) bool { return l == link{at, o} || l == link{o, at} }) {
			reached++
		}
	}
	return 2*reached > r.c.cfg.Nodes
}

func (r *linkRound) run() {
	c := r.c
	r.written = map[string]int64{}
	ctx, cancel := context.WithCancel(context.Background())
	var clients, watchers sync.WaitGroup
	var seen []*linkWatcher
	for at := range c.machines {
		if r.connected(at) {
			w := &linkWatcher{r: r, at: at, told: map[string]time.Duration{}}
			seen = append(seen, w)
			watchers.Go(func() { w.run(ctx) })
		}
	}
	c.sleep(time.Second)
	r.from = c.elapsed()
	c.logf("broken: %v", r.set)
	for _, l := range r.set {
		c.net.Cut(c.machines[l.from].id(), c.machines[l.to].id())
	}
	for at := range c.machines {
		if !r.connected(at) {
			continue
		}
		for group := range c.cfg.Nodes + 1 { // the last are transactions
			clients.Go(func() { r.client(ctx, at, group) })
		}
	}
	c.sleep(brokenFor)
	cancel()
	clients.Wait()
	watchers.Wait()
	c.net.HealAll()
	for _, w := range seen {
		w.judge()
	}
}

// client writes and reads a key of one range through one machine, or keys of all ranges.
func (r *linkRound) client(ctx context.Context, at, group int) {
	c := r.c
	m := c.machines[at]
	kv := m.current().core.KV()
	for n := 0; ctx.Err() == nil; n++ {
		begin := c.elapsed()
		key := fmt.Sprintf("%c/%d/%d/%d", 'a'+group, r.number, at, n)
		// Until all is well again, a client that gives up soon shows when that is.
		ctx, cancel := context.WithTimeout(context.Background(), servedWithin)
		rev, err := r.write(ctx, kv, group, key)
		if err == nil {
			_, err = kv.Range(ctx, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}, Limit: 3})
		}
		if err == nil {
			var resp *pb.RangeResponse
			if resp, err = kv.Range(ctx, &pb.RangeRequest{Key: []byte(key)}); err == nil && group < c.cfg.Nodes && len(resp.GetKvs()) != 1 {
				r.complain("%s wrote %s at revision %d and does not find it", m.name, key, rev)
			}
		}
		cancel()
		if err != nil && begin >= r.from+aroundWithin {
			r.complain("%s, key %s, begun at %v: %v", m.name, key, begin-r.from, err)
		}
		c.sleep(297 * time.Millisecond)
	}
}

// write writes one key, or in one transaction a key of each range.
func (r *linkRound) write(ctx context.Context, kv putter, group int, key string) (rev int64, err error) {
	var keys []string
	if nodes := r.c.cfg.Nodes; group < nodes {
		keys = []string{key}
		var resp *pb.PutResponse
		if resp, err = kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte("x")}); err == nil {
			rev = resp.GetHeader().GetRevision()
		}
	} else {
		txn := &pb.TxnRequest{}
		for i := range nodes {
			k := fmt.Sprintf("%c%s", 'a'+i, key[1:]+"/t")
			keys = append(keys, k)
			txn.Success = append(txn.Success, putOp(k, []byte("y")))
		}
		var resp *pb.TxnResponse
		if resp, err = kv.Txn(ctx, txn); err == nil {
			rev = resp.GetHeader().GetRevision()
		}
	}
	if err != nil {
		return 0, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, k := range keys {
		r.written[k] = int64(r.c.elapsed())
	}
	return rev, nil
}

type putter interface {
	Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error)
	Txn(context.Context, *pb.TxnRequest) (*pb.TxnResponse, error)
}

// linkWatcher watches all keys at one machine.
type linkWatcher struct {
	r    *linkRound
	at   int
	told map[string]time.Duration // when it was told of a key
}

func (w *linkWatcher) run(ctx context.Context) {
	core := w.r.c.machines[w.at].current().core
	s := core.Watches().NewStream()
	defer s.Close()
	if _, _, err := s.Watch(ctx, 1, watch.Request{Span: keyspace.Span{}}); err != nil {
		w.r.complain("n%d: watch: %v", w.at+1, err)
		return
	}
	for {
		d, err := s.Next(ctx)
		if err != nil {
			return
		}
		for _, e := range d.Events {
			w.told[string(e.GetKv().GetKey())] = w.r.c.elapsed()
		}
	}
}

// judge complains of events that were late. What was written at the very end need not have
// come.
func (w *linkWatcher) judge() {
	r := w.r
	for key, at := range r.written {
		wrote := time.Duration(at)
		told, ok := w.told[key]
		end := r.from + brokenFor
		due := max(wrote, r.from+aroundWithin) + servedWithin
		if ok && told > due || !ok && end > due {
			r.complain("n%d was told of %s, written at %v, at %v (%t)", w.at+1, key, wrote-r.from, told-r.from, ok)
		}
	}
}
