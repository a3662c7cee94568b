package recovery

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// sample is a survivor of which the plan has something of everything.
func sample() *Collected {
	ms := []Member{{1, 1, "voter"}, {2, 2, "voter"}, {3, 0xabc, "outgoing voter"}}
	return &Collected{
		Cluster: 0xc1, Node: 1, Name: "n1", Version: 4,
		Placement: &Placement{
			Ceiling: 10_001, Compacted: 7, NextRange: 9, NextReplica: 12,
			Nodes:  []NodeRow{{1, "n1", "serving"}, {2, "n2", "serving"}, {0xabc, "n3", "decommissioned"}},
			Ranges: []RangeRow{{Range: 1, Generation: 3, End: key("k"), ConfIndex: 10, Members: ms}},
		},
		Copies: []Copy{
			{Replica: 1, Applied: Position{10, 5}, Last: Position{20, 6}, Term: 7, Commit: 19, InForce: [][]Member{ms[:2]}, End: End{Members: ms[:2]}, Revision: 10_001},
			{
				Range: 1, Replica: 1, Made: &Made{4, 30, 3, true}, Applied: Position{10, 5}, Last: Position{50, 6}, Term: 7, Commit: 49,
				InForce: [][]Member{ms[:2], ms}, Unsettled: true, Revision: 9000, SequencerTerm: 6,
				End: End{Generation: 3, End: key("k\x00\xff\"é"), ConfIndex: 40, Members: ms, Merge: 8},
			},
			{Range: 5, Replica: 4, Unusable: "in quarantine: a bad block"},
		},
	}
}

// TestFormat compares both files with golden ones (docs/format/recovery.md).
func TestFormat(t *testing.T) {
	c := sample()
	b, err := c.Encode()
	golden(t, "collected", b, err)
	p, err := MakePlan([]*Collected{c}, PlanOptions{Dead: []string{"n2", "abc"}, AcceptLost: true})
	if err != nil {
		t.Fatal(err)
	}
	b, err = p.Encode()
	golden(t, "plan", b, err)
}

func golden(t *testing.T, name string, b []byte, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	path := "testdata/" + name + ".json.golden"
	if os.Getenv("SKEIN_REWRITE") != "" {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, want) {
		t.Errorf("%s is\n%s\nand not as in %s", name, b, path)
	}
}

// What was changed by hand, or is of another kind or format, is refused.
func TestFilesAreChecked(t *testing.T) {
	for _, c := range []struct{ old, new, want string }{
		{`"ceiling": 1010001`, `"ceiling": 1010002`, "it was changed"},
		{`"format": 1`, `"format": 2`, "version 2"},
		{`"kind": "plan"`, `"kind": "collected"`, `of kind "collected"`},
		{`"term": `, `"time": 1, "term": `, "unknown field"},
		{"{", "[", "not a file of skein recover"},
	} {
		b, err := os.ReadFile("testdata/plan.json.golden")
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Replace(string(b), c.old, c.new, 1)
		if text == string(b) {
			t.Fatalf("%s is not in the plan", c.old)
		}
		if _, err := DecodePlan([]byte(text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.new, err, c.want)
		}
	}
}

// FuzzCollected: what is decoded is encoded to what decodes to the same, and never makes the planner
// panic.
func FuzzCollected(f *testing.F) {
	b, err := sample().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeCollected(b)
		if err != nil {
			return
		}
		x, err := c.Encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := DecodeCollected(x)
		if err != nil {
			t.Fatalf("%v:\n%s", err, x)
		}
		if y, err := again.Encode(); err != nil || !bytes.Equal(x, y) {
			t.Fatalf("%v:\n%s\n%s", err, x, y)
		}
		for _, dead := range [][]string{nil, {"n2", "abc"}} {
			p, err := MakePlan([]*Collected{c}, PlanOptions{Dead: dead, AcceptLost: true})
			if err == nil {
				if _, err := DecodePlan(must(p.Encode())); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// FuzzPlan: a plan decodes or is refused.
func FuzzPlan(f *testing.F) {
	b, err := os.ReadFile("testdata/plan.json.golden")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := DecodePlan(b); err == nil {
			if _, err := DecodePlan(must(p.Encode())); err != nil {
				t.Fatal(err)
			}
		}
	})
}
