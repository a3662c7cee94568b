package chaos

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// disk is the ext4 in a loop file on which one node keeps its data.
type disk struct {
	dir  string   // where it is mounted
	loop *os.File // the loop device; it lives as long as this file is open
}

// The ioctl of ext4 that stops all writing at once. Its flag also drops the part of the
// journal that is in memory.
const (
	ext4Shutdown     = 2<<30 | 4<<16 | 'X'<<8 | 125 // _IOR('X', 125, __u32)
	shutdownNoFlush  = 2
	unmountPatience  = 20 * time.Second
	unmountPause     = 20 * time.Millisecond
	attempts         = 20 // at a loop device that another process may take first
	fillStep         = 1 << 20
	somebodyElseFile = "somebody-else"
)

// newDisk makes a disk of so many bytes and mounts it at dir. It returns an error if
// this machine or this user cannot.
func newDisk(t *testing.T, dir string, size int64) (*disk, error) {
	t.Helper()
	if noNamespace != "" {
		return nil, errors.New(noNamespace)
	}
	image := dir + ".ext4"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return nil, err
	}
	defer func() {
		// From now on only the open loop device keeps it.
		if err := os.Remove(image); err != nil {
			t.Error(err)
		}
	}()
	if err := os.Truncate(image, size); err != nil {
		return nil, err
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", "-m", "0", image).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mkfs.ext4: %w %s", err, out)
	}
	loop, err := attachLoop(image)
	if err != nil {
		return nil, fmt.Errorf("a loop device: %w", err)
	}
	d := &disk{dir: dir, loop: loop}
	t.Cleanup(func() {
		if err := d.unmount(); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: it is not mounted
			t.Error(err)
		}
		loop.Close()
	})
	if err := d.mount(); err != nil {
		return nil, err
	}
	return d, nil
}

// attachLoop binds a free loop device to a file. The device clears itself when nobody
// has it open or mounted any more.
func attachLoop(image string) (*os.File, error) {
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for range attempts {
		var n int
		if n, err = unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE); err != nil {
			return nil, err
		}
		var loop *os.File
		if loop, err = os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0); err != nil {
			return nil, err
		}
		config := &unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		if err = unix.IoctlLoopConfigure(int(loop.Fd()), config); err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return nil, err
}

// mount mounts the disk; ext4 recovers from its journal.
func (d *disk) mount() error {
	if err := unix.Mount(d.loop.Name(), d.dir, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", d.loop.Name(), d.dir, err)
	}
	return nil
}

// unmount unmounts the disk; a process that has just died may hold it for a moment.
func (d *disk) unmount() error {
	deadline := time.Now().Add(unmountPatience)
	for {
		err := unix.Unmount(d.dir, 0)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return fmt.Errorf("unmount %s: %w", d.dir, err)
		}
		time.Sleep(unmountPause)
	}
}

// renew replaces the disk by an empty one.
func (d *disk) renew() error {
	if err := d.unmount(); err != nil {
		return err
	}
	if err := command("", "mkfs.ext4", "-q", "-F", "-m", "0", d.loop.Name()); err != nil {
		return err
	}
	return d.mount()
}

// cutPower stops all writing to the disk at this moment. Unsynced data are gone once
// the disk has been unmounted.
func (d *disk) cutPower() error {
	dir, err := os.Open(d.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.IoctlSetPointerInt(int(dir.Fd()), ext4Shutdown, shutdownNoFlush); err != nil {
		return fmt.Errorf("EXT4_IOC_SHUTDOWN of %s: %w", d.dir, err)
	}
	return nil
}

// hang blocks everybody who writes to the disk until thaw is called or this process
// ends. A disk that stayed frozen could never be unmounted.
func (d *disk) hang(t *testing.T) (thaw func() error, err error) {
	t.Helper()
	cmd := exec.Command("sh", "-c", `fsfreeze -f "$0" && echo frozen && cat; fsfreeze -u "$0"`, d.dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt from the terminal is not meant for it
	var stderr strings.Builder
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, readErr := bufio.NewReader(out).ReadString('\n')
	thaw = sync.OnceValue(func() error {
		in.Close()
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("fsfreeze %s: %w %s", d.dir, err, stderr.String())
		}
		return nil
	})
	if line != "frozen\n" {
		return nil, errors.Join(readErr, thaw())
	}
	t.Cleanup(func() { _ = thaw() })
	return thaw, nil
}

// fill takes all room of the disk, and returns the function that frees it for good, also beyond a
// power cut.
func (d *disk) fill() (free func() error, err error) {
	path := filepath.Join(d.dir, somebodyElseFile)
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var size int64
	for err == nil {
		if err = unix.Fallocate(int(f.Fd()), 0, size, fillStep); err == nil {
			size += fillStep
		}
	}
	if errors.Is(err, unix.ENOSPC) {
		if _, err = f.Seek(size, io.SeekStart); err == nil {
			_, err = io.Copy(f, zeros{})
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		return nil, fmt.Errorf("fill %s: %w", d.dir, err)
	}
	return func() error { return errors.Join(os.Remove(path), syncPath(d.dir)) }, nil
}

// zeros has no end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A power cut keeps synced data and loses the rest. Otherwise the runs would prove no
// fsync.
func TestPowerCutLosesWhatWasNotSynced(t *testing.T) {
	d := diskOrSkip(t)
	path := filepath.Join(d.dir, "file")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(s string) {
		if _, err := f.WriteString(s); err != nil {
			t.Fatal(err)
		}
	}
	write("synced")
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	write(" and not synced")
	if err := d.cutPower(); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err == nil {
		t.Error("a disk without power syncs")
	}
	f.Close()
	if err := errors.Join(d.unmount(), d.mount()); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "synced" {
		t.Errorf("after the power cut: %q, %v", got, err)
	}
}

// A disk that hangs blocks its writers and loses nothing.
func TestHangingDiskKeepsWritersWaiting(t *testing.T) {
	d := diskOrSkip(t)
	path := filepath.Join(d.dir, "file")
	thaw, err := d.hang(t)
	if err != nil {
		t.Fatal(err)
	}
	wrote := make(chan error, 1)
	go func() { wrote <- os.WriteFile(path, []byte("late"), 0o600) }()
	select {
	case err := <-wrote:
		t.Errorf("a write to a disk that hangs: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if err := thaw(); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "late" {
		t.Errorf("after it hung: %q, %v", got, err)
	}
}

// A full disk has no room for one more byte until it is freed.
func TestFullDiskHasNoRoom(t *testing.T) {
	d := diskOrSkip(t)
	free, err := d.fill()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.dir, "file")
	if err := os.WriteFile(path, []byte("x"), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a write to a full disk: %v", err)
	}
	if err := free(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
}

// A disk that was freed stays free after a power cut. Else the node is full for as long as the run
// lasts, and the ranges that it leads refuse puts.
func TestFreedDiskStaysFree(t *testing.T) {
	d := diskOrSkip(t)
	free, err := d.fill()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.dir, somebodyElseFile)
	if err := syncPath(path); err != nil {
		t.Fatal(err)
	}
	if err := free(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.cutPower(), d.unmount(), d.mount()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what filled the disk, after the power cut: %v", err)
	}
}

// syncPath makes a file durable, or the entries of a directory.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func diskOrSkip(t *testing.T) *disk {
	t.Helper()
	d, err := newDisk(t, filepath.Join(t.TempDir(), "disk"), 32<<20)
	if err != nil {
		leaveOut(t, err)
	}
	return d
}
