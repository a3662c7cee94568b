package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// mirrorOptions are the command line of the measure.
type mirrorOptions struct {
	stored
	runs, clients, conns int
	rate                 float64
	over                 time.Duration
}

func mirrorFlags(set *flag.FlagSet) func(context.Context, *bench) error {
	var o mirrorOptions
	set.IntVar(&o.keys, "keys", 1_000_000, "keys")
	set.IntVar(&o.value, "value-size", 242, "bytes of a value; a key has 14 more")
	set.IntVar(&o.runs, "runs", 3, "mirrors, each from a new etcd into a new cluster")
	set.Float64Var(&o.rate, "rate", 5000, "puts a second at the source: revisions")
	set.DurationVar(&o.over, "over", 30*time.Second, "length of the puts")
	set.IntVar(&o.clients, "clients", 200, "clients at a time")
	set.IntVar(&o.conns, "conns", 4, "connections")
	return func(ctx context.Context, b *bench) error {
		if o.runs < 1 || o.rate <= 0 || o.over < 2*turnWarmup {
			return fmt.Errorf("mirror: %d runs, %v puts a second for %v: at least one, some, and %v", o.runs, o.rate, o.over, 2*turnWarmup)
		}
		if err := o.check(); err != nil {
			return err
		}
		return mirroring(ctx, b, &o)
	}
}

// The names of the figures.
const (
	mirrorCopy      = "until it follows, s"
	mirrorMade      = "revisions/s of the source"
	mirrorFollowed  = "revisions/s of the target"
	mirrorLag       = "lag, median, s"
	mirrorLagMost   = "lag, longest, s"
	mirrorCPU       = "CPU of the mirror, s/s"
	mirrorSourceCPU = "CPU of the source, s/s"
	mirrorNodesCPU  = "CPU of the nodes, s/s"
	mirrorMemory    = "memory of the mirror, MiB"
	mirrorVerify    = "until all keys were compared once, s"
	mirrorFreeze    = "freeze by the mirror, s"
	mirrorCommand   = "the command of the cut-over, s"
	mirrorPause     = "from the command to the first put at the target, s"
)

// mirroring follows an etcd under load into three new nodes, and cuts over.
func mirroring(ctx context.Context, b *bench, o *mirrorOptions) error {
	var runs []figureSet
	for range o.runs {
		etcd, skein := b.source(&o.stored), b.skein()
		err := b.with(ctx, []*cluster{etcd, skein}, func() (err error) {
			if err := o.fill(ctx, etcd); err != nil {
				return err
			}
			m := &mirror{from: etcd, to: skein, spool: filepath.Join(b.dir, "spool"), log: filepath.Join(b.dir, "mirror.log")}
			if err := m.start(); err != nil {
				return err
			}
			defer func() { err = errors.Join(err, m.end(), os.RemoveAll(m.spool)) }()
			f := figureSet{}
			if err := o.once(ctx, m, f); err != nil {
				return err
			}
			runs = append(runs, f)
			progress("%v", f)
			return nil
		})
		if err != nil {
			return err
		}
	}
	writeBarred(os.Stdout, fmt.Sprintf("An etcd of one node with %g puts a second, mirrored into three new nodes", o.rate), o.String(), runs, []barred{
		{mirrorCopy, ""},
		{mirrorMade, "≥ 5,000"},
		{mirrorFollowed, "≥ 5,000"},
		{mirrorLag, "≤ 1"},
		{mirrorLagMost, "≤ 1"},
		{mirrorCPU, ""},
		{mirrorSourceCPU, ""},
		{mirrorNodesCPU, ""},
		{mirrorMemory, commandMemory},
		{mirrorVerify, ""},
		{mirrorFreeze, ""},
		{mirrorCommand, ""},
		{mirrorPause, "≤ 5 with 1,000,000 keys"},
	})
	return b.save("mirror.json", runs)
}

// A mirror is a process that follows one cluster into another.
type mirror struct {
	from, to   *cluster
	spool, log string
	process    *process
}

