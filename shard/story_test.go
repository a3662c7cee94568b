package shard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/rangefeed/feedtest"
)

// story runs the commands of a story on a fakeWorld. Each command ends when
// nothing moves any more, and prints whose requests were answered by then.
//
//	init [manual] [entry=BYTES] [inflight=N] [request=BYTES] [leases=auto|manual]   a node whose replica leads range 1 in term 5; with manual the
//	                test answers the sequencer and commits the log, otherwise both go by themselves
//	do [range=1] [gen=1] [at=R]   one request per line; numbered in order of their begin
//	command [range=1] [gen=1]     commands of transactions over several ranges, see parseCommand
//	locks           what transactions over several ranges hold
//	cancel N        the caller of request N gives up
//	asks            what the sequencer was asked
//	sequence [n=0] [error=KIND]  answers one ask
//	log             the proposed entries
//	commit [n=1] [term=T]        commits and applies the first entries of the log, as of term T
//	drop [n=0]      the n-th entry is certainly not appended
//	forget          the log's entries are lost with the leadership, and nobody says so
//	full on|off     the group has no room for proposals; disk full|overloaded|ok
//	follow term=T [leader=2]     another replica leads
//	lead term=T     this replica leads, its entry is applied
//	elect term=T    this replica leads, its entry is not applied yet
//	lease on|off    without the lease reads need read-index
//	read-index [error]           answers all ReadIndex calls
//	split key=K     begins a split
//	serve range=N term=T   the node's replica of another range leads it
//	merge step=bind|freeze|settle|absorb|release id=N [left=1] [right=2]   begins a step of a merge
//	wait 5s         time passes
//	heard rev=N     the node hears of a revision; compacted=N of a compacted one
//	versions        what is stored
//	show            the replica's state
//	feed id=N from=R [range=1] [gen=1] [prev]   opens a feed; fed prints what has come in all feeds: events, and behind |
//	                the resolved revision
//	resolved rev=R [range=1] [gen=1]            waits until nothing at or below R may appear any more
//	history from=R to=R [range=1] [gen=1]       what a replica tells of the past
//	restart [lose]  stops the node and opens it again, with lose without what was not flushed
type story struct {
	w      *fakeWorld
	manual bool

	gateway *feedtest.Gateway

	mu sync.Mutex
	// Guarded by mu.
	next    int
	answers map[int]string
	cancels map[int]context.CancelFunc
	wg      sync.WaitGroup
}

func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		synctest.Test(t, func(t *testing.T) {
			s := &story{answers: map[int]string{}, cancels: map[int]context.CancelFunc{}}
			defer s.end()
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				out := s.run(t, d)
				s.settle()
				return out + s.answered()
			})
		})
	})
}

func (s *story) end() {
	if s.w == nil {
		return
	}
	if s.gateway != nil {
		s.gateway.Close()
		s.gateway = nil
	}
	s.w.stop()
	s.wg.Wait()
	s.w.leases.wg.Wait()
	s.w = nil
}

// settle waits until nothing moves; unless the story is manual, the log moves too.
func (s *story) settle() {
	for synctest.Wait(); s.w != nil && !s.manual; synctest.Wait() {
		moved := false
		for id := keyspace.RangeID(1); id < 4; id++ {
			if g := s.w.groups.group(id); g != nil {
				moved = s.commit(g, 1<<20, 0) != "" || moved
			}
		}
		if !moved {
			return
		}
	}
}

// commit applies the first n entries of the log and returns how many there were.
func (s *story) commit(g *fakeGroup, n int, term uint64) string {
	out := ""
	for range n {
		g.mu.Lock()
		empty := len(g.log) == 0
		g.mu.Unlock()
		if empty {
			break
		}
		e := g.take(0)
		if term != 0 {
			e.term = term
		}
		out += "applied " + command.Describe(e.term, e.data) + "\n"
		if err := g.apply(raftgroup.Entry{Term: e.term, Data: e.data}); err != nil {
			return out + "fatal: " + err.Error() + "\n"
		}
	}
	return out
}

