package loadtest

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/skeindb/skein/clock"
)

const (
	// lagEach is how often the load generator looks how late it wakes.
	lagEach = 10 * time.Millisecond
	// busyShare of the processors is what makes latencies say more about them than about the servers.
	busyShare = 0.9
	// A lag is of no account below lagBound, in microseconds, and below lagShare of the operations' latencies.
	lagBound = 1000
	lagShare = 0.1
)

// lagProbe measures how late a goroutine wakes whose timer has fired. An answer waits as long until it is noticed.
type lagProbe struct {
	stop chan struct{}
	work sync.WaitGroup
	hist *hdrhistogram.Histogram // belongs to the probe until it has ended
}

func startLagProbe(c clock.Clock) *lagProbe {
	p := &lagProbe{stop: make(chan struct{}), hist: newHistogram()}
	due := c.Now().Add(lagEach)
	timer := c.NewTimer(lagEach)
	p.work.Go(func() {
		defer timer.Stop()
		for {
			select {
			case <-p.stop:
				return
			case <-timer.C():
			}
			now := c.Now()
			micros := min(max(int64(now.Sub(due)/time.Microsecond), 1), longestMicros)
			// Who sleeps through ten wake-ups was late at each of them.
			_ = p.hist.RecordCorrectedValue(micros, lagEach.Microseconds())
			due = now.Add(lagEach)
			timer.Reset(lagEach)
		}
	})
	return p
}

// end ends the probe and returns what it has found.
func (p *lagProbe) end() *hdrhistogram.Histogram {
	close(p.stop)
	p.work.Wait()
	return p.hist
}

// machineTime is the time of all processors of the machine since it began, in units of the kernel's; 0 if unknown.
type machineTime struct{ busy, all float64 }

func readMachineTime() machineTime {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return machineTime{}
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Scan()
	return parseMachineTime(lines.Text())
}

// parseMachineTime reads "cpu user nice system idle iowait irq softirq steal guest guest_nice". The guests' time is in
// user and nice already.
func parseMachineTime(line string) (t machineTime) {
	fields := strings.Fields(line)
	if len(fields) < 9 || fields[0] != "cpu" {
		return machineTime{}
	}
	for i, field := range fields[1:9] {
		v, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return machineTime{}
		}
		t.all += v
		if i != 3 && i != 4 { // idle, and idle while a disk works
			t.busy += v
		}
	}
	return t
}

// share returns the busy part of the time since before, 0 to 1.
func (t machineTime) share(before machineTime) float64 {
	if t.all <= before.all {
		return 0
	}
	return max(0, (t.busy-before.busy)/(t.all-before.all))
}

// SelfShare returns the part of its processors that the load generator has used, 0 to 1.
func (r *Report) SelfShare() float64 {
	if r.CPU.Processors == 0 || r.ElapsedSeconds <= 0 {
		return 0
	}
	return r.CPU.SelfSeconds / r.ElapsedSeconds / float64(r.CPU.Processors)
}

// Saturated says why the report's figures may be those of the load generator or of its machine in place of the servers';
// it is empty if nothing points at that.
func (r *Report) Saturated() (why []string) {
	if len(r.Generators) > 0 {
		for _, g := range r.Generators {
			for _, one := range g.Saturated {
				why = append(why, g.Name+": "+one)
			}
		}
		return why
	}
	own := r.SelfShare()
	if own > busyShare {
		why = append(why, fmt.Sprintf("the load generator used %.0f %% of its %d processors: it is saturated, and the servers may be faster",
			100*own, r.CPU.Processors))
	} else if r.CPU.MachineBusy > busyShare {
		why = append(why, fmt.Sprintf("the load generator's machine was %.0f %% busy, %.0f %% by the generator: latencies have the wait for a processor in them",
			100*r.CPU.MachineBusy, 100*own))
	}
	all := r.All().Summary()
	if lag := r.CPU.SchedulingLag; lag != nil && all != nil && lag.P99 > lagBound && float64(lag.P99) > lagShare*float64(all.P99) {
		why = append(why, fmt.Sprintf("the load generator woke late: p99 %s, and its operations' p99 is %s", micros(lag.P99), micros(all.P99)))
	}
	return why
}

// All returns the latencies of all operations that succeeded.
func (r *Report) All() *Histogram {
	all := &Histogram{}
	for name, h := range r.Histograms {
		if isOperation(name) {
			all.Merge(h)
		}
	}
	return all
}
