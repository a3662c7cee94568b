package etcdapi

import (
	"context"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// Users are who may do what.
type Users struct {
	// Gate says who sends each request.
	Gate *auth.Gate
	// Holds says whether the gate's view is new enough for what asks no sequencer: serializable reads, and
	// events of watchers. Nil means that it always is. It counts while checks are on.
	Holds func() bool
	// Tokens makes the tokens of those who log in, and Passwords compares and hashes passwords.
	Tokens    auth.Tokens
	Passwords *auth.Passwords
	// Records has the users and roles.
	Records AccessRecords
	// ClientCertAuth says that a client's certificate names its user.
	ClientCertAuth bool
	// InsecureAdmin lets everybody command the cluster while checks are off, from wherever they come.
	InsecureAdmin bool
}

type callerKey struct{}

// actingKey is for the caller in whose name this process calls its own services.
type actingKey struct{}

// claimKey is for the auth.Claim of a request that is no gRPC call.
type claimKey struct{}

// acting returns a context in which the services act for the caller, with the rights of their users as they are
// then.
func acting(ctx context.Context, c *auth.Caller) context.Context {
	return context.WithValue(ctx, actingKey{}, c)
}

// identify returns who sends the request of a context, which has a deadline.
func (s *Server) identify(ctx context.Context) (*auth.Caller, error) {
	if c, ok := ctx.Value(actingKey{}).(*auth.Caller); ok {
		return s.opts.Users.Gate.Again(c)
	}
	claim, ok := ctx.Value(claimKey{}).(auth.Claim)
	if !ok {
		claim = auth.ReadClaim(ctx, s.opts.Users.ClientCertAuth)
	}
	return s.opts.Users.Gate.Identify(ctx, claim)
}

// noWait is a context with another one's values, which has ended: nobody waits in it.
type noWait struct{ context.Context }

var past = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// Done implements context.Context.
func (noWait) Done() <-chan struct{} { return past }

// Err implements context.Context.
func (noWait) Err() error { return context.Canceled }

// allowed returns who sends the request, if the check allows it. A denial follows the rights of a moment after
// the call: whoever was told that a right was granted has it at every node. It takes the request timeout at most:
// a stream has no bound of its own, and a token may be ahead of this node.
func (s *Server) allowed(ctx context.Context, check func(*auth.Caller) error) (*auth.Caller, error) {
	if off := s.opts.Users.Gate.Off(); off != nil && check(off) == nil {
		return off, nil // the usual way, which costs next to nothing
	}
	inner := s.timers.LazyDeadline(ctx, s.opts.RequestTimeout)
	defer inner.End()
	c, denied := s.check(inner, check)
	if denied == nil || inner.Err() != nil {
		return c, denied
	}
	err := s.confirm.Do(inner)
	if err == nil {
		return s.check(inner, check)
	}
	own, _ := inner.Deadline()
	if by, bounded := ctx.Deadline(); inner.Err() != nil && bounded && !own.Before(by) {
		<-ctx.Done() // its own timer fires now, and the caller looks at that for what to say
		return nil, kverror.Of(ctx.Err())
	}
	if inner.Err() != nil && ctx.Err() == nil {
		err = kverror.New(kverror.NoLeader, "the placement group does not say in time who may do what")
	}
	return nil, err
}

func (s *Server) check(ctx context.Context, check func(*auth.Caller) error) (*auth.Caller, error) {
	c, err := s.identify(ctx)
	if err == nil {
		err = check(c)
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// permitted is allowed for a message, as the client sent it. It returns the context in which the message is served.
func (s *Server) permitted(ctx context.Context, m proto.Message) (context.Context, *auth.Caller, error) {
	c, err := s.allowed(ctx, func(c *auth.Caller) error { return auth.Check(c, m) })
	if err != nil {
		return nil, nil, kverror.GRPC(err)
	}
	return keyspace.WithPermit(ctx, c.Permit()), c, nil
}

// begin checks who may call a method, as far as that does not depend on the message. It returns the context in
// which the call is served.
func (s *Server) begin(ctx context.Context, rule auth.Rule) (context.Context, error) {
	if rule == auth.Open || rule == auth.ByRequest {
		return ctx, nil
	}
	c, err := s.allowed(ctx, func(c *auth.Caller) error {
		if c.Off() && rule.Commands() {
			return s.fromHere(ctx, commands)
		}
		err := rule.Begin(c)
		if err != nil && rule.Commands() && s.isLoading() {
			return s.fromHere(ctx, commands) // whoever began the load may end it: its users serve nobody before
		}
		return err
	})
	if err != nil {
		err = kverror.GRPC(err)
		if rule == auth.ByParts {
			err = status.Error(codes.Unknown, status.Convert(err).Message()) // as etcd's own client words it
		}
		return nil, err
	}
	ctx = context.WithValue(ctx, callerKey{}, c)
	return keyspace.WithPermit(ctx, c.Permit()), nil
}

// callerOf returns who was found to send the request of a context by begin.
func callerOf(ctx context.Context) *auth.Caller {
	c, ok := ctx.Value(callerKey{}).(*auth.Caller)
	if !ok {
		c, ok = ctx.Value(actingKey{}).(*auth.Caller)
	}
	if !ok {
		panic("etcdapi: a call whose caller nobody has looked for")
	}
	return c
}

// holds refuses what asks no sequencer, while this node may not know of rights that were taken away.
func (s *Server) holds() error {
	u := s.opts.Users
	if v := u.Gate.View(); u.Holds == nil || v == nil || !v.Rights.Enabled || u.Holds() {
		return nil
	}
	return kverror.GRPC(kverror.New(kverror.NoLeader, "this node has not heard lately who may do what"))
}

// held is asked once the data of a serializable read are here: nobody may have taken the caller's rights away before
// the data came to be.
func (s *Server) held(c *auth.Caller) error {
	if err := s.holds(); err != nil {
		return err
	}
	if v := s.opts.Users.Gate.View(); v.Rights.Access > c.Access {
		return kverror.GRPC(kverror.New(kverror.AccessChanged, "at index %d, and the caller was checked at %d", v.Rights.Access, c.Access))
	}
	return nil
}

// again runs a call until it is not refused any more for rights that were taken away after the caller was checked.
// Each run checks anew. Such a refusal has changed nothing.
func (s *Server) again(ctx context.Context, run func(context.Context) error) error {
	return s.againFrom(ctx, s.opts.Users.Gate.View(), run)
}

// againFrom is again. The first run is checked by the view, or by a newer one.
func (s *Server) againFrom(ctx context.Context, before *auth.View, run func(context.Context) error) error {
	for ; ; before = s.opts.Users.Gate.View() {
		err := run(ctx)
		if !kverror.IsAccessChanged(err) {
			return err
		}
		inner, cancel := context.WithTimeout(ctx, s.opts.RequestTimeout)
		late := s.opts.Users.Gate.Past(inner, before)
		cancel()
		if late != nil {
			return err
		}
	}
}

// confirmer brings the gate to the placement group's state of a moment after the call. Many calls share a question:
// those that come while one is asked share the next.
type confirmer struct {
	ask func() error

	mu   sync.Mutex
	next *confirmation // guarded by mu; those who wait for it share it
	busy bool          // guarded by mu; a question is asked
}

type confirmation struct {
	done chan struct{}
	err  error
}

// Do returns when the gate has a view that is not older than the call.
func (f *confirmer) Do(ctx context.Context) error {
	f.mu.Lock()
	if f.next == nil {
		f.next = &confirmation{done: make(chan struct{})}
	}
	mine := f.next
	if !f.busy {
		f.busy = true
		go f.run()
	}
	f.mu.Unlock()
	select {
	case <-mine.done:
		return mine.err
	case <-ctx.Done():
		return kverror.Of(ctx.Err())
	}
}

// run asks while somebody waits.
func (f *confirmer) run() {
	for {
		f.mu.Lock()
		now := f.next
		f.next = nil
		if now == nil {
			f.busy = false
			f.mu.Unlock()
			return
		}
		f.mu.Unlock()
		now.err = f.ask()
		close(now.done)
	}
}

// reachPlacement brings the gate to what the placement group has now, unless the server ends before.
func (s *Server) reachPlacement() error {
	_, err := s.knowNow(s.life)
	return err
}

// knowNow returns the view of a moment after the call.
func (s *Server) knowNow(ctx context.Context) (*auth.View, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.opts.RequestTimeout, errTimedOut)
	defer cancel()
	now, err := s.opts.Users.Records.Credential(ctx, rights.Root)
	if err == nil {
		err = s.opts.Users.Gate.Reach(ctx, now.Index)
	}
	if err != nil {
		return nil, kverror.New(kverror.NoLeader, "ask the placement group who may do what: %v", err)
	}
	return s.opts.Users.Gate.View(), nil
}
