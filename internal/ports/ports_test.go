package ports

import (
	"net"
	"runtime"
	"slices"
	"testing"
)

// A port that the test of another process has is passed over, though nobody listens at it now.
func TestPortsOfOtherProcesses(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has sockets whose names are no files")
	}
	one, err := Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	others := one[0] + 2
	if l, err := net.Listen("unix", nameOf(others)); err == nil { // else there is such a process indeed
		defer l.Close()
	}
	two, err := Unused(3)
	if err != nil || slices.Contains(two, others) || slices.Contains(two, one[0]) {
		t.Errorf("%v, %v, and another process has %d", two, err, others)
	}
	if l, err := net.Listen("unix", nameOf(two[0])); err == nil {
		l.Close()
		t.Errorf("another process may take %d too", two[0])
	}
}
