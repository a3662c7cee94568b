package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestEveryKeyIsWrittenOnce(t *testing.T) {
	d := stored{keys: 10_000, value: 1}
	if err := d.check(); err != nil {
		t.Fatal(err)
	}
	seen, ascending := map[string]bool{}, 0
	for n := range d.keys {
		k := d.key(n)
		if len(k) != keyBytes || seen[k] {
			t.Fatalf("key %d is %q, of %d bytes, and was there before: %v", n, k, len(k), seen[k])
		}
		seen[k] = true
		if n > 0 && k > d.key(n-1) {
			ascending++
		}
	}
	if ascending == d.keys-1 {
		t.Error("the keys are written in their order")
	}
	for _, wrong := range []stored{{keys: 0, value: 1}, {keys: shuffle, value: 1}, {keys: 1}, {keys: 1, value: mebibyte + 1}} {
		if wrong.check() == nil {
			t.Errorf("%+v passes", wrong)
		}
	}
}

func TestNumberIn(t *testing.T) {
	const text = "a.db: revision 7, compacted at 3, 2000000 records, 12 bytes\n"
	if n, err := numberIn(text, "records"); n != 2_000_000 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	for _, word := range []string{"keys", "a.db:"} {
		if n, err := numberIn(text, word); err == nil {
			t.Errorf("%s: %d", word, n)
		}
	}
}

// A sorter's files have no name while they are used.
func TestFilesWithoutNameCount(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "run"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	if n := heldIn(os.Getpid(), dir); n != 1000 {
		t.Errorf("%d bytes", n)
	}
	if n := heldIn(os.Getpid(), t.TempDir()); n != 0 {
		t.Errorf("%d bytes in a directory without files", n)
	}
}
