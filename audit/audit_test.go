package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// disk opens files that fail, or hang, when they are told to.
type disk struct {
	full  atomic.Bool // a write takes half of its bytes
	stuck atomic.Bool // neither can a write be cut off
	mu    sync.Mutex  // held by whoever lets writes hang
}

type diskFile struct {
	*os.File
	d *disk
}

var errFull = errors.New("no space left")

func (f diskFile) Write(b []byte) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.d.full.Load() {
		n, _ := f.File.Write(b[:len(b)/2])
		return n, errFull
	}
	return f.File.Write(b)
}

func (f diskFile) Truncate(n int64) error {
	if f.d.stuck.Load() {
		return errFull
	}
	return f.File.Truncate(n)
}

func (d *disk) open(path string) (file, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	return diskFile{f, d}, err
}

func begin(t *testing.T, path string, d *disk) *Log {
	t.Helper()
	l, err := open(Options{Path: path, Node: "n1", Clock: clock.Virtual(), Logger: zap.NewNop()}, d.open)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func end(t *testing.T, l *Log) {
	t.Helper()
	if err := l.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// methods returns the methods of the lines of files that must be in order, one behind the other.
func methods(t *testing.T, paths ...string) (all []string) {
	t.Helper()
	hash := ""
	for i, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Check(bytes.NewReader(b))
		if err != nil {
			t.Fatalf("%s: %v\n%s", p, err, b)
		}
		if i > 0 && r.Begins != hash {
			t.Fatalf("%s begins behind %s, not %s", p, r.Begins, hash)
		}
		hash = r.Hash
		for text := range strings.Lines(string(b)) {
			l, err := parse([]byte(strings.TrimSpace(text)))
			if err != nil {
				l.Method = "torn"
			}
			m := l.Method
			if l.What != "" {
				m += " " + l.What
			}
			all = append(all, m)
		}
	}
	return all
}

func same(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("got  %q\nwant %q", got, want)
	}
}

// Entries are written in their order, and the chain goes on over restarts, a file that was moved away, and one that was
// copied and cut.
func TestChainGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, dir := &disk{}, t.TempDir()
		path, old, older := filepath.Join(dir, "log"), filepath.Join(dir, "log.1"), filepath.Join(dir, "log.2")
		note := func(l *Log, m string) { l.Note(&Entry{Method: m}); synctest.Wait() }
		l := begin(t, path, d)
		note(l, "a")
		note(l, "b")
		end(t, l)
		l = begin(t, path, d)
		note(l, "c")
		if err := os.Rename(path, older); err != nil {
			t.Fatal(err)
		}
		note(l, "d")
		copied, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(old, copied, 0o600), os.Truncate(path, 0)); err != nil {
			t.Fatal(err)
		}
		note(l, "e")
		end(t, l)
		same(t, methods(t, older, old, path), "start", "a", "b", "start", "c", "d", "e")
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", fi.Mode(), err)
		}
	})
}

// A line that a crash has cut short stays, and Check says which one that is.
func TestTornLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "log")
		l := begin(t, path, &disk{})
		l.Note(&Entry{Method: "a"})
		end(t, l)
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for cut := range len(b) - bytes.IndexByte(b, '\n') - 1 {
			if err := os.WriteFile(path, b[:len(b)-cut], 0o600); err != nil {
				t.Fatal(err)
			}
			l = begin(t, path, &disk{})
			end(t, l)
			want := "torn"
			if cut <= 1 {
				want = "a" // nothing is missing but the newline
			}
			same(t, methods(t, path), "start", want, "start")
		}
	})
}

// While the disk is full no call waits and nothing is lost that the queue holds. A metric counts the others, and so does the log
// once it can be written. Lines are whole.
func TestFullDisk(t *testing.T) {
	for _, stuck := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			d, path := &disk{}, filepath.Join(t.TempDir(), "log")
			l := begin(t, path, d)
			d.full.Store(true)
			d.stuck.Store(stuck)
			const more = 1000
			l.Note(&Entry{Method: "first"})
			synctest.Wait() // it is taken, and cannot be written
			for range maxQueued + more {
				l.Note(&Entry{Method: "m"})
			}
			time.Sleep(time.Minute)
			if lost := testutil.ToFloat64(l.lost); lost != more {
				t.Errorf("%v are lost", lost)
			}
			if n := testutil.ToFloat64(l.failed); n < 50 || n > 70 {
				t.Errorf("%v writes have failed in a minute", n)
			}
			d.full.Store(false)
			d.stuck.Store(false)
			time.Sleep(2 * retryEvery)
			end(t, l)
			got, want := methods(t, path), []string{"start", "first"}
			if stuck { // what was written of the first one can be neither cut off nor ended
				want = []string{"start", "torn", "start", "first"}
			}
			if n := len(got); n != len(want)+maxQueued+1 || !slices.Equal(got[:len(want)], want) || !slices.Contains(got, fmt.Sprintf("lost count=%d", more)) {
				t.Errorf("%d lines: %q ...", n, got[:5])
			}
		})
	}
}

