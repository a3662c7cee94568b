package adminapi

import (
	"bytes"
	"cmp"
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/skeindb/skein/api/adminpb"
)

// StateNoQuorum is the state of a range whose voters are not heard, or in quarantine, so that those left are no majority.
// Nobody leads it then, whatever a node says of itself.
const StateNoQuorum = "no quorum"

// rangeJSON is a range as -w json prints it; the order of the fields is part of the
// output. Keys that are no text are exact in the base64 fields alone. DiskBytes (bytes)
// are the leader's, and 0 for a range that is in its memory alone.
type rangeJSON struct {
	ID          uint64   `json:"id"`
	Generation  uint64   `json:"generation"`
	Start       string   `json:"start"`
	StartBase64 string   `json:"start_base64"`
	End         string   `json:"end"`
	EndBase64   string   `json:"end_base64"`
	Leader      string   `json:"leader"`
	Replicas    []string `json:"replicas"`
	Keys        int64    `json:"keys"`
	DiskBytes   int64    `json:"bytes"`
	// The load is what the leader serves, a second: 0 where there is none.
	Writes     float64 `json:"writes_per_second,omitempty"`
	Reads      float64 `json:"reads_per_second,omitempty"`
	WriteBytes float64 `json:"write_bytes_per_second,omitempty"`
	State      string  `json:"state"`
	// Kept says that the range is to begin where it does.
	Kept bool `json:"kept,omitempty"`
	// WaitsFor are the silent nodes for which a range without a quorum waits.
	WaitsFor []string `json:"waits_for,omitempty"`
	// ConfIndex, Members and Operation are absent in an answer that knows nothing of them.
	ConfIndex uint64         `json:"conf_index,omitempty"`
	Members   []memberJSON   `json:"members,omitempty"`
	Operation *operationJSON `json:"operation,omitempty"`
}

// memberJSON is one of a range's replicas.
type memberJSON struct {
	Node      string `json:"node"`
	ReplicaID uint64 `json:"replica_id"`
	Role      string `json:"role"`
	// Quarantine says why the replica is in quarantine.
	Quarantine string `json:"quarantine,omitempty"`
}

func toJSON(r *adminpb.Range) rangeJSON {
	out := rangeJSON{
		ID: r.GetId(), Generation: r.GetGeneration(),
		Start: string(r.GetStart()), StartBase64: base64.StdEncoding.EncodeToString(r.GetStart()),
		End: string(r.GetEnd()), EndBase64: base64.StdEncoding.EncodeToString(r.GetEnd()),
		Leader: r.GetLeader(), Replicas: list(r.GetReplicas()), Keys: r.GetKeys(), DiskBytes: r.GetBytes(), State: r.GetState(),
		Writes: r.GetWritesPerSecond(), Reads: r.GetReadsPerSecond(), WriteBytes: r.GetWriteBytesPerSecond(),
		ConfIndex: r.GetConfIndex(), Kept: r.GetKept(), WaitsFor: r.GetWaitsFor(),
	}
	for _, m := range r.GetMembers() {
		out.Members = append(out.Members, memberJSON{m.GetNode(), m.GetReplicaId(), m.GetRole(), m.GetQuarantine()})
	}
	if o := r.GetOperation(); o != nil {
		j := operationToJSON(o)
		out.Operation = &j
	}
	return out
}

// replicasText names the nodes of a range, and what those are that do not simply vote.
func replicasText(r *adminpb.Range) string {
	if len(r.GetMembers()) == 0 {
		return strings.Join(r.GetReplicas(), ",")
	}
	var names []string
	for _, m := range r.GetMembers() {
		name := m.GetNode()
		if m.GetRole() != "voter" {
			name += " (" + m.GetRole() + ")"
		}
		if m.GetQuarantine() != "" {
			name += " (quarantine)"
		}
		names = append(names, name)
	}
	return strings.Join(names, ",")
}

// missingNote goes beside a table of ranges for each span that is in none; JSON says it in a
// field.
const missingNote = "missing: nobody could say who holds the keys from %s to %s now, as behind a split or a merge that not all have heard of; try again\n"

