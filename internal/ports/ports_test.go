package ports

import (
	"fmt"
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

// Nobody listens at it for a moment either, to see whether it is in use: its test may start a server there just then.
func TestPortsOfOtherProcessesAreLeftAlone(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has sockets whose names are no files")
	}
	one, err := Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	theirs := one[0]
	stock.mu.Lock()
	name := stock.held[theirs]
	delete(stock.held, theirs)
	stock.mu.Unlock()
	defer name.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 300 {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", theirs))
			if err != nil {
				t.Error(err)
				return
			}
			l.Close()
		}
	}()
	for {
		select {
		case <-done:
			return
		default:
		}
		stock.mu.Lock()
		stock.next = theirs
		stock.mu.Unlock()
		if _, err := Unused(1); err != nil {
			t.Error(err)
		}
	}
}
