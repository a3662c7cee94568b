package adminapi

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/skeindb/skein/api/adminpb"
)

// Format is how a command prints.
type Format string

// The formats.
const (
	Table Format = "table"
	JSON  Format = "json"
)

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
	State       string   `json:"state"`
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

// operationText says in a word or two what is being changed about a range.
func operationText(o *adminpb.Operation) string {
	if o == nil {
		return ""
	}
	text := fmt.Sprintf("%d %s", o.GetId(), o.GetKind())
	if o.GetFrom() != "" {
		text += " from " + o.GetFrom()
	}
	if o.GetTo() != "" {
		text += " to " + o.GetTo()
	}
	return text
}

// list makes an empty list of none: JSON tells the two apart.
func list(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// staleNote goes beside a table that is stale; JSON says it in a field.
const staleNote = "stale: no quorum answers; these are the nodes and ranges that the asked node knew last"

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

// noteStale writes the note where it is due.
func noteStale(notes io.Writer, stale bool) error {
	if !stale {
		return nil
	}
	_, err := fmt.Fprintln(notes, staleNote)
	return err
}

// WriteRanges prints ranges, and on notes what a table has no place for.
func WriteRanges(w, notes io.Writer, f Format, l *adminpb.RangeListResponse) error {
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
		if _, err := fmt.Fprintf(notes, missingNote, borderText(m.GetStart(), "the first one"), borderText(m.GetEnd(), "the last one")); err != nil {
			return err
		}
	}
	return writeRangeTable(w, l.GetRanges())
}

func writeRangeTable(w io.Writer, ranges []*adminpb.Range) error {
	rows := [][]string{{"ID", "GENERATION", "START", "END", "LEADER", "REPLICAS", "KEYS", "ON DISK", "STATE", "KEPT", "OPERATION"}}
	for _, r := range ranges {
		keys := strconv.FormatInt(r.GetKeys(), 10)
		if r.GetKeys() < 0 {
			keys = "counting"
		}
		kept := ""
		if r.GetKept() {
			kept = "yes"
		}
		rows = append(rows, []string{
			fmt.Sprint(r.GetId()), fmt.Sprint(r.GetGeneration()), keyText(r.GetStart()), keyText(r.GetEnd()),
			r.GetLeader(), replicasText(r), keys, fmt.Sprint(r.GetBytes()), r.GetState(), kept, operationText(r.GetOperation()),
		})
	}
	return writeTable(w, rows)
}

// operationJSON is an operation as -w json prints it.
type operationJSON struct {
	ID    uint64 `json:"id"`
	Range uint64 `json:"range"`
	Kind  string `json:"kind"`
	From  string `json:"from,omitempty"`
	To    string `json:"to,omitempty"`
	// Reason is absent in the answer of a node that does not tell it.
	Reason string `json:"reason,omitempty"`
	Why    string `json:"why"`
	Right  uint64 `json:"right,omitempty"`
	Phase  string `json:"phase,omitempty"`
}

func operationToJSON(o *adminpb.Operation) operationJSON {
	return operationJSON{o.GetId(), o.GetRange(), o.GetKind(), o.GetFrom(), o.GetTo(), o.GetReason(), o.GetWhy(), o.GetRight(), o.GetPhase()}
}

// pausedNote goes beside a table of operations while placement is paused; JSON says it in
// a field.
const pausedNote = "paused: placement decides nothing by itself (skein placement resume has it go on)"

// WriteOperations prints the operations under way, and on notes what a table has no
// place for.
func WriteOperations(w, notes io.Writer, f Format, l *adminpb.OperationListResponse) error {
	if f == JSON {
		out := struct {
			Operations []operationJSON `json:"operations"`
			Paused     bool            `json:"paused,omitempty"`
			Stale      bool            `json:"stale,omitempty"`
		}{[]operationJSON{}, l.GetPaused(), l.GetStale()}
		for _, o := range l.GetOperations() {
			out.Operations = append(out.Operations, operationToJSON(o))
		}
		return writeJSON(w, out)
	}
	if l.GetStale() {
		if _, err := fmt.Fprintln(notes, stalePlacementNote); err != nil {
			return err
		}
	}
	if l.GetPaused() {
		if _, err := fmt.Fprintln(notes, pausedNote); err != nil {
			return err
		}
	}
	return writeOperationTable(w, l.GetOperations())
}

