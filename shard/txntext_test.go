package shard

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// The stories' commands of transactions over several ranges, one per line:
//
//	prepare NAME ANCHOR [patient] [pin[=N]] [if ( COMPARE [holds|fails] , ... )] [do ( OP ; ... )]
//	        [revoke=LEASE [as=INCARNATION] [checked=REV]] [absent=LEASE]
//	commit NAME ANCHOR REV LOCK ...   the first lock is the anchor's
//	resolve NAME REV [LOCK] [detach=LEASE [as=INCARNATION]]  REV 0 aborts
//	decide NAME ANCHOR
//	forget NAME ANCHOR
//	revoke LEASE [as=INCARNATION] [checked=REV]  in this range alone; as is 1 if it is not given
//	keys LEASE REV [START END]        the keys of a lease
//
// NAME is START.COUNTER/ATTEMPT, LOCK as it is printed. The number of an operation is
// its place in the list, from 1.
func parseCommand(line string) rangeapi.TxnCommand {
	p := &parser{strings.Fields(line)}
	verb := p.next()
	switch verb {
	case "revoke":
		r := &rangeapi.Revoke{Lease: keyspace.LeaseID(number("=" + p.next())), Incarnation: 1}
		if strings.HasPrefix(p.peek(), "as=") {
			r.Incarnation = keyspace.LeaseIncarnation(number(p.next()))
		}
		if p.peek() != "" {
			r.Checked = keyspace.KeyCheck{At: keyspace.Revision(number(p.next())), Term: math.MaxUint64}
		}
		if p.peek() != "" {
			r.Checked.Term = uint64(number(p.next()))
		}
		return r
	case "keys":
		k := &rangeapi.LeaseKeys{Lease: keyspace.LeaseID(number("=" + p.next())), At: keyspace.Revision(number("=" + p.next()))}
		if p.peek() != "" {
			k.Span = keyspace.Span{Start: word(p.next()), End: word(p.next())}
		}
		return k
	}
	name := parseName(p.next())
	switch verb {
	case "prepare":
		return p.prepare(name)
	case "commit":
		c := &rangeapi.Commit{Name: name, Anchor: word(p.next()), Revision: keyspace.Revision(number("=" + p.next()))}
		for p.peek() != "" {
			c.Locks = append(c.Locks, rangeapi.LockRef{ID: parseLockID(p.next())})
		}
		c.AnchorLock = c.Locks[0].ID
		return c
	case "resolve":
		r := &rangeapi.Resolve{Name: name, Revision: keyspace.Revision(number("=" + p.next()))}
		if p.peek() != "" && !strings.HasPrefix(p.peek(), "detach=") {
			r.Lock = parseLockID(p.next())
		}
		if p.peek() != "" {
			r.Detach, r.Incarnation = keyspace.LeaseID(number(p.next())), 1
		}
		if p.peek() != "" {
			r.Incarnation = keyspace.LeaseIncarnation(number(p.next()))
		}
		return r
	case "decide":
		return &rangeapi.Decide{Name: name, Anchor: word(p.next())}
	case "forget":
		return &rangeapi.Forget{Name: name, Anchor: word(p.next())}
	}
	panic("unknown command " + verb)
}

func parseName(s string) (n rangeapi.TxnName) {
	if _, err := fmt.Sscanf(s, "%d.%d/%d", &n.Start, &n.Counter, &n.Attempt); err != nil {
		panic(err)
	}
	n.Node, n.Boot = 1, 1
	return n
}

func parseLockID(s string) (l rangeapi.LockID) {
	if _, err := fmt.Sscanf(s, "%d:%d/%d.%d", &l.Range, &l.Term, &l.Number, &l.Index); err != nil {
		panic(err)
	}
	return l
}

