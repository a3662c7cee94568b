// Package golden compares bytes of a format with the files that hold it still. Only tests
// import it.
package golden

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Formats compares each format with testdata/format/NAME.hex of the package under test. A
// difference means that the format needs a new version. SKEIN_REWRITE=1 in the environment
// writes the files anew.
func Formats(t *testing.T, formats map[string][]byte) {
	t.Helper()
	for name, got := range formats {
		path := filepath.Join("testdata", "format", name+".hex")
		if os.Getenv("SKEIN_REWRITE") != "" {
			if err := os.WriteFile(path, []byte(hex.EncodeToString(got)+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if hex.EncodeToString(got) != strings.TrimSpace(string(want)) {
			t.Errorf("%s: %x, in the file %s", name, got, want)
		}
	}
}