func (s *story) answered() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []int
	for id := range s.answers {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	var b strings.Builder
	for _, id := range ids {
		fmt.Fprintf(&b, "%d: %s\n", id, s.answers[id])
	}
	clear(s.answers)
	return b.String()
}

// begin runs f as a numbered request.
func (s *story) begin(f func(ctx context.Context) string) {
	s.mu.Lock()
	s.next++
	id := s.next
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	s.cancels[id] = cancel
	s.mu.Unlock()
	s.wg.Go(func() {
		defer cancel()
		out := f(ctx)
		s.mu.Lock()
		s.answers[id] = out
		s.mu.Unlock()
	})
	synctest.Wait()
}

func arg[T any](d *datadriven.TestData, name string, def T) T {
	for _, a := range d.CmdArgs {
		if a.Key != name || len(a.Vals) == 0 {
			continue
		}
		switch p := any(&def).(type) {
		case *string:
			*p = a.Vals[0]
		default:
			if _, err := fmt.Sscan(a.Vals[0], p); err != nil {
				panic(err)
			}
		}
	}
	return def
}

func (s *story) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	if d.Cmd == "init" {
		s.end()
		s.manual = d.HasArg("manual")
		w := newLeasedWorld(t, Limits{
			MaxEntryBytes: arg(d, "entry", 0), InflightBatches: arg(d, "inflight", 0), MaxRequestBytes: arg(d, "request", 0),
			RangePendingBytes: int64(arg(d, "pending", 0)),
		}, arg(d, "leases", ""))
		w.seq.auto = !s.manual
		s.w, s.next = w, 0
		w.serve(1, 5)
		return ""
	}
	if out, ok := s.leaseCommand(t, d); ok {
		return out
	}
	id := keyspace.RangeID(arg(d, "range", 1))
	g := s.w.groups.group(id)
	if g == nil && d.Cmd != "do" {
		return fmt.Sprintf("range %s is not here\n", id)
	}
	switch d.Cmd {
	case "do":
		for line := range strings.Lines(d.Input) {
			req := &rangeapi.Request{
				Range: id, Generation: keyspace.Generation(arg(d, "gen", 1)), ReadRevision: keyspace.Revision(arg(d, "at", 0)),
				Op: parseRequest(line),
			}
			s.begin(func(ctx context.Context) string { return formatAnswer(s.w.store.Do(ctx, req)) })
			if !s.manual {
				s.settle()
			}
		}
	case "command":
		for line := range strings.Lines(d.Input) {
			op := parseCommand(line)
			s.begin(func(ctx context.Context) string {
				return formatTxnAnswer(s.w.store.Txn(ctx, id, keyspace.Generation(arg(d, "gen", 1)), op))
			})
			if !s.manual {
				s.settle()
			}
		}
	case "locks":
		return locksText(s.w.store.Replica(id))
	case "split":
		key := []byte(arg(d, "key", ""))
		s.begin(func(ctx context.Context) string {
			ds, err := s.w.store.admins.Split(ctx, 1, id, 0, key)
			if err != nil {
				return formatAnswer(nil, err)
			}
			return fmt.Sprintf("split %s gen %d and range %s %s gen %d", ds[0].Span, ds[0].Generation, ds[1].Range, ds[1].Span, ds[1].Generation)
		})
	case "serve":
		s.w.serve(id, arg(d, "term", uint64(5)))
	case "merge":
		o := s.mergeOrder(d)
		s.begin(func(ctx context.Context) string {
			if err := s.w.store.admins.Merge(ctx, 1, o); err != nil {
				return formatAnswer(nil, err)
			}
			return o.Step.String() + " of range " + o.Range.String()
		})
	case "cancel":
		s.cancels[arg(d, "n", 0)]()
	case "asks", "sequence":
		return s.sequencer(d)
	case "log":
		out := ""
		for _, e := range g.log {
			out += command.Describe(e.term, e.data) + "\n"
		}
		return out
	case "commit":
		return s.commit(g, arg(d, "n", 1), arg(d, "term", uint64(0)))
	case "drop":
		g.take(arg(d, "n", 0)).dropped(raftgroup.ErrDropped)
	case "forget":
		g.mu.Lock()
		g.log = nil
		g.mu.Unlock()
	case "feed", "fed", "resolved", "history":
		return s.watch(t, d, id)
	case "versions":
		return s.versions()
	case "hash":
		return s.hash(d)
	case "restart":
		return s.restart(t, d)
	default:
		return s.nemesis(t, d, g)
	}
	return ""
}

