package engine

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/simdisk"
	"github.com/skeindb/skein/keyspace"
)

// A flush and a compaction end their tables where ranges begin: a bad table costs one range, or few of
// many, a replica.
func TestTablesEndWhereRangesDo(t *testing.T) {
	for _, ranges := range []int{3, 200} {
		t.Run(fmt.Sprint(ranges), func(t *testing.T) {
			e, err := Open(Options{FS: simdisk.New(), Dir: "data", Clock: clock.System(), BallastBytes: -1, LowSpaceBytes: -1})
			if err != nil {
				t.Fatal(err)
			}
			defer e.Close()
			var groups []keyspace.GroupID
			var starts [][]byte
			write := func() {
				b := e.NewBatch()
				for i := range ranges {
					for j := range 5 {
						err = b.Set(GroupLocalKey(keyspace.RangeID(i+1).Group(), []byte{byte(j)}), []byte("v"))
						if err == nil {
							err = b.Set(AppendVersionedKey(nil, fmt.Appendf(nil, "k%04d/%d", i, j), 7), []byte("v"))
						}
						if err != nil {
							t.Fatal(err)
						}
					}
				}
				if err := b.Commit(); err != nil {
					t.Fatal(err)
				}
				if err := e.Flush(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			for i := range ranges {
				groups, starts = append(groups, keyspace.RangeID(i+1).Group()), append(starts, fmt.Appendf(nil, "k%04d", i))
			}
			slices.Reverse(groups)
			e.CutTables(groups, starts)
			check := func(when string) {
				t.Helper()
				levels, err := e.db.SSTables()
				if err != nil {
					t.Fatal(err)
				}
				tables := 0
				most := (ranges + maxParts - 1) / maxParts
				for _, level := range levels {
					for _, table := range level {
						tables++
						c := KeySpan{Lower: table.Smallest.UserKey, Upper: append(bytes.Clone(table.Largest.UserKey), 0)}
						held := 0
						for i := range ranges {
							span := keyspace.Span{Start: fmt.Appendf(nil, "k%04d", i), End: fmt.Appendf(nil, "k%04d", i+1)}
							if c.Overlaps(VersionedSpan(span)) || c.Overlaps(GroupLocalSpan(keyspace.RangeID(i+1).Group())) {
								held++
							}
						}
						if held > most {
							t.Errorf("%s: a table %s has keys of %d ranges, want %d at most", when, c, held, most)
						}
					}
				}
				if tables < 2*min(ranges, maxParts) {
					t.Errorf("%s: %d tables", when, tables)
				}
			}
			write()
			check("a flush")
			write()
			if err := e.db.Compact(t.Context(), []byte{0}, []byte{255}, false); err != nil {
				t.Fatal(err)
			}
			check("a compaction")
		})
	}
}
