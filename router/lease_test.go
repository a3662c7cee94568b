package router

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

var everywhere = []keyspace.Span{{}}

// answers has the ranges answer each matching command once as given, and then as usual.
func (f *ranges) answers(all map[string]any) {
	f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		for match, answer := range all {
			if !strings.Contains(f.show(id, op), match) {
				continue
			}
			delete(all, match)
			if err, ok := answer.(error); ok {
				return nil, err
			}
			return answer.(rangeapi.TxnAnswer), nil
		}
		return nil, nil
	}
}

func withoutKeys(id keyspace.RangeID) *rangeapi.Prepared {
	return &rangeapi.Prepared{Held: true, Lock: rangeapi.LockID{Range: id}}
}

// A revoke's commands to the ranges, and its results.
func TestCourseOfARevoke(t *testing.T) {
	first := []keyspace.Span{{Start: []byte("b"), End: []byte("c")}, {Start: []byte("a"), End: []byte("b")}, {Start: []byte("a"), End: []byte("aa")}}
	const usual = "revoke prepare 1 at 1; revoke prepare 1 at 2; revoke prepare 1 at 3; commit 1@8 of 3 at 1; " +
		"resolve 1@8 at 1; resolve 1@8 at 2; resolve 1@8 at 3; forget 1 at 1"
	for name, c := range map[string]struct {
		spans   []keyspace.Span
		checked keyspace.Revision
		answers map[string]any
		want    string
		at      keyspace.Revision
		named   int
		error   error
	}{
		"the keys are in one range": {spans: first, answers: map[string]any{"revoke": &rangeapi.Revoked{Revision: 9}}, want: "revoke at 1", at: 9},
		"there is no key":           {spans: first, want: "revoke at 1", at: 7},
		"no range was registered":   {at: 7},
		"a leader is lost": {
			spans: first, answers: map[string]any{"revoke": kverror.New(kverror.LeaderChanged, "")}, want: "revoke at 1; revoke at 1", at: 7,
		},
		"they do not fit into an entry": {
			spans: first, answers: map[string]any{"revoke": &rangeapi.Revoked{TooMany: true}},
			want: "revoke at 1; revoke prepare 1 at 1; commit 1@8 of 1 at 1; resolve 1@8 at 1; forget 1 at 1", at: 8, named: 1,
		},
		"the keys are in all ranges": {spans: everywhere, want: usual, at: 8, named: 3},
		"some ranges have none": {
			spans:   everywhere,
			answers: map[string]any{"prepare 1 at 1": withoutKeys(1), "prepare 1 at 3": withoutKeys(3)},
			want:    usual, at: 8, named: 1,
		},
		"no range has any": {
			spans:   everywhere,
			answers: map[string]any{"prepare 1 at 1": withoutKeys(1), "prepare 1 at 2": withoutKeys(2), "prepare 1 at 3": withoutKeys(3)},
			want: "revoke prepare 1 at 1; revoke prepare 1 at 2; revoke prepare 1 at 3; " +
				"resolve 1@0 detach 7/2 at 1; resolve 1@0 detach 7/2 at 2; resolve 1@0 detach 7/2 at 3", at: 7,
		},
		"no range had any, but others have decided against it": {
			spans: everywhere,
			answers: map[string]any{
				"prepare 1 at 1": withoutKeys(1), "prepare 1 at 2": withoutKeys(2), "prepare 1 at 3": withoutKeys(3),
				"detach 7/2 at 2": kverror.New(kverror.Conflict, ""),
				"prepare 2 at 1":  withoutKeys(1), "prepare 2 at 3": withoutKeys(3),
			},
			want: "revoke prepare 2 at 1; revoke prepare 2 at 2; revoke prepare 2 at 3; commit 2@8 of 3 at 1", at: 8, named: 1,
		},
		"it meets an older transaction": {
			spans:   everywhere,
			answers: map[string]any{"prepare 1 at 3": kverror.New(kverror.Conflict, "")},
			want:    "revoke prepare 2 at 3 patient; commit 2@8 of 3 at 1", at: 8, named: 3,
		},
		"others have decided against it": {
			spans: everywhere, answers: map[string]any{"commit": &rangeapi.Decided{}}, want: "commit 2@9 of 3 at 1", at: 9, named: 3,
		},
		"a key in one range is newer than the check": {
			spans: first, checked: 5, answers: map[string]any{"revoke": kverror.New(kverror.KeysChanged, "")}, want: "revoke checked=5 at 1", error: kverror.KeysChanged,
		},
		"a key in one of several ranges is newer than the check": {
			spans: everywhere, checked: 5, answers: map[string]any{"prepare 1 at 3": kverror.New(kverror.KeysChanged, "")},
			want: "resolve 1@0 at 1", error: kverror.KeysChanged,
		},
		"the check holds": {spans: everywhere, checked: 5, want: "revoke checked=5 prepare 1 at 3", at: 8, named: 3},
		"the gateway of a range is full": {
			spans: everywhere, answers: map[string]any{"prepare 1 at 3": kverror.New(kverror.TooManyRequests, "")},
			want: "resolve 1@0 at 1", error: kverror.TooManyRequests,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, r := newRanges()
				f.answers(c.answers)
				rev, err := r.RevokeLease(internal(t), 7, 2, c.spans, keyspace.KeyCheck{At: c.checked, Term: 5})
				afterwards()
				if rev != c.at || !errors.Is(err, c.error) || c.error == nil && err != nil {
					t.Errorf("revision %d, %v, want %d, %v", rev, err, c.at, c.error)
				}
				if got := f.commands(); !strings.Contains(got, c.want) {
					t.Errorf("commands %s, want %s", got, c.want)
				}
				named := 0
				for _, q := range f.sequenced {
					named = 1 + len(q.Also)
				}
				if named != c.named {
					t.Errorf("the revision names %d ranges, want %d", named, c.named)
				}
				if r.coordinator.bytes.Held() != 0 || len(r.coordinator.active) != 0 || r.coordinator.aborts != 0 {
					t.Errorf("left over: %d bytes, %d attempts, %d aborts", r.coordinator.bytes.Held(), len(r.coordinator.active), r.coordinator.aborts)
				}
			})
		})
	}
}

