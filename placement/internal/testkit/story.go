package testkit

import (
	"fmt"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// Arg returns the number that a story's command has under a name; it fails the test where
// there is none.
func Arg(t *testing.T, d *datadriven.TestData, name string) uint64 {
	t.Helper()
	vs := Args(t, d, name)
	if len(vs) == 0 {
		t.Fatalf("%s: no %s", d.Pos, name)
	}
	return vs[0]
}

// Args returns the numbers that a story's command has under a name.
func Args(t *testing.T, d *datadriven.TestData, name string) []uint64 {
	t.Helper()
	var vs []uint64
	for _, a := range d.CmdArgs {
		if a.Key != name {
			continue
		}
		for _, v := range a.Vals {
			var n uint64
			if _, err := fmt.Sscan(v, &n); err != nil {
				t.Fatal(err)
			}
			vs = append(vs, n)
		}
	}
	return vs
}
