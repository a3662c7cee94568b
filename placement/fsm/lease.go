package fsm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/btree"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// MaxLeaseTTL is the longest TTL that a lease can be granted, in seconds. It is etcd's.
const MaxLeaseTTL = 9_000_000_000

// Bounds of what leases take. They are the same on every replica, since they decide
// what an entry does.
const (
	// maxLeaseSpans bounds the spans of one lease: a revoke is one transaction over all of
	// them.
	maxLeaseSpans = keyspace.MaxRevisionRanges * 9 / 10
	// MaxLeaseSpanBytes bounds their borders, all together.
	MaxLeaseSpanBytes = 2 << 20
	// maxLeaseBytes bounds the memory of all records. A lease counts with
	// leaseOverheadBytes, each of its spans with spanOverheadBytes and its borders; that
	// is about what record, index and clock take.
	maxLeaseBytes      = 64 << 20
	leaseOverheadBytes = 320
	spanOverheadBytes  = 48
	// MaxLeaseBatch bounds the leases in one command, request or answer.
	MaxLeaseBatch = 4096
)

// Lease is the record of one lease. A record is never changed: another takes its place.
type Lease struct {
	ID          keyspace.LeaseID
	Incarnation keyspace.LeaseIncarnation
	// TTL is what was granted, in seconds.
	TTL int64
	// Spans are where keys of the lease can be: disjoint, in key order.
	Spans []keyspace.Span
	// Revoking says that it is decided that the lease ends: nothing more is registered,
	// and the record goes once its keys are gone.
	Revoking bool
	// Checked is as in RevokeChecked, if the end was decided by one, else 0.
	Checked keyspace.Revision
}

// LeaseRef names one lease among those that have had its id.
type LeaseRef struct {
	ID keyspace.LeaseID
	// Incarnation is 0 for whichever lease has the id now.
	Incarnation keyspace.LeaseIncarnation
}

// LeaseChange is an applied change of a record: Lease is granted, or its revocation is
// decided, or taken back (Kept), or it is gone.
type LeaseChange struct {
	Lease *Lease
	Gone  bool
	Kept  bool
}

// Ref names the lease.
func (l *Lease) Ref() LeaseRef { return LeaseRef{l.ID, l.Incarnation} }

// Covers says whether the span is registered.
func (l *Lease) Covers(s keyspace.Span) bool {
	return slices.ContainsFunc(l.Spans, func(o keyspace.Span) bool { return o.Covers(s) })
}

// bytes is what the lease counts with.
func (l *Lease) bytes() int {
	return leaseOverheadBytes + len(l.Spans)*spanOverheadBytes + l.spanBytes()
}

func (l *Lease) spanBytes() (n int) {
	for _, s := range l.Spans {
		n += len(s.Start) + len(s.End)
	}
	return n
}

// with returns the record with a span more. Spans that overlap become one; neighbours
// stay two, since they count as the ranges that they were.
func (l *Lease) with(s keyspace.Span) *Lease {
	next := *l
	next.Spans = make([]keyspace.Span, 0, len(l.Spans)+1)
	for _, o := range l.Spans {
		if o.Overlaps(s) {
			s = union(s, o)
		} else {
			next.Spans = append(next.Spans, o)
		}
	}
	next.Spans = append(next.Spans, s)
	slices.SortFunc(next.Spans, func(a, b keyspace.Span) int { return bytes.Compare(a.Start, b.Start) })
	return &next
}

// union returns the smallest span that covers two that overlap.
func union(a, b keyspace.Span) keyspace.Span {
	if bytes.Compare(b.Start, a.Start) < 0 {
		a.Start = b.Start
	}
	if len(a.End) > 0 && (len(b.End) == 0 || bytes.Compare(b.End, a.End) > 0) {
		a.End = b.End
	}
	return a
}

// leaseTree holds records by id. Cloning is O(1).
type leaseTree = btree.BTreeG[*Lease]

func newLeaseTree() *leaseTree {
	return btree.NewG(mapDegree, func(a, b *Lease) bool { return a.ID < b.ID })
}

