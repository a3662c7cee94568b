package clock

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestIsRestore(t *testing.T) {
	for event, want := range map[string]bool{
		"change@/devices/LNXSYSTM:00/QEMUVGID:00\x00ACTION=change\x00SUBSYSTEM=acpi\x00NEW_VMGENID=1\x00SEQNUM=7\x00": true,
		"change@/devices/x\x00ACTION=change\x00SEQNUM=7\x00":                                                          false,
		"change@/devices/NEW_VMGENID=1\x00ACTION=change\x00X=NEW_VMGENID=1\x00":                                       false,
		"":                          false,
		strings.Repeat("\x00", 100): false,
	} {
		if got := isRestore([]byte(event)); got != want {
			t.Errorf("%q: %t", event, got)
		}
	}
}

// The kernel's events can be listened to, and that ends with its context.
func TestRestoredEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Restored(ctx, func() { t.Error("this machine was restored during the test") }) }()
	select {
	case err := <-ended:
		t.Skipf("no events of the kernel here: %v", err)
	case <-time.After(50 * time.Millisecond): // the listener begins in real time
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
