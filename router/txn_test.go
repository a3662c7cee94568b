package router

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/budget"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/transport"
)

// ranges is a cluster whose answers to transaction commands the test sets.
type ranges struct {
	*cluster
	mu sync.Mutex
	// Guarded by mu. log has the commands in order; answer, if set, may answer one.
	log    []string
	answer func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error)
	// sequenced are the requests for revisions, and refuse how many of them fail.
	sequenced []keyspace.SequenceRequest
	refuse    int
	// access is the access index.
	access keyspace.AccessIndex
	owned  map[rangeapi.TxnName]bool
	// read, if set, may answer other requests.
	read func(req *rangeapi.Request) (*rangeapi.Response, error)
}

func (f *ranges) Do(ctx context.Context, node keyspace.NodeID, req *rangeapi.Request) (*rangeapi.Response, error) {
	if f.read != nil {
		if resp, err := f.read(req); resp != nil || err != nil {
			return resp, err
		}
	}
	return f.cluster.Do(ctx, node, req)
}

func (f *ranges) Txn(ctx context.Context, _ keyspace.NodeID, id keyspace.RangeID, _ keyspace.Generation, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
	f.mu.Lock()
	f.log = append(f.log, f.show(id, op))
	answer := f.answer
	f.mu.Unlock()
	if ctx.Err() != nil {
		return nil, kverror.Of(ctx.Err())
	}
	if answer != nil {
		if a, err := answer(id, op); a != nil || err != nil {
			return a, err
		}
	}
	switch o := op.(type) {
	case *rangeapi.Prepare:
		holds := len(o.Guards)+len(o.Writes) > 0 || o.Revoke != 0
		a := &rangeapi.Prepared{Held: holds, Lock: rangeapi.LockID{Range: id}, Changes: len(o.Writes) > 0 || o.Revoke != 0}
		for range o.Guards {
			a.Facts = append(a.Facts, rangeapi.Fact{Found: true, Holds: true})
		}
		for _, w := range o.Writes {
			a.Results = append(a.Results, rangeapi.WriteResult{Number: w.Number, Version: 1})
		}
		return a, nil
	case *rangeapi.Commit:
		return &rangeapi.Decided{Revision: o.Revision}, nil
	case *rangeapi.Decide:
		return &rangeapi.Decided{}, nil
	case *rangeapi.Revoke:
		return &rangeapi.Revoked{}, nil
	}
	resolve, ok := op.(*rangeapi.Resolve)
	return &rangeapi.Resolved{Intact: ok && resolve.Lock != rangeapi.LockID{}}, nil
}

func (f *ranges) show(id keyspace.RangeID, op rangeapi.TxnCommand) string {
	switch o := op.(type) {
	case *rangeapi.Prepare:
		s := fmt.Sprintf("prepare %d at %s", o.Name.Attempt, id)
		if o.Revoke != 0 {
			if s = "revoke " + s; o.Checked.At != 0 {
				s = fmt.Sprintf("revoke checked=%d prepare %d at %s", o.Checked.At, o.Name.Attempt, id)
			}
		}
		if o.WaitForOlder {
			s += " patient"
		}
		return s
	case *rangeapi.Commit:
		return fmt.Sprintf("commit %d@%d of %d at %s", o.Name.Attempt, o.Revision, len(o.Locks), id)
	case *rangeapi.Revoke:
		if o.Checked.At != 0 {
			return fmt.Sprintf("revoke checked=%d at %s", o.Checked.At, id)
		}
		return fmt.Sprintf("revoke at %s", id)
	case *rangeapi.Resolve:
		if o.Detach != 0 {
			return fmt.Sprintf("resolve %d@%d detach %d/%d at %s", o.Name.Attempt, o.Revision, o.Detach, o.Incarnation, id)
		}
		return fmt.Sprintf("resolve %d@%d at %s", o.Name.Attempt, o.Revision, id)
	case *rangeapi.Decide:
		return fmt.Sprintf("decide %d at %s", o.Name.Attempt, id)
	case *rangeapi.Forget:
		return fmt.Sprintf("forget %d at %s", o.Name.Attempt, id)
	}
	return "?"
}

// commands returns the commands so far, sorted where they were sent in parallel.
func (f *ranges) commands() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for i := 0; i < len(f.log); {
		n := i
		word, _, _ := strings.Cut(f.log[i], " at ")
		for n < len(f.log) && strings.HasPrefix(f.log[n], word+" at ") {
			n++
		}
		slices.Sort(f.log[i:n])
		out = append(out, f.log[i:n]...)
		i = n
	}
	return strings.Join(out, "; ")
}

