package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/demo"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/keyspace"
)

// runningCluster runs a cluster of its own and returns the client URL of its first node, and a client.
func runningCluster(t *testing.T, nodes int) (url string, client *clientv3.Client) {
	t.Helper()
	free, err := ports.Unused(2 * nodes)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	o := demo.Options{Nodes: nodes, Ranges: 3, DataDir: t.TempDir(), Port: free[0]}
	// What it prints is that all nodes serve. Until then its end would be an error.
	says, serve := io.Pipe()
	go func() { ended <- errors.Join(demo.Run(ctx, o, serve, zap.NewNop()), serve.Close()) }()
	_, _ = says.Read(make([]byte, 1))
	go func() { _, _ = io.Copy(io.Discard, says) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	url = fmt.Sprintf("http://127.0.0.1:%d", free[0])
	client, err = clientv3.New(clientv3.Config{Endpoints: []string{url}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		call, end := context.WithTimeout(t.Context(), time.Second)
		_, err := client.Get(call, "ready")
		end()
		if err == nil {
			return url, client
		}
		if time.Since(began) > time.Minute {
			t.Fatal(err)
		}
	}
}

// documented returns the commands of a document: the lines of its blocks.
func documented(t *testing.T, path string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, block := range strings.Split(string(b), "```") {
		if i%2 == 1 {
			lines = append(lines, strings.Split(strings.Trim(block, "\n"), "\n")...)
		}
	}
	return lines
}

// mentioned returns the commands of skein's that the text of a document names outside of its blocks.
func mentioned(t *testing.T, path string) (commands []string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, block := range strings.Split(string(b), "```") {
		if i%2 == 1 {
			continue
		}
		for j, span := range strings.Split(block, "`") {
			if words := strings.Fields(span); j%2 == 1 && len(words) > 0 && words[0] == "skein" {
				commands = append(commands, strings.Join(words, " "))
			}
		}
	}
	return commands
}

// said runs a command line of a document with other URLs and paths.
func said(ctx context.Context, t *testing.T, line string, replace ...string) string {
	t.Helper()
	var stdout, stderr bytes.Buffer
	args := strings.Fields(strings.NewReplacer(replace...).Replace(line))
	if args[0] != "skein" {
		t.Fatalf("%q is no command of skein's", line)
	}
	if code := execute(ctx, args[1:], nil, &stdout, &stderr); code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", line, code, &stdout, &stderr)
	}
	return stdout.String() + stderr.String()
}

// fill writes keys with history, a lease, and a user, and returns the last revision.
func fill(t *testing.T, c *clientv3.Client, prefix string) int64 {
	t.Helper()
	ctx := t.Context()
	l, err := c.Grant(ctx, 3000)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		var opts []clientv3.OpOption
		if i%10 == 0 {
			opts = append(opts, clientv3.WithLease(l.ID))
		}
		if _, err := c.Put(ctx, fmt.Sprintf("%s%02d", prefix, i%40), fmt.Sprint(i), opts...); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.RoleAdd(ctx, prefix+"role"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.UserAdd(ctx, prefix+"user", "secret"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.UserGrantRole(ctx, prefix+"user", prefix+"role"); err != nil {
		t.Fatal(err)
	}
	// Users count for a backup with the revision behind them.
	d, err := c.Delete(ctx, prefix+"07")
	if err != nil || d.Deleted != 1 {
		t.Fatal(d, err)
	}
	return d.Header.Revision
}

// awaitBackup waits until one of the finished backups below a URL is as wanted.
func awaitBackup(t *testing.T, url string, wanted func(listedBackup) bool) {
	t.Helper()
	awaits(t, "the backup", func() bool {
		var all []listedBackup
		if err := json.Unmarshal([]byte(said(t.Context(), t, "skein backup list "+url+" -w json")), &all); err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(all, func(b listedBackup) bool { return b.Error == "" && wanted(b) })
	})
}

// TestBackupDocument runs the commands of docs/BACKUP.md: a cluster of three nodes is restored as one of one node.
func TestBackupDocument(t *testing.T) {
	lines := documented(t, "../../docs/BACKUP.md")
	from, client := runningCluster(t, 3)
	into, restored := runningCluster(t, 1)
	replace := []string{"file:///var/backups/skein", "file://" + filepath.Join(t.TempDir(), "backups"), "http://127.0.0.1:2379", from, "http://127.0.0.1:3379", into}
	filled := keyspace.Revision(fill(t, client, "a"))
	for _, line := range lines {
		switch {
		case strings.Contains(line, " follow "):
			// It goes on until it is stopped. Here that is after its second backup.
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				said(ctx, t, strings.Replace(line, "1m", "200ms", 1), replace...)
			}()
			awaitBackup(t, replace[1], func(b listedBackup) bool { return b.Kind == "full" && b.Revision >= filled })
			filled = keyspace.Revision(fill(t, client, "b"))
			awaitBackup(t, replace[1], func(b listedBackup) bool { return b.Revision >= filled })
			cancel()
			<-done
		case strings.Contains(line, " --incremental "):
			if out := said(t.Context(), t, line, replace...); !strings.Contains(out, "nothing has changed") {
				t.Errorf("%s:\n%s", line, out)
			}
			filled = keyspace.Revision(fill(t, client, "i"))
			said(t.Context(), t, line, replace...)
		case strings.Contains(line, " list "):
			if out := said(t.Context(), t, line, replace...); strings.Count(out, "full") != 2 || strings.Count(out, "tombstones") != 1 || !strings.Contains(out, "versions") {
				t.Errorf("%s:\n%s", line, out)
			}
		default:
			t.Logf("%s\n%s", line, said(t.Context(), t, line, replace...))
		}
	}
	if len(lines) != 7 {
		t.Errorf("%d commands", len(lines))
	}
	if _, err := dataapi.NewClient(client.ActiveConnection(), clock.System()).Cut(t.Context(), dataapi.CutOptions{Kind: dataapi.KindMirror, Owner: "a test"}); err != nil {
		t.Fatal(err)
	}
	replace = append(replace, "ID", heldNow(t, from)[0].ID, "FILE", filepath.Join(t.TempDir(), "file"))
	const at = " --endpoints http://127.0.0.1:2379"
	for _, command := range mentioned(t, "../../docs/BACKUP.md") {
		// What the text leaves out. The blocks have the others.
		rest, ok := map[string]string{
			"skein hold list": at, "skein hold release ID": at, "skein export etcd": " FILE" + at,
			"skein placement show": at, "skein placement set-replication": " 3" + at, "skein diff": " http://127.0.0.1:2379 http://127.0.0.1:2379",
		}[command]
		switch {
		case ok:
			said(t.Context(), t, command+rest, replace...)
		case !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, command+" ") }):
			t.Errorf("nothing runs %s", command)
		}
	}
	last, err := client.Get(t.Context(), "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	now, err := restored.Get(t.Context(), "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	if now.Header.Revision != last.Header.Revision+1_000_000_000 || len(now.Kvs) != len(last.Kvs) {
		t.Fatalf("revision %d and %d keys, restored %d and %d", last.Header.Revision, len(last.Kvs), now.Header.Revision, len(now.Kvs))
	}
	for i, kv := range last.Kvs {
		if kv.String() != now.Kvs[i].String() {
			t.Errorf("%s restored as %s", kv, now.Kvs[i])
		}
	}
	u, err := restored.UserGet(t.Context(), "buser")
	if err != nil || len(u.Roles) != 1 {
		t.Errorf("%v, %v", u, err)
	}
}

