package heat

import (
	"slices"

	"github.com/skeindb/skein/keyspace"
)

// band is some columns beside one another with the same cells. Each cell reaches to the start of the next one, the
// last to the end of the keyspace.
type band struct {
	// starts are where the cells begin, ascending.
	starts []string
	// column is the first of its columns within the map, width how many it has.
	column, width int
	// counts has width of them for each cell.
	counts []Counts
}

// weight is that of a cell in all columns.
func (b *band) weight(cell int) uint64 {
	var sum Counts
	for _, c := range b.counts[cell*b.width : (cell+1)*b.width] {
		sum.add(c)
	}
	return sum.weight()
}

// cells is what fold makes: rows of cells.
type cells struct {
	// starts are where the rows begin. The last one ends at end, or with the keyspace if end is empty.
	starts []string
	end    string
	// counts has one for each column of each row.
	counts []Counts
}

// fold puts bands into one map of so many columns and at most so many rows, which has only keys of the span. Where
// there are more different cells than rows it joins neighbours, so that the hottest joined row is as cold as possible. A
// hotter cell stays alone. Rows without any load at both ends of the map are left out. A
// cell that begins or ends within the keys of another counts for equal parts of that one.
//
// most is at least 1.
func fold(bands []band, within keyspace.Span, columns, most int) cells {
	return lay(bands, within).fold(columns, most)
}

// layout is what bands have between their points, whatever the number of rows.
type layout struct {
	bands   []band
	points  []string
	index   map[string]int32
	weights []uint64
	// from and to bound the points with load.
	from, to int
}

func lay(bands []band, within keyspace.Span) *layout {
	l := &layout{bands: bands}
	l.points, l.index = pointsOf(bands, within)
	l.weights = weigh(bands, l.index, len(l.points))
	l.to = len(l.points)
	if len(within.Start) > 0 {
		l.from = int(l.index[string(within.Start)])
	}
	if len(within.End) > 0 {
		l.to = int(l.index[string(within.End)])
	}
	for l.from < l.to && l.weights[l.from] == 0 {
		l.from++
	}
	for l.from < l.to && l.weights[l.to-1] == 0 {
		l.to--
	}
	return l
}

func (l *layout) fold(columns, most int) cells {
	if l.from == l.to {
		return cells{}
	}
	// rows has the first point of each row, and the end of the last.
	rows := append(join(l.weights[l.from:l.to], most), l.to-l.from)
	out := cells{counts: make([]Counts, (len(rows)-1)*columns)}
	rowOf := make([]int32, len(l.points))
	for row := range len(rows) - 1 {
		rows[row] += l.from
		out.starts = append(out.starts, l.points[rows[row]])
		for p := rows[row]; p < rows[row+1]+l.from; p++ {
			rowOf[p] = int32(row)
		}
	}
	rows[len(rows)-1] = l.to
	if l.to < len(l.points) {
		out.end = l.points[l.to]
	}
	for i := range l.bands {
		l.bands[i].place(&out, columns, l.index, rows, rowOf)
	}
	return out
}

// pointsOf returns where a cell of any band begins, and the span, in order and each once, and their places.
func pointsOf(bands []band, within keyspace.Span) (points []string, index map[string]int32) {
	n := 0
	for i := range bands {
		n = max(n, len(bands[i].starts))
	}
	index = make(map[string]int32, n)
	note := func(p string) {
		if _, ok := index[p]; !ok {
			index[p] = 0
			points = append(points, p)
		}
	}
	for i := range bands {
		for _, s := range bands[i].starts {
			note(s)
		}
	}
	if len(within.Start) > 0 {
		note(string(within.Start))
	}
	if len(within.End) > 0 {
		note(string(within.End))
	}
	slices.Sort(points)
	for i, p := range points {
		index[p] = int32(i)
	}
	return points, index
}

// bounds returns the points of a cell, from the first to before the last.
func (b *band) bounds(cell int, index map[string]int32, points int) (from, to int) {
	from, to = int(index[b.starts[cell]]), points
	if cell+1 < len(b.starts) {
		to = int(index[b.starts[cell+1]])
	}
	return from, to
}

// weigh returns how hot it is between each two points. It is 0 only where nothing is.
func weigh(bands []band, index map[string]int32, points int) []uint64 {
	rises := make([]uint64, points+1) // from one to the next; what falls wraps around
	for i := range bands {
		b := &bands[i]
		for cell := range b.starts {
			w := b.weight(cell)
			if w == 0 {
				continue
			}
			from, to := b.bounds(cell, index, points)
			w = max(1, w/uint64(to-from))
			rises[from] += w
			rises[to] -= w
		}
	}
	var sum uint64
	for i := range points {
		sum += rises[i]
		rises[i] = sum
	}
	return rises[:points]
}

// join returns where rows begin: at most so many, and the hottest of them that is joined of several as cold as it can
// be. Neighbours without any load are one row.
func join(weights []uint64, most int) []int {
	rows := func(bar uint64, begin func(at int)) (n int) {
		var sum uint64
		for i, w := range weights {
			if i == 0 || sum+w > bar {
				sum = 0
				n++
				if begin != nil {
					begin(i)
				}
			}
			sum += w
		}
		return n
	}
	var low, high uint64
	for _, w := range weights {
		high += w
	}
	for low < high {
		if bar := low + (high-low)/2; rows(bar, nil) <= most {
			high = bar
		} else {
			low = bar + 1
		}
	}
	var begins []int
	rows(high, func(at int) { begins = append(begins, at) })
	return begins
}

// place adds the band's counts to the rows.
func (b *band) place(out *cells, columns int, index map[string]int32, rows []int, rowOf []int32) {
	first, end := rows[0], rows[len(rows)-1]
	for cell := range b.starts {
		if b.weight(cell) == 0 {
			continue
		}
		from, to := b.bounds(cell, index, len(rowOf))
		counts := b.counts[cell*b.width : (cell+1)*b.width]
		for p := max(from, first); p < min(to, end); {
			row := int(rowOf[p])
			next := min(rows[row+1], to)
			at := out.counts[row*columns+b.column:]
			for i, c := range counts {
				if next-p != to-from {
					c = c.part(p-from, next-from, to-from)
				}
				at[i].add(c)
			}
			p = next
		}
	}
}