func (f *ranges) Sequence(req keyspace.SequenceRequest, done func(keyspace.SequenceAnswer)) {
	f.mu.Lock()
	access := f.access
	f.mu.Unlock()
	if req.Permit.Ended(access) {
		done(keyspace.SequenceAnswer{Err: kverror.New(kverror.AccessChanged, "at index %d", access), Access: access})
		return
	}
	if req.Count == 0 {
		f.cluster.Sequence(req, done)
		return
	}
	f.mu.Lock()
	f.sequenced = append(f.sequenced, req)
	f.refuse--
	refuse := f.refuse >= 0
	f.mu.Unlock()
	if refuse {
		done(keyspace.SequenceAnswer{Err: kverror.New(kverror.NoLeader, "no sequencer")})
		return
	}
	f.cluster.mu.Lock()
	f.rev++
	a := keyspace.SequenceAnswer{First: f.rev, Current: f.rev}
	f.cluster.mu.Unlock()
	done(a)
}

func (f *ranges) Call(_ context.Context, _ keyspace.NodeID, _ transport.Method, p []byte) ([]byte, error) {
	name, err := rangeapi.DecodeTxnName(p[1:])
	if err != nil {
		return nil, err
	}
	if f.owned[name] {
		return []byte{txnWireVersion, 1}, nil
	}
	return []byte{txnWireVersion, 0}, nil
}

// newRanges is a cluster with ranges 1 up to h, 2 up to p and 3 behind it.
func newRanges() (*ranges, *Router) {
	f := &ranges{cluster: newCluster(1)}
	f.split("h")
	f.split("p")
	f.rev = 7
	r := New(Config{
		Self: 2, Boot: 5, Clock: clock.Virtual(), Ranges: f, Sequencer: f, Placement: f, Txns: f, Bus: f, Alive: alive,
	})
	return f, r
}

func putAt(k, v string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(k), Value: []byte(v)}}}
}

func getAt(k string) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: []byte(k)}}}
}

func deleteAt(k, end string) *pb.RequestOp {
	d := &pb.DeleteRangeRequest{Key: []byte(k), RangeEnd: []byte(end)}
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: d}}
}

func versionIs(k string, v int64) *pb.Compare {
	return &pb.Compare{Key: []byte(k), Target: pb.Compare_VERSION, TargetUnion: &pb.Compare_Version{Version: v}}
}

func inside(t *pb.TxnRequest) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: t}}
}

// Faults in the course of a transaction, as its client and the ranges see them.
func TestCourseOfATransaction(t *testing.T) {
	once := func(match string, answer rangeapi.TxnAnswer, err error) func(*ranges) {
		return func(f *ranges) {
			done := false
			f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
				f.mu.Lock()
				defer f.mu.Unlock()
				if done || !strings.Contains(f.show(id, op), match) {
					return nil, nil
				}
				done = true
				return answer, err
			}
		}
	}
	const usual = "prepare 1 at 1; prepare 1 at 3; commit 1@8 of 2 at 1; resolve 1@8 at 1; resolve 1@8 at 3; forget 1 at 1"
	again := func(n int) string {
		return fmt.Sprintf("prepare %d at 1; prepare %d at 3; commit %d@8 of 2 at 1; resolve %d@8 at 1; resolve %d@8 at 3; forget %d at 1", n, n, n, n, n, n)
	}
	for name, c := range map[string]struct {
		set   func(*ranges)
		want  string
		also  string
		error error
	}{
		"nothing goes wrong": {want: usual},
		"it meets an older one": {
			set:  once("prepare 1 at 3", nil, kverror.New(kverror.Conflict, "")),
			want: "prepare 2 at 3 patient; commit 2@8",
		},
		"its anchor is fenced": {
			set:  once("prepare 1 at 1", &rangeapi.Prepared{Fence: 40}, nil),
			want: again(41),
		},
		"a leader is lost with a prepare": {
			set:  once("prepare 1 at 3", nil, kverror.New(kverror.LeaderChanged, "")),
			want: again(2),
		},
		"a prepare was at the wrong node": {
			set:  once("prepare 1 at 3", nil, kverror.New(kverror.NotLeader, "")),
			want: "prepare 1 at 3; prepare 1 at 3; commit 1@8",
		},
		"the sequencer is away": {
			set:  func(f *ranges) { f.refuse = 1 },
			want: again(2),
		},
		"the sequencer has a successor": {
			set: once("prepare 1 at 3", &rangeapi.Prepared{
				Held: true, Floor: 8, Lock: rangeapi.LockID{Range: 3}, Facts: []rangeapi.Fact{{Found: true, Holds: true}}, Changes: true,
				Results: []rangeapi.WriteResult{{Number: 2, Version: 1}},
			}, nil),
			// The first attempt's locks are released beside the second attempt.
			want: "prepare 2 at 1; prepare 2 at 3; commit 2@9 of 2 at 1",
			also: "resolve 1@0 at 1",
		},
		"the fate of the commit is not known at first": {
			set:  once("commit", nil, kverror.New(kverror.LeaderChanged, "")),
			want: "commit 1@8 of 2 at 1; commit 1@8 of 2 at 1; resolve 1@8 at 1",
		},
		"others have decided against it": {
			set:  once("commit", &rangeapi.Decided{}, nil),
			want: "commit 2@9 of 2 at 1; resolve 2@9",
		},
		"a range is full": {
			set:   once("prepare 1 at 3", nil, kverror.New(kverror.NoSpace, "")),
			want:  "resolve 1@0 at 1",
			error: kverror.NoSpace,
		},
		"a put is refused": {
			set: once("prepare 1 at 3", &rangeapi.Prepared{
				Held: true, Facts: []rangeapi.Fact{{Holds: true}}, Refused: kverror.New(kverror.KeyNotFound, ""), RefusedAt: 2,
			}, nil),
			want:  "resolve 1@0 at 1",
			error: kverror.KeyNotFound,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, r := newRanges()
				if c.set != nil {
					c.set(f)
				}
				resp, err := r.Txn(internal(t), &pb.TxnRequest{
					Compare: []*pb.Compare{versionIs("q", 3)}, Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")},
				})
				afterwards()
				r.Stop()
				if c.error != nil && !errors.Is(err, c.error) || c.error == nil && (err != nil || !resp.Succeeded) {
					t.Fatalf("%v, %v", resp, err)
				}
				if c.error == nil && resp.Header.Revision != int64(f.rev) {
					t.Errorf("revision %d of %d", resp.Header.Revision, f.rev)
				}
				if got := f.commands(); !inOrder(got, c.want) || !inOrder(got, c.also) {
					t.Errorf("asked %s\nwant  %s\nand   %s", got, c.want, c.also)
				}
				if r.coordinator.bytes.Held() != 0 || len(r.coordinator.active) != 0 {
					t.Errorf("%d bytes, %v left", r.coordinator.bytes.Held(), r.coordinator.active)
				}
				for _, q := range f.sequenced {
					if q.Count != 1 || len(q.Also) != 1 || q.Range+q.Also[0].Range != 4 {
						t.Errorf("asked for %+v", q)
					}
				}
			})
		})
	}
}

