package machine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/skeindb/skein/adminapi"
)

// good is a machine with which nothing is wrong.
func good() *Facts {
	return &Facts{
		Dir: "/d", Fsync50: time.Millisecond, Fsync99: 2 * time.Millisecond, DiskFree: 50 << 30, DiskCapacity: 100 << 30, Memory: 8 << 30,
		Files: 1 << 20, ReceiveBuffer: 8 << 20, SendBuffer: 8 << 20, ClockKnown: true, ClockSet: true,
	}
}

// Each fact is found when it is bad, with the severity that it has, and nothing else is. What the system does not say is not
// held against it.
func TestDiagnose(t *testing.T) {
	for _, tc := range []struct {
		check    string // "" for none
		severity adminapi.Severity
		change   func(*Facts)
	}{
		{"", "", func(*Facts) {}},
		{"", "", func(f *Facts) {
			f.Memory, f.ReceiveBuffer, f.SendBuffer, f.ClockKnown, f.ClockSet = -1, -1, -1, false, false
		}},
		{"fsync", adminapi.Warning, func(f *Facts) { f.Fsync99 = 20 * time.Millisecond }},
		{"fsync", adminapi.Critical, func(f *Facts) { f.Fsync99 = time.Second }},
		{"disk", adminapi.Critical, func(f *Facts) { f.DiskFree = 4 << 30 }},
		{"files", adminapi.Warning, func(f *Facts) { f.Files = 1024 }},
		{"files", adminapi.Critical, func(f *Facts) { f.Files = 256 }},
		{"memory", adminapi.Critical, func(f *Facts) { f.Memory = 1 << 30 }},
		{"network", adminapi.Warning, func(f *Facts) { f.SendBuffer = 212992 }},
		{"clock", adminapi.Warning, func(f *Facts) { f.ClockSet = false }},
	} {
		f := good()
		tc.change(f)
		all := Diagnose(f, 1<<30)
		switch {
		case tc.check == "" && len(all) == 0:
		case len(all) != 1 || all[0].Check != tc.check || all[0].Severity != tc.severity || all[0].What == "" || all[0].Next == "":
			t.Errorf("want %s %s: %+v", tc.severity, tc.check, all)
		}
	}
}

// A machine is measured as it is, nothing stays behind, and a directory that is not there yet stands for the one above it.
func TestLook(t *testing.T) {
	dir := t.TempDir()
	at, err := Existing(filepath.Join(dir, "a", "b"))
	if err != nil || at != dir {
		t.Fatalf("%s, %v", at, err)
	}
	f, err := Look(at)
	if err != nil {
		t.Fatal(err)
	}
	if f.Fsync50 <= 0 || f.Fsync99 < f.Fsync50 || f.DiskCapacity <= 0 || f.DiskFree > f.DiskCapacity || f.Files <= 0 || f.Memory <= 0 {
		t.Errorf("%+v", f)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Existing(filepath.Join(dir, "file")); err == nil {
		t.Error("a file is a directory")
	}
	if _, err := Look(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
