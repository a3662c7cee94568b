package etcdapi

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/kverror"
)

// errPatience is the cause of a context that this package itself has ended.
var errPatience = errors.New("etcdapi: the request took longer than the request timeout")

// bounded bounds a request in time. The bound is a deadline, so that it crosses the
// bus with the request. wording turns the error that the request ended with into the
// client's: where this package's bound passed, and not the client's, it is a timeout
// of the server, whose wording differs.
func (s *Server) bounded(ctx context.Context) (inner context.Context, cancel context.CancelFunc, wording func(error) error) {
	inner, cancel = context.WithTimeoutCause(ctx, s.opts.RequestTimeout, errPatience)
	return inner, cancel, func(err error) error {
		ours := ctx.Err() == nil && errors.Is(context.Cause(inner), errPatience)
		if kind := kverror.Of(err).Kind; ours && (kind == kverror.DeadlineExceeded || kind == kverror.Canceled || isEnd(err)) {
			err = kverror.Timeout
		}
		return kverror.GRPC(err)
	}
}

// isEnd says whether a gRPC status stands for the end of a context.
func isEnd(err error) bool {
	c := status.Code(err)
	return c == codes.DeadlineExceeded || c == codes.Canceled
}

// notYet is the answer of a method that is missing from a service that is there.
func notYet(method, instead string) error {
	return status.Error(codes.Unimplemented, fmt.Sprintf("skein: %s is not there yet%s", method, instead))
}