// An anchor that refuses a commit for good ends the attempt. If no commit can have been executed, the
// coordinator aborts and says so. Otherwise the fate is unknown: it ends no lock, claims the attempt no
// more, and leaves the decision to the anchor.
func TestCommitIsRefusedForGood(t *testing.T) {
	for name, c := range map[string]struct {
		// refusals are the answers to the commits, in order; the last one is repeated.
		refusals []kverror.Kind
		error    kverror.Kind
		aborts   bool
	}{
		"too large":                     {refusals: []kverror.Kind{kverror.RequestTooLarge}, error: kverror.RequestTooLarge, aborts: true},
		"not understood":                {refusals: []kverror.Kind{kverror.BadRequest}, error: kverror.BadRequest, aborts: true},
		"of a kind added later":         {refusals: []kverror.Kind{kverror.PeerURLExists}, error: kverror.PeerURLExists, aborts: true},
		"passes, then is too large":     {refusals: []kverror.Kind{kverror.Busy, kverror.TooManyRequests, kverror.RequestTooLarge}, error: kverror.RequestTooLarge, aborts: true},
		"may be done, then too large":   {refusals: []kverror.Kind{kverror.TimeoutConnectionLost, kverror.RequestTooLarge}, error: kverror.LeaderChanged},
		"internal":                      {refusals: []kverror.Kind{kverror.Internal}, error: kverror.Internal},
		"corrupt":                       {refusals: []kverror.Kind{kverror.Corrupt}, error: kverror.Corrupt},
		"may be done, then is internal": {refusals: []kverror.Kind{kverror.LeaderChanged, kverror.Internal}, error: kverror.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, r := newRanges()
				defer r.Stop()
				commits := 0
				f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
					if _, ok := op.(*rangeapi.Commit); !ok {
						return nil, nil
					}
					f.mu.Lock()
					defer f.mu.Unlock()
					commits++
					return nil, kverror.New(c.refusals[min(commits, len(c.refusals))-1], "refused")
				}
				_, err := r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}})
				afterwards()
				if !errors.Is(err, c.error) || commits != len(c.refusals) {
					t.Errorf("%d commits, and the client learns %v; want %d and %v", commits, err, len(c.refusals), c.error)
				}
				if n := len(r.coordinator.active); n > 0 {
					t.Errorf("the coordinator claims %d attempts", n)
				}
				if got, want := f.commands(), "resolve 1@0 at 1; resolve 1@0 at 3"; strings.Contains(got, "resolve") != c.aborts || c.aborts && !inOrder(got, want) {
					t.Errorf("asked %s\naborts: %v", got, c.aborts)
				}
			})
		})
	}
}

