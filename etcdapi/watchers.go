package etcdapi

import (
	"cmp"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/watch"
)

// toldKeyBytes is how much of a key a list of watchers has.
const toldKeyBytes = 256

// listed is a watcher on its way into a list.
type listed struct {
	st       *watchStream
	w        *watcher
	hub      *watch.Watcher
	req      *pb.WatchCreateRequest
	user     string
	standing watch.Standing
}

// Watchers returns the watchers of this node whose clients are furthest behind, these first, at most so many, and how many
// there are. Their nodes stay empty.
func (s *Server) Watchers(most int) *adminpb.WatcherListResponse {
	all := s.watchers.list()
	hubs := make([]*watch.Watcher, len(all))
	for i := range all {
		hubs[i] = all[i].hub
	}
	if len(all) > 0 {
		for i, standing := range s.opts.Watches.Standings(hubs) {
			all[i].standing = standing
		}
	}
	all = slices.DeleteFunc(all, func(l listed) bool { return l.standing.Ended })
	slices.SortFunc(all, func(a, b listed) int {
		return cmp.Or(cmp.Compare(b.standing.Behind, a.standing.Behind), cmp.Compare(b.standing.Queued, a.standing.Queued),
			cmp.Compare(a.w.began, b.w.began), cmp.Compare(a.w.id, b.w.id))
	})
	out := &adminpb.WatcherListResponse{Total: uint64(len(all))}
	now := s.opts.Clock.Now()
	for i := range all[:min(most, len(all))] {
		l := &all[i]
		row := &adminpb.Watcher{
			Id: l.w.id, StartRevision: l.req.GetStartRevision(), PrevKv: l.req.GetPrevKv(), ProgressNotify: l.req.GetProgressNotify(),
			Behind: uint64(l.standing.Behind), QueuedEvents: uint64(l.standing.Queued), QueuedBytes: uint64(l.standing.Bytes), History: l.standing.Lags,
			Client: fromOf(l.st.grpc.Context()), User: l.user, AgeMs: now.Sub(l.w.began).Milliseconds(),
			NoPut:    slices.Contains(l.req.GetFilters(), pb.WatchCreateRequest_NOPUT),
			NoDelete: slices.Contains(l.req.GetFilters(), pb.WatchCreateRequest_NODELETE),
		}
		for _, k := range []struct {
			key []byte
			to  *[]byte
		}{{l.req.GetKey(), &row.Key}, {l.req.GetRangeEnd(), &row.RangeEnd}} {
			row.Cut = row.Cut || len(k.key) > toldKeyBytes
			*k.to = k.key[:min(len(k.key), toldKeyBytes)]
		}
		out.Watchers = append(out.Watchers, row)
	}
	return out
}

// list returns the watchers that have begun.
func (w *watchStreams) list() (all []listed) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for st := range w.all {
		st.mu.Lock()
		for _, o := range st.ids {
			if o.w == nil || o.denied.Load() {
				continue
			}
			l := listed{st: st, w: o, hub: o.w, req: o.req}
			if o.caller != nil {
				l.user = o.caller.User
			}
			all = append(all, l)
		}
		st.mu.Unlock()
	}
	return all
}
