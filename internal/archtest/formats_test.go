package archtest

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// golden matches the files that hold the bytes of formats still.
var golden = regexp.MustCompile(`(^|/)testdata/(golden\.txt|format|format/[^/]+\.hex)$`)

// forms returns the bytes in golden files by the file, each in hexadecimal: fields of a line that are
// hexadecimal and long enough to be no number.
func forms(files map[string]string) map[string][]string {
	hex := regexp.MustCompile(`\b[0-9a-f]{8,}\b`)
	out := map[string][]string{}
	for name, text := range files {
		// A form that gets a second version moves to another file of the same folder.
		out[path.Dir(name)] = append(out[path.Dir(name)], hex.FindAllString(text, -1)...)
	}
	return out
}

// gone returns what golden files held at a release and do not any more.
func gone(released, now map[string]string) []string {
	var gone []string
	have := forms(now)
	for dir, old := range forms(released) {
		for _, form := range old {
			if !slices.Contains(have[dir], form) {
				gone = append(gone, dir+": "+form)
			}
		}
	}
	slices.Sort(gone)
	return gone
}

func TestGone(t *testing.T) {
	released := map[string]string{"a/testdata/golden.txt": "bus/x 0102030405\nbus/y@4 0202030405\n", "b/testdata/format/z.v2.hex": "0302030405\n"}
	same := map[string]string{"a/testdata/golden.txt": "bus/x@4 0102030405\nbus/x@5 0502030405\nbus/y@4 0202030405\n", "b/testdata/format/z.hex": "0302030405\n"}
	if got := gone(released, same); got != nil {
		t.Errorf("gone: %v", got)
	}
	changed := map[string]string{"a/testdata/golden.txt": "bus/x 0902030405\nbus/y@4 0202030405\n", "b/testdata/format/w.hex": "0902030405\n"}
	if got := gone(released, changed); !slices.Equal(got, []string{"a/testdata: 0102030405", "b/testdata/format: 0302030405"}) {
		t.Errorf("gone: %v", got)
	}
}

// TestReleasedFormsStand: the golden files of the last release stand in those of today, as long as this
// build reads what that release writes. So nobody changes the bytes of a released version.
func TestReleasedFormsStand(t *testing.T) {
	git := func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), "git", append([]string{"-C", "../.."}, args...)...).CombinedOutput()
		if err != nil {
			t.Skipf("git %v: %v: %s", args, err, out)
		}
		return string(out)
	}
	tags := strings.Fields(git("tag", "--list", "v[0-9]*", "--merged", "HEAD", "--sort=-version:refname"))
	if len(tags) == 0 {
		return // before the first release all formats may change
	}
	newest := regexp.MustCompile(`NewestVersion Version = (\d+)`).FindStringSubmatch(git("show", tags[0]+":keyspace/version.go"))
	if newest == nil {
		t.Fatalf("release %s does not say what it writes", tags[0])
	}
	if v, err := strconv.ParseUint(newest[1], 10, 32); err != nil || keyspace.Version(v) < keyspace.OldestVersion {
		return // this build reads nothing of it
	}
	released, now := map[string]string{}, map[string]string{}
	for _, name := range strings.Fields(git("ls-tree", "-r", "--name-only", tags[0])) {
		if golden.MatchString(name) {
			released[name] = git("show", tags[0]+":"+name)
		}
	}
	for _, name := range strings.Fields(git("ls-files")) {
		if b, err := os.ReadFile("../../" + name); err == nil && golden.MatchString(name) {
			now[name] = string(b)
		}
	}
	for _, form := range gone(released, now) {
		t.Errorf("%s of release %s: a released form does not change; give the changed one the next version", form, tags[0])
	}
}

// TestDocumentsNameVersions: docs/FORMAT.md has a row for each version that this build reads. The document
// that a row names says what changed.
func TestDocumentsNameVersions(t *testing.T) {
	read := func(name string) string {
		b, err := os.ReadFile("../../docs/" + name)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for v := keyspace.OldestVersion; v <= keyspace.NewestVersion; v++ {
		row := regexp.MustCompile(fmt.Sprintf(`(?m)^\| %d \|.*$`, v)).FindString(read("FORMAT.md"))
		if row == "" {
			t.Errorf("docs/FORMAT.md has no row of version %d", v)
		}
		if v == keyspace.OldestVersion {
			continue
		}
		docs := regexp.MustCompile(`\((format/\w+\.md)\)`).FindAllStringSubmatch(row, -1)
		if len(docs) == 0 {
			t.Errorf("docs/FORMAT.md names no document of what changed in version %d", v)
		}
		for _, doc := range docs {
			if !strings.Contains(read(doc[1]), fmt.Sprintf("cluster version %d", v)) {
				t.Errorf("docs/%s does not say what changed in cluster version %d", doc[1], v)
			}
		}
	}
}