// An attempt that changes nothing, or is refused, has facts of one moment only if its locks were
// there all the time. Otherwise its coordinator stood still and was taken for dead, and others have
// ended the locks and written (trap 78).
func TestWhatChangesNothingIsOfOneMoment(t *testing.T) {
	deletes := &pb.TxnRequest{Compare: []*pb.Compare{versionIs("q", 3)}, Success: []*pb.RequestOp{
		{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("a")}}},
		{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: []byte("z")}}},
	}}
	for name, c := range map[string]struct {
		refused *kverror.Error
		wait    bool
	}{
		"nothing is changed":  {},
		"a put is refused":    {refused: kverror.New(kverror.KeyNotFound, "")},
		"the command is lost": {wait: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, r := newRanges()
				var first rangeapi.TxnName
				f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
					f.mu.Lock()
					defer f.mu.Unlock()
					switch o := op.(type) {
					case *rangeapi.Prepare:
						if first.IsZero() {
							first = o.Name
						}
						a := &rangeapi.Prepared{Held: true, Lock: rangeapi.LockID{Range: id, Number: o.Name.Attempt}}
						for range o.Guards {
							a.Facts = append(a.Facts, rangeapi.Fact{Found: true, Holds: true})
						}
						for _, w := range o.Writes {
							a.Results = append(a.Results, rangeapi.WriteResult{Number: w.Number})
						}
						if c.refused != nil && id == 3 {
							a.Refused, a.RefusedAt, a.Results = c.refused, 2, nil
						}
						return a, nil
					case *rangeapi.Resolve:
						switch {
						case o.Lock == rangeapi.LockID{}:
							return nil, nil
						case o.Lock.Range != 1 || o.Revision != 0:
							t.Errorf("%+v is no end of the anchor's lock", o)
						case o.Name == first && c.wait:
							return nil, kverror.New(kverror.LeaderChanged, "")
						}
						return &rangeapi.Resolved{Intact: o.Name != first}, nil
					}
					return nil, nil
				}
				resp, err := r.Txn(internal(t), deletes)
				afterwards()
				r.Stop()
				if c.refused == nil && (err != nil || !resp.Succeeded) || c.refused != nil && !errors.Is(err, c.refused.Kind) {
					t.Fatalf("%v, %v", resp, err)
				}
				const want = "prepare 1 at 1; prepare 1 at 3; resolve 1@0 at 1; prepare 2 at 1; prepare 2 at 3; resolve 2@0 at 1"
				if got := f.commands(); !inOrder(got, want) {
					t.Errorf("asked %s\nwant  %s", got, want)
				}
			})
		})
	}
}

// inOrder says whether the wanted commands are among those sent, each kind of an attempt after the
// one before. Others may come between, and parallel ones in any order.
func inOrder(asked, want string) bool {
	kind := func(command string) string { k, _, _ := strings.Cut(command, " at "); return k }
	all := strings.Split(asked, "; ")
	last, behind, now := "", 0, 0
	for _, command := range strings.Split(want, "; ") {
		if kind(command) != last {
			last, behind = kind(command), now
		}
		i := slices.IndexFunc(all[behind:], func(a string) bool { return strings.HasPrefix(a, command) })
		if i < 0 {
			return false
		}
		all[behind+i] = "" // it counts once
		now = max(now, behind+i+1)
	}
	return true
}

// A commit of unknown fate may have been executed, resolved by others and forgotten. Its absence
// does not prove that it has not happened.
func TestCommitOfUnknownFateIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		defer r.Stop()
		n := 0
		f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			if _, ok := op.(*rangeapi.Commit); !ok {
				return nil, nil
			}
			if n++; n == 1 {
				return nil, kverror.New(kverror.TimeoutConnectionLost, "")
			}
			return &rangeapi.Decided{}, nil
		}
		_, err := r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}})
		if kverror.Of(err).Fate() != kverror.Unknown || strings.Contains(f.commands(), "prepare 2") {
			t.Errorf("%v after %s", err, f.commands())
		}
	})
}

// Once a transaction is committed, no error says that it has not happened, whatever delays its
// reads until the timeout.
func TestReadsOfACommittedTransactionFail(t *testing.T) {
	for _, kind := range []kverror.Kind{
		kverror.NotLeader, kverror.NoLeader, kverror.Busy, kverror.TooManyRequests, kverror.WrongRange, kverror.Stopped, kverror.Compacted,
	} {
		for _, late := range []time.Duration{0, 10 * time.Second} {
			synctest.Test(t, func(t *testing.T) {
				f, r := newRanges()
				defer r.Stop()
				f.read = func(*rangeapi.Request) (*rangeapi.Response, error) {
					time.Sleep(late)
					return nil, kverror.New(kind, "")
				}
				_, err := r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), getAt("m"), putAt("z", "2")}})
				if !errors.Is(err, kverror.Timeout) {
					t.Errorf("reads fail with %v after %v: %v", kind, late, err)
				}
			})
		}
	}
}

