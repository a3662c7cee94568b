package rights

import (
	"bytes"
	"slices"
	"sort"
)

// Subject is what one user may do in one state. It does not change, and may be used by many goroutines.
type Subject struct {
	root        bool
	read, write spans
}

// Subject returns what a user may do; ok is false if there is no such user.
func (s *State) Subject(name string) (_ *Subject, ok bool) {
	u := s.User(name)
	if u == nil {
		return nil, false
	}
	out := &Subject{root: u.isRoot()}
	if out.root {
		return out, true
	}
	for _, name := range u.Roles {
		r := s.Role(name)
		if r == nil {
			continue
		}
		for i := range r.Permissions {
			p := &r.Permissions[i]
			if p.Type.permits(Read) {
				out.read.add(p)
			}
			if p.Type.permits(Write) {
				out.write.add(p)
			}
		}
	}
	out.read.join()
	out.write.join()
	return out, true
}

// May says whether the user may do what the type says to the keys of a request, in etcd's form.
// Permissions for spans that touch each other count as one.
func (s *Subject) May(what Type, key, end []byte) bool {
	if s.root {
		return true
	}
	switch what {
	case Read:
		return s.read.cover(key, end)
	case Write:
		return s.write.cover(key, end)
	case ReadWrite:
		return s.read.cover(key, end) && s.write.cover(key, end)
	}
	return false
}

// Readable returns the largest span around a key that the user may read all of, from start to before end; an empty end is none. ok
// is false if it may not read the key.
func (s *Subject) Readable(key []byte) (start, end []byte, ok bool) {
	if s.root {
		return nil, nil, true
	}
	i := s.read.at(key)
	if i < 0 {
		return nil, nil, false
	}
	return s.read[i].start, s.read[i].end, true
}

// Root says whether the user may do everything.
func (s *Subject) Root() bool { return s.root }

// Spans is how much memory the subject takes: for so many spans of keys.
func (s *Subject) Spans() int { return cap(s.read) + cap(s.write) }

// span is a span of keys from start to before end; an empty end is none.
type span struct{ start, end []byte }

// beyond says whether the span ends behind a key.
func (s *span) beyond(key []byte) bool { return len(s.end) == 0 || bytes.Compare(s.end, key) > 0 }

// spans are those that a user may read, or write. Once they are joined they are disjoint and ascending,
// and do not touch.
type spans []span

func (s *spans) add(p *Permission) {
	sp := span{start: p.Key, end: p.RangeEnd}
	switch {
	case len(p.RangeEnd) == 0:
		sp.end = append(slices.Clone(p.Key), 0)
	case openEnd(p.RangeEnd):
		sp.end = nil
	}
	*s = append(*s, sp)
}

func (s *spans) join() {
	slices.SortFunc(*s, func(a, b span) int { return bytes.Compare(a.start, b.start) })
	joined := (*s)[:0]
	for _, sp := range *s {
		last := len(joined) - 1
		if last < 0 || len(joined[last].end) > 0 && bytes.Compare(joined[last].end, sp.start) < 0 {
			joined = append(joined, sp)
			continue
		}
		if e := &joined[last]; len(e.end) > 0 && (len(sp.end) == 0 || bytes.Compare(e.end, sp.end) < 0) {
			e.end = sp.end
		}
	}
	*s = joined
}

// cover says whether all keys of a request are in the spans.
func (s spans) cover(key, end []byte) bool {
	if len(key) == 0 {
		return false // no key is empty; who asks for one is refused for that
	}
	switch {
	case openEnd(end):
		end = nil
	case len(end) == 0:
		return s.has(key)
	case bytes.Compare(key, end) >= 0:
		// The request concerns no key. etcd wants its first one to be permitted, mostly: with an end
		// before that, its answer depends on the order in which permissions were granted.
		return s.has(key)
	}
	i := s.at(key)
	return i >= 0 && (len(s[i].end) == 0 || len(end) > 0 && bytes.Compare(s[i].end, end) >= 0)
}

// at returns the last joined span that begins at a key or before it, if it ends behind that; else -1.
func (s spans) at(key []byte) int {
	i := sort.Search(len(s), func(i int) bool { return bytes.Compare(s[i].start, key) > 0 }) - 1
	if i >= 0 && s[i].beyond(key) {
		return i
	}
	return -1
}

func (s spans) has(key []byte) bool { return s.at(key) >= 0 }
