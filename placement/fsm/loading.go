package fsm

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// LoadPhase says how far the load of a new cluster is; the numbers are stored.
type LoadPhase byte

// The phases. A cluster that was never loaded has none.
const (
	// PhaseBulk takes versions by key, PhaseFollow by revision. Nothing else is written meanwhile.
	PhaseBulk LoadPhase = iota + 1
	PhaseFollow
	// PhaseFinished is a cluster that serves.
	PhaseFinished
	// PhaseAbandoned is a cluster that holds a part of a load, and never serves.
	PhaseAbandoned
)

// String returns the phase as people read it.
func (p LoadPhase) String() string {
	names := [...]string{"none", "bulk", "follow", "finished", "abandoned"}
	if int(p) >= len(names) {
		return fmt.Sprintf("phase-%d", byte(p))
	}
	return names[p]
}

// LoadNonce names a loader: a random number, never 0.
type LoadNonce uint64

// AccessSet names all users and roles of a source at one moment: those of another moment have another number.
type AccessSet uint64

// Loading is the load of a new cluster.
type Loading struct {
	Phase LoadPhase
	Nonce LoadNonce
	// Source says where the versions come from, for people.
	Source string
	// Position is the revision up to which all ranges have the source's versions; 0 in bulk.
	Position keyspace.Revision
	// Set names the users and roles that the load has brought, 0 for none.
	Set AccessSet
	// Incarnation is that of all leases of the load.
	Incarnation keyspace.LeaseIncarnation
	// Started is when it began, by the clock of placement's leader.
	Started UnixMillis
	// Changed is the index of the last change.
	Changed uint64
}

// Active says whether the cluster takes no writes of clients. A cluster that was never loaded has nil.
func (l *Loading) Active() bool {
	return l != nil && (l.Phase == PhaseBulk || l.Phase == PhaseFollow || l.Phase == PhaseAbandoned)
}

// Err is the answer to a client, nil if the load is not active.
func (l *Loading) Err() error {
	if !l.Active() {
		return nil
	}
	return l.Refusal()
}

// Refusal is the answer to a client that came before the load or in it. It does not name the source, since every client gets it: a
// mirror's has a directory of the operator's machine.
func (l *Loading) Refusal() error {
	if l.Phase == PhaseAbandoned {
		return kverror.New(kverror.Loading, "the load was abandoned; this cluster holds a part of the source and will never serve: make a new one")
	}
	return kverror.New(kverror.Loading, "by a mirror, an import or a restore; it is in phase %s, at revision %d, and serves at its end", l.Phase, l.Position)
}

// LoadStep is what a ChangeLoad does; the numbers are stored.
type LoadStep byte

// The steps.
const (
	// LoadBegin begins a load of a cluster that is empty.
	LoadBegin LoadStep = iota + 1
	// LoadAdvance moves the position, and perhaps the phase from bulk to follow.
	LoadAdvance
	// LoadGrant grants leases, whose clocks start when the load finishes.
	LoadGrant
	// LoadRegister adds spans to them.
	LoadRegister
	// LoadRevoke takes leases back that have ended at the source.
	LoadRevoke
	// LoadFinish lets the cluster serve from Position on.
	LoadFinish
	// LoadAbandon ends the load for good.
	LoadAbandon
	// LoadAccess brings users and roles. They are checked from then on if they were at the source, though the cluster
	// serves nobody yet.
	LoadAccess
)

// MaxSourceBytes bounds the text of a source.
const MaxSourceBytes = 512

// LoadedLease is a lease of a load. Spans are only for LoadRegister, the TTL only for LoadGrant.
type LoadedLease struct {
	ID    keyspace.LeaseID
	TTL   int64
	Spans []keyspace.Span
}

// ChangeLoad is a step of a load. It is written from keyspace.VersionData on.
type ChangeLoad struct {
	Step  LoadStep
	Nonce LoadNonce
	// Source and Now are for LoadBegin.
	Source string
	Now    UnixMillis
	// Phase is for LoadAdvance; Position for that and LoadFinish, Compacted for LoadFinish.
	Phase               LoadPhase
	Position, Compacted keyspace.Revision
	// Leases are for LoadGrant, LoadRegister and LoadRevoke, at most MaxLeaseBatch.
	Leases []LoadedLease
	// Set is for LoadAccess and LoadFinish, Access for LoadAccess: some of the set's users and roles (see AccessPieces).
	Set    AccessSet
	Access []AccessRow
	// Key is for LoadAccess: the secret of the tokens' MAC from now on, if users are checked from now on.
	Key []byte
}