// Once it has its revision, a transaction goes on without its client. Before that, its locks are
// given up.
func TestClientOfATransactionLeaves(t *testing.T) {
	for when, want := range map[string]string{"prepare 1 at 3": "resolve 1@0 at 1", "commit": "resolve 1@8 at 3; forget 1 at 1"} {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			ctx, cancel := context.WithCancel(internal(t))
			f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
				if strings.Contains(f.show(id, op), when) {
					cancel()
					if when != "commit" {
						<-ctx.Done()
						return nil, kverror.Canceled
					}
					time.Sleep(time.Second)
				}
				return nil, nil
			}
			_, err := r.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}})
			if !errors.Is(err, kverror.Canceled) {
				t.Errorf("%s: %v", when, err)
			}
			time.Sleep(2 * time.Second)
			r.Stop()
			if got := f.commands(); !strings.Contains(got, want) {
				t.Errorf("asked %s\nwant  %s", got, want)
			}
		})
	}
}

// A request that meets a lock asks its coordinator first. The anchor decides only if the
// coordinator does not know the attempt or is dead (trap 78).
func TestPush(t *testing.T) {
	mine := rangeapi.TxnName{TxnID: rangeapi.TxnID{Node: 2, Boot: 5, Counter: 1}, Attempt: 1}
	of := func(node keyspace.NodeID) rangeapi.TxnName {
		return rangeapi.TxnName{TxnID: rangeapi.TxnID{Node: node, Boot: 9, Counter: 1}, Attempt: 3}
	}
	for i, c := range []struct {
		name rangeapi.TxnName
		dead bool
		live bool
	}{
		{name: mine, live: true},
		{name: rangeapi.TxnName{TxnID: rangeapi.TxnID{Node: 2, Boot: 4}, Attempt: 1}},
		{name: of(1), live: true},
		{name: of(1), dead: true},
		{name: of(3)},
	} {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			defer r.Stop()
			r.cfg.Alive = func(keyspace.NodeID) bool { return !c.dead }
			f.owned = map[rangeapi.TxnName]bool{of(1): true}
			r.coordinator.active[mine] = struct{}{}
			live, d, err := r.Push(internal(t), c.name, []byte("k"))
			if err != nil || live != c.live || (d == nil) != c.live {
				t.Errorf("%d: %t %v %v", i, live, d, err)
			}
			if asked := strings.Contains(f.commands(), "decide"); asked == c.live {
				t.Errorf("%d: asked %s", i, f.commands())
			}
			locks := []rangeapi.LockRef{{ID: rangeapi.LockID{Range: 1}, Span: keyspace.Span{Start: []byte("c"), End: []byte("m")}}}
			live, err = r.Finish(internal(t), c.name, &rangeapi.Decided{Revision: 9, Locks: locks})
			if err != nil || live != c.live || !live && !strings.Contains(f.commands(), "@9 at 1; resolve") && !strings.Contains(f.commands(), "@9 at 2") {
				t.Errorf("%d: %t %v, asked %s", i, live, err, f.commands())
			}
		})
	}
}

// Deletes without a count are counted in all ranges in parallel.
func TestLargeDeletesAreCountedTogether(t *testing.T) {
	for range 20 {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			defer r.Stop()
			for i := range 30 {
				f.put(&pb.PutRequest{Key: fmt.Appendf(nil, "%c", 'a'+i%26), Value: []byte("v")})
			}
			f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
				p, ok := op.(*rangeapi.Prepare)
				if !ok {
					return nil, nil
				}
				return &rangeapi.Prepared{Held: true, Changes: true, Results: []rangeapi.WriteResult{{Number: p.Writes[0].Number, Uncounted: true}}}, nil
			}
			got, err := r.DeleteRange(internal(t), &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte{0}})
			if err != nil || got.Deleted != 26 {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
}

// A committed transaction has locks in ranges that lose their leaders. Its coordinator leaves them
// to the ranges. Otherwise ranges with leaders would be told for just as long that it is still at
// work.
func TestLocksOfRangesWithoutLeadersAreLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		defer r.Stop()
		const many, lost = 200, 100
		for i := range many - 3 {
			f.split(fmt.Sprintf("m%04d", i))
		}
		f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			switch op.(type) {
			case *rangeapi.Prepare:
				return &rangeapi.Prepared{Held: true, Lock: rangeapi.LockID{Range: id}, Changes: true}, nil
			case *rangeapi.Resolve:
				if id <= lost {
					return nil, kverror.NoLeader
				}
			}
			return nil, nil
		}
		if _, err := r.DeleteRange(internal(t), &pb.DeleteRangeRequest{Key: []byte("a"), RangeEnd: []byte{0}}); err != nil {
			t.Error(err)
		}
		time.Sleep(resolveTimeout + time.Second)
		r.coordinator.mu.Lock()
		defer r.coordinator.mu.Unlock()
		if len(r.coordinator.active) != 0 {
			t.Errorf("%d attempts are this node's yet", len(r.coordinator.active))
		}
	})
}