// leases is the part of the state that is about leases.
type leases struct {
	tree *leaseTree
	// bytes is what all records count with.
	bytes int
	// version counts the changes since the state was loaded; changes are those since
	// somebody took them.
	version uint64
	changes []LeaseChange
	dirty   map[keyspace.LeaseID]bool
}

func newLeases() leases { return leases{tree: newLeaseTree(), dirty: map[keyspace.LeaseID]bool{}} }

func (s *leases) get(id keyspace.LeaseID) (*Lease, bool) { return s.tree.Get(&Lease{ID: id}) }

// set puts a record in the place of the one with its id.
func (s *leases) set(l *Lease) {
	if old, ok := s.tree.ReplaceOrInsert(l); ok {
		s.bytes -= old.bytes()
	}
	s.bytes += l.bytes()
	s.dirty[l.ID] = true
	s.version++
}

func (s *leases) remove(l *Lease) {
	s.tree.Delete(l)
	s.bytes -= l.bytes()
	s.dirty[l.ID] = true
	s.version++
	s.changes = append(s.changes, LeaseChange{Lease: l, Gone: true})
}

// GrantLease makes a lease. TTL is within bounds already.
type GrantLease struct {
	ID  keyspace.LeaseID
	TTL int64
}

// GrantLeaseIn makes a lease whose record lists a span from the beginning: keys of the lease are expected there. It is
// written from keyspace.VersionLeases on.
type GrantLeaseIn struct {
	ID   keyspace.LeaseID
	TTL  int64
	Span keyspace.Span
}

// RegisterLease adds a span to a lease that lives.
type RegisterLease struct {
	ID   keyspace.LeaseID
	Span keyspace.Span
}

// RegisterLeases is RegisterLease of several leases. The result does not say which of them were refused. It is written from
// keyspace.VersionLeases on.
type RegisterLeases struct{ Leases []RegisterLease }

// RevokeLeases decides that leases end. Those that are not there, or of another
// incarnation, are left out.
type RevokeLeases struct{ Leases []LeaseRef }

// RevokeChecked decides that a lease ends, on behalf of somebody who may delete its keys as of a revision. If one of
// them is found to be written later, KeepLease takes the decision back. It is written from keyspace.VersionAccess on.
type RevokeChecked struct {
	Lease LeaseRef
	// At is not 0.
	At keyspace.Revision
}

// KeepLease takes back the decision of that RevokeChecked.
type KeepLease RevokeChecked

// RemoveLeases forgets leases whose keys and attachments are gone.
type RemoveLeases struct{ Leases []LeaseRef }

func (GrantLease) kind() opKind     { return opGrantLease }
func (GrantLeaseIn) kind() opKind   { return opGrantLeaseIn }
func (RegisterLease) kind() opKind  { return opRegisterLease }
func (RegisterLeases) kind() opKind { return opRegisterLeases }
func (RevokeLeases) kind() opKind   { return opRevokeLeases }
func (RevokeChecked) kind() opKind  { return opRevokeChecked }
func (KeepLease) kind() opKind      { return opKeepLease }
func (RemoveLeases) kind() opKind   { return opRemoveLeases }

func (o GrantLease) append(dst []byte) []byte {
	return binary.AppendUvarint(AppendLeaseID(dst, o.ID), uint64(o.TTL))
}

func (o GrantLeaseIn) append(dst []byte) []byte {
	return AppendSpan(GrantLease{ID: o.ID, TTL: o.TTL}.append(dst), o.Span)
}

func (o RegisterLease) append(dst []byte) []byte {
	return AppendSpan(AppendLeaseID(dst, o.ID), o.Span)
}

func (o RegisterLeases) append(dst []byte) []byte { return AppendRegistrations(dst, o.Leases) }

// AppendRegistrations appends spans of leases.
func AppendRegistrations(dst []byte, all []RegisterLease) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(all)))
	for i := range all {
		dst = all[i].append(dst)
	}
	return dst
}