func (s *story) sequencer(d *datadriven.TestData) string {
	if d.Cmd == "asks" {
		out := ""
		for _, a := range s.w.seq.asks {
			out += fmt.Sprintf("range %s generation %d wants %d\n", a.req.Range, a.req.Generation, a.req.Count)
		}
		return out
	}
	if n := arg(d, "n", 0); n >= len(s.w.seq.asks) {
		return fmt.Sprintf("nothing is asked at %d\n", n)
	}
	var err error
	switch arg(d, "error", "") {
	case "":
	case "timeout":
		err = kverror.Timeout
	case "no-leader":
		err = kverror.NoLeader
	}
	// Calls that the answer puts back into the queue must be evaluated after the request for
	// the next batch.
	release := s.w.store.pipes.Pool.Hold()
	s.w.seq.answer(arg(d, "n", 0), err)
	release()
	return ""
}

// nemesis are the commands by which something befalls the replica.
func (s *story) nemesis(t *testing.T, d *datadriven.TestData, g *fakeGroup) string {
	t.Helper()
	term := arg(d, "term", uint64(0))
	switch d.Cmd {
	case "full":
		g.mu.Lock()
		g.full = d.HasArg("on")
		g.mu.Unlock()
	case "disk":
		s.w.disk.mu.Lock()
		s.w.disk.full, s.w.disk.overloaded = d.HasArg("full"), d.HasArg("overloaded")
		s.w.disk.mu.Unlock()
	case "follow":
		node := arg(d, "leader", uint64(2))
		g.lead(raftgroup.LeaderState{Term: term, Leader: keyspace.ReplicaID(node), LeaderNode: keyspace.NodeID(node)})
	case "elect":
		g.lead(raftgroup.LeaderState{Term: term, Leader: 1, LeaderNode: 1, IsLeader: true})
	case "lead":
		s.w.serve(g.id.Range(), term)
	case "empty":
		if err := g.apply(raftgroup.Entry{Term: term}); err != nil {
			return err.Error()
		}
	case "lease":
		g.mu.Lock()
		g.lease = d.HasArg("on")
		g.mu.Unlock()
	case "read-index":
		g.mu.Lock()
		reads := g.reads
		g.reads = nil
		g.mu.Unlock()
		var err error
		if d.HasArg("error") {
			err = raftgroup.ErrNoLeader
		}
		for _, done := range reads {
			done(0, err)
		}
		return fmt.Sprintf("%d answered\n", len(reads))
	case "wait":
		dur, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(dur)
	case "heard":
		s.w.store.heard(keyspace.Revision(arg(d, "rev", 0)))
		s.w.seq.mu.Lock()
		s.w.seq.last = max(s.w.seq.last, keyspace.Revision(arg(d, "rev", 0)))
		s.w.seq.compacted = max(s.w.seq.compacted, keyspace.Revision(arg(d, "compacted", 0)))
		s.w.seq.term = max(s.w.seq.term, arg(d, "term", uint64(0)))
		s.w.seq.mu.Unlock()
		s.w.store.observe(keyspace.SequenceAnswer{Compacted: keyspace.Revision(arg(d, "compacted", 0))})
	case "show":
		st := s.w.store.Replica(g.id.Range()).Show()
		return fmt.Sprintf("%s gen %d revision %d compacted %d removed %d keys %d counted %t; queued %d overlay %d proposed %d lost %d pending %d; campaigns %d\n",
			st.Descriptor.Span, st.Descriptor.Generation, st.LastRevision, st.Compacted, st.RemovedTo, st.Keys, st.Counted,
			st.Queued, st.OverlayKeys, st.ProposedBatches, st.LostBatches, st.NodePendingBytes, g.campaign)
	default:
		t.Fatalf("unknown command %s", d.Cmd)
	}
	return ""
}

