package heat

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/skeindb/skein/internal/wire"
	"github.com/skeindb/skein/keyspace"
)

const (
	// MaxRows bounds the rows of a map.
	MaxRows = 256
	// MaxColumns bounds its columns.
	MaxColumns = 400
	// MaxGridBytes bounds the counts and keys of a map as they are sent. Where they are more, a map has fewer rows.
	MaxGridBytes = 600 << 10
)

// Query says which part of the map is meant, and how finely. All nodes are asked the same.
type Query struct {
	// From is where the first column begins, in unix seconds. Each of them is so many seconds wide.
	From, Width int64
	Columns     int
	// Rows bounds the rows.
	Rows int
	// Start and End bound the keys; an empty End is beyond the last.
	Start, End []byte
}

// end is where the last column ends.
func (q *Query) end() int64 { return q.From + q.Width*int64(q.Columns) }

// check refuses a query that no node asks.
func (q *Query) check() error {
	oldest := int64(tiers[len(tiers)-1].kept) * tiers[len(tiers)-1].width
	switch {
	case q.Columns < 1 || q.Columns > MaxColumns || q.Rows < 1 || q.Rows > MaxRows:
		return fmt.Errorf("heat: a map of %d columns and %d rows", q.Columns, q.Rows)
	case q.Width < minute || q.Width%minute != 0 || q.Width > 2*oldest || q.From < 0 || q.From%q.Width != 0 || q.From > 1<<60:
		return fmt.Errorf("heat: columns of %d seconds from %d on", q.Width, q.From)
	case len(q.Start) > maxKeyBytes || len(q.End) > maxKeyBytes || len(q.End) > 0 && bytes.Compare(q.Start, q.End) >= 0:
		return fmt.Errorf("heat: keys from %q to %q", q.Start, q.End)
	}
	return nil
}

// ErrNothing says that a query is for no time, or for no keys.
var ErrNothing = errors.New("nothing is asked for")

// Time is the time that somebody asks for. The zero value is the last six hours.
type Time struct {
	// From and To are where it begins and ends, in unix seconds by the clock of the node that is asked. Without To it ends
	// now.
	From, To int64
	// Last is how many seconds it is long, where it has no From. The asker's clock need not agree with the node's then.
	// 0 is six hours.
	Last int64
}

// bounds returns where the time begins and ends at a moment.
func (t Time) bounds(now int64) (from, to int64) {
	to = t.To
	if to <= 0 || to > now {
		to = now
	}
	if t.From > 0 {
		return t.From, to
	}
	last := t.Last
	if last <= 0 {
		last = tiers[0].width * int64(tiers[0].kept)
	}
	return max(0, to-last), to
}

// NewQuery returns the query for a time, at the moment now: of at most so many rows and columns. Columns are as narrow as they
// are stored for all of that time. Without rows or columns it has as many as it may have. Nothing is known of before 28
// days ago. Of long keys only the beginning counts. It fails with ErrNothing.
func NewQuery(now time.Time, t Time, rows, columns int, keys keyspace.Span) (Query, error) {
	bounded := func(n, most int) int {
		if n <= 0 {
			return most
		}
		return min(n, most)
	}
	q := Query{Rows: bounded(rows, MaxRows), Start: []byte(clip(keys.Start))}
	if q.End = []byte(clip(keys.End)); len(keys.End) > maxKeyBytes {
		q.End = []byte(after(string(q.End)))
	}
	present := now.Unix()
	from, to := t.bounds(present)
	if from > to {
		return q, fmt.Errorf("%w: it begins at %d, and ends at %d", ErrNothing, from, to)
	}
	if len(keys.End) > 0 && bytes.Compare(keys.Start, keys.End) >= 0 {
		return q, fmt.Errorf("%w: the keys begin at %q, and end at %q", ErrNothing, keys.Start, keys.End)
	}
	q.From, q.Width, q.Columns = times(present, from, to, int64(bounded(columns, MaxColumns)))
	return q, nil
}

