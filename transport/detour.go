package transport

import (
	"errors"
	"sync"
)

// detours are the streams to a peer that go around the broken link with it.
type detours struct {
	mu      sync.Mutex
	streams map[*detour]*stream // guarded by mu
}

// detour is one of them. over, guarded by detours.mu, says that the stream has ended.
type detour struct{ over bool }

func (ds *detours) add(d *detour, st *stream) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	if d.over {
		return
	}
	if ds.streams == nil {
		ds.streams = map[*detour]*stream{}
	}
	ds.streams[d] = st
}

func (ds *detours) remove(d *detour) {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d.over = true
	delete(ds.streams, d)
}

// end ends the streams: the direct way is open again, or the peer is no peer any more.
func (ds *detours) end(why error) {
	ds.mu.Lock()
	streams := ds.streams
	ds.streams = nil
	ds.mu.Unlock()
	for _, st := range streams {
		st.abandon(why)
	}
}

// errDirect ends a stream that took a detour.
var errDirect = errors.Join(ErrUnreachable, errors.New("transport: the direct way is open again"))

// passedResult is the end of a stream that was passed on, for its other side.
type passedResult struct{ callResult }

// Error implements error.
func (r *passedResult) Error() string { return r.err.Error() }

// passedEnd returns the error with which a relay closes one side of a stream when the
// other one has ended with err.
func passedEnd(err error) error {
	if err == nil {
		return nil
	}
	r := &passedResult{callResult{err: err}}
	if ce, ok := errors.AsType[*CallError](err); ok {
		r.err, r.notDelivered = ce.Err, ce.NotDelivered
	}
	return r
}
