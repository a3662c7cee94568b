package offline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Note says which plan has changed, or is changing, the groups of a node.
type Note struct {
	Version uint64 `json:"version"`
	// Plan is the plan's id. Done says that all that it says of this node is durable.
	Plan string `json:"plan"`
	Done bool   `json:"done"`
	// Survivors are all nodes on which the plan is to be applied. A node that has applied it goes on only once it
	// knows that all of them have, and notes that in Together. Otherwise those that have not might go on by the
	// old members of a group, beside the new ones.
	Survivors []Survivor `json:"survivors,omitempty"`
	Together  bool       `json:"together,omitempty"`
}

// Survivor is a node on which a plan is to be applied.
type Survivor struct {
	Node keyspace.NodeID `json:"node"`
	Name string          `json:"name"`
}

// String returns the node's name, or its id where it has none.
func (s Survivor) String() string {
	if s.Name == "" {
		return s.Node.String()
	}
	return s.Name
}

// Awaits returns the other survivors of which self does not know yet that they have applied the plan.
func (n *Note) Awaits(self keyspace.NodeID) []Survivor {
	if n.Together {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(n.Survivors), func(s Survivor) bool { return s.Node == self })
}

// Number is the plan's id as nodes tell it one another, 0 for none.
func (n *Note) Number() (uint64, error) {
	if n.Plan == "" {
		return 0, nil
	}
	id, err := strconv.ParseUint(n.Plan, 16, 64)
	if err != nil {
		return 0, fmt.Errorf("offline: note of a recovery: plan %q: %w", n.Plan, err)
	}
	return id, nil
}

const noteVersion = 1

var noteKey = engine.NodeLocalKey([]byte("raftgroup/recovery"))

// ErrInterrupted says that a plan is only half applied.
var ErrInterrupted = errors.New("a recovery of this directory was interrupted")

// ReadNote returns the note of the newest plan; ok is false if there was none.
func ReadNote(e engine.Reader) (n Note, ok bool, err error) {
	b, ok, err := e.Get(noteKey)
	if err != nil || !ok {
		return n, false, err
	}
	if err := json.Unmarshal(b, &n); err != nil {
		return n, false, fmt.Errorf("offline: note of a recovery: %w", err)
	}
	if err := keyspace.CheckVersion("note of a recovery", n.Version, noteVersion); err != nil {
		return n, false, fmt.Errorf("offline: %w", err)
	}
	return n, true, nil
}

// WriteNote makes the note durable, and all that was committed before it.
func WriteNote(ctx context.Context, e *engine.Engine, n Note) error {
	n.Version = noteVersion
	v, err := json.Marshal(n)
	if err != nil {
		return fmt.Errorf("offline: note of a recovery: %w", err)
	}
	b := e.NewBatch()
	if err = b.Set(noteKey, v); err == nil {
		err = b.Commit()
	}
	if err == nil {
		err = e.Flush(ctx)
	}
	if err = errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("offline: note of a recovery: %w", err)
	}
	return nil
}

// Refuse returns an error where a plan is only half applied. The node must not start: its groups would
// disagree about their members.
func Refuse(e engine.Reader) error {
	n, ok, err := ReadNote(e)
	if err != nil || !ok || n.Done {
		return err
	}
	return fmt.Errorf("%w: run skein recover apply again with plan %s, or give --force-new-cluster again if that began it", ErrInterrupted, n.Plan)
}
