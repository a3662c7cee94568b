package etcdapi

import (
	"context"
	"sync"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/clock"
)

// watchStreams are the streams of watchers that are open.
type watchStreams struct {
	mu  sync.Mutex
	all map[*watchStream]struct{} // guarded by mu
	// listing is held by who lists watchers, before mu.
	listing sync.Mutex
}

func (w *watchStreams) add(st *watchStream) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = make(map[*watchStream]struct{})
	}
	w.all[st] = struct{}{}
}

func (w *watchStreams) remove(st *watchStream) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, st)
}

// RightsTaken ends the watchers whose users may not read their keys any more, by the newest view of the gate. When
// it returns, no event is told any more that a user may not have. It waits for no client.
func (s *Server) RightsTaken() {
	s.watchers.mu.Lock()
	defer s.watchers.mu.Unlock()
	now := map[*auth.Caller]*auth.Caller{}
	for st := range s.watchers.all {
		st.endDenied(now)
	}
}

// loadBegun ends the streams of watchers from before a load.
type loadBegun struct{ why error }

func (l loadBegun) Error() string { return l.why.Error() }

// LoadBegun ends all streams of watchers, with the error that the cluster gives while it is loaded: what comes by the load
// is no event. It waits for no client.
func (s *Server) LoadBegun(why error) {
	s.watchers.mu.Lock()
	defer s.watchers.mu.Unlock()
	for st := range s.watchers.all {
		st.end(loadBegun{why})
	}
}

// endDenied ends the watchers whose callers may not read their keys any more. now has the callers as they are now.
func (st *watchStream) endDenied(now map[*auth.Caller]*auth.Caller) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, w := range st.ids {
		if w.caller == nil {
			continue // its caller is looked for by the newest view
		}
		c, ok := now[w.caller]
		if !ok {
			c, _ = st.s.opts.Users.Gate.Again(w.caller) // nil if that user is gone
			now[w.caller] = c
		}
		if c != nil && auth.Check(c, w.req) == nil {
			continue
		}
		switch {
		case w.w == nil:
			w.denied.Store(true) // it is being created
		case st.hub.Cancel(w.w):
			w.denied.Store(true)
			st.ended = append(st.ended, w)
			st.revoked.Set()
		default:
			// Its past was compacted, or an event too large. It has no events, and the client is told that.
		}
	}
}

// awaitRights waits until this node knows whether the events that it has may be told.
func (st *watchStream) awaitRights(ctx context.Context) error {
	for st.s.holds() != nil {
		select {
		case <-st.s.ending:
			return rpctypes.ErrGRPCStopped
		default:
		}
		if err := clock.Sleep(ctx, st.s.opts.Clock, holdPause); err != nil {
			return err
		}
	}
	return nil
}

// permit notes who creates a watcher, and returns the context in which it begins.
func (st *watchStream) permit(ctx context.Context, w *watcher) (context.Context, error) {
	for {
		inner, c, err := st.s.permitted(ctx, w.req)
		if err != nil {
			return nil, err
		}
		st.mu.Lock()
		w.caller = c
		st.mu.Unlock()
		// From here on endDenied looks at the watcher. It may have passed by before, for a newer view.
		if v := st.s.opts.Users.Gate.View(); v == nil || v.Rights.Access <= c.Access {
			return inner, nil
		}
	}
}

// reasonDenied is etcd's text for a watcher that is not created because its user may not have it.
func reasonDenied(err error) string {
	for _, e := range []error{rpctypes.ErrGRPCInvalidAuthToken, rpctypes.ErrGRPCAuthOldRevision, rpctypes.ErrGRPCUserEmpty} {
		if status.Code(err) == status.Code(e) && rpctypes.ErrorDesc(err) == rpctypes.ErrorDesc(e) {
			return e.Error()
		}
	}
	if status.Code(err) == codes.PermissionDenied {
		return rpctypes.ErrGRPCPermissionDenied.Error()
	}
	return rpctypes.ErrorDesc(err)
}
