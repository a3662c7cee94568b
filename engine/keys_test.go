package engine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
)

// TestFormat prints the bytes of keys and records. Together with docs/format/engine.md
// the golden file defines them.
func TestFormat(t *testing.T) {
	datadriven.RunTest(t, "testdata/format", func(t *testing.T, d *datadriven.TestData) string {
		var key string
		var rev, group, index, term uint64
		var payload string
		d.MaybeScanArgs(t, "key", &key)
		d.MaybeScanArgs(t, "rev", &rev)
		d.MaybeScanArgs(t, "group", &group)
		d.MaybeScanArgs(t, "index", &index)
		d.MaybeScanArgs(t, "term", &term)
		d.MaybeScanArgs(t, "payload", &payload)
		switch d.Cmd {
		case "versioned":
			k := bytes.ReplaceAll([]byte(key), []byte("NUL"), []byte{0})
			b := AppendVersionedKey(nil, k, keyspace.Revision(rev))
			return fmt.Sprintf("%x split at %d\n%s\n", b, splitKey(b), FormatKey(b))
		case "group-local":
			b := GroupLocalKey(keyspace.GroupID(group), []byte(key))
			return fmt.Sprintf("%x\n%s\n", b, FormatKey(b))
		case "lease":
			b := AppendLeaseKey(nil, keyspace.LeaseID(index), []byte(key))
			return fmt.Sprintf("%x\n%s\n", b, FormatKey(b))
		case "node-local":
			b := NodeLocalKey([]byte(key))
			return fmt.Sprintf("%x\n%s\n", b, FormatKey(b))
		case "applied":
			k := appliedKey(keyspace.GroupID(group))
			v := AppendApplied(nil, &Applied{
				Index: index, Term: term, ConfIndex: 10, Payload: []byte(payload),
				Replicas: []keyspace.Replica{{ID: 1, Node: 0x1111, Role: keyspace.RoleVoter}, {ID: 300, Node: 0x2222, Role: keyspace.RoleLearner}},
			})
			return fmt.Sprintf("%x\n%s\n%x\n", k, FormatKey(k), v)
		case "identity":
			return string(encodeIdentity(Identity{Cluster: 0xc1, Node: 0x1a, Version: 3, Instance: 0xabc}))
		case "instance":
			return string(encodeInstance(0xabc))
		}
		t.Fatalf("unknown command %s", d.Cmd)
		return ""
	})
}

// randomKeys returns user keys that are hard to encode: short, with many zeros, prefixes
// of each other.
func randomKeys(rng *rand.Rand, n int) [][]byte {
	var keys [][]byte
	for range n {
		k := make([]byte, rng.IntN(5))
		for i := range k {
			k[i] = []byte{0, 0, 1, 2, 0xfe, 0xff}[rng.IntN(6)]
		}
		keys = append(keys, k)
	}
	return keys
}

// TestKeyOrder compares the order of physical keys with that of user keys and revisions,
// and checks Pebble's requirements for a comparer.
func TestKeyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	keys := randomKeys(rng, 200)
	revs := []keyspace.Revision{0, 1, 255, 256, 1 << 32, keyspace.MaxRevision}
	for _, a := range keys {
		for _, b := range keys {
			ra, rb := revs[rng.IntN(len(revs))], revs[rng.IntN(len(revs))]
			want := bytes.Compare(a, b)
			if want == 0 {
				want = int(max(-1, min(1, rb-ra)))
			}
			pa, pb := AppendVersionedKey(nil, a, ra), AppendVersionedKey(nil, b, rb)
			if got := comparer.Compare(pa, pb); got != want {
				t.Fatalf("compare(%q@%d, %q@%d) = %d, want %d", a, ra, b, rb, got, want)
			}
			if want < 0 {
				if s := comparer.Separator(nil, pa, pb); bytes.Compare(pa, s) > 0 || bytes.Compare(s, pb) >= 0 {
					t.Fatalf("separator(%x, %x) = %x", pa, pb, s)
				}
			}
			prefix := pa[:comparer.Split(pa)]
			if !bytes.Equal(prefix, AppendVersionedPrefix(nil, a)) || comparer.Split(prefix) != len(prefix) {
				t.Fatalf("split(%x) = %d", pa, len(prefix))
			}
			next := comparer.ImmediateSuccessor(nil, prefix)
			if bytes.Compare(pa, next) >= 0 || bytes.Compare(a, b) < 0 && bytes.Compare(next, pb) > 0 {
				t.Fatalf("immediate successor of %x is %x, between lies %x", prefix, next, pb)
			}
			span := keyspace.Span{Start: a, End: b}
			if bytes.Compare(a, b) < 0 {
				for _, k := range keys[:20] {
					if got := VersionedSpan(span).Contains(AppendVersionedKey(nil, k, ra)); got != span.Contains(k) {
						t.Fatalf("versioned span of %s contains %q: %v", span, k, got)
					}
				}
			}
		}
	}
}

