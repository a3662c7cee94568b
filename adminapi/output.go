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
}

func toJSON(r *adminpb.Range) rangeJSON {
	return rangeJSON{
		ID: r.GetId(), Generation: r.GetGeneration(),
		Start: string(r.GetStart()), StartBase64: base64.StdEncoding.EncodeToString(r.GetStart()),
		End: string(r.GetEnd()), EndBase64: base64.StdEncoding.EncodeToString(r.GetEnd()),
		Leader: r.GetLeader(), Replicas: list(r.GetReplicas()), Keys: r.GetKeys(), DiskBytes: r.GetBytes(), State: r.GetState(),
	}
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

// WriteRanges prints ranges, and on notes what a table has no place for.
func WriteRanges(w, notes io.Writer, f Format, l *adminpb.RangeListResponse) error {
	if f == JSON {
		out := struct {
			Ranges []rangeJSON `json:"ranges"`
			Stale  bool        `json:"stale,omitempty"`
		}{[]rangeJSON{}, l.GetStale()}
		for _, r := range l.GetRanges() {
			out.Ranges = append(out.Ranges, toJSON(r))
		}
		return writeJSON(w, out)
	}
	if err := noteStale(notes, l.GetStale()); err != nil {
		return err
	}
	return writeRangeTable(w, l.GetRanges())
}

func writeRangeTable(w io.Writer, ranges []*adminpb.Range) error {
	rows := [][]string{{"ID", "GENERATION", "START", "END", "LEADER", "REPLICAS", "KEYS", "ON DISK", "STATE"}}
	for _, r := range ranges {
		keys := strconv.FormatInt(r.GetKeys(), 10)
		if r.GetKeys() < 0 {
			keys = "counting"
		}
		rows = append(rows, []string{
			fmt.Sprint(r.GetId()), fmt.Sprint(r.GetGeneration()), keyText(r.GetStart()), keyText(r.GetEnd()),
			r.GetLeader(), strings.Join(r.GetReplicas(), ","), keys, fmt.Sprint(r.GetBytes()), r.GetState(),
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
	Why   string `json:"why"`
	Right uint64 `json:"right,omitempty"`
	Phase string `json:"phase,omitempty"`
}

// WriteOperations prints the operations under way.
func WriteOperations(w io.Writer, f Format, ops []*adminpb.Operation) error {
	if f == JSON {
		out := struct {
			Operations []operationJSON `json:"operations"`
		}{[]operationJSON{}}
		for _, o := range ops {
			out.Operations = append(out.Operations, operationJSON{o.GetId(), o.GetRange(), o.GetKind(), o.GetFrom(), o.GetTo(), o.GetWhy(), o.GetRight(), o.GetPhase()})
		}
		return writeJSON(w, out)
	}
	rows := [][]string{{"ID", "RANGE", "KIND", "FROM", "TO", "WHY"}}
	for _, o := range ops {
		kind := o.GetKind()
		if o.GetRight() != 0 {
			kind = fmt.Sprintf("%s with %d (%s)", kind, o.GetRight(), o.GetPhase())
		}
		rows = append(rows, []string{fmt.Sprint(o.GetId()), fmt.Sprint(o.GetRange()), kind, o.GetFrom(), o.GetTo(), o.GetWhy()})
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

// WriteNodes prints nodes, and on notes what a table has no place for.
func WriteNodes(w, notes io.Writer, f Format, l *adminpb.NodeListResponse) error {
	if f == JSON {
		type node struct {
			ID         string   `json:"id"`
			Name       string   `json:"name"`
			PeerURLs   []string `json:"peer_urls"`
			ClientURLs []string `json:"client_urls"`
			Alive      bool     `json:"alive"`
			Ranges     int64    `json:"ranges"`
			Leaders    int64    `json:"leaders"`
			Bytes      int64    `json:"bytes"`
		}
		out := struct {
			Nodes []node `json:"nodes"`
			Stale bool   `json:"stale,omitempty"`
		}{[]node{}, l.GetStale()}
		for _, n := range l.GetNodes() {
			out.Nodes = append(out.Nodes, node{
				n.GetId(), n.GetName(), list(n.GetPeerUrls()), list(n.GetClientUrls()),
				n.GetAlive(), n.GetRanges(), n.GetLeaders(), n.GetBytes(),
			})
		}
		return writeJSON(w, out)
	}
	if err := noteStale(notes, l.GetStale()); err != nil {
		return err
	}
	rows := [][]string{{"ID", "NAME", "PEER URLS", "CLIENT URLS", "ALIVE", "RANGES", "LEADERS", "BYTES"}}
	for _, n := range l.GetNodes() {
		rows = append(rows, []string{
			n.GetId(), n.GetName(), strings.Join(n.GetPeerUrls(), ","), strings.Join(n.GetClientUrls(), ","),
			strconv.FormatBool(n.GetAlive()), fmt.Sprint(n.GetRanges()), fmt.Sprint(n.GetLeaders()), fmt.Sprint(n.GetBytes()),
		})
	}
	return writeTable(w, rows)
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
