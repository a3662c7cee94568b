package shard

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/rangeapi/stages"
	"github.com/skeindb/skein/shard/pipeline"
)

// A leader of which all requests are slow makes so many records in a second, of reads and writes together. Who traces a
// request has its record in any case, and a request of the node's own that has none knows why.
func TestRecordsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Store{cfg: Config{Self: 3, Clock: clock.Virtual()}}
		s.pipes.Epoch = clock.StartStopwatch()
		r := &Replica{id: 7, store: s}
		call := stages.NewCall(t.Context(), clock.StartStopwatch(), false)
		read := func(took time.Duration, traced bool) *stages.Record {
			return r.recordRead(call, &rangeapi.Request{Traced: traced}, &waits{}, clock.StartStopwatch(), took)
		}
		for second := range 3 {
			made := 0
			for range 2 * stages.PerSecond {
				if read(stages.Threshold-1, false) != nil {
					t.Fatal("a fast read has a record")
				}
				if read(stages.Threshold, false) != nil {
					made++
				}
			}
			if made != stages.PerSecond {
				t.Errorf("second %d: %d records", second, made)
			}
			if c := (&pipeline.Call{Req: &rangeapi.Request{}}); r.recordCall(t.Context(), c, time.Second) != nil {
				t.Error("a write has one more")
			}
			if read(time.Second, true) == nil || read(time.Millisecond, true) == nil {
				t.Error("a traced read has none")
			}
			time.Sleep(time.Second)
		}
		const cause = "node 3 has more slow requests than it records: 431 ms in a range of it, or the gateway"
		if slow, _ := call.Slow(3, 431*time.Millisecond); slow.Cause != cause {
			t.Errorf("%q, want %q", slow.Cause, cause)
		}
	})
}

// A request of another node that gave up is kept if it was slow. A traced one has a record even if it was not.
func TestOnlySlowRequestsThatHaveGoneAreKept(t *testing.T) {
	var kept []keyspace.RangeID
	s := &Store{cfg: Config{Slow: func(s stages.Slow) { kept = append(kept, s.Range) }}}
	for id, took := range []time.Duration{time.Millisecond, stages.Threshold - 1, stages.Threshold, time.Second} {
		s.noteGone("put", &stages.Record{Range: keyspace.RangeID(id), Took: took}, kverror.New(kverror.Canceled, ""))
	}
	s.noteGone("put", nil, kverror.New(kverror.Canceled, ""))
	s.noteGone("put", &stages.Record{Range: 9, Took: time.Second}, nil)
	if len(kept) != 2 || kept[0] != 2 || kept[1] != 3 {
		t.Errorf("kept %v", kept)
	}
}
