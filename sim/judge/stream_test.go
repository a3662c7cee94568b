package judge

import (
	"strings"
	"testing"
)

// A stream that keeps the order is accepted, and each way to break it is found.
func TestStreamsOrderIsJudged(t *testing.T) {
	for name, c := range map[string]struct {
		tell func(s *Stream) []string
		want string
	}{
		"right": {func(s *Stream) []string {
			return []string{s.Events(1, 5, 7), s.Progress(AllWatchers, 7), s.Progress(AllWatchers, 7), s.Events(2, 8, 8), s.Progress(2, 9), s.Progress(AllWatchers, 9), s.Events(1, 10, 10)}
		}, ""},
		"progress of one below an event of the other": {func(s *Stream) []string {
			return []string{s.Events(1, 5, 7), s.Progress(2, 4)}
		}, ""},
		"one that has ended": {func(s *Stream) []string {
			first := s.Events(1, 5, 7)
			s.Ended(1)
			return []string{first, s.Progress(AllWatchers, 6), s.Events(1, 5, 5)}
		}, ""},
		"one that comes later and begins in the past": {func(s *Stream) []string {
			first := s.Progress(AllWatchers, 9)
			s.Created(3, 2)
			return []string{first, s.Events(3, 2, 9)}
		}, ""},
		"progress behind an event":                   {func(s *Stream) []string { return []string{s.Events(1, 5, 7), s.Progress(AllWatchers, 6)} }, "6 was sent to watch -1 (-1 is all), and watch 1 is at 7"},
		"progress of one behind its event":           {func(s *Stream) []string { return []string{s.Events(1, 5, 7), s.Progress(1, 6)} }, "6 was sent to watch 1"},
		"progress behind progress":                   {func(s *Stream) []string { return []string{s.Progress(AllWatchers, 7), s.Progress(AllWatchers, 6)} }, "6 was sent"},
		"progress behind progress of one":            {func(s *Stream) []string { return []string{s.Progress(1, 7), s.Progress(AllWatchers, 6)} }, "6 was sent"},
		"progress behind where one begins":           {func(s *Stream) []string { s.Created(3, 8); return []string{s.Progress(AllWatchers, 6)} }, "watch 3 is at 7"},
		"an event behind progress":                   {func(s *Stream) []string { return []string{s.Progress(AllWatchers, 7), s.Events(2, 7, 9)} }, "watch 2 received an event of revision 7"},
		"an event behind the watcher's own progress": {func(s *Stream) []string { return []string{s.Progress(2, 7), s.Events(2, 6, 6)} }, "revision 6"},
		"an event twice":                             {func(s *Stream) []string { return []string{s.Events(1, 5, 7), s.Events(1, 7, 7)} }, "revision 7, and is at 7"},
		"an event before the first":                  {func(s *Stream) []string { return []string{s.Events(2, 3, 4)} }, "revision 3, and is at 4"},
	} {
		s := NewStream()
		s.Created(1, 0)
		s.Created(2, 5)
		got := strings.Join(c.tell(s), "")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
