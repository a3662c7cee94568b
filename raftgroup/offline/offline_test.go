package offline

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	pb "go.etcd.io/raft/v3/raftpb"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/raftgroup/confentry"
	"github.com/skeindb/skein/wal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const group = keyspace.GroupID(7)

// rig is a log of one group on a disk that forgets what is not synced.
type rig struct {
	t    *testing.T
	disk *simdisk.Disk
	log  *wal.Log
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, disk: simdisk.New()}
	r.open()
	t.Cleanup(func() { _ = r.log.Close() })
	return r
}

func (r *rig) open() {
	r.t.Helper()
	if err := r.disk.MkdirAll("wal", 0o700); err != nil {
		r.t.Fatal(err)
	}
	var err error
	if r.log, err = wal.Open(wal.Options{FS: vfs.FS(r.disk), Dir: "wal", Clock: clock.System(), SegmentBytes: 64 << 10}); err != nil {
		r.t.Fatal(err)
	}
}

// crash cuts the power: all that is reported as durable stays.
func (r *rig) crash() {
	r.t.Helper()
	old := r.log
	r.disk = r.disk.Crash(0, nil)
	_ = old.Close()
	r.open()
}

// tail makes the log behind entry 10 of term 5.
func (r *rig) tail(ents ...*pb.Entry) {
	r.t.Helper()
	for i, e := range ents {
		e.Index, e.Term = ptr(uint64(11+i)), ptr(uint64(6))
	}
	b := r.log.NewBatch()
	b.Reset(group, 10, 5, hardState(6, 10))
	b.Append(group, nil, ents)
	if err := submit(r.t.Context(), r.log, b); err != nil {
		r.t.Fatal(err)
	}
}

func data(s string) *pb.Entry { return &pb.Entry{Type: pb.EntryNormal.Enum(), Data: []byte(s)} }

func change(t *testing.T, cs ...confentry.Change) *pb.Entry {
	t.Helper()
	kind, b, err := pb.MarshalConfChange(confentry.Encode(1, cs, nil))
	if err != nil {
		t.Fatal(err)
	}
	return &pb.Entry{Type: kind.Enum(), Data: b}
}

func replica() *Replica {
	return &Replica{Group: group, Self: 1, Applied: engine.Applied{Index: 10, Term: 5, ConfIndex: 10, Replicas: []keyspace.Replica{{ID: 1, Node: 1}, {ID: 2, Node: 2}, {ID: 3, Node: 3}}}}
}

// show prints the tail as the state machine will see it, and the log's state.
func (r *rig) show(p *Replica) string {
	r.t.Helper()
	var out []string
	err := p.Visit(r.log, func(e *Entry) error {
		switch {
		case e.Members != nil:
			var ms []string
			for _, m := range e.Members {
				ms = append(ms, fmt.Sprintf("%d:%d", m.ID, m.Role))
			}
			out = append(out, fmt.Sprintf("%d/%d members %s", e.Index, e.Term, strings.Join(ms, " ")))
		default:
			out = append(out, fmt.Sprintf("%d/%d %s", e.Index, e.Term, e.Data))
		}
		return nil
	})
	if err != nil {
		out = append(out, err.Error())
	}
	l, err := Read(r.log, group)
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.Join(append(out, fmt.Sprintf("term %d vote %d commit %d", l.Term, l.Vote, l.Commit)), "\n")
}

func (r *rig) want(p *Replica, lines ...string) {
	r.t.Helper()
	if got := r.show(p); got != strings.Join(lines, "\n") {
		r.t.Errorf("the log is\n%s\nwant\n%s", got, strings.Join(lines, "\n"))
	}
}

// The whole tail stays, changes of the members included, and the replica is the only voter behind it (trap 126). All
// of it survives a power cut.
func TestSoleVoter(t *testing.T) {
	for _, c := range []struct {
		what string
		tail []*pb.Entry
		want []string
	}{
		{"plain", []*pb.Entry{data("a")}, []string{
			"11/6 a", "12/9 release", "13/9 members 1:0 3:0", "14/9 members 1:0", "term 9 vote 0 commit 14",
		}},
		{"a change and a split behind it", []*pb.Entry{change(t, confentry.Change{Type: confentry.AddLearner, Replica: 4, Node: 4}), data("split")}, []string{
			"11/6 members 1:0 2:0 3:0 4:1", "12/6 split", "13/9 release",
			"14/9 members 1:0 3:0 4:1", "15/9 members 1:0 4:1", "16/9 members 1:0", "term 9 vote 0 commit 16",
		}},
		{"a joint configuration", []*pb.Entry{change(t, confentry.Change{Type: confentry.Demote, Replica: 2}, confentry.Change{Type: confentry.RemoveReplica, Replica: 3})}, []string{
			"11/6 members 1:0 2:4 3:3", "12/9 release", "13/9 members 1:0 2:1", "14/9 members 1:0", "term 9 vote 0 commit 14",
		}},
		{"the replica itself leaves", []*pb.Entry{data("a"), change(t, confentry.Change{Type: confentry.RemoveReplica, Replica: 1}), data("b"), change(t, confentry.Change{Type: confentry.RemoveReplica, Replica: 2})}, []string{
			"11/6 a", "12/6 ", "13/6 b", "14/6 ", "15/9 release", "16/9 members 1:0 3:0", "17/9 members 1:0", "term 9 vote 0 commit 17",
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			r := newRig(t)
			r.tail(c.tail...)
			p := replica()
			if err := p.SoleVoter(t.Context(), r.log, 9, [][]byte{[]byte("release")}); err != nil {
				t.Fatal(err)
			}
			r.crash()
			r.want(p, c.want...)
			if err := p.SoleVoter(t.Context(), r.log, 9, nil); err == nil {
				t.Error("made twice in one term")
			}
		})
	}
}

// A log that does not continue the record begins anew behind it: a snapshot or a split has made the record first.
func TestSoleVoterBehindItsLog(t *testing.T) {
	r := newRig(t)
	r.tail(data("a"), data("b"))
	p := replica()
	p.Applied.Index, p.Applied.Term = 12, 7 // and the log has entry 12 of term 6
	if err := p.SoleVoter(t.Context(), r.log, 9, nil); err != nil {
		t.Fatal(err)
	}
	r.crash()
	r.want(p, "13/9 members 1:0 3:0", "14/9 members 1:0", "term 9 vote 0 commit 14")
	p.Applied.Index = 5
	if err := p.Visit(r.log, nil); !errors.Is(err, ErrGap) {
		t.Errorf("behind a gap: %v", err)
	}
}

// A replica that goes applies its tail up to an entry, and leaves; what was behind that entry is gone (trap 126).
func TestLeave(t *testing.T) {
	r := newRig(t)
	r.tail(data("a"), data("split"), data("never committed"))
	p := replica()
	if err := p.Leave(t.Context(), r.log, 9, 14); err == nil {
		t.Error("left behind an entry that is not there")
	}
	if err := p.Leave(t.Context(), r.log, 9, 12); err != nil {
		t.Fatal(err)
	}
	r.crash()
	r.want(p, "11/6 a", "12/6 split", "13/9 ", "term 9 vote 0 commit 13")
	ents, err := r.log.Group(group).Entries(13, 14, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	c, err := confentry.Decode(ents[0])
	if err != nil || slices.ContainsFunc(c.Apply(p.Applied.Replicas), func(m keyspace.Replica) bool { return m.ID == 1 }) {
		t.Errorf("the replica stays: %v", err)
	}
}
