package engine

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// The first byte of every key.
const (
	prefixNodeLocal  = 0x10
	prefixApplied    = 0x20
	prefixGroupLocal = 0x30
	prefixVersioned  = 0x40
	prefixLease      = 0x50
)

// In a versioned key a zero byte of the user key is written as escape escaped, and escape
// terminator ends the user key. This keeps the order of bytes.Compare, since the
// terminator is below every escaped or plain byte.
const (
	escape     = 0x00
	escaped    = 0xff
	terminator = 0x01
	afterTerm  = 0x02 // above the terminator, below escaped: for bounds only
)

// revisionBytes is the length of the revision behind the terminator.
const revisionBytes = 8

// minVersionedKeyBytes is the length of the versioned key of an empty user key.
const minVersionedKeyBytes = 1 + 2 + revisionBytes

// ErrBadKey says that bytes are not a key of the expected kind.
var ErrBadKey = errors.New("engine: malformed key")

// KeySpan is the half-open interval [Lower, Upper) of physical keys. The zero KeySpan
// means no span.
type KeySpan struct {
	Lower, Upper []byte
}

// IsZero reports whether s is no span.
func (s KeySpan) IsZero() bool { return len(s.Lower) == 0 && len(s.Upper) == 0 }

// Contains reports whether the physical key lies in the span.
func (s KeySpan) Contains(key []byte) bool {
	return bytes.Compare(s.Lower, key) <= 0 && bytes.Compare(key, s.Upper) < 0
}

// Versioned reports whether the span lies among the versioned keys.
func (s KeySpan) Versioned() bool { return len(s.Lower) > 0 && s.Lower[0] == prefixVersioned }

// leased reports whether the span lies in the lease index.
func (s KeySpan) leased() bool { return len(s.Lower) > 0 && s.Lower[0] == prefixLease }

// String returns the span with keys as FormatKey prints them.
func (s KeySpan) String() string {
	return fmt.Sprintf("[%s, %s)", FormatKey(s.Lower), FormatKey(s.Upper))
}

// NodeLocalKey returns the key of a record of the node itself.
func NodeLocalKey(suffix []byte) []byte {
	return append([]byte{prefixNodeLocal}, suffix...)
}

// GroupLocalKey returns the group's key with the given free bytes.
func GroupLocalKey(g keyspace.GroupID, suffix []byte) []byte {
	k := make([]byte, 0, 1+8+len(suffix))
	k = append(k, prefixGroupLocal)
	k = binary.BigEndian.AppendUint64(k, uint64(g))
	return append(k, suffix...)
}

// GroupLocalSpan returns the span of all group-local keys of the group.
func GroupLocalSpan(g keyspace.GroupID) KeySpan { return groupSpan(prefixGroupLocal, g) }

// DecodeGroupLocalKey returns the group and the free bytes of a group-local key. The
// suffix refers to key.
func DecodeGroupLocalKey(key []byte) (g keyspace.GroupID, suffix []byte, err error) {
	if len(key) < 9 || key[0] != prefixGroupLocal {
		return 0, nil, fmt.Errorf("%w: group-local key %x", ErrBadKey, key)
	}
	return keyspace.GroupID(binary.BigEndian.Uint64(key[1:])), key[9:], nil
}

// groupSpan returns the span of the keys with the prefix and the group.
func groupSpan(prefix byte, g keyspace.GroupID) KeySpan {
	lower := binary.BigEndian.AppendUint64([]byte{prefix}, uint64(g))
	if g == ^keyspace.GroupID(0) {
		return KeySpan{Lower: lower, Upper: []byte{prefix + 1}}
	}
	return KeySpan{Lower: lower, Upper: binary.BigEndian.AppendUint64([]byte{prefix}, uint64(g)+1)}
}

func appliedKey(g keyspace.GroupID) []byte {
	return binary.BigEndian.AppendUint64(append(make([]byte, 0, 9), prefixApplied), uint64(g))
}

// appliedSpan returns the span of the group's applied record.
func appliedSpan(g keyspace.GroupID) KeySpan { return groupSpan(prefixApplied, g) }

