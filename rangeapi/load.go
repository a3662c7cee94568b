package rangeapi

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// LoadStage says how far a range is in the load of a new cluster; the numbers are stored.
type LoadStage uint8

const (
	// LoadNone is a range that was never loaded.
	LoadNone LoadStage = iota
	// LoadBulk takes versions in the order of the store: by key, the newest version of a key first.
	LoadBulk
	// LoadFollow takes versions in the order of revisions.
	LoadFollow
	// LoadEnded takes no more: all that the load has for the range is here. It stays so for good, so
	// what comes late does nothing.
	LoadEnded
)

// String returns the stage as logs and stories print it.
func (s LoadStage) String() string {
	names := [...]string{"none", "bulk", "follow", "ended"}
	if int(s) >= len(names) {
		return fmt.Sprintf("stage-%d", uint8(s))
	}
	return names[s]
}

// LoadCursor is the last version that a range has taken. In bulk the order is by key and then from new to
// old; an empty key is before all others. When the range follows, the order is by revision, operation and
// key: the keys that one operation deletes can share its number.
type LoadCursor struct {
	Stage    LoadStage
	Key      []byte
	Revision keyspace.Revision
	Sub      uint32
}

// Equal says whether two cursors are the same.
func (c *LoadCursor) Equal(o *LoadCursor) bool {
	return c.Stage == o.Stage && c.Revision == o.Revision && c.Sub == o.Sub && bytes.Equal(c.Key, o.Key)
}

// Passed says whether a version is at or before the cursor in the order of the stage.
func (c *LoadCursor) Passed(v *mvcc.Version) bool {
	switch c.Stage {
	case LoadBulk:
		// The newest version of a key comes first.
		return len(c.Key) > 0 && cmp.Or(bytes.Compare(v.Key, c.Key), -cmp.Compare(v.Mod, c.Revision)) <= 0
	case LoadFollow:
		return cmp.Or(cmp.Compare(v.Mod, c.Revision), cmp.Compare(v.Sub, c.Sub), bytes.Compare(v.Key, c.Key)) <= 0
	case LoadNone, LoadEnded:
	}
	return c.Stage == LoadEnded
}

// At returns the cursor of the stage behind a version. It shares the version's key.
func (s LoadStage) At(v *mvcc.Version) LoadCursor {
	if s == LoadBulk {
		return LoadCursor{Stage: s, Key: v.Key, Revision: v.Mod}
	}
	return LoadCursor{Stage: s, Key: v.Key, Revision: v.Mod, Sub: v.Sub}
}

func (c *LoadCursor) String() string {
	switch c.Stage {
	case LoadBulk:
		return fmt.Sprintf("bulk %q@%d", c.Key, c.Revision)
	case LoadFollow:
		return fmt.Sprintf("follow %d.%d %q", c.Revision, c.Sub, c.Key)
	case LoadNone, LoadEnded:
	}
	return c.Stage.String()
}

// LoadState is what a range has taken of a load. A child of a split begins with no versions.
type LoadState struct {
	LoadCursor
	// Versions counts them, with earlier writes of a transaction, and Sum adds up their hashes (shard/command).
	Versions, Sum uint64
}

// Active says whether the range is being loaded: it has versions that are not to be seen yet.
func (l *LoadState) Active() bool { return l.Stage == LoadBulk || l.Stage == LoadFollow }

// Cut divides the state at a split. The child of a bulk has its cursor, or its beginning where the cursor
// is before it.
func (l *LoadState) Cut(key []byte) (child LoadState) {
	child = LoadState{LoadCursor: l.LoadCursor}
	if l.Stage == LoadBulk && (bytes.Compare(l.Key, key) < 0 || mutation.Is(mutation.LoadCursorLost)) {
		child.Key, child.Revision = nil, 0
	}
	return child
}

// Join returns the state of the range that two become. Neither is being loaded.
func (l *LoadState) Join(right *LoadState) LoadState {
	joined := *l
	if joined.Stage == LoadNone {
		joined.LoadCursor = right.LoadCursor
	}
	joined.Versions += right.Versions
	joined.Sum += right.Sum
	return joined
}

