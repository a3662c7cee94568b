package node

import (
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/engine"
)

// FileBudget divides the files that the process may open (RLIMIT_NOFILE, which Go raises to the hard
// limit). The rest is for the wal's segments, for files being copied, flushed and compacted, and for
// connections of peers and of the metrics.
type FileBudget struct {
	// Tables are those that the engine keeps open, Connections those of clients.
	Tables, Connections int
}

const (
	// leastFiles is the limit below which a node does not start: the engine keeps 64 tables open in
	// any case.
	leastFiles = 512
	// fewFiles is the limit below which a node says that it is low.
	fewFiles = 4096
	// otherFiles, and a sixteenth of the limit for peers, are the rest.
	otherFiles = 256
	// mostConnections bounds the connections where the limit hardly does.
	mostConnections = 1 << 20
)

// NewFileBudget divides a limit of open files. It refuses one with which a node cannot work.
func NewFileBudget(limit uint64) (FileBudget, error) {
	if limit < leastFiles {
		return FileBudget{}, fmt.Errorf("the process may open %d files, and a node needs at least %d: raise the limit (ulimit -n, or LimitNOFILE= of systemd)", limit, leastFiles)
	}
	rest := int(min(limit, 1<<30))
	rest -= otherFiles + rest/16
	b := FileBudget{Tables: min(rest/2, engine.DefaultMaxOpenFiles)}
	b.Connections = min(rest-b.Tables, mostConnections)
	return b, nil
}

// filesLimit returns the process's limit of open files.
func filesLimit() (uint64, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("limit of open files: %w", err)
	}
	return limit.Cur, nil
}

// openFiles returns how many files the process has open, 0 where the system does not tell.
func openFiles() int {
	const fds = "/proc/self/fd"
	// Since Linux 6.2 the size of the directory is their number. Before, all of them are listed.
	if fi, err := os.Stat(fds); err == nil && fi.Size() > 0 {
		return int(fi.Size())
	}
	d, err := os.Open(fds)
	if err != nil {
		return 0
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1) // what could be read is the best answer
	return max(0, len(names)-1)    // without d itself
}

// fileGauges are etcd's metrics of open files.
func fileGauges(limit uint64) []prometheus.Collector {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value)
	}
	return []prometheus.Collector{
		gauge("os_fd_used", "The number of used file descriptors.", func() float64 { return float64(openFiles()) }),
		gauge("os_fd_limit", "The file descriptor limit.", func() float64 { return float64(limit) }),
	}
}

// tell logs the parts of the limit.
func (b FileBudget) tell(log *zap.Logger, limit uint64) {
	say, what := log.Info, "open files"
	if limit < fewFiles {
		say, what = log.Warn, "the process may open few files: fewer clients connect, and tables are opened anew more often"
	}
	say(what, zap.Uint64("limit", limit), zap.Int("tables", b.Tables), zap.Int("client-connections", b.Connections))
}
