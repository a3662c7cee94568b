package mvcc

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
)

// TestFormat prints the bytes of values. Together with docs/format/mvcc.md the golden
// file defines them. It also pins the hash, which replicas of different releases compare.
func TestFormat(t *testing.T) {
	datadriven.RunTest(t, "testdata/format", func(t *testing.T, d *datadriven.TestData) string {
		v := Version{Key: []byte("k")}
		var mod, create, lease, sub uint64
		var value string
		d.MaybeScanArgs(t, "mod", &mod)
		d.MaybeScanArgs(t, "create", &create)
		d.MaybeScanArgs(t, "version", &v.Version)
		d.MaybeScanArgs(t, "lease", &lease)
		d.MaybeScanArgs(t, "sub", &sub)
		d.MaybeScanArgs(t, "value", &value)
		v.Mod, v.Create, v.Lease, v.Sub = keyspace.Revision(mod), keyspace.Revision(create), keyspace.LeaseID(lease), uint32(sub)
		switch d.Cmd {
		case "tombstone":
			v.Tombstone = true
		case "put":
			v.Value = []byte(value)
		case "twice":
			v.Value = []byte(value)
			v.Earlier = &Version{Key: v.Key, Mod: v.Mod, Sub: 2, Tombstone: true}
			v.Earlier.Earlier = &Version{Key: v.Key, Mod: v.Mod, Create: v.Mod, Version: 1, Lease: 7, Sub: 1, Value: []byte("w")}
		}
		return fmt.Sprintf("key   %x\nvalue %x\nhash  %016x\n", v.AppendKey(nil), v.AppendValue(nil), v.hash())
	})
}

// TestEarlierWrites decodes stored values with impossible earlier writes.
func TestEarlierWrites(t *testing.T) {
	for _, b := range []string{
		"\x29", "\x29\x00", "\x2d\x01\x01", "\x2d\x01\x01\x00", "\x2d\x01\x01\x05\x21", "\x2d\x01\x02\x01\x21",
		"\x2d\x01\x01\x02\x25\x01", "\x2d\x02\x01\x03\x29\x01\x21", "\x2d\x02\x02\x01\x21\x02\x25\x01", "\x2d\x01\x01\x01\x11",
	} {
		v := Version{Key: []byte("k"), Mod: 2}
		if err := v.DecodeValue([]byte(b)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%x: %s, %v", b, line(&v), err)
		}
	}
	v := Version{Key: []byte("k"), Mod: 2}
	if err := v.DecodeValue([]byte("\x2d\x01\x01\x01\x21")); err != nil || line(&v) != `"k"@2.1 delete, before that "k"@2.0 delete` {
		t.Errorf("%s, %v", line(&v), err)
	}
}

// decodeVersion decodes a physical pair. Key has its own memory, Value refers to value.
func decodeVersion(key, value []byte) (Version, error) {
	var v Version
	var err error
	if v.Key, v.Mod, err = engine.DecodeVersionedKey(key); err != nil {
		return Version{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return v, v.DecodeValue(value)
}

func FuzzDecodeVersion(f *testing.F) {
	for _, v := range []Version{
		{Key: []byte("a"), Mod: 9, Create: 3, Version: 2, Lease: -5, Sub: 300, Value: []byte("v")},
		{Key: []byte{0}, Mod: 1, Tombstone: true, Sub: 1},
		{Key: []byte("b"), Mod: 4, Tombstone: true, Sub: 3, Earlier: &Version{
			Key: []byte("b"), Mod: 4, Create: 4, Version: 1, Lease: 5, Sub: 1, Value: []byte("w"),
			Earlier: &Version{Key: []byte("b"), Mod: 4, Tombstone: true},
		}},
	} {
		f.Add(v.AppendKey(nil), v.AppendValue(nil))
	}
	f.Fuzz(func(t *testing.T, key, value []byte) {
		v, err := decodeVersion(key, value)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatal(err)
			}
			return
		}
		if len(v.Key) == 0 || v.Mod == 0 {
			return // decodable keys that no version has
		}
		again, err := decodeVersion(v.AppendKey(nil), v.AppendValue(nil))
		if err != nil || line(&again) != line(&v) || !bytes.Equal(again.Value, v.Value) {
			t.Fatalf("%s, again %s %v", line(&v), line(&again), err)
		}
	})
}

// TestPutRefusesBrokenVersions expects the panics of check.
func TestPutRefusesBrokenVersions(t *testing.T) {
	for _, v := range []Version{
		{Mod: 2, Create: 2, Version: 1},
		{Key: []byte("k"), Create: 1, Version: 1},
		{Key: []byte("k"), Mod: 2, Create: 3, Version: 1},
		{Key: []byte("k"), Mod: 2, Create: 2},
		{Key: []byte("k"), Mod: 2, Tombstone: true, Value: []byte("v")},
		{Key: []byte("k"), Mod: keyspace.MaxRevision + 1, Create: 2, Version: 1},
		{Key: []byte("k"), Mod: 2, Create: 2, Version: 1, Earlier: &Version{Key: []byte("k"), Mod: 2, Tombstone: true}},
		{Key: []byte("k"), Mod: 2, Create: 2, Version: 1, Sub: 1, Earlier: &Version{Key: []byte("k"), Mod: 1, Tombstone: true}},
		{Key: []byte("k"), Mod: 2, Create: 2, Version: 1, Sub: 1, Earlier: &Version{Key: []byte("l"), Mod: 2, Tombstone: true}},
		{Key: []byte("k"), Mod: 2, Create: 2, Version: 1, Sub: 1, Earlier: &Version{Key: []byte("k"), Mod: 2, Tombstone: true, Value: []byte("v")}},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was accepted", line(&v))
				}
			}()
			v.AppendValue(v.AppendKey(nil))
		}()
	}
}
