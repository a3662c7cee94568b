package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

var me = Identity{Cluster: 1, Node: 2}

// openDirs opens the directories and closes them at once.
func openDirs(fs vfs.FS, want Identity) (*DirLock, error) {
	l, err := OpenDir(fs, "data", "data/wal", want, keyspace.OwnVersions())
	if err != nil {
		return nil, err
	}
	return l, l.Close()
}

// TestOpenDir covers everything that may be wrong with directories.
func TestOpenDir(t *testing.T) {
	fs := simdisk.New()
	l, err := openDirs(fs, me)
	if err != nil || !l.Fresh || l.Identity.Instance == 0 {
		t.Fatalf("empty directories: %+v %v", l, err)
	}
	again, err := openDirs(fs, me)
	if err != nil || again.Fresh || again.Identity != l.Identity {
		t.Fatalf("second time: %+v %v", again, err)
	}
	expect := func(what string, err, is error, words ...string) {
		t.Helper()
		if !errors.Is(err, is) {
			t.Fatalf("%s: %v", what, err)
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", what, err, w)
			}
		}
	}
	_, err = openDirs(fs, Identity{Cluster: 9, Node: 2})
	expect("another cluster", err, ErrIdentity, "cluster 1", "cluster 9", "token")
	_, err = openDirs(fs, Identity{Cluster: 1, Node: 3})
	expect("another node", err, ErrIdentity, "node 2", "node is 3")
	_, err = OpenDir(fs, "data", "data/wal", me, keyspace.Versions{Oldest: keyspace.NewestVersion + 1, Newest: keyspace.NewestVersion + 2})
	expect("a much later build", err, ErrIdentity, fmt.Sprintf("data has format version %d", keyspace.OldestVersion), fmt.Sprintf("this build reads versions %d to %d", keyspace.NewestVersion+1, keyspace.NewestVersion+2), "the release between first")

	held, err := OpenDir(fs, "data", "data/wal", me, keyspace.OwnVersions())
	if err != nil {
		t.Fatal(err)
	}
	_, err = openDirs(fs, me)
	expect("in use", err, ErrLocked, "another skein process")
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}

	if err := vfsWrite(fs, "data/wal/000001.wal", []byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := fs.Remove("data/" + identityName); err != nil {
		t.Fatal(err)
	}
	_, err = openDirs(fs, me)
	expect("half lost", err, ErrIdentity, "000001.wal", "restore")

	if err := writeIdentity(fs, "data", Identity{Cluster: 1, Node: 2, Version: keyspace.NewestVersion, Instance: 77}); err != nil {
		t.Fatal(err)
	}
	_, err = openDirs(fs, me)
	expect("another life", err, ErrIdentity, "instance 4d", "wal directory")

	if err := vfsWrite(fs, "data/"+identityName, []byte(identityHead+"\nformat 3\ncluster")); err != nil {
		t.Fatal(err)
	}
	_, err = openDirs(fs, me)
	expect("damaged", err, ErrIdentity, "damaged")
	if err := vfsWrite(fs, "data/"+identityName, []byte(identityHead+"\nformat 2\ncluster")); err != nil {
		t.Fatal(err)
	}
	_, err = ReadIdentity(fs, "data")
	expect("of an earlier build", err, ErrIdentity, "data has format version 2", "this build reads "+keyspace.OwnVersions().String())
	if _, err := OpenDir(fs, "data", "data", me, keyspace.OwnVersions()); err == nil {
		t.Error("one directory for both was accepted")
	}
}

