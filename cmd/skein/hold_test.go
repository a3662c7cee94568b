package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/transfer"
)

// asCommand has the test's binary be skein.
const asCommand = "SKEIN_TEST_COMMAND"

// heldNow returns the holds of a cluster.
func heldNow(t *testing.T, url string) (all []struct {
	ID, Kind, Owner  string
	Revision, Behind int64
},
) {
	t.Helper()
	if err := json.Unmarshal([]byte(said(t.Context(), t, "skein hold list -w json --endpoints "+url)), &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// awaits waits for what happens beside the test.
func awaits(t *testing.T, what string, happened func() bool) {
	t.Helper()
	for began := time.Now(); !happened(); time.Sleep(20 * time.Millisecond) {
		if time.Since(began) > 5*time.Minute { // which bounds only a test that hangs
			t.Fatalf("%s does not happen", what)
		}
	}
}

// reported is what a command reports, for many goroutines.
type reported struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *reported) add(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(&r.text, format+"\n", args...)
}

func (r *reported) count(part string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Count(r.text.String(), part)
}

// brokenTarget is a target that fails while it is told to, at names with a part.
type brokenTarget struct {
	target.Target
	part atomic.Pointer[string]
}

var errTarget = errors.New("the target is away")

func (b *brokenTarget) Put(ctx context.Context, name string, r io.Reader) error {
	if p := b.part.Load(); p != nil && strings.Contains(name, *p) {
		return errTarget
	}
	return b.Target.Put(ctx, name, r)
}

// followed is a follower of a cluster, and where its backups go.
type followed struct {
	reported
	target *brokenTarget
	repo   *backup.Repository
	url    string
	stop   func()
}

// follow follows a cluster until the test ends or stop is called.
func follow(t *testing.T, client *clientv3.Client) *followed {
	t.Helper()
	f := &followed{url: "file://" + filepath.Join(t.TempDir(), "backups")}
	dir, err := target.Open(f.url, clock.System())
	if err != nil {
		t.Fatal(err)
	}
	f.target = &brokenTarget{Target: dir}
	f.repo = backup.NewRepository(f.target, backup.Keys{}, clock.System())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c := &transfer.Cluster{Client: client, Clock: clock.System(), Report: f.add}
		if err := transfer.Follow(ctx, c, f.repo, transfer.FollowOptions{Interval: 100 * time.Millisecond, FullEvery: time.Hour}); err != nil {
			t.Error(err)
		}
	}()
	f.stop = sync.OnceFunc(func() {
		cancel()
		<-done
	})
	t.Cleanup(f.stop)
	awaits(t, "a full backup", func() bool { return f.count("full at revision") == 1 })
	return f
}

// newest returns the revision of the newest backup.
func (f *followed) newest(t *testing.T) int64 {
	t.Helper()
	p, err := f.repo.Plan(t.Context(), 0, backup.When{})
	if err != nil {
		t.Fatal(err)
	}
	return int64(p.Revision)
}

func mustPut(t *testing.T, c *clientv3.Client, key, value string) int64 {
	t.Helper()
	r, err := c.Put(t.Context(), key, value)
	if err != nil {
		t.Fatal(err)
	}
	return r.Header.Revision
}

// TestHoldIsReleased: the operator sees who holds what since when, and ends it. Who followed says so and makes a full backup.
func TestHoldIsReleased(t *testing.T) {
	url, client := runningCluster(t, 1)
	mustPut(t, client, "a", "1")
	f := follow(t, client)
	last := mustPut(t, client, "a", "2")
	awaits(t, "a backup of the versions since", func() bool { return f.newest(t) == last })
	all := heldNow(t, url)
	if len(all) != 1 || all[0].Kind != "backup follow" || !strings.Contains(all[0].Owner, fmt.Sprintf("process %d", os.Getpid())) || all[0].Behind < 0 || all[0].Revision > last {
		t.Fatalf("%+v, revision %d", all, last)
	}
	if out := said(t.Context(), t, "skein hold release "+all[0].ID+" --endpoints "+url); !strings.Contains(out, "released hold "+all[0].ID) {
		t.Error(out)
	}
	awaits(t, "a full backup after the release", func() bool { return f.count("full at revision") == 2 })
	if f.count("the hold of old versions has ended, by skein hold release or since nobody could renew it, so a full backup is made") != 1 || f.count("a backup has failed") != 0 {
		t.Errorf("it has said:\n%s", f.text.String())
	}
	if code, _, errs := skein(t, "hold", "release", all[0].ID, "--endpoints", url); code != 1 || !strings.Contains(errs, "there is no such hold") || !strings.Contains(errs, "next: skein hold list") {
		t.Errorf("once more: %d, %s", code, errs)
	}
	if code, _, errs := skein(t, "hold", "release", "nonsense", "--endpoints", url); code != 1 || !strings.Contains(errs, "is no id of a hold") {
		t.Errorf("nonsense: %d, %s", code, errs)
	}
	f.stop()
	awaits(t, "the node hears that no hold is left", func() bool { return len(heldNow(t, url)) == 0 })
}

