package watch

import (
	"iter"
	"slices"
	"sort"

	"github.com/skeindb/skein/keyspace"
)

// eventList holds events in order, each once. It consists of chunks, so that an event below many
// others moves few of them: a feed that was lost for a while brings its events below those of all
// others. The zero list is empty.
type eventList struct {
	// Each chunk has at least one event, and at most maxChunk.
	chunks [][]*event
	count  int
}

// maxChunk bounds what an insert moves: half a chunk and the list of chunks.
const maxChunk = 256

func (l *eventList) len() int { return l.count }

// first and last return the ends of a list that is not empty.
func (l *eventList) first() *event { return l.chunks[0][0] }

func (l *eventList) last() *event {
	p := l.chunks[len(l.chunks)-1]
	return p[len(p)-1]
}

// insert adds the event, or returns the one already in its place.
func (l *eventList) insert(e *event) (twin *event) {
	if l.count == 0 || compare(l.last(), e) < 0 {
		l.push(e)
		return nil
	}
	// The last chunk that begins at or below the event.
	i := max(0, sort.Search(len(l.chunks), func(i int) bool { return compare(l.chunks[i][0], e) > 0 })-1)
	at, found := slices.BinarySearchFunc(l.chunks[i], e, compare)
	if found {
		return l.chunks[i][at]
	}
	if len(l.chunks[i]) == maxChunk {
		half := append(make([]*event, 0, maxChunk), l.chunks[i][maxChunk/2:]...)
		clear(l.chunks[i][maxChunk/2:])
		l.chunks[i] = l.chunks[i][:maxChunk/2]
		l.chunks = slices.Insert(l.chunks, i+1, half)
		if at > maxChunk/2 {
			i, at = i+1, at-maxChunk/2
		}
	}
	l.chunks[i] = slices.Insert(l.chunks[i], at, e)
	l.count++
	return nil
}

// push adds an event above all others.
func (l *eventList) push(e *event) {
	l.count++
	if n := len(l.chunks); n > 0 && len(l.chunks[n-1]) < maxChunk {
		l.chunks[n-1] = append(l.chunks[n-1], e)
		return
	}
	l.chunks = append(l.chunks, []*event{e})
}

// between returns the events with revisions in (after, to], in order. The list must not change
// meanwhile.
func (l *eventList) between(after, to keyspace.Revision) iter.Seq[*event] {
	return func(yield func(*event) bool) {
		i := max(0, sort.Search(len(l.chunks), func(i int) bool { return l.chunks[i][0].rev > after })-1)
		for ; i < len(l.chunks); i++ {
			p := l.chunks[i]
			for _, e := range p[above(p, after):] {
				if e.rev > to || !yield(e) {
					return
				}
			}
		}
	}
}

// shift removes the first event of a list that is not empty.
func (l *eventList) shift() *event {
	p := l.chunks[0]
	e := p[0]
	p[0] = nil
	if l.chunks[0] = p[1:]; len(p) == 1 {
		l.chunks[0] = nil // the array of chunks stays
		l.chunks = l.chunks[1:]
	}
	if l.count--; l.count == 0 {
		l.chunks = nil
	}
	return e
}

// takeUpTo removes the events with revisions up to rev and returns them in order.
func (l *eventList) takeUpTo(rev keyspace.Revision) []*event {
	whole, n := 0, 0
	for whole < len(l.chunks) && l.chunks[whole][len(l.chunks[whole])-1].rev <= rev {
		n += len(l.chunks[whole])
		whole++
	}
	part := 0
	if whole < len(l.chunks) {
		part = above(l.chunks[whole], rev)
	}
	if n+part == 0 {
		return nil
	}
	taken := make([]*event, 0, n+part)
	for _, p := range l.chunks[:whole] {
		taken = append(taken, p...)
	}
	clear(l.chunks[:whole]) // the array of chunks stays
	l.chunks = l.chunks[whole:]
	if part > 0 {
		p := l.chunks[0]
		taken = append(taken, p[:part]...)
		clear(p[:part])
		l.chunks[0] = p[part:]
	}
	if l.count -= len(taken); l.count == 0 {
		l.chunks = nil
	}
	return taken
}

// above returns the index of the first event above the revision.
func above(list []*event, rev keyspace.Revision) int {
	return sort.Search(len(list), func(i int) bool { return list[i].rev > rev })
}