func (ChangeLoad) kind() opKind { return opChangeLoad }

func (o ChangeLoad) append(dst []byte) []byte { return AppendChangeLoad(dst, &o) }

// AppendChangeLoad appends a step of a load, which requests hold too.
func AppendChangeLoad(dst []byte, o *ChangeLoad) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, byte(o.Step)), uint64(o.Nonce))
	dst = binary.AppendUvarint(AppendString(dst, o.Source), uint64(o.Now))
	dst = AppendRevision(AppendRevision(append(dst, byte(o.Phase)), o.Position), o.Compacted)
	dst = binary.AppendUvarint(dst, uint64(len(o.Leases)))
	for i := range o.Leases {
		dst = binary.AppendUvarint(AppendLeaseID(dst, o.Leases[i].ID), uint64(o.Leases[i].TTL))
		dst = AppendSpans(dst, o.Leases[i].Spans)
	}
	dst = binary.BigEndian.AppendUint64(dst, uint64(o.Set))
	return AppendBytes(AppendAccessRows(dst, o.Access), o.Key)
}

// ChangeLoad reads a step of a load. A request may have step 0: it asks how far the load is.
func (r *Reader) ChangeLoad() ChangeLoad {
	o := ChangeLoad{Step: LoadStep(r.Byte()), Nonce: LoadNonce(r.Uint64BE()), Source: r.StringUpTo(MaxSourceBytes), Now: r.millis()}
	o.Phase, o.Position, o.Compacted = r.loadPhase(), r.Revision(), r.Revision()
	if o.Step > LoadAccess || o.Step != 0 && o.Nonce == 0 {
		r.Failf("step %d of a load by loader %d", o.Step, o.Nonce)
	}
	for range r.CountUpTo(MaxLeaseBatch, 10) {
		l := LoadedLease{ID: r.LeaseID(), TTL: r.LeaseTTL(), Spans: r.Spans()}
		if !r.OK() {
			break
		}
		o.Leases = append(o.Leases, l)
	}
	o.Set, o.Access, o.Key = AccessSet(r.Uint64BE()), r.AccessRows(), r.CopyUpTo(MaxKeyBytes)
	return o
}

// stepOfLoad reads a step that is not 0.
func (r *Reader) stepOfLoad() ChangeLoad {
	o := r.ChangeLoad()
	if r.OK() && o.Step == 0 {
		r.Failf("a step of a load that changes nothing")
	}
	return o
}

func (r *Reader) loadPhase() LoadPhase {
	p := LoadPhase(r.Byte())
	if p > PhaseAbandoned {
		r.Failf("phase %d of a load", p)
	}
	return p
}

// AppendLoading appends a load, for records, answers and feeds.
func AppendLoading(dst []byte, l *Loading) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, byte(l.Phase)), uint64(l.Nonce))
	dst = binary.BigEndian.AppendUint64(AppendRevision(AppendString(dst, l.Source), l.Position), uint64(l.Set))
	for _, n := range []uint64{uint64(l.Incarnation), uint64(l.Started), l.Changed} {
		dst = binary.AppendUvarint(dst, n)
	}
	return dst
}

// Loading reads a load.
func (r *Reader) Loading() Loading {
	l := Loading{Phase: r.loadPhase(), Nonce: LoadNonce(r.Uint64BE()), Source: r.StringUpTo(MaxSourceBytes), Position: r.Revision(), Set: AccessSet(r.Uint64BE())}
	l.Incarnation, l.Started, l.Changed = keyspace.LeaseIncarnation(r.Uvarint()), r.millis(), r.Uvarint()
	if r.OK() && (l.Phase == 0 || l.Nonce == 0) {
		r.Failf("a load in phase %d by loader %d", l.Phase, l.Nonce)
	}
	return l
}

func decodeLoading(b []byte) (Loading, error) {
	r := NewReader(b)
	r.Version()
	l := r.Loading()
	if err := r.Finish(); err != nil {
		return Loading{}, fmt.Errorf("decode placement load record: %w", err)
	}
	return l, nil
}

