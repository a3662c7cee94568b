package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// testName is a test as docs/TRAPS.md names it: its package's path, and its function.
var testName = regexp.MustCompile(`\b([a-z]+(?:/[a-z]+)*)\.(Test[A-Za-z0-9_]+)`)

// storyNames are the stories in brackets behind a test that runs stories.
var storyNames = regexp.MustCompile(`\b([a-z]+(?:/[a-z]+)*)\.(TestStories|TestAllocator|TestDecisions) \(([a-z, -]+)\)`)

// storyDirs has for each such test the directory of its stories, below the root.
var storyDirs = map[string]string{
	"shard.TestStories":                 "shard/testdata/stories",
	"placement/sequencer.TestAllocator": "placement/sequencer/testdata/allocator",
	"placement/decide.TestDecisions":    "placement/decide/testdata/decisions",
}

// trapRow is a row of the table of traps: one number, the first and last of several, or
// two.
var trapRow = regexp.MustCompile(`(?m)^\| (\d+)(?:(–|, )(\d+))? \| .+ \| (.+) \|$`)

// lastTrap is the highest number in use.
const lastTrap = 128

// TestTrapsAreTested compares docs/TRAPS.md with the tree: each trap has one row, with
// tests that exist or with the work that it waits for.
func TestTrapsAreTested(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(root, "docs", "TRAPS.md"))
	if err != nil {
		t.Fatal(err)
	}
	sources := map[string]string{}
	source := func(dir string) string {
		if _, read := sources[dir]; !read {
			sources[dir] = testSource(t, dir)
		}
		return sources[dir]
	}
	next, advisories := 1, 0
	for _, row := range trapRow.FindAllStringSubmatch(string(b), -1) {
		first, last := number(t, row[1]), number(t, row[1])
		if row[3] != "" {
			last = number(t, row[3])
		}
		if first != next || last < first {
			t.Errorf("trap %d follows trap %d", first, next-1)
		}
		next = last + 1
		for _, a := range advisory.FindAllString(row[0], -1) {
			advisories++
			if !slices.ContainsFunc(testName.FindAllStringSubmatch(row[4], -1), func(name []string) bool {
				return strings.Contains(commentOf(source(name[1]), name[2]), a)
			}) {
				t.Errorf("no test of trap %d names %s", first, a)
			}
		}
		if !testName.MatchString(row[4]) && !strings.HasPrefix(row[4], "with ") {
			t.Errorf("trap %d has neither a test nor what it comes with: %s", first, row[4])
		}
	}
	if next != lastTrap+1 {
		t.Errorf("the last trap is %d, not %d", next-1, lastTrap)
	}
	if advisories < 12 {
		t.Errorf("%d advisories only", advisories)
	}
	for _, name := range testName.FindAllStringSubmatch(string(b), -1) {
		if !strings.Contains(source(name[1]), "\nfunc "+name[2]+"(t *testing.T)") {
			t.Errorf("%s is no test of %s", name[2], name[1])
		}
	}
	if len(sources) < 8 {
		t.Errorf("tests of %d packages only", len(sources))
	}
	stories := 0
	for _, m := range storyNames.FindAllStringSubmatch(string(b), -1) {
		dir := storyDirs[m[1]+"."+m[2]]
		for story := range strings.SplitSeq(m[3], ", ") {
			stories++
			if _, err := os.Stat(filepath.Join(root, dir, story)); dir == "" || err != nil {
				t.Errorf("%s.%s has no story %q: %v", m[1], m[2], story, err)
			}
		}
	}
	if stories < 15 {
		t.Errorf("%d stories only", stories)
	}
}

// advisory is the number of one.
var advisory = regexp.MustCompile(`\bCVE-\d+-\d+|\bGHSA(?:-[0-9a-z]{4}){3}`)

// commentOf returns the comment that stands before a test.
func commentOf(source, test string) string {
	before, _, _ := strings.Cut(source, "\nfunc "+test+"(t *testing.T)")
	at := len(before)
	for at > 0 && strings.HasPrefix(before[strings.LastIndexByte(before[:at], '\n')+1:], "//") {
		at = max(0, strings.LastIndexByte(before[:at], '\n'))
	}
	return before[at:]
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// testSource is what the test files of a directory hold.
func testSource(t *testing.T, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(b)
	}
	return all.String()
}