func (p *parser) prepare(name rangeapi.TxnName) *rangeapi.Prepare {
	s := &rangeapi.Prepare{Name: name, Anchor: word(p.next())}
	for {
		switch w := p.peek(); {
		case w == "patient":
			p.next()
			s.WaitForOlder = true
		case strings.HasPrefix(w, "revoke="):
			s.Revoke, s.Incarnation = keyspace.LeaseID(number(p.next())), 1
		case strings.HasPrefix(w, "as="):
			s.Incarnation = keyspace.LeaseIncarnation(number(p.next()))
		case strings.HasPrefix(w, "checked="):
			s.Checked = keyspace.KeyCheck{At: keyspace.Revision(number(p.next())), Term: math.MaxUint64}
		case strings.HasPrefix(w, "term="):
			s.Checked.Term = uint64(number(p.next()))
		case strings.HasPrefix(w, "absent="):
			s.Absent = append(s.Absent, keyspace.LeaseID(number(p.next())))
		case strings.HasPrefix(w, "pin"):
			p.next()
			s.Pin = true
			if strings.Contains(w, "=") {
				s.PinAt = keyspace.Revision(number(w))
			}
		case w == "if":
			p.next()
			p.list(",", func() {
				g := rangeapi.Guard{Compare: p.compare()}
				switch p.peek() {
				case "holds":
					p.next()
					g.Want = rangeapi.WantHolds
				case "fails":
					p.next()
					g.Want = rangeapi.WantFails
				}
				s.Guards = append(s.Guards, g)
			})
		case w == "do":
			p.next()
			p.list(";", func() {
				s.Writes = append(s.Writes, rangeapi.Write{Number: uint32(len(s.Writes) + 1), Op: p.request()})
			})
		default:
			return s
		}
	}
}

func formatTxnAnswer(a rangeapi.TxnAnswer, err error) string {
	if err != nil {
		return formatAnswer(nil, err)
	}
	switch o := a.(type) {
	case *rangeapi.Decided:
		if o.Revision == 0 {
			return "aborted"
		}
		s := fmt.Sprintf("committed@%d", o.Revision)
		for _, l := range o.Locks {
			s += " " + l.ID.String()
		}
		return s
	case *rangeapi.Resolved:
		s := "done"
		if o.More {
			s = "more"
		}
		if o.Intact {
			s += ", it was intact"
		}
		return s
	case *rangeapi.Revoked:
		switch {
		case o.TooMany:
			return "too many keys"
		case o.Revision == 0:
			return "nothing revoked"
		}
		return fmt.Sprintf("revoked@%d", o.Revision)
	case *rangeapi.Attached:
		return fmt.Sprintf("attached %s more=%t", o.Keys, o.More)
	}
	return formatPrepared(a.(*rangeapi.Prepared))
}

func formatPrepared(p *rangeapi.Prepared) string {
	s := "not prepared"
	switch {
	case p.Held:
		s = "prepared " + p.Lock.String()
	case p.Fence != 0:
		s = "fenced " + strconv.FormatUint(p.Fence, 10)
	}
	for _, f := range p.Facts {
		s += fmt.Sprintf(" %t/%t", f.Found, f.Holds)
	}
	if p.Refused != nil {
		return s + fmt.Sprintf(" refused at %d: %s", p.RefusedAt, p.Refused.Kind)
	}
	if p.Held && !p.Changes {
		s += " nothing"
	}
	for i := range p.Results {
		r := &p.Results[i]
		s += fmt.Sprintf(" ; %d:", r.Number)
		if r.Version != 0 {
			s += fmt.Sprintf(" version=%d create=%d lived=%t", r.Version, r.Create, r.Lived)
		} else {
			s += fmt.Sprintf(" deleted=%d", r.Deleted)
		}
		if r.Uncounted {
			s += " swept"
		}
		if r.Value != nil {
			s += fmt.Sprintf(" value=%s", r.Value)
		}
		s += formatPrev(r.Prevs...)
	}
	return s
}

// locksText prints what a replica has of transactions, in the order of names.
func locksText(r *Replica) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.locks.Empty() {
		return fmt.Sprintf("no locks, fence %d\n", r.rec.Fence)
	}
	var lines []string
	for h := range r.locks.Locks() {
		s := fmt.Sprintf("%s of %s", h.ID, h.Name)
		if h.Pending {
			s = "pending of " + h.Name.String()
		}
		for _, p := range h.Spans {
			s += " " + [...]string{"r", "w", "sweep"}[p.Mode] + command.DescribeSpan(p.Span)
		}
		if h.Revoke.Lease != 0 {
			s += fmt.Sprintf(" revoke=%d", h.Revoke.Lease)
		}
		if len(h.Leases) > 0 {
			s += fmt.Sprintf(" leases=%d", h.Leases)
		}
		if wait := len(h.Waiters()); wait > 0 {
			s += fmt.Sprintf(", %d wait", wait)
		}
		lines = append(lines, s)
	}
	for t := range r.locks.Records() {
		lines = append(lines, fmt.Sprintf("record of %s@%d", t.Name, t.Revision))
	}
	return strings.Join(sortedLines(lines), "") + fmt.Sprintf("fence %d\n", r.rec.Fence)
}

func sortedLines(lines []string) []string {
	slices.Sort(lines)
	for i := range lines {
		lines[i] += "\n"
	}
	return lines
}
