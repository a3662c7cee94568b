package adminapi

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// HeatBackend is what the service asks of the node about which keys had how many requests when.
type HeatBackend interface {
	// Heat returns the heat map of all nodes that answer, also without a quorum.
	Heat(ctx context.Context, q *adminpb.HeatRequest) (*adminpb.HeatResponse, error)
}

func (s *server) Heat(ctx context.Context, q *adminpb.HeatRequest) (*adminpb.HeatResponse, error) {
	r, err := s.backend.Heat(ctx, q)
	if err != nil {
		return nil, grpcError("show the heat map", err, readAgain)
	}
	return r, nil
}

// Heat returns which keys had how many requests when.
func (c *Client) Heat(ctx context.Context, q *adminpb.HeatRequest) (*adminpb.HeatResponse, error) {
	return call(ctx, c, q, adminpb.AdminClient.Heat)
}

// heatRow is a row of a heat map over all of its time.
type heatRow struct {
	// at is its place in the map.
	at                   int
	start, end           []byte
	writes, reads, bytes uint64
}

func (r *heatRow) requests() uint64 { return r.writes + r.reads }

// heatRows returns the rows of a map, the hottest first.
func heatRows(r *adminpb.HeatResponse) []heatRow {
	rows := make([]heatRow, len(r.GetStarts()))
	sum := func(all []uint64, row int) (n uint64) {
		for column := range r.GetColumns() {
			n += all[row*len(r.GetColumns())+column]
		}
		return n
	}
	for i, start := range r.GetStarts() {
		rows[i] = heatRow{i, start, r.GetEnd(), sum(r.GetWrites(), i), sum(r.GetReads(), i), sum(r.GetBytes(), i)}
		if i > 0 {
			rows[i-1].end = start
		}
	}
	slices.SortStableFunc(rows, func(a, b heatRow) int { return cmp.Compare(b.requests(), a.requests()) })
	return rows
}

// heatJSON is a heat map as -w json prints it; the order of the fields is part of the output.
type heatJSON struct {
	// Columns are so many seconds wide. The first one begins at From.
	From    string            `json:"from"`
	Seconds uint32            `json:"seconds"`
	Columns int               `json:"columns"`
	Rows    []heatRowJSON     `json:"rows"`
	Missing map[string]string `json:"missing,omitempty"`
}

// heatRowJSON is a row, with a value for each column.
type heatRowJSON struct {
	spanJSON
	Writes []uint64 `json:"writes"`
	Reads  []uint64 `json:"reads"`
	Bytes  []uint64 `json:"bytes"`
}

// WriteHeat prints the hottest rows of a heat map over all of its time, at most so many of them, and on notes what a table
// has no place for. As JSON it prints the whole map, in the order of the keys.
func WriteHeat(w, notes io.Writer, f Format, k KeyFormat, top int, r *adminpb.HeatResponse) error {
	if n := len(r.GetStarts()) * len(r.GetColumns()); len(r.GetColumns()) == 0 || len(r.GetWrites()) != n || len(r.GetReads()) != n || len(r.GetBytes()) != n {
		return fmt.Errorf("a heat map of %d rows and %d columns has %d, %d and %d counts", len(r.GetStarts()), len(r.GetColumns()), len(r.GetWrites()), len(r.GetReads()), len(r.GetBytes()))
	}
	if r.GetUnixMs() == 0 { // who knows lengths of time says what time it is
		fmt.Fprintln(notes, "note: the asked node is of an earlier build, and shows six hours whatever time was asked for")
	}
	rows := heatRows(r)
	if f == JSON {
		return writeJSON(w, heatToJSON(r, rows))
	}
	for _, m := range r.GetMissing() {
		fmt.Fprintf(notes, "missing: what %s has served is not counted: %s\n", m.GetNode(), m.GetReason())
	}
	if len(rows) == 0 {
		fmt.Fprintln(notes, "nothing was served in that time")
		return nil
	}
	var all uint64
	for i := range rows {
		all += rows[i].requests()
	}
	table := [][]string{{"START", "END", "SHARE", "WRITES", "READS", "WRITTEN"}}
	for _, row := range rows[:min(len(rows), top)] {
		if row.requests() == 0 {
			break
		}
		table = append(table, []string{
			k.border(row.start, ""), k.border(row.end, ""), fmt.Sprintf("%.1f%%", 100*float64(row.requests())/float64(all)),
			strconv.FormatUint(row.writes, 10), strconv.FormatUint(row.reads, 10), SizeText(int64(row.bytes)),
		})
	}
	return writeTable(w, table)
}

func heatToJSON(r *adminpb.HeatResponse, rows []heatRow) *heatJSON {
	first := r.GetColumns()[0]
	j := &heatJSON{
		From: time.Unix(first.GetStartUnixSeconds(), 0).UTC().Format(time.RFC3339), Seconds: first.GetSeconds(), Columns: len(r.GetColumns()), Rows: []heatRowJSON{},
	}
	slices.SortFunc(rows, func(a, b heatRow) int { return cmp.Compare(a.at, b.at) })
	for _, row := range rows {
		of := func(all []uint64) []uint64 { return all[row.at*j.Columns : (row.at+1)*j.Columns] }
		j.Rows = append(j.Rows, heatRowJSON{
			spanJSON{string(row.start), base64.StdEncoding.EncodeToString(row.start), string(row.end), base64.StdEncoding.EncodeToString(row.end)},
			of(r.GetWrites()), of(r.GetReads()), of(r.GetBytes()),
		})
	}
	for _, m := range r.GetMissing() {
		if j.Missing == nil {
			j.Missing = map[string]string{}
		}
		j.Missing[m.GetNode()] = m.GetReason()
	}
	return j
}
