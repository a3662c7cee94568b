package target

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
)

func TestMain(m *testing.M) {
	code := m.Run()
	server.stop()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func openFile(t *testing.T) *folder {
	t.Helper()
	tgt, err := Open("file://"+filepath.Join(t.TempDir(), "new", "backups"), clock.System())
	if err != nil {
		t.Fatal(err)
	}
	return tgt.(*folder)
}

func TestFile(t *testing.T) { testTarget(t, openFile(t)) }

// randomBytes are n bytes that cannot be compressed.
func randomBytes(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func read(t *testing.T, tgt Target, name string, offset int64) []byte {
	t.Helper()
	r, err := tgt.Get(t.Context(), name, offset)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if closeErr := r.Close(); err != nil || closeErr != nil {
		t.Fatal(err, closeErr)
	}
	return b
}

func list(t *testing.T, tgt Target, folder string) (names []string) {
	t.Helper()
	for o, err := range tgt.List(t.Context(), folder) {
		if err != nil {
			t.Fatal(err)
		}
		if o.Modified.IsZero() {
			t.Errorf("%s has no time", o.Name)
		}
		names = append(names, fmt.Sprintf("%s %d", o.Name, o.Bytes))
	}
	slices.Sort(names)
	return names
}

// testTarget is what every Target does.
func testTarget(t *testing.T, tgt Target) {
	t.Run("put and get", func(t *testing.T) {
		for i, n := range []int{0, 1, partBytes - 1, partBytes, partBytes + 1, 2*partBytes + 5} {
			name, data := fmt.Sprintf("sizes/%d", i), randomBytes(byte(i), n)
			if err := tgt.Put(t.Context(), name, iotestReader(data)); err != nil {
				t.Fatal(err)
			}
			if got := read(t, tgt, name, 0); !bytes.Equal(got, data) {
				t.Errorf("%d bytes of %d, or others", len(got), n)
			}
			if n > 1 {
				if got := read(t, tgt, name, int64(n-2)); !bytes.Equal(got, data[n-2:]) {
					t.Errorf("the last two bytes of %d: %x", n, got)
				}
			}
		}
	})
	t.Run("created once", func(t *testing.T) {
		for _, n := range []int{5, partBytes + 5} {
			name := fmt.Sprintf("once/%d", n)
			if err := tgt.Put(t.Context(), name, bytes.NewReader(randomBytes(1, n))); err != nil {
				t.Fatal(err)
			}
			err := tgt.Put(t.Context(), name, bytes.NewReader(randomBytes(2, n)))
			if !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), name) {
				t.Errorf("put again: %v", err)
			}
			if !bytes.Equal(read(t, tgt, name, 0), randomBytes(1, n)) {
				t.Error("the second put has changed the file")
			}
		}
	})
	t.Run("of many writers one wins", func(t *testing.T) {
		var wg sync.WaitGroup
		errs := make([]error, 8)
		for i := range errs {
			wg.Go(func() { errs[i] = tgt.Put(t.Context(), "race/manifest", strings.NewReader(fmt.Sprint("writer ", i))) })
		}
		wg.Wait()
		won := -1
		for i, err := range errs {
			switch {
			case err == nil && won >= 0:
				t.Errorf("both %d and %d have won", won, i)
			case err == nil:
				won = i
			case !errors.Is(err, ErrExists):
				t.Errorf("writer %d: %v", i, err)
			}
		}
		if got := string(read(t, tgt, "race/manifest", 0)); got != fmt.Sprint("writer ", won) {
			t.Errorf("the file is of %q, and %d has won", got, won)
		}
	})
	t.Run("list and delete", func(t *testing.T) {
		for _, name := range []string{"ls/a/x", "ls/a/y", "ls/a.b", "ls/b", "lsother"} {
			if err := tgt.Put(t.Context(), name, strings.NewReader("12")); err != nil {
				t.Fatal(err)
			}
		}
		if got := list(t, tgt, "ls/"); !slices.Equal(got, []string{"ls/a.b 2", "ls/a/x 2", "ls/a/y 2", "ls/b 2"}) {
			t.Error(got)
		}
		if got := list(t, tgt, "nothing/"); got != nil {
			t.Error(got)
		}
		for _, err := range tgt.List(t.Context(), "ls/") {
			if err != nil {
				t.Fatal(err)
			}
			break // who stops early leaves nothing behind
		}
		for range 2 {
			if err := tgt.Delete(t.Context(), "ls/a/x"); err != nil {
				t.Fatal(err)
			}
		}
		if got := list(t, tgt, "ls/a/"); !slices.Equal(got, []string{"ls/a/y 2"}) {
			t.Error(got)
		}
	})
	t.Run("many delete", func(t *testing.T) {
		for range 20 {
			for i := range 8 {
				if err := tgt.Put(t.Context(), fmt.Sprintf("many/%d/%d/x", i%2, i), strings.NewReader("")); err != nil {
					t.Fatal(err)
				}
			}
			var wg sync.WaitGroup
			for i := range 8 {
				wg.Go(func() {
					if err := tgt.Delete(t.Context(), fmt.Sprintf("many/%d/%d/x", i%2, i)); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			if got := list(t, tgt, "many/"); got != nil {
				t.Fatal(got)
			}
		}
	})
	t.Run("refused", func(t *testing.T) {
		if _, err := tgt.Get(t.Context(), "ls/none", 0); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "ls/none") {
			t.Error(err)
		}
		for _, name := range []string{"", "/a", "a/", "a//b", "../a", "a/./b", "a b", "a\\b", "a/.tmp-x"} {
			if err := tgt.Put(t.Context(), name, strings.NewReader("")); err == nil {
				t.Errorf("put %q: no error", name)
			}
			if _, err := tgt.Get(t.Context(), name, 0); err == nil {
				t.Errorf("get %q: no error", name)
			}
			if err := tgt.Delete(t.Context(), name); err == nil {
				t.Errorf("delete %q: no error", name)
			}
		}
		for _, err := range tgt.List(t.Context(), "ls") {
			if err == nil {
				t.Error("list of no folder: no error")
			}
		}
	})
	t.Run("a writer that fails leaves nothing", func(t *testing.T) {
		errSource := errors.New("source is gone")
		for _, n := range []int{10, partBytes + 10} {
			r := io.MultiReader(bytes.NewReader(make([]byte, n)), errReader{errSource})
			if err := tgt.Put(t.Context(), "failed/a", r); !errors.Is(err, errSource) {
				t.Error(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := tgt.Put(ctx, "failed/b", strings.NewReader("b")); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if got := list(t, tgt, "failed/"); got != nil {
			t.Error(got)
		}
	})
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// iotestReader returns data in pieces of odd sizes.
func iotestReader(data []byte) io.Reader {
	var rs []io.Reader
	for i := 0; i < len(data); i += 1 << 20 {
		rs = append(rs, bytes.NewReader(data[i:min(len(data), i+1<<20)]))
	}
	return io.MultiReader(rs...)
}

// A full disk is an error that names the file, and leaves no temporary one behind.
func TestFileDiskFull(t *testing.T) {
	f := openFile(t)
	err := f.Put(t.Context(), "a/b", io.MultiReader(strings.NewReader("x"), errReader{syscall.ENOSPC}))
	if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "put a/b in file://") {
		t.Error(err)
	}
	root, err := f.open(false)
	if err != nil {
		t.Fatal(err)
	}
	if err := fs.WalkDir(root.FS(), ".", func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			t.Error(p, "is left behind")
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

// What a crash has left of a Put is no file.
func TestFileLeftovers(t *testing.T) {
	f := openFile(t)
	if err := f.Put(t.Context(), "d/whole", strings.NewReader("1")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.path, "d", tempPrefix+"X"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := list(t, f, ""); !slices.Equal(got, []string{"d/whole 1"}) {
		t.Error(got)
	}
}

// A reader of a wrong folder makes none.
func TestFileReadersMakeNothing(t *testing.T) {
	f := openFile(t)
	if got := list(t, f, ""); got != nil {
		t.Error(got)
	}
	if _, err := f.Get(t.Context(), "a", 0); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if err := f.Delete(t.Context(), "a"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(f.path); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for raw, want := range map[string]string{
		"":                             "want file:///FOLDER or s3://",
		"/var/backups":                 "want file:///FOLDER or s3://",
		"file://var/backups":           "absolute folder",
		"file:///a?x=1":                "absolute folder",
		"s3:///prefix":                 "s3://BUCKET/PREFIX",
		"s3://key:secret@b/p":          "keys come from the environment",
		"s3://b/p?endpoint=h:1":        "want http://HOST:PORT",
		"s3://b/p?endpoint=http://h/p": "want http://HOST:PORT",
		"s3://b/p?path-style=maybe":    "want 1 or 0",
		"s3://b/p?regoin=x":            `unknown option "regoin"`,
		"s3://b/../p":                  "empty, \".\"",
	} {
		if _, err := Open(raw, clock.System()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", raw, err, want)
		}
	}
}
