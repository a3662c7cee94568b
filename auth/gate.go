package auth

import (
	"context"
	"crypto/sha256"
	"errors"
	"math"
	"sync"
	"sync/atomic"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

const (
	// maxCallers bounds the tokens whose callers a node remembers, and likewise the common names.
	maxCallers = 65536
	// maxSpans bounds the spans of keys of the users among them, of 48 bytes each. The largest user that
	// rights allow has fewer.
	maxSpans = 1 << 20
	// shards is a power of two: requests seldom wait for each other.
	shards = 64
)

// Gate says who sends each request of a node, by the newest view that the node has.
type Gate struct {
	clk    clock.Clock
	tokens Tokens
	now    atomic.Pointer[moment]
	mu     sync.Mutex // orders the changes of now
}

// moment is a view while it is the newest one.
type moment struct {
	view *View // nil before the first
	// off is the caller of all requests where checks are off.
	off     *Caller
	callers *callers
	next    chan struct{} // closed when there is a newer view
}

// NewGate returns a gate that nobody passes before its first view.
func NewGate(clk clock.Clock, tokens Tokens) *Gate {
	g := &Gate{clk: clk, tokens: tokens}
	g.now.Store(&moment{next: make(chan struct{})})
	return g
}

// Update takes a view in, unless the gate has had it or a later one. An Identify that begins after it returns
// nobody whose rights are of an earlier view.
func (g *Gate) Update(v *View) {
	g.mu.Lock()
	defer g.mu.Unlock()
	last := g.now.Load()
	if last.view != nil && (v.Index < last.view.Index || v.Index == last.view.Index && v.Permits == last.view.Permits) {
		return
	}
	m := &moment{view: v, next: make(chan struct{})}
	if last.view != nil && v.Rights.Meta == last.view.Rights.Meta && v.Permits == last.view.Permits && v.Keys.same(&last.view.Keys) {
		// Each change moves the auth revision, or the index since when checks are on. So these are the
		// same rights, at a later index.
		m.off, m.callers = last.off, last.callers
	} else {
		m.callers = newCallers()
		if !v.Rights.Enabled {
			m.off = v.nobody()
		}
	}
	g.now.Store(m)
	close(last.next)
}

// Identify returns who sends a request: the user of its token, else the one whom its certificate's common name
// means, else nobody. It does not refuse nobody, or an identity of an old auth revision. etcd does that later,
// and so do the Caller's methods.
//
// A token may be ahead of this node, which then waits for the view until the context ends. So that context
// needs a deadline, also for streams.
func (g *Gate) Identify(ctx context.Context, c Claim) (*Caller, error) {
	for {
		m := g.now.Load()
		if m.off != nil {
			return m.off, nil
		}
		if m.view == nil {
			if err := g.wait(ctx, m, 0); err != nil {
				return nil, kverror.New(kverror.NoLeader, "this node does not know yet who may do what: %v", err)
			}
			continue
		}
		caller, err := g.identify(m, &c)
		if err == nil {
			return caller, nil
		}
		var ahead AheadOf
		if !errors.As(err, &ahead) || g.wait(ctx, m, ahead.Index) != nil {
			return nil, err
		}
	}
}

// Again returns who a caller is in the newest view: the same user with the rights of now, whatever has become of
// the token or certificate since. A user who was deleted, or has a new password, is another one. One of whom the gate
// has heard since is the same for as long as the identity is current.
func (g *Gate) Again(c *Caller) (*Caller, error) {
	m := g.now.Load()
	switch {
	case m.off != nil:
		return m.off, nil
	case !c.known:
		nobody := m.view.nobody()
		nobody.Node = c.Node
		return nobody, nil
	case c.Index == m.view.Index && c.stale == nil:
		return c, nil
	}
	since := m.view.since(c.User)
	switch {
	case c.since == 0 && since != 0:
		// This node had not heard of the user. The identity stands for what it stood for, and no more.
		return g.caller(m, Identity{User: c.User, Revision: c.Revision}), nil
	case since != c.since:
		return nil, kverror.New(kverror.InvalidAuthToken, "user %q is another one since index %d, or is gone", c.User, since)
	}
	return g.caller(m, Identity{User: c.User, Revision: m.view.Rights.Revision}), nil
}

// View returns the newest view, nil before the first.
func (g *Gate) View() *View { return g.now.Load().view }

// Reach returns when the gate has a view of the index or a later one.
func (g *Gate) Reach(ctx context.Context, index uint64) error {
	return g.wait(ctx, g.now.Load(), index)
}

// Off returns the caller of all requests while checks are off, else nil.
func (g *Gate) Off() *Caller { return g.now.Load().off }

// Past returns when the gate has a view in which somebody may do less than in another one, which may be nil.
func (g *Gate) Past(ctx context.Context, v *View) error {
	for m := g.now.Load(); m.view == nil || v != nil && m.view.Rights.Access <= v.Rights.Access; {
		if err := g.wait(ctx, m, m.index()+1); err != nil {
			return err
		}
		m = g.now.Load()
	}
	return nil
}

func (m *moment) index() uint64 {
	if m.view == nil {
		return 0
	}
	return m.view.Index
}

// wait returns when the gate has a view of the index, newer than that of the moment.
func (g *Gate) wait(ctx context.Context, m *moment, index uint64) error {
	for m.view == nil || m.view.Index < index {
		select {
		case <-m.next:
			m = g.now.Load()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func (g *Gate) identify(m *moment, c *Claim) (*Caller, error) {
	if c.HasToken {
		return g.byToken(m, c.Token)
	}
	nobody := m.view.nobody()
	if c.Certificate == nil {
		return nobody, nil
	}
	var role bool
	if nobody.Node, role = nodeOf(c.Certificate); role {
		return nobody, nil
	}
	return g.byName(m, c.Certificate.Subject.CommonName), nil
}

func (g *Gate) byToken(m *moment, token string) (*Caller, error) {
	digest := digestOf(token)
	at, now := m.callers.tokens.at(digest), g.clk.Wall().UnixNano()
	if h, ok := at.get(digest, 0); ok && h.since <= now && now < h.until {
		return h.caller, nil
	}
	id, err := g.tokens.Verify(m.view, token)
	if err != nil {
		return nil, err
	}
	h := held{g.caller(m, id), now, id.Until.UnixNano()}
	at.note(digest, 0, func(held) held { return h })
	return h.caller, nil
}

// byName returns the caller whom a common name means. It stands for the auth revision of the moment.
func (g *Gate) byName(m *moment, name string) *Caller {
	digest := digestOf(name)
	at := m.callers.names.at(digest)
	if h, ok := at.get(digest, 0); ok {
		return h.caller
	}
	h := held{caller: g.caller(m, Identity{User: name, Revision: m.view.Rights.Revision})}
	at.note(digest, 0, func(held) held { return h })
	return h.caller
}

// caller makes a caller. If those of the moment have too many spans, all of them are forgotten.
func (g *Gate) caller(m *moment, id Identity) *Caller {
	subject, full := m.callers.subject(m.view.Rights, id.User)
	if full {
		g.mu.Lock()
		defer g.mu.Unlock()
		if now := g.now.Load(); now.callers == m.callers {
			fresh := *now
			fresh.callers = newCallers()
			g.now.Store(&fresh)
		}
	}
	return m.view.caller(id, subject)
}

// callers are what is remembered of those who were identified while the rights and keys were the same.
type callers struct {
	tokens, names sharded

	mu       sync.Mutex
	subjects map[string]*rights.Subject // of users that there are
	spans    int
}

// held is a caller who need not be identified again between two times, in nanoseconds of the wall clock. If
// that is set back, the caller is identified again. The monotonic clock would cost as much as all the rest.
type held struct {
	caller       *Caller
	since, until int64
}

// sharded remembers callers by a digest: tokens themselves stay nowhere.
type sharded [shards]*recent[held]

// noExpiry has nothing forgotten for its age: what is held knows its own time.
const noExpiry = math.MaxInt64

func newCallers() *callers {
	c := &callers{subjects: map[string]*rights.Subject{}}
	for i := range shards {
		for _, s := range []*sharded{&c.tokens, &c.names} {
			s[i] = newRecent[held](noExpiry, maxCallers/shards)
		}
	}
	return c
}

func (s *sharded) at(digest recentID) *recent[held] { return s[digest[0]%shards] }

func digestOf(text string) recentID {
	var short [512]byte // most tokens fit, and take no memory
	sum := sha256.Sum256(append(short[:0], text...))
	return recentID(sum[:])
}

// subject returns what a user may do, or nil if there is no such user. full says that too many spans are
// remembered.
func (c *callers) subject(state *rights.State, user string) (s *rights.Subject, full bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.subjects[user]; s != nil {
		return s, false
	}
	s, ok := state.Subject(user)
	if !ok {
		return nil, false
	}
	c.subjects[user] = s
	c.spans += s.Spans()
	return s, c.spans > maxSpans
}
