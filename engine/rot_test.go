package engine

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// TestRotInATable flips single bits of a stored table and reads everything again. Either
// the bit is unused and everything is as before, or the store reports it: it does not
// open, or the read fails and the listener or Fatal gets the table's name. It never returns
// less data or other data.
func TestRotInATable(t *testing.T) {
	const keys = 400
	key := func(i int) []byte {
		return AppendVersionedKey(nil, fmt.Appendf(nil, "k%04d", i), keyspace.Revision(i+2))
	}
	value := func(i int) []byte { return bytes.Repeat(fmt.Appendf(nil, "%04d", i), 60) }
	mem := vfs.NewMem()
	e := openAt(t, mem)
	for i := range keys {
		commit(t, e, func(b *Batch) error { return b.Set(key(i), value(i)) })
	}
	commit(t, e, func(b *Batch) error { return b.SetApplied(1, Applied{Index: keys, Term: 1}) })
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
	names, err := mem.List("db")
	if err != nil {
		t.Fatal(err)
	}
	refused, failed, harmless := 0, 0, 0
	for _, name := range names {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		path := "db/" + name
		whole := readAll(t, mem, path)
		for off := 0; off < len(whole); off += len(whole)/16 + 1 {
			rotten := bytes.Clone(whole)
			rotten[off] ^= 1 << (off % 8)
			if err := vfsWrite(mem, path, rotten); err != nil {
				t.Fatal(err)
			}
			switch outcome, err := readBack(t, mem, keys, key, value); {
			case err == nil && outcome == "opened":
				harmless++
			case outcome == "refused":
				refused++
			case err != nil && strings.Contains(err.Error(), name):
				failed++
			default:
				t.Fatalf("byte %d of %s: %s, %v", off, name, outcome, err)
			}
		}
		if err := vfsWrite(mem, path, whole); err != nil {
			t.Fatal(err)
		}
	}
	if t.Logf("%d reads failed, %d stores were refused, %d bits were harmless", failed, refused, harmless); failed < 8 {
		t.Error("that proves little")
	}
	if outcome, err := readBack(t, mem, keys, key, value); outcome != "opened" || err != nil {
		t.Errorf("afterwards: %s, %v", outcome, err)
	}
}

// readBack opens the store and reads each key and the applied record. fatal is what was reported.
// A failed read without a report fails the test, and so does a wrong answer.
func readBack(t *testing.T, fs vfs.FS, keys int, key, value func(int) []byte) (outcome string, fatal error) {
	t.Helper()
	e, err := Open(testOptions(fs))
	if err != nil {
		return "refused", err
	}
	defer func() {
		if err := e.Abort(); err != nil && fatal == nil {
			t.Error(err)
		}
	}()
	reported := make(chan error, 8)
	e.OnCorruption(func(c Corruption) { reported <- errors.New(c.String()) })
	failed := func(err error) (string, error) {
		select {
		case c := <-reported:
			return "opened", c
		case <-e.Fatal():
			return "opened", e.Err()
		case <-time.After(10 * time.Second):
			t.Fatalf("a read failed (%v), and nobody was told", err)
			return "", nil
		}
	}
	for i := range keys {
		switch v, ok, err := e.Get(key(i)); {
		case err != nil:
			return failed(err)
		case !ok || !bytes.Equal(v, value(i)):
			t.Fatalf("key %d: %v %q", i, ok, v)
		}
	}
	switch a, ok, err := e.Applied(1); {
	case err != nil:
		return failed(err)
	case !ok || a.Index != uint64(keys):
		t.Fatalf("applied record: %v %+v", ok, a)
	}
	return "opened", e.Err()
}
