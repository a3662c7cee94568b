package chaos

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/sim/judge"
)

// firstUpgradable is the build that TestUpgrade goes back to before there is a release: an earlier
// commit that knows of the cluster version and reads version 3 alone.
const firstUpgradable = "082d9cf4268280f6d5167b7bb4b2971f2a4b9915"

// Five real processes change from the last release to this build and back, one after the other and
// under load, until the cluster version is raised. The simulator's checkers judge what clients were told.
func TestUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("builds an earlier release, and runs real processes for a minute")
	}
	older, from := buildEarlier(t)
	newer := buildForStorms(t)
	seed, _ := settings(t)
	t.Logf("from %s to this build, seed %d", from, seed)
	s := &storm{t: t, binary: older, dir: evidenceDir(t), began: time.Now(), outages: map[breakage]*outage{}}
	t.Cleanup(s.keep)
	if _, err := s.build(0); err != nil {
		leaveOut(t, err)
	}
	ctx := t.Context()
	s.l = newLoad(s.c, seed, s.began)
	defer s.l.close()
	s.op = newOperator(ctx, s, seed)
	s.op.has = map[string]bool{} // nobody changes ranges, which TestStorm has
	s.measure("serves at first", s.serves(ctx, "start", s.everyone(), true))
	s.l.start(ctx)
	s.rollForwardAndBack(ctx, older, newer)
	var versions []judge.Version
	drained := false
	if s.well() {
		versions, drained = s.end(ctx)
	}
	s.l.close()
	if s.well() {
		s.c.stop()
	}
	s.unwatch()
	for _, wrong := range s.judge(versions, drained) {
		t.Error(wrong)
	}
}

// rollForwardAndBack changes the builds of the nodes, and raises the cluster version in the end.
func (s *storm) rollForwardAndBack(ctx context.Context, older, newer string) {
	everyone := s.everyone()
	first := s.version(ctx, func(*adminpb.ClusterShowResponse) bool { return true })
	for i, machine := range everyone {
		s.runs(ctx, machine, newer)
		if i == len(everyone)/2 {
			s.refusesRaise(ctx, everyone[i+1:])
		}
	}
	show := s.version(ctx, func(r *adminpb.ClusterShowResponse) bool { return first == nil || r.GetVersion() != 0 })
	if show == nil || first == nil {
		return
	}
	raise := show.GetNext() != 0
	if show.GetVersion() != first.GetVersion() {
		s.c.blame("the cluster version went from %d to %d by itself", first.GetVersion(), show.GetVersion())
	}
	for _, machine := range everyone {
		s.runs(ctx, machine, older)
	}
	for _, machine := range everyone {
		s.runs(ctx, machine, newer)
	}
	if !s.well() {
		return
	}
	if !raise {
		s.note("both builds write version %d: there is nothing to raise", show.GetVersion())
		return
	}
	out, err := s.op.run(ctx, "cluster", "upgrade", "--endpoints", strings.Join(s.c.urls(), ","))
	s.note("upgrade: %s", strings.TrimSpace(out))
	if err != nil {
		s.c.blame("the cluster version is not raised: %v", err)
		return
	}
	s.version(ctx, func(r *adminpb.ClusterShowResponse) bool { return r.GetVersion() == first.GetVersion()+1 })
	s.serves(ctx, "raised", everyone, true)
	s.refusesToStart(ctx, everyone[len(everyone)-1], older)
	s.runs(ctx, everyone[len(everyone)-1], newer)
}

// runs has a machine's node end in order and start from another binary, and waits until it serves.
func (s *storm) runs(ctx context.Context, machine int, binary string) {
	if !s.well() {
		return
	}
	n := s.c.nodes[machine]
	s.halt(ctx, n)
	n.binary = binary
	s.c.start(n)
	s.note("%s serves from %s after %v", n.is(), filepath.Base(filepath.Dir(binary)), s.serves(ctx, n.is()+" has another build", []int{machine}, true))
}

// halt ends a node in order.
func (s *storm) halt(ctx context.Context, n *node) {
	term := s.c.still.term(stopPatience, "the end of a node")
	ctx, cancel := term.context(ctx)
	defer cancel()
	n.expectEnd()
	n.signal(syscall.SIGTERM)
	select {
	case <-n.exited:
	case <-ctx.Done():
		s.c.late("processes: %s was asked to stop and did not in %v", n.is(), term.took())
		n.kill()
	}
}

