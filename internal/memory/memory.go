// Package memory tells how much memory a process may have.
package memory

import (
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Available returns what this process may have, in bytes: what the machine has, or less by a limit of its cgroup or of one
// around that. It is -1 where the system does not say.
func Available() int64 { return within(os.DirFS("/"), total()) }

// total returns the memory of the machine, -1 where the system does not say.
func total() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return -1
	}
	return int64(info.Totalram) * int64(info.Unit)
}

// within returns the least of what the machine has and of the limits that the files of root show.
func within(root fs.FS, machine int64) int64 {
	least := machine
	// In a container the path may be that of the host, whose directories are not there. The container's own limit is then at
	// the top, so the top counts in any case.
	limits := func(top, group string, files ...string) {
		for group = path.Clean("/" + group); ; group = path.Dir(group) {
			for _, file := range files {
				if n := number(root, path.Join(top, group, file)); n > 0 && (least < 0 || n < least) {
					least = n
				}
			}
			if group == "/" {
				return
			}
		}
	}
	v1, v2 := "/", "/"
	b, _ := fs.ReadFile(root, "proc/self/cgroup") // without it the top alone counts
	for line := range strings.Lines(string(b)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) < 3 {
			continue
		} else if parts[0] == "0" {
			v2 = parts[2]
		} else if slices.Contains(strings.Split(parts[1], ","), "memory") {
			v1 = parts[2]
		}
	}
	limits("sys/fs/cgroup", v2, "memory.max", "memory.high")
	limits("sys/fs/cgroup/memory", v1, "memory.limit_in_bytes")
	return least
}

// number reads a file with one number, -1 where there is none.
func number(root fs.FS, name string) int64 {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1
	}
	return n
}
