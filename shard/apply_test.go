package shard

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/shard/command"
)

// logWriter writes the entries of a range's log as its leaders do.
type logWriter struct {
	last command.Link
	hash uint64
	rev  keyspace.Revision
}

// batch is an entry that puts the keys, each in a transaction of its own, or deletes
// them where they begin with "-".
func (l *logWriter) batch(term uint64, gen keyspace.Generation, keys ...string) raftgroup.Entry {
	b := command.AppendHeader(nil, command.Header{Kind: command.KindBatch, Term: term, Generation: gen})
	next := command.Link{Term: term, Number: l.last.Number + 1}
	b = command.AppendBatchHeader(b, &command.Batch{Prev: l.last, Number: next.Number, Hash: l.hash, First: l.rev + 1, Txns: len(keys)})
	for _, k := range keys {
		l.rev++
		v := &mvcc.Version{Key: []byte(k), Mod: l.rev, Create: l.rev, Version: 1, Value: []byte("v")}
		lived := k[0] == '-'
		if lived {
			v = &mvcc.Version{Key: []byte(k[1:]), Mod: l.rev, Tombstone: true}
		}
		b = command.AppendVersion(binary.AppendUvarint(b, 1), v, command.Prior{Lived: lived})
		l.hash += mvcc.HashWrite(v)
	}
	l.last = next
	return raftgroup.Entry{Term: term, Data: b}
}

func numbered(kind command.Kind, term uint64, gen keyspace.Generation, n int64) raftgroup.Entry {
	return raftgroup.Entry{Term: term, Data: binary.AppendVarint(command.AppendHeader(nil, command.Header{Kind: kind, Term: term, Generation: gen}), n)}
}

func splitEntry(term uint64, gen keyspace.Generation, key string, child keyspace.RangeID) raftgroup.Entry {
	b := command.AppendHeader(nil, command.Header{Kind: command.KindSplit, Term: term, Generation: gen})
	b = command.AppendSplit(b, &command.Split{Key: []byte(key), Child: child, ConfIndex: raftgroup.InitIndex, Replicas: testDescriptor.Replicas})
	return raftgroup.Entry{Term: term, Data: b}
}

// someLog is a log with everything in it, also with what must do nothing.
func someLog() []raftgroup.Entry {
	var l logWriter
	l.rev = 1
	ents := []raftgroup.Entry{{Term: 5}, l.batch(5, 1, "a", "b", "x"), l.batch(5, 1, "-a", "c")}
	stale, moved := l, l
	ents = append(ents, splitEntry(5, 1, "m", 2))
	ents = append(ents, stale.batch(5, 1, "d")) // of the generation before
	e := moved.batch(6, 2, "e")
	e.Term = 7 // committed in another term than it was made in
	ents = append(ents, e, l.batch(7, 2, "f", "-c"), numbered(command.KindCompact, 7, 2, 5), numbered(command.KindCount, 7, 2, 2))
	other := l
	other.last.Number += 7 // on a batch that was lost
	ents = append(ents, other.batch(7, 2, "g"), l.batch(7, 2, "-b", "h"), numbered(command.KindCompact, 7, 2, 4), splitEntry(7, 2, "g", 3))
	return append(ents, l.batch(8, 3, "a", "-f"), numbered(command.KindCount, 8, 3, 1))
}

// state returns the state that all replicas must share: the records, and the versions that
// compaction keeps.
func (w *fakeWorld) state() string {
	w.t.Helper()
	out := ""
	for id := keyspace.RangeID(1); id <= 3; id++ {
		a, ok, err := w.engine.Applied(id.Group())
		if err != nil || !ok {
			w.t.Fatalf("range %s: %v, %v", id, ok, err)
		}
		rec, err := command.DecodeRecord(a.Payload)
		if err != nil {
			w.t.Fatal(err)
		}
		h, err := mvcc.Hash(w.engine, rec.Span, rec.LastRevision, rec.Compacted)
		if err != nil {
			w.t.Fatal(err)
		}
		if id > 1 {
			a.Term = 0 // a child begins at one that says nothing
		}
		out += fmt.Sprintf("range %s: term %d, replicas %v, %x, versions %x\n", id, a.Term, a.Replicas, a.Payload, h)
	}
	return out
}

