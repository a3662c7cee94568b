package chaos

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/sim"
	"github.com/skeindb/skein/sim/judge"
)

// stormLength bounds one storm, because the checkers keep all states. A longer run is
// several storms, each on new machines and with the next seed.
const stormLength = 3 * time.Minute

// storm is one run of five machines.
type storm struct {
	t        *testing.T
	c        *cluster
	net      *network
	l        *load
	op       *operator
	binary   string // of the nodes
	dir      string // where evidence goes
	mutation string // the number of the nodes' mutation
	users    bool   // whether requests are checked
	began    time.Time
	leftOut  []string
	unwatch  func() // ends the watch for standstills of the machine

	mu sync.Mutex
	// Guarded by mu.
	timeline bytes.Buffer
	report   bytes.Buffer // what is not printed at once
	outages  map[breakage]*outage
	measured []string
}

// Five real processes, each in its own network namespace and on its own disk, under
// load and with watchers. An operator changes the cluster while two to four things are
// broken at a time. The simulator's checkers judge what clients were told.
func TestStorm(t *testing.T) {
	if testing.Short() {
		t.Skip("runs real processes for a minute")
	}
	seed, duration := settings(t)
	binary := buildForStorms(t)
	began := time.Now()
	for i := uint64(0); ; i++ {
		left := min(stormLength, duration-time.Since(began))
		if i > 0 && left <= 0 {
			return
		}
		ok := t.Run(fmt.Sprintf("seed=%d", seed+i), func(t *testing.T) {
			for _, wrong := range runStorm(t, binary, seed+i, left, "") {
				t.Error(wrong)
			}
		})
		if !ok {
			t.Logf("again with SEED=%d", seed+i)
			return
		}
	}
}

// buildForStorms builds the nodes' binary, or leaves out a test of storms.
func buildForStorms(t *testing.T) (binary string) {
	t.Helper()
	if noNamespace != "" {
		leaveOut(t, errors.New(noNamespace))
	}
	return build(t)
}

// runStorm makes one storm of nodes of a binary, with a mutation if one is named, and
// returns the violations.
func runStorm(t *testing.T, binary string, seed uint64, duration time.Duration, mutation string) []string {
	t.Helper()
	s := &storm{t: t, binary: binary, dir: evidenceDir(t), mutation: mutation, users: hasUsers(seed), began: time.Now(), outages: map[breakage]*outage{}}
	t.Cleanup(s.keep)
	missing, err := s.build(seed)
	if err != nil {
		leaveOut(t, err)
	}
	can, leftOut := possible(missing)
	s.leftOut = leftOut
	if missing == nil {
		can = append(can, rotTable, rotLog)
	}
	if seed%2 == 1 {
		can = append(can, paused)
	}
	say := t.Logf
	if nothingLeftOut() {
		say = t.Errorf
	}
	for _, l := range leftOut {
		say("left out: %s", l)
	}
	ctx := t.Context()
	s.l = newLoad(s.c, seed, s.began)
	defer s.l.close()
	s.op = newOperator(ctx, s, seed)
	s.measure("serves at first", s.serves(ctx, "start", s.everyone(), true))
	if s.users {
		s.l.startUsers(ctx, s, seed%2 == 1)
	}
	s.l.start(ctx)
	s.play(ctx, seed, duration, append(can, ofNetwork...))
	var versions []judge.Version
	drained := false
	if s.well() {
		s.promised(append(can, ofNetwork...))
		versions, drained = s.end(ctx)
	}
	s.l.close()
	if s.well() {
		s.c.stop()
	}
	s.unwatch()
	return s.judge(versions, drained)
}

