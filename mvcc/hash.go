package mvcc

import (
	"encoding/binary"

	"github.com/cespare/xxhash/v2"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
)

// Hash returns the sum, modulo 2^64, of a hash of each version of the span at or below
// the revision that the compaction rule keeps for the compacted revision. Sums of
// disjoint spans add up, so the hash of a keyspace does not depend on range borders. It
// does not depend on physical removals either, if they were done for compacted revisions
// at or below this one.
//
// It covers key, revisions, version, lease, operation number and value, but not their
// encoding. It protects against faults, not against an adversary.
func Hash(r engine.Reader, s keyspace.Span, at, compacted keyspace.Revision) (uint64, error) {
	sum, _, err := HashPart(r, s, at, compacted, 0)
	return sum, err
}

// HashPart hashes from the start of the span on and ends between two user keys, after it
// has read about maxBytes. 0 is no bound. A version counts its bytes and versionBytes. next
// is the user key at which to continue, or nil when the span is done. If all parts read one
// state, or states that agree at the revision, their sum is the hash.
func HashPart(
	r engine.Reader, s keyspace.Span, at, compacted keyspace.Revision, maxBytes int64,
) (sum uint64, next []byte, err error) {
	w, err := newWalk(r, s, at)
	if err != nil {
		return 0, nil, err
	}
	var h hasher
	ok, err := w.first()
	for first := true; ok && err == nil; first = false {
		if maxBytes > 0 && w.seen*versionBytes+h.bytes >= maxBytes && !first {
			next, err = engine.AppendUserKey([]byte{}, w.prefix)
			if mutation.Is(mutation.HashedTwice) && err == nil {
				_, err = h.key(w, compacted)
			}
			break
		}
		ok, err = h.key(w, compacted)
	}
	return h.sum, next, w.close(err)
}

// versionBytes is what reading a version costs beside its bytes.
const versionBytes = 64

type hasher struct {
	sum uint64
	// bytes are those of the versions so far.
	bytes int64
	v     Version
	buf   []byte
}

// key hashes the versions of the user key at w's position and moves w to the next user
// key.
func (h *hasher) key(w *walk, compacted keyspace.Revision) (ok bool, err error) {
	h.buf = append(h.buf[:0], w.prefix...)
	for {
		if err := w.version(&h.v); err != nil {
			return false, err
		}
		h.bytes += h.v.Size()
		if !h.v.Tombstone || h.v.Mod >= compacted {
			for w := &h.v; w != nil; w = w.Earlier {
				h.sum += w.hash()
			}
		}
		if h.v.Mod <= compacted {
			return w.next()
		}
		older, err := w.older(h.buf)
		if err != nil {
			return false, err
		}
		if !older {
			return w.settle(w.it.Valid())
		}
	}
}

// older moves to the next older version of the user key with the prefix. If there is none
// it returns false, and the iterator is behind the key.
func (w *walk) older(prefix []byte) (bool, error) {
	if !w.it.Next() {
		return false, w.it.Error()
	}
	p, rev, err := engine.SplitVersionedKey(w.it.Key())
	if err != nil {
		return false, err
	}
	if string(p) != string(prefix) {
		return false, nil
	}
	w.prefix, w.rev = p, rev
	w.saw()
	return true, nil
}

// hash returns the hash of one version, without earlier writes. It is a format, because
// replicas of different releases compare it.
func (v *Version) hash() uint64 {
	var head [8*4 + 4 + 1 + 4]byte
	b := binary.BigEndian.AppendUint64(head[:0], uint64(v.Mod))
	b = binary.BigEndian.AppendUint64(b, uint64(v.Create))
	b = binary.BigEndian.AppendUint64(b, uint64(v.Version))
	b = binary.BigEndian.AppendUint64(b, uint64(v.Lease))
	b = binary.BigEndian.AppendUint32(b, v.Sub)
	if v.Tombstone {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	b = binary.BigEndian.AppendUint32(b, uint32(len(v.Key)))
	var d xxhash.Digest
	d.Reset()
	_, _ = d.Write(b)
	_, _ = d.Write(v.Key)
	_, _ = d.Write(v.Value)
	return d.Sum64()
}

// HashWrite returns the hash of one write, without earlier writes. Unlike hash it takes no
// time for a digest's state, since it is taken of each write on its way into a range. Ranges'
// records, blocks of backups and loaders add it up modulo 2^64, so it is a format.
func HashWrite(v *Version) uint64 {
	var short [256]byte // keys are seldom longer
	s := append(short[:0], 0)
	if v.Tombstone {
		s[0] = 1
	}
	s = binary.BigEndian.AppendUint64(s, uint64(v.Mod))
	s = binary.BigEndian.AppendUint64(s, uint64(v.Create))
	s = binary.BigEndian.AppendUint64(s, uint64(v.Version))
	s = binary.BigEndian.AppendUint64(s, uint64(v.Lease))
	s = binary.BigEndian.AppendUint32(s, v.Sub)
	s = binary.BigEndian.AppendUint32(s, uint32(len(v.Key)))
	s = append(s, v.Key...)
	sum := xxhash.Sum64(s)
	if len(v.Value) > 0 {
		// An odd factor keeps value and rest from cancelling each other out.
		sum += xxhash.Sum64(v.Value) * 0x9e3779b97f4a7c15
	}
	return sum
}
