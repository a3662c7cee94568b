package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
)

// breakage is a kind of fault.
type breakage string

const (
	kill  breakage = "kill -9"
	stop  breakage = "SIGSTOP"
	power breakage = "power cut"
	hang  breakage = "disk hangs"
	full  breakage = "disk full"
)

// leading stands for the node that leads placement when the fault begins.
const leading = -1

// fault is one thing that breaks.
type fault struct {
	breakage
	victim int
}

// step is the faults that begin at the same moment, their least length, and how long
// the cluster was well before.
type step struct {
	faults      []fault
	hold, pause time.Duration
}

// name names the fault without its node.
func (s step) name() string {
	n := map[breakage]int{}
	var names []string
	for _, f := range s.faults {
		if n[f.breakage]++; n[f.breakage] == 1 {
			names = append(names, string(f.breakage))
		}
	}
	slices.Sort(names)
	for i, name := range names {
		if k := n[breakage(name)]; k > 1 {
			names[i] = fmt.Sprintf("%s on %d nodes", name, k)
		}
	}
	return strings.Join(names, " + ")
}

// leastHold is longer than lease and election timeout, for faults in which others take
// over from a node that is still alive. A node that is cut off is so for longer than the
// three election timeouts for which it goes by the rights that it knows.
var leastHold = map[breakage]time.Duration{
	kill: 500 * time.Millisecond, stop: 2500 * time.Millisecond, power: 500 * time.Millisecond, hang: 3 * time.Second, full: time.Second,
	paused: 2500 * time.Millisecond, cutOff: 5 * time.Second,
}

// schedule is one round of faults in a random order: each possible one on one node, one
// on all nodes at the same moment, and two at a time on two nodes.
func schedule(rng *rand.Rand, can []breakage) (steps []step) {
	victim := func() int {
		if rng.IntN(2) == 0 {
			return leading
		}
		return rng.IntN(nodes)
	}
	hold := func(b breakage) time.Duration {
		return leastHold[b] + time.Duration(rng.Int64N(int64(leastHold[b])))
	}
	for _, b := range can {
		steps = append(steps, step{faults: []fault{{b, victim()}}, hold: hold(b)})
	}
	blackout := step{hold: 100 * time.Millisecond}
	worst := kill
	if slices.Contains(can, power) {
		worst = power
	}
	for i := range nodes {
		blackout.faults = append(blackout.faults, fault{worst, i})
	}
	// Two of three nodes fail: nothing can be served, and nothing may go wrong.
	two := []breakage{can[rng.IntN(len(can))], can[rng.IntN(len(can))]}
	first := rng.IntN(nodes)
	second := (first + 1 + rng.IntN(nodes-1)) % nodes
	steps = append(steps, blackout, step{faults: []fault{{two[0], first}, {two[1], second}}, hold: max(hold(two[0]), hold(two[1]))})
	rng.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	for i := range steps {
		steps[i].pause = 300*time.Millisecond + time.Duration(rng.Int64N(int64(700*time.Millisecond)))
	}
	return steps
}

// inject lets a fault happen. heal ends it.
func (r *run) inject(f fault) (heal func() error, err error) {
	n := r.c.nodes[f.victim]
	switch f.breakage {
	case kill:
		n.kill()
		return func() error { r.c.start(n); return nil }, nil
	case stop:
		n.signal(syscall.SIGSTOP)
		return func() error { n.signal(syscall.SIGCONT); return nil }, nil
	case power:
		return n.losePower(r.c)
	case hang:
		return n.data.hang(r.t)
	case full:
		return n.data.fill()
	default: // it is not inside a machine
	}
	return nil, fmt.Errorf("no fault is called %q", f.breakage)
}

// servePatience bounds how long the cluster may take to serve. It is far more than
// needed, because the cluster shares its machine.
const servePatience = time.Minute

// outage is how long it took until the cluster served again.
type outage struct {
	count         int
	during, after time.Duration // the longest; during is 0 if it need not serve
}

