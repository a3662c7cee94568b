package locktable

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// request is a waiter of the stories.
type request struct {
	name   string
	op     proto.Message
	cmd    rangeapi.TxnCommand
	ticket uint32
}

func (r *request) Asks() (proto.Message, rangeapi.TxnCommand) { return r.op, r.cmd }
func (r *request) Bytes() int64                               { return 1 }
func (r *request) Ticket() *uint32                            { return &r.ticket }

// owner does with a table what a replica does, without evaluation and log.
type owner struct {
	shared Shared
	table  Table
	now    clock.Time
	// requests are all by name, held the locks by the name of who took them.
	requests map[string]*request
	held     map[string]*Held
	number   uint64
	out      strings.Builder
}

// TestStories runs the stories of testdata, one command per line:
//
//	put NAME KEY [lease=N]       a client's put
//	get NAME KEY [END]           a transaction of a client that reads
//	prepare NAME age=N [patient] [compare=K,K] [write=K,K] [lease=N] [revoke=N]
//	apply NAME                   the pending lock is applied
//	end NAME                     the applied lock ends
//	lose NAME                    the entry of the pending lock is lost
//	run                          all who have their turn, one after the other
//	leave NAME                   the caller gives up
//	drop                         the leadership ends
//	reads KEY REV                for whom a read at the revision waits
//	pass DURATION                time passes
//	due [failed] [done|fails|skip]  what is to be asked about, and how that ends
//	show                         locks and who waits for them
//
// A name with a capital names a transaction, whose lock has the floor of its age.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		o := &owner{requests: map[string]*request{}, held: map[string]*Held{}, now: clock.Time(time.Hour)}
		o.table = New(&o.shared)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			o.out.Reset()
			for line := range strings.Lines(d.Cmd + " " + argsText(d) + "\n" + d.Input) {
				if f := strings.Fields(line); len(f) > 0 {
					o.do(t, f)
				}
			}
			if o.table.set == nil && o.shared.Bytes() != 0 {
				t.Errorf("%s: %d bytes without a lock", d.Pos, o.shared.Bytes())
			}
			if o.table.Blocked() == 0 && (o.table.BlockedBytes() != 0 || len(o.table.revokers) != 0 ||
				len(o.table.wanted.spans) != 0 || o.table.wanted.keys != nil && o.table.wanted.keys.Len() != 0) {
				t.Errorf("%s: left over without waiters: %+v", d.Pos, o.table.waiting)
			}
			return o.out.String()
		})
	})
}

func argsText(d *datadriven.TestData) string {
	var s []string
	for _, a := range d.CmdArgs {
		if len(a.Vals) == 0 {
			s = append(s, a.Key)
		} else {
			s = append(s, a.Key+"="+strings.Join(a.Vals, ","))
		}
	}
	return strings.Join(s, " ")
}

func (o *owner) say(format string, args ...any) { fmt.Fprintf(&o.out, format+"\n", args...) }

func (o *owner) do(t *testing.T, f []string) {
	t.Helper()
	switch f[0] {
	case "put":
		p := &pb.PutRequest{Key: []byte(f[2])}
		if v, ok := value(f, "lease"); ok {
			p.Lease = int64(number(v))
		}
		o.gate(&request{name: f[1], op: p})
	case "get":
		r := &pb.RangeRequest{Key: []byte(f[2])}
		if len(f) > 3 {
			r.RangeEnd = []byte(f[3])
		}
		o.gate(&request{name: f[1], op: &pb.TxnRequest{Success: []*pb.RequestOp{{Request: &pb.RequestOp_RequestRange{RequestRange: r}}}}})
	case "prepare":
		o.gate(&request{name: f[1], cmd: prepare(f, uint64(len(o.requests)))})
	case "apply":
		// What is applied is decoded from the log.
		h := o.held[f[1]]
		in := command.NewCursor(command.AppendItem(nil, &command.TxnItem{Kind: command.ItemLock, Lock: h.Lock}))
		it := in.Item()
		if in.Err() != nil {
			t.Fatal(in.Err())
		}
		it.Lock.ID = h.ID
		o.table.Apply(&Change{Added: it.Lock}, o.now)
	case "end":
		o.table.Apply(&Change{Removed: o.held[f[1]].Lock}, o.now)
	case "lose":
		o.table.Release(o.held[f[1]])
	case "run":
		for w := o.table.Next(); w != nil; w = o.table.Next() {
			o.gate(w.(*request)) //nolint:forcetypeassert // all waiters are requests
		}
	case "leave":
		o.table.Leave(o.requests[f[1]])
	case "drop":
		o.table.DropPending()
		var names []string // in any order: each of them starts over
		for _, w := range o.table.TakeWoken() {
			names = append(names, w.(*request).name) //nolint:forcetypeassert // all waiters are requests
		}
		slices.Sort(names)
		for _, name := range names {
			o.say("%s: start over", name)
		}
	case "reads":
		if h := o.table.Reader(keyspace.Single([]byte(f[1])), keyspace.Revision(number(f[2])), rangeapi.TxnName{}); h != nil {
			o.say("waits for %s", o.nameOf(h))
		} else {
			o.say("reads")
		}
	case "pass":
		d, err := time.ParseDuration(f[1])
		if err != nil {
			t.Fatal(err)
		}
		o.now = o.now.Add(d)
	case "due":
		o.due(f)
	case "show":
		o.show()
	default:
		t.Fatalf("unknown command %q", f)
	}
}

