package node

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rights"
)

// serve serves etcd's services of a node, to clients within the process.
func (r *rig) serve(n *rigNode) *etcdapi.Server {
	r.t.Helper()
	face := etcdapi.Options{
		Members: n.core.Members(1, true), Self: n.id, RequestTimeout: rigTimeout, ElectionTimeout: rigElection, Gatherer: prometheus.NewRegistry(),
	}
	if err := n.core.Face(&face); err != nil {
		r.t.Fatal(err)
	}
	s := etcdapi.New(face)
	n.core.OnRevoked(func(*auth.View) { s.RightsTaken() })
	n.core.OnLoad(s.LoadBegun)
	s.Start()
	return s
}

// served says whether a node gives anybody without a name something of its keys, or takes something.
func served(ctx context.Context, s *etcdapi.Server) (what string, reasons []codes.Code) {
	kv := pb.NewKVClient(s.Conn())
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, put := kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: []byte("anybody's")})
	_, read := kv.Range(ctx, &pb.RangeRequest{Key: []byte("k0"), RangeEnd: []byte("l"), Limit: 1})
	_, local := kv.Range(ctx, &pb.RangeRequest{Key: []byte("k0"), RangeEnd: []byte("l"), Limit: 1, Serializable: true})
	for what, err := range map[string]error{"a put": put, "a read": read, "a serializable read": local} {
		if err == nil {
			return what, nil
		}
		reasons = append(reasons, status.Code(err))
	}
	return "", reasons
}

// anybody asks the nodes all the time, until stop.
func (r *rig) anybody(servers []*etcdapi.Server) (stop func()) {
	ctx, cancel := context.WithCancel(r.t.Context())
	ended := make(chan string, len(servers))
	for i, s := range servers {
		go func() {
			for ctx.Err() == nil {
				if what, _ := served(ctx, s); what != "" {
					ended <- fmt.Sprintf("node %d has served %s to somebody without a name", i+1, what)
					return
				}
				time.Sleep(time.Millisecond)
			}
			ended <- ""
		}()
	}
	return func() {
		r.t.Helper()
		cancel()
		for range servers {
			if what := <-ended; what != "" {
				r.t.Error(what)
			}
		}
	}
}

// loadOnce is one life of a loader, which dies before its call of a number, 0 for never.
func (r *rig) loadOnce(calls int, vs []mvcc.Version, last keyspace.Revision, s *rights.State) error {
	ctx := r.t.Context()
	l, conn := r.loaderOf(7)
	conn.calls = int64(calls)
	if _, err := l.Begin(ctx); err != nil {
		return err
	}
	if err := l.Leases(ctx, []dataapi.LoadLease{{ID: 77, TTL: 600}}, nil); err != nil {
		return err
	}
	if err := l.Bulk(ctx, each(vs)); err != nil {
		return err
	}
	if err := l.Access(ctx, s); err != nil {
		return err
	}
	return l.Finish(ctx, last, 3)
}

