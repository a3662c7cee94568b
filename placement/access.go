package placement

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// serveCredential answers with what is applied here, which is not older than the question. Its index is that of
// the last change: nodes hear of changes, and would wait for any later index in vain.
func (s *Service) serveCredential(user string) response {
	v := s.View()
	if v.Access == nil {
		return response{}
	}
	return response{Credential: v.Access.Credential(user, v.Access.Changed)}
}

// changeAccess proposes a change of users and roles. The secret of the tokens' MAC is made with the change
// that switches checks on, so that no token from before counts.
func (s *Service) changeAccess(ctx context.Context, term uint64, q *request) (response, error) {
	if err := s.knowsAccess("users and roles"); err != nil {
		return response{}, err
	}
	o := fsm.ChangeAccess{Caller: q.Caller, Change: q.Access}
	if q.Access.Kind == rights.Enable {
		o.Key = newSecret()
	}
	res := s.propose(ctx, term, o)
	return response{Index: res.Access}, res.Err
}

// awaitAccessHold is how long a leader keeps the question which nodes lack an index. It is far below an
// election timeout: who asks takes a leader that is silent for so long for lost.
const awaitAccessHold = 50 * time.Millisecond

// serveAwaitAccess answers as soon as no node lacks an access index, or after a moment with those that do.
func (s *Service) serveAwaitAccess(ctx context.Context, term uint64, q *request) response {
	timer := s.o.Clock.NewTimer(awaitAccessHold)
	defer timer.Stop()
	for {
		v, changed := s.machine.current()
		lacking, more := s.taken.lack(&v.Map, q.Index)
		lacking = slices.DeleteFunc(lacking, func(id keyspace.NodeID) bool {
			return q.Silence > 0 && s.taken.silent(term, id, s.o.Clock.Now()) > q.Silence
		})
		if len(lacking) == 0 {
			return response{}
		}
		select {
		case <-more:
		case <-changed:
		case <-timer.C():
			return response{Lacking: lacking}
		case <-ctx.Done():
			return response{Lacking: lacking}
		}
	}
}

// takenViews has the access index that each node has said to have taken in. This stays true when another
// node leads. It also stays true when the node starts again. The node has no view lease then, and does not
// go by a state from before rights were checked.
type takenViews struct {
	mu sync.Mutex
	// byNode is guarded by mu; more is closed and made anew when a node has said something.
	byNode map[keyspace.NodeID]keyspace.AccessIndex
	more   chan struct{}
	// heard is when this node has last answered each node, which counts a view lease from its question. It is guarded
	// by mu, as are term and since: this node leads in the term since then, and no answer of an earlier leader is to a
	// later question.
	heard map[keyspace.NodeID]clock.Time
	term  uint64
	since clock.Time
}

func (t *takenViews) init() {
	t.byNode, t.more = map[keyspace.NodeID]keyspace.AccessIndex{}, make(chan struct{})
	t.heard = map[keyspace.NodeID]clock.Time{}
}

// lead notes that this node leads in a term from now on.
func (t *takenViews) lead(term uint64, now clock.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.term, t.since = term, now
}

// silent returns for how long a node has certainly got no answer to a question that it has asked since, as the leader
// of the term knows. It is 0 in another term.
func (t *takenViews) silent(term uint64, node keyspace.NodeID, now clock.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if term != t.term {
		return 0
	}
	return now.Sub(max(t.since, t.heard[node]))
}

// note notes that a node has taken an index in. Its question is answered by what is applied later.
func (t *takenViews) note(node keyspace.NodeID, at keyspace.AccessIndex, now clock.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.heard[node] = now
	if at <= t.byNode[node] {
		return
	}
	t.byNode[node] = at
	close(t.more)
	t.more = make(chan struct{})
}

// lack returns which of the map's nodes have not taken the index in, and a channel that is closed when
// fewer may be. All started nodes count, because draining nodes and learners serve clients too.
func (t *takenViews) lack(m *fsm.Map, at keyspace.AccessIndex) (lacking []keyspace.NodeID, more <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, n := range m.NodeRows() {
		if n.State.Started() && t.byNode[id] < at {
			lacking = append(lacking, id)
		}
	}
	slices.Sort(lacking)
	return lacking, t.more
}

// accessRowsBytes bounds the rows of users and roles in one answer, but for a single larger one.
const accessRowsBytes = 256 << 10

// serveAccessRows answers with rows of users and roles behind a key, for a copy of the whole store.
func (s *Service) serveAccessRows(after []byte) response {
	v := s.View()
	if v.Access == nil {
		return response{}
	}
	rows, more := v.Access.Rows(after, accessRowsBytes)
	return response{MapVersion: v.Access.Changed, AccessRows: rows, More: more}
}
