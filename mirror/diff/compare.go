package diff

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// Options say what is compared.
type Options struct {
	// Prefix bounds the keys; empty for all. With a prefix leases are not compared: a lease
	// belongs to no key.
	Prefix []byte
	// Revision is read on both sides; 0 for the present one of each.
	Revision keyspace.Revision
	// Show is how many differences are kept in the Result; the rest is counted.
	Show int
	// Progress, if not nil, is called now and then with the number of keys compared.
	Progress func(keys int64)
}

// Kind says how two sides differ about one key or lease.
type Kind string

// The kinds of differences.
const (
	OnlyA    Kind = "only in A"
	OnlyB    Kind = "only in B"
	Unequal  Kind = "unequal"
	LeaseA   Kind = "lease only in A"
	LeaseB   Kind = "lease only in B"
	LeaseTTL Kind = "lease with another TTL"
)

// Difference is one key or lease about which the sides differ.
type Difference struct {
	Kind Kind
	// Key is nil for a lease.
	Key []byte
	// Lease is 0 for a key.
	Lease keyspace.LeaseID
	// What says which fields differ, and both their values.
	What string
}

// String returns the difference in one line.
func (d Difference) String() string {
	name := fmt.Sprintf("key %q", d.Key)
	if d.Key == nil {
		name = fmt.Sprintf("lease %x", int64(d.Lease))
	}
	return strings.TrimSuffix(fmt.Sprintf("%s: %s: %s", name, d.Kind, d.What), ": ")
}

// Result counts what was compared.
type Result struct {
	// RevisionA and RevisionB are the revisions that were read.
	RevisionA, RevisionB keyspace.Revision
	// KeysA and KeysB are the keys of each side, LeasesA and LeasesB its leases.
	KeysA, KeysB, LeasesA, LeasesB int64
	// Differences counts by kind. It is empty if the sides are equal.
	Differences map[Kind]int64
	// First are the first differences, Options.Show at most.
	First []Difference
	// NoLeases says why leases were not compared, empty if they were.
	NoLeases string
}

// Equal says that no difference was found.
func (r *Result) Equal() bool { return len(r.Differences) == 0 }

func (r *Result) add(show int, d Difference) {
	r.Differences[d.Kind]++
	if len(r.First) < show {
		r.First = append(r.First, d)
	}
}

// Write says the result to people.
func (r *Result) Write(w io.Writer) {
	for _, d := range r.First {
		fmt.Fprintln(w, d)
	}
	var all int64
	for _, n := range r.Differences {
		all += n
	}
	if more := all - int64(len(r.First)); more > 0 {
		fmt.Fprintf(w, "and %d more\n", more)
	}
	fmt.Fprintf(w, "A at revision %d: %d keys; B at revision %d: %d keys\n", r.RevisionA, r.KeysA, r.RevisionB, r.KeysB)
	if r.NoLeases == "" {
		fmt.Fprintf(w, "leases: %d in A, %d in B\n", r.LeasesA, r.LeasesB)
	} else {
		fmt.Fprintf(w, "leases were not compared: %s\n", r.NoLeases)
	}
	if r.Equal() {
		fmt.Fprintln(w, "equal")
		return
	}
	var kinds []string
	for _, k := range []Kind{OnlyA, OnlyB, Unequal, LeaseA, LeaseB, LeaseTTL} {
		if n := r.Differences[k]; n > 0 {
			kinds = append(kinds, fmt.Sprintf("%d %s", n, k))
		}
	}
	fmt.Fprintf(w, "different: %s\n", strings.Join(kinds, ", "))
}

// Compare compares two sides. The error says which side could not be read.
func Compare(ctx context.Context, a, b Reader, o Options) (*Result, error) {
	r := &Result{Differences: map[Kind]int64{}}
	if err := r.keys(ctx, a, b, o); err != nil {
		return nil, err
	}
	if len(o.Prefix) > 0 {
		r.NoLeases = "with --prefix only keys are"
		return r, nil
	}
	return r, r.leases(ctx, a, b, o.Show)
}

// progressKeys is how many keys are compared between two calls of Options.Progress.
const progressKeys = 10000

// keys joins the sorted keys of both sides. It reads the pages of B, and of A what lies between their ends.
func (r *Result) keys(ctx context.Context, a, b Reader, o Options) error {
	end := prefixEnd(o.Prefix)
	ca, cb := NewCursor(a, o.Prefix, end, o.Revision), NewCursor(b, o.Prefix, end, o.Revision)
	ca.beside = cb
	for n := int64(1); ; n++ {
		kb, err := cb.Key(ctx)
		if err != nil {
			return fmt.Errorf("side B: %w", err)
		}
		ka, err := ca.Key(ctx)
		if err != nil {
			return fmt.Errorf("side A: %w", err)
		}
		r.RevisionA, r.RevisionB = ca.Revision(), cb.Revision()
		if ka == nil && kb == nil {
			return nil
		}
		order := compareKeys(ka, kb)
		if order <= 0 {
			r.KeysA++
			ca.Advance()
		}
		if order >= 0 {
			r.KeysB++
			cb.Advance()
		}
		if d, ok := Keys(ka, kb); !ok {
			r.add(o.Show, d)
		}
		if o.Progress != nil && n%progressKeys == 0 {
			o.Progress(n)
		}
	}
}

