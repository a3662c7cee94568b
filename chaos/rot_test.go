package chaos

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Faults of what a machine has stored, and of its clock.
const (
	rotTable breakage = "a byte of a table flips"
	rotLog   breakage = "a byte of the log flips"
	paused   breakage = "the machine is paused, its clock with it"
)

// flipped is a byte of a file that is not what was written.
type flipped struct {
	path string
	at   int64
}

func (f flipped) String() string { return fmt.Sprintf("byte %d of %s", f.at, filepath.Base(f.path)) }

// flip inverts it, or makes it right again.
func (f flipped) flip() error {
	file, err := os.OpenFile(f.path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	b := make([]byte, 1)
	if _, err := file.ReadAt(b, f.at); err != nil {
		return err
	}
	b[0] ^= 0xff
	if _, err := file.WriteAt(b, f.at); err != nil {
		return err
	}
	return file.Sync()
}

// flipTable flips a byte of a node's tables, any of them with the same chance. No table is an error
// of kind fs.ErrNotExist.
func flipTable(rng *rand.Rand, dir string) (f flipped, err error) {
	for range attempts { // a table may be deleted meanwhile
		tables, err := filesBelow(dir, ".sst")
		if err != nil {
			return f, err
		}
		sizes, total := make([]int64, len(tables)), int64(0)
		for i, path := range tables {
			if info, err := os.Stat(path); err == nil {
				sizes[i] = info.Size()
				total += sizes[i]
			}
		}
		if total == 0 {
			break
		}
		f.at = rng.Int64N(total)
		i := 0
		for ; f.at >= sizes[i]; i++ {
			f.at -= sizes[i]
		}
		f.path = tables[i]
		if err = f.flip(); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, io.EOF) {
			return f, err
		}
	}
	return f, fmt.Errorf("%s holds no table: %w", dir, fs.ErrNotExist)
}

// flipLog flips a byte of the log of a node that does not run. It lies in the first half of what
// the last segment in use holds, so that there are synced records behind it.
func flipLog(rng *rand.Rand, dir string) (f flipped, err error) {
	segments, err := filesBelow(dir, ".wal")
	if err != nil {
		return f, err
	}
	var latest time.Time
	for _, path := range segments {
		info, err := os.Stat(path)
		if err != nil {
			return f, err
		}
		if info.ModTime().After(latest) {
			latest, f.path = info.ModTime(), path
		}
	}
	if f.path == "" {
		return f, fmt.Errorf("%s holds no segment of a log", dir)
	}
	content, err := os.ReadFile(f.path)
	if err != nil {
		return f, err
	}
	used := len(bytes.TrimRight(content, "\x00")) // the rest is filled with zeros ahead of use
	f.at = rng.Int64N(int64(used/2) + 1)
	return f, f.flip()
}

func filesBelow(dir, suffix string) (paths []string, err error) {
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(path, suffix) {
			paths = append(paths, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was deleted meanwhile
		}
		return err
	})
	return paths, err
}

// rots lets a byte of a table flip, while the node runs or before it starts again. After a start
// nothing of the table is in memory. heal waits until what the node has lost is rebuilt. Perhaps nobody
// has read the byte. Then it is made right again: a later fault on another machine would cost a range
// its majority.
func (s *storm) rots(ctx context.Context, n *node, rng *rand.Rand) (heal healing, err error) {
	log := logSize(n)
	restart := rng.IntN(2) == 0
	n.expectEnd() // its own records may lie there
	if restart {
		n.kill()
	}
	f, err := flipTable(rng, n.mount)
	if restart {
		s.c.start(n)
		n.expectEnd()
	}
	if errors.Is(err, fs.ErrNotExist) {
		s.note("not: %s on %s: %v", rotTable, n.is(), err)
		return func() (bool, error) { n.unexpectEnd(); return false, nil }, nil
	}
	if err != nil {
		return nil, err
	}
	s.note("%s on %s, restarted %t", f, n.is(), restart)
	return func() (took bool, err error) {
		n.readAll(ctx)
		if n.ended() {
			if !s.saysDamage(n, log) {
				return false, nil
			}
			s.note("%s: %s has ended: its own records are damaged", f, n.is())
			return true, s.op.lost(ctx, n)
		}
		if err := f.flip(); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
		n.unexpectEnd()
		if !strings.Contains(said(n, log), "the replica is in quarantine") {
			return false, nil
		}
		return true, s.rebuilt(ctx, n)
	}, nil
}

