// Package machine looks at the machine on which a node is to run: how long its disk takes for an fsync, how much room, memory
// and how many files there are, and whether its clock is set. skein doctor --local is its face.
//
// [Look] measures, [Diagnose] is a function of what was measured.
package machine

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/limits"
)

// Facts are what was measured. A number is -1 where the system does not say.
type Facts struct {
	// Dir is the directory that was looked at.
	Dir string
	// Fsync50 and Fsync99 are the median and the 99th percentile of writes of 4 KiB with an fsync.
	Fsync50, Fsync99 time.Duration
	// DiskFree and DiskCapacity are bytes of the file system of Dir.
	DiskFree, DiskCapacity int64
	// Memory is what a process may have, in bytes: the machine's, or less by the limit of its cgroup.
	Memory int64
	// Files is how many files a process may open.
	Files int64
	// ReceiveBuffer and SendBuffer are the largest buffers of a UDP socket, in bytes.
	ReceiveBuffer, SendBuffer int64
	// ClockSet says that the kernel holds the clock for synchronised; ClockKnown that it says anything.
	ClockSet, ClockKnown bool
}

// writes is how many fsyncs are measured: the 99th percentile is the fifth from the end.
const writes = 500

// lookFor bounds the measuring of a slow disk.
const lookFor = 10 * time.Second

// Look measures. The directory must exist; nothing stays in it.
func Look(dir string) (*Facts, error) {
	f := &Facts{Dir: dir, Memory: limits.Memory(), ReceiveBuffer: number("/proc/sys/net/core/rmem_max"), SendBuffer: number("/proc/sys/net/core/wmem_max")}
	took, err := fsyncs(dir)
	if err != nil {
		return nil, err
	}
	slices.Sort(took)
	f.Fsync50, f.Fsync99 = took[len(took)/2], took[len(took)*99/100]
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return nil, fmt.Errorf("room on the disk of %s: %w", dir, err)
	}
	f.DiskCapacity, f.DiskFree = int64(st.Blocks)*st.Bsize, int64(st.Bavail)*st.Bsize
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("limit of open files: %w", err)
	}
	f.Files = int64(min(limit.Max, math.MaxInt64)) // Go raises its own limit to it
	var t unix.Timex
	if state, err := unix.Adjtimex(&t); err == nil {
		f.ClockKnown, f.ClockSet = true, state != unix.TIME_ERROR
	}
	return f, nil
}

// fsyncs returns how long writes of 4 KiB take, each with an fsync.
func fsyncs(dir string) (took []time.Duration, err error) {
	file, err := os.CreateTemp(dir, "skein-doctor-")
	if err != nil {
		return nil, fmt.Errorf("%s is not for the user %d to write in: %w", dir, os.Getuid(), err)
	}
	defer func() { err = errors.Join(err, file.Close(), os.Remove(file.Name())) }()
	block, all := make([]byte, 4096), clock.StartStopwatch()
	for range writes {
		one := clock.StartStopwatch()
		if _, err := file.Write(block); err != nil {
			return nil, err
		}
		if err := file.Sync(); err != nil {
			return nil, err
		}
		took = append(took, one.Elapsed())
		if all.Elapsed() > lookFor {
			break
		}
	}
	return took, nil
}

// number reads a file with one number, -1 where there is none.
func number(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// Existing returns the directory, or the nearest one above it that exists: a node makes its own.
func Existing(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	for err == nil {
		var info fs.FileInfo
		switch info, err = os.Stat(dir); {
		case err == nil && !info.IsDir():
			return "", fmt.Errorf("%s is no directory", dir)
		case err == nil:
			return dir, nil
		case errors.Is(err, fs.ErrNotExist) && filepath.Dir(dir) != dir:
			dir, err = filepath.Dir(dir), nil
		}
	}
	return "", err
}

// What a node should have.
const (
	slowFsync   = 10 * time.Millisecond
	tooSlow     = 100 * time.Millisecond
	leastFiles  = 512
	fewFiles    = 65536
	leastBuffer = 7 << 20 // of UDP, as QUIC wants it
	leastFree   = 1 << 30
	// overBudget is what a process takes of its memory budget, in percent.
	overBudget = 125
)

// Diagnose says what is wrong with a machine for a node with a memory budget (bytes), the worst first.
func Diagnose(f *Facts, budget int64) (all []adminapi.Finding) {
	add := func(s adminapi.Severity, check, next, what string, args ...any) {
		all = append(all, adminapi.Finding{Severity: s, Check: check, What: fmt.Sprintf(what, args...), Next: next})
	}
	const disk = "give the log a disk of its own that is quick to fsync (--wal-dir, docs/OPERATIONS.md), such as a local SSD"
	fsync := fmt.Sprintf("an fsync in %s takes %v, and one in a hundred %v", f.Dir, f.Fsync50.Round(10*time.Microsecond), f.Fsync99.Round(10*time.Microsecond))
	switch {
	case f.Fsync99 >= tooSlow:
		add(adminapi.Critical, "fsync", disk, "%s: each write waits for it, and elections will come", fsync)
	case f.Fsync99 >= slowFsync:
		add(adminapi.Warning, "fsync", disk, "%s: each write waits for it", fsync)
	}
	if f.DiskFree < leastFree || f.DiskFree < f.DiskCapacity/20 {
		add(adminapi.Critical, "disk", "make room: a node takes no writes then", "of the disk of %s %d MiB are free", f.Dir, f.DiskFree>>20)
	}
	switch {
	case f.Files < leastFiles:
		add(adminapi.Critical, "files", "raise the limit: ulimit -n, or LimitNOFILE= of systemd", "a process may open %d files, and a node needs at least %d", f.Files, leastFiles)
	case f.Files < fewFiles:
		add(adminapi.Warning, "files", "raise the limit: ulimit -n, or LimitNOFILE= of systemd", "a process may open %d files, and a node should have %d", f.Files, fewFiles)
	}
	if need := budget / 100 * overBudget; f.Memory >= 0 && f.Memory < need {
		add(adminapi.Critical, "memory", "give it more, or a smaller --memory-budget-bytes", "a process may have %d MiB, and a node with a budget of %d MiB takes up to %d", f.Memory>>20, budget>>20, need>>20)
	}
	if small := min(f.ReceiveBuffer, f.SendBuffer); small >= 0 && small < leastBuffer {
		add(adminapi.Warning, "network", "sysctl -w net.core.rmem_max=7500000 net.core.wmem_max=7500000, and in /etc/sysctl.d", "UDP sockets have buffers of %d KiB at most: bursts between nodes are lost", small>>10)
	}
	if f.ClockKnown && !f.ClockSet {
		add(adminapi.Warning, "clock", "run an NTP client, such as chrony or systemd-timesyncd", "the kernel does not hold the clock for synchronised")
	}
	rank := map[adminapi.Severity]int{adminapi.Critical: 0, adminapi.Warning: 1}
	slices.SortStableFunc(all, func(a, b adminapi.Finding) int { return cmp.Compare(rank[a.Severity], rank[b.Severity]) })
	return all
}