// compareKeys orders two keys. nil is behind all.
func compareKeys(a, b *mvcc.Version) int {
	switch {
	case a == nil:
		return 1
	case b == nil:
		return -1
	}
	return bytes.Compare(a.Key, b.Key)
}

// Keys compares the smaller key of two, nil for the end of a side, with its like on the
// other side. It returns what differs, or true.
func Keys(a, b *mvcc.Version) (Difference, bool) {
	switch order := compareKeys(a, b); {
	case order < 0:
		return Difference{Kind: OnlyA, Key: slices.Clone(a.Key), What: describe(a)}, false
	case order > 0:
		return Difference{Kind: OnlyB, Key: slices.Clone(b.Key), What: describe(b)}, false
	}
	var what []string
	number := func(name string, x, y int64) {
		if x != y {
			what = append(what, fmt.Sprintf("%s %d and %d", name, x, y))
		}
	}
	number("create revision", int64(a.Create), int64(b.Create))
	number("mod revision", int64(a.Mod), int64(b.Mod))
	number("version", a.Version, b.Version)
	if a.Lease != b.Lease {
		what = append(what, fmt.Sprintf("lease %x and %x", int64(a.Lease), int64(b.Lease)))
	}
	if !bytes.Equal(a.Value, b.Value) {
		what = append(what, fmt.Sprintf("value %s and %s", shorten(a.Value), shorten(b.Value)))
	}
	if what == nil {
		return Difference{}, true
	}
	return Difference{Kind: Unequal, Key: slices.Clone(a.Key), What: strings.Join(what, ", ")}, false
}

func describe(v *mvcc.Version) string {
	return fmt.Sprintf("create revision %d, mod revision %d, version %d", v.Create, v.Mod, v.Version)
}

// shownBytes is how much of a value is shown.
const shownBytes = 32

func shorten(value []byte) string {
	if len(value) <= shownBytes {
		return fmt.Sprintf("%q", value)
	}
	return fmt.Sprintf("%q... (%d bytes)", value[:shownBytes], len(value))
}

// prefixEnd is the end of the keys that begin with prefix, nil for the end of the keyspace.
func prefixEnd(prefix []byte) []byte {
	end := slices.Clone(prefix)
	for len(end) > 0 && end[len(end)-1] == 0xff {
		end = end[:len(end)-1]
	}
	if len(end) == 0 {
		return nil
	}
	end[len(end)-1]++
	return end
}

// leases compares ids and granted TTLs.
func (r *Result) leases(ctx context.Context, a, b Reader, show int) error {
	la, err := a.Leases(ctx)
	if err != nil {
		return fmt.Errorf("side A: %w", err)
	}
	lb, err := b.Leases(ctx)
	if err != nil {
		return fmt.Errorf("side B: %w", err)
	}
	r.LeasesA, r.LeasesB = int64(len(la)), int64(len(lb))
	slices.Sort(la)
	slices.Sort(lb)
	var both []keyspace.LeaseID
	for len(la) > 0 || len(lb) > 0 {
		switch {
		case len(lb) == 0 || len(la) > 0 && la[0] < lb[0]:
			r.add(show, Difference{Kind: LeaseA, Lease: la[0]})
			la = la[1:]
		case len(la) == 0 || lb[0] < la[0]:
			r.add(show, Difference{Kind: LeaseB, Lease: lb[0]})
			lb = lb[1:]
		default:
			both = append(both, la[0])
			la, lb = la[1:], lb[1:]
		}
	}
	return r.ttls(ctx, a, b, both, show)
}

// ttls compares the granted TTLs of leases that both sides have. One that ends meanwhile is
// left out.
func (r *Result) ttls(ctx context.Context, a, b Reader, ids []keyspace.LeaseID, show int) error {
	ta, err := TTLs(ctx, a, ids)
	if err != nil {
		return fmt.Errorf("side A: %w", err)
	}
	tb, err := TTLs(ctx, b, ids)
	if err != nil {
		return fmt.Errorf("side B: %w", err)
	}
	for _, id := range ids {
		x, inA := ta[id]
		y, inB := tb[id]
		if inA && inB && x != y {
			r.add(show, Difference{Kind: LeaseTTL, Lease: id, What: fmt.Sprintf("granted %d s and %d s", x, y)})
		}
	}
	return nil
}

// lookups is how many leases are looked up at a time.
const lookups = 32

// TTLs looks leases up. It returns the granted TTLs in seconds of those that exist.
func TTLs(ctx context.Context, side Reader, ids []keyspace.LeaseID) (map[keyspace.LeaseID]int64, error) {
	seconds := make([]int64, len(ids))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(lookups)
	for i, id := range ids {
		g.Go(func() error {
			ttl, exists, err := side.TTL(ctx, id)
			if err == nil && !exists {
				ttl = -1
			}
			seconds[i] = ttl
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	out := make(map[keyspace.LeaseID]int64, len(ids))
	for i, id := range ids {
		if seconds[i] >= 0 {
			out[id] = seconds[i]
		}
	}
	return out, nil
}

// ErrDifferent says that a comparison has found differences.
var ErrDifferent = errors.New("the two sides differ")
