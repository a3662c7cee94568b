package shard

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/load"
	"github.com/skeindb/skein/shard/removal"
)

// adminVersion leads the messages of bus method 17, whose rest is JSON: they are
// rare, and read by people too.
const adminVersion = 1

// adminRequest is a request of method 17.
type adminRequest struct {
	Op         string              `json:"op"`
	Range      keyspace.RangeID    `json:"range,omitempty"`
	Generation keyspace.Generation `json:"generation,omitempty"`
	// Key is where to split. For a list, Key and Range are the start and the id of the last
	// range of the page before.
	Key []byte `json:"key,omitempty"`
	// Revision and Compacted are for a hash.
	Revision  keyspace.Revision `json:"revision,omitempty"`
	Compacted keyspace.Revision `json:"compacted,omitempty"`
	// Part is for hashpart.
	Part *rangeapi.HashRequest `json:"part,omitempty"`
	// Descriptors are for create.
	Descriptors []keyspace.Descriptor `json:"descriptors,omitempty"`
	// Marks are for removed.
	Marks []removal.Mark `json:"marks,omitempty"`
	// ConfIndex and Changes are for members, To for transfer.
	ConfIndex uint64                 `json:"conf_index,omitempty"`
	Changes   []raftgroup.ConfChange `json:"changes,omitempty"`
	To        keyspace.NodeID        `json:"to,omitempty"`
	// Merge is for merge.
	Merge *keyspace.MergeOrder `json:"merge,omitempty"`
	// Spread is for vouch.
	Spread bool `json:"spread,omitempty"`
}

// The operations of method 17.
const (
	adminSplit = "split"
	adminShow  = "show"
	// adminLook asks for the descriptor and the leader alone: operations do so at each step.
	adminLook = "look"
	adminList = "list"
	adminHash = "hash"
	// adminHashPart is a hash that is right whatever happens to the range meanwhile.
	adminHashPart = "hashpart"
	adminCreate   = "create"
	// adminRaised asks for the marks of what the node leads, adminRemoved whether its
	// replicas have come as far as marks say.
	adminRaised  = "raised"
	adminRemoved = "removed"
	// adminMembers changes the members of a range, adminTransfer its leader.
	adminMembers  = "members"
	adminTransfer = "transfer"
	// adminMerge takes one step of a merge.
	adminMerge = "merge"
	// adminVouch asks for a replica's hash, and may have it doubt.
	adminVouch = "vouch"
)

// adminAnswer is the answer of method 17.
type adminAnswer struct {
	Descriptors []keyspace.Descriptor `json:"descriptors,omitempty"`
	Status      *Status               `json:"status,omitempty"`
	List        []Summary             `json:"list,omitempty"`
	More        bool                  `json:"more,omitempty"` // of the list
	Hash        uint64                `json:"hash,omitempty"`
	Next        []byte                `json:"next,omitempty"` // of hashpart: where the next part begins
	// Marks answer raised, Left and Changed removed.
	Marks   []removal.Mark     `json:"marks,omitempty"`
	Left    []keyspace.RangeID `json:"left,omitempty"`
	Changed bool               `json:"changed,omitempty"`
	// Leader answers look, with one descriptor: 0 where the replica knows none that serves.
	Leader keyspace.NodeID `json:"leader,omitempty"`
}

// Summary is one replica in a list of ranges.
type Summary struct {
	Descriptor keyspace.Descriptor `json:"descriptor"`
	// LeaderNode is 0 while none is known.
	LeaderNode keyspace.NodeID `json:"leader_node"`
	IsLeader   bool            `json:"is_leader"`
	Asleep     bool            `json:"asleep"`
	// Keys is the number of live keys; -1 while it is not counted.
	Keys int64 `json:"keys"`
	// Bytes is about what the range takes of this node's disk. Data in memory does not count, so
	// it is 0 until the store first writes a table of the range.
	Bytes int64 `json:"bytes"`
	// Merge is the merge that the range is bound to, 0 for none.
	Merge uint64 `json:"merge,omitempty"`
	// Rates are the load.
	load.Rates
}

