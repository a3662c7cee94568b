// Package testkit holds what the tests of placement's packages have in common: golden files
// with one form in each line, fuzz targets whose seeds are those lines, and the arguments of
// stories. Only tests import it.
package testkit

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
)

// golden is the file with the forms, in the package under test.
var golden = filepath.Join("testdata", "golden.txt")

// A File collects forms to compare them with the golden file.
type File struct{ b strings.Builder }

// Add adds a form.
func (f *File) Add(name string, p []byte) { fmt.Fprintf(&f.b, "%s %x\n", name, p) }

// AddEach adds a form that depends on the cluster version. It is named NAME@VERSION, once for each version
// that this build writes.
func (f *File) AddEach(name string, encode func(keyspace.Version) []byte) {
	for v := keyspace.OldestVersion; v <= keyspace.NewestVersion; v++ {
		f.Add(fmt.Sprintf("%s@%d", name, v), encode(v))
	}
}

// Compare compares the forms with testdata/golden.txt. A difference is a change of the
// format. SKEIN_REWRITE=1 in the environment writes the file anew.
func (f *File) Compare(t *testing.T) {
	t.Helper()
	if os.Getenv("SKEIN_REWRITE") != "" {
		if err := os.WriteFile(golden, []byte(f.b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if f.b.String() != string(want) {
		t.Errorf("the formats have changed:\n%s\nwant\n%s", f.b.String(), want)
	}
}

// Values returns the forms of the golden file by name.
func Values(t testing.TB) map[string][]byte {
	t.Helper()
	text, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	values := map[string][]byte{}
	for line := range strings.Lines(string(text)) {
		name, h, _ := strings.Cut(strings.TrimSpace(line), " ")
		p, err := hex.DecodeString(h)
		if err != nil {
			t.Fatal(err)
		}
		values[name] = p
	}
	return values
}

// Prefixes cuts every golden form short at each byte: its decoder accepts no part of it
// and no byte more, and never panics.
func Prefixes(t *testing.T, decoder func(name string) func([]byte) error) {
	t.Helper()
	for name, p := range Values(t) {
		decode := decoder(name)
		if err := decode(p); err != nil && !strings.HasSuffix(name, "refusal") {
			t.Errorf("%s: %v", name, err)
		}
		for n := range p {
			if decode(p[:n:n]) == nil {
				t.Errorf("%s: the first %d of %d bytes were accepted", name, n, len(p))
			}
		}
		if decode(append(bytes.Clone(p), 0)) == nil {
			t.Errorf("%s: a byte too many was accepted", name)
		}
	}
}

// Fuzz checks that a decoder neither panics nor allocates more than its input justifies,
// and that whatever it accepts survives another round trip. The golden forms whose names
// begin with prefix are the seeds.
func Fuzz[T any](f *testing.F, prefix string, decode func([]byte) (T, error), encode func(T) []byte) {
	f.Helper()
	for name, p := range Values(f) {
		if strings.HasPrefix(name, prefix) {
			f.Add(p)
		}
	}
	f.Fuzz(func(t *testing.T, p []byte) { RoundTrip(t, p, decode, encode) })
}

// RoundTrip is Fuzz's check of one input.
func RoundTrip[T any](t *testing.T, p []byte, decode func([]byte) (T, error), encode func(T) []byte) {
	t.Helper()
	var v T
	var err error
	if got := measure.Excess(len(p), func() { v, err = decode(p) }); got != 0 {
		t.Fatalf("%d bytes allocated for %d that came", got, len(p))
	}
	if err != nil {
		return
	}
	again, err := decode(encode(v))
	if err != nil || !reflect.DeepEqual(v, again) {
		t.Fatalf("%x decodes to %+v, which decodes to %+v, %v", p, v, again, err)
	}
}