// evidenceDir is a directory that stays if the test fails: go test's own with
// -artifacts, otherwise one that is removed after a successful run.
func evidenceDir(t *testing.T) string {
	t.Helper()
	if f := flag.Lookup("test.artifacts"); f != nil && f.Value.String() == "true" {
		return t.ArtifactDir()
	}
	dir, err := os.MkdirTemp("", "skein-chaos-") //nolint:usetesting // it is to outlast a test that fails
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			return
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// keep writes down the evidence of a failed run.
func (s *storm) keep() {
	if s.c != nil && s.c.told != nil {
		err := s.c.told.close()
		if !s.t.Failed() {
			err = errors.Join(err, os.Remove(s.c.told.file.Name())) // the largest of them by far
		}
		if err != nil {
			s.t.Error(err)
		}
	}
	if !s.t.Failed() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := os.WriteFile(filepath.Join(s.dir, "timeline.txt"), s.timeline.Bytes(), 0o600)
	if s.l != nil {
		f, err := os.Create(filepath.Join(s.dir, "history.txt"))
		if err == nil {
			_, err = s.l.h.WriteTo(f)
			err = errors.Join(err, f.Close())
		}
		errs = errors.Join(errs, err)
	}
	if errs != nil {
		s.t.Error(errs)
	}
	s.t.Logf("timeline, history, the messages to watchers and the nodes' logs are in %s", s.dir)
	if !testing.Verbose() {
		s.t.Logf("\n%s\n%s", s.report.Bytes(), s.timeline.Bytes())
	}
}

// note writes a line of the timeline. With -v it is printed at once. Otherwise it comes behind what was
// wrong, which a reader of a failed run looks for first.
func (s *storm) note(format string, args ...any) {
	line := fmt.Sprintf("%8s %s", time.Since(s.began).Round(time.Millisecond), fmt.Sprintf(format, args...))
	s.mu.Lock()
	fmt.Fprintln(&s.timeline, line)
	s.mu.Unlock()
	if testing.Verbose() {
		s.t.Log(line)
	}
}

// measure records a time for the report.
func (s *storm) measure(what string, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.measured = append(s.measured, fmt.Sprintf("%s\t%s", what, d.Round(time.Millisecond)))
}

func (s *storm) well() bool { return len(s.c.blames()) == 0 && !s.t.Failed() }

// build makes the machines and starts a node on each. missing says why they have no
// disks of their own.
func (s *storm) build(seed uint64) (missing, err error) {
	t := s.t
	if s.net, err = newNetwork(t, stormMachines+1); err != nil {
		return nil, err
	}
	dir := t.TempDir()
	splits := filepath.Join(dir, "split-keys")
	if err := os.WriteFile(splits, []byte(strings.Join(borders, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var members []string
	for i := range stormMachines { // the last machine is for the joining node
		members = append(members, fmt.Sprintf("n%d=%s", i+1, peerURL(i)))
	}
	told, err := newTellings(filepath.Join(s.dir, "told.txt.gz"), s.began)
	if err != nil {
		t.Fatal(err)
	}
	s.c = &cluster{t: t, still: newStandstills(s.note), told: told}
	if s.users {
		s.c.root = &login{name: "root", password: sim.RootPassword}
		if s.c.tokens, err = tokensOf(seed); err != nil {
			t.Fatal(err)
		}
	}
	s.unwatch = s.c.still.watch(t.Context())
	t.Cleanup(s.unwatch)
	for i := range stormMachines + 1 {
		n := &node{name: fmt.Sprintf("n%d", i+1), binary: s.binary, url: fmt.Sprintf("http://%s:2379", address(i)), space: &s.net.spaces[i], mutation: s.mutation}
		n.log = filepath.Join(s.dir, n.name+".log")
		n.mount = filepath.Join(dir, n.name)
		if missing == nil {
			n.data, missing = newDisk(t, n.mount, stormDiskBytes)
		}
		// Leases are not safe where machines are paused: that has a setting of its own.
		if seed%2 == 1 {
			n.clock = filepath.Join(dir, n.name+".clock")
			if err := writeLag(n.clock, 0); err != nil {
				t.Fatal(err)
			}
		}
		n.away.Store(i == stormMachines)
		s.c.nodes = append(s.c.nodes, n)
		n.args = append(s.c.arguments(i), "--initial-cluster", strings.Join(members, ","), "--initial-split-keys", splits)
	}
	if s.c.admin, err = newAdmin(s.c.urls()); err != nil {
		t.Fatal(err)
	}
	if root := s.c.root; root != nil {
		s.c.admin.As(root.name, root.password)
	}
	t.Cleanup(s.c.close)
	for _, n := range s.c.nodes {
		n.client = s.c.connect(n.url)
		if !n.away.Load() {
			s.c.start(n)
		}
	}
	return missing, nil
}

// stormNotify is how often watchers that ask for it get progress notifications.
const stormNotify = 200 * time.Millisecond

// stormDiskBytes is the size of a machine's disk: some segments of the log fit, and it
// can be filled at once.
const stormDiskBytes = 768 << 20

// everyone is all machines with a node, except those that an operator is about to
// replace.
func (s *storm) everyone() (all []int) {
	for i, n := range s.c.nodes {
		if !n.away.Load() {
			all = append(all, i)
		}
	}
	return all
}

// mostDealt bounds how often a fault without effect is dealt again.
const mostDealt = 5

// play runs round after round of faults, and the operator beside them. Each fault must
// take effect once, and each change of ranges must be made, however short the time or
// long the rig's standstills.
func (s *storm) play(ctx context.Context, seed uint64, duration time.Duration, can []breakage) {
	s.op.start(ctx)
	rng := rand.New(rand.NewPCG(seed, 0))
	over := time.Now().Add(duration)
	for dealt := 0; s.well() && dealt < mostDealt; dealt++ {
		deck := s.missed(can)
		switch {
		case time.Now().Before(over):
			deck, dealt = can, 0
		case len(deck) == 0 && len(s.unmade()) > 0:
			deck = can // the missing changes must be made while things break
		}
		for _, r := range deal(rng, stormMachines, deck, can) {
			if !s.well() || len(s.missed(can)) == 0 && len(s.unmade()) == 0 && time.Now().After(over) {
				break
			}
			s.weather(ctx, r)
		}
	}
	s.op.end()
}

// missed are the faults that have not taken effect yet.
func (s *storm) missed(can []breakage) []breakage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(can), func(b breakage) bool { return s.outages[b] != nil })
}

// unmade are the changes of ranges that were not made yet.
func (s *storm) unmade() []string {
	return slices.DeleteFunc([]string{opSplit, opMerge, opMove, opTransfer}, func(op string) bool { return !s.op.has[op] || s.op.done(op) > 0 })
}

// promised requires that, while things broke, each possible fault took effect and each
// change of ranges that this build supports was made.
func (s *storm) promised(can []breakage) {
	for _, b := range s.missed(can) {
		s.c.late("promised: %s never took effect", b)
	}
	for _, op := range s.unmade() {
		s.c.late("promised: no %s was made in the storm", op)
	}
}

// weather runs one round of faults, heals it, and requires all machines to serve.
func (s *storm) weather(ctx context.Context, r round) {
	wait(ctx, r.pause)
	r = r.settle(s.c.leader(ctx)%stormMachines, stormMachines)
	if r.has(rotLog) || r.has(rotTable) {
		// Until it is mended no other node leaves or is drained: that would be a second loss.
		s.op.nodes.Lock()
		defer s.op.nodes.Unlock()
	}
	s.note("%s", r)
	start := time.Now()
	served := make(chan struct{})
	begun := make(chan struct{}, len(r.troubles))
	happened := make([]bool, len(r.troubles))
	var wg sync.WaitGroup
	for i, t := range r.troubles {
		wg.Go(func() {
			wait(ctx, t.after)
			heal, err := s.inject(ctx, t)
			begun <- struct{}{}
			if err != nil {
				s.t.Errorf("%s: %v", t, err)
				return
			}
			wait(ctx, t.hold)
			<-served
			if happened[i], err = heal(); err != nil {
				s.t.Errorf("%s: heal: %v", t, err)
			}
			s.note("healed: %s, it took effect: %t", t, happened[i])
		})
	}
	for range r.troubles {
		<-begun
	}
	var during time.Duration
	if through := r.mustServe(stormMachines); len(through) > 0 && !s.t.Failed() {
		others := slices.DeleteFunc(s.everyone(), func(i int) bool { return i < stormMachines && !slices.Contains(through, i) })
		// The ranges of a machine with a full disk need not take writes until another one
		// leads.
		full := slices.ContainsFunc(r.troubles, func(t trouble) bool { return t.breakage == full })
		during = s.serves(ctx, r.String(), others, !full)
	}
	close(served)
	wg.Wait()
	last := time.Since(start)
	after := s.serves(ctx, r.String()+" healed", s.everyone(), true)
	s.note("all serve again, %v after a round of %v", after.Round(time.Millisecond), last.Round(time.Millisecond))
	s.tally(r, happened, during, after)
}

// tally records the outcome of a round under the names of its faults.
func (s *storm) tally(r round, happened []bool, during, after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, t := range r.troubles {
		if !happened[i] {
			continue
		}
		o := s.outages[t.breakage]
		if o == nil {
			o = &outage{}
			s.outages[t.breakage] = o
		}
		o.count++
		o.during, o.after = max(o.during, during), max(o.after, after)
	}
}

// failures is how many troubles have taken effect.
func (s *storm) failures() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.outages {
		n += o.count
	}
	return n
}

// inject lets a trouble happen. heal ends it.
func (s *storm) inject(ctx context.Context, t trouble) (heal healing, err error) {
	switch t.breakage {
	case cutOff:
		return s.net.drop(t.victim, anythingIn, anythingOut)
	case clientless:
		return s.net.drop(t.victim, clientsIn, clientsOut)
	case lossy:
		return s.net.drop(t.victim, lossyIn, lossyOut)
	case slow:
		return s.net.slow(t.victim)
	case bothWays, oneLink:
		return s.net.drop(t.victim, from(t.peers), to(t.peers))
	case deaf, oneWay:
		return s.net.drop(t.victim, from(t.peers), nil)
	case mute:
		return s.net.drop(t.victim, nil, to(t.peers))
	case ring:
		return s.neighboursAlone(t.peers)
	default: // it is inside of the machine
	}
	n := s.c.nodes[t.victim]
	if !n.busy.TryLock() {
		s.note("not: %s: it is being replaced", t)
		return func() (bool, error) { return false, nil }, nil
	}
	mend, err := s.inside(ctx, n, t)
	if err != nil {
		n.busy.Unlock()
		return nil, err
	}
	return func() (bool, error) {
		defer n.busy.Unlock()
		return mend()
	}, nil
}

// neighboursAlone lets each machine reach only its two neighbours in an order.
func (s *storm) neighboursAlone(order []int) (heal healing, err error) {
	var heals []healing
	heal = func() (took bool, err error) {
		for _, h := range heals {
			lost, herr := h()
			took, err = took || lost, errors.Join(err, herr)
		}
		return took, err
	}
	k := len(order)
	for i, m := range order {
		var strangers []int
		for j := 2; j < k-1; j++ {
			strangers = append(strangers, order[(i+j)%k])
		}
		h, err := s.net.drop(m, from(strangers), nil)
		if err != nil {
			_, herr := heal()
			return nil, errors.Join(err, herr)
		}
		heals = append(heals, h)
	}
	return heal, nil
}

// inside breaks something inside of a machine.
func (s *storm) inside(ctx context.Context, n *node, t trouble) (heal healing, err error) {
	var mend func() error
	switch t.breakage {
	case kill:
		n.kill()
		mend = func() error { s.c.start(n); return nil }
	case stop:
		n.signal(syscall.SIGSTOP)
		return func() (bool, error) {
			took := n.stands()
			n.signal(syscall.SIGCONT)
			return took, nil
		}, nil
	case paused:
		return s.pauses(ctx, n)
	case power:
		mend, err = n.losePower(s.c)
	case hang:
		mend, err = n.data.hang(s.t)
	case full:
		mend, err = n.data.fill()
	case rotTable:
		return s.rots(ctx, n, t.rng())
	case rotLog:
		return s.rotsLog(ctx, n, t.rng())
	default: // it is not inside
		err = fmt.Errorf("no fault is called %q", t.breakage)
	}
	return func() (bool, error) { return true, mend() }, err
}

// serves requires a write of every range, or a read of everything, through each of the
// machines, and returns how long that took.
func (s *storm) serves(ctx context.Context, when string, through []int, writes bool) time.Duration {
	term := s.c.still.term(stormPatience, "%s: serving", when)
	ctx, cancel := term.context(ctx)
	defer cancel()
	var wg sync.WaitGroup
	for _, machine := range through {
		wg.Go(func() {
			r := s.op.probes[machine]
			reqs := r.Probes()
			if !writes {
				reqs = reqs[len(reqs)-1:]
			}
			for _, req := range reqs {
				if o := s.insist(ctx, machine, r, req); o.Outcome != judge.Answered {
					s.c.late("liveness: %s: machine %d does not serve within %v: %s", when, machine+1, stormPatience, o)
					return
				}
			}
		})
	}
	wg.Wait()
	return term.took()
}

// stormPatience bounds how long the cluster may take to serve. It is far more than
// needed, because five processes and their clients share a machine.
const stormPatience = 90 * time.Second

// insist repeats a request until it is answered. The first attempts have short
// timeouts: an early one may wait for a leader that is gone, and a new one need not.
func (s *storm) insist(ctx context.Context, machine int, r *sim.Requests, req proto.Message) *judge.Op {
	for p := time.Second; ; p = min(p+time.Second, patience) {
		o := s.l.do(machine, probeIDs+machine, req, p)
		if o.Outcome == judge.Answered || ctx.Err() != nil {
			return o
		}
		if put, ok := req.(*etcdserverpb.PutRequest); ok {
			again := proto.CloneOf(put) // the first attempt may still take effect
			again.Value = r.Value()
			req = again
		}
		wait(ctx, 50*time.Millisecond)
	}
}

// end checks a cluster that has been healed. It returns all versions there are, and
// whether no lease is left.
func (s *storm) end(ctx context.Context) (versions []judge.Version, drained bool) {
	healed := time.Now()
	s.measure("serves at the end", s.serves(ctx, "end", s.everyone(), true))
	s.op.calm(ctx)
	s.l.endWrites()
	if !s.well() {
		return nil, false
	}
	drained = s.drain(ctx)
	rev := s.lastWords(ctx)
	s.settled(ctx, healed)
	s.watchersHaveAll(ctx, rev)
	return s.readBack(ctx, rev), drained
}

// drain waits until all leases have expired.
func (s *storm) drain(ctx context.Context) bool {
	term := s.c.still.term(stormPatience, "the end of the leases")
	for {
		o := s.l.do(len(s.c.nodes), probeIDs+len(s.c.nodes), &etcdserverpb.LeaseLeasesRequest{}, patience)
		if a, ok := o.Response.(*etcdserverpb.LeaseLeasesResponse); ok && len(a.GetLeases()) == 0 {
			s.measure("no lease is left after", term.took())
			return true
		}
		if term.over() {
			s.c.late("leases: some are left %v after the last was renewed: %s", term.took(), o)
			return false
		}
		wait(ctx, 200*time.Millisecond)
	}
}

// lastWords makes a change that every watcher sees, and reads everything through each
// machine. It returns the revision of the change.
func (s *storm) lastWords(ctx context.Context) int64 {
	term := s.c.still.term(stormPatience, "the last words")
	ctx, cancel := term.context(ctx)
	defer cancel()
	r := s.op.probes[0]
	o := s.lastChange(r)
	for o.Outcome != judge.Answered && s.c.still.stood(term.start, time.Now()) > 0 && !term.over() {
		if term.first() {
			s.note("excused: the last change is asked for again, for the machine stood still: %s", o)
		}
		o = s.lastChange(r) // nobody waited for the one before
	}
	if o.Outcome != judge.Answered {
		s.c.late("liveness: the last change: %s", o)
		return 0
	}
	for _, machine := range s.everyone() {
		reqs := r.Probes()
		if o := s.insist(ctx, machine, r, reqs[len(reqs)-1]); o.Outcome != judge.Answered {
			s.c.late("liveness: everything, through machine %d: %s", machine+1, o)
		}
	}
	return o.Revision()
}

// lastChange makes a change that every watcher sees, with values of its own, in one
// attempt.
func (s *storm) lastChange(r *sim.Requests) *judge.Op {
	var puts []*etcdserverpb.RequestOp
	for _, key := range sim.SeenByAll() {
		puts = append(puts, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestPut{
			RequestPut: &etcdserverpb.PutRequest{Key: []byte(key), Value: r.Value()},
		}})
	}
	return s.l.do(0, probeIDs, &etcdserverpb.TxnRequest{Success: puts}, collectPatience)
}

