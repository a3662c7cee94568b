package clock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Restored calls f each time the kernel reports that this virtual machine runs on from a
// snapshot, until ctx ends. Its clocks stood still then, as far as they know. The report is the
// uevent of the virtual machine generation id. Not all kernels and hypervisors have it. A
// machine that is only paused gets none.
func Restored(ctx context.Context, f func()) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("clock: uevents of the kernel: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		unix.Close(fd)
		return fmt.Errorf("clock: uevents of the kernel: %w", err)
	}
	events := os.NewFile(uintptr(fd), "uevents")
	stop := context.AfterFunc(ctx, func() { events.Close() })
	defer stop()
	defer events.Close()
	for buf := make([]byte, 16<<10); ; {
		n, err := events.Read(buf)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !errors.Is(err, unix.ENOBUFS): // events that are lost are mostly others
			return fmt.Errorf("clock: uevents of the kernel: %w", err)
		case err == nil && isRestore(buf[:n]):
			f()
		}
	}
}

// isRestore says whether a uevent reports a new generation of the virtual machine. It is a list
// of assignments behind zero bytes.
func isRestore(event []byte) bool {
	for part := range bytes.SplitSeq(event, []byte{0}) {
		if bytes.HasPrefix(part, []byte("NEW_VMGENID=")) {
			return true
		}
	}
	return false
}
