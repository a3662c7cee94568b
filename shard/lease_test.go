package shard

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
	"github.com/skeindb/skein/shard/eval"
	"github.com/skeindb/skein/shard/pipeline"
)

// fakeLeases has the records of leases. It answers by itself where auto is set.
type fakeLeases struct {
	wg sync.WaitGroup
	mu sync.Mutex
	// Guarded by mu.
	auto  bool
	known map[keyspace.LeaseID]keyspace.LeaseIncarnation
	asks  []leaseAsk
}

type leaseAsk struct {
	lease keyspace.LeaseID
	span  keyspace.Span
	done  func(keyspace.LeaseRegistration, error)
}

func (f *fakeLeases) Register(lease keyspace.LeaseID, span keyspace.Span, done func(keyspace.LeaseRegistration, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ask := leaseAsk{lease, span, done}
	if !f.auto {
		f.asks = append(f.asks, ask)
		return
	}
	got, err := f.answerLocked(ask)
	f.wg.Go(func() { done(got, err) })
}

func (f *fakeLeases) answerLocked(a leaseAsk) (keyspace.LeaseRegistration, error) {
	i, ok := f.known[a.lease]
	if !ok {
		return keyspace.LeaseRegistration{}, kverror.LeaseNotFound
	}
	return keyspace.LeaseRegistration{Incarnation: i}, nil
}

// leaseCommand runs the commands of a story that have to do with leases:
//
//	grant lease=N [as=INCARNATION]   there is such a lease; expire lease=N: there is none
//	registrations   what the leases' records are asked
//	register [n=0] [error=KIND]      answers one of these, with manual leases
//	write version=N   the version in which the node writes
//	refuse          answers registration 0, and refuses what waits, as a doubt without an end does
//	leases          attachments and index, which must agree with the versions
func (s *story) leaseCommand(t *testing.T, d *datadriven.TestData) (out string, ok bool) {
	t.Helper()
	f := &s.w.leases
	lease := keyspace.LeaseID(arg(d, "lease", int64(0)))
	f.mu.Lock()
	defer f.mu.Unlock()
	switch d.Cmd {
	case "grant":
		f.known[lease] = keyspace.LeaseIncarnation(arg(d, "as", 1))
	case "write":
		s.w.written.Store(uint32(arg(d, "version", 0)))
	case "expire":
		delete(f.known, lease)
	case "registrations":
		for _, a := range f.asks {
			out += fmt.Sprintf("lease %d for %s\n", a.lease, a.span)
		}
	case "register":
		n := arg(d, "n", 0)
		if n >= len(f.asks) {
			return fmt.Sprintf("nothing is asked at %d\n", n), true
		}
		a := f.asks[n]
		f.asks = slices.Delete(f.asks, n, n+1)
		got, err := f.answerLocked(a)
		if k := arg(d, "error", ""); k == "no-leader" {
			err = kverror.NoLeader
		} else if k == "timeout" {
			err = kverror.Timeout
		} else if k == "not-found" {
			got, err = keyspace.LeaseRegistration{}, kverror.LeaseNotFound
		}
		f.mu.Unlock()
		a.done(got, err)
		f.mu.Lock()
	case "refuse":
		a := f.asks[0]
		f.asks = f.asks[1:]
		got, err := f.answerLocked(a)
		release, r := s.w.store.pipes.Pool.Hold(), s.w.store.Replica(1)
		f.mu.Unlock()
		a.done(got, err)
		var answers pipeline.Answers
		r.mu.Lock()
		r.pipe.Refuse(&answers, r.doubtedLocked())
		r.mu.Unlock()
		r.pipe.Send(&answers)
		release()
		f.mu.Lock()
	case "leases":
		return leasesText(t, s.w.engine, s.w.store), true
	default:
		return "", false
	}
	return out, true
}

// leasesText prints attachments and index of a node, and checks them.
func leasesText(t testing.TB, e *engine.Engine, s *Store) string {
	t.Helper()
	var lines []string
	for _, r := range s.Replicas() {
		r.mu.Lock()
		for lease, i := range r.leases.attached {
			lines = append(lines, fmt.Sprintf("range %s attachment %d/%d", r.id, lease, i))
		}
		for lease, reg := range r.leases.changing {
			lines = append(lines, fmt.Sprintf("range %s lease %d %s, %d wait", r.id, lease, [...]string{"asked", "attaches", "placed", "detaches"}[reg.state], len(reg.waiting())))
		}
		r.mu.Unlock()
		checkLeases(t, e, r)
	}
	for _, a := range allAttached(t, e) {
		lines = append(lines, fmt.Sprintf("lease %d: %s", a.to, a.key))
	}
	return strings.Join(sortedLines(lines), "")
}

// allAttached is the whole index.
func allAttached(t testing.TB, e engine.Reader) (all []indexChange) {
	t.Helper()
	first, last := engine.LeaseSpan(0, keyspace.Span{}), engine.LeaseSpan(-1, keyspace.Span{})
	it, err := e.NewIter(engine.IterOptions{Lower: first.Lower, Upper: last.Upper})
	if err != nil {
		t.Fatal(err)
	}
	for ok := it.First(); ok; ok = it.Next() {
		lease, key, err := engine.DecodeLeaseKey(it.Key())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, indexChange{key: slices.Clone(key), to: lease})
	}
	if err := it.Close(); err != nil {
		t.Fatal(err)
	}
	return all
}