// hash is the sum over all ranges, or why one of them has none.
func (s *story) hash(d *datadriven.TestData) string {
	sum := uint64(0)
	replicas := s.w.store.Replicas()
	slices.SortFunc(replicas, func(a, b *Replica) int { return cmp.Compare(a.Range(), b.Range()) }) // it has no order
	for _, r := range replicas {
		desc, _ := r.Look()
		if desc.Generation == 0 {
			continue // absorbed
		}
		a, err := s.w.store.hashPart(context.Background(), &rangeapi.HashRequest{
			Range: desc.Range, Generation: desc.Generation - keyspace.Generation(arg(d, "older", 0)), From: desc.Span.Start,
			Revision: keyspace.Revision(arg(d, "at", 0)), Compacted: keyspace.Revision(arg(d, "compacted", -1)),
			Position: rangeapi.FeedPosition{Term: arg(d, "position", uint64(0)), Number: 1},
		})
		if err != nil {
			return fmt.Sprintf("%s: %v\n", desc.Span, kverror.Of(err).Kind)
		}
		sum += a.Hash
	}
	return fmt.Sprintf("%s\n", fmtHash(sum))
}

// mergeOrder is the order of a step of a merge of two ranges as they are.
func (s *story) mergeOrder(d *datadriven.TestData) keyspace.MergeOrder {
	left, right := keyspace.RangeID(arg(d, "left", 1)), keyspace.RangeID(arg(d, "right", 2))
	o := keyspace.MergeOrder{ID: uint64(arg(d, "id", 0)), Range: right, Other: left}
	for o.Step = keyspace.MergeBind; o.Step.String() != arg(d, "step", ""); o.Step++ {
	}
	if o.Step == keyspace.MergeBind || o.Step == keyspace.MergeAbsorb {
		o.Range, o.Other = left, right
	}
	r := s.w.store.Replica(o.Range)
	if r == nil {
		return o
	}
	now := r.Descriptor()
	o.Generation, o.ConfIndex = now.Generation, now.ConfIndex
	if l := s.w.store.Replica(left); l != nil {
		o.Hull.Start = l.Descriptor().Span.Start
	}
	return o
}

// versions prints what is stored, all revisions of each key.
func (s *story) versions() string {
	var out strings.Builder
	_, err := mvcc.History(s.w.engine, mvcc.HistoryOptions{From: 1, To: keyspace.MaxRevision - 1}, func(v *mvcc.Version) error {
		if v.Tombstone {
			fmt.Fprintf(&out, "%d.%d %s †\n", v.Mod, v.Sub, v.Key)
		} else {
			fmt.Fprintf(&out, "%d.%d %s=%s create=%d version=%d\n", v.Mod, v.Sub, v.Key, v.Value, v.Create, v.Version)
		}
		return nil
	})
	if err != nil {
		return err.Error()
	}
	return out.String()
}

func (s *story) restart(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	w := s.w
	w.store.Stop()
	if d.HasArg("lose") {
		fs := w.fs.Crash(0, nil)
		if err := w.engine.Abort(); err != nil && !errors.Is(err, context.Canceled) {
			t.Log(err)
		}
		w.fs = fs
	} else if err := w.engine.Close(); err != nil {
		t.Fatal(err)
	}
	w.start()
	return ""
}
