package node

import (
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
)

// TestRefuseEtcd: a directory of etcd is refused with the way to its data, and never with the
// advice to empty it. Skein's own directories are not.
func TestRefuseEtcd(t *testing.T) {
	for _, c := range []struct {
		name  string
		files []string
		want  string // the file that the text names; "" is no error
	}{
		{"empty", nil, ""},
		{"skein", []string{"data/identity", "data/wal/1", "data/engine/CURRENT"}, ""},
		{"etcd", []string{"data/member/snap/db", "data/member/wal/0-0.wal"}, "data/member/snap/db"},
		{"etcd's log alone", []string{"data/member/wal/0-0.wal"}, "data/member/snap/db"},
		{"member of etcd", []string{"data/snap/db", "data/wal/0-0.wal"}, "data/snap/db"},
	} {
		fs := vfs.NewMem()
		for _, path := range c.files {
			if err := fs.MkdirAll(fs.PathDir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			f, err := fs.Create(path, vfs.WriteCategoryUnspecified)
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
		}
		err := refuseEtcd(fs, "data", []string{"http://a:2379"})
		if (err == nil) != (c.want == "") {
			t.Errorf("%s: %v", c.name, err)
		}
		if err == nil {
			continue
		}
		if want := "skein import etcd " + c.want + " --skip-hash-check --endpoints http://a:2379"; !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v does not say %s", c.name, err, want)
		}
		for _, bad := range []string{"empty", "remove", "delete"} {
			if strings.Contains(err.Error(), bad) {
				t.Errorf("%s: %v speaks of %q", c.name, err, bad)
			}
		}
	}
}

// TestStartOnAnEtcd: the process says so before it does anything.
func TestStartOnAnEtcd(t *testing.T) {
	cfg, _, err := config.Load([]string{"--data-dir", t.TempDir()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := vfs.Default.MkdirAll(vfs.Default.PathJoin(cfg.DataDir, "member", "wal"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), cfg, zap.NewNop()); err == nil || !strings.Contains(err.Error(), "skein import etcd") {
		t.Errorf("%v", err)
	}
	if left, err := vfs.Default.List(cfg.DataDir); err != nil || len(left) != 1 {
		t.Errorf("the directory has %v, %v", left, err)
	}
}