// watchersHaveAll waits until watchers have received a revision.
func (s *storm) watchersHaveAll(ctx context.Context, rev int64) {
	term := s.c.still.term(stormPatience, "what watchers are told")
	for w := behind(s.l.watchers, rev); w != nil; w = behind(s.l.watchers, rev) {
		if term.over() {
			s.c.late("watch: %s waits for revision %d, and the last is %d, %v after it", w.Name, w.Next(), rev, term.took())
			return
		}
		wait(ctx, 50*time.Millisecond)
	}
	s.measure("watchers have everything after", term.took())
}

// readBack has one more watcher at each machine receive everything from the first
// revision on, and returns the first watcher's versions.
func (s *storm) readBack(ctx context.Context, rev int64) []judge.Version {
	ctx, cancel := s.c.still.term(stormPatience, "what watchers of the past are told").context(ctx)
	defer cancel()
	var late []*judge.Watcher
	var wg sync.WaitGroup
	for _, machine := range s.everyone() {
		w := judge.NewWatcher(fmt.Sprintf("watcher of the past at machine %d", machine+1), sim.WatchedSpans()[0])
		late = append(late, w)
		wg.Go(func() {
			for ctx.Err() == nil && w.Next() <= rev {
				wctx, cancel := context.WithCancel(ctx)
				wg.Go(func() {
					for wctx.Err() == nil && w.Next() <= rev {
						wait(wctx, 50*time.Millisecond)
					}
					cancel()
				})
				s.l.watchOnce(wctx, s.l.client(machine), w)
				cancel()
			}
		})
	}
	wg.Wait()
	if w := behind(late, rev); w != nil {
		s.c.late("watch: %s received events only up to revision %d of %d", w.Name, w.Next()-1, rev)
		return nil
	}
	s.l.watchers = append(s.l.watchers, late...)
	return late[0].Versions()
}

