// Package limits tells how much memory and processor time a process may have.
package limits

import (
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Memory returns what this process may have, in bytes: what the machine has, or less by a limit of its cgroup or of one
// around that. It is -1 where the system does not say.
func Memory() int64 { return memoryWithin(os.DirFS("/"), total()) }

// Processors returns how many processors' time this process may have: those that it may run on, or less, and part of one,
// by a limit of its cgroup or of one around that.
func Processors() float64 { return processorsWithin(os.DirFS("/"), float64(runtime.NumCPU())) }

// total returns the memory of the machine, -1 where the system does not say.
func total() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return -1
	}
	return int64(info.Totalram) * int64(info.Unit)
}

// memoryWithin returns the least of what the machine has and of the limits that the files of root show.
func memoryWithin(root fs.FS, machine int64) int64 {
	least := machine
	read := func(files ...string) func(dir string) {
		return func(dir string) {
			for _, file := range files {
				if n := number(root, path.Join(dir, file)); n > 0 && (least < 0 || n < least) {
					least = n
				}
			}
		}
	}
	v1, v2 := groups(root, "memory")
	upwards("sys/fs/cgroup", v2, read("memory.max", "memory.high"))
	upwards("sys/fs/cgroup/memory", v1, read("memory.limit_in_bytes"))
	return least
}

// processorsWithin returns the least of what the machine has and of the limits that the files of root show.
func processorsWithin(root fs.FS, machine float64) float64 {
	least := machine
	limit := func(quota, period int64) {
		if quota > 0 && period > 0 {
			least = min(least, float64(quota)/float64(period))
		}
	}
	v1, v2 := groups(root, "cpu")
	upwards("sys/fs/cgroup", v2, func(dir string) {
		if f := strings.Fields(text(root, path.Join(dir, "cpu.max"))); len(f) == 2 {
			limit(parsed(f[0]), parsed(f[1]))
		}
	})
	v1Limit := func(dir string) {
		limit(number(root, path.Join(dir, "cpu.cfs_quota_us")), number(root, path.Join(dir, "cpu.cfs_period_us")))
	}
	upwards("sys/fs/cgroup/cpu", v1, v1Limit)
	upwards("sys/fs/cgroup/cpu,cpuacct", v1, v1Limit)
	return least
}

// groups returns the process's group of a controller in the first version, and its group in the second.
func groups(root fs.FS, controller string) (v1, v2 string) {
	v1, v2 = "/", "/"
	for line := range strings.Lines(text(root, "proc/self/cgroup")) { // without it the top alone counts
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) < 3 {
			continue
		} else if parts[0] == "0" {
			v2 = parts[2]
		} else if slices.Contains(strings.Split(parts[1], ","), controller) {
			v1 = parts[2]
		}
	}
	return v1, v2
}

// upwards visits the directory of a group and those around it. In a container the path may be that of the host, whose
// directories are not there. The container's own limit is then at the top, so the top counts in any case.
func upwards(top, group string, visit func(dir string)) {
	for group = path.Clean("/" + group); ; group = path.Dir(group) {
		if visit(path.Join(top, group)); group == "/" {
			return
		}
	}
}

// text reads a file, which is empty where it is not there.
func text(root fs.FS, name string) string {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return ""
	}
	return string(b)
}

// number reads a file with one number, -1 where there is none.
func number(root fs.FS, name string) int64 { return parsed(strings.TrimSpace(text(root, name))) }

// parsed returns the number in a text, -1 where it is none.
func parsed(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return -1
	}
	return n
}
