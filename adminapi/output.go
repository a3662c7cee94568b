package adminapi

import (
	"encoding/json"
	"fmt"
	"io"
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

// noteStale writes the note where it is due.
func noteStale(notes io.Writer, stale bool) error {
	if !stale {
		return nil
	}
	_, err := fmt.Fprintln(notes, staleNote)
	return err
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

// WriteDone prints that a command has done what it was asked for.
func WriteDone(w io.Writer, f Format, done string) error {
	if f == JSON {
		return writeJSON(w, struct {
			Done string `json:"done"`
		}{done})
	}
	_, err := fmt.Fprintln(w, done)
	return err
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
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
