//go:build linux

// Package ptytest makes terminals for tests of what is shown at one, or asked for there.
package ptytest

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// New returns both ends of a new terminal, which live as long as the test: the user's, and the program's. Where there are no
// terminals the test is skipped.
func New(t *testing.T) (user, program *os.File) {
	t.Helper()
	user, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	t.Cleanup(func() { _ = user.Close() })
	n, err := unix.IoctlGetInt(int(user.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(user.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	if program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0); err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	t.Cleanup(func() { _ = program.Close() })
	return user, program
}

// Echoes says whether a terminal shows what is typed.
func Echoes(f *os.File) bool {
	s, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err != nil || s.Lflag&unix.ECHO != 0
}
