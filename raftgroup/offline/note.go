package offline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// Note says which plan has changed, or is changing, the groups of a node.
type Note struct {
	Version uint64 `json:"version"`
	// Plan is the plan's id. Done says that all that it says of this node is durable.
	Plan string `json:"plan"`
	Done bool   `json:"done"`
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