// TestRestoreOfAMoment: a state between two backups, whose key has a lease that neither of them has (trap 119). It expires
// with that. The command may be given again once all is done.
func TestRestoreOfAMoment(t *testing.T) {
	from, client := runningCluster(t, 1)
	into, restored := runningCluster(t, 1)
	dir := "file://" + filepath.Join(t.TempDir(), "backups")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		said(ctx, t, "skein backup follow "+dir+" --interval 300ms --full-every 1h --endpoints "+from)
	}()
	filled := keyspace.Revision(fill(t, client, "a"))
	awaitBackup(t, dir, func(b listedBackup) bool { return b.Revision >= filled })
	l, err := client.Grant(t.Context(), 3000)
	if err != nil {
		t.Fatal(err)
	}
	put, err := client.Put(t.Context(), "lost", "", clientv3.WithLease(l.ID))
	if err != nil {
		t.Fatal(err)
	}
	revoked, err := client.Revoke(t.Context(), l.ID)
	if err != nil {
		t.Fatal(err)
	}
	awaitBackup(t, dir, func(b listedBackup) bool { return int64(b.Revision) >= revoked.Header.Revision })
	cancel()
	<-done
	line := fmt.Sprintf("skein restore %s --revision %d --exact --endpoints %s", dir, put.Header.Revision, into)
	t.Log(said(t.Context(), t, line))
	if again := said(t.Context(), t, line); !strings.Contains(again, "had finished before") {
		t.Errorf("given again:\n%s", again)
	}
	ttl, err := restored.TimeToLive(t.Context(), l.ID, clientv3.WithAttachedKeys())
	if err != nil || len(ttl.Keys) != 1 || ttl.TTL <= 0 {
		t.Errorf("%+v, %v", ttl, err)
	}
	next, err := restored.Put(t.Context(), "next", "")
	if err != nil || next.Header.Revision != put.Header.Revision+1 {
		t.Errorf("%v, %v, want revision %d", next, err, put.Header.Revision+1)
	}
}

