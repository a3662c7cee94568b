package judge

import (
	"fmt"
)

// AllWatchers is the id under which a stream sends progress to all of its watchers.
const AllWatchers int64 = -1

// Stream checks the order of events and progress on one stream.
//
// clientv3 resumes a watcher after the last progress that it received, even if the
// watcher was further. Requested progress goes to all watchers of the stream. So events
// between that progress and the watcher's place would be repeated when the stream
// breaks. Therefore no watcher may receive progress below its place, or an event at or
// below it. A Stream belongs to one goroutine.
type Stream struct {
	// told is the place of each watcher whose creation was confirmed.
	told map[int64]int64
}

// NewStream returns a Stream without watchers.
func NewStream() *Stream { return &Stream{told: map[int64]int64{}} }

// Created records that a watcher's creation was confirmed, and that it receives events
// from a revision on, 0 for any.
func (s *Stream) Created(id, from int64) { s.told[id] = max(0, from-1) }

// Ended records that a watcher ignores everything from now on.
func (s *Stream) Ended(id int64) { delete(s.told, id) }

// Events records that a watcher receives all its events of some revisions. It says what is
// wrong with them, "" if nothing is.
func (s *Stream) Events(id, first, last int64) (wrong string) {
	told, there := s.told[id]
	if !there {
		return ""
	}
	if first <= told {
		wrong = fmt.Sprintf("progress: watch %d received an event of revision %d, and is at %d", id, first, told)
	}
	s.told[id] = max(told, last)
	return wrong
}

// Progress records progress of a watcher, or of AllWatchers, up to a revision, and says
// what is wrong with that, "" if nothing is.
func (s *Stream) Progress(id, rev int64) (wrong string) {
	for w, told := range s.told {
		if id != AllWatchers && id != w {
			continue
		}
		if rev < told {
			wrong = fmt.Sprintf("progress: %d was sent to watch %d (%d is all), and watch %d is at %d", rev, id, AllWatchers, w, told)
		}
		s.told[w] = max(told, rev)
	}
	return wrong
}