// times returns the columns that show the time between two moments.
func times(now, from, to, most int64) (first, width int64, columns int) {
	tier := 0
	reach := func() int64 { return now - tiers[tier].width*int64(tiers[tier].kept) }
	for tier+1 < len(tiers) && from < reach() {
		tier++
	}
	from = max(0, from, reach())
	to = max(from, to)
	for factor := int64(1); ; factor++ {
		width = tiers[tier].width * factor
		first = from - from%width
		if n := (to-first)/width + 1; n <= most { // to itself is in the last one
			return first, width, int(n)
		}
	}
}

// Grid is a map: rows of keys, columns of time.
type Grid struct {
	// Starts are where the rows begin, ascending. The last one ends at End, or with the keyspace if End is empty.
	// There are no rows where nothing was served.
	Starts [][]byte
	End    []byte
	// Counts has one for each column of each row, row by row.
	Counts []Counts
}

// Merge returns the map of several nodes. All of them answer the query.
func (q *Query) Merge(grids ...*Grid) *Grid {
	bands := make([]band, 0, len(grids))
	for _, g := range grids {
		if len(g.Starts) == 0 {
			continue
		}
		b := band{width: q.Columns, counts: g.Counts}
		for _, s := range g.Starts {
			b.starts = append(b.starts, string(s))
		}
		if len(g.End) > 0 {
			b.starts = append(b.starts, string(g.End))
			b.counts = append(b.counts[:len(b.counts):len(b.counts)], make([]Counts, q.Columns)...)
		}
		bands = append(bands, b)
	}
	return q.grid(bands)
}

// grid makes the map that has its bounds.
func (q *Query) grid(bands []band) *Grid {
	for most := q.Rows; ; {
		t := fold(bands, keyspace.Span{Start: q.Start, End: q.End}, q.Columns, most)
		g := &Grid{End: []byte(t.end), Counts: t.counts}
		size := 0
		for _, s := range t.starts {
			g.Starts = append(g.Starts, []byte(s))
			size += len(s) + 3
		}
		for i := range g.Counts {
			size += g.Counts[i].size()
		}
		if size <= MaxGridBytes {
			return g
		}
		most = max(1, min(most-1, most*MaxGridBytes/size))
	}
}

// size is how many bytes the counts take as varints.
func (c Counts) size() int {
	var b [3 * binary.MaxVarintLen64]byte
	return len(c.append(b[:0]))
}

// gridJSON is how nodes send maps to one another. Counts are varints.
type gridJSON struct {
	Starts [][]byte `json:"starts"`
	End    []byte   `json:"end,omitempty"`
	Counts []byte   `json:"counts"`
}

// MarshalJSON implements json.Marshaler.
func (g *Grid) MarshalJSON() ([]byte, error) {
	j := gridJSON{Starts: g.Starts, End: g.End}
	for i := range g.Counts {
		j.Counts = g.Counts[i].append(j.Counts)
	}
	b, err := json.Marshal(j)
	if err != nil {
		return nil, fmt.Errorf("heat: map: %w", err)
	}
	return b, nil
}

// DecodeGrid reads the JSON form of a map that answers the query.
func (q *Query) DecodeGrid(b []byte) (*Grid, error) {
	var j gridJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return nil, fmt.Errorf("heat: map: %w", err)
	}
	if len(j.Starts) > q.Rows {
		return nil, fmt.Errorf("heat: map: %d rows, and %d were asked for", len(j.Starts), q.Rows)
	}
	for i, s := range j.Starts {
		if i > 0 && bytes.Compare(j.Starts[i-1], s) >= 0 {
			return nil, fmt.Errorf("heat: map: a row at %q follows one at %q", s, j.Starts[i-1])
		}
		if len(j.End) > 0 && bytes.Compare(s, j.End) >= 0 {
			return nil, fmt.Errorf("heat: map: a row at %q follows the end at %q", s, j.End)
		}
	}
	g := &Grid{Starts: j.Starts, End: j.End}
	r := wire.NewReader(j.Counts)
	for n := len(j.Starts) * q.Columns; len(g.Counts) < n && r.OK(); {
		g.Counts = append(g.Counts, readCounts(&r))
	}
	if err := r.End(); err != nil {
		return nil, fmt.Errorf("heat: map: %w", err)
	}
	return g, nil
}
