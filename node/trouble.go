package node

import (
	"cmp"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/wal"
)

const (
	// troubleEvery lies between two looks at what may trouble this node.
	troubleEvery = 5 * time.Second
	// clockStep is from when on two readings of the wall clock differ by more than the time between them.
	clockStep = 500 * time.Millisecond
	// clockTogether is for how long the wall clock may be read to belong to a reading of the other one.
	clockTogether = clockStep / 10
	// clockStepKept is for how long a step is told.
	clockStepKept = time.Hour
	// laggardEvery lies between two times that the watcher furthest behind is looked for: that looks at all watchers.
	laggardEvery = time.Minute
	// certificateLate is the time, and certificateLatePart the part of its life, below which the alert of a certificate is critical.
	certificateLate, certificateLatePart = 48 * time.Hour, 10
)

// troubles knows since when something troubles this node, and tells it by lines of the log and to operators.
type troubles struct {
	log   *zap.Logger
	clock clock.Clock
	// node is the name of this node.
	node string
	// certificates are the files of the node's own.
	certificates []string
	fsync        func() time.Duration
	// full says what the node lacks to take writes, "" if nothing.
	full func() string
	// lagging counts the watchers that read history, and watchers lists those furthest behind; it is nil without ports.
	lagging  func() int
	watchers func() func(most int) *adminpb.WatcherListResponse
	// boots are those in which the other nodes of the node table were last heard.
	boots func() map[keyspace.NodeID]keyspace.BootID
	// starts and ends say when the certificate is valid that is worst off.
	starts, ends prometheus.Gauge

	mu sync.Mutex // guards what follows
	// since when fsyncs are slow, the node is full, watchers lag; 0 while not so.
	slow, fullSince, lags clock.Time
	fullWhy               string
	lag                   operate.Lag
	// named is when the watcher furthest behind was last looked for, 0 before.
	named    clock.Time
	restarts restarts
	// cert ends at until, and holds for hosts; told is what the log has of it.
	cert, told  string
	hosts       []string
	until       time.Time
	life        time.Duration
	now         clock.Time // of a look, with the wall clock then
	wall        time.Time
	step        time.Duration
	stepped     clock.Time
	certificate certificateState
}

// certificateState is how a certificate stands, the worse the greater.
type certificateState uint8

const (
	certificateHolds certificateState = iota
	certificateEndsSoon
	certificateEnds
	certificateEnded
)

func newTroubles(c *Core) *troubles {
	t := &troubles{
		log: c.log, clock: c.o.Clock, node: c.o.Name, certificates: c.o.Certificates, boots: c.boots, fsync: c.wal.FsyncP99, full: c.lacks, lagging: c.watches.Lagging,
		watchers: func() func(int) *adminpb.WatcherListResponse {
			if f := c.watchers.Load(); f != nil {
				return *f
			}
			return nil
		},
		starts: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "skein_certificate_start_timestamp_seconds", Help: "Since when the certificate is valid that is to be renewed first, in seconds since 1970; 0 without one.",
		}),
		ends: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "skein_certificate_end_timestamp_seconds", Help: "When the certificate of the node expires that is to be renewed first, in seconds since 1970; 0 without one.",
		}),
	}
	if c.o.Registry != nil {
		c.o.Registry.MustRegister(t.starts, t.ends)
	}
	return t
}

// lacks says what the node lacks to take writes, "" if nothing.
func (c *Core) lacks() string {
	switch {
	case c.engine.Space() == engine.SpaceFull:
		return c.engine.SpaceWhy()
	case c.wal.Space() == wal.SpaceFull:
		return "the disk of the log has no room"
	case c.engine.OverQuota():
		return "the store is above --quota-backend-bytes"
	}
	return ""
}

// boots returns in which boot this node has last heard each of the others, 0 for never.
func (c *Core) boots() map[keyspace.NodeID]keyspace.BootID {
	m, _ := c.client.WatchMap()
	if m == nil {
		return nil
	}
	all := map[keyspace.NodeID]keyspace.BootID{}
	for id := range m.NodeRows() {
		if id != c.o.Self {
			all[id] = c.host.BootOf(id)
		}
	}
	return all
}

// look is one look.
func (t *troubles) look() {
	t.note(t.fsync() >= adminapi.FsyncWarning, t.full(), t.lagging())
	t.nameLaggard()
}

func (t *troubles) note(slow bool, full string, lagging int) {
	boots := t.boots()
	t.mu.Lock()
	defer t.mu.Unlock()
	now, wall := t.clock.Now(), t.clock.Wall()
	// If the process has stood still meanwhile, one reading is older than the other, and the next look compares with the last one.
	if t.clock.Now().Sub(now) < clockTogether {
		t.compareClocks(now, wall)
	}
	begins(&t.slow, slow, now)
	begins(&t.fullSince, full != "", now)
	begins(&t.lags, lagging > 0, now)
	t.fullWhy, t.lag.Watchers = full, lagging
	if lagging == 0 {
		t.lag = operate.Lag{}
	}
	t.restarts.see(boots, now)
	t.readCertificates(wall)
	t.tellCertificate(wall)
}

