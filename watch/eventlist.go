package watch

import (
	"iter"
	"slices"
	"sort"

	"github.com/skeindb/skein/keyspace"
)

// eventList holds events in order, each once. They are in pieces, so that one which comes
// below many others moves few of them: a feed that was lost for a while brings all of its
// range below what the others have brought meanwhile. The zero list is empty.
type eventList struct {
	// Each piece has one event at least, and maxPiece at most.
	pieces [][]*event
	count  int
}

// maxPiece bounds what one event moves, which is half of that and the list of pieces.
const maxPiece = 256

func (l *eventList) len() int { return l.count }

// first and last return the ends of a list that is not empty.
func (l *eventList) first() *event { return l.pieces[0][0] }

func (l *eventList) last() *event {
	p := l.pieces[len(l.pieces)-1]
	return p[len(p)-1]
}

// insert adds the event, or returns the one that is there already in its place.
func (l *eventList) insert(e *event) (twin *event) {
	if l.count == 0 || compare(l.last(), e) < 0 {
		l.push(e)
		return nil
	}
	// The last piece that begins at or below the event.
	i := max(0, sort.Search(len(l.pieces), func(i int) bool { return compare(l.pieces[i][0], e) > 0 })-1)
	at, found := slices.BinarySearchFunc(l.pieces[i], e, compare)
	if found {
		return l.pieces[i][at]
	}
	if len(l.pieces[i]) == maxPiece {
		half := append(make([]*event, 0, maxPiece), l.pieces[i][maxPiece/2:]...)
		clear(l.pieces[i][maxPiece/2:])
		l.pieces[i] = l.pieces[i][:maxPiece/2]
		l.pieces = slices.Insert(l.pieces, i+1, half)
		if at > maxPiece/2 {
			i, at = i+1, at-maxPiece/2
		}
	}
	l.pieces[i] = slices.Insert(l.pieces[i], at, e)
	l.count++
	return nil
}

// push adds an event behind all others.
func (l *eventList) push(e *event) {
	l.count++
	if n := len(l.pieces); n > 0 && len(l.pieces[n-1]) < maxPiece {
		l.pieces[n-1] = append(l.pieces[n-1], e)
		return
	}
	l.pieces = append(l.pieces, []*event{e})
}

// between calls for the events with revisions in (after, to], in order. The list is not
// changed meanwhile.
func (l *eventList) between(after, to keyspace.Revision) iter.Seq[*event] {
	return func(yield func(*event) bool) {
		i := max(0, sort.Search(len(l.pieces), func(i int) bool { return l.pieces[i][0].rev > after })-1)
		for ; i < len(l.pieces); i++ {
			p := l.pieces[i]
			for _, e := range p[above(p, after):] {
				if e.rev > to || !yield(e) {
					return
				}
			}
		}
	}
}

// shift takes out the first event of a list that is not empty.
func (l *eventList) shift() *event {
	p := l.pieces[0]
	e := p[0]
	p[0] = nil
	if l.pieces[0] = p[1:]; len(p) == 1 {
		l.pieces[0] = nil // the array of pieces stays
		l.pieces = l.pieces[1:]
	}
	if l.count--; l.count == 0 {
		l.pieces = nil
	}
	return e
}

// takeUpTo takes out the events with revisions up to rev, and returns them in order.
func (l *eventList) takeUpTo(rev keyspace.Revision) []*event {
	whole, n := 0, 0
	for whole < len(l.pieces) && l.pieces[whole][len(l.pieces[whole])-1].rev <= rev {
		n += len(l.pieces[whole])
		whole++
	}
	part := 0
	if whole < len(l.pieces) {
		part = above(l.pieces[whole], rev)
	}
	if n+part == 0 {
		return nil
	}
	taken := make([]*event, 0, n+part)
	for _, p := range l.pieces[:whole] {
		taken = append(taken, p...)
	}
	clear(l.pieces[:whole]) // the array of pieces stays
	l.pieces = l.pieces[whole:]
	if part > 0 {
		p := l.pieces[0]
		taken = append(taken, p[:part]...)
		clear(p[:part])
		l.pieces[0] = p[part:]
	}
	if l.count -= len(taken); l.count == 0 {
		l.pieces = nil
	}
	return taken
}

// above returns the place of the first event of the sorted list above the revision.
func above(list []*event, rev keyspace.Revision) int {
	return sort.Search(len(list), func(i int) bool { return list[i].rev > rev })
}