// A lease has ended when no range has an attachment of it. As long as one has, a merge may carry
// the attachment to keys that only the lease's record lists, and the record goes then.
func TestRevokeIsOverWithItsLocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		goOn := make(chan struct{})
		f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			if q, ok := op.(*rangeapi.Resolve); ok && id == 3 && q.Revision != 0 {
				<-goOn
			}
			return nil, nil
		}
		var at keyspace.Revision
		var err error
		over := make(chan struct{})
		go func() {
			defer close(over)
			at, err = r.RevokeLease(internal(t), 7, 2, everywhere, keyspace.KeyCheck{})
		}()
		synctest.Wait()
		select {
		case <-over:
			t.Errorf("the lease has ended, and range 3 has it locked and attached: %s", f.commands())
		default:
		}
		close(goOn)
		<-over
		if at != 8 || err != nil {
			t.Errorf("ended at %d, %v", at, err)
		}
		afterwards()
	})
}

// If the locks cannot be ended, the revoke starts over and finds what is left.
func TestRevokeWhoseLocksStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		lost := true // guarded by f.mu
		f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			switch o := op.(type) {
			case *rangeapi.Prepare:
				if lost = lost && o.Name.Attempt == 1; !lost && id != 3 {
					return withoutKeys(id), nil
				}
			case *rangeapi.Resolve:
				if lost && id == 3 && o.Revision != 0 {
					return nil, kverror.NoLeader
				}
			}
			return nil, nil
		}
		at, err := r.RevokeLease(internal(t), 7, 2, everywhere, keyspace.KeyCheck{})
		afterwards()
		if at != 9 || err != nil || !strings.Contains(f.commands(), "commit 2@9 of 3 at 1") {
			t.Errorf("ended at %d, %v, after %s", at, err, f.commands())
		}
	})
}

