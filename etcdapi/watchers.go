package etcdapi

import (
	"cmp"
	"maps"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/watch"
)

// toldKeyBytes is how much of a key a list of watchers has.
const toldKeyBytes = 256

const (
	// listedAtOnce is how many watchers are looked at together.
	listedAtOnce = 1000
	// listedSpare is how many more than are wanted are kept at least before the list is cut: each cut sorts it.
	listedSpare = 1000
)

// listed is a watcher on its way into a list.
type listed struct {
	st       *watchStream
	w        *watcher
	standing watch.Standing
}

// furthestBehind sorts watchers, those furthest behind first, and cuts the list to so many. It lets the others go.
func furthestBehind(all []listed, most int) []listed {
	slices.SortFunc(all, func(a, b listed) int {
		return cmp.Or(cmp.Compare(b.standing.Behind, a.standing.Behind), cmp.Compare(b.standing.Queued, a.standing.Queued),
			cmp.Compare(a.w.began, b.w.began), cmp.Compare(a.w.id, b.w.id))
	})
	most = min(most, len(all))
	return slices.Delete(all, most, len(all))
}

// Watchers returns the watchers of this node whose clients are furthest behind, these first, at most so many, and how many
// there are. Their nodes stay empty. One list is made at a time. Of the node's watchers it copies one stream's at a time,
// and no lock is held that other streams need: there may be very many.
func (s *Server) Watchers(most int) *adminpb.WatcherListResponse {
	s.watchers.listing.Lock()
	defer s.watchers.listing.Unlock()
	out := &adminpb.WatcherListResponse{}
	var kept []listed
	for _, st := range s.watchers.streams() {
		all, hubs := st.begunWatchers()
		for ; len(all) > 0; all, hubs = all[min(listedAtOnce, len(all)):], hubs[min(listedAtOnce, len(hubs)):] {
			for i, standing := range s.opts.Watches.Standings(hubs[:min(listedAtOnce, len(hubs))]) {
				if !standing.Ended {
					out.Total++
					kept = append(kept, listed{st, all[i], standing})
				}
			}
			if len(kept)-most >= max(most, listedSpare) {
				kept = furthestBehind(kept, most)
			}
		}
	}
	now := s.opts.Clock.Now()
	for _, l := range furthestBehind(kept, most) {
		out.Watchers = append(out.Watchers, l.row(now))
	}
	return out
}

func (l *listed) row(now clock.Time) *adminpb.Watcher {
	l.st.mu.Lock()
	req, caller := l.w.req, l.w.caller
	l.st.mu.Unlock()
	row := &adminpb.Watcher{
		Id: l.w.id, StartRevision: req.GetStartRevision(), PrevKv: req.GetPrevKv(), ProgressNotify: req.GetProgressNotify(),
		Behind: uint64(l.standing.Behind), QueuedEvents: uint64(l.standing.Queued), QueuedBytes: uint64(l.standing.Bytes), History: l.standing.Lags,
		Client: fromOf(l.st.grpc.Context()), AgeMs: now.Sub(l.w.began).Milliseconds(),
		NoPut:    slices.Contains(req.GetFilters(), pb.WatchCreateRequest_NOPUT),
		NoDelete: slices.Contains(req.GetFilters(), pb.WatchCreateRequest_NODELETE),
	}
	if caller != nil {
		row.User = caller.User
	}
	for _, k := range []struct {
		key []byte
		to  *[]byte
	}{{req.GetKey(), &row.Key}, {req.GetRangeEnd(), &row.RangeEnd}} {
		row.Cut = row.Cut || len(k.key) > toldKeyBytes
		*k.to = k.key[:min(len(k.key), toldKeyBytes)]
	}
	return row
}

// streams returns the streams that are open.
func (w *watchStreams) streams() []*watchStream {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Keys(w.all))
}

// begunWatchers returns the stream's watchers that have begun, and what they are at the hub.
func (st *watchStream) begunWatchers() (all []*watcher, hubs []*watch.Watcher) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, w := range st.ids {
		if w.w != nil && !w.denied.Load() {
			all, hubs = append(all, w), append(hubs, w.w)
		}
	}
	return all, hubs
}