// Status is the whole state of one replica, for a bug report.
type Status struct {
	Node       keyspace.NodeID     `json:"node"`
	Descriptor keyspace.Descriptor `json:"descriptor"`
	Raft       raftgroup.Status    `json:"raft"`
	Applied    raftgroup.Position  `json:"applied"`
	// Serving says that this replica leads and takes requests.
	Serving bool `json:"serving"`
	// LastBatchTerm and LastBatchNumber name the last applied batch.
	LastBatchTerm   uint64            `json:"last_batch_term"`
	LastBatchNumber uint64            `json:"last_batch_number"`
	LastRevision    keyspace.Revision `json:"last_revision"`
	Hash            string            `json:"hash"`
	// Disagrees says that replicas have counted different hashes, and this one answers nothing.
	Disagrees bool              `json:"disagrees,omitempty"`
	Compacted keyspace.Revision `json:"compacted"`
	RemovedTo keyspace.Revision `json:"removed_to"`
	// Keys is the number of live keys if Counted, otherwise its change since the split.
	Keys    int64 `json:"keys"`
	Counted bool  `json:"counted"`
	// Bytes is what Summary says of it.
	Bytes int64 `json:"bytes"`
	// The pipeline: requests that wait for evaluation, keys in the overlay, batches
	// that fill, are sequenced, proposed, or lost with a former leadership.
	Queued          int    `json:"queued"`
	QueuedBytes     int64  `json:"queued_bytes"`
	OverlayKeys     int    `json:"overlay_keys"`
	FillingRequests int    `json:"filling_requests"`
	SequencingNow   bool   `json:"sequencing"`
	ProposedBatches int    `json:"proposed_batches"`
	LostBatches     int    `json:"lost_batches"`
	Confirming      int    `json:"confirming"`
	Closed          int    `json:"closed"`
	Draining        bool   `json:"draining"`
	SplitChild      string `json:"split_child,omitempty"`
	SplitLeaving    string `json:"split_leaving,omitempty"`
	// Merge is the merge that the range is bound to, Merging the neighbour; Frozen says that
	// this range is to be absorbed.
	Merge   uint64           `json:"merge,omitempty"`
	Merging keyspace.RangeID `json:"merging,omitempty"`
	Frozen  bool             `json:"frozen,omitempty"`
	// Locks and records of transactions over several ranges, and the fence behind which
	// none is anchored.
	Locks      int    `json:"locks"`
	TxnRecords int    `json:"txn_records"`
	Fence      uint64 `json:"fence"`
	// Leases is how many leases the range may have keys of.
	Leases           int               `json:"leases"`
	NodeFloor        keyspace.Revision `json:"node_floor"`
	NodeCompacted    keyspace.Revision `json:"node_compacted"`
	NodePendingBytes int64             `json:"node_pending_bytes"`
	// Load is what the leader serves.
	Load *Load `json:"load,omitempty"`
}

// Load is the load of a range as RangeMeasure has it.
type Load struct {
	load.Rates
	SplitKey []byte `json:"split_key,omitempty"`
	// Unsplit is why the range is not split by itself although it is too large or too hot.
	Unsplit string `json:"unsplit,omitempty"`
}

// Show returns the replica's whole state.
func (r *Replica) Show() *Status {
	st := &Status{Node: r.store.cfg.Self}
	r.show(st)
	st.Bytes = r.store.spanBytes(st.Descriptor.Span)
	return st
}

// Look returns the range as this replica has it, and the leader's node. That is this node if
// the replica leads and serves. It is 0 if no leader is known, or the replica is about to serve.
func (r *Replica) Look() (keyspace.Descriptor, keyspace.NodeID) {
	self := r.store.cfg.Self
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.descriptorLocked()
	if r.pipe.Leads() {
		return d, self
	}
	var leader keyspace.NodeID
	if r.group != nil {
		leader = r.group.Status().LeaderNode
	}
	if leader == self {
		leader = 0
	}
	return d, leader
}