// gate does what a replica does before it evaluates a request. A transaction that meets
// nobody takes its lock at once.
func (o *owner) gate(r *request) {
	o.requests[r.name] = r
	p, ok := r.cmd.(*rangeapi.Prepare)
	if !ok {
		if m := o.table.Conflict(r.op); m.Held != nil {
			o.say("%s: waits for %s", r.name, o.nameOf(m.Held))
			o.table.Wait(r, m)
			return
		}
		o.say("%s: passes", r.name)
		return
	}
	switch m, dies, _ := o.table.Meets(p, keyspace.Span{}); {
	case dies:
		o.say("%s: gives way to %s", r.name, o.nameOf(m.Held))
	case m.Held != nil:
		o.say("%s: waits for %s", r.name, o.nameOf(m.Held))
		o.table.Wait(r, m)
	default:
		o.say("%s: locks", r.name)
		o.number++
		l := &command.Lock{
			ID: rangeapi.LockID{Range: 1, Number: o.number}, Name: p.Name, Floor: p.Name.Start,
			Revoke: rangeapi.Attachment{Lease: p.Revoke},
		}
		p.Keys(func(key, end []byte, writes bool) {
			mode := command.Shared
			if writes {
				mode = command.Exclusive
			}
			if s, ok := keyspace.FromEtcd(key, end); ok {
				l.Spans = append(l.Spans, command.LockSpan{Span: s, Mode: mode})
			}
		})
		for i := range p.Writes {
			visitLeases(p.Writes[i].Op, func(lease keyspace.LeaseID) { l.Leases = command.AddLease(l.Leases, lease) })
		}
		o.held[r.name] = o.table.Acquire(l, 1000, o.now)
	}
}

func (o *owner) nameOf(h *Held) string {
	for name, r := range o.requests {
		if p, ok := r.cmd.(*rangeapi.Prepare); ok && p.Name == h.Name {
			return name
		}
	}
	return h.Name.String()
}

func (o *owner) due(f []string) {
	due := o.table.Due(o.now, slices.Contains(f, "failed"), 1)
	var names []string
	for i := range due {
		names = append(names, o.nameOf(&Held{Lock: due[i].Lock}))
		switch {
		case slices.Contains(f, "fails"):
			due[i].Done(true)
		case slices.Contains(f, "skip"):
			due[i].Skip()
		case slices.Contains(f, "done"):
			due[i].Done(false)
		}
	}
	if slices.Contains(f, "failed") {
		o.say("due: %d", len(names)) // which comes first of several is not said
		return
	}
	slices.Sort(names)
	o.say("due: %v", names)
}

func (o *owner) show() {
	var lines []string
	for h := range o.table.Locks() {
		s := o.nameOf(h)
		if h.Pending {
			s += " (pending)"
		}
		for _, w := range h.Waiters() {
			s += " <- " + w.(*request).name //nolint:forcetypeassert // all waiters are requests
		}
		lines = append(lines, s)
	}
	slices.Sort(lines)
	o.say("%d locks, %d wait", len(lines), o.table.Blocked())
	for _, l := range lines {
		o.say("%s", l)
	}
}

func prepare(f []string, counter uint64) *rangeapi.Prepare {
	p := &rangeapi.Prepare{WaitForOlder: slices.Contains(f, "patient")}
	age, _ := value(f, "age")
	p.Name.Start, p.Name.Counter, p.Name.Attempt = keyspace.Revision(number(age)), counter, 1
	if keys, ok := value(f, "compare"); ok {
		for k := range strings.SplitSeq(keys, ",") {
			p.Guards = append(p.Guards, rangeapi.Guard{Compare: &pb.Compare{Key: []byte(k)}})
		}
	}
	lease, _ := value(f, "lease")
	if keys, ok := value(f, "write"); ok {
		for k := range strings.SplitSeq(keys, ",") {
			p.Writes = append(p.Writes, rangeapi.Write{Op: &pb.PutRequest{Key: []byte(k), Lease: int64(number(lease))}})
		}
	}
	if revoke, ok := value(f, "revoke"); ok {
		p.Revoke = keyspace.LeaseID(number(revoke))
	}
	return p
}

func value(f []string, name string) (string, bool) {
	for _, s := range f {
		if v, ok := strings.CutPrefix(s, name+"="); ok {
			return v, true
		}
	}
	return "", false
}

func number(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}
