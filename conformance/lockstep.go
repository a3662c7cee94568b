package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/adminapi"
)

// pair is an etcd and a Skein that have executed the same calls.
type pair struct {
	etcd, skein *store
	splits      splitter
	source      *source
	// outcomes counts the answers by kind and outcome.
	outcomes map[string]int
	calls    int
	// users are those as whom calls are made, nil where there are none.
	users *users
	// pipes are those to Skein's gateways, for calls that nobody makes as a user.
	pipes []*pipe
}

// callTimeout bounds one call: a store that hangs is a failure. It is long because a
// physical compaction waits 20 s for transactions that may still read, and a busy
// machine must not count as a difference.
const callTimeout = 2 * time.Minute

// lockstep makes calls one after the other, each at a random gateway, and returns the
// first difference.
func (p *pair) lockstep(ctx context.Context, calls, every int) error {
	if err := p.openPipes(ctx); err != nil {
		return err
	}
	for i := range calls {
		if i >= calls/8 && i%every == 0 {
			if p.users != nil {
				p.splits.tokens = p.users.ofRoot(p)
			}
			p.splits.split(p.source.splitKey())
		}
		gateway := p.source.IntN(len(p.skein.conns))
		if err := p.step(ctx, p.source.next(), gateway); err != nil {
			return err
		}
	}
	return errors.Join(p.splits.wait(), p.closePipes())
}

// step makes one call at both stores.
func (p *pair) step(ctx context.Context, c *call, gateway int) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	theirCtx, ourCtx := ctx, ctx
	if p.users != nil {
		var err error
		if theirCtx, ourCtx, err = p.identify(ctx, c, gateway); err != nil {
			return err
		}
	}
	var ours answer
	var wg sync.WaitGroup
	wg.Go(func() { ours = p.ask(ourCtx, c, gateway) })
	theirs := do(theirCtx, p.etcd.conns[0], c)
	wg.Wait()
	if p.users != nil {
		if err := p.learn(ctx, c, theirs, ours); err != nil {
			return fmt.Errorf("call %d, at node %d, %s: %w", p.calls, gateway+1, c, err)
		}
		if refusedOtherwise(c, theirs, ours) {
			ours = theirs
		}
	}
	p.take(c, theirs)
	theirs, err := p.asOf(theirCtx, c, theirs, ours)
	if err != nil {
		return fmt.Errorf("call %d, at node %d:\n  %s\n  %s: %w", p.calls, gateway+1, c, ours, err)
	}
	if diff := compare(theirs, ours); diff != "" {
		return fmt.Errorf("call %d, at node %d, differs:\n  %s\n%s", p.calls, gateway+1, c, diff)
	}
	return nil
}

// asOf replaces etcd's answer to a serializable read by its answer at the revision of
// Skein's answer. The node's own replicas may be behind, as a member of etcd may. Other
// answers stay unchanged.
func (p *pair) asOf(ctx context.Context, c *call, theirs, ours answer) (answer, error) {
	r, ok := c.request.(*pb.RangeRequest)
	if !ok || !r.GetSerializable() || ours.response == nil {
		return theirs, nil
	}
	at := ours.response.(*pb.RangeResponse).GetHeader().GetRevision()
	if at > p.source.revision {
		return theirs, fmt.Errorf("a serializable read at %d, the last revision is %d", at, p.source.revision)
	}
	if r.GetRevision() <= 0 && at < p.source.revision {
		r = proto.CloneOf(r)
		r.Revision = at
		theirs = do(ctx, p.etcd.conns[0], &call{kind: c.kind, request: r})
	}
	if theirs.response == nil && theirs.text == rpctypes.ErrorDesc(rpctypes.ErrGRPCCompacted) {
		p.outcomes[c.kind.name+": "+compactedThere]++
		return ours, nil // a replica behind the compaction still has it
	}
	if theirs.response != nil {
		theirs.response.(*pb.RangeResponse).Header.Revision = at
	}
	return theirs, nil
}

// compactedThere counts, beside etcd's answers, the reads that etcd can no longer
// answer.
const compactedThere = "made where etcd is compacted"

// writtenTwice is the outcome of a transaction that may write a key more than once.
const writtenTwice = "Txn: OK, a key written more than once"

// take counts etcd's answer and learns from it.
func (p *pair) take(c *call, theirs answer) {
	p.calls++
	outcome := "OK"
	if theirs.response == nil {
		outcome = cut(theirs.text, 200)
	}
	p.outcomes[c.kind.name+": "+outcome]++
	if c.byPipe {
		p.outcomes[pipeName+c.kind.name+": "+outcome]++
	}
	if t, ok := c.request.(*pb.TxnRequest); ok && theirs.response != nil && writesTwice(t) {
		p.outcomes[writtenTwice]++
	}
	p.source.observe(c, theirs)
}

