package node

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rights"
)

// A slowLoad brings a store so that each range is in the middle of its load for minutes.
type slowLoad struct {
	r *rig
	l *dataapi.Loader
	// hurry is closed to bring the rest at once.
	hurry chan struct{}
	ended chan error
	spans int
}

const (
	slowPiece = 12
	slowPause = time.Second
)

// slowly begins to bring the versions, those of each span of the rig's first ranges beside the others.
func (r *rig) slowly(l *dataapi.Loader, vs []mvcc.Version) *slowLoad {
	s := &slowLoad{r: r, l: l, hurry: make(chan struct{}), ended: make(chan error, len(r.splits)+1)}
	for _, end := range append(r.splits[:len(r.splits):len(r.splits)], nil) {
		n := 0
		for n < len(vs) && (end == nil || bytes.Compare(vs[n].Key, end) < 0) {
			n++
		}
		part := vs[:n]
		vs = vs[n:]
		s.spans++
		go func() { s.ended <- s.bring(part) }()
	}
	return s
}

func (s *slowLoad) bring(vs []mvcc.Version) error {
	for len(vs) > 0 {
		n := min(slowPiece, len(vs))
		select {
		case <-s.hurry:
			n = len(vs)
		case <-time.After(slowPause):
		}
		if err := s.l.Bulk(s.r.t.Context(), each(vs[:n])); err != nil {
			return err
		}
		vs = vs[n:]
	}
	return nil
}

// rest brings the rest.
func (s *slowLoad) rest() {
	s.r.t.Helper()
	close(s.hurry)
	for range s.spans {
		if err := <-s.ended; err != nil {
			s.r.t.Fatal(err)
		}
	}
}

// goesOn waits until each range has taken more versions, which must not be the last ones.
func (s *slowLoad) goesOn(when string) {
	s.r.t.Helper()
	ranges := func() []*datapb.LoadRange {
		_, all, err := s.l.State(s.r.t.Context())
		if err != nil {
			s.r.t.Fatalf("%s: %v", when, err)
		}
		return all
	}
	before := ranges()
	s.r.wait(time.Minute, when+": each range takes more versions", func() bool {
		for i, now := range ranges() {
			if now.GetVersions() < before[i].GetVersions()+3*slowPiece {
				return false
			}
		}
		return true
	})
	select {
	case err := <-s.ended:
		s.r.t.Fatalf("%s: a part of the load is over: %v", when, err)
	default:
	}
}

// lead has a node lead a range of which it has a voter.
func (r *rig) lead(id keyspace.RangeID, n *rigNode) {
	r.t.Helper()
	r.wait(time.Minute, fmt.Sprintf("node %s leads range %s", n.id, id), func() bool {
		if err := r.nodes[1].core.Admin().TransferLeader(r.t.Context(), id, n.id.String()); err != nil {
			return false
		}
		for _, s := range n.summaries() {
			if s.Descriptor.Range == id {
				return s.IsLeader
			}
		}
		return false
	})
}

