package placement

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeindb/skein/keyspace"
)

// A revision that belongs to several ranges is read wholly or not at all.
func TestHandoutLogDividesNoRevision(t *testing.T) {
	l := newHandoutLog(8)
	l.restart(7, 100)
	l.append(Handout{First: 101, Count: 2, Range: 1, Generation: 1})
	for id := range keyspace.RangeID(3) {
		l.used++
		*l.entry(l.used - 1) = Handout{First: 103, Count: 1, Range: 1 + id, Generation: 1}
	}
	l.last = 103
	l.append(Handout{First: 104, Count: 1, Range: 9, Generation: 1})
	for size, want := range map[int]string{3: "1@102 3@103 1@104", 4: "4@103 1@104", 5: "5@104", 8: "5@104"} {
		dst, got := make([]Handout, size), []string(nil)
		for at := keyspace.Revision(100); at < 104; {
			n, last, err := l.Read(7, at, dst)
			if err != nil || last <= at {
				t.Fatalf("read after %d: up to %d, %v", at, last, err)
			}
			got = append(got, fmt.Sprintf("%d@%d", n, last))
			at = last
		}
		if g := strings.Join(got, " "); g != want {
			t.Errorf("%d at a time: %s, want %s", size, g, want)
		}
	}
}

// A revision of several ranges comes in one part, also where the first of them was handed
// those before it, and however many ranges it has.
func TestLogPartOfSeveralRanges(t *testing.T) {
	virtually(t, logPartOfSeveralRanges)
}

func logPartOfSeveralRanges(t *testing.T) {
	t.Helper()
	also := make([]keyspace.RangeAt, keyspace.MaxRevisionRanges-1)
	for i := range also {
		also[i] = keyspace.RangeAt{Range: keyspace.RangeID(2 + i), Generation: 3}
	}
	for _, n := range []int{1, 2, len(also)} {
		l := newHandoutLog(4096)
		l.restart(7, 100)
		l.append(Handout{First: 101, Count: 2, Range: 1, Generation: 1})
		l.append(Handout{First: 103, Count: 1, Range: 1, Generation: 1}, also[:n]...)
		l.append(Handout{First: 104, Count: 1, Range: also[n-1].Range, Generation: 3})
		ctx, cancel := context.WithCancel(t.Context())
		s := &sink{}
		done := make(chan error)
		go func() { done <- serveLog(ctx, l, LogPosition{Term: 7, Last: 102}, s) }()
		owners := map[keyspace.Revision]int{}
		for part, at := 0, keyspace.Revision(102); at < 104; part++ {
			p, err := decodeLogPart(s.part(part))
			if err != nil || p.After != at {
				t.Fatalf("part behind %d: %+v, %v", at, p, err)
			}
			for i := range p.Records {
				if h := &p.Records[i]; h.Count != 1 || h.First <= at || h.Last() > p.Last {
					t.Errorf("a record of (%d, %d] is %+v", at, p.Last, h)
				}
				owners[p.Records[i].First]++
			}
			at = p.Last
		}
		if owners[103] != n+1 || owners[104] != 1 {
			t.Errorf("with %d further ranges revision 103 has %d, the next %d", n, owners[103], owners[104])
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("the stream ended with %v", err)
		}
		if p := (LogPart{Term: 7, After: 100, Last: 103, Records: slices.Clone(l.ring[:n+1])}); true {
			if got, err := decodeLogPart(p.encode()); err != nil || !slices.Equal(got.Records, p.Records) {
				t.Errorf("%d records became %d, %v", n+1, len(got.Records), err)
			}
		}
	}
}

// A hand-out costs no memory, whether somebody follows the log or not.
func TestHandoutLogAllocatesNothing(t *testing.T) {
	for _, followed := range []bool{false, true} {
		l := newHandoutLog(16)
		l.restart(1, 0)
		if followed {
			l.listen()
		}
		at := keyspace.Revision(0)
		n := testing.AllocsPerRun(100, func() {
			at++
			l.append(Handout{First: at, Count: 1, Range: keyspace.RangeID(at % 3), Generation: 1})
		})
		if n != 0 {
			t.Errorf("followed %t: %v allocations", followed, n)
		}
	}
}

// follower keeps what FollowLog brings.
type follower struct {
	mu sync.Mutex
	// Guarded by mu: the owner of each revision, up to where the log is known, and the
	// revisions of which nobody tells.
	owner map[keyspace.Revision]keyspace.RangeID
	last  keyspace.Revision
	gaps  []string
	err   error
}

func (f *follower) take(p *LogPart) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.After < f.last {
		f.err = fmt.Errorf("part after %d follows %d", p.After, f.last)
	}
	if p.After > f.last {
		f.gaps = append(f.gaps, fmt.Sprintf("(%d, %d]", f.last, p.After))
	}
	at := p.After
	for _, h := range p.Records {
		if h.First != at+1 {
			f.err = fmt.Errorf("record from %d follows %d", h.First, at)
		}
		for ; at < h.Last(); at++ {
			f.owner[at+1] = h.Range
		}
	}
	if f.last = p.Last; at != p.Last {
		f.err = fmt.Errorf("records up to %d in a part up to %d", at, p.Last)
	}
}