// Trap 33: the state depends on nothing but the log. It does not depend on the batches in which
// entries are applied, on restarts, on the time, on the node's settings, on messages, or on how
// far old versions are removed.
func TestApplyIsAFunctionOfTheLog(t *testing.T) {
	virtually(t, func(t *testing.T) {
		whole := newFakeWorld(t)
		defer whole.stop()
		if err := whole.groups.group(1).apply(someLog()...); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		want := whole.state()

		pieces := newFakeWorldWith(t, Limits{MaxRequestBytes: 1 << 10, MaxTxnOps: 1})
		defer func() { pieces.stop() }()
		for i, e := range someLog() {
			if err := pieces.groups.group(1).apply(e); err != nil {
				t.Fatalf("entry %d: %v", i, err)
			}
			pieces.store.observe(keyspace.SequenceAnswer{Current: 100, Compacted: 6})
			time.Sleep(time.Duration(i) * time.Minute)
			if i%3 == 2 {
				pieces.stop()
				pieces.start()
			}
		}
		synctest.Wait()
		if got := pieces.state(); got != want {
			t.Errorf("all at once:\n%sone by one:\n%s", want, got)
		}
	})
}

// Traps 54 and 55: an entry that was made in another term, in another generation, or on
// another entry than the last one does nothing, whatever it holds.
func TestStaleEntriesDoNothing(t *testing.T) {
	var l logWriter
	l.rev = 1
	first := l.batch(5, 1, "a")
	// next is the entry that would come next, in the generation; each has its own writer.
	next := func(gen keyspace.Generation) raftgroup.Entry { o := l; return o.batch(5, gen, "b") }
	stale := map[string]func() raftgroup.Entry{
		"an earlier generation": func() raftgroup.Entry { return next(1) },
		"a later generation":    func() raftgroup.Entry { return next(3) },
		"another term":          func() raftgroup.Entry { e := next(2); e.Term = 6; return e },
		"on a lost entry":       func() raftgroup.Entry { o := l; o.last.Number++; return o.batch(5, 2, "b") },
		"a split of before":     func() raftgroup.Entry { return splitEntry(5, 1, "c", 4) },
		"a compaction of then":  func() raftgroup.Entry { return numbered(command.KindCompact, 5, 1, 2) },
		"a count of then":       func() raftgroup.Entry { return numbered(command.KindCount, 5, 1, 9) },
	}
	for what, entry := range stale {
		t.Run(what, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				w := newFakeWorld(t)
				defer w.stop()
				g := w.groups.group(1)
				if err := g.apply(first, splitEntry(5, 1, "m", 2)); err != nil {
					t.Fatal(err)
				}
				before := applied(t, w.engine)
				if err := g.apply(entry()); err != nil {
					t.Fatal(err)
				}
				if after := applied(t, w.engine); !bytes.Equal(after, before) {
					t.Errorf("the record was %x and is %x", before, after)
				}
				if _, ok, err := mvcc.Get(w.engine, []byte("b"), 1<<40); ok || err != nil {
					t.Errorf("its key is there: %v", err)
				}
				// What does count goes on from there.
				if err := g.apply(next(2)); err != nil {
					t.Fatal(err)
				}
				if _, ok, err := mvcc.Get(w.engine, []byte("b"), 1<<40); !ok || err != nil {
					t.Errorf("the next entry did nothing: %v", err)
				}
			})
		})
	}
}

// applied is the payload of range 1's applied record.
func applied(t *testing.T, e *engine.Engine) []byte {
	t.Helper()
	a, ok, err := e.Applied(1)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	return slices.Clone(a.Payload)
}
