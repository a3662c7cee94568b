// Package budget bounds the bytes that answers hold, and has those wait that find none left.
//
// # Rules
//
// [Bytes] has two areas. Answers share the first one. One answer at a time, the leader, may grow in
// the second one, the reserve. An answer that finds no room waits. Those that wait are served in
// the order in which their answers began, so a large one is not overtaken for ever by small ones.
// The first of them becomes the leader if there is none. Then all that it holds moves to the
// reserve.
//
// # Why nobody waits for ever
//
// Answers grow, and wait with a part in their hands. Still there is no deadlock. Whoever waits in
// the shared area waits at most until it leads. The leader waits only for room in the reserve, and
// what else is there belongs to complete answers: they do not grow any more and only wait to be
// sent. Once they are gone, the leader can grow to the whole reserve, and no answer may have more.
// A leader that is complete, or gone, makes way for the next one. So a holder must not wait for
// another holder between its first Take and [Share.Complete] or [Share.Release]; whoever has to,
// uses [Share.Add], which does not wait.
package budget

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// ErrTooLarge says that one answer wants more than any may ever have.
var ErrTooLarge = errors.New("budget: an answer is larger than one may ever be")

// Bytes is a budget. It is safe for concurrent use.
type Bytes struct {
	shareable, reserve int64

	mu sync.Mutex
	// Guarded by mu. shared and reserved are the bytes that are held of the two areas.
	shared, reserved int64
	// leader is the answer that may grow in the reserve, or nil.
	leader *Share
	// waiting are those that wait, in the order of their answers.
	waiting []*waiter
	begun   uint64
}

// New returns a budget. All answers share the first number of bytes. One at a time may have as much
// as reserve beside them.
func New(shareable, reserve int64) *Bytes { return &Bytes{shareable: shareable, reserve: reserve} }

// Reserve returns the most that one answer may have.
func (b *Bytes) Reserve() int64 { return b.reserve }

// Held returns the bytes that are held now.
func (b *Bytes) Held() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.shared + b.reserved
}

// Waiting returns how many wait.
func (b *Bytes) Waiting() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.waiting)
}

// Share returns what one answer holds of the budget: nothing so far.
func (b *Bytes) Share() Share { return Share{of: b} }

// Share is what one answer holds. Its methods may be called from many goroutines.
type Share struct {
	of *Bytes
	// Guarded by of.mu. begun orders the answers; 0 before the first Take.
	begun uint64
	bytes int64
	// inReserve says that the bytes are held of the reserve.
	inReserve bool
}

// waiter is one Take that waits. granted is closed once it has its bytes or never will.
type waiter struct {
	share *Share
	bytes int64
	// err says that the bytes are refused after all. It is set before granted is closed.
	err     error
	granted chan struct{}
}

// Take takes bytes, and waits for them until ctx ends. With 0 bytes it waits until it is the
// answer's turn and there is room. After [Share.Complete] it must not be called. The answer may lead
// from now on, even if Take fails: [Share.Release] ends that.
func (s *Share) Take(ctx context.Context, bytes int64) error {
	w, err := s.of.take(s, bytes)
	if w == nil {
		return err
	}
	select {
	case <-w.granted:
		return w.err
	case <-ctx.Done():
	}
	if s.of.giveUp(w) {
		return ctx.Err()
	}
	return w.err
}

// take takes bytes, or returns who waits for them.
func (b *Bytes) take(s *Share, bytes int64) (*waiter, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.inReserve && b.leader != s {
		panic(fmt.Sprintf("budget: a complete answer of %d bytes takes %d", s.bytes, bytes))
	}
	if s.bytes+bytes > b.reserve {
		return nil, ErrTooLarge
	}
	if s.begun == 0 {
		b.begun++
		s.begun = b.begun
	}
	if len(b.waiting) == 0 && !s.inReserve && b.shared+bytes <= b.shareable {
		s.bytes += bytes
		b.shared += bytes
		return nil, nil
	}
	w := &waiter{share: s, bytes: bytes, granted: make(chan struct{})}
	at := len(b.waiting)
	for at > 0 && b.waiting[at-1].share.begun > s.begun {
		at--
	}
	b.waiting = slices.Insert(b.waiting, at, w)
	b.grantLocked()
	return w, nil
}