// TestOpenDirMovedLog: a node that gets another wal directory has its log moved there, with its identity. A start without that is refused,
// says so, and changes nothing; so is one that looks for the log where it was.
func TestOpenDirMovedLog(t *testing.T) {
	fs := simdisk.New()
	first, err := openDirs(fs, me)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"data/engine", "data/wal/000001.wal"} {
		if err := vfsWrite(fs, file, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	at := func(wal string) (*DirLock, error) {
		l, err := OpenDir(fs, "data", wal, me, keyspace.OwnVersions())
		if err != nil {
			return nil, err
		}
		return l, l.Close()
	}
	if _, err := at("log"); !errors.Is(err, ErrIdentity) || !strings.Contains(err.Error(), "move all files from there to log;") {
		t.Fatalf("before the move: %v", err)
	}
	for _, name := range []string{identityName, "000001.wal"} {
		if err := fs.Rename("data/wal/"+name, "log/"+name); err != nil {
			t.Fatal(err)
		}
	}
	if l, err := at("log"); err != nil || l.Fresh || l.Identity != first.Identity {
		t.Fatalf("after it: %+v, was %+v: %v", l, first, err)
	}
	if _, err := at("data/wal"); !errors.Is(err, ErrIdentity) {
		t.Errorf("where it was: %v", err)
	}
}

// TestEnsureInstance: a directory has its instance before it has an identity, and keeps it
// until both are lost.
func TestEnsureInstance(t *testing.T) {
	fs := simdisk.New()
	drawn, err := EnsureInstance(fs, "data")
	if err != nil || drawn == 0 {
		t.Fatal(drawn, err)
	}
	fs = fs.Crash(0, nil)
	if again, err := EnsureInstance(fs, "data"); err != nil || again != drawn {
		t.Fatalf("after a crash %x, was %x: %v", again, drawn, err)
	}
	l, err := openDirs(fs, me)
	if err != nil || l.Identity.Instance != drawn {
		t.Fatalf("the directories have %x, want %x: %v", l.Identity.Instance, drawn, err)
	}
	if again, err := EnsureInstance(fs, "data"); err != nil || again != drawn {
		t.Fatalf("with an identity %x, was %x: %v", again, drawn, err)
	}
	held, err := OpenDir(fs, "data", "data/wal", me, keyspace.OwnVersions())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := EnsureInstance(fs, "data"); !errors.Is(err, ErrLocked) {
		t.Errorf("beside another process: %v", err)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(fs.Remove("data/"+identityName), fs.Remove("data/wal/"+identityName)); err != nil {
		t.Fatal(err)
	}
	if again, err := EnsureInstance(fs, "data"); err != nil || again == drawn {
		t.Errorf("a directory that lost its identity: %x, was %x: %v", again, drawn, err)
	}
	if err := vfsWrite(fs, "data/"+instanceName, []byte(instanceHead+"\nformat 2\n")); err != nil {
		t.Fatal(err)
	}
	if _, err := EnsureInstance(fs, "data"); !errors.Is(err, ErrIdentity) || !strings.Contains(err.Error(), "format version 2") || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("of a later program: %v", err)
	}
}

// TestOpenDirCrash fails each operation of the first start and crashes. The next start
// must succeed, since the node has promised nothing yet.
func TestOpenDirCrash(t *testing.T) {
	for n := int32(0); ; n++ {
		mem := simdisk.New()
		inj := errorfs.OnIndex(n)
		_, err := openDirs(errorfs.Wrap(mem, inj), me)
		if inj.Index.Load() >= 0 {
			if err != nil {
				t.Fatal(err)
			}
			break
		}
		if _, err := openDirs(mem.Crash(0, nil), me); err != nil {
			t.Fatalf("operation %d failed, then: %v", n, err)
		}
	}
}

// TestOpenDirWithoutPermission: a directory that cannot be written is not said to be another process's.
func TestOpenDirWithoutPermission(t *testing.T) {
	denied := errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind != errorfs.OpLock {
			return nil
		}
		return &fs.PathError{Op: "open", Path: op.Path, Err: syscall.EACCES}
	})
	_, err := openDirs(errorfs.Wrap(simdisk.New(), denied), me)
	if !errors.Is(err, fs.ErrPermission) || errors.Is(err, ErrLocked) || strings.Contains(err.Error(), "process") || !strings.Contains(err.Error(), "directory data") {
		t.Error(err)
	}
}

// TestOpenDirNested names a wal directory within the data directory in every way. Fresh
// directories are accepted, one directory for both is not, and other files are noticed.
func TestOpenDirNested(t *testing.T) {
	t.Chdir(t.TempDir())
	abs := func(p string) string {
		t.Helper()
		p, err := filepath.Abs(p)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for i, c := range []struct{ data, wal string }{
		{"1/data", "1/data/wal"},
		{"2/data", "2/data/a/wal"},
		{"3/data", abs("3/data/wal")},
		{abs("4/data"), "4/data/a/b/wal"},
		{"./5/data/", "5/../5/data/wal"},
		{"6/wal/data", abs("6/wal")},
		{"7/data", "7/data-wal"},
	} {
		l, err := OpenDir(vfs.Default, c.data, c.wal, me, keyspace.OwnVersions())
		if err != nil || !l.Fresh {
			t.Fatalf("data %s, wal %s: %v", c.data, c.wal, err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if err := vfsWrite(vfs.Default, filepath.Join(c.data, "stray"), []byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := vfs.Default.Remove(filepath.Join(c.wal, identityName)); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenDir(vfs.Default, c.data, c.wal, me, keyspace.OwnVersions()); !errors.Is(err, ErrIdentity) {
			t.Errorf("%d: files and no identity: %v", i+1, err)
		}
	}
	if _, err := OpenDir(vfs.Default, "8", abs("8"), me, keyspace.OwnVersions()); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("one directory for both: %v", err)
	}
}

// TestRaise: the version in which a node writes is raised in both directories, whenever a crash
// comes, and a build that does not read it refuses them.
func TestRaise(t *testing.T) {
	older, newer := keyspace.Versions{Oldest: 3, Newest: 4}, keyspace.Versions{Oldest: 4, Newest: 5}
	for n := int32(0); ; n++ {
		mem := simdisk.New()
		l, err := OpenDir(mem, "data", "data/wal", me, older)
		if err != nil || l.Identity.Version != 3 {
			t.Fatalf("%+v %v", l, err)
		}
		inj := errorfs.OnIndex(n)
		l.fs = errorfs.Wrap(mem, inj)
		done := l.Raise(4) == nil
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		after := mem.Crash(0, nil)
		again, err := OpenDir(after, "data", "data/wal", me, older)
		if err != nil || again.Fresh || done && again.Identity.Version != 4 {
			t.Fatalf("after error %d: %+v %v", n, again, err)
		}
		// Both have the version that counts. The node writes neither again, and the next build reads
		// no version below.
		for _, dir := range []string{"data", "data/wal"} {
			if id, err := readIdentity(after, dir, older); err != nil || id.Version != again.Identity.Version {
				t.Fatalf("after error %d: %s has %+v, and the node writes in %d: %v", n, dir, id, again.Identity.Version, err)
			}
		}
		if err := errors.Join(again.Raise(4), again.Close()); err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			reads keyspace.Versions
			says  string
		}{{keyspace.Versions{Oldest: 2, Newest: 3}, "start a newer build"}, {newer, ""}} {
			l, err := OpenDir(after, "data", "data/wal", me, c.reads)
			if (c.says == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Fatalf("a build of %v: %v", c.reads, err)
			}
			if err == nil {
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if done {
			return
		}
	}
}
