package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
)

// adviseOnPermission adds to an error for lack of permission whose the file is, or the closest directory
// above it that can be seen, and as whom the process runs. The error itself names the file alone. To one of a read-only file system
// it adds what may have made it so.
func adviseOnPermission(err error) error {
	var at *fs.PathError
	switch {
	case !errors.As(err, &at):
		return err
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w: this process may only read there: mount that file system writable, or, if systemd runs this process with ProtectSystem=, "+
			"allow the directory by a line ReadWritePaths=%s under [Service] (systemctl edit skein)", err, filepath.Dir(filepath.Clean(at.Path)))
	case !errors.Is(err, fs.ErrPermission):
		return err
	}
	path := filepath.Clean(at.Path)
	info, serr := os.Stat(path)
	for serr != nil && path != filepath.Dir(path) {
		path = filepath.Dir(path)
		info, serr = os.Stat(path)
	}
	if serr != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return err
	}
	advice := "let that user read and write it (chown), or run the process as its owner"
	if at.Op == "mkdir" { // what lies above it is not the node's
		advice = fmt.Sprintf("make %s for that user (install -d -o %d)", at.Path, os.Geteuid())
	}
	return fmt.Errorf("%w: %s belongs to %s and has mode %v, and this process runs as %s: %s",
		err, path, userName(int(stat.Uid)), info.Mode(), userName(os.Geteuid()), advice)
}

func userName(uid int) string {
	if u, err := user.LookupId(strconv.Itoa(uid)); err == nil {
		return fmt.Sprintf("uid %d (%s)", uid, u.Username)
	}
	return fmt.Sprintf("uid %d", uid)
}