// giveUp ends a wait. It returns false if the wait had ended before.
func (b *Bytes) giveUp(w *waiter) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	i := slices.Index(b.waiting, w)
	if i < 0 {
		return false
	}
	b.waiting = slices.Delete(b.waiting, i, i+1)
	b.grantLocked() // it may have been in the way
	return true
}

// Try takes bytes if nobody waits and there is room.
func (s *Share) Try(bytes int64) bool {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.waiting) > 0 || s.inReserve || b.shared+bytes > b.shareable {
		return false
	}
	s.bytes += bytes
	b.shared += bytes
	return true
}

// Add counts bytes that are in memory already. It does not wait, and may exceed the budget. Others
// get nothing until there is room again.
func (s *Share) Add(bytes int64) error {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.bytes+bytes > b.reserve {
		return ErrTooLarge
	}
	s.bytes += bytes
	*s.areaLocked() += bytes
	return nil
}

// Give gives bytes back.
func (s *Share) Give(bytes int64) {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	s.giveLocked(bytes)
	b.grantLocked()
}

func (s *Share) giveLocked(bytes int64) {
	if bytes > s.bytes {
		panic(fmt.Sprintf("budget: an answer gives back %d bytes of %d", bytes, s.bytes))
	}
	s.bytes -= bytes
	*s.areaLocked() -= bytes
}

func (s *Share) areaLocked() *int64 {
	if s.inReserve {
		return &s.of.reserved
	}
	return &s.of.shared
}

// Complete says that the answer does not grow any more. It holds its bytes until they are given
// back.
func (s *Share) Complete() {
	b := s.of
	b.mu.Lock()
	defer b.mu.Unlock()
	b.followLocked(s)
}

// followLocked makes way for the next leader.
func (b *Bytes) followLocked(s *Share) {
	if b.leader == s {
		b.leader = nil
	}
	b.grantLocked()
}

// Release gives everything back. The share may be used again, and keeps its place in the order.
func (s *Share) Release() {
	b := s.of
	if b == nil {
		return // the zero value holds nothing
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	s.giveLocked(s.bytes)
	s.inReserve = false
	b.followLocked(s)
}

// Bytes returns what the answer holds.
func (s *Share) Bytes() int64 {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	return s.bytes
}

// grantLocked gives those that wait what is there. A leader that moves to the reserve makes room for
// those before it.
func (b *Bytes) grantLocked() {
	for len(b.waiting) > 0 {
		if moved := b.grantOnceLocked(); !moved {
			return
		}
	}
}

func (b *Bytes) grantOnceLocked() (moved bool) {
	kept := b.waiting[:0]
	full := false // somebody in front waits for the shared area
	for _, w := range b.waiting {
		s := w.share
		fits := !s.inReserve && !full && b.shared+w.bytes <= b.shareable
		if !fits && !s.inReserve && b.leader == nil {
			b.leader = s
		}
		switch {
		case s.bytes+w.bytes > b.reserve:
			// Other parts of the answer have got bytes meanwhile. It would wait for itself.
			w.err = ErrTooLarge
			close(w.granted)
			continue
		case fits:
			b.shared += w.bytes
		case s != b.leader:
			full = true
			kept = append(kept, w)
			continue
		default:
			before := s.inReserve
			if !b.leadLocked(s, w.bytes) {
				kept = append(kept, w)
				continue
			}
			moved = moved || !before
		}
		s.bytes += w.bytes
		close(w.granted)
	}
	clear(b.waiting[len(kept):])
	b.waiting = kept
	return moved
}

// leadLocked gives the leader bytes of the reserve, if they are there.
func (b *Bytes) leadLocked(s *Share, bytes int64) bool {
	if !s.inReserve {
		bytes += s.bytes
	}
	if b.reserved+bytes > b.reserve {
		return false
	}
	if !s.inReserve {
		b.shared -= s.bytes
		s.inReserve = true
	}
	b.reserved += bytes
	return true
}