// AppendLoadCursor appends a cursor.
func AppendLoadCursor(dst []byte, c *LoadCursor) []byte {
	dst = wire.AppendBytes(append(dst, byte(c.Stage)), c.Key)
	dst = binary.AppendUvarint(dst, uint64(c.Revision))
	return binary.AppendUvarint(dst, uint64(c.Sub))
}

// DecodeLoadCursor reads what AppendLoadCursor wrote and keeps nothing of b.
func DecodeLoadCursor(b []byte) (c LoadCursor, rest []byte, err error) {
	if len(b) == 0 {
		return c, nil, wire.ErrTruncated
	}
	if c.Stage = LoadStage(b[0]); c.Stage > LoadEnded {
		return c, nil, fmt.Errorf("rangeapi: load in stage %d", b[0])
	}
	key, rest, err := wire.Bytes(b[1:])
	if err != nil {
		return c, nil, err
	}
	if len(key) > 0 {
		c.Key = bytes.Clone(key)
	}
	rev, rest, err := wire.Uvarint(rest)
	if err != nil {
		return c, nil, err
	}
	sub, rest, err := wire.Uvarint(rest)
	if err != nil {
		return c, nil, err
	}
	if rev > uint64(keyspace.MaxRevision) || sub > math.MaxUint32 || len(c.Key) > 0 && c.Stage != LoadBulk && c.Stage != LoadFollow {
		return c, nil, fmt.Errorf("rangeapi: %s cursor at key %q, revision %d, operation %d", c.Stage, c.Key, rev, sub)
	}
	c.Revision, c.Sub = keyspace.Revision(rev), uint32(sub)
	return c, rest, nil
}

// AppendLoadState appends what a range has taken.
func AppendLoadState(dst []byte, l *LoadState) []byte {
	dst = binary.AppendUvarint(AppendLoadCursor(dst, &l.LoadCursor), l.Versions)
	return binary.BigEndian.AppendUint64(dst, l.Sum)
}

// DecodeLoadState reads what AppendLoadState wrote and keeps nothing of b.
func DecodeLoadState(b []byte) (l LoadState, rest []byte, err error) {
	if l.LoadCursor, b, err = DecodeLoadCursor(b); err != nil {
		return l, nil, err
	}
	if l.Versions, b, err = wire.Uvarint(b); err != nil {
		return l, nil, err
	}
	if len(b) < 8 {
		return l, nil, wire.ErrTruncated
	}
	l.Sum = binary.BigEndian.Uint64(b)
	return l, b[8:], nil
}

// AppendStoredVersion appends a version as the store has it, with its earlier writes.
func AppendStoredVersion(dst []byte, v *mvcc.Version) []byte {
	dst = wire.AppendBytes(dst, v.Key)
	dst = binary.AppendUvarint(dst, uint64(v.Mod))
	// The value is written behind its largest possible length, and moved to its own: without a buffer beside dst.
	at := len(dst)
	dst = v.AppendValue(append(dst, make([]byte, binary.MaxVarintLen64)...))
	value := dst[at+binary.MaxVarintLen64:]
	head := binary.PutUvarint(dst[at:], uint64(len(value)))
	return dst[:at+head+copy(dst[at+head:], value)]
}

// storedHead is about the most that AppendStoredVersion takes beside key and values, without earlier writes.
const storedHead = 48

// StoredSize is about the most that AppendStoredVersion takes.
func StoredSize(v *mvcc.Version) (size int) {
	for w := v; w != nil; w = w.Earlier {
		size += storedHead + len(w.Key) + len(w.Value)
	}
	return size
}

// DecodeStoredVersion reads what AppendStoredVersion wrote into v, whose key and values stay parts of b.
func DecodeStoredVersion(b []byte, v *mvcc.Version) (rest []byte, err error) {
	*v = mvcc.Version{}
	if v.Key, b, err = wire.Bytes(b); err != nil {
		return nil, err
	}
	mod, b, err := wire.Uvarint(b)
	if err != nil {
		return nil, err
	}
	if len(v.Key) == 0 || mod == 0 || mod > uint64(keyspace.MaxRevision) {
		return nil, fmt.Errorf("rangeapi: version of key %q at revision %d", v.Key, mod)
	}
	v.Mod = keyspace.Revision(mod)
	value, b, err := wire.Bytes(b)
	if err != nil {
		return nil, err
	}
	return b, v.DecodeValue(value)
}

