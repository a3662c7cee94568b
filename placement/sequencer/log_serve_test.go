package sequencer

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// served wakes the log's followers until the test ends.
func served(t *testing.T, l *AllocationLog) {
	t.Helper()
	stop := make(chan struct{})
	var serving sync.WaitGroup
	serving.Go(func() { l.serve(stop, clock.Virtual()) })
	t.Cleanup(func() {
		close(stop)
		serving.Wait()
	})
}

// follow starts followers that know the log up to a revision, and ends them with the test.
func follow[S transport.Stream](t *testing.T, l *AllocationLog, known LogPosition, streams ...S) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var following sync.WaitGroup
	for _, s := range streams {
		following.Go(func() { _ = ServeLog(ctx, l, known, s) })
	}
	t.Cleanup(func() {
		cancel()
		following.Wait()
	})
}

func newSinks(n int) []*sink {
	sinks := make([]*sink, n)
	for i := range sinks {
		sinks[i] = &sink{}
	}
	return sinks
}

// one is an allocation of one revision to a range of its own.
func one(r keyspace.Revision) Allocation {
	return Allocation{First: r, Count: 1, Range: keyspace.RangeID(r), Generation: 1}
}

// Followers that know the same of the log are sent the same bytes.
func TestFollowersShareParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newAllocationLog(allocationLogEntries)
		served(t, l)
		l.restart(7, 100)
		sinks := newSinks(50)
		follow(t, l, LogPosition{Term: 7, Last: 100}, sinks...)
		synctest.Wait()
		at := keyspace.Revision(100)
		for range 10 {
			for range 3 * sentLogRecords / 2 {
				at++
				l.append(one(at))
			}
			l.tell()
			time.Sleep(time.Second)
		}
		synctest.Wait()
		encoded := map[*byte]int{}
		for i, s := range sinks {
			for _, b := range s.sent[1:] { // the first one says that nothing was allocated
				encoded[&b[0]]++
			}
			if p := decoded(t, s.sent[len(s.sent)-1]); p.Last != at {
				t.Errorf("follower %d knows the log up to %d of %d", i, p.Last, at)
			}
		}
		if len(encoded) != 20 {
			t.Errorf("20 parts of 50 followers were encoded %d times", len(encoded))
		}
	})
}

// The part of a follower that is behind the others ends where one of theirs begins, though more is known by then and one
// record has it all. So they share the parts from there on.
func TestPartsMeet(t *testing.T) {
	l := newAllocationLog(16)
	l.restart(7, 100)
	part := func(after, last keyspace.Revision, want bool) *byte {
		t.Helper()
		e, more, err := l.part(7, after)
		if err != nil || e.last != last || more != want {
			t.Fatalf("behind revision %d: up to %d, more %t, %v; want up to %d, more %t", after, e.last, more, err, last, want)
		}
		p := decoded(t, e.bytes)
		if r := (Allocation{First: after + 1, Count: uint32(last - after), Range: 1, Generation: 1}); !slices.Equal(p.Records, []Allocation{r}) {
			t.Errorf("behind revision %d: %+v, want %+v", after, p.Records, r)
		}
		return &e.bytes[0]
	}
	l.append(Allocation{First: 101, Count: 10, Range: 1, Generation: 1})
	first := part(100, 110, false)
	l.append(Allocation{First: 111, Count: 5, Range: 1, Generation: 1})
	part(105, 110, true)
	if part(100, 110, false) != first {
		t.Error("a part was encoded twice")
	}
	l.parts.wake()
	if part(100, 110, true) != first {
		t.Error("a part was encoded twice, the second time behind a wake-up")
	}
	second := part(110, 115, false)
	if part(110, 115, false) != second {
		t.Error("the next part was encoded twice")
	}
}

// Builds before this one read no more records of a part than this one sends. What finds no room is asked for at once.
func TestFullParts(t *testing.T) {
	const room = keyspace.MaxRevisionRanges
	for _, c := range []struct {
		records int
		parts   []int
	}{
		{room - 1, []int{room - 1}},
		{room, []int{room}},
		{room + 1, []int{room, 1}},
		{3 * room, []int{room, room, room}},
	} {
		l := newAllocationLog(allocationLogEntries)
		l.restart(7, 100)
		for i := range c.records {
			l.append(one(101 + keyspace.Revision(i)))
		}
		at := keyspace.Revision(100)
		for i, want := range c.parts {
			e, more, err := l.part(7, at)
			if err != nil {
				t.Fatal(err)
			}
			if got := len(decoded(t, e.bytes).Records); got != want || more != (i < len(c.parts)-1) {
				t.Errorf("part %d of %d records: %d records, more %t; want the parts %v", i, c.records, got, more, c.parts)
			}
			at = e.last
		}
	}
}

