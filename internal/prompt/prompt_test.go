//go:build linux

package prompt

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/skeindb/skein/internal/ptytest"
)

// A password that is missing is asked for at a terminal, and is not shown there. Without a terminal it is an error.
func TestLogin(t *testing.T) {
	person, program := ptytest.New(t)
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
			for c.prompts != "" && ptytest.Echoes(program) {
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
	if !ptytest.Echoes(program) {
		t.Error("the terminal shows nothing any more")
	}
}
