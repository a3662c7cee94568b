package adminapi

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/skeindb/skein/api/adminpb"
)

// maxStatusOperations bounds the operations that the screen lists.
const maxStatusOperations = 8

// statusJSON is what skein status prints with -w json; the order of the fields is part of the output.
type statusJSON struct {
	Healthy  bool            `json:"healthy"`
	Asked    string          `json:"asked"`
	Silent   []EndpointError `json:"silent_endpoints,omitempty"`
	Stale    bool            `json:"stale,omitempty"`
	Ranges   int64           `json:"ranges"`
	NoQuorum struct {
		Ranges    int64 `json:"ranges"`
		Placement bool  `json:"placement"`
	} `json:"no_quorum"`
	Outages         []outageJSON     `json:"outages"`
	PlacementLeader string           `json:"placement_leader"`
	Replication     *replicationJSON `json:"replication,omitempty"`
	Nodes           []nodeStatusJSON `json:"nodes"`
	Operations      []operationJSON  `json:"operations"`
	Alarms          []alarmJSON      `json:"alarms"`
	ClusterVersion  uint32           `json:"cluster_version,omitempty"`
	Findings        []Finding        `json:"findings"`
}

type outageJSON struct {
	Placement   bool     `json:"placement,omitempty"`
	Ranges      int64    `json:"ranges,omitempty"`
	IDs         []uint64 `json:"first_ids,omitempty"`
	WaitsFor    []string `json:"waits_for"`
	Quarantined int64    `json:"quarantined,omitempty"`
}

type nodeStatusJSON struct {
	nodeJSON
	Build        string `json:"build,omitempty"`
	DiskCapacity int64  `json:"disk_capacity,omitempty"`
	DiskUsed     int64  `json:"disk_used,omitempty"`
	ClockAheadMs int64  `json:"clock_ahead_ms,omitempty"`
	FsyncP99Us   int64  `json:"fsync_p99_us,omitempty"`
	FsyncSlowMs  int64  `json:"fsync_slow_ms,omitempty"`
	FullMs       int64  `json:"full_ms,omitempty"`
	FullWhy      string `json:"full_why,omitempty"`
	Certificate  string `json:"certificate_file,omitempty"`
	CertLeftMs   int64  `json:"certificate_left_ms,omitempty"`
	Lagging      int64  `json:"lagging_watchers,omitempty"`
	Error        string `json:"error,omitempty"`
}

type alarmJSON struct {
	Type   string `json:"type"`
	Node   string `json:"node"`
	Sticky bool   `json:"sticky,omitempty"`
}

// WriteStatus prints the cluster at a glance, with what Diagnose has found.
func WriteStatus(w io.Writer, f Format, s *adminpb.SurveyResponse, silent []EndpointError, found []Finding) error {
	if f == JSON {
		return writeJSON(w, statusToJSON(s, silent, found))
	}
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s%s\n", name, fmt.Sprintf(format, args...))
	}
	placement := "no known leader"
	for _, n := range s.GetNodes() {
		if n.GetNode().GetPlacementLeader() {
			placement = "led by " + n.GetNode().GetName()
		}
	}
	if len(s.GetOutages()) > 0 && s.GetOutages()[0].GetPlacement() {
		placement = "has no quorum" // whoever led it cannot do anything
	}
	stale := ""
	if s.GetStale() {
		stale = "; no quorum answers: this is what " + s.GetAsked() + " knew last, and hears"
	}
	line("cluster", "%d nodes, %d alive; %d ranges; %s%s", len(s.GetNodes()), countAlive(s), s.GetRanges(), versionText(s.GetVersions()), stale)
	if len(s.GetOutages()) == 0 {
		line("quorum", "all ranges and the placement group have one")
	}
	for _, o := range s.GetOutages() {
		line("quorum", "NONE for %s: %s", outageText(o, s.GetRanges()), waitText(s, o))
	}
	line("placement", "%s%s", placement, pausedText(s))
	line("operations", "%s", operationsText(s.GetOperations()))
	line("alarms", "%s", alarmsText(s.GetAlarms()))
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	if err := writeTable(w, nodeRows(s)); err != nil {
		return err
	}
	return writeBrief(w, found)
}

func nodeRows(s *adminpb.SurveyResponse) [][]string {
	rows := [][]string{{"NODE", "STATE", "SINCE", "RANGES", "LEADERS", "PLACEMENT", "DATA", "DISK", "BUILD"}}
	for _, n := range s.GetNodes() {
		row, disk, data, since := n.GetNode(), "", "", ""
		if n.GetDiskCapacity() > 0 {
			disk = fmt.Sprintf("%d %% of %s", usedPercent(n), sizeText(n.GetDiskCapacity()))
		}
		if row.GetBytes() > 0 {
			data = sizeText(row.GetBytes())
		}
		if row.GetSinceUnixMs() > 0 {
			since = ago(s, row.GetSinceUnixMs())
		}
		rows = append(rows, []string{
			cmp.Or(row.GetName(), row.GetId()), plainState(row), since,
			fmt.Sprint(row.GetRanges()), fmt.Sprint(row.GetLeaders()), placementText(row), data, disk, buildOf(s, row),
		})
	}
	return rows
}

