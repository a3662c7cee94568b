package lease

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// TestStories tells what becomes of leases at the nodes a and b, in virtual time. Each
// command prints what has happened since the one before.
//
//	lead node=N [commit]         the next term is N's; what was proposed comes before it, or never
//	grant id=N ttl=N [spans=N]
//	keepalive ids=(N,…)
//	look ids=(N,…)
//	wait id=N                    somebody waits for the end of the lease
//	revoke id=N [checked=REV]    a client's decision
//	write id=N                   a key with the lease is written, at revision 50
//	pass d=D                     time passes
//	pause node=N / resume node=N as SIGSTOP and SIGCONT; another node may come to lead unnoticed
//	step node=N d=D              somebody sets the node's wall clock
//	hold / commit / drop         proposals wait, the first one is committed, or certainly not
//	fail id=N times=N / hang id=N / heal
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "a", "b")
			defer w.stop()
			datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
				t.Helper()
				out := w.command(t, d)
				if happened := w.take(); happened != "" {
					out += happened + "\n"
				}
				return out
			})
		})
	})
}

func (w *world) command(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "lead":
		if n := w.named(t, d); d.HasArg("commit") || !d.HasArg("unnoticed") {
			w.lead(n, d.HasArg("commit"))
		} else {
			w.leader = nil // nobody tells it
			w.lead(n, false)
		}
	case "grant":
		spans := 0
		if d.HasArg("spans") {
			d.ScanArgs(t, "spans", &spans)
		}
		w.grant(storyID(t, d), storyInt(t, d, "ttl"), spans)
	case "keepalive", "look":
		return w.about(t, d)
	case "wait":
		w.await(storyID(t, d))
	case "revoke":
		var checked int64
		if d.HasArg("checked") {
			checked = storyInt(t, d, "checked")
		}
		w.revoke(storyID(t, d), keyspace.Revision(checked))
	case "write":
		w.write(storyID(t, d))
	case "pass":
		time.Sleep(storyTime(t, d))
	case "pause":
		w.named(t, d).clock.Pause()
	case "resume":
		w.named(t, d).clock.Resume()
	case "step":
		w.named(t, d).clock.StepWall(storyTime(t, d))
	case "hold":
		w.auto = false
	case "commit", "drop":
		if !w.settle(d.Cmd == "commit") {
			return "nothing is proposed\n"
		}
	case "fail":
		w.failing[storyID(t, d)] = int(storyInt(t, d, "times"))
	case "hang":
		w.hanging[storyID(t, d)] = true
	case "heal":
		clear(w.hanging)
	default:
		t.Fatalf("%s: unknown command %s", d.Pos, d.Cmd)
	}
	return ""
}

// about renews or looks at leases.
func (w *world) about(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var b strings.Builder
	for _, a := range d.CmdArgs {
		for _, v := range a.Vals {
			var id keyspace.LeaseID
			if _, err := fmt.Sscan(v, &id); err != nil {
				t.Fatal(err)
			}
			var st placement.LeaseStatus
			if d.Cmd == "keepalive" {
				st = w.keepAlive(id)
			} else {
				sts, err := w.leader.timer.Look(w.term, []keyspace.LeaseID{id})
				if err != nil {
					return err.Error() + "\n"
				}
				st = sts[0]
			}
			phase := [...]string{"gone", "live", "ending"}[st.Phase]
			if st.Failed {
				phase += ", tried in vain"
			}
			fmt.Fprintf(&b, "lease %d: %s, ttl %d, remaining %v\n", id, phase, st.TTL, st.Remaining)
		}
	}
	return b.String()
}

// await has somebody wait for the end of a lease, as gateways do: again and again.
func (w *world) await(id keyspace.LeaseID) {
	w.mu.Lock()
	leader, term, l := w.leader, w.term, w.records[id]
	w.mu.Unlock()
	go func() {
		for {
			st, rev, err := leader.timer.Wait(context.Background(), term, l.Ref())
			if err == nil && st.Phase == placement.LeaseEnding {
				continue
			}
			w.mu.Lock()
			w.logf("the wait for lease %d: phase %d revision %d, %v", id, st.Phase, rev, err)
			w.mu.Unlock()
			return
		}
	}()
}

func (w *world) named(t *testing.T, d *datadriven.TestData) *node {
	t.Helper()
	var name string
	d.ScanArgs(t, "node", &name)
	for _, n := range w.nodes {
		if n.name == name {
			return n
		}
	}
	t.Fatalf("%s: no node %s", d.Pos, name)
	return nil
}

func storyID(t *testing.T, d *datadriven.TestData) keyspace.LeaseID {
	t.Helper()
	return keyspace.LeaseID(storyInt(t, d, "id"))
}

func storyInt(t *testing.T, d *datadriven.TestData, name string) (n int64) {
	t.Helper()
	d.ScanArgs(t, name, &n)
	return n
}

func storyTime(t *testing.T, d *datadriven.TestData) time.Duration {
	t.Helper()
	var s string
	d.ScanArgs(t, "d", &s)
	v, err := time.ParseDuration(s)
	if err != nil {
		t.Fatal(err)
	}
	return v
}
