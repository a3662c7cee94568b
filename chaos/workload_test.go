package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// perNode is how many clients each node has; some more have all three nodes.
	perNode  = 5
	roaming  = 3
	patience = 5 * time.Second
	// pauseMax bounds the pause of a client between two operations. It allows a real
	// load, but no more operations than can be read back within the time of the run.
	pauseMax = 30 * time.Millisecond
	// setback is how long a client waits after an error.
	setback = 50 * time.Millisecond
	// generation is how many operations the registers of one generation get before new
	// ones follow. It bounds porcupine's search.
	generation = 1500
	// registersPerSide is how many registers a generation has on either side of a
	// border.
	registersPerSide = 2
	paddingMax       = 1500
)

// workload is the clients and what they share.
type workload struct {
	c       *cluster
	h       *history
	clients []*clientv3.Client // one for each node, then one for all
	touched atomic.Int64       // operations on registers
	writers sync.WaitGroup
	stop    context.CancelFunc
}

// registerKey is the key of a register: the last one of the range before a border or
// the first one of the range behind it, so that a scan over the border finds nothing
// else.
func registerKey(border, side string, gen int64, i int) string {
	if side == "<" {
		border = string(border[0] - 1)
		side = "~"
	} else {
		side = "!"
	}
	return fmt.Sprintf("%s%s/%06d/%d", border, side, gen, i)
}

// privateKey is a key that only one operation writes, in the range of the register.
func privateKey(start string, what byte, client, n int) string {
	return fmt.Sprintf("%c/%c/%d/%d", start[0], what, client, n)
}

// isRegister says whether a key is a register's.
func isRegister(key string) bool { return len(key) > 1 && (key[1] == '~' || key[1] == '!') }

// startWorkload starts the clients; end ends them and waits.
func startWorkload(ctx context.Context, c *cluster, h *history, seed uint64) *workload {
	w := &workload{c: c, h: h}
	ctx, w.stop = context.WithCancel(ctx)
	var urls []string
	for _, n := range c.nodes {
		w.clients = append(w.clients, n.client)
		urls = append(urls, n.url)
	}
	w.clients = append(w.clients, c.connect(urls...))
	for id := range nodes*perNode + roaming {
		at := min(id/perNode, nodes)
		s := &session{w: w, id: id, node: at, cl: w.clients[at], rng: rand.New(rand.NewPCG(seed, uint64(id))), last: map[string]string{}, patience: patience}
		w.writers.Go(func() { s.run(ctx) })
	}
	return w
}

func (w *workload) end() {
	w.stop()
	w.writers.Wait()
	w.clients[nodes].Close()
}

// session is one client: one operation at a time.
type session struct {
	w        *workload
	id, node int // node is len(nodes) for all of them
	cl       *clientv3.Client
	rng      *rand.Rand
	n        int
	last     map[string]string // the value that the client knows of each register
	gen      int64
	patience time.Duration
}

func (s *session) run(ctx context.Context) {
	for ctx.Err() == nil {
		pause := time.Duration(s.rng.Int64N(int64(pauseMax)))
		// The end of the run does not cut short an operation that has begun.
		if err := s.one(context.WithoutCancel(ctx)); err != nil {
			pause += setback
		}
		time.Sleep(pause)
	}
}

// one does one operation.
func (s *session) one(ctx context.Context) error {
	s.n++
	if s.rng.IntN(100) < 35 {
		return s.insert(ctx, string(rune('a'+s.rng.IntN(26))))
	}
	gen := s.w.touched.Add(1) / generation
	if gen != s.gen {
		s.gen = gen
		clear(s.last)
	}
	border := borders[s.rng.IntN(len(borders))]
	key := registerKey(border, []string{"<", ">"}[s.rng.IntN(2)], gen, s.rng.IntN(registersPerSide))
	switch d := s.rng.IntN(100); {
	case d < 30:
		return s.put(ctx, key)
	case d < 65:
		return s.get(ctx, key)
	case d < 83:
		return s.compare(ctx, key)
	case d < 93:
		return s.remove(ctx, key)
	default:
		return s.scan(ctx, registerKey(border, "<", gen, 0), registerKey(border, ">", gen, registersPerSide))
	}
}

