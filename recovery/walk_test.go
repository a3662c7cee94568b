package recovery

import (
	"testing"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/raftgroup/offline"
	"github.com/skeindb/skein/rangeapi"
	"github.com/skeindb/skein/shard/command"
)

// The revisions of a load are never given out again (trap 126), though no sequencer has given them out. A load
// changes neither members nor span.
func TestLoadInATail(t *testing.T) {
	bulk := func(from rangeapi.LoadCursor, mods ...keyspace.Revision) []byte {
		b := command.AppendLoad(nil, &command.Load{Stage: rangeapi.LoadBulk, From: from, Incarnation: 1, Versions: len(mods)})
		for i, m := range mods {
			b = command.AppendLoadVersion(b, &mvcc.Version{Key: []byte{'k', byte(i)}, Mod: m, Create: m, Version: 1, Value: []byte("v")}, command.LoadPrior{})
		}
		return b
	}
	for _, c := range []struct {
		name string
		term uint64
		body []byte
		want keyspace.Revision
	}{
		{"versions", 4, bulk(rangeapi.LoadCursor{}, 700, 900, 800), 900},
		{"behind a cursor", 4, bulk(rangeapi.LoadCursor{Stage: rangeapi.LoadBulk, Key: []byte("a"), Revision: 950}, 700), 950},
		{"the end", 4, command.AppendLoad(nil, &command.Load{Stage: rangeapi.LoadEnded, From: rangeapi.LoadCursor{Stage: rangeapi.LoadBulk}, Incarnation: 1, Revision: 1000, Compacted: 3}), 1000},
		{"of another term, which does nothing", 3, bulk(rangeapi.LoadCursor{}, 700), 5},
	} {
		w := &walk{node: 1, rec: command.Record{RangeID: 1, Generation: 2}, revision: 5}
		e := &offline.Entry{Index: 11, Term: 4, Data: append(command.AppendHeader(nil, command.Header{Kind: command.KindLoad, Term: c.term, Generation: 2}), c.body...)}
		if err := w.entry(e); err != nil || w.revision != c.want {
			t.Errorf("%s: revision %d, %v; want %d", c.name, w.revision, err, c.want)
		}
		if changes(e) {
			t.Errorf("%s: it counts as a change of members or span", c.name)
		}
	}
}
