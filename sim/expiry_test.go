package sim

import (
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/sim/judge"
)

// expiring is a cluster whose leases expire.
type expiring struct {
	t *testing.T
	c *cluster
	h *judge.History
}

// ask repeats an operation until it has an answer.
func (x *expiring) ask(cl *client, req proto.Message) proto.Message {
	o := cl.ask(req, requestTimeout)
	if o == nil || o.Outcome != judge.Answered {
		x.t.Errorf("no answer: %s", o)
		return nil
	}
	return o.Response
}

// side calls f with its own clients for each of n tasks.
func (x *expiring) side(clients, n int, f func(cl *client, i int)) {
	var wg sync.WaitGroup
	for w := range clients {
		cl := newClient(x.c, x.h, w)
		wg.Go(func() {
			for i := w; i < n; i += clients {
				f(cl, i)
			}
		})
	}
	wg.Wait()
}

// hold grants a lease and attaches so many keys in all ranges to it.
func (x *expiring) hold(cl *client, id int64, ttl time.Duration, keys int) {
	x.ask(cl, &pb.LeaseGrantRequest{ID: id, TTL: int64(ttl / time.Second)})
	const most = 100
	for from := 0; from < keys; from += most {
		t := &pb.TxnRequest{}
		for k := from; k < min(from+most, keys); k++ {
			op := putOp(fmt.Sprintf("%c~%d-%d", "adgjmpsv"[(int(id)+k)%8], id, k), []byte("v"))
			op.GetRequestPut().Lease = id
			t.Success = append(t.Success, op)
		}
		x.ask(cl, t)
	}
}

// left returns how many keys there are.
func (x *expiring) left(cl *client) int64 {
	all := readAll()
	all.CountOnly = true
	r, ok := x.ask(cl, all).(*pb.RangeResponse)
	if !ok {
		return 0
	}
	return r.GetCount()
}

// TestMassExpiry: thousands of leases expire together, some of them with 1,000 keys in
// all ranges. Puts go on undisturbed, and the leases end at the allowed rate.
func TestMassExpiry(t *testing.T) {
	// leases end, each with a key, and large ones with 1,000 keys each.
	leases, large := 2000, 2
	if testing.Short() {
		leases, large = 500, 1
	}
	const ttl = 10 * time.Second
	// slowest is far above the time of a put, and far below it if a put had to wait for
	// the ends of other leases.
	const slowest = 100 * time.Millisecond
	// last is when the last lease has ended: 1,000 end in a second, and it was granted
	// within half a second after the first.
	last := time.Duration(leases)*time.Second/1000 + time.Second
	cryptotest.SetGlobalRandom(t, 1)
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Nodes: 3, Borders: []string{"d", "g", "j", "m", "p", "s", "v"}, Seed: 1}
		x := &expiring{t: t, c: newCluster(cfg, rand.New(rand.NewPCG(1, 1)), NewTrace(io.Discard)), h: &judge.History{}}
		defer x.c.crash(0, x.c.machines...)
		if err := x.c.bootAll(); err != nil {
			t.Fatal(err)
		}
		begin := x.c.elapsed()
		x.side(64, leases, func(cl *client, i int) { x.hold(cl, int64(i+1), ttl, 1) })
		x.side(large, large, func(cl *client, i int) { x.hold(cl, int64(leases+i+1), ttl, 1000) })
		granted := x.c.elapsed() - begin
		if got := x.left(newClient(x.c, x.h, 100)); got != int64(leases+1000*large) || granted > ttl/2 {
			t.Fatalf("%d keys after %v", got, granted)
		}
		x.c.sleep(ttl - granted - time.Second)
		const putters = 8
		stop := make(chan struct{})
		var wg sync.WaitGroup
		var puts [putters]int
		for w := range putters {
			cl := newClient(x.c, x.h, 200+w)
			wg.Go(func() {
				key := fmt.Sprintf("%c0", "adgjmpsv"[w])
				for ; !closed(stop); puts[w]++ {
					from := x.c.elapsed()
					x.ask(cl, &pb.PutRequest{Key: []byte(key), Value: []byte("v")})
					if took := x.c.elapsed() - from; took > slowest {
						t.Errorf("a put of %s took %v at %v", key, took, from-begin)
					}
					x.c.sleep(5 * time.Millisecond)
				}
			})
		}
		probe := newClient(x.c, x.h, 101)
		for x.left(probe) > putters && x.c.elapsed()-begin < 2*ttl {
			x.c.sleep(20 * time.Millisecond)
		}
		if took := x.c.elapsed() - begin - granted - ttl; took > last {
			t.Errorf("%d keys %v after the leases expired", x.left(probe), took)
		}
		close(stop)
		wg.Wait()
		for w, n := range puts {
			if n < 100 {
				t.Errorf("putter %d made %d puts", w, n)
			}
		}
		t.Logf("granted in %v, puts %v, gone %v after", granted, puts, x.c.elapsed()-begin-ttl)
	})
}