// judge lets the simulator's checkers judge the run, prints its table, and returns the
// violations.
func (s *storm) judge(versions []judge.Version, drained bool) []string {
	s.l.close()
	left := &judge.Evidence{
		History: s.l.h, Versions: versions, Drained: drained, Faulty: true, Failures: max(1, s.failures()),
		Violations: s.c.told.judged(),
	}
	if s.l.users != nil {
		left.Access = s.l.users.End()
	}
	start := time.Now()
	check := judge.CheckAnswers // without the versions no order can be checked
	if versions != nil {
		left.Watchers, check = s.l.watchers, judge.Check
	}
	bad, aside, unjudged := s.c.judged()
	bad = append(bad, check(left)...)
	s.measure("judged in", time.Since(start))
	var where io.Writer = &s.report
	if testing.Verbose() {
		where = s.t.Output()
	}
	out := tabwriter.NewWriter(where, 0, 8, 2, ' ', 0)
	s.table(out, len(versions))
	fmt.Fprintf(out, "%s\n\nVERDICT\t%d wrong\n", s.c.still, len(bad))
	if unjudged != nil {
		fmt.Fprintf(out, "%v, %d late: %q\n", unjudged, len(aside), aside)
	}
	if err := out.Flush(); err != nil {
		s.t.Error(err)
	}
	if unjudged != nil && len(bad) == 0 && !s.t.Failed() {
		leaveOut(s.t, unjudged)
	}
	return bad[:min(len(bad), shown)]
}