// A path through the compares rests on guards that lead to it alone.
func TestPlan(t *testing.T) {
	x, y, z := versionIs("x", 1), versionIs("y", 1), versionIs("z", 1)
	req := &pb.TxnRequest{
		Compare: []*pb.Compare{x, y},
		Success: []*pb.RequestOp{getAt("a"), inside(&pb.TxnRequest{
			Compare: []*pb.Compare{z}, Success: []*pb.RequestOp{putAt("m", "1")}, Failure: []*pb.RequestOp{deleteAt("c", "e")},
		}), deleteAt("z", "b")},
		Failure: []*pb.RequestOp{getAt("b")},
	}
	for _, c := range []struct {
		seen   outcomes
		path   path
		guards []*pb.Compare
		ops    int
		anchor string
	}{
		{nil, path{true, true}, []*pb.Compare{x, y, z}, 3, "m"},
		{outcomes{z: false}, path{true, false}, []*pb.Compare{x, y, z}, 3, "c"},
		{outcomes{x: true, y: false, z: false}, path{false}, []*pb.Compare{y}, 1, ""},
	} {
		p := newPlan(req, c.seen)
		var guards []*pb.Compare
		for _, g := range p.guards {
			guards = append(guards, g.compare)
			if g.holds != c.seen.holds(g.compare) {
				t.Errorf("%v: guard %v", c.seen, g)
			}
		}
		if !slices.Equal(p.path, c.path) || !slices.Equal(guards, c.guards) || len(p.ops) != c.ops || string(p.anchor()) != c.anchor {
			t.Errorf("%v: path %v, guards %v, %d operations, anchor %s", c.seen, p.path, guards, len(p.ops), p.anchor())
		}
	}
}

// A transaction's reads under its own writes are compared with a list of keys that has the same
// writes.
func TestReadsUnderOwnWrites(t *testing.T) {
	for seed := range uint64(30) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 6))
			c := newCluster(seed)
			r := newRouter(c)
			defer r.Stop()
			for i := range 40 {
				k := []byte{byte('a' + rng.IntN(26)), byte('a' + rng.IntN(4))}
				if _, err := r.Put(internal(t), &pb.PutRequest{Key: k, Value: []byte(fmt.Sprint(i))}); err != nil {
					t.Fatal(err)
				}
				c.split(string(rune('a' + rng.IntN(26))))
			}
			kvs := slices.Clone(c.kvs)
			a := &assembly{r: r, rev: c.rev, base: readPoint{rev: c.rev, reserved: new(r.reservation())}}
			for step := range 60 {
				req := randomRange(rng, int64(c.rev)+2)
				switch rng.IntN(3) {
				case 0:
					kvs = ownPut(a, kvs, req.Key, int64(c.rev)+1, fmt.Sprint(step))
				case 1:
					if s, ok := keyspace.FromEtcd(req.Key, req.RangeEnd); ok && rng.IntN(2) == 0 {
						a.own.delete(s)
						kvs = slices.DeleteFunc(kvs, func(kv *mvccpb.KeyValue) bool { return s.Contains(kv.Key) })
					}
				}
				if _, ok := keyspace.FromEtcd(req.Key, req.RangeEnd); !ok {
					continue
				}
				want, got := evaluate(kvs, req), &pb.RangeResponse{}
				a.reads = nil
				a.overlaid(req, got, func() {})
				if err := a.reads[0](internal(t)); err != nil {
					t.Fatal(err)
				}
				if !proto.Equal(got, want) {
					t.Fatalf("seed %d, step %d: %v\n got %v\nwant %v", seed, step, req, got, want)
				}
			}
		})
	}
}

// There is no key below the smallest one.
func TestWithoutTheSmallestKeys(t *testing.T) {
	smallest := keyspace.Span{Start: []byte{0}, End: []byte{1}}
	o := &ownState{deleted: []keyspace.Span{smallest}}
	if left := o.without(keyspace.Span{}); len(left) != 1 || !left[0].Equal(keyspace.Span{Start: []byte{1}}) {
		t.Errorf("left of everything: %v", left)
	}
}

