package adminapi

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/skeindb/skein/api/adminpb"
)

// replicaPage is what the page of a range has of a replica's own state, which is shard.Status. It is not part of the API: a field that a node
// of another build does not send is left out of the page.
type replicaPage struct {
	Raft struct {
		Term                        uint64
		IsLeader, Asleep, Receiving bool
		Commit, Applied             uint64
	} `json:"raft"`
	Serving      bool   `json:"serving"`
	Disagrees    bool   `json:"disagrees"`
	LastRevision int64  `json:"last_revision"`
	Compacted    int64  `json:"compacted"`
	Keys         int64  `json:"keys"`
	Counted      bool   `json:"counted"`
	Bytes        int64  `json:"bytes"`
	Queued       int    `json:"queued"`
	Draining     bool   `json:"draining"`
	Merging      uint64 `json:"merging"`
	Locks        int    `json:"locks"`
	Leases       int    `json:"leases"`
	Load         *struct {
		Unsplit  string `json:"unsplit"`
		SplitKey []byte `json:"split_key"`
	} `json:"load"`
}

// does says what the replica does. Without a quorum of its range it may take itself for the leader still.
func (p *replicaPage) does(quorum bool) string {
	var words []string
	switch {
	case p.Disagrees:
		words = append(words, "disagrees with others")
	case p.Raft.Receiving:
		words = append(words, "receives a copy")
	case p.Serving && !quorum:
		words = append(words, "has led")
	case p.Serving:
		words = append(words, "leads")
	case p.Raft.IsLeader:
		words = append(words, "is about to lead")
	default:
		words = append(words, "follows")
	}
	if p.Draining {
		words = append(words, "hands over")
	}
	if p.Raft.Asleep {
		words = append(words, "asleep")
	}
	return strings.Join(words, ", ")
}

// WriteShow prints a range and its replicas: a page for people, or all that the replicas have said as JSON.
func WriteShow(w io.Writer, f Format, k KeyFormat, s *adminpb.RangeShowResponse) error {
	if f == JSON {
		return writeShowJSON(w, s)
	}
	pages := make([]*replicaPage, len(s.GetReplicas()))
	leader := -1
	for i, r := range s.GetReplicas() {
		p := &replicaPage{}
		if json.Unmarshal([]byte(r.GetStateJson()), p) != nil {
			continue // it has not answered
		}
		if pages[i] = p; p.Serving && (leader < 0 || p.Raft.Term > pages[leader].Raft.Term) {
			leader = i
		}
	}
	var lead *replicaPage
	if leader >= 0 {
		lead = pages[leader]
	}
	if err := writeFacts(w, rangeFacts(k, s.GetRange(), lead)); err != nil {
		return err
	}
	rows, notes := [][]string{{"NODE", "REPLICA", "ROLE", "DOES", "APPLIED", "BEHIND", "KEYS", "ON DISK", "WAITING"}}, []string(nil)
	for i, r := range s.GetReplicas() {
		row := []string{r.GetNode(), fmt.Sprint(r.GetReplicaId()), r.GetRole(), "?", "", "", "", "", ""}
		if p := pages[i]; p != nil {
			row[3], row[4], row[7] = p.does(len(lacks(s.GetRange())) == 0), fmt.Sprint(p.Raft.Applied), SizeText(p.Bytes)
			if lead != nil {
				row[5] = fmt.Sprint(max(lead.Raft.Commit, p.Raft.Applied) - p.Raft.Applied)
			}
			if p.Counted {
				row[6] = fmt.Sprint(p.Keys)
			}
			if p.Queued > 0 {
				row[8] = fmt.Sprint(p.Queued)
			}
		}
		if r.GetError() != "" {
			notes = append(notes, r.GetNode()+": "+r.GetError())
		}
		rows = append(rows, row)
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	for _, n := range notes {
		fmt.Fprintln(w, n)
	}
	return nil
}

// rangeFacts is what the page says of the range itself: pairs of a word and what it is. lead is nil without a leader.
func rangeFacts(k KeyFormat, r *adminpb.Range, lead *replicaPage) (facts [][2]string) {
	add := func(word, format string, args ...any) {
		facts = append(facts, [2]string{word, fmt.Sprintf(format, args...)})
	}
	add("range", "%d", r.GetId())
	add("keys", "from %s to %s", k.border(r.GetStart(), "the first one"), k.border(r.GetEnd(), "the last one"))
	switch {
	case r.GetLeader() == "":
		add("leader", "none")
	case lead != nil:
		add("leader", "%s, in term %d", r.GetLeader(), lead.Raft.Term)
	default:
		add("leader", "%s", r.GetLeader())
	}
	add("state", "%s", r.GetState())
	if who := lacks(r); len(who) > 0 {
		add("waits for", "%s", strings.Join(who, ", "))
	}
	add("live keys", "%s", keysText(r))
	add("on disk", "%s", SizeText(r.GetBytes()))
	if r.GetLeader() != "" {
		add("load", "%.1f writes/s with %s/s, %.1f reads/s", r.GetWritesPerSecond(), SizeText(int64(r.GetWriteBytesPerSecond())), r.GetReadsPerSecond())
	}
	if lead != nil {
		add("revisions", "compacted at %d, last write at %d", lead.Compacted, lead.LastRevision)
		if lead.Locks > 0 {
			add("locks", "%d, of transactions over several ranges", lead.Locks)
		}
		if lead.Leases > 0 {
			add("leases", "%d have keys here", lead.Leases)
		}
		if l := lead.Load; l != nil && l.Unsplit != "" {
			add("not split", "%s", l.Unsplit)
		}
		if l := lead.Load; l != nil && len(l.SplitKey) > 0 {
			add("splits at", "%s", k.Text(l.SplitKey))
		}
		if lead.Merging != 0 {
			add("merges with", "range %d", lead.Merging)
		}
	}
	add("generation", "%d", r.GetGeneration())
	if r.GetKept() {
		add("kept", "yes: its first key was set by command")
	}
	if o := r.GetOperation(); o != nil {
		add("operation", "%s: %s", operationText(o), o.GetWhy())
	}
	return facts
}

// lacks names what a range without a quorum waits for: nodes that are silent, and replicas in quarantine. It is empty for
// all other ranges.
func lacks(r *adminpb.Range) []string {
	who := slices.Clone(r.GetWaitsFor())
	for _, m := range r.GetMembers() {
		if r.GetState() == StateNoQuorum && m.GetQuarantine() != "" {
			who = append(who, m.GetNode()+" (in quarantine)")
		}
	}
	return who
}

// writeFacts prints pairs of a word and what it is.
func writeFacts(w io.Writer, facts [][2]string) error {
	width := 0
	for _, f := range facts {
		width = max(width, len(f[0]))
	}
	for _, f := range facts {
		if _, err := fmt.Fprintf(w, "%-*s  %s\n", width, f[0], f[1]); err != nil {
			return err
		}
	}
	return nil
}

func writeShowJSON(w io.Writer, s *adminpb.RangeShowResponse) error {
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
	return writeJSON(w, out)
}
