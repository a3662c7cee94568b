package mvcc

import (
	"fmt"
	"slices"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// checkCut compares a cut, read in small pages, with the versions that the model selects.
func (w *workload) checkCut() {
	w.t.Helper()
	s := w.span()
	c := Cut{Select: Selection(1 + w.rng.IntN(4)), At: min(w.revision(), w.rev)}
	if c.Select != SelectLatest {
		c.After = max(w.m.compacted, 0) + keyspace.Revision(w.rng.Int64N(int64(c.At-max(w.m.compacted, 0))+1))
		if c.Select != SelectKept && c.After == c.At && w.rng.IntN(2) == 0 {
			c.After = max(c.After-1, 0) // as far as one below the compacted revision
		}
	}
	if err := c.Check(); err != nil || c.Lowest() < w.m.compacted {
		w.t.Fatalf("%+v of a store compacted to %d: %v", c, w.m.compacted, err)
	}
	var want, got []string
	for _, k := range w.m.keys(s) {
		for _, v := range slices.Backward(w.m.versions[k]) {
			newest, _ := w.m.at(k, c.At)
			take := false
			switch c.Select {
			case SelectLatest:
				take = v.Mod == newest.Mod && !v.Tombstone
			case SelectKept:
				take = w.m.kept(v, c.After)
			case SelectChanges:
				take = v.Mod == newest.Mod && v.Mod > c.After
			case SelectAll:
				take = v.Mod > c.After
			}
			if take && v.Mod <= c.At {
				want = append(want, line(&v))
			}
		}
	}
	o := CutOptions{Cut: c, From: VersionCursor{Key: s.Start}, End: s.End, MaxBytes: int64(w.rng.IntN(60)), MaxVisits: int64(w.rng.IntN(5))}
	for {
		size, n, last := int64(0), 0, Version{}
		next, err := Versions(w.e, o, func(st *StoredVersion) error {
			var v Version
			size, n = size+int64(len(st.Key)+len(st.Value)), n+1
			err := st.Decode(&v)
			got = append(got, line(&v))
			last = v.Clone()
			return err
		})
		switch {
		case err != nil:
			w.t.Fatal(err)
		case o.MaxBytes > 0 && n > 1 && size > o.MaxBytes:
			w.t.Fatalf("a page of %d versions has %d bytes, allowed are %d", n, size, o.MaxBytes)
		}
		if next == nil {
			break
		}
		if n > 0 && w.rng.IntN(2) == 0 {
			*next = c.Behind(last.Key, last.Mod)
		}
		if string(next.Key) < string(o.From.Key) || string(next.Key) == string(o.From.Key) && o.From.Below > 0 && next.Below >= o.From.Below {
			w.t.Fatalf("a page from %q below %d goes on at %q below %d", o.From.Key, o.From.Below, next.Key, next.Below)
		}
		o.From = *next
	}
	equal(w.t, fmt.Sprintf("cut %+v of %s", c, s), got, want)
}

// TestCutIsChecked: what makes no sense is refused before anything is read.
func TestCutIsChecked(t *testing.T) {
	for _, c := range []Cut{{}, {Select: 5, At: 3}, {Select: SelectLatest, At: 3, After: 1}, {Select: SelectAll, At: 3, After: 4}, {Select: SelectKept, At: -1, After: -1}, {Select: SelectKept, At: keyspace.MaxRevision}} {
		if c.Check() == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}
