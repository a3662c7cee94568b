package locktable

import (
	"slices"
	"sync"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// Held is a lock and those who wait for its end. Without a Lock it is something else to wait
// for: the registration of a lease.
type Held struct {
	*command.Lock
	// Pending says that the entry with the lock is not applied yet.
	Pending bool
	// Deciding says that an entry is on its way that ends or changes the lock.
	Deciding bool
	// Urgent says that its end holds up all watchers of the range: its transaction is asked
	// about sooner.
	Urgent bool
	// size is what the table has counted for it. A pending lock counts with its intents before
	// they are in the Lock.
	size int64
	// since is when this replica first saw it.
	since clock.Time
	push  pushState
	// waiters look again once the lock has changed; ended is closed then, nil until
	// somebody waits for it.
	waiters []*group
	ended   chan struct{}
}

// Ended returns a channel that is closed when the lock has ended or changed.
func (h *Held) Ended() <-chan struct{} {
	if h.ended == nil {
		h.ended = make(chan struct{})
	}
	return h.ended
}

// heldRecord is a commit record and when it was last asked about.
type heldRecord struct {
	*command.CommitRecord
	since clock.Time
	push  pushState
}

// Shared is what the tables of a node have in common. It is safe for concurrent use.
type Shared struct {
	bytes atomic.Int64
	sets  sync.Pool
}

// Bytes returns what the locks of all tables take.
func (s *Shared) Bytes() int64 { return s.bytes.Load() }

// lockSet has the locks, applied and pending, and the records.
type lockSet struct {
	all     map[*Held]struct{}
	byName  map[rangeapi.TxnName][]*Held
	records map[rangeapi.TxnName]*heldRecord
	spans   spanIndex[*Held]
	// most is how many locks or records there were at a time.
	most int
	// leases has the locks that attach keys to a lease or revoke it; nil without such locks.
	leases map[keyspace.LeaseID][]*Held
	// bytes is Shared's.
	bytes *atomic.Int64
}

func newLockSet(total *atomic.Int64) *lockSet {
	return &lockSet{
		bytes: total,
		all:   map[*Held]struct{}{}, byName: map[rangeapi.TxnName][]*Held{}, records: map[rangeapi.TxnName]*heldRecord{},
	}
}

func (t *lockSet) empty() bool { return len(t.all) == 0 && len(t.records) == 0 }

func (t *lockSet) add(h *Held) {
	t.all[h] = struct{}{}
	t.most = max(t.most, len(t.all))
	t.byName[h.Name] = append(t.byName[h.Name], h)
	h.size = max(h.size, int64(h.Lock.Bytes()))
	t.bytes.Add(h.size)
	for i := range h.Spans {
		t.spans.add(h.Spans[i].Span, h, h.Spans[i].Mode)
	}
	t.addLeases(h)
}

// confirm takes over the applied form of a pending lock. It is the same lock, with its id and its intents, so that
// its place in the indexes stays.
func (t *lockSet) confirm(h *Held, l *command.Lock) {
	h.Lock, h.Pending = l, false
	more := max(0, int64(l.Bytes())-h.size)
	h.size += more
	t.bytes.Add(more)
}

func (t *lockSet) remove(h *Held) {
	delete(t.all, h)
	t.bytes.Add(-h.size)
	if l := slices.DeleteFunc(t.byName[h.Name], func(o *Held) bool { return o == h }); len(l) > 0 {
		t.byName[h.Name] = l
	} else {
		delete(t.byName, h.Name)
	}
	for i := range h.Spans {
		t.spans.remove(h.Spans[i].Span, h)
	}
	t.removeLeases(h)
}

func (t *lockSet) find(name rangeapi.TxnName, id rangeapi.LockID) *Held {
	for _, h := range t.byName[name] {
		if h.ID == id {
			return h
		}
	}
	return nil
}

// keeps returns a lock in the way of an operation of this range alone.
func (t *lockSet) keeps(op proto.Message) (m Meeting) {
	if p, ok := op.(*pb.PutRequest); ok {
		// Most are puts, which pay little for others' locks.
		if m = t.holder(p.GetKey(), true); m.Held == nil && p.GetLease() != 0 && len(t.leases) > 0 {
			m.Held = t.revokes(op)
		}
		return m
	}
	visitKeys(op, func(key, end []byte, writes bool) {
		if m.Held != nil {
			return
		}
		if s, ok := keyspace.FromEtcd(key, end); ok {
			m = t.conflict(s, writes, rangeapi.TxnName{})
		}
	})
	if m.Held == nil && len(t.leases) > 0 {
		m.Held = t.revokes(op)
	}
	return m
}

// conflict returns a lock of another attempt in the way of a call for the span: a read
// meets what is written, a write meets everything.
func (t *lockSet) conflict(s keyspace.Span, writes bool, self rangeapi.TxnName) (m Meeting) {
	t.spans.visit(s, func(h *Held, mode command.LockMode, key []byte) bool {
		if h.Name != self && (writes || mode != command.Shared) {
			m = Meeting{h, key, writes}
		}
		return m.Held == nil
	})
	return m
}

// holder is conflict of one key and any attempt. It finds nothing for no key, and in no set.
func (t *lockSet) holder(key []byte, writes bool) (m Meeting) {
	if t == nil || key == nil {
		return m
	}
	t.spans.visitKey(key, func(h *Held, mode command.LockMode, at []byte) bool {
		if writes || mode != command.Shared {
			m = Meeting{h, at, writes}
		}
		return m.Held == nil
	})
	return m
}

func (t *lockSet) reader(s keyspace.Span, at keyspace.Revision, self rangeapi.TxnName) (found *Held) {
	t.spans.visit(s, func(h *Held, mode command.LockMode, _ []byte) bool {
		if mode != command.Shared && h.Floor < at && h.Name != self {
			found = h
		}
		return found == nil
	})
	return found
}

func (t *lockSet) lowestFloor(low keyspace.Revision) keyspace.Revision {
	for h := range t.all {
		low = min(low, h.Floor)
	}
	return low
}

// addLeases notes what a lock has to do with leases. A lock that attaches keys to a lease keeps
// it from being revoked, one that revokes it keeps all others away.
func (t *lockSet) addLeases(h *Held) {
	add := func(lease keyspace.LeaseID) {
		if t.leases == nil {
			t.leases = map[keyspace.LeaseID][]*Held{}
		}
		t.leases[lease] = append(t.leases[lease], h)
	}
	for _, lease := range h.Leases {
		add(lease)
	}
	if h.Revoke.Lease != 0 {
		add(h.Revoke.Lease)
	}
}

func (t *lockSet) removeLeases(h *Held) {
	remove := func(lease keyspace.LeaseID) {
		hs := slices.DeleteFunc(t.leases[lease], func(o *Held) bool { return o == h })
		if t.leases[lease] = hs; len(hs) == 0 {
			delete(t.leases, lease)
		}
	}
	for _, lease := range h.Leases {
		remove(lease)
	}
	if h.Revoke.Lease != 0 {
		remove(h.Revoke.Lease)
	}
}

// revokes returns a lock that revokes a lease to which an operation may attach a key.
func (t *lockSet) revokes(op proto.Message) (found *Held) {
	visitLeases(op, func(lease keyspace.LeaseID) {
		for _, h := range t.leases[lease] {
			if h.Revoke.Lease == lease {
				found = h
			}
		}
	})
	return found
}

func (t *lockSet) attaches(lease keyspace.LeaseID) bool {
	return slices.ContainsFunc(t.leases[lease], func(h *Held) bool { return slices.Contains(h.Leases, lease) })
}
