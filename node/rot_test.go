package node

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// rot changes one byte behind each place where the files of a directory below have the
// mark, and returns how many places that were.
func (d *memDisk) rot(t *testing.T, dir string, mark []byte) (places int) {
	t.Helper()
	names, err := d.mem.List(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasPrefix(name, "MANIFEST") {
			continue // it names keys too
		}
		path := d.mem.PathJoin(dir, name)
		st, err := d.mem.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the engine removed what it needs no longer
		}
		if err != nil {
			t.Fatal(err)
		}
		if st.IsDir() {
			places += d.rot(t, path, mark)
			continue
		}
		f, err := d.mem.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		if at := bytes.Index(whole, mark); at >= 0 {
			at += len(mark)
			if _, err := f.WriteAt([]byte{whole[at] ^ 1}, int64(at)); err != nil {
				t.Fatal(err)
			}
			places++
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return places
}

// A replica whose table turns out to be rotten when it is read goes into quarantine, says why, and
// answers nothing more, also after a restart. Its node and the range go on.
func TestRotInTheStoreEndsTheReplica(t *testing.T) {
	bubble(t, 3, nil, nil, func(r *rig) {
		n, others := r.nodes[0], r.nodes[1:]
		// Random, so that they lie on the disk as they are here, and large: the block that rots
		// holds nothing else, and is read by nobody before the range is.
		var value []byte
		for i := range 9 {
			v := make([]byte, 64<<10)
			for at := range v {
				v[at] = byte(r.rng.Uint32())
			}
			if i == 4 {
				value = v
			}
			r.mustPut(n, keyOf(i), string(v))
		}
		r.caughtUp(5 * time.Second)
		r.stop(n)
		r.start(n) // with nothing of it in memory
		r.caughtUp(20 * time.Second)
		if places := n.disk.rot(t, "data", value[:64]); places == 0 {
			t.Fatal("the value is in no file")
		}
		time.Sleep(5 * time.Second)
		if err := n.core.Err(); err != nil {
			t.Fatalf("before the rotten block was read: %v", err)
		}
		id := n.summaries()[0].Descriptor.Range
		hash, err := n.core.Ranges().HashAt(r.t.Context(), n.id, id, keyspace.MaxRevision-1, 0)
		if err == nil {
			t.Fatalf("the rotten range has the hash %#x", hash)
		}
		quarantined := func() bool {
			q, ok := n.core.host.Quarantined()[id.Group()]
			return ok && strings.Contains(q.Reason, "corruption in ") && n.core.host.Group(id.Group()) == nil
		}
		r.wait(time.Second*5, "the replica is in quarantine", quarantined)
		for _, again := range []bool{false, true} {
			if again {
				time.Sleep(time.Second) // the note is durable
				r.crash(n)
				r.start(n)
				if !quarantined() {
					t.Errorf("after a crash: %v", n.core.host.Quarantined())
				}
			}
			r.wait(10*time.Second, "the range serves", func() bool {
				_, err := n.put(r.t.Context(), "after", "it")
				return err == nil
			})
			for _, o := range append(others, n) {
				r.mustGet(o, keyOf(4), string(value))
			}
			if err := n.core.Err(); err != nil {
				t.Errorf("the node has given up: %v", err)
			}
		}
	})
}

// A node whose log or own records have rotted before their end does not start, also not after another
// try. It says where the damage is and what to do. The others go on.
func TestRotInTheLogKeepsTheNodeDown(t *testing.T) {
	t.Run("log", func(t *testing.T) { testRotKeepsTheNodeDown(t, "wal", ".wal is damaged at offset") })
	t.Run("own records", func(t *testing.T) { testRotKeepsTheNodeDown(t, "data", "checksum mismatch") })
}

func testRotKeepsTheNodeDown(t *testing.T, dir, says string) {
	t.Helper()
	bubble(t, 3, nil, nil, func(r *rig) {
		n, other := r.nodes[0], r.nodes[1]
		value := make([]byte, 8<<10) // random, so that it is found on the disk
		for at := range value {
			value[at] = byte(r.rng.Uint32())
		}
		r.mustPut(other, keyOf(1), string(value))
		for i := range 20 {
			r.mustPut(other, keyOf(2), strings.Repeat("behind", i))
		}
		r.caughtUp(5 * time.Second)
		r.crash(n)
		mark := value[:64]
		if dir == "data" {
			mark = []byte("raftgroup/promise")
		}
		if places := n.disk.rot(t, dir, mark); places == 0 {
			t.Fatal("the mark is in no file")
		}
		for range 2 {
			c, err := Open(r.t.Context(), r.optionsOf(n))
			if err == nil {
				n.set(c)
				t.Fatal("the node has started")
			}
			for _, want := range []string{says, "member remove", "--join", "data", "wal"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v does not say %q", err, want)
				}
			}
		}
		r.wait(10*time.Second, "the others go on", func() bool {
			_, err := other.put(r.t.Context(), keyOf(3), "without it")
			return err == nil
		})
		r.mustGet(other, keyOf(1), string(value))
	})
}