// checkLeases checks a replica's applied state: the index has exactly the keys that are attached,
// and each of their leases has an attachment.
func checkLeases(t testing.TB, e *engine.Engine, r *Replica) {
	t.Helper()
	r.mu.Lock()
	span, leases := r.rec.Span, map[keyspace.LeaseID]bool{}
	for lease := range r.leases.attached {
		leases[lease] = true
	}
	r.mu.Unlock()
	snap := e.NewSnapshot()
	defer snap.Close()
	attached := map[string]keyspace.LeaseID{}
	_, err := mvcc.Scan(snap, mvcc.ScanOptions{Span: span, At: eval.Newest, KeysOnly: true}, func(v *mvcc.Version) error {
		if v.Lease == 0 {
			return nil
		}
		attached[string(v.Key)] = v.Lease
		if !leases[v.Lease] {
			t.Errorf("range %s: key %q is attached to lease %d without an attachment", r.id, v.Key, v.Lease)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range allAttached(t, snap) {
		if !span.Contains(a.key) {
			continue
		}
		if attached[string(a.key)] != a.to {
			t.Errorf("range %s: the index has key %q at lease %d, its version at %d", r.id, a.key, a.to, attached[string(a.key)])
		}
		delete(attached, string(a.key))
	}
	for key, lease := range attached {
		t.Errorf("range %s: key %q of lease %d is not in the index", r.id, key, lease)
	}
}

// The index of leases is written when a key comes to a lease or leaves it, and not by
// every put in between.
func TestIndexIsWrittenOnce(t *testing.T) {
	key := []byte("k")
	s := applyState{}
	s.txns.PutAttachment(rangeapi.Attachment{Lease: 7, Incarnation: 1})
	s.txns.PutAttachment(rangeapi.Attachment{Lease: 8, Incarnation: 1})
	for i, c := range []struct {
		v    mvcc.Version
		was  keyspace.LeaseID
		want []indexChange
	}{
		{mvcc.Version{Create: 2, Version: 1, Lease: 7}, 0, []indexChange{{key: key, to: 7}}},
		{mvcc.Version{Create: 2, Version: 2, Lease: 7}, 7, nil},
		{mvcc.Version{Create: 2, Version: 3, Lease: 8}, 7, []indexChange{{key: key, to: 8, from: 7}}},
		{mvcc.Version{Create: 2, Version: 4}, 8, []indexChange{{key: key, from: 8}}},
		{mvcc.Version{Create: 2, Version: 5}, 0, nil},
		{mvcc.Version{Create: 2, Version: 6, Lease: -7}, 0, []indexChange{{key: key, to: -7}}}, // no attachment
	} {
		c.v.Key, c.v.Mod = key, keyspace.Revision(2+i)
		b := command.AppendVersion(nil, &c.v, command.Prior{Lived: i > 0, Lease: c.was})
		var v mvcc.Version
		before, rest, err := command.DecodeVersion(b, c.v.Mod, &v)
		if err != nil || len(rest) > 0 || before.Lease != c.was {
			t.Fatalf("%+v from lease %d came back as %+v from %d: %v", c.v, c.was, v, before.Lease, err)
		}
		s.attached = nil
		s.addVersion(&v, before, &outcome{})
		err = s.checkLacking()
		if got, want := fmt.Sprint(s.attached), fmt.Sprint(c.want); got != want || (err != nil) != (c.v.Lease < 0) {
			t.Errorf("step %d: %s, want %s; %v", i, got, want, err)
		}
	}
}