// readAll has a node read all its tables: nobody may have asked for what is in the bad one, and then the fault would
// have to be dealt again. A node that meets it says so soon.
func (n *node) readAll(ctx context.Context) {
	actx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if _, err := n.client.HashKV(actx, n.url, 0); err != nil {
		wait(ctx, 500*time.Millisecond)
	}
}

// rebuilt waits until a node has no replica in quarantine any more.
func (s *storm) rebuilt(ctx context.Context, n *node) error {
	term := s.c.still.term(replacePatience, "what %s rebuilds", n.is())
	for ; ; wait(ctx, 200*time.Millisecond) {
		left, err := quarantined(ctx, n)
		if err == nil && left == 0 {
			s.measure(fmt.Sprintf("%s has rebuilt its replicas after", n.is()), term.took())
			return nil
		}
		if term.over() {
			s.c.late("quarantine: %v after the fault %s still has %d replicas there: %v", term.took(), n.is(), left, err)
			return nil
		}
	}
}

// quarantined asks a node how many replicas it has in quarantine.
func quarantined(ctx context.Context, n *node) (replicas int, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.url+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, "skein_raftgroup_quarantined_replicas "); found {
			return strconv.Atoi(strings.TrimSpace(value))
		}
	}
	return 0, fmt.Errorf("%s says nothing of quarantine (%s)", n.is(), resp.Status)
}

// rotsLog lets a byte of the log flip while the node does not run. It must refuse to start, and heal
// has a new node take its place.
func (s *storm) rotsLog(ctx context.Context, n *node, rng *rand.Rand) (heal healing, err error) {
	n.kill()
	f, err := flipLog(rng, n.mount)
	if err != nil {
		return nil, err
	}
	log := logSize(n)
	s.c.start(n)
	n.expectEnd()
	s.note("%s on %s", f, n.is())
	return func() (took bool, err error) {
		for term := s.c.still.term(stopPatience, "the refusal of %s", n.is()); !n.ended() && !term.over(); {
			wait(ctx, 50*time.Millisecond)
		}
		if !n.ended() {
			s.c.blame("rot: %s runs, and %s is wrong", n.is(), f)
			n.unexpectEnd()
			return false, nil
		}
		if !s.saysDamage(n, log) {
			return false, nil
		}
		return true, s.op.lost(ctx, n)
	}, nil
}

// saysDamage requires of a node that has ended that it names damage of its disk and the remedy.
func (s *storm) saysDamage(n *node, since int64) bool {
	text := said(n, since)
	if strings.Contains(text, "its disk has changed what was stored") && strings.Contains(text, "member remove") {
		return true
	}
	s.c.blame("rot: %s has ended, and says of it: %s", n.is(), text[max(0, len(text)-1<<10):])
	return false
}

