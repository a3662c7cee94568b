package shard

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// FuzzApply gives a replica an entry of any bytes: it applies or is refused, and what
// stands in the applied record afterwards can be read. A refused one changes nothing.
func FuzzApply(f *testing.F) {
	term1 := func(kind command.Kind) []byte {
		return command.AppendHeader(nil, command.Header{Kind: kind, Term: 5, Generation: 1})
	}
	f.Add(append(term1(command.KindBatch), func() []byte {
		b := command.AppendBatchHeader(nil, &command.Batch{Number: 1, First: 2, Txns: 1})
		return command.AppendVersion(binary.AppendUvarint(b, 1), &mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1}, command.Prior{})
	}()...))
	f.Add(func() []byte {
		b := command.AppendBatchHeader(term1(command.KindBatch), &command.Batch{Number: 1, First: 2, Txns: 1})
		b = command.AppendVersion(binary.AppendUvarint(b, 1), &mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1, Lease: 9}, command.Prior{Lease: 8})
		return command.AppendItem(b, &command.TxnItem{Kind: command.ItemAttach, Attachment: rangeapi.Attachment{Lease: 9, Incarnation: 2}})
	}())
	f.Add(func() []byte {
		b := binary.AppendUvarint(command.AppendBatchHeader(term1(command.KindBatch), &command.Batch{Number: 1, First: 2, Txns: 1}), 3)
		b = command.AppendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 2, Create: 2, Version: 1}, command.Prior{Replaced: true})
		b = command.AppendVersion(b, &mvcc.Version{Key: []byte("l"), Mod: 2, Create: 2, Version: 1}, command.Prior{})
		return command.AppendVersion(b, &mvcc.Version{Key: []byte("k"), Mod: 2, Tombstone: true}, command.Prior{})
	}())
	f.Add(command.AppendSplit(term1(command.KindSplit), &command.Split{Key: []byte("g"), Child: 8, Replicas: testDescriptor.Replicas}))
	f.Add(binary.AppendVarint(term1(command.KindCompact), 2))
	f.Add(binary.AppendVarint(term1(command.KindCount), 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 {
			return // raft's own entry
		}
		w := newFakeWorld(t)
		defer w.stop()
		g := w.groups.group(1)
		if err := g.apply(raftgroup.Entry{Term: 5}); err != nil {
			t.Fatal(err)
		}
		none, err := mvcc.Hash(w.engine, keyspace.Span{}, keyspace.MaxRevision, 0)
		if err != nil {
			t.Fatal(err)
		}
		before, _, err := w.engine.Applied(1)
		if err != nil {
			t.Fatal(err)
		}
		ents := []raftgroup.Entry{{Term: 5, Data: data}}
		switch err := g.apply(ents...); {
		case errors.Is(err, kverror.Corrupt), keyspace.IsVersionError(err):
			return // a hash that differs, an entry of another build: these are no matter of the entry alone
		case err != nil:
			t.Fatalf("%s: %v", command.Describe(5, data), err)
		}
		a, ok, err := w.engine.Applied(1)
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		if _, err := command.DecodeRecord(a.Payload); err != nil {
			t.Fatalf("after %s: %v", command.Describe(5, data), err)
		}
		if ents[0].Refused == nil {
			return
		}
		if !bytes.Equal(a.Payload, before.Payload) {
			t.Fatalf("%s is refused with %v, and changes %x to %x", command.Describe(5, data), ents[0].Refused, before.Payload, a.Payload)
		}
		s := &w.store.Replica(1).applying
		if n := len(s.txns.Locks) + len(s.txns.Records) + len(s.txns.Attachments); n > 0 {
			t.Fatalf("%s is refused with %v, and leaves %+v", command.Describe(5, data), ents[0].Refused, s.txns)
		}
		if h, err := mvcc.Hash(w.engine, keyspace.Span{}, keyspace.MaxRevision, 0); err != nil || h != none {
			t.Fatalf("%s is refused with %v, and writes versions: %v", command.Describe(5, data), ents[0].Refused, err)
		}
	})
}

// FuzzAdmin: any request of method 17 gets an answer that decodes.
func FuzzAdmin(f *testing.F) {
	for _, q := range []adminRequest{
		{Op: adminList},
		{Op: adminShow, Range: 1},
		{Op: adminLook, Range: 1},
		{Op: adminHash, Range: 1, Revision: 5, Compacted: 1},
		{Op: adminCreate, Descriptors: []keyspace.Descriptor{testDescriptor}},
		{Op: adminCreate, Descriptors: []keyspace.Descriptor{{Range: 2, Generation: 1, Span: keyspace.Span{Start: []byte("b"), End: []byte("a")}}}},
		{Op: adminSplit, Range: 1, Generation: 1, Key: []byte("k")},
	} {
		b, err := json.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(append([]byte{adminVersion}, b...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		w := newFakeWorld(t)
		defer w.stop()
		a, err := w.store.handleAdmin(t.Context(), 2, b)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodeAdminAnswer(a)
		var failed *kverror.Error
		if err != nil {
			failed = kverror.Of(err)
		}
		if (got == nil) == (failed == nil) {
			t.Fatalf("%q is answered with %q: %v", b, a, err)
		}
	})
}
