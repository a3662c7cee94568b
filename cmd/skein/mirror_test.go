package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/internal/ports"
	"github.com/skeindb/skein/mirror"
	"github.com/skeindb/skein/transfer"
)

// TestMirrorErrors: wrong input is named with what to do, and a script tells it from a mirror that cannot run.
func TestMirrorErrors(t *testing.T) {
	nobody, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", exitUsage, "skein mirror needs a command"},
		{"start", exitUsage, "--spool is missing"},
		{"start --spool DIR", exitUsage, "--source-endpoints is missing"},
		{"start --spool DIR --source-endpoints http://x --source-cacert /nowhere", exitUsage, "store SOURCE: --cacert: open /nowhere"},
		{"start --spool DIR --source-endpoints http://x --source-password p", exitUsage, "store SOURCE: --password without a user"},
		{"start --spool DIR --source-endpoints http://x --user u:", exitUsage, "--user without a name or a password"},
		{fmt.Sprintf("start --spool DIR --source-endpoints http://x --command-timeout 200ms --endpoints http://127.0.0.1:%d", nobody[0]), exitRefused, "give client URLs of running nodes to --endpoints"},
		{"start --spool DIR --source-endpoints http://x --metrics-listen nowhere", exitUsage, "--metrics-listen nowhere: listen tcp"},
		{"status", exitUsage, "--spool is missing"},
		{"status --spool DIR", exitRefused, "holds no mirror: give the --spool of `skein mirror start`"},
		{"status --spool DIR -w xml", exitUsage, "there are table and json"},
		{"cutover", exitUsage, "--spool is missing"},
		{"cutover --spool DIR", exitRefused, "holds no mirror"},
		{"abandon --spool DIR", exitRefused, "holds no mirror"},
		{"abandon DIR", exitUsage, "unknown command"},
		{fmt.Sprintf("cutover --command-timeout 200ms --endpoints http://127.0.0.1:%d", nobody[0]), exitRefused, "give client URLs of running nodes to --endpoints"},
	} {
		var out bytes.Buffer
		line := strings.ReplaceAll(c.args, "DIR", filepath.Join(dir, "none"))
		code := execute(t.Context(), append([]string{"mirror"}, strings.Fields(line)...), nil, &out, &out)
		if code != c.code || !strings.Contains(out.String(), c.want) {
			t.Errorf("skein mirror %s: exit code %d, want %d and %q in\n%s", c.args, code, c.code, c.want, &out)
		}
	}
	if _, err := vfs.Default.Stat(filepath.Join(dir, "none")); err == nil {
		t.Error("a command that failed has made the directory")
	}
}

// TestMirrorRequests: a request stands where no mirror runs, and one that has ended takes none.
func TestMirrorRequests(t *testing.T) {
	for _, c := range []struct {
		step     string
		compared bool

		command, want string
		code          int
	}{
		{"following", true, "status", "following: position 0 of 0", 0},
		{"following", false, "status", "no cut-over yet: the first comparison of all keys has not begun", 0},
		{"following", true, "cutover", "does not run; the request stands\nnext: give its `skein mirror start` again", exitRefused},
		{"following", false, "cutover", "the mirror in DIR is following, and the first comparison of all keys has not begun\nnext: let the source's clients go on", exitRefused},
		{"following", false, "abandon", "does not run; the request stands", exitRefused},
		{"done", true, "cutover", "the mirror in DIR has ended: it is done", exitRefused},
		{"failed", false, "cutover", "the mirror in DIR has ended: it is failed", exitRefused},
		{"failed", false, "abandon", "does not run; the request stands", exitRefused},
		{"done", true, "status -w json", `"step":"done"`, 0},
	} {
		dir := t.TempDir()
		state := fmt.Sprintf(`{"version":1,"step":%q,"nonce":"7","source":1,"after":1,"sum":{},"compared":%t}`, c.step, c.compared)
		f, err := vfs.Default.Create(filepath.Join(dir, "state.json"), vfs.WriteCategoryUnspecified)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Write([]byte(state)); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		code := execute(t.Context(), append([]string{"mirror"}, strings.Fields(c.command+" --spool "+dir)...), nil, &out, &out)
		if want := strings.ReplaceAll(c.want, "DIR", dir); code != c.code || !strings.Contains(out.String(), want) {
			t.Errorf("skein mirror %s, step %s: exit code %d, want %d and %q in\n%s", c.command, c.step, code, c.code, want, &out)
		}
		_, err = vfs.Default.Stat(filepath.Join(dir, c.command))
		if stands := strings.Contains(c.want, "stands"); stands != (err == nil) {
			t.Errorf("skein mirror %s, step %s: the request: %v", c.command, c.step, err)
		}
	}
	if _, err := mirror.ReadStatus(vfs.Default, t.TempDir()); err == nil {
		t.Error("an empty directory has a status")
	}
}