// TestRestoreAsNew: keys with a prefix come back into the cluster that serves, as they were, and nothing else changes. The newest version of
// each counts; a key that was deleted by then stays as it is.
func TestRestoreAsNew(t *testing.T) {
	url, client := runningCluster(t, 3)
	dir := "file://" + filepath.Join(t.TempDir(), "backups")
	ctx := t.Context()
	put := func(key, value string) {
		t.Helper()
		if _, err := client.Put(ctx, key, value); err != nil {
			t.Fatal(err)
		}
	}
	remove := func(prefix string) {
		t.Helper()
		if _, err := client.Delete(ctx, prefix, clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
	}
	l, err := client.Grant(ctx, 3000)
	if err != nil {
		t.Fatal(err)
	}
	for from := 0; from < 300; from += 100 { // a transaction each: as many puts take a minute on a busy disk
		var older, newer []clientv3.Op
		for i := from; i < from+100; i++ {
			key := fmt.Sprintf("p/%03d", i)
			older = append(older, clientv3.OpPut(key, "old"))
			newer = append(newer, clientv3.OpPut(key, fmt.Sprint("v", i), clientv3.WithLease(l.ID)))
		}
		for _, ops := range [][]clientv3.Op{older, newer} {
			if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove("p/00")
	put("o/1", "old")
	put("q/1", "old")
	said(ctx, t, "skein backup create "+dir+" --endpoints "+url)
	remove("p/1")
	put("p/000", "made later")
	put("p/200", "overwritten")
	put("p/new", "new")
	put("o/1", "kept")
	remove("q/1")
	line := "skein restore " + dir + " --prefix p/ --as-new --endpoints " + url
	for _, count := range []string{"put 101 of 290 keys", "put 0 of 290 keys"} { // it may be given again
		if out := said(ctx, t, line); !strings.Contains(out, count) {
			t.Errorf("%s:\n%s", line, out)
		}
	}
	got, err := client.Get(ctx, "", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"o/1": "kept", "p/000": "made later", "p/new": "new"}
	for i := 10; i < 300; i++ {
		want[fmt.Sprintf("p/%03d", i)] = fmt.Sprint("v", i)
	}
	for _, kv := range got.Kvs {
		if w, ok := want[string(kv.Key)]; !ok || w != string(kv.Value) {
			t.Errorf("%s, want %q", kv, w)
		}
		key := string(kv.Key)
		stayed := strings.HasPrefix(key, "p/0") && key != "p/000" || strings.HasPrefix(key, "p/2") && key != "p/200"
		if stayed != (kv.Lease != 0) {
			t.Errorf("%s has the lease %x", kv.Key, kv.Lease)
		}
	}
	if len(got.Kvs) != len(want) {
		t.Errorf("%d keys, want %d", len(got.Kvs), len(want))
	}
}

// TestMigrationDocument runs the commands of docs/MIGRATION.md that are Skein's: the file is one that Skein has
// exported, and module conformance has files of etcd's.
func TestMigrationDocument(t *testing.T) {
	lines := documented(t, "../../docs/MIGRATION.md")
	if len(lines) != 6 {
		t.Fatalf("%d commands: %q", len(lines), lines)
	}
	lines = append(lines[:2:2], lines[5]) // TestMirrorDocument has those of a mirror
	source, client := runningCluster(t, 1)
	into, imported := runningCluster(t, 3)
	rev := fill(t, client, "a")
	if _, err := client.Compact(t.Context(), rev-20); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	replace := []string{"a.db", filepath.Join(dir, "a.db"), "b.db", filepath.Join(dir, "b.db"), "http://127.0.0.1:4379", source, "http://127.0.0.1:2379", into}
	said(t.Context(), t, strings.Replace(lines[2], "b.db", "a.db", 1), append([]string{"http://127.0.0.1:2379", source}, replace...)...)
	for _, line := range lines {
		t.Logf("%s\n%s", line, said(t.Context(), t, line, replace...))
	}
	// History goes on, and so do revisions.
	old, err := imported.Get(t.Context(), "a01", clientv3.WithRev(rev-20))
	if err != nil || len(old.Kvs) != 1 {
		t.Errorf("%v, %v", old, err)
	}
	if _, err := imported.Get(t.Context(), "a01", clientv3.WithRev(rev-21)); err == nil {
		t.Error("a compacted revision is read")
	}
	put, err := imported.Put(t.Context(), "next", "")
	if err != nil || put.Header.Revision != rev+1 {
		t.Errorf("%v, %v, want revision %d", put, err, rev+1)
	}
	a, err := os.ReadFile(filepath.Join(dir, "a.db"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "b.db"))
	if err != nil || len(a) != len(b) {
		t.Errorf("the file has %d bytes, and %d once it was imported and exported again: %v", len(a), len(b), err)
	}
}

// TestRefusedLoads: only an empty cluster is loaded, and wrong input is named.
func TestRefusedLoads(t *testing.T) {
	url, client := runningCluster(t, 1)
	dir := t.TempDir()
	fill(t, client, "a")
	said(t.Context(), t, "skein export etcd a.db --endpoints URL", "a.db", filepath.Join(dir, "a.db"), "URL", url)
	if err := os.WriteFile(filepath.Join(dir, "text"), []byte("no database"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ line, want string }{
		{"skein import etcd a.db --endpoints URL", "only a new cluster"},
		{"skein import etcd text --endpoints URL", "text"},
		{"skein import etcd a.db --history some --endpoints URL", "keep and latest"},
		{"skein restore file://DIR/none --endpoints URL", "there is no backup"},
		{"skein restore file://DIR/none --at noon --endpoints URL", "want a time"},
		{"skein restore file://DIR/none --prefix p --endpoints URL", "as-new"},
		{"skein restore file://DIR/none --prefix p --as-new --exact --endpoints URL", "exact"},
		{"skein restore file://DIR/none --prefix p --as-new --endpoints URL", "there is no backup"},
		{"skein export etcd a.db --endpoints URL", "exist"},
		{"skein export etcd b.db --revision 9999 --endpoints URL", "revision 9999"},
		{"skein export etcd b.db --etcd-version 2.3 --endpoints URL", "3.5"},
		{"skein backup create ftp://x --endpoints URL", "ftp"},
		{"skein backup create file://DIR/x --incremental --endpoints URL", "there is no backup"},
		{"skein backup create file://DIR/x --rate fast --endpoints URL", "--rate"},
	} {
		var stdout, stderr bytes.Buffer
		line := strings.NewReplacer("a.db", filepath.Join(dir, "a.db"), " text", " "+filepath.Join(dir, "text"), "b.db", filepath.Join(dir, "b.db"), "DIR", dir, "URL", url).Replace(tc.line)
		code := execute(t.Context(), strings.Fields(line)[1:], nil, &stdout, &stderr)
		if code == 0 || !strings.Contains(stderr.String(), tc.want) {
			t.Errorf("%s: exit code %d, %q is missing in\n%s", tc.line, code, tc.want, &stderr)
		}
	}
	if _, err := client.Put(t.Context(), "after", ""); err != nil {
		t.Error(err)
	}
}
