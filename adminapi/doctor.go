package adminapi

import (
	"cmp"
	"fmt"
	"io"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// Severity says what an operator must do about a finding.
type Severity string

// The severities, the worst first.
const (
	// Critical: clients are refused, or data are at risk. Act now.
	Critical Severity = "critical"
	// Warning: it works, and one more failure, or some time, makes it critical.
	Warning Severity = "warning"
	// Note: nothing is wrong; somebody may have wanted it otherwise.
	Note Severity = "note"
)

// Finding is something that is wrong.
type Finding struct {
	Severity Severity `json:"severity"`
	// Check is the check in a word, as quorum.
	Check string `json:"check"`
	What  string `json:"what"`
	// Next is what to do.
	Next string `json:"next"`
}

// Bounds from which something is a finding.
const (
	diskWarning, diskCritical = 85, 95 // percent
	clockWarning              = 500 * time.Millisecond
	holdWarning               = 48 * time.Hour
)

// FsyncWarning is the time of one in a hundred fsyncs from which a disk is slow.
const FsyncWarning = 25 * time.Millisecond

// Healthy says whether nothing is wrong: there may be notes.
func Healthy(all []Finding) bool {
	return !slices.ContainsFunc(all, func(f Finding) bool { return f.Severity != Note })
}

// Diagnose says what is wrong with a cluster, the worst first. It is a function of the survey, and of the endpoints that
// did not answer, alone.
func Diagnose(s *adminpb.SurveyResponse, silent []EndpointError) []Finding {
	var all []Finding
	for _, check := range []func(*adminpb.SurveyResponse) []Finding{
		checkQuorum, checkAlarms, checkCertificates, checkNodes, checkRestarts, checkDisks, checkFsync, checkRanges, checkPlacement, checkNames, checkVersions,
		checkClocks, checkHolds, checkSecurity, checkZones, checkWatchers, checkHeat,
	} {
		all = append(all, check(s)...)
	}
	for _, e := range silent {
		all = append(all, Finding{
			Warning, "endpoint", fmt.Sprintf("endpoint %s does not answer: %s", e.Endpoint, e.Error),
			"start the node there, or leave the endpoint out",
		})
	}
	rank := map[Severity]int{Critical: 0, Warning: 1, Note: 2}
	slices.SortStableFunc(all, func(a, b Finding) int { return cmp.Compare(rank[a.Severity], rank[b.Severity]) })
	return all
}

const startAgain = "start them again; if they are lost for good, see docs/RECOVERY.md"

func checkQuorum(s *adminpb.SurveyResponse) (all []Finding) {
	for _, o := range s.GetOutages() {
		next := startAgain
		if len(o.GetWaitsFor()) == 0 && len(o.GetIds()) > 0 {
			next = fmt.Sprintf("skein range show %d", o.GetIds()[0]) + " says why; serializable reads are still answered, so save the data, or restore a backup"
		}
		all = append(all, Finding{
			Critical, "quorum", "no quorum for " + outageText(o, s.GetRanges()) + ": " + waitText(s, o),
			next,
		})
	}
	if s.GetStale() && len(all) == 0 {
		all = append(all, Finding{
			Critical, "quorum", "no quorum of the placement group answers, though its nodes are heard",
			"look again in a moment; if it stays so, see the logs of the nodes that hold it (skein placement show)",
		})
	}
	return all
}

// outageText names what has no quorum, of so many ranges.
func outageText(o *adminpb.Outage, ranges int64) string {
	switch {
	case o.GetPlacement():
		return "the placement group"
	case o.GetRanges() == 1:
		return fmt.Sprintf("range %d", o.GetIds()[0])
	}
	var ids []string
	for _, id := range o.GetIds() {
		ids = append(ids, fmt.Sprint(id))
	}
	if int64(len(ids)) < o.GetRanges() {
		ids = append(ids, "…")
	}
	return fmt.Sprintf("%d of %d ranges (%s)", o.GetRanges(), ranges, strings.Join(ids, ", "))
}

// waitText names the nodes that an outage waits for, with since when they are silent, and counts replicas in quarantine.
func waitText(s *adminpb.SurveyResponse, o *adminpb.Outage) string {
	var all []string
	for _, name := range o.GetWaitsFor() {
		if ago := silentText(s, name); ago != "" {
			name += " (silent " + ago + ")"
		}
		all = append(all, name)
	}
	text := "it waits for "
	if o.GetRanges() > 1 {
		text = "they wait for "
	}
	closed := fmt.Sprintf("of the voters of each, %d are in quarantine", o.GetQuarantined())
	switch {
	case len(all) == 0:
		return closed
	case o.GetQuarantined() > 0:
		return text + strings.Join(all, ", ") + "; " + closed
	}
	return text + strings.Join(all, ", ")
}

// silentText says for how long a dead node is silent, "" where nobody knows.
func silentText(s *adminpb.SurveyResponse, name string) string {
	for _, n := range s.GetNodes() {
		if row := n.GetNode(); row.GetName() == name && row.GetState() == StateDead && row.GetSinceUnixMs() > 0 {
			return "for " + ago(s, row.GetSinceUnixMs())
		}
	}
	return ""
}

// ago says how long before the survey something was.
func ago(s *adminpb.SurveyResponse, unixMs int64) string {
	return max(0, time.Duration(s.GetUnixMs()-unixMs)*time.Millisecond).Round(time.Second).String()
}

func checkAlarms(s *adminpb.SurveyResponse) (all []Finding) {
	for _, a := range s.GetAlarms() {
		next := "skein node show " + a.GetNode() + " says what is known of it"
		switch {
		case a.GetSticky():
			next = "a client has raised it: etcdctl alarm disarm ends it"
		case a.GetType() == "NOSPACE":
			next = "make room on its disk, delete keys and compact, or move ranges away: it ends by itself then"
		case a.GetType() == "CORRUPT":
			next = "it ends when the replicas in quarantine have been replaced: skein node show " + a.GetNode()
		}
		text := fmt.Sprintf("%s has the alarm %s", a.GetNode(), a.GetType())
		if a.GetType() == "NOSPACE" {
			text += fullText(s, a.GetNode())
		}
		all = append(all, Finding{Critical, "alarm", text, next})
	}
	return all
}

func checkNodes(s *adminpb.SurveyResponse) (all []Finding) {
	alive := countAlive(s)
	for _, n := range s.GetNodes() {
		row := n.GetNode()
		name := cmp.Or(row.GetName(), row.GetId())
		switch {
		case row.GetState() == "unstarted", row.GetState() == "unstarted learner":
			all = append(all, Finding{
				Note, "node", name + " was added and has never started",
				"start it, or remove it: etcdctl member remove " + row.GetId(),
			})
			continue
		case !row.GetAlive() && row.GetState() == "draining":
			drained := Finding{
				Note, "node", name + " is drained and not heard",
				"when its work is done: start it, and take it back with skein node undrain " + name,
			}
			if row.GetRanges() > 0 || row.GetPlacement() {
				drained.Severity, drained.What = Warning, drained.What+": what it has replicas of survives one failure less"
			}
			all = append(all, drained)
			continue
		case !row.GetAlive():
			what := name + " is dead"
			if row.GetSinceUnixMs() > 0 && row.GetState() == StateDead {
				what += " for " + ago(s, row.GetSinceUnixMs())
			}
			if n.GetError() != "" {
				what += ": " + n.GetError()
			}
			all = append(all, Finding{
				Warning, "node", what,
				deadNext(name, n),
			})
			continue
		case n.GetError() != "":
			all = append(all, Finding{
				Warning, "node", fmt.Sprintf("%s lives and does not answer: %s", name, n.GetError()),
				"it is busy, or its disk hangs: see its log",
			})
		case n.GetIsolated() && alive > 1: // else there is nobody to be heard
			all = append(all, Finding{
				Warning, "network", name + " hears fewer than half of the others, and leads nothing",
				"see to its network: the peer port needs UDP and TCP",
			})
		case len(n.GetUnheard()) > 0:
			all = append(all, Finding{
				Warning, "network",
				fmt.Sprintf("%s does not hear %s, which others hear", name, strings.Join(n.GetUnheard(), ", ")),
				"see to the network between them; others relay what they say meanwhile",
			})
		}
		if k := row.GetQuarantined(); k > 0 {
			all = append(all, Finding{
				Warning, "quarantine", fmt.Sprintf("%s has replicas in quarantine (%d)", name, k),
				"skein node show " + name + " says why, and what becomes of them",
			})
		}
		if row.GetState() == "draining" || row.GetState() == "decommissioned" {
			all = append(all, Finding{
				Note, "node", name + " is " + stateText(row, " and "),
				"skein node show " + name + " says how far it is",
			})
		}
	}
	return all
}

func checkDisks(s *adminpb.SurveyResponse) (all []Finding) {
	for _, n := range s.GetNodes() {
		if n.GetDiskCapacity() == 0 {
			continue
		}
		name, percent := n.GetNode().GetName(), usedPercent(n)
		severity := Warning
		switch {
		case percent >= diskCritical:
			severity = Critical
		case percent < diskWarning:
			continue
		}
		all = append(all, Finding{
			severity, "disk",
			fmt.Sprintf("the disk of %s is used to %d %%: %s are free", name, percent, sizeText(n.GetDiskCapacity()-n.GetDiskUsed())),
			"make room, or add a node: placement moves replicas to it. A full node takes no writes",
		})
	}
	return all
}

func usedPercent(n *adminpb.NodeSurvey) int64 {
	return int64(float64(n.GetDiskUsed()) / float64(n.GetDiskCapacity()) * 100)
}

// sizeText writes bytes for people.
func sizeText(bytes int64) string {
	for _, unit := range []struct {
		name  string
		bytes int64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if bytes >= unit.bytes {
			return fmt.Sprintf("%.1f %s", float64(bytes)/float64(unit.bytes), unit.name)
		}
	}
	return fmt.Sprintf("%d B", bytes)
}

func checkRanges(s *adminpb.SurveyResponse) (all []Finding) {
	if k := s.GetMissing(); k > 0 {
		all = append(all, Finding{
			Warning, "ranges", fmt.Sprintf("of %d spans of keys nobody could say who holds them", k),
			"look with skein range list; behind a split or a merge it passes",
		})
	}
	if k := s.GetLeaderless(); k > 0 {
		all = append(all, Finding{
			Warning, "ranges", fmt.Sprintf("%d ranges have a quorum and no known leader", k),
			"look again in a moment: an election takes about a second",
		})
	}
	r := s.GetReplication()
	if r.GetFewer() > 0 {
		next := "placement adds them by itself; skein placement operations shows how far it is"
		if take := taking(s); int64(take) < r.GetFactor() {
			next = fmt.Sprintf("%d of %d nodes take replicas: make room on the disks named, bring back or undrain the nodes named, or add nodes", take, len(s.GetNodes()))
			if voters := votersOf(take); voters > 1 || len(s.GetNodes()) == 1 { // nobody is told to have no second copy
				next += fmt.Sprintf("; or have fewer voters (skein placement set-replication %d)", voters)
			}
		}
		severity := Warning
		if len(s.GetNodes()) == 1 {
			severity = Note // whoever runs one node knows
		}
		all = append(all, Finding{
			severity, "replicas",
			fmt.Sprintf("%d of %d ranges have fewer than %d voters", r.GetFewer(), r.GetRanges(), r.GetFactor()) + declining(r),
			next,
		})
	}
	return all
}

// votersOf returns how many voters a range can have on so many nodes.
func votersOf(nodes int) int {
	for _, voters := range []int{7, 5, 3} {
		if nodes >= voters {
			return voters
		}
	}
	return 1
}

// taking counts the nodes that serve and are not named as ones that get no replicas. A node of an older build names none.
func taking(s *adminpb.SurveyResponse) (k int) {
	declines := map[string]bool{}
	for _, d := range s.GetReplication().GetDeclining() {
		declines[d.GetNode()] = true
	}
	for _, n := range s.GetNodes() {
		if row := n.GetNode(); row.GetState() == "serving" && !declines[cmp.Or(row.GetName(), row.GetId())] {
			k++
		}
	}
	return k
}

func countAlive(s *adminpb.SurveyResponse) (k int) {
	for _, n := range s.GetNodes() {
		if n.GetNode().GetAlive() {
			k++
		}
	}
	return k
}

func checkPlacement(s *adminpb.SurveyResponse) []Finding {
	if !s.GetReplication().GetPaused() {
		return nil
	}
	what := "placement is paused"
	if since := s.GetReplication().GetPausedSinceUnixMs(); since > 0 {
		what += " for " + ago(s, since)
	}
	return []Finding{{
		Warning, "placement", what + ": lost replicas are not rebuilt, and nothing is balanced",
		"skein placement resume has it go on; the audit log says who has paused it",
	}}
}

// checkNames finds nodes that commands cannot tell apart.
func checkNames(s *adminpb.SurveyResponse) (all []Finding) {
	count := map[string]int{}
	for _, n := range s.GetNodes() {
		if name := n.GetNode().GetName(); name != "" {
			if count[name]++; count[name] == 2 {
				all = append(all, Finding{
					Warning, "names", "several nodes are named " + name,
					"name them by their ids in commands; remove one (etcdctl member remove ID), and let it join under another --name with an empty directory",
				})
			}
		}
	}
	return all
}

func checkVersions(s *adminpb.SurveyResponse) (all []Finding) {
	v := s.GetVersions()
	by := map[string][]string{}
	for _, n := range v.GetNodes() {
		if n.GetBuild() != "" {
			by[n.GetBuild()] = append(by[n.GetBuild()], n.GetName())
		}
	}
	if len(by) > 1 {
		var builds []string
		for build, names := range by {
			slices.Sort(names)
			builds = append(builds, build+" on "+strings.Join(names, ", "))
		}
		slices.Sort(builds)
		all = append(all, Finding{
			Note, "versions", "the nodes run several builds: " + strings.Join(builds, "; "),
			"finish the upgrade: install the newest on all of them",
		})
	}
	if v.GetNext() != 0 && v.GetHeld() && len(by) == 1 {
		all = append(all, Finding{
			Note, "versions",
			fmt.Sprintf("the cluster could be raised to version %d, and is held at %d", v.GetNext(), v.GetVersion()),
			"skein cluster upgrade raises it",
		})
	}
	return all
}

func checkHolds(s *adminpb.SurveyResponse) (all []Finding) {
	for _, h := range s.GetHolds() {
		if age := time.Duration(s.GetUnixMs()-h.GetMadeUnixMs()) * time.Millisecond; age >= holdWarning {
			all = append(all, Finding{
				Warning, "hold",
				fmt.Sprintf("hold %s of %s (%s) keeps old versions for %s", h.GetId(), h.GetOwner(), h.GetKind(), age.Round(time.Hour)),
				"make a full backup anew, or end it: skein hold release " + h.GetId(),
			})
		}
	}
	return all
}

// checkSecurity finds nodes that speak to other machines without certificates.
func checkSecurity(s *adminpb.SurveyResponse) (all []Finding) {
	var names []string
	var first *adminpb.NodeSurvey
	for _, n := range s.GetNodes() {
		if slices.ContainsFunc(append(slices.Clone(n.GetNode().GetPeerUrls()), n.GetNode().GetClientUrls()...), openURL) {
			names, first = append(names, n.GetNode().GetName()), cmp.Or(first, n)
		}
	}
	if first == nil {
		return nil
	}
	return []Finding{{
		Warning, "certificates", "others reach " + strings.Join(names, ", ") + " without TLS, by http:// URLs",
		"make an authority (skein cert create-ca) and a certificate of each node, as by " + createCertificate(names[0], hostsOf(first)) + "; then use https:// URLs and --certs-dir",
	}}
}

// openURL says whether a URL is without TLS and of more than this machine.
func openURL(text string) bool {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" || u.Hostname() == "localhost" {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return ip == nil || !ip.IsLoopback()
}

// checkZones finds nodes without a zone beside those with one: placement keeps replicas of a range in different zones.
func checkZones(s *adminpb.SurveyResponse) []Finding {
	var without []string
	zones := map[string]bool{}
	for _, n := range s.GetNodes() {
		zone := ""
		for _, a := range n.GetNode().GetAttributes() {
			if a.GetKey() == "zone" {
				zone = a.GetValue()
			}
		}
		if zone == "" {
			without = append(without, n.GetNode().GetName())
			continue
		}
		zones[zone] = true
	}
	switch {
	case len(zones) == 0:
		return nil
	case len(without) > 0:
		return []Finding{{
			Warning, "zones", strings.Join(without, ", ") + " has no zone, and others do",
			"start each node with --node-attributes zone=NAME",
		}}
	case int64(len(zones)) < s.GetReplication().GetFactor():
		return []Finding{{
			Note, "zones",
			fmt.Sprintf("%d zones have nodes, and ranges have %d voters: some share a zone", len(zones), s.GetReplication().GetFactor()),
			"add a node in another zone",
		}}
	}
	return nil
}

// WriteFindings prints what is wrong and what to do about it.
func WriteFindings(w io.Writer, f Format, all []Finding) error {
	if f == JSON {
		return writeJSON(w, struct {
			Healthy  bool      `json:"healthy"`
			Findings []Finding `json:"findings"`
		}{Healthy(all), append([]Finding{}, all...)})
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(w, "nothing is wrong")
		return err
	}
	for _, x := range all {
		if _, err := fmt.Fprintf(w, "%-9s %s: %s\n          next: %s\n", x.Severity, x.Check, x.What, x.Next); err != nil {
			return err
		}
	}
	return nil
}
