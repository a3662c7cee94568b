package transport

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Class says which queue and stream a message shares. Classes do not wait for each
// other.
type Class uint8

// The classes, the most urgent first.
const (
	// ClassControl is liveness, heartbeats and votes: few messages, never late.
	ClassControl Class = iota
	// ClassRaft is raft's data: entries and their acknowledgements.
	ClassRaft
	// ClassRequest is what clients wait for: requests, revisions, feeds.
	ClassRequest
	// ClassBulk is snapshots. It has a connection of its own.
	ClassBulk

	numClasses = 4
)

// String returns the class's name in logs and metrics.
func (c Class) String() string {
	switch c {
	case ClassControl:
		return "control"
	case ClassRaft:
		return "raft"
	case ClassRequest:
		return "request"
	case ClassBulk:
		return "bulk"
	}
	return fmt.Sprintf("class-%d", uint8(c))
}

// Kind says what a session carries. A peer is fully reachable by two sessions, one of
// each kind.
type Kind uint8

// The kinds of sessions.
const (
	// KindMain carries every class but ClassBulk. The peer is up while it stands.
	KindMain Kind = iota
	// KindBulk carries ClassBulk on a connection of its own: within one connection bulk
	// data would delay all other data. It ends with the main session.
	KindBulk

	numKinds = 2
)

// String returns the kind's name in logs.
func (k Kind) String() string {
	if k == KindBulk {
		return "bulk"
	}
	return "main"
}

func kindOf(c Class) Kind {
	if c == ClassBulk {
		return KindBulk
	}
	return KindMain
}

// PeerState is what the bus knows about a peer.
type PeerState struct {
	// Up says that a session with the peer stands: each side has identified itself to
	// the other.
	Up bool
	// Boot is the boot id that the peer last sent, 0 if it never did. A changed id means
	// that the peer has restarted.
	Boot keyspace.BootID
	// RTT is the last measured round trip over the control class, 0 if unknown.
	RTT time.Duration
	// Since is when Up or Boot last changed or a session replaced another.
	Since clock.Time
}

// SendHandler gets one-way messages in order, on the goroutine that reads the message's
// stream. It must not block, because later messages wait for it. The payload belongs to
// the handler.
type SendHandler func(from keyspace.NodeID, payload []byte)

// CallHandler answers calls, each in a goroutine of its own. ctx ends at the caller's
// deadline, when the caller gives up, when the session ends and when the bus closes.
// The payload belongs to the handler, the answer to the bus. The caller gets a
// *RemoteError as it is, and of any other error only the text.
type CallHandler func(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error)

// StreamHandler serves one stream in a goroutine of its own. The bus closes the stream
// with the returned error. ctx ends with the stream.
type StreamHandler func(ctx context.Context, from keyspace.NodeID, first []byte, s Stream) error

// Stream is a sequence of messages each way between the opener of a stream and its
// handler. One goroutine may use Send while another uses Recv.
type Stream interface {
	// Send queues one message. It waits, until ctx ends, for credit from the receiver
	// and for room in the queue. After the other side has closed it returns what Recv
	// returns then. The payload is copied and stays the caller's.
	Send(ctx context.Context, payload []byte) error
	// Recv returns the next message. It belongs to the caller, who may pass its memory
	// to Recycle afterwards. After the last message Recv returns io.EOF if the other
	// side closed with nil, and the other side's *RemoteError if it closed with an
	// error. If the session was lost, the error is ErrUnreachable.
	Recv(ctx context.Context) ([]byte, error)
	// Close ends the stream in both directions. The other side gets every message sent
	// before, then err; later messages from it are discarded. Only the first Close
	// counts.
	Close(err error)
}

// Errors of the bus. All but ErrUnreachable mean that the message was certainly
// not delivered.
var (
	// ErrQueueFull says that the byte budget of the peer's class is used up.
	ErrQueueFull = errors.New("transport: queue full")
	// ErrNoRoute says that the peer is unknown or no session with it stands.
	ErrNoRoute = errors.New("transport: no route")
	// ErrTooLarge says that a payload exceeds what the bus or the peer accepts.
	ErrTooLarge = errors.New("transport: message too large")
	// ErrPeerBusy says that the peer runs as many handlers for us as it allows.
	ErrPeerBusy = errors.New("transport: peer busy")
	// ErrNoMethod says that the method has no handler (of this form), here or there.
	ErrNoMethod = errors.New("transport: no such method")
	// ErrClosed says that the bus, here or at the peer, is closed or closing.
	ErrClosed = errors.New("transport: closed")
	// ErrUnreachable says that the session was lost. NotDelivered tells more.
	ErrUnreachable = errors.New("transport: peer unreachable")
	// ErrStreamClosed says that the stream was closed on this side.
	ErrStreamClosed = errors.New("transport: stream closed")
)

// CallError is the error of a Call or OpenStream without an answer from the handler.
// Err is one of the errors above or the context's.
type CallError struct {
	Peer   keyspace.NodeID
	Method Method
	// NotDelivered says that the handler certainly did not and will not run.
	// Otherwise its fate is unknown.
	NotDelivered bool
	Err          error
}

// Error implements error.
func (e *CallError) Error() string {
	fate := "fate unknown"
	if e.NotDelivered {
		fate = "not delivered"
	}
	return fmt.Sprintf("call %s to node %s: %v (%s)", e.Method, e.Peer, e.Err, fate)
}

// Unwrap returns Err.
func (e *CallError) Unwrap() error { return e.Err }

// NotDelivered says that the message behind an error of Send, Call or OpenStream has
// certainly not reached a handler and never will. It is false for a handler's own error
// and for an unknown fate.
func NotDelivered(err error) bool {
	if ce, ok := errors.AsType[*CallError](err); ok {
		return ce.NotDelivered
	}
	for _, e := range []error{ErrQueueFull, ErrNoRoute, ErrTooLarge, ErrPeerBusy, ErrNoMethod, ErrClosed} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// RemoteError is an error from a handler. Code and Detail are the handler's; the bus
// sets Code 0 for errors that are no *RemoteError.
type RemoteError struct {
	Code    uint32
	Message string
	Detail  []byte
}

// Error implements error.
func (e *RemoteError) Error() string { return e.Message }