func decodeAppliedKey(key []byte) (keyspace.GroupID, error) {
	if len(key) != 9 || key[0] != prefixApplied {
		return 0, fmt.Errorf("%w: applied record %x", ErrBadKey, key)
	}
	return keyspace.GroupID(binary.BigEndian.Uint64(key[1:])), nil
}

// AppendVersionedKey appends the physical key of the user key at the revision. The newest
// revision of a user key sorts first. It panics on a revision outside [0,
// keyspace.MaxRevision].
func AppendVersionedKey(dst, key []byte, rev keyspace.Revision) []byte {
	if rev < 0 || rev > keyspace.MaxRevision {
		panic(fmt.Sprintf("engine: revision %d outside [0, %d]", rev, keyspace.MaxRevision))
	}
	dst = AppendVersionedPrefix(dst, key)
	return binary.BigEndian.AppendUint64(dst, ^uint64(rev))
}

// AppendVersionedPrefix appends the common prefix of all versions of the user key.
func AppendVersionedPrefix(dst, key []byte) []byte {
	dst = append(dst, prefixVersioned)
	dst = appendEscaped(dst, key)
	return append(dst, escape, terminator)
}

// appendEscaped appends the user key with its zero bytes escaped.
func appendEscaped(dst, key []byte) []byte {
	for {
		i := bytes.IndexByte(key, escape)
		if i < 0 {
			return append(dst, key...)
		}
		dst = append(dst, key[:i]...)
		dst = append(dst, escape, escaped)
		key = key[i+1:]
	}
}

// SplitVersionedKey returns the prefix that all versions of the user key share, and the
// revision. The prefix refers to key. It does not check the prefix; DecodeVersionedKey
// does.
func SplitVersionedKey(key []byte) (prefix []byte, rev keyspace.Revision, err error) {
	n := len(key) - revisionBytes
	if len(key) < minVersionedKeyBytes || key[0] != prefixVersioned || key[n-2] != escape || key[n-1] != terminator {
		return nil, 0, fmt.Errorf("%w: versioned key %x", ErrBadKey, key)
	}
	r := ^binary.BigEndian.Uint64(key[n:])
	if r > uint64(keyspace.MaxRevision) {
		return nil, 0, fmt.Errorf("%w: versioned key %x: revision %d", ErrBadKey, key, r)
	}
	return key[:n], keyspace.Revision(r), nil
}

// AppendUserKey appends the user key of a prefix returned by SplitVersionedKey.
func AppendUserKey(dst, prefix []byte) ([]byte, error) {
	if len(prefix) < 3 || prefix[0] != prefixVersioned ||
		prefix[len(prefix)-2] != escape || prefix[len(prefix)-1] != terminator {
		return dst, fmt.Errorf("%w: versioned prefix %x", ErrBadKey, prefix)
	}
	for b := prefix[1 : len(prefix)-2]; ; {
		i := bytes.IndexByte(b, escape)
		if i < 0 {
			return append(dst, b...), nil
		}
		if i+1 == len(b) || b[i+1] != escaped {
			return dst, fmt.Errorf("%w: versioned prefix %x: bad escape", ErrBadKey, prefix)
		}
		dst = append(dst, b[:i+1]...)
		b = b[i+2:]
	}
}

// DecodeVersionedKey returns the user key, in its own memory, and the revision of a
// physical key.
func DecodeVersionedKey(key []byte) (user []byte, rev keyspace.Revision, err error) {
	prefix, rev, err := SplitVersionedKey(key)
	if err != nil {
		return nil, 0, err
	}
	user, err = AppendUserKey(make([]byte, 0, len(prefix)), prefix)
	return user, rev, err
}

// VersionedSpan returns the span of all versions of the user keys in s.
func VersionedSpan(s keyspace.Span) KeySpan {
	r := KeySpan{Lower: appendBound(s.Start), Upper: []byte{prefixVersioned + 1}}
	if len(s.End) > 0 {
		r.Upper = appendBound(s.End)
	}
	return r
}