// Registrations reads what AppendRegistrations wrote.
func (r *Reader) Registrations() (all []RegisterLease) {
	for range r.CountUpTo(MaxLeaseBatch, 10) {
		all = append(all, RegisterLease{ID: r.LeaseID(), Span: r.Span()})
	}
	return all
}

func (o RevokeChecked) append(dst []byte) []byte {
	return AppendRevision(appendLeaseRef(dst, o.Lease), o.At)
}

func (o KeepLease) append(dst []byte) []byte    { return RevokeChecked(o).append(dst) }
func (o RevokeLeases) append(dst []byte) []byte { return appendLeaseRefs(dst, o.Leases) }
func (o RemoveLeases) append(dst []byte) []byte { return appendLeaseRefs(dst, o.Leases) }

// apply applies a change of leases.
func (s *leases) apply(index uint64, op Effect) Result {
	switch o := op.(type) {
	case GrantLease:
		return s.grant(index, o)
	case GrantLeaseIn:
		return s.grant(index, GrantLease{ID: o.ID, TTL: o.TTL}, o.Span)
	case RegisterLease:
		return s.register(o)
	case RegisterLeases:
		for i := range o.Leases {
			s.register(o.Leases[i])
		}
	case RevokeLeases:
		return s.revoke(o)
	case RemoveLeases:
		s.forget(o)
	default:
		return s.applyChecked(op)
	}
	return Result{}
}

// grant applies a GrantLease. The incarnation is the entry's index: no two entries of
// the group have the same.
func (s *leases) grant(index uint64, o GrantLease, spans ...keyspace.Span) Result {
	if l, ok := s.get(o.ID); ok && mutation.Is(mutation.LeaseGrantedTwice) {
		return Result{Lease: l}
	} else if ok {
		return Result{Err: kverror.New(kverror.LeaseExists, "lease %x", int64(o.ID)), Lease: l}
	}
	l := &Lease{ID: o.ID, Incarnation: keyspace.LeaseIncarnation(index), TTL: o.TTL, Spans: spans}
	if s.bytes+l.bytes() > maxLeaseBytes {
		l.Spans = nil // it does without what is only expected
	}
	if s.bytes+l.bytes() > maxLeaseBytes {
		return Result{Err: kverror.New(kverror.TooManyLeases, "%d leases take %d bytes", s.tree.Len(), s.bytes)}
	}
	s.set(l)
	s.changes = append(s.changes, LeaseChange{Lease: l})
	return Result{Lease: l}
}

// register applies a RegisterLease. A lease whose end is decided stays as it is: the
// result says so.
func (s *leases) register(o RegisterLease) Result {
	l, ok := s.get(o.ID)
	switch {
	case !ok:
		return Result{Err: kverror.LeaseNotFound}
	case l.Closed() || l.Covers(o.Span):
		return Result{Lease: l}
	}
	next := l.with(o.Span)
	switch {
	case len(next.Spans) > maxLeaseSpans, next.spanBytes() > MaxLeaseSpanBytes:
		return Result{Err: kverror.New(kverror.TooManyRanges, "lease %x has keys in %d ranges already", int64(l.ID), len(l.Spans))}
	case s.bytes+next.bytes()-l.bytes() > maxLeaseBytes:
		return Result{Err: kverror.New(kverror.TooManyLeases, "%d leases take %d bytes", s.tree.Len(), s.bytes)}
	}
	s.set(next)
	return Result{Lease: next}
}

// Closed says whether nothing is registered with the lease any more.
func (l *Lease) Closed() bool { return l.Revoking && !mutation.Is(mutation.AttachedWhileEnding) }

// revoke applies a RevokeLeases. Where it names one lease the result is about that one:
// Lease is the record as it was before.
func (s *leases) revoke(o RevokeLeases) Result {
	var res Result
	for _, ref := range o.Leases {
		l, ok := s.get(ref.ID)
		if !ok || ref.Incarnation != 0 && ref.Incarnation != l.Incarnation {
			res = Result{Err: kverror.LeaseNotFound}
			continue
		}
		res = Result{Lease: l}
		if !l.Revoking || l.Checked != 0 {
			s.end(l, 0)
		}
	}
	if len(o.Leases) != 1 {
		return Result{}
	}
	return res
}