// ownPut does a put of the transaction, to its state and to the list.
func ownPut(a *assembly, kvs []*mvccpb.KeyValue, key []byte, rev int64, value string) []*mvccpb.KeyValue {
	kv := &mvccpb.KeyValue{Key: key, Value: []byte(value), ModRevision: rev, CreateRevision: rev, Version: 1}
	i, found := slices.BinarySearchFunc(kvs, key, func(kv *mvccpb.KeyValue, k []byte) int { return strings.Compare(string(kv.Key), string(k)) })
	lived := slices.ContainsFunc(a.r.cfg.Ranges.(*cluster).kvs, func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == string(key) })
	if found {
		kv.CreateRevision, kv.Version = kvs[i].CreateRevision, kvs[i].Version+1
		kvs = slices.Replace(slices.Clone(kvs), i, i+1, kv)
	} else {
		kvs = slices.Insert(slices.Clone(kvs), i, kv)
	}
	a.own.put(proto.CloneOf(kv), lived)
	return kvs
}

// The gateway bounds what it coordinates.
func TestTransactionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		r.coordinator.bytes = budget.New(50, 100)
		f.answer = func(keyspace.RangeID, rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			time.Sleep(300 * time.Millisecond)
			return nil, nil
		}
		txn := &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", strings.Repeat("x", 60)), putAt("z", "2")}}
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := r.Txn(internal(t), txn); err != nil {
				t.Errorf("alone: %v", err)
			}
		})
		afterwards()
		wg.Go(func() {
			if _, err := r.Txn(internal(t), txn); err != nil {
				t.Errorf("beside another one: %v", err)
			}
		})
		afterwards()
		if r.coordinator.bytes.Waiting() != 1 {
			t.Error("beside another one it does not wait")
		}
		ctx, cancel := context.WithTimeout(internal(t), 10*time.Millisecond)
		defer cancel()
		if _, err := r.Txn(ctx, txn); !errors.Is(err, kverror.DeadlineExceeded) {
			t.Errorf("beside two, until its deadline: %v", err)
		}
		wg.Wait()
		time.Sleep(time.Second) // their locks are ended
		wg.Go(func() {
			if _, err := r.Txn(internal(t), txn); err != nil {
				t.Errorf("before a drain: %v", err)
			}
		})
		afterwards()
		r.Drain(internal(t))
		if len(r.coordinator.active) != 0 {
			t.Error("a drain does not wait")
		}
		wg.Wait()
		if _, err := r.Txn(internal(t), txn); !errors.Is(err, kverror.Stopped) {
			t.Errorf("after a drain: %v", err)
		}
		r.Stop()
	})
}

// A transaction without a client still counts: its bytes stay reserved until it is decided and its
// locks are ended.
func TestWhatGoesOnWithoutItsClientCounts(t *testing.T) {
	for _, slow := range []string{"commit", "resolve"} {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			ctx, cancel := context.WithCancel(internal(t))
			f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
				if s := f.show(id, op); strings.HasPrefix(s, slow) {
					cancel()
					time.Sleep(time.Second)
				}
				return nil, nil
			}
			_, err := r.Txn(ctx, &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}})
			if slow == "commit" && !errors.Is(err, kverror.Canceled) {
				t.Errorf("%v", err)
			}
			r.coordinator.mu.Lock()
			bytes := r.coordinator.bytes.Held()
			r.coordinator.mu.Unlock()
			if bytes == 0 {
				t.Errorf("a transaction at its %s is not counted", slow)
			}
			time.Sleep(5 * time.Second)
			r.Stop()
			if r.coordinator.bytes.Held() != 0 || r.coordinator.aborts != 0 {
				t.Errorf("%d bytes, %d aborts left", r.coordinator.bytes.Held(), r.coordinator.aborts)
			}
		})
	}
}

// The answer of a transaction counts in the budget of answers, but does not wait: others may wait
// for its locks, and a transaction that has happened gets its answer.
func TestAnswersOfTransactionsAreBounded(t *testing.T) {
	large := &mvccpb.KeyValue{Key: []byte("k"), Value: []byte(strings.Repeat("v", 200))}
	for name, c := range map[string]struct {
		most  int64
		reads bool
		want  error
	}{
		"previous values":            {most: 10000},
		"previous values, too large": {most: 100, want: kverror.AnswerTooLarge},
		"reads":                      {most: 10000, reads: true},
		"reads, too large":           {most: 100, reads: true, want: kverror.Timeout},
	} {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			r.cfg.Answers = budget.New(100, c.most)
			first, leader := full(t, r, 100)
			f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
				p, ok := op.(*rangeapi.Prepare)
				if !ok || c.reads {
					return nil, nil
				}
				a := &rangeapi.Prepared{Held: true, Changes: true}
				for _, w := range p.Writes {
					a.Results = append(a.Results, rangeapi.WriteResult{Number: w.Number, Version: 2, Prevs: []*mvccpb.KeyValue{large}})
				}
				return a, nil
			}
			f.read = func(*rangeapi.Request) (*rangeapi.Response, error) {
				return &rangeapi.Response{Op: &pb.RangeResponse{Kvs: []*mvccpb.KeyValue{large}, Count: 1}}, nil
			}
			req := &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}}
			if c.reads {
				req.Success = append(req.Success, getAt("m"))
			}
			_, err := r.Txn(internal(t), req)
			if !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", name, err, c.want)
			}
			afterwards()
			r.Stop()
			first.Release()
			leader.Release()
			if got := r.cfg.Answers.Held(); got != 0 {
				t.Errorf("%s: %d bytes are held", name, got)
			}
			if committed := strings.Contains(f.commands(), "commit"); committed == errors.Is(c.want, kverror.AnswerTooLarge) {
				t.Errorf("%s: %s", name, f.commands())
			}
		})
	}
}

