package router

import (
	"context"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// permitOf returns the permit of a client's request. A request without one was checked by nobody.
func permitOf(ctx context.Context) keyspace.Permit {
	p, ok := keyspace.PermitOf(ctx)
	if !ok {
		panic("router: a client's request whose context has no permit: nobody has checked who may send it")
	}
	return p
}

// limited bounds a request by the router's own timeout, as a deadline that crosses the bus with it.
// The router's timeout becomes etcd's timeout error; the client's own deadline stays what it is.
func (r *Router) limited(ctx context.Context) limit {
	return limit{r.timers.LazyDeadline(ctx, r.cfg.Timeout), ctx}
}

// limit is a request's deadline.
type limit struct {
	*clock.LazyDeadline
	client context.Context
}

// outcome turns the error that a request ended with into the client's.
func (l limit) outcome(err error) error {
	if err == nil {
		return nil
	}
	if ended := l.client.Err(); ended != nil {
		return kverror.Of(ended)
	}
	ended := l.Err()
	if ended == nil {
		return err
	}
	own, _ := l.Deadline()
	if by, ok := l.client.Deadline(); ok && !own.Before(by) {
		return kverror.Of(ended) // the client's own timer is about to fire
	}
	if e := kverror.Of(err); e.Kind == kverror.Canceled || e.Kind == kverror.DeadlineExceeded {
		return &kverror.Error{Kind: kverror.Timeout, Detail: e.Detail}
	}
	return err
}
