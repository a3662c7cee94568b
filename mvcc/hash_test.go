package mvcc

import (
	"bytes"
	"testing"

	"github.com/cespare/xxhash/v2"
)

// The hash of a write is a format: docs/format/shard.md has it byte by byte.
func TestHashWrite(t *testing.T) {
	head := []byte{
		0,
		0, 0, 0, 0, 0, 0, 0, 9, // revision
		0, 0, 0, 0, 0, 0, 0, 3, // create revision
		0, 0, 0, 0, 0, 0, 0, 2, // version
		0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, // lease
		0, 0, 0, 4, // operation number
		0, 0, 0, 2, 'k', 'y', // key
	}
	v := Version{Key: []byte("ky"), Mod: 9, Create: 3, Version: 2, Lease: -2, Sub: 4}
	if got, want := HashWrite(&v), xxhash.Sum64(head); got != want {
		t.Errorf("without a value: %x, want %x", got, want)
	}
	v.Value = []byte("value")
	var factor uint64 = 0x9e3779b97f4a7c15
	if got, want := HashWrite(&v), xxhash.Sum64(head)+xxhash.Sum64([]byte("value"))*factor; got != want {
		t.Errorf("with a value: %x, want %x", got, want)
	}
	d := Version{Key: []byte("ky"), Mod: 9, Sub: 4, Tombstone: true}
	gone := bytes.Clone(head)
	gone[0] = 1
	clear(gone[9:33])
	if got, want := HashWrite(&d), xxhash.Sum64(gone); got != want {
		t.Errorf("a tombstone: %x, want %x", got, want)
	}
	// An earlier write is not part of it.
	d.Earlier = &v
	if got, want := HashWrite(&d), xxhash.Sum64(gone); got != want {
		t.Errorf("with an earlier write: %x, want %x", got, want)
	}
}
