package shard

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// replayed applies what the log has beyond the range's applied record, in one batch, and
// returns the entries as they were marked.
func (w *fakeWorld) replayed(id keyspace.RangeID, log []raftgroup.Entry) []raftgroup.Entry {
	w.t.Helper()
	g := w.groups.group(id)
	ents := slices.Clone(log[g.Status().Applied-raftgroup.InitIndex:])
	for i := range ents {
		ents[i].Refused = nil
	}
	if len(ents) > 0 {
		if err := g.apply(ents...); err != nil {
			w.t.Fatal(err)
		}
	}
	return ents
}

// badEntries are entries that break a rule, by what is wrong with them. Each stands on the last
// batch of the log that l has written, in which range 1 was cut at "m", has the lock held and
// the attachment of lease 4.
func badEntries(l *logWriter, held rangeapi.LockID) map[string]raftgroup.Entry {
	name := rangeapi.TxnName{TxnID: rangeapi.TxnID{Counter: 77}, Attempt: 1}
	// batch is a batch of one transaction from a revision on, with items behind it.
	batch := func(first keyspace.Revision, versions func(b []byte) []byte, items ...command.TxnItem) raftgroup.Entry {
		b := command.AppendHeader(nil, command.Header{Kind: command.KindBatch, Term: 5, Generation: 2})
		b = command.AppendBatchHeader(b, &command.Batch{Prev: l.last, Number: l.last.Number + 1, Hash: l.hash, First: first, Txns: 1})
		b = versions(b)
		for i := range items {
			b = command.AppendItem(b, &items[i])
		}
		return raftgroup.Entry{Term: 5, Data: b}
	}
	next := l.rev + 1
	put := func(b []byte, v *mvcc.Version, before command.Prior) []byte {
		v.Mod, v.Create, v.Version = next, next, 1
		return command.AppendVersion(b, v, before)
	}
	one := func(v mvcc.Version) func(b []byte) []byte {
		return func(b []byte) []byte { return put(binary.AppendUvarint(b, 1), &v, command.Prior{}) }
	}
	good := one(mvcc.Version{Key: []byte("good")})
	items := func(items ...command.TxnItem) raftgroup.Entry {
		return batch(next, good, append(items, command.TxnItem{Kind: command.ItemResolve, ID: rangeapi.LockID{Range: 1, Term: 5, Number: 999}})...)
	}
	lock := func(s keyspace.Span, write string) *command.Lock {
		k := &command.Lock{Name: name, Anchor: []byte("c"), Floor: 1, Spans: []command.LockSpan{{Span: s, Mode: command.Exclusive}}}
		k.Writes = []command.Intent{{V: mvcc.Version{Key: []byte(write), Value: []byte("v"), Version: 1}}}
		return k
	}
	inside := keyspace.Span{Start: []byte("c"), End: []byte("d")}
	raw := func(kind command.Kind, gen keyspace.Generation, body ...byte) raftgroup.Entry {
		return raftgroup.Entry{Term: 5, Data: append(command.AppendHeader(nil, command.Header{Kind: kind, Term: 5, Generation: gen}), body...)}
	}
	whole := batch(next, good).Data
	return map[string]raftgroup.Entry{
		"no header":                {Term: 5, Data: []byte{command.Version}},
		"unknown kind":             {Term: 5, Data: []byte{command.Version, 99, 5, 2}},
		"cut off":                  {Term: 5, Data: whole[:len(whole)-3]},
		"key outside":              batch(next, one(mvcc.Version{Key: []byte("z")})),
		"old revision":             batch(l.rev, good),
		"lease without attachment": batch(next, one(mvcc.Version{Key: []byte("good"), Lease: 9})),
		"replaced by none": batch(next, func(b []byte) []byte {
			return put(binary.AppendUvarint(b, 1), &mvcc.Version{Key: []byte("good")}, command.Prior{Replaced: true})
		}),
		"lock that is not here": items(),
		"behind a lock":         items(command.TxnItem{Kind: command.ItemLock, Lock: lock(inside, "c")}),
		"behind a lock's end":   items(command.TxnItem{Kind: command.ItemResolve, ID: held, Revision: next}),
		"behind an attachment":  items(command.TxnItem{Kind: command.ItemAttach, Attachment: rangeapi.Attachment{Lease: 9, Incarnation: 2}}),
		"behind a detachment":   items(command.TxnItem{Kind: command.ItemDetach, Attachment: rangeapi.Attachment{Lease: 4, Incarnation: 1}}),
		"behind a commit": items(command.TxnItem{Kind: command.ItemCommit, ID: held, Record: &command.CommitRecord{
			Name: name, Anchor: []byte("c"), Revision: next, Locks: []rangeapi.LockRef{{Span: inside}},
		}}),
		"behind a fence":                 items(command.TxnItem{Kind: command.ItemFence, Fence: 99, IDs: []rangeapi.LockID{held}}),
		"lock outside":                   batch(next, good, command.TxnItem{Kind: command.ItemLock, Lock: lock(keyspace.Span{Start: []byte("c"), End: []byte("z")}, "c")}),
		"intent outside":                 batch(next, good, command.TxnItem{Kind: command.ItemLock, Lock: lock(inside, "z")}),
		"end below floor":                batch(next, good, command.TxnItem{Kind: command.ItemResolve, ID: held, Revision: 1}),
		"sweep of a write":               batch(next, good, command.TxnItem{Kind: command.ItemSweep, ID: held, Revision: next}),
		"split cut off":                  raw(command.KindSplit, 2, 1, 'g'),
		"split into itself":              splitEntry(5, 2, "g", 1),
		"split into the placement group": splitEntry(5, 2, "g", keyspace.RangeID(keyspace.PlacementGroup)),
		"compaction cut off":             raw(command.KindCompact, 2),
		"count and more":                 raw(command.KindCount, 2, 2, 2),
		"bind cut off":                   raw(command.KindBind, 2),
		"freeze cut off":                 raw(command.KindFreeze, 2),
		"absorb cut off":                 raw(command.KindAbsorb, 2),
		"release cut off":                raw(command.KindRelease, 2),
	}
}

