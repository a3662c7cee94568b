package etcdapi

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/kverror"
)

// errTimedOut is the cause of contexts that this package has ended.
var errTimedOut = errors.New("etcdapi: the request took longer than the request timeout")

// bounded bounds a request in time, by a deadline that crosses the bus with the request. wording
// turns the error that the request ended with into the client's. If this package's bound passed,
// and not the client's, that is a timeout of the server.
func (s *Server) bounded(ctx context.Context) (inner context.Context, cancel context.CancelFunc, wording func(error) error) {
	inner, cancel = context.WithTimeoutCause(ctx, s.opts.RequestTimeout, errTimedOut)
	return inner, cancel, func(err error) error {
		ours := ctx.Err() == nil && errors.Is(context.Cause(inner), errTimedOut)
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

// notYet is the answer of a missing method of an existing service.
func notYet(method, instead string) error {
	return status.Error(codes.Unimplemented, fmt.Sprintf("skein: %s is not there yet%s", method, instead))
}
