package heat

import (
	"encoding/binary"
	"fmt"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

// minute is the width of the finest columns, in seconds.
const minute = 60

// tiers are the resolutions in which columns are stored, the finest first. Each width divides the next.
var tiers = [...]struct {
	// width is that of a column in seconds, kept how many there are at most.
	width int64
	kept  int
}{
	{minute, 360},      // 6 hours
	{10 * minute, 576}, // 4 days
	{60 * minute, 672}, // 28 days
}

const (
	// maxCells bounds the cells of a column. A screen has not many more lines.
	maxCells = 256
	// maxColumnBytes bounds the form of a column, so that all columns together stay below
	// maxStoredBytes.
	maxColumnBytes = maxStoredBytes / (360 + 576 + 672)
	// maxStoredBytes bounds what a node stores.
	maxStoredBytes = 8 << 20
	// maxKeyBytes bounds what is kept of a key. What follows the key is one byte longer.
	maxKeyBytes = 64

	columnVersion = 1
)

// clip returns what is kept of a key.
func clip(key []byte) string { return string(key[:min(len(key), maxKeyBytes)]) }

// after returns the first key behind those that a clipped key stands for, "" if there is none.
func after(key string) string {
	if len(key) < maxKeyBytes {
		return key + "\x00"
	}
	for i := len(key) - 1; i >= 0; i-- {
		if key[i] < 0xff {
			return key[:i] + string([]byte{key[i] + 1})
		}
	}
	return ""
}

// Cell is a part of the keys, from Start to the next cell's.
type Cell struct {
	Start string
	Counts
}

// Column is what all keys had within some time: cells in the order of their starts, which differ. The last one reaches
// to the end of the keyspace.
type Column []Cell

// band returns the column as one of a map.
func (c Column) band(column int) band {
	b := band{starts: make([]string, len(c)), column: column, width: 1, counts: make([]Counts, len(c))}
	for i := range c {
		b.starts[i], b.counts[i] = c[i].Start, c[i].Counts
	}
	return b
}

// columnOf is a map of one column as such.
func columnOf(t cells) Column {
	c := make(Column, 0, len(t.starts)+1)
	for i, s := range t.starts {
		c = append(c, Cell{s, t.counts[i]})
	}
	if len(c) > 0 && t.end != "" {
		c = append(c, Cell{Start: t.end})
	}
	return c
}

// pack joins bands of one column into a column that has its bounds, and returns its form.
func pack(bands []band) (Column, []byte) {
	l := lay(bands, keyspace.Span{})
	for most := maxCells - 1; ; {
		c := columnOf(l.fold(1, most))
		b := encode(c)
		if len(b) <= maxColumnBytes {
			return c, b
		}
		most = max(1, min(most-1, most*maxColumnBytes/len(b)))
	}
}

// encode returns the stored form of a column; docs/format/heat.md describes it.
func encode(c Column) []byte {
	b := []byte{columnVersion}
	b = binary.AppendUvarint(b, uint64(len(c)))
	before := ""
	for i := range c {
		s := c[i].Start
		shared := 0
		for shared < min(len(s), len(before)) && s[shared] == before[shared] {
			shared++
		}
		b = binary.AppendUvarint(b, uint64(shared))
		b = wire.AppendBytes(b, []byte(s[shared:]))
		b = c[i].append(b)
		before = s
	}
	return b
}

func (c Counts) append(b []byte) []byte {
	b = binary.AppendUvarint(b, c.Writes)
	b = binary.AppendUvarint(b, c.Reads)
	return binary.AppendUvarint(b, c.Bytes)
}

func readCounts(r *wire.Reader) Counts {
	c := Counts{Writes: r.Uvarint(), Reads: r.Uvarint(), Bytes: r.Uvarint()}
	if max(c.Writes, c.Reads, c.Bytes) > maxCount {
		r.Failf("counts of %v are no counts", c)
	}
	return c
}

// decode reads the stored form of a column.
func decode(b []byte) (Column, error) {
	r := wire.NewReader(b)
	if v := r.Byte(); v != columnVersion {
		r.Failf("version %d is unknown", v)
	}
	n := r.Uvarint()
	if n > maxCells {
		r.Failf("%d cells", n)
	}
	var c Column
	var start []byte
	for i := uint64(0); i < n && r.OK(); i++ {
		shared, rest := r.Uvarint(), r.Bytes()
		if shared > uint64(len(start)) || shared+uint64(len(rest)) > maxKeyBytes+1 {
			r.Failf("cell %d begins with %d bytes of %q", i, shared, start)
			break
		}
		start = append(start[:shared], rest...)
		cell := Cell{string(start), readCounts(&r)}
		if i > 0 && cell.Start <= c[i-1].Start {
			r.Failf("a cell at %q follows one at %q", cell.Start, c[i-1].Start)
		}
		c = append(c, cell)
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("heat: column: %w", err)
	}
	return c, nil
}
