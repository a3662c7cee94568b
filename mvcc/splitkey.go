package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"math/big"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// ErrNoSplitKey says that no key divides a span into two useful parts: one key has most
// of its bytes.
var ErrNoSplitKey = errors.New("mvcc: no key divides the bytes")

const (
	// smallestPart is the minimum share of the bytes on each side of a division: an
	// eighth. With less the larger side would soon be divided again.
	smallestPart = 8
	// splitSteps bounds the search. Each step halves the distance between two byte
	// strings. 256 steps lead from the whole keyspace to strings that agree in 32 bytes
	// beyond the common prefix of the span's keys.
	splitSteps = 256
)

// Split is where a span is divided.
type Split struct {
	// Key is the first key of the right part.
	Key []byte
	// Left is roughly the disk space of the keys below Key, Bytes that of all keys.
	Left, Bytes int64
}

// FindSplitKey returns the key that divides the span's disk space, with all versions of
// its keys, as evenly as keys allow, or ErrNoSplitKey if there is none. It reads no data.
// It asks the store some dozens of times for the approximate size of the keys below one,
// and looks up one key each time. Data not in tables yet do not count. Tables store the
// values of old versions apart, and these count at the place of their table's other
// bytes. So if few keys have many old versions, the key is not exactly in the middle.
func FindSplitKey(e *engine.Engine, span keyspace.Span) (h Split, err error) {
	bounds := engine.VersionedSpan(span)
	it, err := e.NewIter(engine.IterOptions{Lower: bounds.Lower, Upper: bounds.Upper})
	if err != nil {
		return h, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	if h.Bytes, err = e.EstimateBytes(bounds); err != nil {
		return h, err
	}
	m := splitSearch{e: e, it: it, lower: bounds.Lower, half: h.Bytes / 2}
	if err := m.search(); err != nil {
		return h, fmt.Errorf("mvcc: halve %s: %w", span, err)
	}
	for _, c := range [...]struct {
		key  []byte
		left int64
	}{{m.lo, m.loLeft}, {m.hi, m.hiLeft}} {
		if c.key != nil && (h.Key == nil || distance(c.left, m.half) < distance(h.Left, m.half)) {
			h.Key, h.Left = c.key, c.left
		}
	}
	if h.Key == nil || min(h.Left, h.Bytes-h.Left) < max(1, h.Bytes/smallestPart) {
		return h, ErrNoSplitKey
	}
	return h, nil
}

func distance(a, b int64) int64 { return max(a-b, b-a) }

// splitSearch is a binary search: lo and hi are keys of the span with less than half of
// the bytes below lo, and half or more below hi.
type splitSearch struct {
	e              *engine.Engine
	it             *engine.Iterator
	lower          []byte
	half           int64
	lo, hi         []byte
	loLeft, hiLeft int64
}

// search narrows lo and hi until no key lies between them.
func (m *splitSearch) search() error {
	first, err := m.user(m.it.First())
	if err != nil || first == nil {
		return err
	}
	last, err := m.user(m.it.Last())
	if err != nil || bytes.Equal(first, last) {
		return err
	}
	m.lo = first
	left, err := m.below(last)
	if err != nil {
		return err
	}
	if left < m.half {
		m.lo, m.loLeft = last, left
		return nil
	}
	m.hi, m.hiLeft = last, left
	to := last
	for range splitSteps {
		at := between(m.lo, to)
		if at == nil {
			break
		}
		key, err := m.user(m.it.SeekGE(engine.VersionedSpan(keyspace.Span{Start: at}).Lower))
		if err != nil {
			return err
		}
		if key == nil || bytes.Compare(key, to) >= 0 {
			to = at
			continue
		}
		if left, err = m.below(key); err != nil {
			return err
		}
		if left < m.half {
			m.lo, m.loLeft = key, left
		} else {
			m.hi, m.hiLeft, to = key, left, key
		}
	}
	if m.loLeft == 0 {
		m.lo = nil // nothing would remain on its left
	}
	return nil
}

// user returns the user key at the iterator's position, or nil if it has none.
func (m *splitSearch) user(valid bool) ([]byte, error) {
	if !valid {
		return nil, m.it.Error()
	}
	key, _, err := engine.DecodeVersionedKey(m.it.Key())
	return key, err
}

// below is roughly the size of the keys below key.
func (m *splitSearch) below(key []byte) (int64, error) {
	upper := engine.VersionedSpan(keyspace.Span{Start: key}).Lower
	if bytes.Compare(m.lower, upper) >= 0 {
		return 0, nil
	}
	return m.e.EstimateBytes(engine.KeySpan{Lower: m.lower, Upper: upper})
}

// between returns a byte string above lo and below hi, roughly in the middle. It returns
// nil if there is none that is at most one byte longer than both.
func between(lo, hi []byte) []byte {
	n := max(len(lo), len(hi)) + 1
	number := func(b []byte) *big.Int {
		padded := make([]byte, n)
		copy(padded, b)
		return new(big.Int).SetBytes(padded)
	}
	sum := number(lo)
	sum.Add(sum, number(hi)).Rsh(sum, 1)
	at := sum.FillBytes(make([]byte, n))
	for len(at) > 0 {
		// As short as possible and still above lo.
		short := at[:len(at)-1]
		if bytes.Compare(short, lo) <= 0 {
			break
		}
		at = short
	}
	if bytes.Compare(at, lo) <= 0 || bytes.Compare(at, hi) >= 0 {
		return nil
	}
	return at
}