// restsWhileLoading says whether a command waits for the end of a load.
func restsWhileLoading(op Effect) bool {
	switch o := op.(type) {
	case RaiseCeiling, Compact, GrantLease, GrantLeaseIn, RegisterLease, RegisterLeases, RevokeLeases, RevokeChecked, ChangeAccess:
		return true
	case BeginOperation:
		return o.Operation.Kind == OperationMerge
	}
	return false
}

// applyChangeLoad takes a step of a load. One that is repeated changes nothing.
func (s *State) applyChangeLoad(index uint64, o ChangeLoad) Result {
	if o.Step == LoadBegin {
		return s.beginLoad(index, &o)
	}
	l := s.loading
	switch {
	case l == nil:
		return Result{Err: kverror.New(kverror.BadRequest, "no load has begun here")}
	case l.Nonce != o.Nonce:
		return Result{Err: s.otherLoader(o.Nonce)}
	case l.Phase == PhaseFinished && o.Step == LoadFinish && l.Position == o.Position, l.Phase == PhaseAbandoned && o.Step == LoadAbandon:
		return Result{Loading: l}
	case l.Phase == PhaseFinished, l.Phase == PhaseAbandoned:
		return Result{Err: kverror.New(kverror.BadRequest, "the load of %s is %s", l.Source, l.Phase)}
	}
	next := *l
	switch o.Step {
	case LoadAdvance:
		if o.Phase != PhaseBulk && o.Phase != PhaseFollow || o.Phase < l.Phase || o.Position < l.Position || (o.Phase == PhaseBulk) != (o.Position == 0) {
			return Result{Err: kverror.New(kverror.BadRequest, "a load in phase %s at revision %d cannot go on in phase %s at %d", l.Phase, l.Position, o.Phase, o.Position)}
		}
		next.Phase, next.Position = o.Phase, o.Position
	case LoadGrant, LoadRegister, LoadRevoke:
		return Result{Loading: l, Err: s.leases.loaded(l.Incarnation, &o)}
	case LoadAccess:
		at, err := s.takeAccess(index, &o)
		if err != nil {
			return Result{Err: err}
		}
		next.Set = o.Set
		s.setLoading(index, &next)
		return Result{Loading: &next, Access: at}
	case LoadFinish:
		if o.Set != l.Set {
			return Result{Err: kverror.New(kverror.BadRequest, "the cluster has users and roles of set %016x, and the load finishes with set %016x: bring users and roles again", uint64(l.Set), uint64(o.Set))}
		}
		if o.Position < max(l.Position, 1) || o.Compacted > o.Position {
			return Result{Err: kverror.New(kverror.BadRequest, "a load at revision %d cannot finish at revision %d, compacted %d", l.Position, o.Position, o.Compacted)}
		}
		next.Phase, next.Position = PhaseFinished, o.Position
		s.Ceiling, s.dirty.meta = o.Position, true
		if o.Compacted > 0 {
			s.Compacted = o.Compacted
		}
		s.leases.startClocks()
	case LoadAbandon:
		next.Phase = PhaseAbandoned
	case LoadBegin:
	}
	s.setLoading(index, &next)
	return Result{Loading: &next}
}

// beginLoad begins a load of a cluster that is empty.
func (s *State) beginLoad(index uint64, o *ChangeLoad) Result {
	refuse := func(format string, args ...any) Result {
		return Result{Err: kverror.New(kverror.BadRequest, "only a new cluster can be loaded: "+format, args...)}
	}
	switch l := s.loading; {
	case l != nil && l.Nonce == o.Nonce && l.Phase != PhaseAbandoned:
		return Result{Loading: l} // also where it has finished: the answer may be lost
	case l != nil:
		return Result{Err: s.otherLoader(o.Nonce)}
	case s.ClusterVersion < keyspace.VersionData:
		return refuse("nodes write version %d, and loads come with version %d: upgrade them first", s.ClusterVersion, keyspace.VersionData)
	case s.Ceiling > 1 || s.Compacted > 1:
		// After a crash of the sequencer's node nobody can tell which of them were used.
		return refuse("this one may have used revisions up to %d: it was written to, or its first leader of placement died: start one with new data directories", s.Ceiling)
	case s.leases.tree.Len() > 0:
		return refuse("this one has %d leases", s.leases.tree.Len())
	case s.access.Enabled || len(s.access.Users()) > 0 || len(s.access.Roles()) > 0:
		return refuse("this one has users or roles")
	}
	for _, op := range s.operations {
		if op.Kind == OperationMerge {
			return Result{Err: kverror.New(kverror.Busy, "ranges are being merged: begin again in a moment")}
		}
	}
	l := &Loading{Phase: PhaseBulk, Nonce: o.Nonce, Source: o.Source, Incarnation: keyspace.LeaseIncarnation(index), Started: o.Now}
	s.setLoading(index, l)
	return Result{Loading: l}
}

