//go:build linux

package prompt

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// terminal returns both ends of a new terminal: the user's, and the program's.
func terminal(t *testing.T) (user, program *os.File) {
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

// A password that is missing is asked for at a terminal, and is not shown there. Without a terminal it is an error.
func TestLogin(t *testing.T) {
	person, program := terminal(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, c := range []struct {
		user, password string

		in      *os.File
		prompts string
		want    string
		err     string
	}{
		{"root", "", program, "Password of root: \n", "root secret", ""},
		{"root", "", null, "", " ", "at a terminal"},
		{"root:", "", program, "", " ", "without a name or a password"},
		{":x", "", program, "", " ", "without a name or a password"},
		{"root:p:w", "", program, "", "root p:w", ""},
		{"root", "p", program, "", "root p", ""},
		{"", "", program, "", " ", ""},
		{"", "p", program, "", " ", "--password without a user"},
		{"root", "", null, "", " ", "and THE_PASSWORD in the environment"},
	} {
		var prompts strings.Builder
		typed := make(chan struct{})
		go func() {
			defer close(typed)
			for c.prompts != "" && shown(program) {
				time.Sleep(time.Millisecond)
			}
			if c.prompts != "" {
				_, _ = person.WriteString("secret\n")
			}
		}()
		name, password, err := Login(c.user, c.password, "THE_PASSWORD", c.in, &prompts)
		<-typed
		if got := name + " " + password; got != c.want || prompts.String() != c.prompts || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q, %q: %q, %v, asked %q", c.user, c.password, got, err, &prompts)
		}
	}
	if !shown(program) {
		t.Error("the terminal shows nothing any more")
	}
}

// shown says whether a terminal shows what is typed.
func shown(f *os.File) bool {
	s, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err != nil || s.Lflag&unix.ECHO != 0
}