// Users of a source are there before its data are served: nobody without a name is answered by any node at any moment,
// wherever the loader died, and after a start of the nodes.
func TestLoadedUsers(t *testing.T) {
	bubble(t, 3, borders(3), func(o *Options) { o.BcryptCost = 4 }, func(r *rig) {
		r.publish(r.nodes...)
		source := rights.New()
		source.PutUser(&rights.User{Name: "root", Roles: []string{"root"}, Hash: []byte("$2a$10$theroots")})
		source.PutRole(&rights.Role{Name: "root"})
		for i := range 6000 { // more than one step
			source.PutUser(&rights.User{Name: fmt.Sprintf("user-%d", i), NoPassword: true})
		}
		source.Enabled, source.Revision = true, 6003
		vs, last := storeOf(300)
		first, _ := r.loaderOf(7)
		r.begin(first)
		var servers []*etcdapi.Server
		for _, n := range r.nodes {
			servers = append(servers, r.serve(n))
		}
		stop := r.anybody(servers)
		lives := 1
		for ; r.loadOnce(lives, vs, last, source) != nil; lives++ {
			if lives > 40 {
				t.Fatalf("not loaded after %d lives: %v", lives, r.loadOnce(0, vs, last, source))
			}
		}
		if lives < 8 {
			t.Errorf("the loader lived through its load at the %dth time", lives)
		}
		for i, s := range servers {
			if what, reasons := served(r.t.Context(), s); what != "" {
				t.Errorf("at once, node %d serves %s: %v", i+1, what, reasons)
			}
		}
		time.Sleep(5 * rigElection)
		stop()
		for i, s := range servers {
			if what, reasons := served(r.t.Context(), s); what != "" || reasons[0] != codes.InvalidArgument {
				t.Errorf("later, node %d: %s, %v", i+1, what, reasons)
			}
			s.Stop(context.Background())
		}
		r.sameUsers(source)
		r.stop(r.nodes...)
		r.start(r.nodes...)
		servers = servers[:0]
		for _, n := range r.nodes {
			servers = append(servers, r.serve(n))
		}
		stop = r.anybody(servers)
		time.Sleep(5 * rigElection)
		stop()
		for _, s := range servers {
			s.Stop(context.Background())
		}
		r.stop(r.nodes...)
	})
}

// sameUsers checks that the cluster has the users and roles of a source.
func (r *rig) sameUsers(source *rights.State) {
	r.t.Helper()
	for _, n := range r.nodes {
		v := n.core.access.gate.View().Rights
		if !v.Enabled || v.Revision != source.Revision || len(v.Users()) != len(source.Users()) || len(v.Roles()) != len(source.Roles()) {
			r.t.Errorf("node %s has %d users and %d roles, checked %t, at revision %d", n.id, len(v.Users()), len(v.Roles()), v.Enabled, v.Revision)
		}
	}
	c, err := r.nodes[0].core.Placement().Credential(r.t.Context(), "root")
	if err != nil || string(c.Hash) != "$2a$10$theroots" {
		r.t.Errorf("%v, %v", c, err)
	}
}

// A watcher from before a load ends with what a new one is told, at every node, though the load is over at once.
func TestLoadEndsWatchers(t *testing.T) {
	bubble(t, 3, borders(3), func(o *Options) { o.BcryptCost = 4 }, func(r *rig) {
		r.publish(r.nodes...)
		ctx := r.t.Context()
		ended := make(chan error, len(r.nodes))
		var servers []*etcdapi.Server
		for _, n := range r.nodes {
			s := r.serve(n)
			servers = append(servers, s)
			w, err := pb.NewWatchClient(s.Conn()).Watch(ctx)
			if err != nil {
				t.Fatal(err)
			}
			create := &pb.WatchRequest_CreateRequest{CreateRequest: &pb.WatchCreateRequest{Key: []byte("k"), RangeEnd: []byte("l"), StartRevision: 1}}
			if err := w.Send(&pb.WatchRequest{RequestUnion: create}); err != nil {
				t.Fatal(err)
			}
			if created, err := w.Recv(); err != nil || !created.Created {
				t.Fatal(created, err)
			}
			go func() {
				for {
					a, err := w.Recv()
					if err == nil && len(a.Events) == 0 {
						continue
					}
					if err == nil {
						err = fmt.Errorf("told %d events of the load", len(a.Events))
					}
					ended <- err
					return
				}
			}()
		}
		vs, last := storeOf(100)
		if err := r.loadOnce(0, vs, last, nil); err != nil {
			t.Fatal(err)
		}
		for range r.nodes {
			if err := <-ended; status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "this cluster is being loaded") {
				t.Errorf("a watcher from before the load: %v", err)
			}
		}
		for _, s := range servers {
			s.Stop(context.Background())
		}
		r.stop(r.nodes...)
	})
}
