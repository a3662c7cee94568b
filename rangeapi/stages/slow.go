package stages

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// The names of the stages at a gateway. Those at a leader are of type Stage.
const (
	Retries  = "retries"
	Present  = "current revision"
	NoAnswer = "no answer"
	// NoRecord is at the node that was asked last and left no record, on the bus to it, or at the gateway.
	NoRecord = "no record"
	Bus      = "bus"
	Gateway  = "gateway"
	// Short is what cannot be told apart: no stage of it was long enough for a leader to tell.
	Short = "short stages"
)

// Part is the time in one stage.
type Part struct {
	Name string
	Took time.Duration
}

// Slow is a request that took long, and where its time went. Nodes send it to one another as JSON.
type Slow struct {
	// Unix is when it ended, in nanoseconds since 1970 by its node's wall clock.
	Unix int64
	// Method is the method that the client called, or what another node asked for.
	Method string
	// Range is the range that took longest, 0 where none is known.
	Range keyspace.RangeID
	Took  time.Duration
	// Cause names the stage that took longest, in words.
	Cause string
	// Parts are the stages that took some time, in their order.
	Parts []Part
	// Retries counts the attempts that were made again.
	Retries                     uint32
	RequestBytes, ResponseBytes int
}

// Slow says where the time of the request went, which ends now and took so long at its gateway self.
func (c *Call) Slow(self keyspace.NodeID, took time.Duration) (s Slow, records []*Record) {
	s.Took = took
	var t trail
	var asked keyspace.NodeID
	if c != nil {
		asked = keyspace.NodeID(c.asked.Load())
		c.mu.Lock()
		if c.trail != nil {
			t = *c.trail
			t.records = slices.Clone(t.records)
		}
		c.mu.Unlock()
	}
	s.Retries, s.Range = t.retries, t.rangeID
	longest := &Record{}
	if len(t.records) > 0 {
		longest = slices.MaxFunc(t.records, func(a, b *Record) int { return cmp.Compare(a.Took, b.Took) })
		s.Range = longest.Range
	}
	// What was waited before the attempts counts once, and a record may end after an attempt that was given up.
	retried := max(0, t.retried-t.waited)
	s.add(Present, min(t.waited, took))
	s.add(Retries, min(retried, took-s.sum()))
	rest := max(0, took-s.sum()-longest.Took)
	for stage := range Count {
		s.add(stage.String(), longest.Spent[stage])
	}
	switch {
	case t.silent && longest.Range != t.rangeID:
		s.add(NoAnswer, rest)
	case longest.Node == 0 && asked != self && rest <= 2*Threshold:
		s.add(Short, rest)
	case longest.Node != 0 && longest.Node != self:
		s.add(Bus, rest)
	case asked != 0:
		s.add(NoRecord, rest)
	default:
		s.add(Gateway, rest)
	}
	s.Cause = s.cause(&t, longest, self, asked)
	return s, t.records
}

// Alone is a request of another node's, which has gone without the answer.
func (r *Record) Alone(method string) Slow {
	s := Slow{Method: method, Range: r.Range, Took: r.Took}
	for stage := range Count {
		s.add(stage.String(), r.Spent[stage])
	}
	s.Cause = r.cause(r.Longest())
	return s
}

func (s *Slow) add(name string, took time.Duration) {
	if took >= time.Microsecond {
		s.Parts = append(s.Parts, Part{name, took})
	}
}

func (s *Slow) sum() (sum time.Duration) {
	for _, p := range s.Parts {
		sum += p.Took
	}
	return sum
}

// cause names what took longest.
func (s *Slow) cause(t *trail, r *Record, self, asked keyspace.NodeID) string {
	if len(s.Parts) == 0 {
		return ""
	}
	longest := slices.MaxFunc(s.Parts, func(a, b Part) int { return cmp.Compare(a.Took, b.Took) })
	took := inWords(longest.Took)
	switch longest.Name {
	case Retries:
		attempts := "1 attempt"
		if t.retries > 1 {
			attempts = fmt.Sprintf("%d attempts", t.retries)
		}
		attempts = fmt.Sprintf("%s, the last: %s at node %s", attempts, t.why, t.node)
		if t.refusals {
			return fmt.Sprintf("no leader known for range %s for %s (%s)", t.rangeID, took, attempts)
		}
		return fmt.Sprintf("sent again to range %s for %s (%s)", t.rangeID, took, attempts)
	case Present:
		if t.whyWaited != "" {
			return fmt.Sprintf("waited %s for the current revision: %s", took, t.whyWaited)
		}
		return fmt.Sprintf("waited %s for the current revision", took)
	case NoAnswer:
		return fmt.Sprintf("no answer for range %s from node %s for %s", t.rangeID, t.node, took)
	case Bus:
		return fmt.Sprintf("bus: %s to node %s and back", took, r.Node)
	case NoRecord:
		if asked == self {
			return fmt.Sprintf("node %s has more slow requests than it records: %s in a range of it, or the gateway", asked, took)
		}
		return fmt.Sprintf("bus to node %s, or the gateway: %s, unless that node has more slow requests than it records", asked, took)
	case Gateway:
		return "the gateway itself: " + took
	case Short:
		return fmt.Sprintf("no stage is known that took longer than %s", inWords(Threshold))
	}
	return r.cause(r.Longest())
}

// cause says in words what a stage of the record means.
func (r *Record) cause(s Stage) string {
	took, in := inWords(r.Spent[s]), "range "+r.Range.String()
	switch s {
	case Queued:
		return fmt.Sprintf("queued behind other requests of %s for %s", in, took)
	case Evaluation:
		return fmt.Sprintf("evaluation in %s: %s", in, took)
	case Parked:
		return fmt.Sprintf("waited %s for a write before it in %s", took, in)
	case Blocked:
		if r.Lock == "" {
			return fmt.Sprintf("waited %s for the registration of a lease in %s", took, in)
		}
		return fmt.Sprintf("waited %s for the lock of transaction %s in %s", took, r.Lock, in)
	case Batch:
		return fmt.Sprintf("queued behind the batch before it in %s for %s", in, took)
	case Revision:
		return fmt.Sprintf("waited %s for a revision in %s", took, in)
	case Held:
		return fmt.Sprintf("waited %s until a write before it was applied in %s", took, in)
	case Confirming:
		return fmt.Sprintf("node %s asked a quorum of %s for %s whether it still leads", r.Node, in, took)
	case Quorum:
		return r.quorum(took, in)
	case Disk:
		return fmt.Sprintf("disk of node %s: %s later than a quorum of %s", r.Node, took, in)
	case Apply:
		return fmt.Sprintf("applied %s after its commit in %s on node %s", took, in, r.Node)
	case Count: // no stage
	}
	return ""
}

func (r *Record) quorum(took, in string) string {
	switch r.Last {
	case 0:
		return fmt.Sprintf("quorum: %s in %s", took, in)
	case r.Node:
		return fmt.Sprintf("quorum: the disk of node %s last, %s in %s", r.Last, took, in)
	}
	return fmt.Sprintf("quorum: node %s last, %s in %s", r.Last, took, in)
}

// inWords is a duration in milliseconds, as people compare them.
func inWords(d time.Duration) string {
	return fmt.Sprintf("%d ms", d.Round(time.Millisecond).Milliseconds())
}