// TestMirrorDocument runs the commands of docs/MIGRATION.md about a mirror. The source is a cluster of Skein; module
// conformance has an etcd.
func TestMirrorDocument(t *testing.T) {
	lines := documented(t, "../../docs/MIGRATION.md")[2:5]
	named := []string{ // which TestMirrorTakesLeasesBack and TestMirrorAbandoned run too
		"skein mirror start --metrics-listen 127.0.0.1:9090", "skein mirror cutover --endpoints http://127.0.0.1:2379", "skein mirror abandon --spool DIR",
	}
	if all := mentioned(t, "../../docs/MIGRATION.md"); !slices.Equal(all, named) {
		t.Errorf("the text names %q, and tests run %q", all, named)
	}
	source, client := runningCluster(t, 1)
	into, mirrored := runningCluster(t, 1)
	dir := filepath.Join(t.TempDir(), "mirror")
	replace := []string{"http://127.0.0.1:4379", source, "http://127.0.0.1:2379", into, "/var/lib/skein-mirror", dir}
	fill(t, client, "a")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // which bounds only a test that hangs
	defer cancel()
	port, err := ports.Unused(1)
	if err != nil {
		t.Fatal(err)
	}
	metrics := fmt.Sprintf("127.0.0.1:%d", port[0])
	done := make(chan string, 1)
	go func() { done <- said(ctx, t, lines[0]+" --metrics-listen "+metrics, replace...) }()
	for {
		if st, err := mirror.ReadStatus(vfs.Default, dir); err == nil && st.Compared {
			break
		}
		select {
		case <-done:
			t.Fatal("the mirror has ended")
		case <-time.After(50 * time.Millisecond):
		}
	}
	rev := fill(t, client, "b")
	for _, line := range []string{lines[1], "skein mirror status --endpoints http://127.0.0.1:2379"} {
		if out := said(ctx, t, line, replace...); !strings.Contains(out, "following: position") || strings.Contains(out, "no `skein mirror start` runs") {
			t.Errorf("%s:\n%s", line, out)
		}
	}
	for { // until a status has the revision
		if text := scraped(ctx, t, metrics); strings.Contains(text, fmt.Sprintf("skein_mirror_position_revision %d\n", rev)) {
			for _, want := range []string{"skein_mirror_step{step=\"following\"} 1\n", "skein_mirror_lag_seconds 0\n", fmt.Sprintf("skein_mirror_source_revision %d\n", rev)} {
				if !strings.Contains(text, want) {
					t.Errorf("%q is missing in\n%s", want, text)
				}
			}
			break
		} else if ctx.Err() != nil {
			t.Fatal(text)
		}
	}
	for _, out := range []string{said(ctx, t, lines[2], replace...), <-done} {
		if want := fmt.Sprintf("done: position %d of %d, behind by 0 revisions", rev, rev); !strings.Contains(out, want) {
			t.Errorf("%q is missing in\n%s", want, out)
		}
	}
	if out := said(ctx, t, "skein diff A B", "A", source, "B", into); !strings.Contains(out, "equal") {
		t.Error(out)
	}
	if u, err := mirrored.UserGet(ctx, "buser"); err != nil || len(u.Roles) != 1 {
		t.Errorf("%v, %v", u, err)
	}
	if put, err := mirrored.Put(ctx, "next", ""); err != nil || put.Header.Revision != rev+1 {
		t.Errorf("%v, %v, want revision %d", put, err, rev+1)
	}
}

// scraped returns what is served as /metrics at an address.
func scraped(ctx context.Context, t *testing.T, address string) string {
	t.Helper()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v", r.Status, err)
	}
	return string(b)
}