// lost has a new node take the place of one that does not start again, in the way that its error
// names, and waits until nothing is left of the old one.
func (o *operator) lost(ctx context.Context, n *node) error {
	machine, old := o.machine(n), n.is()
	n.away.Store(true)
	defer n.away.Store(false)
	term := o.s.c.still.term(replacePatience, "the removal of %s, which is lost", old)
	for ; ; wait(ctx, time.Second) {
		err := o.remove(ctx, old)
		if err == nil {
			break
		}
		o.s.note("operator: %s, which is lost, is not removed yet: %v", old, err)
		if term.over() {
			o.s.c.late("operator: %s, which is lost, is not removed in %v: %v", old, term.took(), err)
			return nil
		}
	}
	if n.data != nil {
		if err := n.data.renew(); err != nil {
			return fmt.Errorf("a new disk for machine %d: %w", machine+1, err)
		}
	}
	rng := rand.New(rand.NewPCG(uint64(o.nextID), 1))
	name := o.begin(ctx, machine)
	if err := o.joined(ctx, rng, name); err != nil {
		return nil // it counts as late
	}
	for ; ; wait(ctx, 200*time.Millisecond) {
		left := 0
		ranges, err := o.ranges(ctx, rng)
		for _, r := range ranges {
			if strings.Contains(" "+strings.Join(r.Replicas, " ")+" ", " "+old+" ") {
				left++
			}
		}
		if err == nil && left == 0 {
			o.s.measure(fmt.Sprintf("%s has replaced %s, which was lost, after", name, old), term.took())
			return nil
		}
		if term.over() {
			o.s.c.late("operator: %d ranges have a replica on %s, which was lost %v ago: %v", left, old, term.took(), err)
			return nil
		}
	}
}

// remove takes a member out of the cluster as etcdctl does. One that is gone is no error.
func (o *operator) remove(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	members, err := o.all.MemberList(ctx)
	if err != nil {
		return err
	}
	for _, m := range members.Members {
		if m.Name == name {
			_, err := o.all.MemberRemove(ctx, m.ID)
			return err
		}
	}
	return nil
}

func (o *operator) machine(n *node) int {
	for i, other := range o.s.c.nodes {
		if other == n {
			return i
		}
	}
	panic("chaos: no machine has " + n.is())
}

// logSize is how long a node's log is now, and said what it has logged since.
func logSize(n *node) int64 {
	info, err := os.Stat(n.log)
	if err != nil {
		return 0
	}
	return info.Size()
}

func said(n *node, since int64) string {
	text, _ := os.ReadFile(n.log)
	return string(text[min(int64(len(text)), since):])
}

// pauses stops a node's process. When it runs on its clock has stood still, as that of a virtual
// machine that its hypervisor has paused.
func (s *storm) pauses(ctx context.Context, n *node) (heal healing, err error) {
	n.signal(syscall.SIGSTOP)
	for term := s.c.still.term(stopPatience, "the pause of %s", n.is()); !n.stands() && !term.over(); {
		wait(ctx, time.Millisecond)
	}
	wait(ctx, 10*time.Millisecond) // its other threads
	since, err := bootTime()
	if err != nil {
		return nil, err
	}
	return func() (took bool, err error) {
		took = n.stands()
		now, err := bootTime()
		if err == nil {
			n.lag += now - since
			err = writeLag(n.clock, n.lag)
		}
		n.signal(syscall.SIGCONT)
		return took, err
	}, nil
}

// bootTime reads the clock that nodes read.
func bootTime() (time.Duration, error) {
	var ts unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano()), err
}

// writeLag tells a node by its file how far its clock lags. The node has mapped the file.
func writeLag(path string, lag time.Duration) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(lag)), 0)
	return err
}

// A byte is flipped where it counts, and flipped back.
func TestFlippedBytes(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	rng := rand.New(rand.NewPCG(1, 1))
	if _, err := flipTable(rng, dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a table where there is none: %v", err)
	}
	used, zero := bytes.Repeat([]byte{7}, 1000), make([]byte, 9000)
	path := write("1.wal", append(used, zero...))
	if err := os.Chtimes(write("2.wal", zero), time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	write("1.sst", used)
	for range 100 {
		f, err := flipLog(rng, dir)
		if err != nil || f.path != path || f.at > 500 {
			t.Fatalf("%v, %v", f, err)
		}
		g, err := flipTable(rng, dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range []flipped{f, g} {
			if b, err := os.ReadFile(f.path); err != nil || b[f.at] == 7 {
				t.Fatalf("%v is still %d, %v", f, b[f.at], err)
			}
			if err := f.flip(); err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(f.path); err != nil || b[f.at] != 7 {
				t.Fatalf("%v has become %d, %v", f, b[f.at], err)
			}
		}
	}
}