// Running aborts are bounded: the ranges end the other locks.
func TestAbortsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		running, most := 0, 0
		f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			switch op.(type) {
			case *rangeapi.Prepare:
				if id != 1 {
					return nil, kverror.New(kverror.NoSpace, "")
				}
			case *rangeapi.Resolve:
				f.mu.Lock()
				running++
				most = max(most, running)
				f.mu.Unlock()
				time.Sleep(10 * time.Second)
				f.mu.Lock()
				running--
				f.mu.Unlock()
			}
			return nil, nil
		}
		for range maxAborts + 100 {
			_, err := r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}})
			if !errors.Is(err, kverror.NoSpace) {
				t.Fatal(err)
			}
		}
		afterwards()
		f.mu.Lock()
		if most == 0 || most > 2*maxAborts {
			t.Errorf("%d commands run", most)
		}
		f.mu.Unlock()
		time.Sleep(time.Minute)
		r.Stop()
		if r.coordinator.bytes.Held() != 0 || r.coordinator.aborts != 0 {
			t.Errorf("%d bytes, %d aborts left", r.coordinator.bytes.Held(), r.coordinator.aborts)
		}
	})
}

// FuzzReadsQuestion: any bytes of method 25 get an answer or an error.
func FuzzReadsQuestion(f *testing.F) {
	f.Add([]byte{readsWireVersion, 9})
	f.Add([]byte{readsWireVersion})
	_, r := newRanges()
	if a, err := r.handleReads(f.Context(), 1, []byte{readsWireVersion}); err == nil {
		f.Fatalf("a question without a revision is answered with %x", a)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := r.handleReads(internal(t), 1, b)
		if (err == nil) != (len(a) == 2 && a[0] == readsWireVersion && a[1] == 0) {
			t.Fatalf("%x is answered with %x, %v", b, a, err)
		}
	})
}

// FuzzTxnQuestion: any bytes of method 20 get an answer or an error.
func FuzzTxnQuestion(f *testing.F) {
	f.Add(rangeapi.AppendName([]byte{txnWireVersion}, rangeapi.TxnName{TxnID: rangeapi.TxnID{Start: 9, Node: 2, Boot: 5, Counter: 1}, Attempt: 1}))
	f.Add([]byte{txnWireVersion})
	_, r := newRanges()
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := r.handleTxn(internal(t), 1, b)
		if (err == nil) != (len(a) == 2 && a[0] == txnWireVersion && a[1] == 0) {
			t.Fatalf("%x is answered with %x, %v", b, a, err)
		}
	})
}

// afterwards waits until everything that transactions leave has ended, also forgetting records. It
// is called in a bubble.
func afterwards() {
	time.Sleep(forgetEvery)
	synctest.Wait()
}

// Records are forgotten together and hold no budget until then. A node that stops does not wait for
// that.
func TestRecordsAreForgottenTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		var when []time.Time // guarded by f.mu
		f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			if _, ok := op.(*rangeapi.Forget); ok {
				f.mu.Lock()
				defer f.mu.Unlock()
				when = append(when, time.Now())
			}
			return nil, nil
		}
		commit := func() {
			if _, err := r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{putAt("a", "1"), putAt("z", "2")}}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		is := func(forgotten, attempts int) {
			t.Helper()
			f.mu.Lock()
			defer f.mu.Unlock()
			r.coordinator.mu.Lock()
			defer r.coordinator.mu.Unlock()
			if len(when) != forgotten || len(r.coordinator.active) != attempts || r.coordinator.bytes.Held() != 0 {
				t.Errorf("records were forgotten at %v, %d attempts are left, %d bytes held", when, len(r.coordinator.active), r.coordinator.bytes.Held())
			}
			for _, at := range when {
				if !at.Equal(when[0]) {
					t.Errorf("records were forgotten each by itself, at %v", when)
				}
			}
		}
		for range 3 {
			commit()
			time.Sleep(forgetEvery / 8)
		}
		is(0, 3)
		afterwards()
		is(3, 0)
		commit()
		began := time.Now()
		r.Drain(internal(t))
		r.Stop()
		if took := time.Since(began); took > forgetEvery || len(when) != 4 {
			t.Errorf("the node stopped after %v with %d records forgotten", took, len(when))
		}
	})
}