// A lease whose spans have become very many ranges ends in one revision, as long as its keys lie in
// no more ranges than a revision may concern.
func TestRevokeOverVeryManyRanges(t *testing.T) {
	for _, c := range []struct{ ranges, keys, revisions int }{
		{keyspace.MaxRevisionRanges + 300, 40, 1},
		{keyspace.MaxRevisionRanges + 300, keyspace.MaxRevisionRanges, 1},
		{keyspace.MaxRevisionRanges + 300, keyspace.MaxRevisionRanges + 1, 2},
		{maxRevokeRanges + 2, maxRevokeRanges + 2, 5},
	} {
		synctest.Test(t, func(t *testing.T) {
			f, r := newRanges()
			for i := range c.ranges - 3 {
				f.split(fmt.Sprintf("m%04d", i))
			}
			f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
				if p, ok := op.(*rangeapi.Prepare); ok && p.Revoke != 0 && int(id) > c.keys {
					return withoutKeys(id), nil
				}
				return nil, nil
			}
			if _, err := r.RevokeLease(internal(t), 7, 2, everywhere, keyspace.KeyCheck{}); err != nil {
				t.Error(err)
			}
			time.Sleep(forgetEvery) // until the records are forgotten
			synctest.Wait()
			named := 0
			for _, q := range f.sequenced {
				named += 1 + len(q.Also)
			}
			if len(f.sequenced) != c.revisions || named != c.keys {
				t.Errorf("%d keys in %d ranges: %d revisions name %d", c.keys, c.ranges, len(f.sequenced), named)
			}
			if r.coordinator.bytes.Held() != 0 || len(r.coordinator.active) != 0 || r.coordinator.aborts != 0 {
				t.Errorf("left over: %d bytes, %d attempts, %d aborts", r.coordinator.bytes.Held(), len(r.coordinator.active), r.coordinator.aborts)
			}
		})
	}
}

// A transaction whose leases do not exist ends with the error of its first operation, though each
// range waits for only one of them at a time.
func TestTransactionOfUnknownLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		f.answer = func(_ keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			p, ok := op.(*rangeapi.Prepare)
			if !ok {
				return nil, nil
			}
			put := p.Writes[0].Op.(*pb.PutRequest)
			if !p.WaitForOlder && !strings.Contains(fmt.Sprint(p.Absent), fmt.Sprint(put.GetLease())) {
				return nil, kverror.New(kverror.Conflict, "")
			}
			return &rangeapi.Prepared{Held: true, Lock: rangeapi.LockID{Range: 1}, Refused: kverror.New(kverror.LeaseNotFound, ""), RefusedAt: p.Writes[0].Number}, nil
		}
		put := func(k string, lease int64) *pb.RequestOp {
			return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: []byte(k), Lease: lease}}}
		}
		_, err := r.Txn(internal(t), &pb.TxnRequest{Success: []*pb.RequestOp{put("a", 71), put("k", 72), put("z", 73)}})
		if !errors.Is(err, kverror.LeaseNotFound) {
			t.Errorf("got %v", err)
		}
		afterwards()
		if n := strings.Count(f.commands(), "prepare"); n > 12 {
			t.Errorf("it took %d prepares: %s", n, f.commands())
		}
	})
}

// The keys of a lease come from pages and ranges, across a split.
func TestLeaseKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, r := newRanges()
		split := false
		f.answer = func(id keyspace.RangeID, op rangeapi.TxnCommand) (rangeapi.TxnAnswer, error) {
			q := op.(*rangeapi.LeaseKeys)
			if q.At != 7 || q.Lease != 5 {
				t.Errorf("asked for %+v", q)
			}
			f.cluster.mu.Lock()
			defer f.cluster.mu.Unlock()
			if id == 2 && !split {
				split = true
				f.split("k")
				return nil, &kverror.Error{Kind: kverror.WrongRange, Descriptors: f.descs}
			}
			a := &rangeapi.Attached{}
			for k := 'a'; k <= 'z'; k++ {
				if key := []byte(string(k)); q.Span.Contains(key) {
					if a.More = len(a.Keys) == 3; a.More {
						break
					}
					a.Keys = append(a.Keys, key)
				}
			}
			return a, nil
		}
		keys, rev, err := r.LeaseKeys(internal(t), 5, []keyspace.Span{{Start: []byte("j"), End: []byte("y")}, {Start: []byte("b"), End: []byte("e")}})
		if got := fmt.Sprintf("%s", keys); got != "[b c d j k l m n o p q r s t u v w x]" || rev != 7 || err != nil {
			t.Errorf("keys %s at %d, %v", got, rev, err)
		}
		if n := r.cfg.Answers.Held(); n != 0 {
			t.Errorf("%d bytes are left", n)
		}
	})
}