// value is a value that nobody else writes.
func (s *session) value() string { return fmt.Sprintf("%d-%d.", s.id, s.n) }

func (s *session) do(ctx context.Context, o *op, call func(ctx context.Context) error) error {
	o.client, o.node = s.id, s.node
	s.w.h.begin(o)
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	err := call(ctx)
	s.w.h.end(o, err)
	return err
}

func (s *session) insert(ctx context.Context, start string) error {
	o := &op{kind: insert, key: privateKey(start, 'i', s.id, s.n), value: s.value() + strings.Repeat("x", s.rng.IntN(paddingMax))}
	return s.do(ctx, o, func(ctx context.Context) error {
		resp, err := s.cl.Put(ctx, o.key, o.value)
		if err == nil {
			o.rev = resp.Header.Revision
		}
		return err
	})
}

func (s *session) put(ctx context.Context, key string) error {
	o := &op{kind: put, key: key, value: s.value()}
	return s.do(ctx, o, func(ctx context.Context) error {
		resp, err := s.cl.Put(ctx, key, o.value, clientv3.WithPrevKV())
		if err != nil {
			return err
		}
		o.rev = resp.Header.Revision
		if resp.PrevKv != nil {
			o.seen = []kv{kvOf(resp.PrevKv)}
		}
		s.last[key] = o.value
		return nil
	})
}

func (s *session) get(ctx context.Context, key string) error {
	o := &op{kind: get, key: key}
	return s.do(ctx, o, func(ctx context.Context) error {
		resp, err := s.cl.Get(ctx, key)
		if err != nil {
			return err
		}
		o.rev = resp.Header.Revision
		for _, p := range resp.Kvs {
			o.seen = append(o.seen, kvOf(p))
		}
		s.last[key] = o.found().value
		return nil
	})
}

func (s *session) scan(ctx context.Context, from, to string) error {
	o := &op{kind: scan, key: from, end: to}
	return s.do(ctx, o, func(ctx context.Context) error {
		resp, err := s.cl.Get(ctx, from, clientv3.WithRange(to))
		if err != nil {
			return err
		}
		o.rev = resp.Header.Revision
		for _, p := range resp.Kvs {
			o.seen = append(o.seen, kvOf(p))
		}
		return nil
	})
}

// compare expects the value that the client last knew of the register. If the client
// knows none, it reads the register.
func (s *session) compare(ctx context.Context, key string) error {
	old := s.last[key]
	if old == "" {
		return s.get(ctx, key)
	}
	o := &op{kind: compare, key: key, value: s.value(), old: old}
	return s.do(ctx, o, func(ctx context.Context) error {
		resp, err := s.cl.Txn(ctx).If(clientv3.Compare(clientv3.Value(key), "=", old)).
			Then(clientv3.OpPut(key, o.value)).Else(clientv3.OpGet(key)).Commit()
		if err != nil {
			return err
		}
		o.rev, o.did = resp.Header.Revision, resp.Succeeded
		if o.did {
			s.last[key] = o.value
			return nil
		}
		for _, p := range resp.Responses[0].GetResponseRange().Kvs {
			o.seen = append(o.seen, kvOf(p))
		}
		s.last[key] = o.found().value
		return nil
	})
}

func (s *session) remove(ctx context.Context, key string) error {
	o := &op{kind: remove, key: key, marker: privateKey(key, 'm', s.id, s.n)}
	return s.do(ctx, o, func(ctx context.Context) error {
		resp, err := s.cl.Txn(ctx).Then(clientv3.OpDelete(key, clientv3.WithPrevKV()), clientv3.OpPut(o.marker, key)).Commit()
		if err != nil {
			return err
		}
		d := resp.Responses[0].GetResponseDeleteRange()
		o.rev, o.did = resp.Header.Revision, d.Deleted > 0
		for _, p := range d.PrevKvs {
			o.seen = append(o.seen, kvOf(p))
		}
		delete(s.last, key)
		return nil
	})
}
