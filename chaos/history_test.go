package chaos

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/kverror"
)

// kind is what an operation does.
type kind uint8

const (
	// insert puts a key that nobody else ever writes.
	insert kind = iota
	// put puts a register and reads its previous value.
	put
	// get reads a register.
	get
	// compare puts a register if it has the value old, and otherwise reads it.
	compare
	// remove deletes a register and, in the same transaction, puts a marker that nobody
	// else ever writes.
	remove
	// scan reads the registers from key up to end, which lie in two ranges.
	scan
	kinds
)

func (k kind) String() string {
	return [kinds]string{"insert", "put", "get", "compare", "remove", "scan"}[k]
}

func (k kind) writes() bool { return k != get && k != scan }

// outcome is what a client knows about its operation.
type outcome uint8

const (
	// unknown: it may have taken effect, or may still do so.
	unknown outcome = iota
	// answered: there is an answer.
	answered
	// refused: there is an error that says that nothing was done and nothing will be.
	refused
)

func (o outcome) String() string { return [...]string{"unknown", "answered", "refused"}[o] }

// kv is a key as an answer shows it; the zero kv means no key.
type kv struct {
	key, value           string
	create, mod, version int64
}

func kvOf(p *mvccpb.KeyValue) kv {
	if p == nil {
		return kv{}
	}
	return kv{string(p.Key), string(p.Value), p.CreateRevision, p.ModRevision, p.Version}
}

// op is one operation of a client.
type op struct {
	id, client, node int
	kind             kind
	key              string
	value            string // insert, put, compare: the unique value that it writes
	old              string // compare
	end              string // scan
	marker           string // remove

	// call and ret are places in the order of all calls and returns; ret is 0 without
	// an answer.
	call, ret int64
	outcome   outcome
	err       error
	rev       int64 // the header's revision
	did       bool  // compare: it matched; remove: the key existed
	// seen is what get, scan and a failed compare read, and what put and remove found.
	seen []kv
}

// changes says whether an answered operation changed something.
func (o *op) changes() bool { return o.kind.writes() && (o.kind != compare || o.did) }

// found is the state of its one key in an answered operation, the zero kv for none.
func (o *op) found() kv {
	if len(o.seen) == 0 {
		return kv{}
	}
	return o.seen[0]
}

func (o *op) String() string {
	s := fmt.Sprintf("#%d client %d node %d [%d %d] %s %s", o.id, o.client, o.node+1, o.call, o.ret, o.kind, o.key)
	if o.end != "" {
		s += " to " + o.end
	}
	if o.old != "" {
		s += " from " + brief(o.old)
	}
	if o.value != "" {
		s += " := " + brief(o.value)
	}
	s += fmt.Sprintf(" => %s", o.outcome)
	if o.outcome != answered {
		return fmt.Sprintf("%s %v", s, o.err)
	}
	s += fmt.Sprintf(" at %d did=%t", o.rev, o.did)
	for _, k := range o.seen {
		s += " " + k.String()
	}
	return s
}

func (k kv) String() string {
	return fmt.Sprintf("{%s=%s create %d mod %d version %d}", k.key, brief(k.value), k.create, k.mod, k.version)
}

// brief is the part of a value by which it differs from others.
func brief(value string) string { return value[:min(len(value), 16)] }

// history collects the operations of all clients.
type history struct {
	tick     atomic.Int64
	answered atomic.Int64

	mu  sync.Mutex
	all []*op // guarded by mu, in the order of their calls
}

// begin records a client's call.
func (h *history) begin(o *op) *op {
	h.mu.Lock()
	defer h.mu.Unlock()
	o.id, o.call, o.err = len(h.all), h.tick.Add(1), errors.New("no answer")
	h.all = append(h.all, o)
	return o
}

// end records the return of a call; the caller has filled in the answer before.
func (h *history) end(o *op, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch o.err = err; {
	case err == nil:
		o.outcome, o.ret = answered, h.tick.Add(1)
		h.answered.Add(1)
	case refuses(err):
		o.outcome, o.ret = refused, h.tick.Add(1)
	}
}

// ops returns all operations in the order of their calls.
func (h *history) ops() []*op {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.all)
}

func (h *history) write(w io.Writer) error {
	for _, o := range h.ops() {
		if _, err := fmt.Fprintln(w, o); err != nil {
			return err
		}
	}
	return nil
}

// refusals are the server's texts for "nothing was done": each is used only by
// kinds with that fate.
var refusals = sync.OnceValue(func() map[string]bool {
	texts := map[string]bool{}
	for _, row := range kverror.Table() {
		text, fate := status.Convert(row.GRPC).Message(), row.Fate == kverror.NotApplied
		if before, seen := texts[text]; seen {
			fate = fate && before
		}
		texts[text] = fate
	}
	return texts
})

func refuses(err error) bool { return refusals()[message(err)] }

// message is an error's text without the additions of clientv3 and gRPC.
func message(err error) string {
	if s, ok := status.FromError(err); ok {
		return s.Message()
	}
	return err.Error()
}