// appendBound returns the smallest physical key of user keys at or above key. It has no
// revision, so it is a prefix in Split's sense, as excise bounds must be.
func appendBound(key []byte) []byte {
	return append(appendEscaped([]byte{prefixVersioned}, key), escape, terminator)
}

// leaseHeadBytes is the length of the lease index key before the user key.
const leaseHeadBytes = 9

// AppendLeaseKey appends the lease index key that attaches the user key to the lease.
// Nothing follows the user key, so it is not escaped. The index belongs to the node and
// not to a range: a split moves nothing in it.
func AppendLeaseKey(dst []byte, lease keyspace.LeaseID, key []byte) []byte {
	dst = append(dst, prefixLease)
	dst = binary.BigEndian.AppendUint64(dst, uint64(lease))
	return append(dst, key...)
}

// DecodeLeaseKey returns the lease and the user key of an index key. The user key refers
// to key.
func DecodeLeaseKey(key []byte) (lease keyspace.LeaseID, user []byte, err error) {
	if len(key) <= leaseHeadBytes || key[0] != prefixLease {
		return 0, nil, fmt.Errorf("%w: lease index %x", ErrBadKey, key)
	}
	return keyspace.LeaseID(binary.BigEndian.Uint64(key[1:])), key[leaseHeadBytes:], nil
}

// LeaseSpan returns the index span of the lease's keys in s.
func LeaseSpan(lease keyspace.LeaseID, s keyspace.Span) KeySpan {
	r := KeySpan{Lower: AppendLeaseKey(nil, lease, s.Start)}
	switch {
	case len(s.End) > 0:
		r.Upper = AppendLeaseKey(nil, lease, s.End)
	case uint64(lease) == ^uint64(0):
		r.Upper = []byte{prefixLease + 1}
	default:
		r.Upper = AppendLeaseKey(nil, lease+1, nil)
	}
	return r
}

// LeaseIndexSpan returns the span of the whole lease index.
func LeaseIndexSpan() KeySpan {
	return KeySpan{Lower: []byte{prefixLease}, Upper: []byte{prefixLease + 1}}
}

// FormatKey returns a physical key in readable form. It never fails.
func FormatKey(key []byte) string {
	if len(key) == 0 {
		return "-"
	}
	switch key[0] {
	case prefixNodeLocal:
		return fmt.Sprintf("node/%q", key[1:])
	case prefixApplied:
		if g, err := decodeAppliedKey(key); err == nil {
			return fmt.Sprintf("applied/%s", g)
		}
	case prefixGroupLocal:
		if g, suffix, err := DecodeGroupLocalKey(key); err == nil {
			return fmt.Sprintf("group/%s/%q", g, suffix)
		}
	case prefixVersioned:
		if user, rev, err := DecodeVersionedKey(key); err == nil {
			return fmt.Sprintf("key/%q@%d", user, rev)
		}
		if user, err := AppendUserKey(nil, key); err == nil {
			return fmt.Sprintf("key/%q", user)
		}
		if n := len(key) - 1; key[n] == afterTerm {
			if user, err := AppendUserKey(nil, append(bytes.Clone(key[:n]), terminator)); err == nil {
				return fmt.Sprintf("key/%q/end", user)
			}
		}
	case prefixLease:
		if len(key) >= leaseHeadBytes {
			return fmt.Sprintf("lease/%x/%q", key[1:leaseHeadBytes], key[leaseHeadBytes:])
		}
	}
	return fmt.Sprintf("%x", key)
}

// AppendRevision appends the revision to a prefix that AppendVersionedPrefix or
// SplitVersionedKey returned, which makes it a versioned key.
func AppendRevision(prefix []byte, rev keyspace.Revision) []byte {
	if rev < 0 || rev > keyspace.MaxRevision {
		panic(fmt.Sprintf("engine: revision %d outside [0, %d]", rev, keyspace.MaxRevision))
	}
	return binary.BigEndian.AppendUint64(prefix, ^uint64(rev))
}