// compareClocks finds that the wall clock was set since the last look.
func (t *troubles) compareClocks(now clock.Time, wall time.Time) {
	if step := wall.Sub(t.wall) - now.Sub(t.now); !t.wall.IsZero() && step.Abs() >= clockStep {
		t.step, t.stepped = step, now
		t.log.Warn("the clock of this machine was set", zap.Duration("by", step))
	}
	t.now, t.wall = now, wall
}

// begins keeps since when something is so.
func begins(since *clock.Time, is bool, now clock.Time) {
	switch {
	case !is:
		*since = 0
	case *since == 0:
		*since = now
	}
}

// nameLaggard finds the watcher that is furthest behind, if some have been so long enough to be told.
func (t *troubles) nameLaggard() {
	list := t.watchers()
	if list == nil || !t.laggardWanted() {
		return
	}
	all := list(1).GetWatchers()
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, w := range all {
		t.lag.Client, t.lag.Behind = w.GetClient(), w.GetBehind()
	}
}

// laggardWanted says whether it is time to look for the watcher that is furthest behind.
func (t *troubles) laggardWanted() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock.Now()
	if t.lags == 0 || now.Sub(t.lags) < adminapi.LagNote || t.named != 0 && now.Sub(t.named) < laggardEvery {
		return false
	}
	t.named = now
	return true
}

// readCertificates finds the certificate that is worst off. That need not be the one that ends first: one that is made for a day
// is renewed within its last hours. A file that cannot be read is told where it is used.
func (t *troubles) readCertificates(wall time.Time) {
	t.cert = ""
	worst := certificateHolds
	for _, path := range t.certificates {
		from, until, hosts, err := certs.Validity(path)
		if err != nil {
			continue
		}
		is := stateOf(until.Sub(wall), until.Sub(from))
		if t.cert == "" || is > worst || is == worst && until.Before(t.until) {
			t.cert, t.until, t.life, t.hosts, worst = path, until, until.Sub(from), hosts, is
		}
	}
	if t.cert != "" {
		t.starts.Set(float64(t.until.Add(-t.life).Unix()))
		t.ends.Set(float64(t.until.Unix()))
	}
}

// tellCertificate logs that a certificate has ended, or ends soon: once for each certificate.
func (t *troubles) tellCertificate(wall time.Time) {
	state := certificateHolds
	if t.cert != "" {
		state = stateOf(t.until.Sub(wall), t.life)
	}
	if state == certificateEnds {
		state = certificateEndsSoon // its line is there already
	}
	is := t.cert + t.until.String()
	if state == t.certificate && is == t.told {
		return
	}
	t.certificate, t.told = state, is
	at := []zap.Field{zap.String("file", t.cert), zap.Time("end", t.until), zap.String("next", "make another one where the authority's directory certs is ("+adminapi.RenewCertificate(cmp.Or(t.node, "NAME"), t.hosts)+
		"), and put it in the place of the old one: it is taken without a restart")}
	switch state {
	case certificateEnded:
		t.log.Error("a certificate of this node has expired: clients and nodes do not connect to it any more", at...)
	case certificateEndsSoon:
		t.log.Warn("a certificate of this node expires soon", at...)
	case certificateHolds, certificateEnds:
	}
}

// stateOf says how a certificate stands that is valid for so long yet, and for so long in all.
func stateOf(left, life time.Duration) certificateState {
	switch {
	case left <= 0:
		return certificateEnded
	case left < min(certificateLate, life/certificateLatePart):
		return certificateEnds
	case adminapi.ExpiresSoon(left, life):
		return certificateEndsSoon
	}
	return certificateHolds
}

// tell puts into a report what there is.
func (t *troubles) tell(r *operate.Report) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock.Now()
	age := func(since clock.Time) time.Duration {
		if since == 0 {
			return 0
		}
		return max(time.Millisecond, now.Sub(since)) // it is so
	}
	r.FsyncSlow, r.Full, r.FullWhy, r.Lag = age(t.slow), age(t.fullSince), t.fullWhy, t.lag
	r.Lag.For = age(t.lags)
	r.Restarts = t.restarts.lately(now)
	if t.cert != "" {
		r.Certificate, r.CertificateHosts, r.CertificateLeft, r.CertificateLife = t.cert, t.hosts, t.until.Sub(t.clock.Wall()), t.life
	}
	if ago := now.Sub(t.stepped); t.step != 0 && ago < clockStepKept {
		r.ClockStep, r.ClockStepped = t.step, ago
	}
}
