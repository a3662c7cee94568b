package raftgroup

import (
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/wal"
)

// flags say what a group has to do beyond its work lists.
type flags uint8

const (
	flagTick flags = 1 << iota
	flagTruncate
	flagCutOff // truncate even past followers that need the entries
	flagWakePaced
	flagClientWake
	flagExpire       // what a tick does on a host that does not tick its groups
	flagCommitNotice // held commit notices have waited long enough
)

// work is what has arrived for a group since its last visit. A group without work has
// none of these, so a sleeping group costs no memory for it.
type work struct {
	flags    flags
	msgs     []*message
	props    []proposal
	reads    []readWaiter
	calls    []func()
	appended []*pb.Message // responses whose append is durable
	records  int           // how many appends they belong to
	applied  []applyDone
}

func (k *work) reset() {
	clear(k.msgs)
	clear(k.props)
	clear(k.reads)
	clear(k.calls)
	clear(k.appended)
	clear(k.applied)
	*k = work{
		msgs: k.msgs[:0], props: k.props[:0], reads: k.reads[:0], calls: k.calls[:0],
		appended: k.appended[:0], applied: k.applied[:0],
	}
}

// workKeepMax bounds the lists that a work keeps for reuse.
const workKeepMax = 256

func (k *work) small() bool {
	return cap(k.msgs) <= workKeepMax && cap(k.props) <= workKeepMax && cap(k.reads) <= workKeepMax &&
		cap(k.appended) <= workKeepMax && cap(k.applied) <= workKeepMax
}

// workOf returns the group's work to add to, and queues the group; the caller sees to it that a pass follows. mu must be
// held. It returns nil after the worker's end.
func (w *worker) workOf(g *Group) *work {
	if w.mu.stopped {
		return nil
	}
	if g.work == nil {
		if n := len(w.mu.free); n > 0 {
			g.work, w.mu.free = w.mu.free[n-1], w.mu.free[:n-1]
		} else {
			g.work = new(work)
		}
	}
	if !g.queued {
		g.queued = true
		w.mu.queue = append(w.mu.queue, g)
	}
	return g.work
}

const (
	// helpGroupsMax bounds how many groups a pass may have that is not the worker's goroutine's own.
	helpGroupsMax = 2
	// helpPause is the time after a pass in which nobody helps: so soon, more is about to come.
	helpPause = 20 * time.Microsecond
	// helpAfterRead is how many visits of a group without a read of the log's files lie between one with a read and help.
	helpAfterRead = 64
)

// help runs a pass over what the caller has brought, where no other pass is under way and next to nothing
// waits: to wake the worker's goroutine takes longer than such a pass. Else the worker's goroutine is the
// better one: more comes together until it runs. It also is where a group reads from the log's files, but for its first read:
// who helps has others to serve.
func (w *worker) help() {
	w.mu.Lock()
	if w.mayHelpLocked() {
		w.pass()
	}
	w.wakeLocked()
	w.mu.Unlock()
}

// mayHelpLocked reports whether help may run a pass. Before Start nobody may: the node may not be admitted yet, and votes for
// nobody. mu must be held.
func (w *worker) mayHelpLocked() bool {
	n := w.waitingLocked()
	if n == 0 || n > helpGroupsMax || w.mu.inPass || w.mu.stopped || !w.mu.running {
		return false
	}
	for _, g := range w.mu.queue[w.mu.head:] {
		if g.afterRead > 0 {
			return false
		}
	}
	// In virtual time no time passes between two passes, and all the same there is help.
	since := w.mu.ended.Elapsed()
	return since >= helpPause || since == 0
}

// wakeLocked wakes the worker's goroutine if there is something for it to do. mu must be held.
func (w *worker) wakeLocked() {
	if !w.mu.inPass && (w.waitingLocked() > 0 || w.mu.stopped) {
		w.cond.Signal()
	}
}

// waitingLocked returns how many groups wait for a pass. mu must be held.
func (w *worker) waitingLocked() int { return len(w.mu.queue) - w.mu.head }

// flag sets flags of one group.
func (w *worker) flag(g *Group, f flags) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if k := w.workOf(g); k != nil {
		k.flags |= f
	}
	w.wakeLocked()
}