// version waits until the cluster shows what is wanted of its versions; nil if it never does.
func (s *storm) version(ctx context.Context, wanted func(*adminpb.ClusterShowResponse) bool) *adminpb.ClusterShowResponse {
	term := s.c.still.term(stormPatience, "the cluster version")
	ctx, cancel := term.context(ctx)
	defer cancel()
	for {
		show, err := s.c.admin.ClusterShow(ctx)
		if err == nil && show.GetVersion() != 0 && wanted(show) {
			s.note("the cluster has version %d, the next is %d", show.GetVersion(), show.GetNext())
			return show
		}
		if ctx.Err() != nil {
			s.c.late("the cluster version is not what was wanted after %v: %v, %v", term.took(), show, err)
			return nil
		}
		wait(ctx, 100*time.Millisecond)
	}
}

// refusesRaise requires that the cluster version is not raised, and that the reason names the machines
// whose nodes cannot read the next one.
func (s *storm) refusesRaise(ctx context.Context, cannot []int) {
	if !s.well() {
		return
	}
	show := s.version(ctx, func(*adminpb.ClusterShowResponse) bool { return true })
	if show == nil || show.GetNext() == 0 {
		return // both builds write the same version
	}
	_, err := s.op.run(ctx, "cluster", "upgrade", "--endpoints", strings.Join(s.c.urls(), ","))
	if err == nil {
		s.c.blame("the cluster version is raised while nodes of the older build run")
		return
	}
	s.note("refused: %v", err)
	for i, n := range s.c.nodes {
		if n.away.Load() {
			continue
		}
		wanted := false
		for _, machine := range cannot {
			wanted = wanted || machine == i
		}
		if names := strings.Contains(err.Error(), n.is()+" (build"); names != wanted {
			s.c.blame("the refusal names %s: %t, want %t: %v", n.is(), names, wanted, err)
		}
	}
}

// refusesToStart requires that a binary refuses a node's directories and says why.
func (s *storm) refusesToStart(ctx context.Context, machine int, binary string) {
	if !s.well() {
		return
	}
	n := s.c.nodes[machine]
	s.halt(ctx, n)
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	var out []byte
	err := n.space.do(func() (err error) {
		cmd := exec.CommandContext(ctx, binary, n.args...)
		cmd.Env = environment()
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err = cmd.CombinedOutput()
		return err
	})
	if ended := (*exec.ExitError)(nil); !errors.As(err, &ended) || !ended.Exited() || !strings.Contains(string(out), "start a newer build") {
		s.c.blame("the older build does not refuse the directories of a raised node: %v: %s", err, out[max(0, len(out)-1<<10):])
		return
	}
	s.note("refused: %s", lastLine(out))
}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

// buildEarlier builds the last release before this commit, or firstUpgradable where there is none. from
// names it.
func buildEarlier(t *testing.T) (binary, from string) {
	t.Helper()
	if noNamespace != "" {
		leaveOut(t, errors.New(noNamespace))
	}
	// The mechanism came with 0.2.0.
	out, err := exec.CommandContext(t.Context(), "git", "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "--exclude", "v0.[01].*", "HEAD^").Output()
	if from = strings.TrimSpace(string(out)); err != nil {
		from = firstUpgradable
	}
	dir := t.TempDir()
	archive, source := filepath.Join(dir, "source.tar"), filepath.Join(dir, "older")
	if err := command("", "git", "-C", "..", "archive", "--prefix", "older/", "-o", archive, from); err != nil {
		err = fmt.Errorf("this clone does not have %s: %w", from, err)
		if shallow, _ := exec.CommandContext(t.Context(), "git", "rev-parse", "--is-shallow-repository").Output(); strings.TrimSpace(string(shallow)) == "true" {
			// It cannot have it, and says so. .ci/run fetches the rest where it can.
			t.Skipf("left out: %v (git fetch --unshallow --tags)", err)
		}
		leaveOut(t, err)
	}
	if err := command("", "tar", "-C", dir, "-xf", archive); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	binary = filepath.Join(source, "skein")
	if err := outside(func() error {
		return command("", "go", "build", "-C", source, "-tags", buildTags, "-o", binary, "./cmd/skein")
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("built %s in %v", from, time.Since(start).Round(time.Millisecond))
	return binary, from
}
