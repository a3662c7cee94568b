package wal

import "sync"

// pins guards each segment's ring of groups that need no older segment.
type pins struct{ mu sync.Mutex }

// pinList is the ring's anchor in a segment; GroupLog holds the links.
type pinList struct {
	head *GroupLog
	n    int
}

// move lists g at segment to, or removes it from its list if to is nil.
func (p *pins) move(g *GroupLog, to *segment) {
	if g.pinned == to {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if from := g.pinned; from != nil {
		g.pinPrev.pinNext, g.pinNext.pinPrev = g.pinNext, g.pinPrev
		if from.pinned.head == g {
			from.pinned.head = g.pinNext
		}
		if from.pinned.n--; from.pinned.n == 0 {
			from.pinned.head = nil
		}
		g.pinPrev, g.pinNext = nil, nil
	}
	g.pinned = to
	if to == nil {
		return
	}
	if h := to.pinned.head; h != nil {
		g.pinPrev, g.pinNext = h.pinPrev, h
		g.pinPrev.pinNext, h.pinPrev = g, g
	} else {
		g.pinPrev, g.pinNext = g, g
		to.pinned.head = g
	}
	to.pinned.n++
}

// count returns how many groups are listed at the segment.
func (p *pins) count(s *segment) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return s.pinned.n
}

// some returns up to n groups listed at the segment, and others at each call until it has
// returned all. So a search through very many groups does not block the writer.
func (p *pins) some(s *segment, n int) []*GroupLog {
	p.mu.Lock()
	defer p.mu.Unlock()
	n = min(n, s.pinned.n)
	gs := make([]*GroupLog, 0, n)
	for ; len(gs) < n; s.pinned.head = s.pinned.head.pinNext {
		gs = append(gs, s.pinned.head)
	}
	return gs
}

func (p *pins) none(s *segment) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return s.pinned.n == 0
}

// head returns the segment that is being written.
func (l *Log) head() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.segs[len(l.segs)-1].seq
}
