package node

import (
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/pipeapi"
	"github.com/skeindb/skein/watch"
)

// Budget divides a node's memory among everything that may hold much of it. Its
// fields add up to the total that it was made from, but for Go's runtime, stacks
// and what each idle range costs. All are in bytes.
type Budget struct {
	// BlockCache holds the engine's blocks, Memtables what is not flushed yet. Blocks have what
	// memtables do not take.
	BlockCache, Memtables int64
	// WALQueue is what waits to be written to the wal, WALCache the entries kept for
	// followers.
	WALQueue, WALCache int64
	// Proposals are entries of this node's leaders that are not applied yet, Inbound
	// entries received and not taken in.
	Proposals, Inbound int64
	// BusQueues is what waits to be sent, what calls of other nodes hold, and what is received and
	// not read, over all peers.
	BusQueues int64
	// Requests are client requests being evaluated, overlays included. Scans is what
	// requests to its replicas hold of what they have read. Reads are the answers to reads
	// of spans at this gateway, until clients have taken them. Requests wait for room in the
	// last two, and one at a time exceeds it.
	Requests, Scans, Reads int64
	// Watch is what this gateway holds of events for its watchers.
	Watch int64
	// Txns are the transactions over several ranges that this gateway coordinates, Locks
	// what such transactions have locked and intend to write in its replicas.
	Txns, Locks int64
	// Pipes are the parts of large transactions that have come by pipes and are not answered.
	Pipes int64
	// VersionCache is what is remembered of the newest versions of keys written or read lately.
	VersionCache int64
}

// Standing is what may be taken by what is there without work, in bytes: connections of clients,
// pipes, watchers, and replicas with the rows of the range map. Each is counted by a measured figure, and what
// does not fit is refused. It stands beside Budget's shares, which only a busy node fills. What is under way in a pipe is in
// neither, but for the parts of large transactions: each pipe may hold its window.
type Standing struct{ Connections, Pipes, Watchers, Replicas int64 }

// NewStanding returns the standing parts of total bytes.
func NewStanding(total int64) Standing {
	return Standing{Connections: total / 20 * 3, Pipes: total / 32, Watchers: total / 16, Replicas: total * 7 / 16}
}

// connections returns how many connections of clients a node takes, and what bounds them.
func (s Standing) connections(files FileBudget) (most int, why string) {
	const share = ", or let clients share connections"
	if n := int(s.Connections / etcdapi.ConnectionBytes); n < files.Connections {
		return n, "as many are open as the memory budget has room for; raise --memory-budget-bytes" + share
	}
	return files.Connections, "as many are open as the process has files for; raise its limit of open files (ulimit -n, or LimitNOFILE= of systemd)" + share
}

// pipes returns how many open pipes of clients a node takes.
func (s Standing) pipes() int { return int(min(s.Pipes/pipeapi.PipeBytes, mostPipes)) }

const mostPipes = 4096

// NewBudget divides total bytes.
func NewBudget(total int64) Budget {
	part := func(percent int64) int64 { return total / 100 * percent }
	b := Budget{
		Memtables: min(part(20), memTablesMax),
		WALQueue:  part(6), WALCache: min(part(6), walCacheMax),
		Proposals: part(10), Inbound: part(8),
		BusQueues: part(10), Requests: part(6), Scans: part(3), Reads: part(4),
		Txns: part(2), Locks: part(2), Pipes: part(1),
		Watch: part(6), VersionCache: part(8),
	}
	b.BlockCache = total - b.Memtables - b.WALQueue - b.WALCache - b.Proposals - b.Inbound - b.BusQueues - b.Requests - b.Scans - b.Reads - b.Txns - b.Locks - b.Pipes - b.Watch - b.VersionCache
	return b
}

// answer bounds the one answer that may exceed Reads; scan bounds one request's part of Scans.
func answer(total int64) int64 { return total / 2 }
func scan(total int64) int64   { return total / 4 }

// atLeast makes a share large enough for one transaction over several ranges of maxRequest bytes.
// A node that leads all of these ranges holds all parts at a time; in a smaller share they would
// refuse one another on each attempt. A part has a key up to four times. A gateway also holds a
// transaction beyond its answer, until its locks have ended, and must accept the client's next
// one meanwhile. The same is true of the wal's queue behind a largest transaction.
func atLeast(share int64, maxRequest int) int64 { return max(share, 4*int64(maxRequest)) }

// What more memory does not make better is the block cache's. Memtables of 64 MiB make large enough tables, and more would
// be paid for in each flush and in the replay after a crash. The wal's cache is for followers that lag a little; those far
// behind read from the disk.
const (
	memTablesMax = 4 * 64 << 20
	walCacheMax  = 128 << 20
)

// memTable is the size of one memtable.
func (b Budget) memTable() int64 { return b.Memtables / engine.MemTableStops }

// watchConfig fills in the bounds of watchers' memory: half of it for clients, the rest
// for events that wait, that came of late, and for pages of history.
func (b Budget) watchConfig(c *watch.Config) {
	c.QueuedBytes, c.PendingBytes, c.RecentBytes = b.Watch/2, b.Watch/8*2, b.Watch/8
	c.HistoryBytes = b.Watch / 8 / watchReaders
	c.WatcherBytes = min(1<<20, c.QueuedBytes)
	c.Readers = watchReaders
}

// watchReaders is how many pages of history a node reads for watchers at a time.
const watchReaders = 4

// busBytes is transport's QueueBytes: half of the share, since handlers and QUIC may hold as much again. But
// there is room for some of the largest messages. A transaction of maxRequest bytes may make a message of
// four times that.
func (b Budget) busBytes(maxRequest int) int64 { return max(b.BusQueues/2, 4*4*int64(maxRequest)) }
