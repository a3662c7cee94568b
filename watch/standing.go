package watch

// Standing is how far the client of a watcher is.
type Standing struct {
	// Ended says that there is nothing to say: the watcher has ended, or is about to.
	Ended bool
	// Behind is how many of the revisions that this node knows of the client has not got everything of. Most of them may have
	// no event for the watcher.
	Behind int64
	// Queued is how many events wait for the client, and Bytes what they take.
	Queued int
	Bytes  int64
	// Lags says that the watcher gets its events from history.
	Lags bool
}

// standingsAtOnce bounds the watchers that are looked at while events wait.
const standingsAtOnce = 256

// Standings returns how far the clients of the watchers are, for each about when it is called.
func (h *Hub) Standings(watchers []*Watcher) []Standing {
	all := make([]Standing, 0, len(watchers))
	for len(all) < len(watchers) {
		h.mu.Lock()
		for _, w := range watchers[len(all):min(len(all)+standingsAtOnce, len(watchers))] {
			all = append(all, w.standingLocked())
		}
		h.mu.Unlock()
	}
	return all
}

func (w *Watcher) standingLocked() Standing {
	if w.closed || w.group == nil || w.s.hub.run == nil {
		return Standing{Ended: true}
	}
	at, live := w.reachedLocked()
	switch {
	case live:
	case len(w.queue) > 0:
		at = w.queue[0].first() - 1
	default:
		at = max(w.group.pos, w.from-1)
	}
	s := Standing{Behind: max(0, int64(w.s.hub.logEnd-at)), Bytes: w.bytes, Lags: !live}
	for i := range w.queue {
		s.Queued += len(w.queue[i].events)
	}
	return s
}