// plainState is a node's state without a time, which has a column of its own.
func plainState(n *adminpb.Node) string {
	switch {
	case givesUp(n):
		return "decommissioning"
	case n.GetState() == "serving" && !n.GetAlive():
		return "not heard"
	}
	return n.GetState()
}

func buildOf(s *adminpb.SurveyResponse, n *adminpb.Node) string {
	for _, v := range s.GetVersions().GetNodes() {
		if v.GetName() == n.GetName() {
			return v.GetBuild()
		}
	}
	return ""
}

func versionText(v *adminpb.ClusterShowResponse) string {
	if v.GetVersion() == 0 {
		return "no cluster version yet"
	}
	text := fmt.Sprintf("cluster version %d", v.GetVersion())
	if v.GetNext() != 0 {
		text += fmt.Sprintf(", next %d", v.GetNext())
	}
	return text
}

func pausedText(s *adminpb.SurveyResponse) string {
	r := s.GetReplication()
	switch {
	case r == nil:
		return "; its settings are not known"
	case r.GetPaused():
		since := ""
		if r.GetPausedSinceUnixMs() > 0 {
			since = " for " + ago(s, r.GetPausedSinceUnixMs())
		}
		return fmt.Sprintf("; %d voters for each range; PAUSED%s", r.GetFactor(), since)
	}
	return fmt.Sprintf("; %d voters for each range", r.GetFactor())
}

func operationsText(all []*adminpb.Operation) string {
	if len(all) == 0 {
		return "none"
	}
	var texts []string
	for i, o := range all {
		if i == maxStatusOperations {
			texts = append(texts, fmt.Sprintf("and %d more (skein placement operations)", len(all)-i))
			break
		}
		on := "of placement"
		if o.GetRange() != 0 {
			on = fmt.Sprintf("of range %d", o.GetRange())
		}
		_, text, _ := strings.Cut(operationText(o), " ")
		texts = append(texts, fmt.Sprintf("%s %s", text, on))
	}
	return strings.Join(texts, "; ")
}

func alarmsText(all []*adminpb.Alarm) string {
	if len(all) == 0 {
		return "none"
	}
	var texts []string
	for _, a := range all {
		texts = append(texts, a.GetType()+" of "+a.GetNode())
	}
	return strings.Join(texts, ", ")
}

// writeBrief prints findings in a line each; skein doctor has what to do.
func writeBrief(w io.Writer, found []Finding) error {
	var b strings.Builder
	for _, x := range found {
		fmt.Fprintf(&b, "%s: %s\n", x.Severity, x.What)
	}
	if Healthy(found) {
		b.WriteString("all is well\n")
	} else {
		b.WriteString("skein doctor says what to do about each\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func statusToJSON(s *adminpb.SurveyResponse, silent []EndpointError, found []Finding) *statusJSON {
	out := &statusJSON{
		Healthy: Healthy(found), Asked: s.GetAsked(), Silent: silent, Stale: s.GetStale(), Ranges: s.GetRanges(), Outages: []outageJSON{},
		Replication: replicationToJSON(s.GetReplication()), Nodes: []nodeStatusJSON{}, Operations: []operationJSON{}, Alarms: []alarmJSON{},
		ClusterVersion: s.GetVersions().GetVersion(), Findings: append([]Finding{}, found...),
	}
	for _, o := range s.GetOutages() {
		out.Outages = append(out.Outages, outageJSON{o.GetPlacement(), o.GetRanges(), o.GetIds(), list(o.GetWaitsFor()), o.GetQuarantined()})
		out.NoQuorum.Ranges += o.GetRanges()
		out.NoQuorum.Placement = out.NoQuorum.Placement || o.GetPlacement()
	}
	for _, n := range s.GetNodes() {
		if n.GetNode().GetPlacementLeader() {
			out.PlacementLeader = n.GetNode().GetName()
		}
		out.Nodes = append(out.Nodes, nodeStatusJSON{
			nodeToJSON(n.GetNode()), buildOf(s, n.GetNode()), n.GetDiskCapacity(), n.GetDiskUsed(),
			n.GetClockAheadMs(), n.GetFsyncP99Us(), n.GetFsyncSlowMs(), n.GetFullMs(), n.GetFullWhy(), n.GetCertificateFile(), n.GetCertificateLeftMs(),
			n.GetLaggingWatchers(), n.GetError(),
		})
	}
	for _, o := range s.GetOperations() {
		out.Operations = append(out.Operations, operationToJSON(o))
	}
	for _, a := range s.GetAlarms() {
		out.Alarms = append(out.Alarms, alarmJSON{a.GetType(), a.GetNode(), a.GetSticky()})
	}
	return out
}