// waveWidth is the largest number of calls in a wave.
const waveWidth = 12

// waves makes calls several at a time. It returns the first wave whose answers no etcd
// could have given in the order of their revisions.
func (p *pair) waves(ctx context.Context, calls, every int) error {
	if err := p.openPipes(ctx); err != nil {
		return err
	}
	p.source.steady = true
	next := every
	for p.calls < calls {
		if p.calls >= next {
			next += every
			p.splits.split(p.source.splitKey())
		}
		var wave []*call
		for range 1 + p.source.IntN(waveWidth) {
			c := p.source.next()
			if c.kind.alone {
				wave = []*call{c}
				break
			}
			wave = append(wave, c)
		}
		if err := p.wave(ctx, wave); err != nil {
			return err
		}
	}
	return errors.Join(p.splits.wait(), p.closePipes())
}

// placed is a call of a wave with Skein's answer and its place in the order.
type placed struct {
	call    *call
	gateway int
	ours    answer
	// revision is the header's, 0 for an error: refusals in waves do not depend on the
	// place.
	revision int64
	// reads says that the call changed nothing: it saw the change of its revision.
	reads bool
}

// wave makes calls at the same time at Skein and then one after the other at etcd.
func (p *pair) wave(ctx context.Context, calls []*call) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	before := p.source.revision
	all := make([]placed, len(calls))
	for i, c := range calls {
		all[i] = placed{call: c, gateway: p.source.IntN(len(p.skein.conns))}
	}
	_ = each(len(all), func(i int) error {
		w := &all[i]
		w.ours = p.ask(ctx, w.call, w.gateway)
		if w.ours.response != nil {
			w.revision = w.ours.response.(interface{ GetHeader() *pb.ResponseHeader }).GetHeader().GetRevision()
			w.reads = !changed(w.ours.response)
		}
		return nil
	})
	slices.SortStableFunc(all, func(a, b placed) int {
		return cmp.Or(cmp.Compare(a.revision, b.revision), cmp.Compare(b2i(a.reads), b2i(b.reads)))
	})
	for i, w := range all {
		if w.revision != 0 && w.revision < before {
			return fmt.Errorf("revision %d of a call that began after %d was answered:\n%s", w.revision, before, told(all))
		}
		theirs := do(ctx, p.etcd.conns[0], w.call)
		p.take(w.call, theirs)
		if diff := compare(theirs, w.ours); diff != "" {
			return fmt.Errorf("call %d, the %d. of this wave, at node %d, differs:\n%s\nthe wave:\n%s", p.calls, i+1, w.gateway+1, diff, told(all))
		}
	}
	return nil
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// told shows a wave for a report.
func told(all []placed) string {
	var b strings.Builder
	for i, w := range all {
		fmt.Fprintf(&b, "%d. at node %d: %s\n   → %s\n", i+1, w.gateway+1, w.call, w.ours)
	}
	return b.String()
}

// changed says whether the response is of a call that changed something.
func changed(resp proto.Message) bool {
	switch r := resp.(type) {
	case *pb.PutResponse:
		return true
	case *pb.DeleteRangeResponse:
		return r.GetDeleted() > 0
	case *pb.TxnResponse:
		for _, op := range r.GetResponses() {
			if op.GetResponsePut() != nil || op.GetResponseDeleteRange().GetDeleted() > 0 || op.GetResponseTxn() != nil && changed(op.GetResponseTxn()) {
				return true
			}
		}
	}
	return false
}

// splitter splits ranges while calls are made.
type splitter struct {
	admin *adminapi.Client
	// tokens are those of root, nil while rights are not checked.
	tokens []string
	wg     sync.WaitGroup
	mu     sync.Mutex
	done   int
	errs   []error
}

// splitTimeout bounds one split.
const splitTimeout = time.Minute

// split begins a split at the key, unless one is still under way.
func (s *splitter) split(key []byte) {
	s.wg.Wait()
	ctx := context.Background()
	if s.tokens != nil {
		ctx = withBearer(ctx, s.tokens[1])
	}
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, splitTimeout)
		defer cancel()
		_, err := s.admin.RangeSplit(ctx, key)
		s.mu.Lock()
		defer s.mu.Unlock()
		var refused *adminapi.Refusal
		switch {
		case err == nil:
			s.done++
		case errors.As(err, &refused) && strings.Contains(refused.Reason, "already"):
		default:
			s.errs = append(s.errs, fmt.Errorf("split at %q: %w", key, err))
		}
	})
}

// wait returns the errors of all splits after the last.
func (s *splitter) wait() error {
	s.wg.Wait()
	return errors.Join(s.errs...)
}
