package leftout

import (
	"fmt"
	"os"
	"runtime"
	"testing"
)

// ended is a test that notes how it ends.
type ended struct {
	testing.TB
	how string
}

func (*ended) Helper() {}

func (e *ended) Skipf(format string, args ...any) { e.end("skipped: ", format, args) }

func (e *ended) Fatalf(format string, args ...any) { e.end("failed: ", format, args) }

func (e *ended) Logf(format string, args ...any) { e.how += "said: " + fmt.Sprintf(format, args...) }

func (e *ended) Errorf(format string, args ...any) { e.how += "wrong: " + fmt.Sprintf(format, args...) }

func (e *ended) end(how, format string, args []any) {
	e.how = how + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// A tool that is missing ends the test, quietly or not.
func TestTool(t *testing.T) {
	for _, c := range []struct{ nothing, tool, want string }{
		{"", "no-such-tool", "skipped: left out: no-such-tool is missing (Debian: apt-get install its-package)"},
		{"1", "no-such-tool", "failed: left out: no-such-tool is missing (Debian: apt-get install its-package)"},
		{"1", self(t), self(t)},
	} {
		t.Setenv("SKEIN_NOTHING_LEFT_OUT", c.nothing)
		e, done := &ended{TB: t}, make(chan struct{})
		go func() {
			defer close(done)
			e.how = Tool(e, c.tool, "its-package")
		}()
		if <-done; e.how != c.want {
			t.Errorf("%+v: %q", c, e.how)
		}
	}
}

// A part of a test that is left out does not end it.
func TestPart(t *testing.T) {
	for nothing, want := range map[string]string{"": "said: left out: a disk, and on", "1": "wrong: left out: a disk, and on"} {
		t.Setenv("SKEIN_NOTHING_LEFT_OUT", nothing)
		e := &ended{TB: t}
		Part(e, "a %s", "disk")
		if e.how += ", and on"; e.how != want {
			t.Errorf("%q: %q", nothing, e.how)
		}
	}
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