// spanJSON is keys as -w json prints them, exact in the base64 fields alone.
type spanJSON struct {
	Start       string `json:"start"`
	StartBase64 string `json:"start_base64"`
	End         string `json:"end"`
	EndBase64   string `json:"end_base64"`
}

// WriteRanges prints ranges, and on notes what a table has no place for.
func WriteRanges(w, notes io.Writer, f Format, k KeyFormat, l *adminpb.RangeListResponse) error {
	if f == JSON {
		out := struct {
			Ranges  []rangeJSON `json:"ranges"`
			Stale   bool        `json:"stale,omitempty"`
			Missing []spanJSON  `json:"missing,omitempty"`
		}{[]rangeJSON{}, l.GetStale(), nil}
		for _, r := range l.GetRanges() {
			out.Ranges = append(out.Ranges, toJSON(r))
		}
		for _, m := range l.GetMissing() {
			out.Missing = append(out.Missing, spanJSON{
				string(m.GetStart()), base64.StdEncoding.EncodeToString(m.GetStart()),
				string(m.GetEnd()), base64.StdEncoding.EncodeToString(m.GetEnd()),
			})
		}
		return writeJSON(w, out)
	}
	if err := noteStale(notes, l.GetStale()); err != nil {
		return err
	}
	for _, m := range l.GetMissing() {
		if _, err := fmt.Fprintf(notes, missingNote, k.border(m.GetStart(), "the first one"), k.border(m.GetEnd(), "the last one")); err != nil {
			return err
		}
	}
	return writeRangeTable(w, k, l.GetRanges())
}

// SortRanges puts ranges in an order: by key, by size (the largest first) or by load (the busiest first).
func SortRanges(ranges []*adminpb.Range, by string) error {
	load := func(r *adminpb.Range) float64 { return r.GetWritesPerSecond() + r.GetReadsPerSecond() }
	compare, ok := map[string]func(a, b *adminpb.Range) int{
		"key":  func(a, b *adminpb.Range) int { return bytes.Compare(a.GetStart(), b.GetStart()) },
		"size": func(a, b *adminpb.Range) int { return cmp.Compare(b.GetBytes(), a.GetBytes()) },
		"load": func(a, b *adminpb.Range) int { return cmp.Compare(load(b), load(a)) },
	}[by]
	if !ok {
		return fmt.Errorf("--sort %s: there are key, size and load", by)
	}
	slices.SortStableFunc(ranges, compare)
	return nil
}

func writeRangeTable(w io.Writer, k KeyFormat, ranges []*adminpb.Range) error {
	rows := [][]string{{"ID", "START", "END", "LEADER", "REPLICAS", "KEYS", "ON DISK", "WRITES/S", "READS/S", "STATE", "KEPT", "OPERATION"}}
	for _, r := range ranges {
		kept := ""
		if r.GetKept() {
			kept = "yes"
		}
		rows = append(rows, []string{
			fmt.Sprint(r.GetId()), k.border(r.GetStart(), ""), k.border(r.GetEnd(), ""), r.GetLeader(), replicasText(r), keysText(r), SizeText(r.GetBytes()),
			perSecond(r.GetWritesPerSecond()), perSecond(r.GetReadsPerSecond()), r.GetState(), kept, operationText(r.GetOperation()),
		})
	}
	return writeTable(w, rows)
}

// keysText says how many keys a range has, as far as that is counted.
func keysText(r *adminpb.Range) string {
	if r.GetKeys() < 0 {
		return "counting"
	}
	return strconv.FormatInt(r.GetKeys(), 10)
}

// WriteSplit prints the two halves of a split.
func WriteSplit(w io.Writer, f Format, k KeyFormat, s *adminpb.RangeSplitResponse) error {
	if f == JSON {
		return writeJSON(w, struct {
			Left  rangeJSON `json:"left"`
			Right rangeJSON `json:"right"`
		}{toJSON(s.GetLeft()), toJSON(s.GetRight())})
	}
	return writeRangeTable(w, k, []*adminpb.Range{s.GetLeft(), s.GetRight()})
}