// call makes the worker run f in the group's next visit. It returns false if the worker
// has ended.
func (w *worker) call(g *Group, f func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	k := w.workOf(g)
	if k == nil {
		return false
	}
	k.calls = append(k.calls, f)
	w.wakeLocked()
	return true
}

// tick flags all awake groups with f. Ticks that a group has not served yet do not add
// up, so a stall never ends in a burst of ticks.
func (w *worker) tick(f flags) (awake int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, g := range w.mu.awake {
		if k := w.workOf(g); k != nil {
			k.flags |= f
		}
	}
	w.wakeLocked()
	return len(w.mu.awake)
}

// deliver hands decoded messages to their groups under one lock.
func (w *worker) deliver(msgs []routed) {
	w.mu.Lock()
	for _, r := range msgs {
		k := w.workOf(r.g)
		if k == nil {
			continue
		}
		if len(k.msgs) >= groupMessagesMax {
			// Lost, as in a network: the worker is far behind.
			if w.h.m.inboundDropped.Inc(); r.m.kind == pb.MsgApp {
				w.h.inbound.Add(-r.m.bytes)
			}
			continue
		}
		k.msgs = append(k.msgs, r.m)
	}
	w.mu.Unlock()
	w.help()
}

// applied hands completions of applies to their groups.
func (w *worker) applied(done []appliedItem) {
	w.mu.Lock()
	for i := range done {
		if k := w.workOf(done[i].g); k != nil {
			k.applied = append(k.applied, done[i].done)
		}
	}
	w.mu.Unlock()
	w.help()
}

// setAwake adds the group to the set that ticks visit, or removes it.
func (w *worker) setAwake(g *Group, awake bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case awake && g.awakeAt < 0:
		g.awakeAt = len(w.mu.awake)
		w.mu.awake = append(w.mu.awake, g)
	case !awake && g.awakeAt >= 0:
		last := len(w.mu.awake) - 1
		moved := w.mu.awake[last]
		w.mu.awake[g.awakeAt], moved.awakeAt = moved, g.awakeAt
		w.mu.awake[last] = nil
		w.mu.awake, g.awakeAt = w.mu.awake[:last], -1
	}
}

// passRecord is what a pass delivers once its wal batch is durable.
type passRecord struct {
	w      *worker
	watch  clock.Stopwatch // from the submission on
	groups []recordItem
	// sync says that the batch holds writes that need an fsync.
	sync bool
}

type recordItem struct {
	g         *Group
	responses []*pb.Message
}

// walBatch returns this pass's batch.
func (w *worker) walBatch() *wal.Batch {
	if w.batch == nil {
		w.batch, w.record = w.h.cfg.WAL.NewBatch(), &passRecord{w: w}
	}
	return w.batch
}

// afterDurable makes the responses wait for the pass's batch, and for its fsync if sync
// is set. Without an fsync they still wait for everything before them, because batches
// complete in order.
func (w *worker) afterDurable(g *Group, responses []*pb.Message, sync bool) {
	w.walBatch()
	w.record.sync = w.record.sync || sync
	w.record.groups = append(w.record.groups, recordItem{g, responses})
}

// durable completes a pass's wal batch: one lock for all its groups.
func (w *worker) durable(rec *passRecord, err error) {
	if err != nil {
		// The wal accepts nothing more and the node stops. Nothing that waits for this
		// batch may ever be answered.
		return
	}
	w.h.m.appendSeconds.Observe(rec.watch.Elapsed().Seconds())
	w.mu.Lock()
	for i := range rec.groups {
		it := &rec.groups[i]
		if k := w.workOf(it.g); k != nil {
			k.appended = append(k.appended, it.responses...)
			k.records++
		}
	}
	w.mu.Unlock()
	w.help()
}

// scheduledTask is a task on its way from a worker to the group's applier.
type scheduledTask struct {
	g *Group
	t applyTask
}

// schedule hands a task to the group's applier when the pass ends.
func (w *worker) schedule(g *Group, t applyTask) {
	w.scheduled = append(w.scheduled, scheduledTask{g, t})
}
