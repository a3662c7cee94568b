package sim

import "fmt"

// AllWatchers is the id under which a stream tells all of its watchers its progress.
const AllWatchers int64 = -1

// Stream judges in which order one stream tells its watchers events and progress.
//
// clientv3 has a watcher go on behind the last progress that it was told, also where it was
// further, and progress that was asked for is told to all watchers of the stream: what lies
// between progress and an event before it would be told again as soon as the stream breaks. So
// nobody is told progress below what it was told before, and no event at or below it.
// It belongs to one goroutine.
type Stream struct {
	// told is up to where each watcher is that was told that it is there.
	told map[int64]int64
}

// NewStream returns one without watchers.
func NewStream() *Stream { return &Stream{told: map[int64]int64{}} }

// Created notes that a watcher was told that it is there, and is to be told what is from a
// revision on, 0 for wherever it begins.
func (s *Stream) Created(id, from int64) { s.told[id] = max(0, from-1) }

// Ended notes that a watcher has no use any more for what it is told.
func (s *Stream) Ended(id int64) { delete(s.told, id) }

// Events notes that a watcher is told all events that it gets of some revisions, and says what
// is wrong with that, "" if nothing is.
func (s *Stream) Events(id, first, last int64) (wrong string) {
	told, there := s.told[id]
	if !there {
		return ""
	}
	if first <= told {
		wrong = fmt.Sprintf("progress: watch %d is told an event of revision %d, and is at %d", id, first, told)
	}
	s.told[id] = max(told, last)
	return wrong
}

// Progress notes that a watcher, or AllWatchers, is told to have everything up to a revision,
// and says what is wrong with that, "" if nothing is.
func (s *Stream) Progress(id, rev int64) (wrong string) {
	for w, told := range s.told {
		if id != AllWatchers && id != w {
			continue
		}
		if rev < told {
			wrong = fmt.Sprintf("progress: %d is told to watch %d (%d is all), and watch %d is at %d", rev, id, AllWatchers, w, told)
		}
		s.told[w] = max(told, rev)
	}
	return wrong
}
