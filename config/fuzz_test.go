package config

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// FuzzFlags: any command line and environment give an error or a valid Config.
func FuzzFlags(f *testing.F) {
	f.Add("--name=a\n-pre-vote\n--listen-client-urls\nhttp://127.0.0.1:0", "ETCD_MAX_TXN_OPS=5\nSKEIN_NAME=b")
	f.Add("--cipher-suites=a,,b\n--", "ETCD_LOG_OUTPUTS=,")
	f.Fuzz(func(t *testing.T, args, env string) {
		for _, s := range []string{args, env} {
			// Both would read files of the machine.
			if l := strings.ToLower(strings.ReplaceAll(s, "_", "-")); strings.Contains(l, "config-file") || strings.Contains(l, "split-keys") {
				t.Skip()
			}
		}
		c, _, err := Load(strings.Split(args, "\n"), strings.Split(env, "\n"))
		if err == nil {
			if err := c.Validate(); err != nil {
				t.Fatal(err)
			}
			_, _ = c.Bootstrap()
		}
	})
}

// FuzzFile: any file gives an error or a valid Config.
func FuzzFile(f *testing.F) {
	f.Add([]byte("name: a\nlog-outputs: [stderr]\nclient-transport-security: {cert-file: x, key-file: y}\n"))
	f.Add([]byte("a: &a [*a]\n"))
	f.Add([]byte(`{"discovery-config":{"client":{"endpoints":[]}},"heartbeat-interval":1e2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if bytes.Contains(b, []byte("split-keys")) {
			t.Skip()
		}
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		if c, _, err := Load([]string{"--config-file", path}, nil); err == nil {
			if err := c.Validate(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// FuzzSplitKeys: keys come out ascending, none twice, none empty.
func FuzzSplitKeys(f *testing.F) {
	f.Add([]byte("a\n\\x00\\xff\n# c\r\n\r\n\\\\"))
	f.Fuzz(func(t *testing.T, b []byte) {
		keys, err := parseSplitKeys(b)
		if err != nil {
			return
		}
		if !slices.IsSortedFunc(keys, bytes.Compare) || len(keys[0]) == 0 {
			t.Fatalf("%q", keys)
		}
	})
}

// TestEvenSplits: for any number of ranges the keys ascend strictly, and no range
// is wider than another by more than a quarter of a range.
func TestEvenSplits(t *testing.T) {
	at := func(k []byte) (pos float64) {
		unit := 1.0
		for _, c := range k {
			unit /= numPrintable
			pos += float64(c-firstPrintable) * unit
		}
		return pos
	}
	for n := 1; n <= MaxInitialRanges; n += 1 + n/7 {
		keys := evenSplits(n)
		if len(keys) != n-1 {
			t.Fatalf("n=%d: %d keys", n, len(keys))
		}
		last := 0.0
		for i := range n {
			end := 1.0
			if i < n-1 {
				end = at(keys[i])
				if i > 0 && bytes.Compare(keys[i-1], keys[i]) >= 0 {
					t.Fatalf("n=%d: %q before %q", n, keys[i-1], keys[i])
				}
			}
			if w := (end - last) * float64(n); w < 0.75 || w > 1.25 {
				t.Fatalf("n=%d: range %d has %.2f of its share", n, i, w)
			}
			last = end
		}
	}
}