// LoadStep is what a request about a load does; the numbers are on the wire.
type LoadStep uint8

const (
	// LoadPut brings versions.
	LoadPut LoadStep = iota + 1
	// LoadLook asks for the state.
	LoadLook
	// LoadEnd ends the load of the range: it takes no more.
	LoadEnd
	// LoadTrim has the range forget leases of which it has no key any more: they may have ended at the source. It comes
	// before the leases' records are told of the range.
	LoadTrim
)

// Bounds of a request about a load.
const (
	// MaxLoadBytes bounds its versions in their encoded form. One version may have more.
	MaxLoadBytes = 1 << 20
	// MaxLoadLeases bounds the leases in an answer.
	MaxLoadLeases = 1 << 15
)

// LoadRequest is a request to the leader of a range about the load of a new cluster.
type LoadRequest struct {
	Range      keyspace.RangeID
	Generation keyspace.Generation
	Step       LoadStep
	// Stage is that of the versions: LoadBulk or LoadFollow. Only for LoadPut.
	Stage LoadStage
	// After is the version before the first one in the order of a bulk, zero where there is none. If it is the
	// range's, the range must have it.
	After LoadCursor
	// Incarnation is that of all leases of the load, never 0. Alive are those among the leases of the versions
	// that live, ascending: the others attach nothing.
	Incarnation keyspace.LeaseIncarnation
	Alive       []keyspace.LeaseID
	// Versions are Count versions by AppendStoredVersion, in the order of the stage.
	Count    int
	Versions []byte
	// Revision and Compacted are those of the store when the load ends. Only for LoadEnd.
	Revision, Compacted keyspace.Revision
	// Lease is where the leases in the answer begin. Only for LoadLook.
	Lease keyspace.LeaseID
}

// LoadAnswer is what a range has taken.
type LoadAnswer struct {
	LoadState
	Span keyspace.Span
	// LastRevision is the highest that was applied.
	LastRevision keyspace.Revision
	// Leases are those that keys of the range may be attached to, ascending; only for LoadLook. Right behind a LoadTrim
	// the range has keys of all of them. More says that others follow.
	Leases []keyspace.LeaseID
	More   bool
}

// loadVersion leads the messages of bus method 26.
const loadVersion = 1

func (q *LoadRequest) encode() []byte {
	dst := make([]byte, 0, len(q.Versions)+len(q.After.Key)+9*len(q.Alive)+96)
	dst = appendRange(append(dst, loadVersion, byte(q.Step)), q.Range, q.Generation)
	dst = AppendLoadCursor(append(dst, byte(q.Stage)), &q.After)
	for _, n := range []uint64{uint64(q.Incarnation), uint64(q.Revision), uint64(q.Compacted)} {
		dst = binary.AppendUvarint(dst, n)
	}
	dst = binary.AppendUvarint(dst, uint64(q.Lease))
	dst = appendLeases(dst, q.Alive)
	dst = binary.AppendUvarint(dst, uint64(q.Count))
	return append(dst, q.Versions...)
}

func appendLeases(dst []byte, ids []keyspace.LeaseID) []byte {
	dst = binary.AppendUvarint(dst, uint64(len(ids)))
	for _, id := range ids {
		dst = binary.AppendUvarint(dst, uint64(id))
	}
	return dst
}

func (r *Reader) leases() (ids []keyspace.LeaseID) {
	for range r.CountUpTo(MaxLoadLeases, 1) {
		id := keyspace.LeaseID(r.Uvarint())
		if n := len(ids); n > 0 && id <= ids[n-1] {
			r.Fail(fmt.Errorf("rangeapi: lease %d behind lease %d", id, ids[n-1]))
			return nil
		}
		ids = append(ids, id)
	}
	return ids
}