// reached waits until the follower knows the log up to rev.
func (f *follower) reached(t *testing.T, rev keyspace.Revision) {
	t.Helper()
	for range 2000 {
		f.mu.Lock()
		last, err := f.last, f.err
		f.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		if last >= rev {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("the log did not reach %d within 20 s, but %d", rev, f.last)
}

// handOut asks for count revisions for the range and notes who got them.
func (n *rigNode) handOut(t *testing.T, id keyspace.RangeID, count int, owner map[keyspace.Revision]keyspace.RangeID) keyspace.Revision {
	t.Helper()
	ch := make(chan keyspace.SequenceAnswer, 1)
	n.client.Sequence(keyspace.SequenceRequest{Range: id, Generation: 1, Count: count}, func(a keyspace.SequenceAnswer) { ch <- a })
	a := <-ch
	if a.Err != nil {
		t.Fatal(a.Err)
	}
	for i := range keyspace.Revision(count) {
		owner[a.First+i] = id
	}
	return a.Current
}

// TestFollowLog follows the log on every node over a planned and an unplanned change
// of the sequencer: the first leaves no gap, the second one says which revisions
// nobody can tell of (trap 80).
func TestFollowLog(t *testing.T) {
	virtually(t, func(t *testing.T) {
		r := newRig(t, 4, 3, quiet)
		r.startAll()
		r.leader()
		ctx, cancel := context.WithCancel(t.Context())
		owner := map[keyspace.Revision]keyspace.RangeID{}
		last := r.nodes[0].handOut(t, 5, 2, owner)
		clear(owner) // nobody followed then
		var wg sync.WaitGroup
		followers := make([]*follower, 3)
		for i, n := range r.nodes {
			f := &follower{owner: map[keyspace.Revision]keyspace.RangeID{}, last: last}
			followers[i] = f
			client := n.client
			known := LogPosition{Last: last}
			wg.Go(func() { client.FollowLog(ctx, known, f.take) })
		}
		all := func() {
			t.Helper()
			for i := range 30 {
				last = r.nodes[i%3].handOut(t, keyspace.RangeID(1+i%4), 1+i%3, owner)
			}
			for _, f := range followers {
				f.reached(t, last)
			}
		}
		all()
		from := r.leader()
		to := r.nodes[int(from.id)%3]
		if err := from.client.TransferLeader(ctx, to.id); err != nil {
			t.Fatal(err)
		}
		all()
		for i, f := range followers {
			if len(f.gaps) != 0 {
				t.Errorf("node %d: a planned change left the gaps %v", i+1, f.gaps)
			}
		}
		term := r.leader().service.machine.leaderState().Term
		r.isolate(t)
		all()
		if now := r.leader().service.machine.leaderState().Term; now <= term {
			t.Fatalf("the sequencer of term %d was not lost", term)
		}
		for i, f := range followers {
			if len(f.gaps) != 1 {
				t.Errorf("node %d: the loss of the sequencer left the gaps %v", i+1, f.gaps)
			}
			for rev, id := range f.owner {
				if owner[rev] != id {
					t.Errorf("node %d: revision %d is said to be range %s's, it is range %s's", i+1, rev, id, owner[rev])
				}
			}
			if len(f.owner) != len(owner) {
				t.Errorf("node %d: owners of %d revisions, want %d", i+1, len(f.owner), len(owner))
			}
		}
		cancel()
		wg.Wait()
		for _, n := range r.nodes {
			n.stop()
		}
	})
}

// isolate cuts the sequencer's node off until another one leads, and joins it again.
func (r *rig) isolate(t *testing.T) {
	t.Helper()
	old := r.leader()
	r.net.Partition(old.id)
	for range 600 {
		time.Sleep(50 * time.Millisecond)
		if slices.ContainsFunc(r.nodes, func(n *rigNode) bool {
			return n != old && n.service.machine.leaderState().Ready
		}) {
			break
		}
	}
	r.net.HealAll()
}

// A follower that the log runs away from is told from where on it knows again; one
// that knows a later sequencer is refused.
func TestServeLogOfASlowFollower(t *testing.T) {
	virtually(t, func(t *testing.T) {
		l := newHandoutLog(4)
		l.restart(3, 10)
		for i := range keyspace.Revision(9) {
			l.append(Handout{First: 11 + i, Count: 1, Range: keyspace.RangeID(1 + i), Generation: 1})
		}
		ctx, cancel := context.WithCancel(t.Context())
		s := &sink{}
		done := make(chan error, 1)
		go func() { done <- serveLog(ctx, l, LogPosition{Term: 3, Last: 12}, s) }()
		time.Sleep(time.Millisecond)
		l.restart(4, 19)
		if err := <-done; err != errNoSequencer { //nolint:errorlint // exactly that one
			t.Errorf("a later term ends the stream with %v", err)
		}
		cancel()
		p, err := decodeLogPart(s.sent[0])
		if err != nil || p.After != 15 || p.Last != 19 || len(p.Records) != 4 || len(s.sent) != 1 {
			t.Errorf("%d parts, the first is %+v, %v", len(s.sent), p, err)
		}
		if err := serveLog(t.Context(), l, LogPosition{Term: 5, Last: 30}, s); err != errNoSequencer { //nolint:errorlint // exactly that one
			t.Errorf("a follower of a later sequencer: %v", err)
		}
	})
}

// sink is a stream that keeps what is sent.
type sink struct {
	mu   sync.Mutex
	sent [][]byte
}

func (s *sink) Send(_ context.Context, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, p)
	return nil
}

// part waits for the n-th part.
func (s *sink) part(n int) []byte {
	for {
		s.mu.Lock()
		sent := s.sent
		s.mu.Unlock()
		if n < len(sent) {
			return sent[n]
		}
		time.Sleep(time.Millisecond)
	}
}

func (s *sink) Recv(ctx context.Context) ([]byte, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}
func (s *sink) Close(error) {}