// show fills in what the replica's lock guards.
func (r *Replica) show(st *Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.group != nil {
		st.Raft = r.group.Status()
	}
	st.Descriptor, st.Applied, st.Serving = r.descriptorLocked(), r.position, r.pipe.Leads()
	st.LastBatchTerm, st.LastBatchNumber = r.rec.Last.Term, r.rec.Last.Number
	st.LastRevision, st.Compacted, st.RemovedTo = r.rec.LastRevision, r.rec.Compacted, r.upkeep.removedTo
	st.Hash, st.Disagrees = fmtHash(r.rec.Hash), r.doubt != nil
	st.Keys, st.Counted = r.rec.Live, r.rec.Counted
	p := r.pipe.Status()
	st.Queued, st.QueuedBytes, st.OverlayKeys, st.FillingRequests = p.Queued, p.QueuedBytes, p.OverlayKeys, p.Filling
	st.SequencingNow, st.ProposedBatches, st.LostBatches = p.Sequencing, p.Proposed, p.Lost
	st.Confirming, st.Closed, st.Draining = p.Confirming, p.Closed, p.Draining
	if r.change != nil && r.change.kind == command.KindSplit {
		st.SplitChild, st.SplitLeaving = r.change.child.String(), r.change.leaving.String()
	}
	if m := &r.rec.Merge; m.Role != command.MergeNone {
		st.Merge, st.Merging, st.Frozen = m.ID, m.Other, m.Frozen()
	}
	st.Leases = len(r.leases.attached)
	st.Fence = r.rec.Fence
	st.Locks, st.TxnRecords = r.locks.Len()
	st.NodeFloor, st.NodeCompacted = r.store.Floor(), r.store.Compacted()
	st.NodePendingBytes = r.store.pipes.Budget.Pending()
	if r.pipe.Leads() {
		m := r.measureLocked()
		st.Load = &Load{Rates: m.Rates, SplitKey: m.SplitKey, Unsplit: m.Unsplit}
	}
}

// vouch answers a replica in doubt that asks for this one's hash. The asked one comes into doubt too if
// spread is set.
func (r *Replica) vouch(spread bool) (*Status, error) {
	r.mu.Lock()
	if r.stopped {
		defer r.mu.Unlock()
		return nil, r.ended
	}
	if spread {
		r.doubtLocked(false)
	}
	r.mu.Unlock()
	st := &Status{Node: r.store.cfg.Self}
	r.show(st)
	return st, nil
}

// spanBytes returns the bytes of a span on the disk, 0 if the store cannot tell.
func (s *Store) spanBytes(span keyspace.Span) int64 {
	b, err := s.cfg.Engine.EstimateSpanBytes(span)
	if err != nil {
		return 0
	}
	return b
}

// listBytes is about how much one message has of a list: the bus bounds messages, and nodes may
// have 100,000 replicas.
const (
	listBytes = 4 << 20
	// summaryBytes is about what a summary takes beside its keys.
	summaryBytes = 512
)

// list returns summaries of this node's replicas in the order of their spans, about listBytes.
// It begins behind the replica with that start and id. more says that others follow.
func (s *Store) list(start []byte, id keyspace.RangeID) (l []Summary, more bool) {
	l, more = listPage(s.summaries(), start, id, listBytes)
	s.weigh(l)
	return l, more
}

// List returns a summary of every replica of this node in the order of their spans.
func (s *Store) List() []Summary {
	l := s.summaries()
	s.weigh(l)
	return l
}

// weigh fills in the bytes of ranges.
func (s *Store) weigh(l []Summary) {
	for i := range l {
		l[i].Bytes = s.spanBytes(l[i].Descriptor.Span)
	}
}

