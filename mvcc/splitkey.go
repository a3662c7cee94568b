package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"math/big"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// ErrIndivisible says that no key divides a span into parts that are both worth
// something: one key has most of its bytes.
var ErrIndivisible = errors.New("mvcc: no key divides the bytes")

const (
	// smallestPart is the part of the bytes that each side of a division must have: an
	// eighth. With less the larger side is soon divided again, and little is won.
	smallestPart = 8
	// middleSteps bounds the search. Each step halves the distance between two byte strings,
	// which 256 steps bring from the whole keyspace to strings that agree in 32 bytes beyond
	// what all keys of the span begin with.
	middleSteps = 256
)

// Halves is where a span is divided.
type Halves struct {
	// Key is the first of the right part.
	Key []byte
	// Left is about what the keys below it take of the disk, and Bytes what all do.
	Left, Bytes int64
}

// Middle returns the key that divides what the span takes on disk, all versions of its
// keys, into parts that are as equal as keys allow, and ErrIndivisible where there is
// none. It reads no data: it asks the store about how much the keys below one take, some
// dozens of times, and looks up the key at hand each time. What is not in tables yet does
// not count, and the values of old versions, which tables hold apart, count where their
// table's other bytes are: where few keys have many old versions it is not quite the middle.
func Middle(e *engine.Engine, span keyspace.Span) (h Halves, err error) {
	bounds := engine.VersionedSpan(span)
	it, err := e.NewIter(engine.IterOptions{Lower: bounds.Lower, Upper: bounds.Upper})
	if err != nil {
		return h, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	if h.Bytes, err = e.EstimateBytes(bounds); err != nil {
		return h, err
	}
	m := middle{e: e, it: it, lower: bounds.Lower, half: h.Bytes / 2}
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
		return h, ErrIndivisible
	}
	return h, nil
}

func distance(a, b int64) int64 { return max(a-b, b-a) }

// middle is a search: lo and hi are keys of the span with less than half, and with half
// or more, of the bytes below them.
type middle struct {
	e              *engine.Engine
	it             *engine.Iterator
	lower          []byte
	half           int64
	lo, hi         []byte
	loLeft, hiLeft int64
}

// search narrows lo and hi until no key lies between them.
func (m *middle) search() error {
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
	for range middleSteps {
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
		m.lo = nil // nothing would stay on its left
	}
	return nil
}

// user returns the user key at which the iterator stands, nil where it stands nowhere.
func (m *middle) user(valid bool) ([]byte, error) {
	if !valid {
		return nil, m.it.Error()
	}
	key, _, err := engine.DecodeVersionedKey(m.it.Key())
	return key, err
}

// below is about what the keys below one take.
func (m *middle) below(key []byte) (int64, error) {
	upper := engine.VersionedSpan(keyspace.Span{Start: key}).Lower
	if bytes.Compare(m.lower, upper) >= 0 {
		return 0, nil
	}
	return m.e.EstimateBytes(engine.KeySpan{Lower: m.lower, Upper: upper})
}

// between returns a byte string above lo and below hi, about in the middle, nil where
// there is none, or none that is at most a byte longer than both.
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
		// As short as it may be and still be above lo.
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
