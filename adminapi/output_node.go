package adminapi

import (
	"encoding/base64"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// nodeJSON is a node as -w json prints it; the order of the fields is part of the output.
// Since is absent where nobody knows it.
type nodeJSON struct {
	ID         string            `json:"id"`
	Name       string            `json:"name"`
	PeerURLs   []string          `json:"peer_urls"`
	ClientURLs []string          `json:"client_urls"`
	State      string            `json:"state"`
	Since      string            `json:"since,omitempty"`
	Leaves     bool              `json:"leaves,omitempty"`
	Attributes map[string]string `json:"attributes"`
	Alive      bool              `json:"alive"`
	Ranges     int64             `json:"ranges"`
	Leaders    int64             `json:"leaders"`
	Bytes      int64             `json:"bytes"`
	Placement  string            `json:"placement,omitempty"`
	// Quarantined counts its replicas in quarantine.
	Quarantined int64 `json:"quarantined,omitempty"`
}

func nodeToJSON(n *adminpb.Node) nodeJSON {
	out := nodeJSON{
		ID: n.GetId(), Name: n.GetName(), PeerURLs: list(n.GetPeerUrls()), ClientURLs: list(n.GetClientUrls()),
		State: n.GetState(), Since: since(n), Leaves: n.GetLeaves(), Attributes: map[string]string{}, Alive: n.GetAlive(),
		Ranges: n.GetRanges(), Leaders: n.GetLeaders(), Bytes: n.GetBytes(), Placement: placementText(n),
		Quarantined: n.GetQuarantined(),
	}
	for _, a := range n.GetAttributes() {
		out.Attributes[a.GetKey()] = a.GetValue()
	}
	return out
}

// StateDead is the state of a node that is to serve, and that nobody hears. It is so since it was heard last.
const StateDead = "dead"

// stateText says what the node is to the cluster, and whether it leaves. A node that has something left to
// give up is not decommissioned yet.
func stateText(n *adminpb.Node, and string) string {
	state := n.GetState()
	if givesUp(n) {
		state = "decommissioning"
	}
	if state == StateDead && n.GetSinceUnixMs() > 0 {
		silent := time.Since(time.UnixMilli(n.GetSinceUnixMs())) //nolint:forbidigo // the command's clock, not a node's
		state += " since " + max(0, silent).Round(time.Second).String()
	}
	if n.GetLeaves() {
		return state + and + "leaves"
	}
	return state
}

// givesUp reports whether a decommissioned node has something left to give up.
func givesUp(n *adminpb.Node) bool {
	return n.GetState() == "decommissioned" && (n.GetRanges() > 0 || n.GetPlacement())
}

// since says when a node became what it is, "" where nobody knows.
func since(n *adminpb.Node) string { return when(n.GetSinceUnixMs()) }

func when(unixMillis int64) string {
	if unixMillis == 0 {
		return ""
	}
	return time.UnixMilli(unixMillis).UTC().Format(time.RFC3339)
}

// placementText says what the node is to the placement group.
func placementText(n *adminpb.Node) string {
	switch {
	case n.GetPlacementLeader():
		return "leader"
	case n.GetPlacement():
		return "replica"
	}
	return ""
}

// bytesText says what the node's data take, "" where it does not say.
func bytesText(n *adminpb.Node) string {
	if n.GetState() == StateDead {
		return ""
	}
	return SizeText(n.GetBytes())
}

func attributesText(n *adminpb.Node) string {
	var as []string
	for _, a := range n.GetAttributes() {
		as = append(as, a.GetKey()+"="+a.GetValue())
	}
	return strings.Join(as, ",")
}

func writeNodeTable(w io.Writer, nodes []*adminpb.Node) error {
	rows := [][]string{{"ID", "NAME", "STATE", "SINCE", "ALIVE", "ATTRIBUTES", "RANGES", "LEADERS", "PLACEMENT", "ON DISK", "PEER URLS", "CLIENT URLS"}}
	for _, n := range nodes {
		rows = append(rows, []string{
			n.GetId(), n.GetName(), stateText(n, ", "), since(n), strconv.FormatBool(n.GetAlive()), attributesText(n),
			fmt.Sprint(n.GetRanges()), fmt.Sprint(n.GetLeaders()), placementText(n), bytesText(n),
			strings.Join(n.GetPeerUrls(), ","), strings.Join(n.GetClientUrls(), ","),
		})
	}
	return writeTable(w, rows)
}

// WriteNodes prints nodes, and on notes what a table has no place for.
func WriteNodes(w, notes io.Writer, f Format, l *adminpb.NodeListResponse) error {
	if f == JSON {
		out := struct {
			Nodes []nodeJSON `json:"nodes"`
			Stale bool       `json:"stale,omitempty"`
		}{[]nodeJSON{}, l.GetStale()}
		for _, n := range l.GetNodes() {
			out.Nodes = append(out.Nodes, nodeToJSON(n))
		}
		return writeJSON(w, out)
	}
	if err := noteStale(notes, l.GetStale()); err != nil {
		return err
	}
	for _, n := range l.GetNodes() {
		if k := n.GetQuarantined(); k > 0 {
			if _, err := fmt.Fprintf(notes, "%s has replicas in quarantine (%d): skein node show %s says why\n", n.GetName(), k, n.GetName()); err != nil {
				return err
			}
		}
	}
	return writeNodeTable(w, l.GetNodes())
}

// WriteNode prints one node.
func WriteNode(w io.Writer, f Format, n *adminpb.Node) error {
	if f == JSON {
		return writeJSON(w, nodeToJSON(n))
	}
	return writeNodeTable(w, []*adminpb.Node{n})
}

// refusalJSON is why something cannot be asked of a node.
type refusalJSON struct {
	Reason   string `json:"reason"`
	NextStep string `json:"next_step"`
}

func refusalToJSON(r *adminpb.Refusal) *refusalJSON {
	if r == nil {
		return nil
	}
	return &refusalJSON{r.GetReason(), r.GetNextStep()}
}

// WriteNodeShow prints a node, its replicas and which changes of it are possible. Notes get what
// has no place in a table.
func WriteNodeShow(w, notes io.Writer, f Format, k KeyFormat, s *adminpb.NodeShowResponse) error {
	if f == JSON {
		return writeNodeShowJSON(w, s)
	}
	if err := noteStale(notes, s.GetStale()); err != nil {
		return err
	}
	if err := writeNodeTable(w, []*adminpb.Node{s.GetNode()}); err != nil {
		return err
	}
	rows := [][]string{{"RANGE", "START", "END", "ROLE", "LEADS", "ON DISK"}}
	for _, r := range s.GetRanges() {
		rows = append(rows, []string{
			fmt.Sprint(r.GetId()), k.border(r.GetStart(), ""), k.border(r.GetEnd(), ""), r.GetRole(), strconv.FormatBool(r.GetLeads()), SizeText(r.GetBytes()),
		})
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	if len(s.GetQuarantined()) > 0 {
		rows := [][]string{{"IN QUARANTINE", "REPLICA", "SINCE", "WHY", "OUTLOOK"}}
		for _, q := range s.GetQuarantined() {
			rows = append(rows, []string{"range " + fmt.Sprint(q.GetRange()), fmt.Sprint(q.GetReplicaId()), when(q.GetSinceUnixMs()), q.GetReason(), q.GetOutlook()})
		}
		if err := writeTable(w, rows); err != nil {
			return err
		}
	}
	if len(s.GetOperations()) > 0 {
		if err := writeOperationTable(w, s.GetOperations()); err != nil {
			return err
		}
	}
	for _, can := range []struct {
		what    NodeChange
		from    []string
		under   string
		refused *adminpb.Refusal
	}{
		{Drain, []string{"serving", StateDead}, "draining", s.GetDrain()},
		{Decommission, []string{"serving", StateDead, "draining", "learner"}, "decommissioned", s.GetDecommission()},
	} {
		text, r := "not possible now", can.refused
		switch state := s.GetNode().GetState(); {
		case state == can.under && heldUp(s, can.what) != nil:
			text = "held up"
		case !slices.Contains(can.from, state):
			continue
		case r == nil:
			text = "possible"
		}
		if r != nil {
			text += fmt.Sprintf(": %s\n  next: %s", r.GetReason(), r.GetNextStep())
		}
		if _, err := fmt.Fprintf(w, "%s: %s\n", can.what, text); err != nil {
			return err
		}
	}
	return nil
}

func writeNodeShowJSON(w io.Writer, s *adminpb.NodeShowResponse) error {
	type held struct {
		Range       uint64 `json:"range"`
		Start       string `json:"start"`
		StartBase64 string `json:"start_base64"`
		End         string `json:"end"`
		EndBase64   string `json:"end_base64"`
		Role        string `json:"role"`
		Leads       bool   `json:"leads"`
		DiskBytes   int64  `json:"bytes"`
	}
	type quarantine struct {
		Range   uint64 `json:"range"`
		Replica uint64 `json:"replica_id"`
		Since   string `json:"since"`
		Reason  string `json:"reason"`
		Outlook string `json:"outlook"`
	}
	out := struct {
		Node         nodeJSON        `json:"node"`
		Ranges       []held          `json:"ranges"`
		Quarantined  []quarantine    `json:"quarantined,omitempty"`
		Operations   []operationJSON `json:"operations"`
		Drain        *refusalJSON    `json:"drain_refused,omitempty"`
		Decommission *refusalJSON    `json:"decommission_refused,omitempty"`
		Stale        bool            `json:"stale,omitempty"`
	}{nodeToJSON(s.GetNode()), []held{}, nil, []operationJSON{}, refusalToJSON(s.GetDrain()), refusalToJSON(s.GetDecommission()), s.GetStale()}
	for _, r := range s.GetRanges() {
		out.Ranges = append(out.Ranges, held{
			r.GetId(), string(r.GetStart()), base64.StdEncoding.EncodeToString(r.GetStart()),
			string(r.GetEnd()), base64.StdEncoding.EncodeToString(r.GetEnd()), r.GetRole(), r.GetLeads(), r.GetBytes(),
		})
	}
	for _, q := range s.GetQuarantined() {
		out.Quarantined = append(out.Quarantined, quarantine{q.GetRange(), q.GetReplicaId(), when(q.GetSinceUnixMs()), q.GetReason(), q.GetOutlook()})
	}
	for _, o := range s.GetOperations() {
		out.Operations = append(out.Operations, operationToJSON(o))
	}
	return writeJSON(w, out)
}

// NodeProgress returns a line about what a node still holds, for an operator who waits until it is
// empty.
func NodeProgress(n *adminpb.Node) string {
	if n.GetState() == "removed" {
		return n.GetName() + " has left the cluster: it held nothing any more, and was removed"
	}
	holds := "holds"
	if givesUp(n) {
		holds = "still holds"
	}
	text := fmt.Sprintf("%s is %s: it %s %d replicas and leads %d ranges", n.GetName(), stateText(n, " and "), holds, n.GetRanges(), n.GetLeaders())
	switch {
	case n.GetPlacementLeader():
		text += ", and leads the placement group"
	case n.GetPlacement():
		text += ", and has a replica of the placement group"
	}
	return text
}

// heldUp returns why a change of a node does not progress, nil where nothing is
// known of that.
func heldUp(s *adminpb.NodeShowResponse, change NodeChange) *adminpb.Refusal {
	switch {
	case len(s.GetOperations()) > 0:
		return nil
	case change == Drain:
		return s.GetDrain()
	}
	return s.GetDecommission()
}