// An entry that breaks a rule does nothing on any replica, also where a crash has it applied
// again. Neither the range nor the node ends with it, and the log goes on behind it.
func TestBadEntriesDoNothing(t *testing.T) {
	var names []string
	for name := range badEntries(new(logWriter), rangeapi.LockID{}) {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T) {
				var l logWriter
				l.rev = 1
				log := []raftgroup.Entry{{Term: 5}, l.batch(5, 1, "a", "b", "x"), splitEntry(5, 1, "m", 2), splitEntry(5, 1, "never", 3)}
				// The lock and the attachment come with a batch whose hash only a replica knows.
				held := rangeapi.LockID{Range: 1, Term: 5, Number: l.last.Number + 1}
				b := command.AppendHeader(nil, command.Header{Kind: command.KindBatch, Term: 5, Generation: 2})
				b = command.AppendBatchHeader(b, &command.Batch{Prev: l.last, Number: held.Number, Hash: l.hash})
				k := &command.Lock{Name: rangeapi.TxnName{TxnID: rangeapi.TxnID{Counter: 5}, Attempt: 1}, Anchor: []byte("e"), Floor: 3}
				k.Spans = []command.LockSpan{{Span: keyspace.Span{Start: []byte("e"), End: []byte("f")}, Mode: command.Exclusive}}
				k.Writes = []command.Intent{{V: mvcc.Version{Key: []byte("e"), Value: []byte("v"), Version: 1}}}
				b = command.AppendItem(b, &command.TxnItem{Kind: command.ItemLock, Lock: k})
				b = command.AppendItem(b, &command.TxnItem{Kind: command.ItemAttach, Attachment: rangeapi.Attachment{Lease: 4, Incarnation: 1}})
				log = append(log, raftgroup.Entry{Term: 5, Data: b})
				scout := newFakeWorld(t)
				scout.replayed(1, log)
				r := scout.store.Replica(1)
				l.last, l.hash = r.applying.rec.Last, r.applying.rec.Hash
				scout.stop()

				after := l
				clean := append(slices.Clone(log), after.batch(5, 2, "-a", "c"), numbered(command.KindCompact, 5, 2, 3), splitEntry(5, 2, "h", 3))
				dirty := slices.Insert(slices.Clone(clean), len(log), badEntries(&l, held)[name])

				want := ""
				for i, entries := range [][]raftgroup.Entry{clean, dirty, dirty, dirty} {
					w := newFakeWorld(t)
					var marked []raftgroup.Entry
					switch i {
					case 0, 1: // all at once
						marked = w.replayed(1, entries)
					case 2: // one by one
						for n := range entries {
							marked = append(marked, w.replayed(1, entries[:n+1])...)
						}
					case 3: // again behind a crash
						w.replayed(1, entries)
						synctest.Wait()
						w.crash()
						w.start()
						marked = w.replayed(1, entries)
					}
					synctest.Wait()
					for n := range marked {
						if bad := i > 0 && n == len(marked)-len(clean)+len(log)-1; (marked[n].Refused != nil) != bad {
							t.Errorf("replica %d: entry %d of %d: refused: %v", i, n, len(marked), marked[n].Refused)
						}
					}
					got := w.state() + fmt.Sprintf("locks %v, records %v, attachments %v\n",
						w.store.Replica(1).applying.txns.Locks[held] != nil, len(w.store.Replica(1).applying.txns.Records), w.store.Replica(1).applying.txns.Attachments)
					stored, err := command.LoadTxns(w.engine, 1)
					if err != nil {
						t.Fatal(err)
					}
					got += fmt.Sprintf("stored locks %d %v, records %v, attachments %v\n",
						len(stored.Locks), stored.Locks[held] != nil, len(stored.Records), stored.Attachments)
					if i == 0 {
						want = got
					} else if got != want {
						t.Errorf("without the entry:\n%sreplica %d with it:\n%s", want, i, got)
					}
					if n := testutil.ToFloat64(w.store.metrics.noops); i == 1 && n != 2 {
						t.Errorf("%v entries did nothing, want the bad one and that of a lost generation", n)
					}
					w.stop()
				}
			})
		})
	}
}

// crash ends the node without a flush.
func (w *fakeWorld) crash() {
	w.store.Stop()
	_ = w.engine.Abort() // a crash has nobody to tell
}