// end decides that a lease ends.
func (s *leases) end(l *Lease, checked keyspace.Revision) {
	next := *l
	next.Revoking, next.Checked = true, checked
	s.set(&next)
	s.changes = append(s.changes, LeaseChange{Lease: &next})
}

// applyChecked applies a RevokeChecked, or takes one back.
func (s *leases) applyChecked(op Effect) Result {
	if o, ok := op.(RevokeChecked); ok {
		return s.revokeChecked(o)
	}
	s.keep(op.(KeepLease)) //nolint:forcetypeassert // there are these two
	return Result{}
}

// revokeChecked applies a RevokeChecked. The result has the record as it was before.
func (s *leases) revokeChecked(o RevokeChecked) Result {
	l, ok := s.get(o.Lease.ID)
	if !ok || o.Lease.Incarnation != l.Incarnation {
		return Result{Err: kverror.LeaseNotFound}
	}
	if !l.Revoking {
		s.end(l, o.At)
	}
	return Result{Lease: l}
}

// keep applies a KeepLease. A later decision stays.
func (s *leases) keep(o KeepLease) {
	l, ok := s.get(o.Lease.ID)
	if !ok || o.Lease.Incarnation != l.Incarnation || !l.Revoking || l.Checked != o.At {
		return
	}
	next := *l
	next.Revoking, next.Checked = false, 0
	s.set(&next)
	s.changes = append(s.changes, LeaseChange{Lease: &next, Kept: true})
}

func (s *leases) forget(o RemoveLeases) {
	for _, ref := range o.Leases {
		if l, ok := s.get(ref.ID); ok && l.Revoking && l.Incarnation == ref.Incarnation {
			s.remove(l)
		}
	}
}

// TakeLeaseChanges returns the changes of leases since the last call.
func (s *State) TakeLeaseChanges() []LeaseChange { return s.leases.take() }

func (s *leases) take() []LeaseChange {
	cs := s.changes
	s.changes = nil
	return cs
}

// flush writes the records that changed since the last flush.
func (s *leases) flush(w recordWriter) error {
	for id := range s.dirty {
		l, ok := s.get(id)
		if err := put(w, leaseKey(id), ok, func(b []byte) []byte { return appendLease(b, l) }); err != nil {
			return err
		}
	}
	clear(s.dirty)
	return nil
}

// load takes one record, read from the engine.
func (s *leases) load(key, value []byte) error {
	l, err := decodeLease(value)
	if err == nil && !bytes.Equal(key, leaseKey(l.ID)) {
		err = fmt.Errorf("placement: lease %x under key %x", int64(l.ID), key)
	}
	if err == nil {
		s.set(&l)
		clear(s.dirty)
	}
	return err
}

func leaseKey(id keyspace.LeaseID) []byte { return AppendLeaseID([]byte{recordLease}, id) }

// AppendLeaseID appends the eight bytes of a lease id to dst.
func AppendLeaseID(dst []byte, id keyspace.LeaseID) []byte {
	return binary.BigEndian.AppendUint64(dst, uint64(id))
}

// AppendSpan appends both ends of a span to dst.
func AppendSpan(dst []byte, s keyspace.Span) []byte {
	return AppendBytes(AppendBytes(dst, s.Start), s.End)
}

// AppendSpans appends a list of spans to dst.
func AppendSpans(dst []byte, spans []keyspace.Span) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(spans)))
	for _, s := range spans {
		dst = AppendSpan(dst, s)
	}
	return dst
}

func appendLeaseRefs(dst []byte, refs []LeaseRef) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(refs)))
	for _, ref := range refs {
		dst = appendLeaseRef(dst, ref)
	}
	return dst
}

func appendLeaseRef(dst []byte, ref LeaseRef) []byte {
	return binary.AppendUvarint(AppendLeaseID(dst, ref.ID), uint64(ref.Incarnation))
}