func writeOperationTable(w io.Writer, ops []*adminpb.Operation) error {
	rows := [][]string{{"ID", "RANGE", "KIND", "FROM", "TO", "REASON", "WHY"}}
	for _, o := range ops {
		kind := o.GetKind()
		if o.GetRight() != 0 {
			kind = fmt.Sprintf("%s with %d (%s)", kind, o.GetRight(), o.GetPhase())
		}
		rows = append(rows, []string{fmt.Sprint(o.GetId()), operationOn(o), kind, o.GetFrom(), o.GetTo(), o.GetReason(), o.GetWhy()})
	}
	return writeTable(w, rows)
}

// WriteSplit prints the two halves of a split.
func WriteSplit(w io.Writer, f Format, s *adminpb.RangeSplitResponse) error {
	if f == JSON {
		return writeJSON(w, struct {
			Left  rangeJSON `json:"left"`
			Right rangeJSON `json:"right"`
		}{toJSON(s.GetLeft()), toJSON(s.GetRight())})
	}
	return writeRangeTable(w, []*adminpb.Range{s.GetLeft(), s.GetRight()})
}

// WriteShow prints a range and the state of its replicas.
func WriteShow(w io.Writer, f Format, s *adminpb.RangeShowResponse) error {
	type replica struct {
		Node      string          `json:"node"`
		ReplicaID uint64          `json:"replica_id"`
		Role      string          `json:"role"`
		State     json.RawMessage `json:"state"`
		Error     string          `json:"error,omitempty"`
	}
	out := struct {
		Range    rangeJSON `json:"range"`
		Replicas []replica `json:"replicas"`
	}{toJSON(s.GetRange()), []replica{}}
	for _, r := range s.GetReplicas() {
		state := json.RawMessage(r.GetStateJson())
		if !json.Valid(state) {
			state = json.RawMessage("null")
		}
		out.Replicas = append(out.Replicas, replica{r.GetNode(), r.GetReplicaId(), r.GetRole(), state, r.GetError()})
	}
	if f == JSON {
		return writeJSON(w, out)
	}
	if err := writeRangeTable(w, []*adminpb.Range{s.GetRange()}); err != nil {
		return err
	}
	for _, r := range out.Replicas {
		text, err := json.MarshalIndent(r.State, "", "  ")
		if err != nil {
			return fmt.Errorf("state of replica %d on %s: %w", r.ReplicaID, r.Node, err)
		}
		if r.Error != "" {
			text = []byte(r.Error)
		}
		if _, err := fmt.Fprintf(w, "\nreplica %d on %s (%s):\n%s\n", r.ReplicaID, r.Node, r.Role, text); err != nil {
			return err
		}
	}
	return nil
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// keyText writes a key for people, with the escapes that --initial-split-keys reads.
func keyText(key []byte) string {
	var b strings.Builder
	for len(key) > 0 {
		r, n := utf8.DecodeRune(key)
		switch {
		case r == '\\':
			b.WriteString(`\\`)
		case r == utf8.RuneError && n == 1 || !strconv.IsPrint(r):
			for _, c := range key[:n] {
				fmt.Fprintf(&b, `\x%02x`, c)
			}
		default:
			b.WriteRune(r)
		}
		key = key[n:]
	}
	return b.String()
}

// borderText is keyText in quotes, or other words for no key.
func borderText(key []byte, none string) string {
	if len(key) == 0 {
		return none
	}
	return `"` + keyText(key) + `"`
}

// writeTable prints rows, the first of them as a header, in etcdctl's kind of box.
func writeTable(w io.Writer, rows [][]string) error {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	rule := func() {
		for _, n := range width {
			b.WriteString("+" + strings.Repeat("-", n+2))
		}
		b.WriteString("+\n")
	}
	rule()
	for i, row := range rows {
		for j, cell := range row {
			b.WriteString("| " + cell + strings.Repeat(" ", width[j]-utf8.RuneCountInString(cell)+1))
		}
		b.WriteString("|\n")
		if i == 0 {
			rule()
		}
	}
	if len(rows) > 1 {
		rule()
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// operationOn says for a table what an operation is on.
func operationOn(o *adminpb.Operation) string {
	if o.GetRange() == 0 {
		return "placement"
	}
	return fmt.Sprint(o.GetRange())
}
