package wal

import (
	"testing"

	"github.com/skeindb/skein/internal/simdisk"
)

// TestBeganEmpty distinguishes a new log from one that was used before. BeganEmpty stays
// true until the owner has written something, so an owner who refuses the log once
// refuses it again at the next start.
func TestBeganEmpty(t *testing.T) {
	mem := simdisk.New()
	for range 2 {
		l := mustOpen(t, testOptions(mem))
		if !l.BeganEmpty() {
			t.Fatal("a new log, or one that was opened and closed, says that it holds something")
		}
		mustClose(t, l)
	}
	// The owner accepts it. From then on it is a used log, even if the power fails at
	// once.
	l := mustOpen(t, testOptions(mem))
	if err := l.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !l.BeganEmpty() {
		t.Error("what was found at Open has changed")
	}
	crashed := mem.Crash(0, nil)
	mustClose(t, l)
	for _, fs := range []*simdisk.Disk{mem, crashed} {
		l := mustOpen(t, testOptions(fs))
		if l.BeganEmpty() {
			t.Error("a log with a mark in it is called empty")
		}
		mustClose(t, l)
	}
	// The files are lost, all of them or all with records.
	for _, keep := range []string{"", segmentName(2, segmentSuffix)} {
		fs := mem.Crash(0, nil)
		names, err := fs.List("wal")
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			if n == keep {
				continue
			}
			if err := fs.Remove("wal/" + n); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 {
			l := mustOpen(t, testOptions(fs))
			if !l.BeganEmpty() {
				t.Errorf("a lost log, with %q left of it, is taken for one that holds something", keep)
			}
			mustClose(t, l)
		}
	}
}
