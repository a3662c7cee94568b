package command

import (
	"fmt"
	"testing"

	"github.com/skeindb/skein/keyspace"
)

// sampleMerges are what may bind a range to a merge.
func sampleMerges() []MergeState {
	return []MergeState{
		{Role: MergeTarget, ID: 70, Other: 8, Hull: keyspace.Span{Start: []byte("a"), End: []byte("z")}},
		{Role: MergeTarget, ID: 70, Other: 8},
		{Role: MergeSource, ID: 70, Other: 6},
	}
}

func sampleMergeCommands() map[Kind]*MergeCommand {
	return map[Kind]*MergeCommand{
		KindBind:   {ID: 70, ConfIndex: 10, Other: 8, Hull: keyspace.Span{Start: []byte("a"), End: []byte("z")}},
		KindFreeze: {ID: 70, ConfIndex: 11, Other: 6}, KindAbsorb: {ID: 70}, KindRelease: {ID: 70},
	}
}

func mergeEntry(term uint64, g keyspace.Generation, k Kind, c *MergeCommand) []byte {
	return AppendMergeCommand(AppendHeader(nil, Header{k, term, g}), k, c)
}

func goldenMerge() map[string][]byte {
	all := map[string][]byte{}
	for k, c := range sampleMergeCommands() {
		all[k.String()+".v7"] = mergeEntry(5, 3, k, c)
	}
	for i, name := range []string{"record-target.v4", "record-target-all.v4", "record-source.v4"} {
		rec := sampleRecord()
		rec.Merge, rec.Merged, rec.Absorbed = sampleMerges()[i], 60, 2
		all[name] = AppendRecord(nil, &rec)
	}
	return all
}

// A merge's binding survives the way through the record and the log. Truncated forms are
// refused.
func TestMergeFormats(t *testing.T) {
	for _, m := range sampleMerges() {
		rec := sampleRecord()
		rec.Merge, rec.Merged, rec.Absorbed = m, 60, 2
		b := AppendRecord(nil, &rec)
		if got, err := DecodeRecord(b); err != nil || fmt.Sprint(got) != fmt.Sprint(rec) {
			t.Errorf("record %+v, %v", got, err)
		}
		for n := range b {
			if _, err := DecodeRecord(b[:n]); err == nil {
				t.Errorf("a record of %d bytes of %d", n, len(b))
			}
		}
	}
	for k, c := range sampleMergeCommands() {
		b := AppendMergeCommand(nil, k, c)
		if got, err := DecodeMergeCommand(k, b); err != nil || fmt.Sprint(got) != fmt.Sprint(*c) {
			t.Errorf("%s: %+v, %v", k, got, err)
		}
		for n := range b {
			if _, err := DecodeMergeCommand(k, b[:n]); err == nil {
				t.Errorf("%s of %d bytes of %d", k, n, len(b))
			}
		}
		if _, err := DecodeMergeCommand(k, append(b, 0)); err == nil {
			t.Errorf("%s with a byte more", k)
		}
	}
}
