package transport

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/skeindb/skein/keyspace"
)

type callResult struct {
	payload      []byte
	err          error
	notDelivered bool
}

// resultOf turns the status that ended a call or a stream into its result.
func resultOf(st status, payload []byte) (callResult, error) {
	switch st {
	case statusOK:
		return callResult{payload: payload}, nil
	case statusError:
		re, err := parseError(payload)
		if err != nil {
			return callResult{}, err
		}
		return callResult{err: re}, nil
	case statusBusy:
		return callResult{err: ErrPeerBusy, notDelivered: true}, nil
	case statusNoMethod:
		return callResult{err: ErrNoMethod, notDelivered: true}, nil
	case statusClosing:
		return callResult{err: ErrClosed, notDelivered: true}, nil
	case statusTooLarge:
		return callResult{err: ErrTooLarge}, nil
	case statusExpired:
		return callResult{err: context.DeadlineExceeded}, nil
	case statusNoRoute:
		return callResult{err: ErrNoRoute, notDelivered: true}, nil
	case statusLost:
		return callResult{err: ErrUnreachable}, nil
	}
	return callResult{}, fmt.Errorf("%w: status %d", errMalformed, st)
}

// statusOf turns a result that was got for another node into the status that gives it the
// same result, and the payload of its frame.
func statusOf(r callResult) (status, []byte) {
	if re, ok := r.err.(*RemoteError); ok { //nolint:errorlint // the bus made it, unwrapped
		return statusError, errorBody(re)
	}
	switch {
	case r.err == nil:
		return statusOK, r.payload
	case errors.Is(r.err, ErrNoMethod):
		return statusNoMethod, nil
	case r.notDelivered && (errors.Is(r.err, ErrPeerBusy) || errors.Is(r.err, ErrQueueFull)):
		return statusBusy, nil
	case r.notDelivered:
		return statusNoRoute, nil
	case errors.Is(r.err, ErrTooLarge):
		return statusTooLarge, nil
	case errors.Is(r.err, context.DeadlineExceeded):
		return statusExpired, nil
	}
	return statusLost, nil
}

// endOf returns what Recv returns at the end of a stream.
func endOf(r callResult, peer keyspace.NodeID) error {
	switch r.err.(type) { //nolint:errorlint // made by resultOf, unwrapped
	case nil:
		return io.EOF
	case *RemoteError:
		return r.err
	}
	return &CallError{Peer: peer, NotDelivered: r.notDelivered, Err: r.err}
}

// expired says whether a handler's error only repeats that the caller's time was up.
// The caller then sees its own context's error, not a remote one.
func expired(ctx context.Context, err error) bool {
	if _, ok := errors.AsType[*RemoteError](err); ok {
		return false
	}
	return errors.Is(err, context.DeadlineExceeded) && errors.Is(ctx.Err(), context.DeadlineExceeded)
}

// asRemote returns err as it would arrive over the network.
func asRemote(err error) *RemoteError {
	re, perr := parseError(errorBody(err))
	if perr != nil {
		panic("transport: error body: " + perr.Error())
	}
	return re
}
