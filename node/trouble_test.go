package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/node/operate"
	"github.com/skeindb/skein/sim/simclock"
)

// doctor is what skein doctor says at a node.
func (n *rigNode) doctor(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := n.core.Admin().Survey(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := adminapi.WriteFindings(&out, adminapi.Table, adminapi.Diagnose(quiet(s), nil)); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// Within 15 s skein doctor says of a fault which node has it, since when, and what to do. It is silent when the fault has gone.
func TestDoctorNamesFaults(t *testing.T) {
	clocks := map[keyspace.NodeID]*simclock.Clock{}
	dir := t.TempDir()
	bubble(t, 3, borders(4), func(o *Options) {
		clocks[o.Self] = simclock.New(0, 1)
		o.Clock, o.Name, o.Certificates = clocks[o.Self], fmt.Sprintf("n%d", o.Self), []string{filepath.Join(dir, "n2", "node.crt")}
		if o.Self != 2 {
			o.Certificates = nil
		}
	}, func(r *rig) {
		one, two := r.nodes[0], r.nodes[1]
		r.spread(one, 4, "v")
		admin := func(err error) {
			r.t.Helper()
			if err != nil {
				r.t.Fatal(err)
			}
		}
		for _, fault := range []struct {
			name, says, next string
			begin, end       func()
		}{
			{
				"an expired certificate", "n2/node.crt of n2 expired ", "skein cert create-node n2 --host localhost --certs-dir certs --out n2 --overwrite",
				func() { admin(certificate(dir, time.Now().Add(10*time.Second))) }, func() { admin(certificate(dir, time.Now().AddDate(1, 0, 0))) },
			},
			{
				"paused placement", "placement is paused for 1", "skein placement resume",
				func() { admin(one.core.Admin().Pause(r.t.Context(), true)) }, func() { admin(one.core.Admin().Pause(r.t.Context(), false)) },
			},
			{
				"a full disk", "n2 has the alarm NOSPACE, and takes no writes for ", "make room on its disk",
				func() { two.disk.fill(0) }, two.disk.free,
			},
			{
				"a clock that was set", "the clock of n2 is 1h0m0s ahead of those of most nodes; it was set forward by 1h0m0s, ", "NTP",
				func() { clocks[2].StepWall(time.Hour) }, func() { clocks[2].StepWall(-time.Hour) },
			},
			{
				"a dead node", "n2 is dead for ", "start it again",
				func() { r.crash(two) }, func() { r.start(two) },
			},
			{
				"a lost quorum", "no quorum for 4 of 4 ranges (", "start them again",
				func() { r.crash(two, r.nodes[2]) }, func() { r.start(two, r.nodes[2]) },
			},
		} {
			fault.begin()
			time.Sleep(14 * time.Second)
			said := one.doctor(r.t)
			if !strings.Contains(said, fault.says) || !strings.Contains(said, fault.next) {
				r.t.Errorf("%s:\n%s", fault.name, said)
			}
			fault.end()
			r.wait(2*time.Minute, "nothing is wrong after "+fault.name, func() bool { return !strings.Contains(one.doctor(r.t), fault.says) })
		}
	})
}

// A node that is back each time before it is missed is told by how often it has started. To start it twice is no finding.
func TestDoctorNamesANodeThatStartsAgainAndAgain(t *testing.T) {
	bubble(t, 3, nil, func(o *Options) { o.Name = fmt.Sprintf("n%d", o.Self) }, func(r *rig) {
		r.mustPut(r.nodes[0], "a", "v")
		time.Sleep(10 * time.Second) // until each has been heard
		for i := range 3 {
			if said := r.nodes[0].doctor(r.t); strings.Contains(said, "again and again") {
				r.t.Errorf("after %d restarts:\n%s", i, said)
			}
			r.crash(r.nodes[1])
			r.start(r.nodes[1])
			time.Sleep(10 * time.Second)
		}
		if said := r.nodes[0].doctor(r.t); !strings.Contains(said, "n2 starts again and again: at least 3 times within 30 minutes") {
			r.t.Error(said)
		}
	})
}

// Restarts count for a while, and are forgotten with their node. A node that has just started does not know of those before.
func TestRestarts(t *testing.T) {
	var r restarts
	now := clock.Time(time.Hour)
	see := func(boots map[keyspace.NodeID]keyspace.BootID) string {
		now = now.Add(time.Minute)
		r.see(boots, now)
		return fmt.Sprint(r.lately(now))
	}
	type boots = map[keyspace.NodeID]keyspace.BootID
	for i, step := range []struct {
		boots boots
		want  string
	}{
		{nil, "map[]"},
		{boots{2: 0, 3: 7}, "map[]"},
		{boots{2: 5, 3: 7}, "map[]"},
		{boots{2: 6, 3: 7}, "map[2:1]"},
		{boots{2: 0, 3: 8}, "map[2:1 3:1]"},
		{boots{2: 6, 3: 9}, "map[2:1 3:2]"},
		{boots{3: 9}, "map[3:2]"},
		{boots{2: 1, 3: 9}, "map[3:2]"},
	} {
		if got := see(step.boots); got != step.want {
			t.Errorf("step %d: %s, want %s", i, got, step.want)
		}
	}
	now = now.Add(adminapi.RestartsKept - 4*time.Minute)
	if got := see(boots{3: 9}); got != "map[3:1]" {
		t.Errorf("the first one is long ago: %s", got)
	}
	for i := range 3 * maxRestarts {
		r.see(boots{3: keyspace.BootID(100 + i)}, now)
	}
	if n := len(r[3].at); n != maxRestarts {
		t.Errorf("%d are kept", n)
	}
}

// certificate makes one of n2 that ends then.
func certificate(dir string, end time.Time) error { return certificateOf(dir, 1, end) }

// certificateOf makes one of n2 that is valid for so many days and ends then.
func certificateOf(dir string, days int, end time.Time) error {
	d := certs.At(filepath.Join(dir, "ca"), func() time.Time { return end.AddDate(0, 0, -days) })
	if _, err := d.CreateCA(certs.CADays, true); err != nil {
		return err
	}
	_, err := d.CreateNode("n2", []string{"localhost"}, certs.Issue{Days: days, Overwrite: true, Out: filepath.Join(dir, "n2")})
	return err
}

// Each certificate is judged by its own life. Told is the worst one, which need not end first.
func TestWorstCertificate(t *testing.T) {
	day, year := t.TempDir(), t.TempDir()
	c := simclock.New(0, 1)
	o := &troubles{
		log: zap.NewNop(), clock: c, certificates: []string{filepath.Join(day, "n2", "node.crt"), filepath.Join(year, "n2", "node.crt")},
		starts: prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"}), ends: prometheus.NewGauge(prometheus.GaugeOpts{Name: "y"}),
	}
	const days = 24 * time.Hour
	for _, tc := range []struct {
		what      string
		day, year time.Duration // left
		want      int
	}{
		{"both hold: the one that ends first", 10 * time.Hour, 200 * days, 0},
		{"one of a year ends soon", 10 * time.Hour, 20 * days, 1},
		{"both end soon: the one that ends first", 4 * time.Hour, 20 * days, 0},
		{"one of a year ends in a day", 4 * time.Hour, 1 * days, 1},
		{"both are about to end: the one that ends first", 1 * time.Hour, 1 * days, 0},
		{"one has ended", 1 * time.Hour, -time.Hour, 1},
	} {
		if err := errors.Join(certificateOf(day, 1, c.Wall().Add(tc.day)), certificateOf(year, 365, c.Wall().Add(tc.year))); err != nil {
			t.Fatal(err)
		}
		o.readCertificates(c.Wall())
		var r operate.Report
		o.tell(&r)
		left := []time.Duration{tc.day, tc.year}[tc.want]
		if r.Certificate != o.certificates[tc.want] || (r.CertificateLeft-left).Abs() > time.Minute || testutil.ToFloat64(o.ends) != float64(o.until.Unix()) ||
			testutil.ToFloat64(o.ends)-testutil.ToFloat64(o.starts) != r.CertificateLife.Seconds() {
			t.Errorf("%s: %+v", tc.what, r)
		}
	}
}

// stalling is a clock of a process that stands still before it reads the wall clock.
type stalling struct {
	*simclock.Clock
	stall time.Duration
}

func (c *stalling) Wall() time.Time {
	time.Sleep(c.stall)
	return c.Clock.Wall()
}

// Troubles are told with since when, as ages, and by a line of the log each, however long they last. A certificate is one line
// before its end, one at its end, and the next one too.
func TestTroubles(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.InfoLevel)
		fsync, full, lags, walks, c := time.Millisecond, "", 0, 0, &stalling{Clock: simclock.New(0, 1)}
		o := &troubles{
			log: zap.New(core), clock: c, node: "n2", boots: func() map[keyspace.NodeID]keyspace.BootID { return nil }, certificates: []string{filepath.Join(dir, "n2", "node.crt"), filepath.Join(dir, "none")},
			fsync: func() time.Duration { return fsync }, full: func() string { return full }, lagging: func() int { return lags },
			watchers: func() func(int) *adminpb.WatcherListResponse {
				return func(int) *adminpb.WatcherListResponse {
					walks++
					return &adminpb.WatcherListResponse{Watchers: []*adminpb.Watcher{{Client: "10.0.0.9:1", Behind: 7}}}
				}
			},
			starts: prometheus.NewGauge(prometheus.GaugeOpts{Name: "x"}), ends: prometheus.NewGauge(prometheus.GaugeOpts{Name: "y"}),
		}
		looks := func(n int) (r operate.Report) {
			for range n {
				o.look()
				time.Sleep(troubleEvery)
			}
			o.tell(&r)
			return r
		}
		if r := looks(3); !reflect.DeepEqual(r, operate.Report{}) {
			t.Errorf("without troubles: %+v", r)
		}
		fsync, full, lags = time.Second, "no room", 2
		r := looks(4)
		if r.FsyncSlow != 20*time.Second || r.Full != 20*time.Second || r.FullWhy != "no room" || r.Lag != (operate.Lag{Watchers: 2, For: 20 * time.Second, Client: "10.0.0.9:1", Behind: 7}) {
			t.Errorf("with troubles: %+v", r)
		}
		// Who lags is asked for once it is told, and then once a minute: that takes time where there are very many.
		if looks(12 * 4); walks != 5 {
			t.Errorf("the watchers were listed %d times", walks)
		}
		fsync, full, lags = time.Millisecond, "", 0
		if r := looks(1); !reflect.DeepEqual(r, operate.Report{}) || logs.Len() != 0 {
			t.Errorf("afterwards: %+v, %v", r, logs.All())
		}
		c.stall = clockStep + time.Millisecond
		if r := looks(1); r.ClockStep != 0 {
			t.Errorf("a stall: %+v", r)
		}
		c.stall = 0
		if r := looks(2); r.ClockStep != 0 || logs.Len() != 0 {
			t.Errorf("after a stall: %+v, %v", r, logs.All())
		}
		c.StepWall(-time.Minute)
		if r := looks(2); r.ClockStep != -time.Minute || r.ClockStepped != 10*time.Second || logs.FilterMessage("the clock of this machine was set").Len() != 1 {
			t.Errorf("a step: %+v, %v", r, logs.All())
		}
		if r := looks(int(clockStepKept / troubleEvery)); r.ClockStep != 0 {
			t.Errorf("an old step: %+v", r)
		}
		logs.TakeAll()
		end := c.Wall().Add(20 * time.Second).Truncate(time.Second)
		if err := certificate(dir, end); err != nil {
			t.Fatal(err)
		}
		if r := looks(3); r.Certificate != o.certificates[0] || r.CertificateLeft <= 0 || r.CertificateLeft > 20*time.Second || r.CertificateLife < 24*time.Hour ||
			logs.FilterMessage("a certificate of this node expires soon").Len() != 1 || testutil.ToFloat64(o.ends) != float64(end.Unix()) ||
			testutil.ToFloat64(o.starts) != float64(end.Unix())-r.CertificateLife.Seconds() {
			t.Errorf("before its end: %+v, %v", r, logs.All())
		}
		if r := looks(9); r.CertificateLeft >= 0 || logs.FilterMessageSnippet("has expired").Len() != 1 || logs.Len() != 2 {
			t.Errorf("at its end: %+v, %v", r, logs.All())
		}
		for _, e := range logs.All() {
			if next := fmt.Sprint(e.ContextMap()["next"]); !strings.Contains(next, "(skein cert create-node n2 --host localhost --certs-dir certs --out n2 --overwrite)") {
				t.Errorf("%s: %s", e.Message, next)
			}
		}
		if err := certificate(dir, c.Wall().Add(23*time.Hour)); err != nil {
			t.Fatal(err)
		}
		if r := looks(4); r.CertificateLeft < 22*time.Hour || logs.Len() != 2 {
			t.Errorf("another one: %+v, %v", r, logs.All())
		}
	})
}