// counted returns the value of a counter.
func counted(t *testing.T, reg *prometheus.Registry, name string) (sum float64) {
	t.Helper()
	all, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// A node joins while a cluster is loaded. It gets replicas in the middle of their load, by snapshots, and leads one of them.
// Then the node is lost that leads another range, and its replicas are rebuilt on the one that has joined. The load goes
// on through all that, and each node has everything once it has ended.
func TestANodeJoinsWhileLoaded(t *testing.T) {
	const snapshots = "skein_raftgroup_snapshots_received_total"
	const keys = 4_000
	regs := map[keyspace.NodeID]*prometheus.Registry{}
	var mu sync.Mutex
	options := func(o *Options) {
		deadSoon(o)
		mu.Lock()
		defer mu.Unlock()
		regs[o.Self] = prometheus.NewRegistry()
		o.Registry = regs[o.Self]
	}
	bubble(t, 3, [][]byte{[]byte("k0250"), []byte("k0500"), []byte("k0750")}, options, func(r *rig) {
		ctx := r.t.Context()
		vs, last := storeOf(keys)
		lost := r.nodes[2]
		l, conn := r.loaderOf(7)
		conn.nodes = r.nodes[:2:2]
		r.begin(l)
		r.pause()
		if err := l.Leases(ctx, []dataapi.LoadLease{{ID: 77, TTL: 60}}, nil); err != nil {
			r.t.Fatal(err)
		}
		s := r.slowly(l, vs)
		s.goesOn("at first")

		n := r.joiner("n4")
		if err := r.join(ctx, n, r.nodes[1]); err != nil {
			r.t.Fatal(err)
		}
		r.announced(n)
		r.mustMove(1, lost, n)
		r.mustMove(2, lost, n)
		if got := counted(t, regs[n.id], snapshots); got < 2 {
			r.t.Errorf("the new node has received %v snapshots for its two replicas", got)
		}
		s.goesOn("with two replicas on the new node")
		r.lead(1, n)
		s.goesOn("led by the new node")

		r.lead(3, lost)
		r.crash(lost)
		if err := r.nodes[0].core.client.SetPaused(ctx, false); err != nil {
			r.t.Fatal(err)
		}
		s.goesOn("without a leader of before")
		r.settle(rigDead+time.Minute, "repair", 3, r.nodes[0], r.nodes[1], n)
		if got := counted(t, regs[n.id], snapshots); got < 4 {
			r.t.Errorf("the new node has received %v snapshots for its four replicas", got)
		}
		s.goesOn("with rebuilt replicas")
		s.rest()
		r.start(lost)
		last = r.endALease(l, r.follow(l, last, vs))
		if err := l.Finish(ctx, last+2, 3); err != nil {
			r.t.Fatal(err)
		}
		for _, n := range r.nodes {
			r.wantLeased(n, 77, keys/4-1)
			if got, rev := r.total(n); got != int64(keys-keys/10+500) || rev != int64(last+2) {
				r.t.Errorf("node %s has %d keys at revision %d, want %d at %d", n.id, got, rev, keys-keys/10+500, last+2)
			}
		}
		r.asWritten(int64(last+2), keys)
		r.caughtUp(time.Minute)
		r.stop(r.nodes...)
	})
}

// A node dies while a cluster is loaded whose source checks users: each node has to note that before the cluster serves, so the load
// does not end without it. Once the dead node is taken out it does, also where the end has been asked for before. The node goes by a
// decommission, which wants another one for its replicas, or as a member of etcd's, which leaves ranges with one replica less.
func TestADeadNodeIsTakenOutWhileLoaded(t *testing.T) {
	const keys = 300
	for name, take := range map[string]func(r *rig, lost *rigNode) (left []*rigNode){
		"decommission": func(r *rig, lost *rigNode) []*rigNode {
			k := r.operator(r.nodes[0])
			k.refused(adminapi.Decommission, lost.id.String(), "need as many nodes, and 2 others take replicas", "add a node")
			n := r.joiner("n4")
			if err := r.join(r.t.Context(), n, r.nodes[1]); err != nil {
				r.t.Fatal(err)
			}
			r.announced(n)
			r.wait(time.Minute, "the dead node may be taken out", func() bool {
				_, err := k.a.ChangeNode(r.t.Context(), adminapi.Decommission, lost.id.String())
				return err == nil
			})
			r.settle(5*time.Minute, "the dead node holds no range", 3, r.nodes[0], r.nodes[1], n)
			r.wait(5*time.Minute, "the dead node is removed", func() bool {
				_, err := k.a.ChangeNode(r.t.Context(), adminapi.Remove, lost.id.String())
				return err == nil
			})
			return []*rigNode{r.nodes[0], r.nodes[1], n}
		},
		"member remove": func(r *rig, lost *rigNode) []*rigNode {
			r.removed(5*time.Minute, r.nodes[0], lost.id)
			return r.nodes[:2]
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 3, borders(3), func(o *Options) { o.BcryptCost = 4 }, func(r *rig) {
				source := rights.New()
				source.PutUser(&rights.User{Name: "root", Roles: []string{"root"}, Hash: []byte("$2a$10$theroots")})
				source.PutRole(&rights.Role{Name: "root"})
				source.Enabled, source.Revision = true, 3
				vs, last := storeOf(keys)
				lost := r.nodes[2]
				l, conn := r.loaderOf(7)
				conn.nodes = r.nodes[:2:2]
				r.begin(l)
				if err := l.Leases(r.t.Context(), []dataapi.LoadLease{{ID: 77, TTL: 600}}, nil); err != nil {
					t.Fatal(err)
				}
				if err := l.Bulk(r.t.Context(), each(vs)); err != nil {
					t.Fatal(err)
				}
				r.crash(lost)
				r.wait(time.Minute, "it is known to be down", func() bool { return !r.nodes[0].core.alive(lost.id) })
				ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
				err := l.Access(ctx, source)
				cancel()
				if err == nil {
					t.Fatal("a node that is down need not know that users are checked")
				}
				ended := make(chan error, 1)
				go func() {
					for r.t.Context().Err() == nil {
						if l.Access(r.t.Context(), source) == nil {
							ended <- l.Finish(r.t.Context(), last, 3)
							return
						}
						time.Sleep(time.Second)
					}
				}()
				left := take(r, lost)
				select {
				case err := <-ended:
					if err != nil {
						t.Fatal(err)
					}
				case <-time.After(time.Minute):
					t.Fatal("the load does not end without the node")
				}
				for _, n := range left {
					s := r.serve(n)
					if what, reasons := served(r.t.Context(), s); what != "" || reasons[0] != codes.InvalidArgument {
						t.Errorf("node %s: %s, %v", n.id, what, reasons)
					}
					s.Stop(context.Background())
					if got, rev := r.total(n); got != keys-keys/10 || rev != int64(last) {
						t.Errorf("node %s has %d keys at revision %d, want %d at %d", n.id, got, rev, keys-keys/10, last)
					}
				}
				r.stop(left...)
			})
		})
	}
}

// A log with small segments takes smaller entries than a block of a load has bytes: it comes in several. A version
// that no entry holds ends the load with its key.
func TestLoadIntoASmallLog(t *testing.T) {
	bubble(t, 1, nil, shortLog, func(r *rig) {
		ctx := r.t.Context()
		l, _ := r.loaderOf(7)
		r.begin(l)
		of := func(keys, size int) iter.Seq2[*mvcc.Version, error] {
			return func(yield func(*mvcc.Version, error) bool) {
				for i := range keys {
					rev := keyspace.Revision(i + 2)
					if !yield(&mvcc.Version{Key: fmt.Appendf(nil, "%d/%03d", size, i), Mod: rev, Create: rev, Version: 1, Value: make([]byte, size)}, nil) {
						return
					}
				}
			}
		}
		if err := l.Bulk(ctx, of(60, 30_000)); err != nil {
			r.t.Fatal(err)
		}
		err := l.Bulk(ctx, of(1, 90_000))
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), `key "90000/000" at revision 2 takes`) || !strings.Contains(err.Error(), "at the source") {
			r.t.Errorf("a version that is larger than an entry: %v", err)
		}
		r.stop(r.nodes...)
	})
}
