package rangeapi

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi/stages"
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

// mute answers every call with what has no record.
type mute struct{ Caller }

func (mute) Call(context.Context, keyspace.NodeID, transport.Method, []byte) ([]byte, error) {
	return AppendTxnAnswer(nil, &Revoked{}, nil)
}

// A request knows which other node it has asked last: without a record of that node the bus may have been slow.
func TestTheNodeThatWasAskedIsNoted(t *testing.T) {
	call := stages.NewCall(t.Context(), clock.StartStopwatch(), false)
	c := NewClient(1, nil, mute{})
	for _, node := range []keyspace.NodeID{2, 5} {
		if _, err := c.Txn(call, node, 7, 1, &Revoke{Lease: 9}); err != nil {
			t.Fatal(err)
		}
	}
	if s, _ := call.Slow(1, time.Second); !strings.HasPrefix(s.Cause, "bus to node 5, or the gateway: 1000 ms") {
		t.Errorf("%q", s.Cause)
	}
}