func FuzzDecodeVersionedKey(f *testing.F) {
	f.Add(AppendVersionedKey(nil, []byte("a\x00b"), 7))
	f.Add([]byte{prefixVersioned, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		_ = FormatKey(b)
		if n := splitKey(b); n > len(b) {
			t.Fatalf("split(%x) = %d", b, n)
		}
		user, rev, err := DecodeVersionedKey(b)
		if err != nil {
			return
		}
		if got := AppendVersionedKey(nil, user, rev); !bytes.Equal(got, b) {
			t.Fatalf("%x decodes to %q@%d, which is %x", b, user, rev, got)
		}
	})
}

func FuzzDecodeLeaseKey(f *testing.F) {
	f.Add(AppendLeaseKey(nil, -2, []byte("a\x00b")), []byte("a"), []byte("b"))
	f.Add([]byte{prefixLease, 0, 0, 0, 0, 0, 0, 0, 1}, []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, b, start, end []byte) {
		_ = FormatKey(b)
		lease, user, err := DecodeLeaseKey(b)
		if err != nil {
			return
		}
		if got := AppendLeaseKey(nil, lease, user); !bytes.Equal(got, b) {
			t.Fatalf("%x decodes to lease %d and %q, which is %x", b, lease, user, got)
		}
		if len(end) > 0 && bytes.Compare(start, end) >= 0 {
			return
		}
		s := keyspace.Span{Start: start, End: end}
		if got := LeaseSpan(lease, s).Contains(b); got != s.Contains(user) {
			t.Fatalf("the span of lease %d in %s contains %q: %v", lease, s, user, got)
		}
		if LeaseSpan(lease+1, s).Contains(b) {
			t.Fatalf("the span of lease %d contains %x", lease+1, b)
		}
		if one := (KeySpan{Lower: b, Upper: append(bytes.Clone(b), 0)}); VersionedSpan(s).coversLeased(one) != s.Contains(user) {
			t.Fatalf("%s and %q of the index of leases", s, user)
		}
	})
}

func FuzzDecodeApplied(f *testing.F) {
	f.Add(AppendApplied(nil, &Applied{Index: 300, Term: 2, ConfIndex: 9, Payload: []byte("p"), Replicas: []keyspace.Replica{{ID: 1, Node: 2, Role: 1}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := DecodeApplied(b)
		if err != nil {
			return
		}
		again, err := DecodeApplied(AppendApplied(nil, &a))
		if err != nil || again.Index != a.Index || again.Term != a.Term || again.ConfIndex != a.ConfIndex ||
			!slices.Equal(again.Replicas, a.Replicas) || !bytes.Equal(again.Payload, a.Payload) {
			t.Fatalf("%+v, again %+v %v", a, again, err)
		}
	})
}

func FuzzDecodeInstance(f *testing.F) {
	f.Add(encodeInstance(3))
	f.Fuzz(func(t *testing.T, b []byte) {
		if instance, err := decodeInstance(b); err == nil && !bytes.Equal(encodeInstance(instance), b) {
			t.Fatalf("%q decodes to %x", b, instance)
		}
	})
}

func FuzzDecodeIdentity(f *testing.F) {
	f.Add(encodeIdentity(Identity{Cluster: 1, Node: 2, Version: keyspace.NewestVersion, Instance: 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := decodeIdentity(b, keyspace.OwnVersions())
		if err == nil && keyspace.OwnVersions().Has(id.Version) && !bytes.Equal(encodeIdentity(id), b) {
			t.Fatalf("%q decodes to %+v", b, id)
		}
	})
}
