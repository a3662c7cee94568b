package shard

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// sampleMerges are what may bind a range to a merge.
func sampleMerges() []merge {
	return []merge{
		{role: mergeTarget, id: 70, other: 8, hull: keyspace.Span{Start: []byte("a"), End: []byte("z")}},
		{role: mergeTarget, id: 70, other: 8},
		{role: mergeSource, id: 70, other: 6},
	}
}

func sampleMergeCommands() map[commandKind]*mergeCommand {
	return map[commandKind]*mergeCommand{
		commandBind:   {id: 70, confIndex: 10, other: 8, hull: keyspace.Span{Start: []byte("a"), End: []byte("z")}},
		commandFreeze: {id: 70, confIndex: 11, other: 6}, commandAbsorb: {id: 70}, commandRelease: {id: 70},
	}
}

func mergeEntry(term uint64, g keyspace.Generation, k commandKind, c *mergeCommand) []byte {
	return appendMergeCommand(appendHeader(nil, header{k, term, g}), k, c)
}

func goldenMerge() map[string][]byte {
	all := map[string][]byte{}
	for k, c := range sampleMergeCommands() {
		all[k.String()+".v6"] = mergeEntry(5, 3, k, c)
	}
	for i, name := range []string{"record-target.v3", "record-target-all.v3", "record-source.v3"} {
		rec := sampleRecord()
		rec.merge, rec.merged, rec.absorbed = sampleMerges()[i], 60, 2
		all[name] = appendRecord(nil, &rec)
	}
	return all
}

// What binds a range to a merge survives the trip through its record and its log, and
// nothing is taken for it that is not whole.
func TestMergeFormats(t *testing.T) {
	for _, m := range sampleMerges() {
		rec := sampleRecord()
		rec.merge, rec.merged, rec.absorbed = m, 60, 2
		b := appendRecord(nil, &rec)
		if got, err := decodeRecord(b); err != nil || fmt.Sprint(got) != fmt.Sprint(rec) {
			t.Errorf("record %+v, %v", got, err)
		}
		for n := range b {
			if _, err := decodeRecord(b[:n]); err == nil {
				t.Errorf("a record of %d bytes of %d", n, len(b))
			}
		}
	}
	for k, c := range sampleMergeCommands() {
		b := appendMergeCommand(nil, k, c)
		if got, err := decodeMergeCommand(k, b); err != nil || fmt.Sprint(got) != fmt.Sprint(*c) {
			t.Errorf("%s: %+v, %v", k, got, err)
		}
		for n := range b {
			if _, err := decodeMergeCommand(k, b[:n]); err == nil {
				t.Errorf("%s of %d bytes of %d", k, n, len(b))
			}
		}
		if _, err := decodeMergeCommand(k, append(b, 0)); err == nil {
			t.Errorf("%s with a byte more", k)
		}
	}
}