// A revision whose ranges have no room behind others comes in a part of its own, which is asked for at once.
func TestFullPartBeforeALargeRevision(t *testing.T) {
	l := newAllocationLog(allocationLogEntries)
	l.restart(7, 100)
	l.append(one(101))
	l.append(one(102), make([]keyspace.RangeAt, keyspace.MaxRevisionRanges-1)...)
	first, more, err := l.part(7, 100)
	if n := len(decoded(t, first.bytes).Records); err != nil || first.last != 101 || n != 1 || !more {
		t.Errorf("up to revision %d with %d records, more %t, %v", first.last, n, more, err)
	}
	second, more, err := l.part(7, 101)
	if n := len(decoded(t, second.bytes).Records); err != nil || second.last != 102 || n != keyspace.MaxRevisionRanges || more {
		t.Errorf("up to revision %d with %d records, more %t, %v", second.last, n, more, err)
	}
}

// Followers hear of an allocation at once where it is the first one for a while. Of those that follow each other closely,
// many followers hear together, within the pause.
func TestFollowersAreWokenTogether(t *testing.T) {
	const every, over = 100 * time.Microsecond, 30 * time.Millisecond
	for _, c := range []struct {
		followers int
		pause     time.Duration
		parts     int
	}{
		{3, 0, int(over / every)},
		{300, 3 * time.Millisecond, int(over / (3 * time.Millisecond))},
		{1200, maxPause, int(over / maxPause)},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := newAllocationLog(allocationLogEntries)
			served(t, l)
			l.restart(7, 100)
			sinks := newSinks(c.followers)
			follow(t, l, LogPosition{Term: 7, Last: 100}, sinks...)
			time.Sleep(time.Second)
			at := keyspace.Revision(100)
			knows := func() (last keyspace.Revision) {
				synctest.Wait()
				last = keyspace.MaxRevision
				for _, s := range sinks {
					last = min(last, decoded(t, s.sent[len(s.sent)-1]).Last)
				}
				return last
			}
			for i := range int(over / every) {
				at++
				l.append(one(at))
				l.tell()
				if i == 0 && knows() != at {
					t.Errorf("%d followers: the first allocation is not sent at once", c.followers)
				}
				time.Sleep(every)
			}
			time.Sleep(c.pause)
			if last := knows(); last != at {
				t.Errorf("%d followers: up to %d of %d is known after %v", c.followers, last, at, c.pause)
			}
			if got := len(sinks[0].sent) - 1; got < c.parts || got > c.parts+1 {
				t.Errorf("%d followers: %d parts in %v, want %d or one more", c.followers, got, over, c.parts)
			}
		})
	}
}

// Followers learn of every revision and all its ranges, in order. They begin anywhere and are slow or quick. None of them waits
// for a later allocation to hear of an earlier one.
func TestFollowersLearnAll(t *testing.T) {
	for seed := range uint64(4) {
		synctest.Test(t, func(t *testing.T) { followersLearnAll(t, rand.New(rand.NewPCG(seed, 26))) })
	}
}