// otherLoader is the answer to a loader that is not the one whose load it is.
func (s *State) otherLoader(nonce LoadNonce) error {
	l := s.loading
	return kverror.New(kverror.BadRequest, "this cluster belongs to the load of %s by loader %016x, begun at %s and now %s: loader %016x cannot go on with it",
		l.Source, uint64(l.Nonce), time.UnixMilli(int64(l.Started)).UTC().Format(time.RFC3339), l.Phase, uint64(nonce))
}

func (s *State) setLoading(index uint64, l *Loading) {
	l.Changed = index
	s.loading, s.dirty.loading = l, true
	s.changedMap(index)
}

// loaded grants leases of a load, or adds spans to them. All or none.
func (s *leases) loaded(inc keyspace.LeaseIncarnation, o *ChangeLoad) error {
	nexts, bytes := map[keyspace.LeaseID]*Lease{}, s.bytes
	for i := range o.Leases {
		in := &o.Leases[i]
		l, ok := nexts[in.ID] // it can be there for several ranges
		if !ok {
			l, ok = s.get(in.ID)
		}
		next := &Lease{ID: in.ID, Incarnation: inc, TTL: in.TTL}
		switch {
		case o.Step == LoadRevoke:
			if ok {
				s.drop(l)
			}
			continue
		case in.ID == 0:
			return kverror.New(kverror.BadRequest, "a load brings lease 0")
		case o.Step == LoadGrant && in.TTL < 1:
			return kverror.New(kverror.BadRequest, "lease %x of a load has a TTL of %d s", int64(in.ID), in.TTL)
		case o.Step == LoadGrant && ok:
			next.Spans = l.Spans
		case o.Step == LoadRegister && !ok:
			return kverror.New(kverror.LeaseNotFound, "ranges have keys of lease %x, which the load has not granted, or has revoked too early: grant it, or follow the revisions that delete its keys", int64(in.ID))
		}
		if o.Step == LoadRegister {
			next = l
			for _, span := range in.Spans {
				if !next.Covers(span) {
					next = next.with(span)
				}
			}
		}
		if ok {
			bytes -= l.bytes()
		}
		bytes += next.bytes()
		switch {
		case len(next.Spans) > maxLeaseSpans, next.spanBytes() > MaxLeaseSpanBytes:
			return kverror.New(kverror.TooManyRanges, "lease %x has keys in %d ranges", int64(in.ID), len(next.Spans))
		case bytes > maxLeaseBytes:
			return kverror.New(kverror.TooManyLeases, "%d leases take %d bytes", s.tree.Len()+len(nexts), bytes)
		}
		nexts[in.ID] = next
	}
	for _, l := range nexts {
		s.set(l)
	}
	return nil
}

// drop forgets a lease of a load, of which nobody was told.
func (s *leases) drop(l *Lease) {
	s.tree.Delete(l)
	s.bytes -= l.bytes()
	s.dirty[l.ID] = true
	s.version++
}

// startClocks tells of all leases as if they were granted now.
func (s *leases) startClocks() {
	s.tree.Ascend(func(l *Lease) bool {
		s.changes = append(s.changes, LeaseChange{Lease: l})
		return true
	})
	s.version++
}

// loadLoading takes the record into the state.
func (s *State) loadLoading(value []byte) error {
	l, err := decodeLoading(value)
	if err == nil {
		s.loading = &l
	}
	return err
}

func (s *State) flushLoading(w recordWriter) error {
	if !s.dirty.loading {
		return nil
	}
	s.dirty.loading = false
	return put(w, []byte{recordLoading}, true, func(b []byte) []byte { return AppendLoading(b, s.loading) })
}
