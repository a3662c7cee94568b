package judge

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Outcome says what a client knows about its operation.
type Outcome uint8

// The outcomes.
const (
	// Answered: there is a response.
	Answered Outcome = iota
	// Refused: there is an error that says that nothing was done and nothing will be.
	Refused
	// Unknown: the operation may have taken effect, or may still do so.
	Unknown
)

// Op is one operation of a client.
type Op struct {
	ID     int
	Client int
	Node   keyspace.NodeID
	// Request is one of etcd's Range-, Put-, DeleteRange-, Txn- and CompactionRequests,
	// or a request about leases.
	Request proto.Message
	// Call and Return are places in the order of all calls and returns of the history;
	// Return is 0 before the return. Began and Ended are virtual times.
	Call, Return int64
	Began, Ended time.Duration

	Outcome  Outcome
	Response proto.Message // if Answered
	Err      error         // if not
}

// Revision is the header's revision of an answered operation.
func (o *Op) Revision() int64 { return revisionOf(o.Response) }

// Changes says whether an answered operation changed something, by its answer.
func (o *Op) Changes() bool { return changed(o.Response) }

// Definite says whether the client knows the fate of the operation.
func (o *Op) Definite() bool { return o.Outcome != Unknown }

// String is the operation on one line.
func (o *Op) String() string {
	s := fmt.Sprintf("#%d client %d node %s [%d %d] %v..%v %s", o.ID, o.Client, o.Node, o.Call, o.Return, o.Began, o.Ended, show(o.Request))
	switch o.Outcome {
	case Answered:
		return s + " => " + show(o.Response)
	case Refused:
		return s + " => refused: " + o.Err.Error()
	default:
		return fmt.Sprintf("%s => unknown: %v", s, o.Err)
	}
}

func show(m proto.Message) string {
	return fmt.Sprintf("%s{%s}", m.ProtoReflect().Descriptor().Name(), prototext.MarshalOptions{}.Format(m))
}

// History collects the operations of all clients. It may be used from many
// goroutines.
type History struct {
	tick atomic.Int64

	mu sync.Mutex
	// ops, guarded by mu, are in the order in which they were recorded.
	ops []*Op
	// start, guarded by mu, is what is there before the first operation, nil for nothing.
	start *Loaded
}

// Begin records a client's call.
func (h *History) Begin(client int, node keyspace.NodeID, req proto.Message, now time.Duration) *Op {
	h.mu.Lock()
	defer h.mu.Unlock()
	o := &Op{ID: len(h.ops), Client: client, Node: node, Request: req, Began: now, Outcome: Unknown, Err: errNoAnswer, Call: h.tick.Add(1)}
	h.ops = append(h.ops, o)
	return o
}

// errNoAnswer is the error of an operation that never returned.
var errNoAnswer = fmt.Errorf("no answer: %w", kverror.Canceled)

// End records the return of a call. If lost is set, the client has not received it.
func (h *History) End(o *Op, resp proto.Message, err error, lost bool, now time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o.Ended = now
	switch {
	case lost:
		// Return stays 0.
	case err == nil:
		o.Outcome, o.Response, o.Err, o.Return = Answered, resp, nil, h.tick.Add(1)
	default:
		o.Err = err
		if kverror.Of(err).Fate() == kverror.NotApplied {
			o.Outcome, o.Return = Refused, h.tick.Add(1)
		}
	}
}

// Start returns what is there before the first operation, nil for nothing.
func (h *History) Start() *Loaded {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.start
}

// Add records an answered operation, whose Call and Return were taken from the history before.
func (h *History) Add(o *Op) {
	h.mu.Lock()
	defer h.mu.Unlock()
	o.ID = len(h.ops)
	h.ops = append(h.ops, o)
}

// BeginWith lets the history begin with a store that is there before the first operation.
func (h *History) BeginWith(start *Loaded) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.start = start
}

// Now takes the next place in the order of all calls and returns.
func (h *History) Now() int64 { return h.tick.Add(1) }

// Ops returns all operations in the order of their calls.
func (h *History) Ops() []*Op {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.SortedStableFunc(slices.Values(h.ops), func(a, b *Op) int { return cmp.Compare(a.Call, b.Call) })
}

// WriteTo writes one line for each operation.
func (h *History) WriteTo(w io.Writer) (n int64, err error) {
	for _, o := range h.Ops() {
		k, err := fmt.Fprintln(w, o)
		n += int64(k)
		if err != nil {
			return n, fmt.Errorf("sim: write history: %w", err)
		}
	}
	return n, nil
}

func revisionOf(m proto.Message) int64 {
	h, ok := m.(interface{ GetHeader() *pb.ResponseHeader })
	if !ok {
		return 0
	}
	return h.GetHeader().GetRevision()
}

// changed says whether the operation with this response changed something.
func changed(m proto.Message) bool {
	switch r := m.(type) {
	case *pb.PutResponse:
		return true
	case *pb.DeleteRangeResponse:
		return r.GetDeleted() > 0
	case *pb.TxnResponse:
		for _, o := range r.GetResponses() {
			if changed(Inner(o)) {
				return true
			}
		}
	}
	return false
}

// Inner returns the response inside a transaction's.
func Inner(o *pb.ResponseOp) proto.Message {
	switch r := o.GetResponse().(type) {
	case *pb.ResponseOp_ResponsePut:
		return r.ResponsePut
	case *pb.ResponseOp_ResponseDeleteRange:
		return r.ResponseDeleteRange
	case *pb.ResponseOp_ResponseTxn:
		return r.ResponseTxn
	case *pb.ResponseOp_ResponseRange:
		return r.ResponseRange
	}
	return nil
}
