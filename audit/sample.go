package audit

import (
	"fmt"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
)

const (
	// denialsPerWindow is how many denials of one user are written in a window.
	denialsPerWindow = 5
	denialWindow     = time.Second
	// maxDenied bounds the users whose denials are counted apart.
	maxDenied = 1024
)

// sampler counts the denials of each user. Whoever is denied again and again must not fill the disk.
type sampler struct {
	mu sync.Mutex
	at map[string]*denials // guarded by mu
}

type denials struct {
	since        clock.Time
	told, unsaid int
}

// others stands for users beyond maxDenied. It is no user's name: those have no byte 0.
const others = "\x00others"

// take says whether a denial of a user is to be written.
func (s *sampler) take(user string, now clock.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[string]*denials{}
	}
	d := s.at[user]
	if d == nil && len(s.at) >= maxDenied {
		user = others
		d = s.at[user]
	}
	if d == nil {
		d = &denials{since: now}
		s.at[user] = d
	}
	if d.told < denialsPerWindow {
		d.told++
		return true
	}
	d.unsaid++
	return false
}

// leftOut ends the windows that are over, all of them with all, and returns what is to be said of them.
func (s *sampler) leftOut(now clock.Time, all bool) (entries []Entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for user, d := range s.at {
		if !all && now.Sub(d.since) < denialWindow {
			continue
		}
		delete(s.at, user)
		if d.unsaid == 0 {
			continue
		}
		if user == others {
			user = "others"
		}
		entries = append(entries, Entry{Method: methodLeftOut, User: user, What: fmt.Sprintf("count=%d", d.unsaid)})
	}
	return entries
}