func (r *Reader) loadCursor() LoadCursor {
	c, rest, err := DecodeLoadCursor(r.Peek())
	r.Take(rest, err)
	return c
}

// DecodeLoadRequest reads a request of bus method 26. Its versions are a part of b.
func DecodeLoadRequest(b []byte) (*LoadRequest, error) {
	r := NewReader(b)
	if v := r.Byte(); r.OK() && v != loadVersion {
		return nil, fmt.Errorf("rangeapi: load request of version %d, not %d", v, loadVersion)
	}
	q := &LoadRequest{Step: LoadStep(r.Byte())}
	q.Range, q.Generation = keyspace.RangeID(r.Uvarint()), keyspace.Generation(r.Uvarint())
	q.Stage, q.After = LoadStage(r.Byte()), r.loadCursor()
	q.Incarnation, q.Revision, q.Compacted = keyspace.LeaseIncarnation(r.Uvarint()), r.Revision(), r.Revision()
	q.Lease, q.Alive = keyspace.LeaseID(r.Uvarint()), r.leases()
	q.Count = r.Count(5)
	q.Versions = r.Rest()
	switch puts := q.Step == LoadPut; {
	case r.Err() != nil:
		return nil, r.Err()
	case q.Step < LoadPut || q.Step > LoadTrim || q.Incarnation == 0 && q.Step != LoadLook:
		return nil, fmt.Errorf("rangeapi: load step %d of incarnation %d", q.Step, q.Incarnation)
	case puts != (q.Stage == LoadBulk || q.Stage == LoadFollow), puts != (q.Count > 0), !puts && len(q.Versions) > 0:
		return nil, fmt.Errorf("rangeapi: load step %d of stage %d with %d versions in %d bytes", q.Step, q.Stage, q.Count, len(q.Versions))
	case q.Compacted > q.Revision || (q.Step == LoadEnd) != (q.Revision > 0):
		return nil, fmt.Errorf("rangeapi: load step %d to revision %d, compacted %d", q.Step, q.Revision, q.Compacted)
	}
	return q, nil
}

// AppendLoadAnswer appends the answer of bus method 26: the state, or the error.
func AppendLoadAnswer(dst []byte, a *LoadAnswer, failed error) []byte {
	if failed != nil {
		return kverror.Append(append(dst, loadVersion, StatusError), kverror.Of(failed))
	}
	dst = AppendLoadState(append(dst, loadVersion, StatusOK), &a.LoadState)
	dst = wire.AppendBytes(wire.AppendBytes(dst, a.Span.Start), a.Span.End)
	dst = binary.AppendUvarint(dst, uint64(a.LastRevision))
	more := byte(0)
	if a.More {
		more = 1
	}
	return appendLeases(append(dst, more), a.Leases)
}

// DecodeLoadAnswer reads what AppendLoadAnswer wrote and keeps nothing of b.
func DecodeLoadAnswer(b []byte) (a *LoadAnswer, failed *kverror.Error, err error) {
	r := NewReader(b)
	if v := r.Byte(); r.OK() && v != loadVersion {
		return nil, nil, fmt.Errorf("rangeapi: load answer of version %d, not %d", v, loadVersion)
	}
	switch s := r.Byte(); {
	case !r.OK():
		return nil, nil, r.Err()
	case s == StatusError:
		failed, err = kverror.Decode(r.Rest())
		return nil, failed, err
	case s != StatusOK:
		return nil, nil, fmt.Errorf("rangeapi: load answer of status %d", s)
	}
	a = &LoadAnswer{}
	state, rest, err := DecodeLoadState(r.Peek())
	r.Take(rest, err)
	a.LoadState = state
	a.Span = keyspace.Span{Start: bytes.Clone(r.Bytes()), End: bytes.Clone(r.Bytes())}
	a.LastRevision, a.More, a.Leases = r.Revision(), r.Byte() != 0, r.leases()
	if err := r.End(); err != nil {
		return nil, nil, err
	}
	return a, nil, nil
}