// The end of a lease in its record.
const (
	leaseStays = iota
	leaseEnds
	// leaseEndsChecked is written from keyspace.VersionAccess on. The revision of the check follows.
	leaseEndsChecked
)

// appendLease appends a record behind its version.
func appendLease(dst []byte, l *Lease) []byte {
	dst = AppendLeaseID(dst, l.ID)
	dst = binary.AppendUvarint(dst, uint64(l.Incarnation))
	dst = binary.AppendUvarint(dst, uint64(l.TTL))
	switch {
	case l.Checked != 0:
		dst = AppendRevision(append(dst, leaseEndsChecked), l.Checked)
	case l.Revoking:
		dst = append(dst, leaseEnds)
	default:
		dst = append(dst, leaseStays)
	}
	return AppendSpans(dst, l.Spans)
}

func decodeLease(b []byte) (Lease, error) {
	r := NewReader(b)
	r.Version()
	l := Lease{ID: r.LeaseID(), Incarnation: keyspace.LeaseIncarnation(r.Uvarint()), TTL: r.LeaseTTL()}
	switch end := r.Byte(); end {
	case leaseStays:
	case leaseEnds:
		l.Revoking = true
	case leaseEndsChecked:
		l.Revoking, l.Checked = true, r.checked()
	default:
		r.Failf("end %d of a lease", end)
	}
	l.Spans = r.Spans()
	if err := r.Finish(); err != nil {
		return Lease{}, fmt.Errorf("decode placement lease record: %w", err)
	}
	return l, nil
}

// LeaseID reads what AppendLeaseID wrote.
func (r *Reader) LeaseID() keyspace.LeaseID { return keyspace.LeaseID(r.Uint64BE()) }

// LeaseTTL reads a time to live in seconds.
func (r *Reader) LeaseTTL() int64 { return int64(r.Bounded(MaxLeaseTTL)) }

// Span reads what AppendSpan wrote.
func (r *Reader) Span() keyspace.Span {
	return keyspace.Span{Start: r.CopyUpTo(MaxLeaseSpanBytes), End: r.CopyUpTo(MaxLeaseSpanBytes)}
}

// Spans reads what AppendSpans wrote.
func (r *Reader) Spans() []keyspace.Span {
	n := r.CountUpTo(maxLeaseSpans, 2)
	var spans []keyspace.Span
	for range n {
		spans = append(spans, r.Span())
		if !r.OK() {
			return nil
		}
	}
	return spans
}

func (r *Reader) leaseRef() LeaseRef {
	return LeaseRef{r.LeaseID(), keyspace.LeaseIncarnation(r.Uvarint())}
}

// checkedEnd reads a RevokeChecked, or a KeepLease, which has its form.
func (r *Reader) checkedEnd(kind opKind) Effect {
	o := RevokeChecked{Lease: r.leaseRef(), At: r.checked()}
	if kind == opKeepLease {
		return KeepLease(o)
	}
	return o
}

// checked reads the revision of a check that was made.
func (r *Reader) checked() keyspace.Revision {
	at := r.Revision()
	if at == 0 {
		r.Failf("keys of a lease checked at revision 0")
	}
	return at
}

func (r *Reader) leaseRefs() []LeaseRef {
	n := r.CountUpTo(MaxLeaseBatch, 9)
	var refs []LeaseRef
	for range n {
		refs = append(refs, r.leaseRef())
	}
	return refs
}

// Lease returns the record of a lease.
func (v *View) Lease(id keyspace.LeaseID) (*Lease, bool) { return v.leases.Get(&Lease{ID: id}) }

// Leases calls f with each record in the order of their ids, from one on, until f
// returns false.
func (v *View) Leases(from keyspace.LeaseID, f func(*Lease) bool) {
	v.leases.AscendGreaterOrEqual(&Lease{ID: from}, f)
}

// Records walks all records of a View.
func (v *View) Records(yield func(*Lease) bool) { v.leases.Ascend(yield) }
