package rangeapi

import (
	"context"
	"errors"
	"testing"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/transport"
)

// What the bus says of a write decides who may repeat it. A message that is too large is refused for
// good: whoever repeated it would do so for ever.
func TestErrorsOfTheBus(t *testing.T) {
	for _, c := range []struct {
		err  error
		want kverror.Kind
	}{
		{&transport.CallError{NotDelivered: true, Err: transport.ErrTooLarge}, kverror.RequestTooLarge},
		{&transport.CallError{NotDelivered: true, Err: transport.ErrNoRoute}, kverror.Unreachable},
		{&transport.CallError{NotDelivered: true, Err: transport.ErrQueueFull}, kverror.Unreachable},
		// The answer was too large: the write may have happened.
		{&transport.CallError{Err: transport.ErrTooLarge}, kverror.TimeoutConnectionLost},
		{&transport.CallError{Err: transport.ErrUnreachable}, kverror.TimeoutConnectionLost},
		{&transport.CallError{Err: context.DeadlineExceeded}, kverror.DeadlineExceeded},
		{&transport.RemoteError{Message: "no"}, kverror.Internal},
	} {
		if got := CallError(c.err, true); !errors.Is(got, c.want) {
			t.Errorf("%v is %v, want %v", c.err, got, c.want)
		}
	}
}