// listPage returns the next page of a sorted list, behind the range with that start and id. The
// page has about size bytes and at least one summary.
func listPage(l []Summary, start []byte, id keyspace.RangeID, size int) (page []Summary, more bool) {
	first, found := slices.BinarySearchFunc(l, id, func(s Summary, id keyspace.RangeID) int {
		return cmp.Or(bytes.Compare(s.Descriptor.Span.Start, start), cmp.Compare(s.Descriptor.Range, id))
	})
	if found {
		first++
	}
	l = l[first:]
	for i := range l {
		if size -= summaryBytes + 2*(len(l[i].Descriptor.Span.Start)+len(l[i].Descriptor.Span.End)); size < 0 && i > 0 {
			return l[:i], true
		}
	}
	return l, false
}

// summaries is List without the bytes of the ranges.
func (s *Store) summaries() []Summary {
	var l []Summary
	for _, r := range s.Replicas() {
		r.mu.Lock()
		s := Summary{
			Descriptor: r.descriptorLocked(), LeaderNode: r.leader.LeaderNode, IsLeader: r.leader.IsLeader, Keys: -1,
			Merge: r.rec.Merge.ID, Rates: r.load.Figures().Rates,
		}
		if r.rec.Counted {
			s.Keys = r.rec.Live
		}
		g := r.group
		r.mu.Unlock()
		s.Asleep = g.Status().Asleep
		l = append(l, s)
	}
	slices.SortFunc(l, func(a, b Summary) int {
		return cmp.Or(bytes.Compare(a.Descriptor.Span.Start, b.Descriptor.Span.Start), cmp.Compare(a.Descriptor.Range, b.Descriptor.Range))
	})
	return l
}

// HashAt returns the hash of what compaction at the revision compacted keeps of the
// range at the revision at, as this replica has it. Replicas that have applied up to
// there agree, whatever they have removed.
func (r *Replica) HashAt(at, compacted keyspace.Revision) (uint64, error) {
	r.mu.Lock()
	span := r.rec.Span
	r.mu.Unlock()
	h, err := mvcc.Hash(r.store.cfg.Engine, span, at, compacted)
	if err != nil {
		return 0, fmt.Errorf("shard: range %s: hash at %d: %w", r.id, at, err)
	}
	return h, nil
}

// hashPartBytes is about how much is read for one part of a hash: some 10 ms of work.
const hashPartBytes = 4 << 20

// hashPart returns the hash of what compaction at q.Compacted keeps of a part of this node's replica at
// q.Revision. What it hashes will never change, unless a later compaction removes some of it. One part is
// hashed at a time, whoever asks.
func (s *Store) hashPart(ctx context.Context, q *rangeapi.HashRequest) (*adminAnswer, error) {
	r := s.Replica(q.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", q.Range, s.cfg.Self)
	}
	span, installs, err := r.hashable(q)
	if err != nil {
		return nil, err
	}
	select {
	case s.hashing <- struct{}{}:
		defer func() { <-s.hashing }()
	case <-ctx.Done():
		return nil, kverror.Of(ctx.Err())
	}
	a := &adminAnswer{}
	background.Run(func() {
		a.Hash, a.Next, err = mvcc.HashPart(s.cfg.Engine, span, q.Revision, q.Compacted, hashPartBytes)
	})
	if err != nil {
		return nil, fmt.Errorf("shard: range %s: hash at %d from %q on: %w", r.id, q.Revision, span.Start, err)
	}
	// Only now is it known that nothing was removed or replaced before the keys were read.
	_, now, err := r.hashable(q)
	if err == nil && now != installs {
		err = kverror.New(kverror.ReadAgain, "range %s: a snapshot replaced the state meanwhile", r.id)
	}
	return a, err
}