// TestMirrorTakesLeasesBack: a cluster that is loaded lists its leases to no client of etcd's, and the mirror takes back one that
// has ended at the source all the same. The others live. The cut-over finds the mirror by its cluster.
func TestMirrorTakesLeasesBack(t *testing.T) {
	source, client := runningCluster(t, 1)
	into, target := runningCluster(t, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // which bounds only a test that hangs
	defer cancel()
	granted := func(key string) clientv3.LeaseID {
		l, err := client.Grant(ctx, 3000)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Put(ctx, key, "", clientv3.WithLease(l.ID)); err != nil {
			t.Fatal(err)
		}
		return l.ID
	}
	ends, lives := granted("ends"), granted("lives")
	var out reported
	dir, ended := filepath.Join(t.TempDir(), "mirror"), make(chan error, 1)
	go func() {
		ended <- transfer.Mirror(ctx, &transfer.Cluster{Client: target, Clock: clock.System(), Report: out.add}, transfer.MirrorOptions{
			Source: clientv3.Config{Endpoints: []string{source}, Logger: zap.NewNop()}, Dir: dir, Number: 7,
			SweepEvery: 100 * time.Millisecond,
		})
	}()
	// loaded says whether the cluster that is loaded has these leases and no others.
	loaded := func(ids ...clientv3.LeaseID) bool {
		data := dataapi.NewClient(target.ActiveConnection(), clock.System())
		cut, err := data.Cut(ctx, dataapi.CutOptions{Kind: dataapi.KindMirror, Owner: "a test"})
		if err != nil {
			t.Fatal(err)
		}
		if err := data.Release(ctx, cut.Hold); err != nil {
			t.Fatal(err)
		}
		for _, l := range cut.Leases {
			if !slices.Contains(ids, clientv3.LeaseID(l.ID)) {
				return false
			}
		}
		return len(cut.Leases) == len(ids)
	}
	awaits(t, "the import of leases", func() bool { return loaded(ends, lives) })
	if l, err := target.Leases(ctx); err == nil || !strings.Contains(err.Error(), "this cluster is being loaded") || strings.Contains(err.Error(), dir) {
		t.Errorf("%v, %v", l, err) // a client need not know where the mirror is
	}
	late := granted("late")
	awaits(t, "the grant of a lease", func() bool { return loaded(ends, lives, late) })
	if _, err := client.Revoke(ctx, ends); err != nil {
		t.Fatal(err)
	}
	awaits(t, "the end of a lease", func() bool { return loaded(lives, late) })
	awaits(t, "the first comparison", func() bool {
		st, err := mirror.ReadStatus(vfs.Default, dir)
		return err == nil && st.Compared
	})
	if out := said(ctx, t, "skein mirror cutover --endpoints http://127.0.0.1:2379", "http://127.0.0.1:2379", into); !strings.Contains(out, "done: position") {
		t.Error(out)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for id, key := range map[clientv3.LeaseID]string{lives: "lives", late: "late"} {
		if l, err := target.TimeToLive(ctx, id, clientv3.WithAttachedKeys()); err != nil || l.GrantedTTL != 3000 || len(l.Keys) != 1 || string(l.Keys[0]) != key {
			t.Errorf("%+v, %v", l, err)
		}
	}
	if l, err := target.Leases(ctx); err != nil || len(l.Leases) != 2 {
		t.Errorf("%v, %v", l, err)
	}
}

// TestMirrorOfACluster: where the mirror of a cluster is not known, the error says which flag is missing.
func TestMirrorOfACluster(t *testing.T) {
	url, client := runningCluster(t, 1)
	for _, command := range []string{"status", "cutover", "abandon"} {
		var out bytes.Buffer
		code := execute(t.Context(), []string{"mirror", command, "--endpoints", url}, nil, &out, &out)
		if want := "no mirror has begun to load this cluster: give --endpoints of one that has, or the directory of the mirror to --spool"; code != exitRefused || !strings.Contains(out.String(), want) {
			t.Errorf("%s: exit code %d, %q is missing in\n%s", command, code, want, &out)
		}
	}
	for _, c := range []struct{ source, want string }{
		{"a file", "the source of this cluster is a file, which does not tell where a mirror is: give its directory to --spool"},
		{`a running etcd, by the mirror in "/a dir" on "somewhere else"`, "is in /a dir on somewhere else: give the command there, or the directory to --spool"},
	} {
		into, other := runningCluster(t, 1)
		awaits(t, "the begin of a load", func() bool {
			_, err := dataapi.NewLoader(dataapi.LoaderOptions{Conn: other.ActiveConnection(), Number: 7, Source: c.source}).Begin(t.Context())
			return err == nil
		})
		var out bytes.Buffer
		if code := execute(t.Context(), []string{"mirror", "status"}, []string{"ETCDCTL_ENDPOINTS=" + into}, &out, &out); code != exitRefused || !strings.Contains(out.String(), c.want) {
			t.Errorf("exit code %d, %q is missing in\n%s", code, c.want, &out)
		}
	}
	if _, err := client.Put(t.Context(), "k", ""); err != nil {
		t.Error(err)
	}
}

// TestMirrorAbandoned: a mirror that runs is given up, and its cluster never serves.
func TestMirrorAbandoned(t *testing.T) {
	source, client := runningCluster(t, 1)
	into, abandoned := runningCluster(t, 1)
	dir := filepath.Join(t.TempDir(), "mirror")
	fill(t, client, "a")
	var out bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- execute(t.Context(), []string{"mirror", "start", "--source-endpoints", source, "--endpoints", into, "--spool", dir}, nil, &out, &out)
	}()
	for {
		if st, err := mirror.ReadStatus(vfs.Default, dir); err == nil && st.Step == mirror.Following {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if said := said(t.Context(), t, "skein mirror abandon --spool DIR", "DIR", dir); !strings.Contains(said, "abandoned") {
		t.Error(said)
	}
	if code := <-ended; code != exitRefused || !strings.Contains(out.String(), "next: a new one needs an empty cluster and another --spool") {
		t.Errorf("exit code %d\n%s", code, &out)
	}
	if _, err := abandoned.Put(t.Context(), "a", ""); err == nil || !strings.Contains(err.Error(), "was abandoned") {
		t.Errorf("%v", err)
	}
}