// start begins to follow.
func (m *mirror) start() error {
	log, err := os.Create(m.log)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(m.to.binary, "mirror", "start", "--spool", m.spool,
		"--source-endpoints", strings.Join(m.from.endpoints(), ","), "--endpoints", strings.Join(m.to.endpoints(), ","))
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	m.process = &process{cmd: cmd, ended: make(chan struct{})}
	go func() {
		m.process.err = cmd.Wait()
		close(m.process.ended)
	}()
	return nil
}

// end ends a mirror that goes on, after an error.
func (m *mirror) end() error {
	select {
	case <-m.process.ended:
		if m.process.err != nil {
			return fmt.Errorf("mirror, log %s: %w", m.log, m.process.err)
		}
	default:
		_ = m.process.cmd.Process.Signal(syscall.SIGTERM)
		_ = m.process.wait() // it ends with an error, since it was not done
	}
	return nil
}

// mirrorStatus is what `skein mirror status` says.
type mirrorStatus struct {
	Step   string  `json:"step"`
	Passes int64   `json:"passes"`
	Freeze float64 `json:"freeze_seconds"`
}

func (m *mirror) status(ctx context.Context) (st mirrorStatus, err error) {
	text, err := exec.CommandContext(ctx, m.to.binary, "mirror", "status", "--spool", m.spool, "-w", "json").Output()
	if err == nil {
		err = json.NewDecoder(bytes.NewReader(text)).Decode(&st)
	}
	return st, err
}

// mirrorLimit bounds each wait for a mirror.
const mirrorLimit = 15 * time.Minute

// await waits until the mirror is as far as is said, and returns how long that was.
func (m *mirror) await(ctx context.Context, far func(mirrorStatus) bool) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, mirrorLimit)
	defer cancel()
	began := time.Now()
	err := waitUntil(ctx, time.Second, func() error {
		select {
		case <-m.process.ended:
			return fmt.Errorf("mirror, log %s: %w", m.log, errors.Join(errEnded, m.process.err))
		default:
		}
		st, err := m.status(ctx)
		if err == nil && !far(st) {
			err = errUnderWay
		}
		return err
	})
	return time.Since(began), err
}

// once measures one mirror that has just begun.
func (o *mirrorOptions) once(ctx context.Context, m *mirror, f figureSet) error {
	took, err := m.await(ctx, func(s mirrorStatus) bool { return s.Step == "following" })
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	f[mirrorCopy] = took.Seconds()
	source, err := m.from.connect(0)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := m.to.connectAll()
	if err != nil {
		return err
	}
	defer closeAll(target)
	if err := o.follow(ctx, m, source, target[0], f); err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	took, err = m.await(ctx, func(s mirrorStatus) bool { return s.Passes > 0 })
	if err != nil {
		return fmt.Errorf("compare: %w", err)
	}
	f[mirrorVerify] = took.Seconds()
	return o.cutOver(ctx, m, source, target[1], f)
}

// revisionOf is the revision that a cluster shows.
func revisionOf(ctx context.Context, c *clientv3.Client) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	got, err := c.Get(ctx, "data/", clientv3.WithLimit(1))
	if err != nil {
		return 0, err
	}
	return got.Header.Revision, nil
}

// lagPoll is the pause between two looks whether the target has a revision, lagEvery that between two
// revisions that are looked for.
const (
	lagPoll  = 5 * time.Millisecond
	lagEvery = 200 * time.Millisecond
)

