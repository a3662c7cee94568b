package keyspace

import (
	"errors"
	"strings"
	"testing"
)

// TestAnotherVersionIsNamed: data of an earlier build is refused by its version, and the
// error says what to do.
func TestAnotherVersionIsNamed(t *testing.T) {
	_, _, err := DecodeDescriptor([]byte{descriptorVersion - 1, 1, 1})
	var v *VersionError
	if !errors.As(err, &v) || v.Found != descriptorVersion-1 || v.Newest != descriptorVersion {
		t.Fatal(err)
	}
	for _, says := range []string{"descriptor has format version 0", "this build reads version 1", "the release between", "joins anew"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("%q does not say %q", err, says)
		}
	}
	if err := CheckVersion("it", 3, 3); err != nil {
		t.Error(err)
	}
}