// apply does one step: it injects the faults, requires the others to serve, heals, and
// requires all to serve.
func (r *run) apply(ctx context.Context, s step) {
	r.sleep(ctx, s.pause)
	var victims, others []int
	for i, f := range s.faults {
		if f.victim == leading {
			s.faults[i].victim = r.c.leader(ctx)
		}
		victims = append(victims, s.faults[i].victim)
	}
	for i := range nodes {
		if !slices.Contains(victims, i) {
			others = append(others, i)
		}
	}
	r.t.Logf("%7s %s on %v", time.Since(r.began).Round(time.Millisecond), s.name(), names(victims))
	start := time.Now()
	heals := make([]func() error, len(s.faults))
	r.atOnce(len(s.faults), func(i int) (err error) { heals[i], err = r.inject(s.faults[i]); return err })
	o := r.outages[s.name()]
	if o == nil {
		o = &outage{}
		r.outages[s.name()] = o
	}
	o.count++
	if len(victims) == 1 {
		o.during = max(o.during, r.watch(ctx, s.faults[0], others))
	}
	r.sleep(ctx, s.hold-time.Since(start))
	r.atOnce(len(heals), func(i int) error { return heals[i]() })
	o.after = max(o.after, r.serves(ctx, s.name()+" healed", []int{0, 1, 2}, true))
	if r.t.Failed() {
		r.t.FailNow()
	}
}

// atOnce does n things at the same moment and waits for all. An error of the rig fails
// the test.
func (r *run) atOnce(n int, do func(i int) error) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			if err := do(i); err != nil {
				r.t.Error(err)
			}
		})
	}
	wg.Wait()
	if r.t.Failed() {
		r.t.FailNow()
	}
}

// watch requires the cluster to serve while one node is broken. Beside a full disk it
// only reads everything; otherwise it also writes, through the other nodes. It returns
// how long that took.
func (r *run) watch(ctx context.Context, f fault, others []int) time.Duration {
	if f.breakage != full {
		return r.serves(ctx, string(f.breakage), others, true)
	}
	n := r.c.nodes[f.victim]
	for term := r.c.still.term(servePatience, "the word of a full disk"); ; r.sleep(ctx, 50*time.Millisecond) {
		actx, cancel := context.WithTimeout(ctx, patience)
		alarms, err := n.client.AlarmList(actx)
		cancel()
		if err == nil && slices.ContainsFunc(alarms.Alarms, func(a *etcdserverpb.AlarmMember) bool {
			return a.MemberID == alarms.Header.MemberId && a.Alarm == etcdserverpb.AlarmType_NOSPACE
		}) {
			break
		}
		if term.over() {
			r.c.late("faults: the disk of %s is full and it does not say so: %v, %v", n.name, alarms, err)
			break
		}
	}
	return r.serves(ctx, string(f.breakage), []int{0, 1, 2}, false)
}

// serves requires a write, or a read, of every range through each of the nodes, and
// returns how long that took. The first attempts have short timeouts: an early request
// may wait for a leader that is gone, and a new one need not.
func (r *run) serves(ctx context.Context, when string, through []int, writes bool) time.Duration {
	start := time.Now()
	ctx, cancel := r.c.still.term(servePatience, "%s: serving", when).context(ctx)
	defer cancel()
	starts := append([]string{"a"}, borders...)
	var wg sync.WaitGroup
	for _, node := range through {
		for i, start := range starts {
			s := r.probes[node*len(starts)+i]
			wg.Go(func() {
				for s.patience = time.Second; ; s.patience = min(s.patience+time.Second, patience) {
					var err error
					if s.n++; writes {
						err = s.insert(ctx, start)
					} else {
						err = s.get(ctx, start+"!/never written")
					}
					if err == nil {
						return
					}
					if ctx.Err() != nil {
						r.c.late("liveness: %s: range %s through %s is not served in %v: %v", when, start, r.c.nodes[node].name, servePatience, err)
						return
					}
					r.sleep(ctx, 20*time.Millisecond)
				}
			})
		}
	}
	wg.Wait()
	return time.Since(start)
}

func (r *run) sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func names(victims []int) (out []string) {
	for _, v := range victims {
		out = append(out, fmt.Sprintf("n%d", v+1))
	}
	return out
}