// TestFollowWhileTheTargetFails: a target that fails for a while costs no chain: the next backup has all versions since the
// last one, also where a backup was begun and no key has changed since.
func TestFollowWhileTheTargetFails(t *testing.T) {
	_, client := runningCluster(t, 1)
	into, restored := runningCluster(t, 1)
	mustPut(t, client, "a", "1")
	f := follow(t, client)
	for _, part := range []string{"segment-", "draft", "manifest", "record-", ""} {
		failures := f.count("a backup has failed")
		f.target.part.Store(&part)
		mustPut(t, client, "a", "while "+part+" fails")
		awaits(t, "failures of "+part, func() bool { return f.count("a backup has failed") >= failures+3 })
		second := mustPut(t, client, "a", "later while "+part+" fails")
		failures = f.count("a backup has failed")
		awaits(t, "more failures of "+part, func() bool { return f.count("a backup has failed") >= failures+3 })
		f.target.part.Store(nil)
		awaits(t, "a backup behind failures of "+part, func() bool { return f.newest(t) == second })
	}
	at := f.newest(t) - 1 // of the time without a target
	f.stop()
	if f.count("full at revision") != 1 || f.count("so a full backup is made") != 0 || f.count("another backup is there already") != 0 {
		t.Errorf("it has said:\n%s", f.text.String())
	}
	if r, err := f.repo.Verify(t.Context(), 0, "", true); err != nil || len(r.Problems) > 0 {
		t.Errorf("%+v, %v", r, err)
	}
	said(t.Context(), t, fmt.Sprintf("skein restore %s --exact --revision %d --endpoints %s", f.url, at, into))
	r, err := restored.Get(t.Context(), "a")
	if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "while  fails" || r.Header.Revision != at {
		t.Errorf("%v, %v", r, err)
	}
}

// TestIncrementalAfterCompaction: an incremental backup adds to the chain, unless a client has compacted what it needs. Then
// it says so and makes a full one.
func TestIncrementalAfterCompaction(t *testing.T) {
	url, client := runningCluster(t, 1)
	dir := "file://" + filepath.Join(t.TempDir(), "backups")
	mustPut(t, client, "a", "1")
	incremental := func(kind string, says ...string) {
		t.Helper()
		last := mustPut(t, client, "a", kind)
		if strings.HasPrefix(kind, "full") {
			if _, err := client.Compact(t.Context(), last, clientv3.WithCompactPhysical()); err != nil {
				t.Fatal(err)
			}
		}
		out := said(t.Context(), t, "skein backup create "+dir+" --incremental --endpoints "+url)
		for _, s := range append(says, fmt.Sprintf(": %s at revision %d,", kind, last)) {
			if !strings.Contains(out, s) {
				t.Errorf("%q is missing in\n%s", s, out)
			}
		}
	}
	said(t.Context(), t, "skein backup create "+dir+" --endpoints "+url)
	incremental("tombstones")
	incremental("full", "is compacted: nobody has kept the versions since then, so a full backup is made")
	incremental("tombstones")
	if out := said(t.Context(), t, "skein backup verify "+dir+" --deep"); !strings.Contains(out, "2 chains, 4 backups") || !strings.Contains(out, "0 problems") {
		t.Error(out)
	}
	awaits(t, "the node hears that no hold is left", func() bool { return len(heldNow(t, url)) == 0 })
}

// TestResumeAfterKill: a backup whose process is killed goes on at its revision, though clients have changed, deleted and
// compacted everything since.
func TestResumeAfterKill(t *testing.T) {
	if testing.Short() {
		t.Skip("it starts a process and waits for its rate")
	}
	url, client := runningCluster(t, 3)
	dir := filepath.Join(t.TempDir(), "backups")
	value := make([]byte, 100<<10)
	var at int64
	for i := range 30 {
		for j := range value {
			value[j] = byte(rand.Uint32()) // nothing makes it smaller
		}
		at = mustPut(t, client, fmt.Sprintf("%c%02d", "\x10k\xf0"[i%3], i), string(value))
	}
	command := exec.Command(os.Args[0], "backup", "create", "file://"+dir, "--rate", "500KiB", "--parallel", "1", "--endpoints", url)
	command.Env = append(os.Environ(), asCommand+"=1")
	var out bytes.Buffer
	command.Stdout, command.Stderr = &out, &out
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	found := func(name string) int {
		n, err := filepath.Glob(filepath.Join(dir, "*", "*", "*", name))
		if err != nil {
			t.Fatal(err)
		}
		return len(n)
	}
	awaits(t, "the end of a span", func() bool { return found("*/record-*") > 0 })
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait()
	if found("manifest.json") != 0 || found("*/draft.json") != 1 {
		t.Fatalf("it was done before it was killed:\n%s", &out)
	}
	if all := heldNow(t, url); len(all) != 1 || all[0].Kind != "backup" || !strings.Contains(all[0].Owner, fmt.Sprintf("process %d", command.Process.Pid)) {
		t.Errorf("%+v", all)
	}
	if _, err := client.Delete(t.Context(), "", clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Compact(t.Context(), mustPut(t, client, "later", ""), clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if got := said(t.Context(), t, "skein backup create file://"+dir+" --resume --endpoints "+url); !strings.Contains(got, fmt.Sprintf("full at revision %d, 30 versions", at)) {
		t.Error(got)
	}
	if got := said(t.Context(), t, "skein backup verify file://"+dir+" --deep"); !strings.Contains(got, "30 versions read; 0 problems") {
		t.Error(got)
	}
	awaits(t, "the node hears that no hold is left", func() bool { return len(heldNow(t, url)) == 0 })
}
