package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/internal/leftout"
)

// How long a disk may be busy when it is unmounted, and how often that is tried.
const (
	unmountPatience = 20 * time.Second
	unmountPause    = 20 * time.Millisecond
)

// smallDisk is the disk of the first node: a file system in a loop file, which lies in another one. While the outer one is frozen
// an fsync of the inner one waits, and a write does not, as on a slow disk.
type smallDisk struct{ outer, dir string }

// mountSmall makes a small disk of the first node's directory, if this process may.
func (m *monitored) mountSmall() {
	m.t.Helper()
	d := &smallDisk{outer: filepath.Join(m.dir, "outer"), dir: filepath.Join(m.dir, "n1")}
	for _, step := range []struct {
		image, at string
		bytes     int64
	}{{filepath.Join(m.dir, "image"), d.outer, 832 << 20}, {filepath.Join(d.outer, "image"), d.dir, 640 << 20}} {
		if err := os.Mkdir(step.at, 0o700); err != nil {
			m.t.Fatal(err)
		}
		if m.noDisk = m.mount(step.image, step.at, step.bytes); m.noDisk != nil {
			return
		}
	}
	m.small = d
}

// mount makes a file system of so many bytes in a file, and mounts it for the rest of the test.
func (m *monitored) mount(image, at string, bytes int64) error {
	f, err := os.Create(image)
	if err == nil {
		err = errors.Join(f.Truncate(bytes), f.Close())
	}
	if err != nil {
		return err
	}
	for _, args := range [][]string{{"mkfs.ext4", "-q", "-F", "-m", "0", image}, {"mount", "-o", "loop", image, at}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			return errors.Join(err, errors.New(string(out)))
		}
	}
	m.t.Cleanup(func() {
		if err := unmount(at); err != nil {
			m.t.Error(err)
		}
	})
	return nil
}

// unmount unmounts a disk. A process that has just died may hold it for a moment, and the outer disk is held by the loop device of
// the inner one, which the kernel clears after its unmount.
func unmount(at string) error {
	for end := time.Now().Add(unmountPatience); ; time.Sleep(unmountPause) {
		err := unix.Unmount(at, 0)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return fmt.Errorf("unmount %s: %w", at, err)
		}
	}
}

// fullDisk fills the disk of the first node, and frees it again.
func (m *monitored) fullDisk() {
	m.t.Helper()
	if m.small == nil {
		leftout.Part(m.t, "a full disk: %v", m.noDisk)
		return
	}
	path := filepath.Join(m.small.dir, "somebody-else")
	f, err := os.Create(path)
	if err != nil {
		m.t.Fatal(err)
	}
	for zeros := make([]byte, 1<<20); err == nil; {
		_, err = f.Write(zeros)
	}
	if closed := f.Close(); closed != nil || !errors.Is(err, syscall.ENOSPC) {
		m.t.Fatal(err, closed)
	}
	m.await("SkeinDiskFull", true)
	m.await("SkeinAlarm", true)
	if err := os.Remove(path); err != nil {
		m.t.Fatal(err)
	}
	m.await("SkeinDiskFull", false)
	m.await("SkeinAlarm", false)
}

// slowDisk has fsyncs of the first node take most of a second.
func (m *monitored) slowDisk() {
	m.t.Helper()
	if m.small == nil {
		leftout.Part(m.t, "a slow disk: %v", m.noDisk)
		return
	}
	stop := m.slow(m.small.outer)
	m.await("SkeinSlowFsync", true)
	stop()
	m.await("SkeinSlowFsync", false)
}

// slow freezes a disk again and again until stop is called. A process of its own does, for each line that it gets: however this
// one ends, no disk stays frozen, which could not be unmounted. The thaw is short: one fsync waits for each freeze, and it has to be more
// than a hundredth of all, however many a quick disk does in a thaw.
func (m *monitored) slow(dir string) (stop func()) {
	m.t.Helper()
	c := exec.Command("sh", "-c", `while read -r _; do fsfreeze -f "$0" && sleep 0.8; fsfreeze -u "$0"; sleep 0.01; echo; done`, dir)
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // what ends this process and its group is not meant for it
	in, err1 := c.StdinPipe()
	out, err2 := c.StdoutPipe()
	if err := errors.Join(err1, err2, c.Start()); err != nil {
		m.t.Fatal(err)
	}
	ask, done := make(chan struct{}), make(chan error, 1)
	go func() {
		frozen := bufio.NewReader(out)
		for {
			select {
			case <-ask:
				done <- errors.Join(in.Close(), c.Wait())
				return
			default:
			}
			_, err := io.WriteString(in, "\n")
			if err == nil {
				_, err = frozen.ReadString('\n')
			}
			if err != nil {
				done <- errors.Join(err, c.Wait())
				return
			}
		}
	}()
	stop = sync.OnceFunc(func() {
		close(ask)
		if err := <-done; err != nil {
			m.t.Errorf("freeze %s: %v", dir, err)
		}
	})
	m.t.Cleanup(stop)
	return stop
}
