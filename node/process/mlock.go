package process

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// LockMemory keeps the memory of the process from being swapped out, if that is wanted. Pages count once they are used, so
// what Go has only reserved is not brought into memory.
func LockMemory(want bool) error {
	if !want {
		return nil
	}
	err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT)
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("--memory-mlock: the process may not lock its memory: %w: raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity of systemd), or give it CAP_IPC_LOCK", err)
	}
	if err != nil {
		return fmt.Errorf("--memory-mlock: %w", err)
	}
	return nil
}