// hashable returns the rest of the range's span. It fails unless the replica has all that there will
// ever be of it at the revision. installs counts the snapshots that the replica was filled from.
func (r *Replica) hashable(q *rangeapi.HashRequest) (rest keyspace.Span, installs uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.stopped:
		return rest, 0, r.ended
	case r.upkeep.receiving:
		return rest, 0, kverror.New(kverror.Busy, "range %s: a snapshot comes in", r.id)
	case r.doubt != nil:
		return rest, 0, r.doubtedLocked()
	case r.rec.Load.Active():
		// Batches do not tell how far a load is here.
		return rest, 0, kverror.New(kverror.Busy, "range %s is being loaded", r.id)
	case q.Generation != r.rec.Generation || !r.rec.Span.Contains(q.From):
		return rest, 0, r.errorLocked(kverror.WrongRange, "the range is another one here")
	case q.Revision > r.resolvedLocked() && (q.Position == rangeapi.FeedPosition{} || !r.positionLocked().Reaches(q.Position)):
		return rest, 0, kverror.New(kverror.ReadAgain, "range %s is resolved up to %d here, not %d", r.id, r.resolvedLocked(), q.Revision)
	case r.rec.Compacted > max(q.Compacted, 0): // the sequencer's is -1 before the first one
		return rest, 0, &kverror.Error{Kind: kverror.Compacted, CompactRevision: r.rec.Compacted}
	}
	return keyspace.Span{Start: q.From, End: r.rec.Span.End}, r.installs, nil
}

func (s *Store) handleAdmin(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
	var q adminRequest
	var a *adminAnswer
	err := error(nil)
	switch {
	case len(payload) == 0 || payload[0] != adminVersion:
		err = rangeapi.BadRequest("admin request of %d bytes", len(payload))
	default:
		if err = json.Unmarshal(payload[1:], &q); err != nil {
			err = rangeapi.BadRequest("admin request: %v", err)
		} else {
			a, err = s.admin(ctx, &q)
		}
	}
	if err != nil {
		return kverror.Append([]byte{adminVersion, rangeapi.StatusError}, kverror.Of(err)), nil
	}
	b, err := json.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("shard: encode admin answer: %w", err)
	}
	return append([]byte{adminVersion, rangeapi.StatusOK}, b...), nil
}

func (s *Store) admin(ctx context.Context, q *adminRequest) (*adminAnswer, error) {
	switch q.Op {
	case adminList:
		l, more := s.list(q.Key, q.Range)
		return &adminAnswer{List: l, More: more}, nil
	case adminCreate:
		return &adminAnswer{}, s.Create(ctx, q.Descriptors)
	case adminRaised:
		return &adminAnswer{Marks: s.removalMarks(q.Compacted, q.Range)}, nil
	case adminRemoved:
		left, changed := s.removed(q.Marks)
		return &adminAnswer{Left: left, Changed: changed}, nil
	case adminMerge:
		return s.merge(ctx, q.Merge)
	case adminHashPart:
		if q.Part == nil {
			return nil, rangeapi.BadRequest("no part to hash")
		}
		return s.hashPart(ctx, q.Part)
	}
	r := s.Replica(q.Range)
	if r == nil {
		return nil, kverror.New(kverror.RangeNotHere, "range %s on node %s", q.Range, s.cfg.Self)
	}
	switch q.Op {
	case adminSplit:
		if len(q.Key) == 0 {
			ds, err := r.SplitMiddle(ctx, q.Generation)
			return &adminAnswer{Descriptors: ds}, err
		}
		ds, err := r.Split(ctx, q.Generation, q.Key)
		return &adminAnswer{Descriptors: ds}, err
	case adminMembers:
		d, err := r.ChangeMembers(ctx, q.ConfIndex, q.Changes)
		return &adminAnswer{Descriptors: []keyspace.Descriptor{d}}, err
	case adminTransfer:
		return &adminAnswer{}, r.TransferTo(ctx, q.To)
	case adminShow:
		return &adminAnswer{Status: r.Show()}, nil
	case adminVouch:
		st, err := r.vouch(q.Spread)
		return &adminAnswer{Status: st}, err
	case adminLook:
		d, leader := r.Look()
		return &adminAnswer{Descriptors: []keyspace.Descriptor{d}, Leader: leader}, nil
	case adminHash:
		h, err := r.HashAt(q.Revision, q.Compacted)
		return &adminAnswer{Hash: h}, err
	}
	return nil, rangeapi.BadRequest("no admin operation %q", q.Op)
}