// table prints what happened.
func (s *storm) table(out io.Writer, versions int) {
	var n [3]int
	ops := s.l.h.Ops()
	errs := map[string]int{}
	for _, o := range ops {
		n[o.Outcome]++
		if o.Err != nil {
			errs[message(o.Err)]++
		}
	}
	fmt.Fprintf(out, "\n%d operations, %d answered, %d refused, %d of unknown fate; %d versions, in %v\n",
		len(ops), n[judge.Answered], n[judge.Refused], n[judge.Unknown], versions, time.Since(s.began).Round(time.Second))
	if s.l.users != nil {
		ops, denied, logins, events, rights := s.l.users.End().Counts()
		fmt.Fprintf(out, "%d operations of users with %d rights, %d denied; %d logins, %d messages to their watchers\n", ops, rights, denied, logins, events)
	}
	fmt.Fprintf(out, "\nTROUBLE\tTIMES\tOTHERS SERVED AFTER\tALL, HEALED, AFTER\n")
	for _, name := range slices.Sorted(maps.Keys(s.outages)) {
		o := s.outages[name]
		fmt.Fprintf(out, "%s\t%d\t%s\t%s\n", name, o.count, o.during.Round(time.Millisecond), o.after.Round(time.Millisecond))
	}
	fmt.Fprintf(out, "\nOPERATION\tTRIED\tDONE\n")
	for _, op := range slices.Sorted(maps.Keys(s.op.tries)) {
		fmt.Fprintf(out, "%s\t%d\t%d\n", op, s.op.tries[op].tried, s.op.tries[op].done)
	}
	fmt.Fprintf(out, "\nREFUSED\tTIMES\n")
	for _, op := range slices.Sorted(maps.Keys(s.op.tries)) {
		for text, times := range s.op.tries[op].refusals {
			fmt.Fprintf(out, "%s: %s\t%d\n", op, text, times)
		}
	}
	fmt.Fprintf(out, "\nERROR\tTIMES\n")
	for _, text := range slices.SortedFunc(maps.Keys(errs), func(a, b string) int { return cmp.Or(errs[b]-errs[a], cmp.Compare(a, b)) }) {
		fmt.Fprintf(out, "%s\t%d\n", text, errs[text])
	}
	fmt.Fprintf(out, "\nMEASURED\n")
	for _, line := range s.measured {
		fmt.Fprintln(out, line)
	}
	for _, l := range s.leftOut {
		fmt.Fprintf(out, "left out: %s\n", l)
	}
}
