package node_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/internal/leftout"
)

// mountSmall mounts a file system of so many bytes for a node's directory. Without that
// possibility the test is skipped, or fails with SKEIN_NOTHING_LEFT_OUT.
func mountSmall(t *testing.T, dir string, size int) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("skein-test", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size)); err != nil {
		leftout.Because(t, "a real full disk: mount a tmpfs of %d bytes: %v (it takes root)", size, err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
}

// fillDisk writes a file until there is no room, and returns what removes it.
func fillDisk(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "somebody-else")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	zeros := make([]byte, 1<<20)
	for err == nil {
		_, err = f.Write(zeros)
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("fill %s: %v", path, err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// spaceRanges is how many ranges the processes have.
const spaceRanges = 4

// leads returns how many ranges the node leads.
func (c *processes) leads(p *process) (ranges int) {
	c.t.Helper()
	resp, err := http.Get(p.client + "/metrics")
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if n, ok := strings.CutPrefix(lines.Text(), "skein_shard_leaders "); ok {
			if ranges, err = strconv.Atoi(n); err != nil {
				c.t.Fatal(err)
			}
			return ranges
		}
	}
	c.t.Fatalf("%s has no metric of the ranges that it leads", p.name)
	return 0
}

// leadersApart has one node lead some of the ranges and others the rest, and returns which.
// Left alone it is chance who leads them, and may be one node for all: it refuses every put
// when its disk is full. Nothing moves them again.
func (c *processes) leadersApart() (at int) {
	c.t.Helper()
	op, err := adminapi.NewClient([]string{c.nodes[0].client}, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	if err := op.PlacementPause(c.t.Context(), true); err != nil {
		c.t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		for i, p := range c.nodes {
			if n := c.leads(p); n > 0 && n < spaceRanges {
				return i
			}
		}
		l, err := op.RangeList(c.t.Context())
		if err != nil {
			c.t.Fatal(err)
		}
		r := l.GetRanges()[0]
		to := slices.IndexFunc(c.nodes, func(p *process) bool { return p.name != r.GetLeader() })
		// One that fails, since a node did not follow in time, is asked for again.
		if err := op.RangeTransferLeader(c.t.Context(), r.GetId(), c.nodes[to].name); err != nil {
			c.t.Logf("%s is to lead range %d: %v", c.nodes[to].name, r.GetId(), err)
		}
	}
	c.t.Fatal("one node leads all ranges")
	return 0
}

// spaceKeys are keys of all four ranges of the processes.
var spaceKeys = []string{"!a", "8a", "Pa", "ha", "za"}

// outcomes puts each key and returns which were refused for want of space.
func (c *processes) outcomes(cl *clientv3.Client, value string) (refused []string) {
	c.t.Helper()
	for _, key := range spaceKeys {
		ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
		_, err := cl.Put(ctx, key, value)
		cancel()
		switch {
		case errors.Is(err, rpctypes.ErrNoSpace):
			refused = append(refused, key)
		case err != nil:
			c.t.Fatalf("put %s: %v", key, err)
		}
	}
	return refused
}

// refuses waits until at least, and at most, so many of the keys are refused.
func (c *processes) refuses(cl *clientv3.Client, least, most int) []string {
	c.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		refused := c.outcomes(cl, "x")
		if len(refused) >= least && len(refused) <= most {
			return refused
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("puts to %s are refused, want %d to %d of %d", refused, least, most, len(spaceKeys))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// says checks whether a node says by all of etcd's ways that its own disk is full. A node looks
// once a second, and puts tell nothing of one that leads no range: its status is waited for.
func (c *processes) says(p *process, full bool) {
	c.t.Helper()
	cl, member := c.clientOf(p), uint64(0)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		st, err := cl.Status(c.t.Context(), p.client)
		if err != nil {
			c.t.Fatal(err)
		}
		// The text of a protobuf message has one space or two.
		member = st.Header.MemberId
		if slices.ContainsFunc(st.Errors, func(e string) bool {
			return strings.HasPrefix(e, fmt.Sprintf("memberID:%d ", member)) && strings.HasSuffix(e, "alarm:NOSPACE")
		}) == full {
			break
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: status says %v, full %v", p.name, st.Errors, full)
		}
	}
	alarms, err := cl.AlarmList(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	if has := slices.ContainsFunc(alarms.Alarms, func(a *etcdserverpb.AlarmMember) bool {
		return a.MemberID == member && a.Alarm == etcdserverpb.AlarmType_NOSPACE
	}); has != full {
		c.t.Errorf("%s: alarms are %v, full %v", p.name, alarms.Alarms, full)
	}
	resp, err := http.Get(p.client + "/health")
	if err != nil {
		c.t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		c.t.Fatal(err)
	}
	if has := resp.StatusCode == http.StatusServiceUnavailable && strings.Contains(string(body), "NOSPACE"); has != full {
		c.t.Errorf("%s: /health is %d %s, full %v", p.name, resp.StatusCode, body, full)
	}
}

// Real disks that somebody else fills: first one node's, then those of all three.
// Puts that find no room get etcd's error, reads and deletes go on, the nodes say
// what ails them, and it ends when there is room again.
func TestFullDisks(t *testing.T) {
	c := newProcesses(t)
	for _, p := range c.nodes {
		mountSmall(t, filepath.Join(p.dir, p.name), 256<<20)
	}
	// Before the unmounts: cleanups run backwards.
	t.Cleanup(func() {
		for _, p := range c.nodes {
			p.kill()
		}
	})
	c.startAll()
	c.ready()
	cl := c.clientOf(c.nodes...)
	c.refuses(cl, 0, 0)
	disk := func(p *process) string { return filepath.Join(p.dir, p.name) }

	at := c.leadersApart()
	node, other := c.nodes[at], c.nodes[(at+1)%len(c.nodes)]
	free := fillDisk(t, disk(node))
	refused := c.refuses(cl, 1, len(spaceKeys)-1)
	t.Logf("with the disk of %s full, puts to %s are refused", node.name, refused)
	c.says(node, true)
	c.says(other, false)
	c.readAndDelete(cl, refused[0])
	free()
	c.refuses(cl, 0, 0)
	c.says(node, false)

	var frees []func()
	for _, p := range c.nodes {
		frees = append(frees, fillDisk(t, disk(p)))
	}
	c.refuses(cl, len(spaceKeys), len(spaceKeys))
	for i, p := range c.nodes {
		c.says(p, true)
		c.readAndDelete(c.clientOf(p), spaceKeys[i])
	}
	for _, free := range frees {
		free()
	}
	c.refuses(cl, 0, 0)
	for _, p := range c.nodes {
		c.says(p, false)
	}
	c.stopAll()
	c.startAll()
	c.ready()
	for _, key := range spaceKeys {
		if got, err := cl.Get(t.Context(), key); err != nil || got.Count != 1 || string(got.Kvs[0].Value) != "x" {
			t.Errorf("%s after a restart: %v, %v", key, got, err)
		}
	}
}

// readAndDelete wants a key to be there, and gone when it is deleted.
func (c *processes) readAndDelete(cl *clientv3.Client, key string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	if got, err := cl.Get(ctx, key); err != nil || got.Count != 1 {
		c.t.Errorf("get %s on a full disk: %v, %v", key, got, err)
	}
	if d, err := cl.Delete(ctx, key); err != nil || d.Deleted != 1 {
		c.t.Errorf("delete %s on a full disk: %v, %v", key, d, err)
	}
	if got, err := cl.Get(ctx, key); err != nil || got.Count != 0 {
		c.t.Errorf("%s was deleted: %v, %v", key, got, err)
	}
}