// follow puts at the source, and measures how long revisions take until the target shows them.
func (o *mirrorOptions) follow(ctx context.Context, m *mirror, source, target *clientv3.Client, f figureSet) error {
	p := pace{endpoints: m.from.endpoints(), conns: o.conns, clients: o.clients, value: o.value, rate: o.rate, pick: evenlyOf(o.keys)}
	for n := range o.keys {
		p.keys = append(p.keys, []byte(o.key(n)))
	}
	l, err := p.start(ctx)
	if err != nil {
		return err
	}
	defer l.stop()
	if err := sleep(ctx, turnWarmup); err != nil {
		return err
	}
	cpu, err := m.cpus()
	if err != nil {
		return err
	}
	first, err := revisionOf(ctx, target)
	if err != nil {
		return err
	}
	from := l.now()
	var lags []time.Duration
	for l.now()-from < o.over {
		lag, err := lagOf(ctx, source, target)
		if err != nil {
			return err
		}
		lags = append(lags, lag)
		if err := sleep(ctx, lagEvery); err != nil {
			return err
		}
	}
	last, err := revisionOf(ctx, target)
	if err != nil {
		return err
	}
	to := l.now()
	after, err := m.cpus()
	if err != nil {
		return err
	}
	l.stop()
	if n, err := l.failures(0, to); n > 0 {
		return fmt.Errorf("%d puts failed: %w", n, err)
	}
	memory, err := resident(m.process.cmd.Process.Pid)
	if err != nil {
		return err
	}
	during := (to - from).Seconds()
	f[mirrorMade], f[mirrorFollowed], f[mirrorMemory] = l.madeRate(from, to), float64(last-first)/during, float64(memory.peak)/mebibyte
	f[mirrorLagMost], f[mirrorLag] = slices.Max(lags).Seconds(), quantile(lags, 500).Seconds()
	for i, name := range []string{mirrorCPU, mirrorSourceCPU, mirrorNodesCPU} {
		f[name] = (after[i] - cpu[i]).Seconds() / during
	}
	return nil
}

// cpus are the processor times of the mirror, its source and its target.
func (m *mirror) cpus() (all [3]time.Duration, err error) {
	var errs [3]error
	all[0], errs[0] = cpuTime(m.process.cmd.Process.Pid)
	all[1], errs[1] = m.from.cpu()
	all[2], errs[2] = m.to.cpu()
	return all, errors.Join(errs[:]...)
}

// lagOf is how long it takes until the target shows what the source shows now.
func lagOf(ctx context.Context, source, target *clientv3.Client) (time.Duration, error) {
	want, err := revisionOf(ctx, source)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, mirrorLimit)
	defer cancel()
	began := time.Now()
	err = waitUntil(ctx, lagPoll, func() error {
		has, err := revisionOf(ctx, target)
		if err == nil && has < want {
			err = fmt.Errorf("the target is at revision %d of %d", has, want)
		}
		return err
	})
	return time.Since(began), err
}

// cutOver lets the target take the source's place, and checks what it has. Nobody writes to the source any more.
func (o *mirrorOptions) cutOver(ctx context.Context, m *mirror, source, target *clientv3.Client, f figureSet) error {
	last, err := revisionOf(ctx, source)
	if err != nil {
		return err
	}
	began := time.Now()
	if text, err := exec.CommandContext(ctx, m.to.binary, "mirror", "cutover", "--spool", m.spool).CombinedOutput(); err != nil {
		return fmt.Errorf("cut over: %w: %s", err, text)
	}
	f[mirrorCommand] = time.Since(began).Seconds()
	put, err := target.Put(ctx, "data-next", "")
	if err != nil {
		return fmt.Errorf("the first put after the cut-over: %w", err)
	}
	f[mirrorPause] = time.Since(began).Seconds()
	if put.Header.Revision != last+1 {
		return fmt.Errorf("the first put after the cut-over has revision %d, and the source ended at %d", put.Header.Revision, last)
	}
	if err := m.to.counts(ctx, o.keys); err != nil {
		return fmt.Errorf("cut over: %w", err)
	}
	st, err := m.status(ctx)
	if err == nil && (st.Step != "done" || st.Freeze == 0) {
		err = fmt.Errorf("the mirror says that it is %s, after a freeze of %g s", st.Step, st.Freeze)
	}
	f[mirrorFreeze] = st.Freeze
	return err
}
