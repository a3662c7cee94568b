package node

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
)

// Who lacks a permission is told whose the file is, or the directory in which it would be, and as whom the
// process runs.
func TestAdviseOnPermission(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	denied := fmt.Errorf("engine: %w", &fs.PathError{Op: "open", Path: filepath.Join(dir, "wal", "skein.lock"), Err: syscall.EACCES})
	err := adviseOnPermission(denied)
	if !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
	for _, says := range []string{dir + " belongs to uid " + fmt.Sprint(os.Getuid()), "mode drwxr-x---", "runs as uid " + fmt.Sprint(os.Geteuid()), "chown"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("%q is not in: %v", says, err)
		}
	}
	missing := adviseOnPermission(&fs.PathError{Op: "mkdir", Path: filepath.Join(dir, "deeper"), Err: syscall.EACCES})
	if want := fmt.Sprintf("make %s for that user", filepath.Join(dir, "deeper")); !strings.Contains(missing.Error(), want) {
		t.Errorf("%q is not in: %v", want, missing)
	}
	// As systemd has it of what ProtectSystem=strict protects. No owner is wrong there.
	protected := adviseOnPermission(fmt.Errorf("wal: %w", &fs.PathError{Op: "mkdir", Path: "/mnt/log/wal", Err: syscall.EROFS}))
	for _, says := range []string{"/mnt/log/wal: read-only file system", "ReadWritePaths=/mnt/log under [Service]", "systemctl edit skein"} {
		if !strings.Contains(protected.Error(), says) {
			t.Errorf("%q is not in: %v", says, protected)
		}
	}
	if !errors.Is(protected, syscall.EROFS) || strings.Contains(protected.Error(), "chown") {
		t.Error(protected)
	}
	other := &fs.PathError{Op: "open", Path: dir, Err: syscall.ENOSPC}
	if err := adviseOnPermission(other); err != other { //nolint:errorlint // it is to be the same one
		t.Error(err)
	}
}

// A client port that is taken is found before the cluster is founded: nothing is written.
func TestATakenClientPortComesBeforeTheFounding(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := filepath.Join(t.TempDir(), "data")
	at := "http://" + taken.Addr().String()
	cfg, _, err := config.Load([]string{"--data-dir", dir, "--listen-client-urls", at, "--advertise-client-urls", at}, nil)
	if err != nil {
		t.Fatal(err)
	}
	n, err := Start(t.Context(), cfg, zap.NewNop())
	if err == nil {
		t.Fatal("it runs", n.Stop(t.Context()))
	}
	for _, says := range []string{at, "address already in use", "--listen-client-urls"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("%q is not in: %v", says, err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is there: %v", dir, err)
	}
}