func followersLearnAll(t *testing.T, rng *rand.Rand) {
	t.Helper()
	l := newAllocationLog(allocationLogEntries)
	served(t, l)
	l.restart(7, 100)
	var all []owner
	var followers []*learner
	last := keyspace.Revision(100)
	for i := range 200 {
		if len(followers) < 12 && rng.IntN(8) == 0 {
			f := &learner{t: t, last: last - keyspace.Revision(rng.IntN(int(last-100)+1))}
			f.from = f.last
			f.slow = time.Duration(rng.IntN(3)) * time.Duration(rng.IntN(1000)) * time.Microsecond
			followers = append(followers, f)
			follow(t, l, LogPosition{Term: 7, Last: f.last}, f)
		}
		for range 1 + rng.IntN(40) {
			a := Allocation{First: last + 1, Count: 1 + uint32(rng.IntN(3)), Range: keyspace.RangeID(1 + rng.IntN(3)), Generation: 1}
			var also []keyspace.RangeAt
			if a.Count == 1 && rng.IntN(4) == 0 {
				also = []keyspace.RangeAt{{Range: 9, Generation: 1}, {Range: 8, Generation: 1}}
			}
			l.append(a, also...)
			all = append(all, owners(&a)...)
			for _, r := range also {
				all = append(all, owner{a.First, r.Range})
			}
			if last = a.Last(); rng.IntN(5) == 0 {
				l.tell()
			}
		}
		l.tell()
		switch {
		case i%8 == 7:
			time.Sleep(time.Second)
			synctest.Wait()
			for i, f := range followers {
				if f.known() != last {
					t.Fatalf("follower %d waits at revision %d of %d", i, f.known(), last)
				}
			}
		case rng.IntN(3) > 0:
			time.Sleep(time.Duration(rng.IntN(300)) * time.Microsecond)
		}
	}
	for i, f := range followers {
		f.mu.Lock()
		known := slices.IndexFunc(all, func(o owner) bool { return o.revision > f.from })
		if known < 0 {
			known = len(all)
		}
		if !slices.Equal(f.owners, all[known:]) {
			t.Errorf("follower %d of revisions above %d knows %d of %d owners", i, f.from, len(f.owners), len(all)-known)
		}
		f.mu.Unlock()
	}
}

// owner is a revision and one of its ranges.
type owner struct {
	revision keyspace.Revision
	of       keyspace.RangeID
}

func owners(h *Allocation) (os []owner) {
	for r := h.First; r <= h.Last(); r++ {
		os = append(os, owner{r, h.Range})
	}
	return os
}

// learner is the stream of a follower that knows the log above from, takes a while for each part and notes what it learns.
type learner struct {
	t    *testing.T
	from keyspace.Revision
	slow time.Duration

	mu sync.Mutex
	// Guarded by mu: those of the revisions up to last.
	last   keyspace.Revision
	owners []owner
}

func (f *learner) known() keyspace.Revision {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

func (f *learner) Send(ctx context.Context, b []byte) error {
	p, err := DecodeLogPart(b)
	f.mu.Lock()
	if err != nil || p.After != f.last {
		f.t.Errorf("behind revision %d comes %+v, %v", f.last, p, err)
	}
	f.last = p.Last
	for i := range p.Records {
		f.owners = append(f.owners, owners(&p.Records[i])...)
	}
	f.mu.Unlock()
	return clock.Sleep(ctx, clock.Virtual(), f.slow)
}

func (f *learner) Recv(ctx context.Context) ([]byte, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (f *learner) Close(error) {}

func decoded(t *testing.T, b []byte) LogPart {
	t.Helper()
	p, err := DecodeLogPart(b)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A follower that is too slow for the log is told from which revision on it knows again. A
// follower that knows a later sequencer is refused.
func TestServeLogOfASlowFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newAllocationLog(4)
		served(t, l)
		l.restart(3, 10)
		for i := range keyspace.Revision(9) {
			l.append(Allocation{First: 11 + i, Count: 1, Range: keyspace.RangeID(1 + i), Generation: 1})
		}
		ctx, cancel := context.WithCancel(t.Context())
		s := &sink{}
		done := make(chan error, 1)
		go func() { done <- ServeLog(ctx, l, LogPosition{Term: 3, Last: 12}, s) }()
		time.Sleep(time.Millisecond)
		l.restart(4, 19)
		if err := <-done; err != ErrNoSequencer { //nolint:errorlint // exactly that one
			t.Errorf("a later term ends the stream with %v", err)
		}
		cancel()
		p, err := DecodeLogPart(s.sent[0])
		if err != nil || p.After != 15 || p.Last != 19 || len(p.Records) != 4 || len(s.sent) != 1 {
			t.Errorf("%d parts, the first is %+v, %v", len(s.sent), p, err)
		}
		if err := ServeLog(t.Context(), l, LogPosition{Term: 5, Last: 30}, s); err != ErrNoSequencer { //nolint:errorlint // exactly that one
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
