package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// dayClock is a clock whose wall shows a day at noon.
type dayClock struct {
	clock.Clock
	day int
}

func (c *dayClock) Wall() time.Time { return time.Date(2026, 11, c.day, 12, 0, 0, 0, time.UTC) }

// oneVersion is a Source of a single version.
type oneVersion keyspace.Revision

func (o oneVersion) Read(_ context.Context, _ keyspace.Span, emit func([]byte, []mvcc.Version) error) error {
	rev := keyspace.Revision(o)
	vs := []mvcc.Version{{Key: []byte("k"), Mod: rev, Create: rev, Version: 1, Value: []byte("v")}}
	b, _, err := block.Encode(block.ByKey, vs)
	if err != nil {
		return err
	}
	return emit(b[0], vs)
}

// someBackups are chains of two backups of three days.
func someBackups(t *testing.T, recipients ...string) (url string) {
	t.Helper()
	url = "file://" + filepath.ToSlash(filepath.Join(t.TempDir(), "b"))
	tgt, err := target.Open(url, clock.System())
	if err != nil {
		t.Fatal(err)
	}
	keys, err := backup.ParseKeys(recipients, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &dayClock{Clock: clock.System()}
	r := backup.NewRepository(tgt, keys, c)
	for i := range 3 {
		c.day = 20 + i
		full := backup.Cut{Kind: backup.Full, Revision: keyspace.Revision(100*i + 50), Time: c.Wall()}
		inc := backup.Cut{Kind: backup.Versions, Revision: full.Revision + 10, Previous: full.Revision, Time: c.Wall().Add(time.Hour)}
		chain := ""
		for _, cut := range []backup.Cut{full, inc} {
			d, err := r.Begin(t.Context(), 0xabc, chain, cut, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err = r.Write(t.Context(), d, oneVersion(cut.Revision), backup.Options{}); err != nil {
				t.Fatal(err)
			}
			chain, _ = d.Chain()
		}
	}
	return url
}

// skein runs a command line.
func skein(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = execute(t.Context(), args, nil, &out, &errs)
	return code, out.String(), errs.String()
}

func TestBackupCommands(t *testing.T) {
	url := someBackups(t)
	const chain = "20261121T120000Z-150"
	run := func(wantCode int, want string, args ...string) string {
		t.Helper()
		code, out, errs := skein(t, append([]string{"backup"}, args...)...)
		if code != wantCode || !strings.Contains(out+errs, want) {
			t.Errorf("%v: code %d, %s%s, want %d and %q", args, code, out, errs, wantCode, want)
		}
		return out
	}
	got := run(0, "NUMBER", "list", url)
	if lines := strings.Split(strings.TrimSpace(got), "\n"); len(lines) != 7 ||
		!strings.Contains(lines[3], "abc      "+chain+"  1       full      150       2026-11-21T12:00:00Z  1") {
		t.Errorf("list:\n%s", got)
	}
	var rows []map[string]any
	if err := json.Unmarshal([]byte(run(0, `"versions": 1`, "list", url, "-w", "json")), &rows); err != nil || len(rows) != 6 {
		t.Errorf("%d rows, %v", len(rows), err)
	}
	run(0, "previous revision  150", "show", url, chain)
	run(0, "kind             full", "show", url, chain, "1")
	run(0, `"kind": "full"`, "show", url, chain, "1", "-w", "json", "--cluster", "abc")
	run(1, "has no such backup", "show", url, chain, "3")
	run(1, "backup list shows what is there", "show", url, "nonsense")
	run(0, "3 chains, 6 backups, 6 segments", "verify", url)
	run(0, "; 2 versions read; 0 problems", "verify", url, chain, "--deep")
	run(0, "would remove chain 20261120T120000Z-50\n", "prune", url, "--keep-full", "1", "--dry-run")
	run(0, "removed chain 20261120T120000Z-50", "prune", url, "--keep-full", "2")
	run(0, `"chains": []`, "prune", url, "--keep-full", "2", "-w", "json")
	if got := run(0, chain, "list", url); strings.Contains(got, "20261120") {
		t.Errorf("list:\n%s", got)
	}
	segments, err := filepath.Glob(filepath.Join(strings.TrimPrefix(url, "file://"), "abc", chain, "000002", "*", "segment-*"))
	if err != nil || len(segments) != 1 {
		t.Fatal(segments, err)
	}
	if err := os.Remove(segments[0]); err != nil {
		t.Fatal(err)
	}
	run(1, fmt.Sprintf("cluster abc, chain %s, backup 2: segment 160/", chain), "verify", url)
	run(1, `"problems": [`, "verify", url, "-w", "json")

	run(0, "no backups in file:///nonexistent/folder", "list", "file:///nonexistent/folder")
	run(1, "there is no backup", "verify", "file:///nonexistent/folder")
	for want, args := range map[string][]string{
		"want file:///FOLDER":          {"list", "/var/backups"},
		"want an id in hexadecimal":    {"list", url, "--cluster", "xyz"},
		"there are table and json":     {"list", url, "-w", "xml"},
		"say how many chains to keep":  {"prune", url},
		"want a duration as 30d":       {"prune", url, "--keep", "30x"},
		`"0" is no number of a backup`: {"show", url, chain, "0"},
		"needs a command":              {},
	} {
		run(2, want, args...)
	}
}

func TestBackupCommandsWithIdentity(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	url := someBackups(t, id.Recipient().String())
	file := filepath.Join(t.TempDir(), "key.txt")
	if err := os.WriteFile(file, []byte(id.String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, _ := skein(t, "backup", "list", url); code != 0 || !strings.Contains(out, "give the identity file") {
		t.Errorf("list without an identity: %d, %s", code, out)
	}
	if code, out, errs := skein(t, "backup", "verify", "--deep", url, "--identity", file); code != 0 || !strings.Contains(out, "6 versions read; 0 problems") {
		t.Errorf("verify: %d, %s%s", code, out, errs)
	}
	if err := os.WriteFile(file, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := skein(t, "backup", "list", url, "--identity", file); code != 1 || !strings.Contains(errs, file) {
		t.Errorf("a wrong file: %d, %s", code, errs)
	}
}
