package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// System returns the clock of the machine. Now reads CLOCK_BOOTTIME, which unlike
// CLOCK_MONOTONIC also counts the time that the machine was suspended: a lease must not outlive
// a suspended laptop. It does not count the time for which a hypervisor paused a virtual
// machine: no clock of the guest can. Restored and a jump of the wall clock may tell of it.
func System() Clock { return system{} }

type system struct{}

func (system) Now() Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		// The clock exists since Linux 2.6.39; without a clock no lease is safe.
		panic("clock: CLOCK_BOOTTIME: " + err.Error())
	}
	return Time(ts.Nano() - pausedFor())
}

func (system) Wall() time.Time { return time.Now() }

func (system) AfterFunc(d time.Duration, f func()) Timer {
	return systemTimer{time.AfterFunc(d, f)}
}

func (system) NewTimer(d time.Duration) Timer { return systemTimer{time.NewTimer(d)} }

type systemTimer struct{ t *time.Timer }

func (t systemTimer) C() <-chan time.Time        { return t.t.C }
func (t systemTimer) Stop() bool                 { return t.t.Stop() }
func (t systemTimer) Reset(d time.Duration) bool { return t.t.Reset(d) }

// Virtual returns a clock that is made of package time alone, so that it follows
// the fake time of a testing/synctest bubble. For tests; System's Now does not.
func Virtual() Clock { return virtual{start: time.Now()} }

type virtual struct {
	system
	start time.Time
}

func (v virtual) Now() Time { return Time(time.Since(v.start)) + 1 }
