package loadtest

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Versions are the versions of the load generator and of the servers.
type Versions struct {
	// Loadtest is the version of this module, Commit that of its tree; empty if the
	// build did not record them. Modified says that the tree had changes.
	Loadtest string `json:"loadtest"`
	Commit   string `json:"commit"`
	Modified bool   `json:"modified"`
	Go       string `json:"go"`
	Client   string `json:"clientv3"`
	// Servers has one element for each endpoint.
	Servers []ServerVersion `json:"servers"`
}

// ServerVersion is one endpoint's report on itself.
type ServerVersion struct {
	Endpoint string `json:"endpoint"`
	// Version is the version of etcd's API that Maintenance.Status returns.
	Version string `json:"version"`
	// HTTP is the answer of /version on the same port, if any.
	HTTP map[string]string `json:"http,omitempty"`
}

// Machine is the machine of the load generator.
type Machine struct {
	Host        string `json:"host"`
	OS          string `json:"os"`
	Arch        string `json:"arch"`
	Kernel      string `json:"kernel"`
	CPU         string `json:"cpu"`
	CPUs        int    `json:"cpus"`
	MemoryBytes uint64 `json:"memory_bytes"`
}

// FileSystem is the file system of Config.DataPath.
type FileSystem struct {
	Path    string `json:"path"`
	Type    string `json:"type"`
	Source  string `json:"source"`
	Options string `json:"options"`
}

// buildVersions returns the running binary's build information.
func buildVersions() Versions {
	v := Versions{Go: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.Loadtest = info.Main.Version
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Commit = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	for _, d := range info.Deps {
		if d.Path == "go.etcd.io/etcd/client/v3" {
			v.Client = d.Version
		}
	}
	return v
}

// thisMachine describes the machine; what it cannot find out it leaves empty.
func thisMachine() Machine {
	m := Machine{OS: runtime.GOOS, Arch: runtime.GOARCH, CPUs: runtime.NumCPU()}
	m.Host, _ = os.Hostname()
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryBytes = info.Totalram * uint64(info.Unit)
	}
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
				m.CPU = strings.TrimSpace(value)
				break
			}
		}
	}
	return m
}

// fileSystemOf returns the mount that holds a path.
func fileSystemOf(path string) FileSystem {
	fs := FileSystem{Path: path}
	abs, err := filepath.Abs(path)
	if err != nil {
		return fs
	}
	if resolved, err := filepath.EvalSymlinks(abs); err == nil {
		abs = resolved
	}
	fs.Path = abs
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return fs
	}
	defer f.Close()
	longest := -1
	for lines := bufio.NewScanner(f); lines.Scan(); {
		at, found, ok := parseMount(lines.Text())
		// Of two mounts on one directory the later hides the earlier.
		if ok && len(at) >= longest && (at == "/" || abs == at || strings.HasPrefix(abs, at+"/")) {
			longest = len(at)
			fs.Type, fs.Source, fs.Options = found.Type, found.Source, found.Options
		}
	}
	return fs
}

// parseMount reads a line of /proc/self/mountinfo: "36 35 98:0 /root /at rw,… tag:1
// - type source super-options".
func parseMount(line string) (at string, fs FileSystem, ok bool) {
	mount, rest, ok := strings.Cut(line, " - ")
	left, right := strings.Fields(mount), strings.Fields(rest)
	if !ok || len(left) < 6 || len(right) < 2 {
		return "", fs, false
	}
	fs.Type, fs.Source, fs.Options = right[0], right[1], left[5]
	if len(right) > 2 {
		fs.Options += "," + right[2]
	}
	return unescapeMount.Replace(left[4]), fs, true
}

// unescapeMount undoes the kernel's octal escapes.
var unescapeMount = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// selfCPU returns the processor time that this process has used.
func selfCPU() (time.Duration, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("getrusage: %w", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}
