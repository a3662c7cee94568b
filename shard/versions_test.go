package shard

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// A replica gives a cut alone, without a leader, up to what it has resolved, and as long as its own compacted
// revision says that nothing of the cut is removed.
func TestVersionsOfACut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		var l logWriter
		l.rev = 1
		g := w.filled(l.batch(5, 1, "a", "b"), l.batch(5, 1, "-a", "c")) // revisions 2 to 5
		g.lead(raftgroup.LeaderState{Term: 6})                           // nobody leads
		read := func(q rangeapi.VersionsRequest) (string, error) {
			var got []string
			q.Range, q.Generation = 1, max(q.Generation, 1)
			for q.MaxBytes = 1; ; {
				p, err := w.store.Versions(t.Context(), &q)
				if err != nil {
					return "", err
				}
				if err := p.Each(func(s *mvcc.StoredVersion) error {
					var v mvcc.Version
					err := s.Decode(&v)
					got = append(got, fmt.Sprintf("%s%s@%d", map[bool]string{true: "-"}[v.Tombstone], v.Key, v.Mod))
					return err
				}); err != nil {
					t.Fatal(err)
				}
				if p.Next == nil {
					return strings.Join(got, " "), nil
				}
				q.From = *p.Next
			}
		}
		cut := func(s mvcc.Selection, after, at keyspace.Revision) rangeapi.VersionsRequest {
			return rangeapi.VersionsRequest{Cut: mvcc.Cut{Select: s, At: at, After: after}}
		}
		check := func(q rangeapi.VersionsRequest, want string, wantErr error) {
			t.Helper()
			got, err := read(q)
			if got != want || !errors.Is(err, wantErr) {
				t.Errorf("%+v: %q, %v, want %q, %v", q.Cut, got, err, want, wantErr)
			}
		}
		check(cut(mvcc.SelectLatest, 0, 3), "a@2 b@3", nil)
		check(cut(mvcc.SelectLatest, 0, 5), "b@3 c@5", nil)
		check(cut(mvcc.SelectKept, 0, 5), "-a@4 a@2 b@3 c@5", nil)
		check(cut(mvcc.SelectKept, 5, 5), "b@3 c@5", nil)
		check(cut(mvcc.SelectChanges, 2, 5), "-a@4 b@3 c@5", nil)
		check(cut(mvcc.SelectAll, 3, 4), "-a@4", nil)
		check(cut(mvcc.SelectAll, 1, 6), "", kverror.ReadAgain)
		check(rangeapi.VersionsRequest{Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 5}, From: mvcc.VersionCursor{Key: []byte("a"), Below: 4}, End: []byte("c")}, "a@2 b@3", nil)
		other := cut(mvcc.SelectAll, 0, 5)
		other.Generation = 2
		check(other, "", kverror.WrongRange)
		if err := g.apply(numbered(command.KindCompact, 5, 1, 4)); err != nil {
			t.Fatal(err)
		}
		check(cut(mvcc.SelectKept, 3, 5), "", kverror.HoldEnded)
		check(cut(mvcc.SelectKept, 4, 5), "-a@4 b@3 c@5", nil)
		check(cut(mvcc.SelectAll, 3, 5), "-a@4 c@5", nil)
		check(cut(mvcc.SelectAll, 2, 5), "", kverror.HoldEnded)
		check(cut(mvcc.SelectLatest, 0, 3), "", kverror.HoldEnded)
		check(cut(mvcc.SelectLatest, 0, 4), "b@3", nil)
	})
}

// A range is compacted as far as holds let it be, and further when they move up and end. Nothing is compacted
// before the node knows what is held. Clients are refused what the cluster has compacted, and who waits for a
// physical compaction does not wait for a hold.
func TestHeldVersions(t *testing.T) {
	virtually(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.store.held.Store(-1) // as with Config.Holds
		w.seq.auto, w.seq.last = true, 1
		w.serve(1, 5)
		for i := range 9 {
			w.put(t.Context(), "a", fmt.Sprint(i)) // revisions 2 to 10
		}
		check := func(when string, want keyspace.Revision, raised bool, left ...keyspace.Revision) {
			t.Helper()
			time.Sleep(2 * maintenanceRetry)
			w.settle()
			if c := w.store.Replica(1).Show().Compacted; c != want {
				t.Errorf("%s: compacted up to %d, want %d", when, c, want)
			}
			if m := w.store.removalMarks(8, 0); len(m) != 1 || m[0].Raised != raised {
				t.Errorf("%s: %+v", when, m)
			}
			var got []keyspace.Revision
			if _, err := mvcc.Versions(w.store.cfg.Engine, mvcc.CutOptions{Cut: mvcc.Cut{Select: mvcc.SelectKept, At: 20}}, func(v *mvcc.StoredVersion) error {
				got = append(got, v.Mod)
				return nil
			}); err != nil || !slices.Equal(got, left) {
				t.Errorf("%s: there are versions %v, %v, want %v", when, got, err, left)
			}
		}
		w.store.observe(keyspace.SequenceAnswer{Current: 10, Compacted: 8})
		check("holds are not known", 0, false, 10, 9, 8, 7, 6, 5, 4, 3, 2)
		w.store.SetHeld(4)
		check("4 is held", 4, true, 10, 9, 8, 7, 6, 5, 4)
		w.store.SetHeld(6)
		check("the hold has moved up", 6, true, 10, 9, 8, 7, 6)
		if from := w.store.Replica(1).Show().Compacted; w.store.Compacted() != 8 || from != 6 {
			t.Errorf("the cluster is compacted to %d, the range to %d", w.store.Compacted(), from)
		}
		w.store.SetHeld(keyspace.MaxRevision)
		check("nothing is held", 8, true, 10, 9, 8)
	})
}

// Trap 117: a lock whose transaction may have committed at or below the cut's revision is waited for. The cut has what
// it leaves behind.
func TestCutWaitsForALock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeWorld(t)
		defer w.stop()
		w.seq.auto, w.seq.last = true, 200
		w.serve(1, 5)
		w.put(t.Context(), "a", "v")
		w.command(t.Context(), &rangeapi.Prepare{Name: nameAged(1), Anchor: []byte("k"), Writes: writeAt("k")})
		w.seq.last = 400
		w.put(t.Context(), "a", "w") // revision 401, and the transaction may have any from 202 on
		read := func(position rangeapi.FeedPosition) (got []string, err error) {
			p, err := w.store.Versions(t.Context(), &rangeapi.VersionsRequest{
				Range: 1, Generation: 1, Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 401}, MaxBytes: 1 << 20, Position: position,
			})
			if err != nil {
				return nil, err
			}
			return got, p.Each(func(v *mvcc.StoredVersion) error {
				got = append(got, fmt.Sprintf("%s@%d", v.Key, v.Mod))
				return nil
			})
		}
		if got, err := read(rangeapi.FeedPosition{}); !errors.Is(err, kverror.ReadAgain) {
			t.Fatalf("with the lock: %v, %v", got, err)
		}
		q := w.ask(t, 1, 401)
		q.open(t, "the lock stands")
		if a := w.command(t.Context(), &rangeapi.Resolve{Name: nameAged(1), Revision: 300}); !a.done || a.err != nil {
			t.Fatalf("%+v", a)
		}
		<-q.done
		if q.err != nil {
			t.Fatal(q.err)
		}
		for when, position := range map[string]rangeapi.FeedPosition{"resolved": {}, "by the leader's word": q.applied} {
			if got, err := read(position); err != nil || strings.Join(got, " ") != "a@401 a@201 k@300" {
				t.Errorf("%s: %v, %v", when, got, err)
			}
		}
	})
}