// Nobody waits for a disk that hangs, but Close as long as its context lets it.
func TestSlowDisk(t *testing.T) {
	d, path := &disk{}, filepath.Join(t.TempDir(), "log")
	l, err := open(Options{Path: path, Node: "n1", Clock: clock.System(), Logger: zap.NewNop()}, d.open)
	if err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range maxQueued {
				l.Note(&Entry{Method: "m"})
				l.Deny(&Entry{Method: "d", User: "u"})
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Close(ctx); err == nil {
		t.Error("closed while the disk hangs")
	}
	d.mu.Unlock()
	end(t, l)
	if lost, lines := testutil.ToFloat64(l.lost), testutil.ToFloat64(l.lines); lost+lines < 8*maxQueued {
		t.Errorf("%v lost, %v lines", lost, lines)
	}
	l.Note(&Entry{Method: "late"}) // is lost, and does no harm
	methods(t, path)
}

// The log has a few denials of one user a second, and the count of the others.
func TestDenialsAreSampled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "log")
		l := begin(t, path, &disk{})
		for range 3 * denialsPerWindow {
			l.Deny(&Entry{Method: "d", User: "u"})
		}
		l.Deny(&Entry{Method: "x", From: "h:1"})
		time.Sleep(2*denialWindow + time.Millisecond)
		l.Deny(&Entry{Method: "d", User: "u"})
		for range 2 * denialsPerWindow {
			l.Deny(&Entry{Method: "e", User: "v"})
		}
		end(t, l)
		d := func(m string, n int) (all []string) { return slices.Repeat([]string{m}, n) }
		same(t, methods(t, path), slices.Concat([]string{"start"}, d("d", denialsPerWindow), []string{"x"},
			[]string{fmt.Sprintf("denials-left-out count=%d", 2*denialsPerWindow), "d"},
			d("e", denialsPerWindow), []string{fmt.Sprintf("denials-left-out count=%d", denialsPerWindow)})...)
	})
	var s sampler
	for i := range 3 * maxDenied {
		s.take(fmt.Sprint(i), 1)
	}
	if len(s.at) > maxDenied+1 {
		t.Errorf("%d users are remembered", len(s.at))
	}
}

// Check finds a line that is gone, comes twice, comes elsewhere, or has another byte. It does not find a change of the
// last one, as the package says.
func TestCheckFindsWhatWasDone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	l, err := Open(Options{Path: path, Node: "n1", Clock: clock.System(), Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		l.Note(&Entry{Method: "m", User: fmt.Sprint("u", i), Outcome: "ok"})
	}
	end(t, l)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(strings.TrimSuffix(string(b), "\n"), "\n")
	lines[len(lines)-1] += "\n"
	if r, err := Check(bytes.NewReader(b)); err != nil || r.Lines != 7 || r.Hash != hashOf([]byte(strings.TrimSpace(lines[6]))) || r.Begins != "" || r.First.IsZero() || r.Last.Before(r.First) {
		t.Fatalf("%+v, %v", r, err)
	}
	fails := func(what string, all []string) {
		t.Helper()
		if _, err := Check(strings.NewReader(strings.Join(all, ""))); err == nil {
			t.Errorf("%s: not found", what)
		}
	}
	for i := range lines {
		if i > 0 && i < len(lines)-1 {
			fails(fmt.Sprintf("line %d is gone", i), slices.Delete(slices.Clone(lines), i, i+1))
		}
		fails(fmt.Sprintf("line %d comes twice", i), slices.Insert(slices.Clone(lines), i, lines[i]))
		if i > 0 {
			swapped := slices.Clone(lines)
			swapped[i], swapped[i-1] = swapped[i-1], swapped[i]
			fails(fmt.Sprintf("line %d comes before", i), swapped)
		}
		if i == len(lines)-1 {
			continue
		}
		for at := range len(lines[i]) - 1 {
			changed := slices.Clone(lines)
			text := []byte(lines[i])
			text[at] ^= 1
			changed[i] = string(text)
			fails(fmt.Sprintf("byte %d of line %d", at, i), changed)
		}
	}
	fails("an end without a newline", []string{lines[0], strings.TrimSpace(lines[1])})
}

// FuzzCheck: no file makes Check panic, and a file that it takes is refused once a line within is missing.
func FuzzCheck(f *testing.F) {
	var file []byte
	prev := ""
	for _, m := range []string{methodStart, "a", "b", "c"} {
		text := encode(time.Unix(1, 2), "n", &Entry{Method: m, User: "u\x00\xff", What: `a="b"`}, prev)
		prev = hashOf(text)
		file = append(append(file, text...), '\n')
	}
	f.Add(file)
	f.Add(file[:len(file)-5])
	f.Add(append(slices.Clone(file[:len(file)-5]), '\n'))
	f.Add([]byte("{}\n"))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Check(bytes.NewReader(b))
		if err != nil || r.Lines < 3 {
			return
		}
		if n := bytes.Count(b, []byte("\n")); n != r.Lines {
			t.Fatalf("%d lines, of %d", r.Lines, n)
		}
		lines := bytes.SplitAfter(b, []byte("\n"))
		for i := 1; i < r.Lines-1; i++ {
			if bytes.Equal(lines[i], lines[i-1]) {
				continue
			}
			if _, err := Check(bytes.NewReader(slices.Concat(slices.Delete(slices.Clone(lines), i, i+1)...))); err == nil {
				t.Fatalf("line %d is gone, and that is not found", i+1)
			}
		}
	})
}
