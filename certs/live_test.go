package certs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// A file that could not be read is read again at the next use, though it looks the same: a process without
// free files must not keep what was revoked meanwhile. Each reason is told once.
func TestReadAgainAfterAFailure(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ca.crl")
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	var failing error
	lines, logs := observer.New(zap.InfoLevel)
	l := &Live{o: LiveOptions{Log: zap.New(lines), Side: "client"}}
	k := &kept[string]{what: "list", paths: []string{path}, read: func(paths []string) (string, error) {
		if failing != nil {
			return "", failing
		}
		b, err := os.ReadFile(paths[0])
		return string(b), err
	}}
	put("one")
	if got := k.get(l); got != "one" {
		t.Fatalf("%q", got)
	}
	put("two")
	for _, failing = range []error{errors.New("too many open files"), errors.New("input/output error")} {
		for range 3 {
			if got := k.get(l); got != "one" {
				t.Errorf("%v: %q", failing, got)
			}
		}
	}
	if n := logs.FilterLevelExact(zap.ErrorLevel).Len(); n != 2 {
		t.Errorf("%d errors were told, want 2", n)
	}
	failing = nil
	if got := k.get(l); got != "two" {
		t.Errorf("afterwards: %q", got)
	}
	failing = errors.New("not read")
	if got := k.get(l); got != "two" || logs.FilterLevelExact(zap.ErrorLevel).Len() != 2 {
		t.Errorf("unchanged: %q", got)
	}
}
