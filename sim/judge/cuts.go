package judge

import (
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/mvcc"
)

// Cut is the reading of a cut through the whole store, as a backup makes one.
type Cut struct {
	dataapi.Cut
	// Call and Return are places in the order of the history: before the cut was asked for, and when it was made. Began
	// is the virtual time of the first.
	Call, Return int64
	Began        time.Duration
	// Parts are what was read of it. Not all of it need have been answered.
	Parts []CutPart
}

// CutPart is one selection of a cut's versions, read to its end.
type CutPart struct {
	mvcc.Cut
	// Versions are in the order of keys, revisions and operations.
	Versions []Version
	// Over says when it was read.
	Over time.Duration
}

func (p *CutPart) String() string {
	return fmt.Sprintf("the %s at revision %d after %d, read at %v", p.Select, p.At, p.After, p.Over)
}

// checkCuts compares every reading of a cut with the history at its revision, and leases.
func checkCuts(cuts []*Cut, ops []*Op, vs []Version) (bad []string) {
	vs = slices.SortedFunc(slices.Values(vs), CompareByKey)
	ls := lives(ops)
	for _, c := range cuts {
		for i := range c.Parts {
			p := &c.Parts[i]
			if d := FirstDifference(Takes(vs, &p.Cut), p.Versions); d != "" {
				bad = append(bad, fmt.Sprintf("cut: %v: the history, then the cut: %s", p, d))
			}
		}
		bad = append(bad, c.restores(cuts)...)
		bad = append(bad, c.checkLeases(ls)...)
	}
	return bad
}

// Takes returns what a selection takes of a store, which is in the order of keys, revisions and operations.
func Takes(vs []Version, c *mvcc.Cut) (out []Version) {
	at, after := int64(c.At), int64(c.After)
	vs = slices.DeleteFunc(slices.Clone(vs), func(v Version) bool { return v.Mod > at })
	for i, v := range vs {
		// The writes of one transaction to a key go or stay as a whole, and the last one says what the key is then.
		last, newest, newestOld := v, true, true
		for _, w := range vs[i+1:] {
			if w.Key != v.Key {
				break
			}
			if w.Mod == v.Mod {
				last = w
				continue
			}
			newest, newestOld = false, newestOld && w.Mod > after
		}
		var takes bool
		switch c.Select {
		case mvcc.SelectLatest:
			takes = newest && !v.Deleted && v == last
		case mvcc.SelectKept:
			takes = v.Mod > after || newestOld && (!last.Deleted || v.Mod == after) // a watch may begin at a tombstone
		case mvcc.SelectChanges:
			takes = newest && v.Mod > after
		case mvcc.SelectAll:
			takes = v.Mod > after
		}
		if takes {
			out = append(out, v)
		}
	}
	return out
}

// restores checks that the keys at an earlier cut and all versions since are the keys at this one, without the history.
func (c *Cut) restores(cuts []*Cut) (bad []string) {
	latest := func(c *Cut) *CutPart {
		i := slices.IndexFunc(c.Parts, func(p CutPart) bool { return p.Select == mvcc.SelectLatest })
		if i < 0 {
			return nil
		}
		return &c.Parts[i]
	}
	want := latest(c)
	for _, p := range c.Parts {
		i := slices.IndexFunc(cuts, func(b *Cut) bool { return b.Revision == p.After && latest(b) != nil })
		if p.Select != mvcc.SelectAll || i < 0 || want == nil {
			continue
		}
		union := slices.SortedFunc(slices.Values(slices.Concat(latest(cuts[i]).Versions, p.Versions)), CompareByKey)
		if d := FirstDifference(Takes(union, &want.Cut), want.Versions); d != "" {
			bad = append(bad, fmt.Sprintf("cut: revision %d restored from revision %d and the versions since, then the cut: %s", c.Revision, p.After, d))
		}
	}
	return bad
}

// checkLeases checks that the cut has each lease that was there all the time while it was made, with its TTL.
func (c *Cut) checkLeases(ls []*life) (bad []string) {
	for _, l := range ls {
		i := slices.IndexFunc(c.Leases, func(has dataapi.Lease) bool { return int64(has.ID) == l.id })
		lives := l.grant.Return < c.Call && slices.ContainsFunc(l.shown, func(o *Op) bool { return o.Call > c.Return })
		switch {
		case i < 0 && lives:
			bad = append(bad, fmt.Sprintf("cut: at revision %d without lease %d, which was there all the time: %s", c.Revision, l.id, l.grant))
		case i >= 0 && (l.grant.Call > c.Return || c.Leases[i].TTL != int64(l.ttl/time.Second)):
			bad = append(bad, fmt.Sprintf("cut: at revision %d with %+v: %s", c.Revision, c.Leases[i], l.grant))
		}
	}
	return bad
}
