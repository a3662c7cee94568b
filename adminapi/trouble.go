package adminapi

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// Bounds from which what nodes say of themselves is a finding.
const (
	// certificateWarning is how long before its end a certificate is a finding. One that lives for days only is renewed
	// later: it is one in the last fifth of its life.
	certificateWarning = 30 * 24 * time.Hour
	certificatePart    = 5
	// LagNote is from when on it is told that watchers read history: one that begins in the past does so for a while.
	LagNote = 10 * time.Second
	// RestartsKept is for how long a restart counts. An upgrade takes one or two, restartsWarning of them are a node that does not
	// stay up.
	RestartsKept    = 30 * time.Minute
	restartsWarning = 3
	// hotRequests in a second, of one range that has hotPercent of all, make a hot range.
	hotRequests, hotPercent = 500, 75
)

// span is a time of a survey, for people.
func span(ms int64) string {
	return max(0, time.Duration(ms)*time.Millisecond).Round(time.Second).String()
}

// ExpiresSoon says whether a certificate that is valid for so long in all, and so long yet, is to be renewed.
func ExpiresSoon(left, life time.Duration) bool {
	return left < min(certificateWarning, life/certificatePart)
}

// checkCertificates finds nodes whose certificate has ended, or ends soon.
func checkCertificates(s *adminpb.SurveyResponse) (all []Finding) {
	for _, n := range s.GetNodes() {
		if n.GetCertificateFile() == "" {
			continue
		}
		name := n.GetNode().GetName()
		left, life := time.Duration(n.GetCertificateLeftMs())*time.Millisecond, time.Duration(n.GetCertificateLifeMs())*time.Millisecond
		next := "make another one where the authority's directory certs is (" + RenewCertificate(name, hostsOf(n)) + "), and put it in the place of the old one: the node takes it without a restart"
		switch {
		case left <= 0:
			all = append(all, Finding{
				Critical, "certificates",
				fmt.Sprintf("the certificate %s of %s expired %s ago: clients and nodes do not connect to it any more", n.GetCertificateFile(), name, span(-n.GetCertificateLeftMs())),
				next,
			})
		case ExpiresSoon(left, life):
			in := left.Round(time.Minute).String()
			if days := int(left.Hours()) / 24; days > 1 {
				in = fmt.Sprintf("%d days", days)
			}
			all = append(all, Finding{Warning, "certificates", fmt.Sprintf("the certificate %s of %s expires in %s", n.GetCertificateFile(), name, in), next})
		}
	}
	return all
}

// RenewCertificate is the command that makes a node another certificate for hosts, in the place of one that is there.
func RenewCertificate(name string, hosts []string) string {
	return createCertificate(name, hosts) + " --overwrite"
}

// createCertificate is the command that makes a node's certificate for hosts, in a directory of its own beside that of the authority.
// Without hosts the command has HOST in their place.
func createCertificate(name string, hosts []string) string {
	if len(hosts) == 0 {
		hosts = []string{"HOST"}
	}
	return fmt.Sprintf("skein cert create-node %s --host %s --certs-dir certs --out %s", name, strings.Join(hosts, " --host "), name)
}

// hostsOf returns the hosts of the node's certificate by its own word, or else those of its URLs. Clients may use further names, which
// only the certificate has.
func hostsOf(n *adminpb.NodeSurvey) (hosts []string) {
	if own := n.GetCertificateHosts(); len(own) > 0 {
		return own
	}
	for _, text := range append(slices.Clone(n.GetNode().GetClientUrls()), n.GetNode().GetPeerUrls()...) {
		if u, err := url.Parse(text); err == nil && u.Hostname() != "" && !slices.Contains(hosts, u.Hostname()) {
			hosts = append(hosts, u.Hostname())
		}
	}
	return hosts
}

// checkWatchers finds nodes whose clients do not keep up with what they watch. It is no more than a note however long it lasts:
// new watchers may lag each for a moment, and who lags for long harms itself alone.
func checkWatchers(s *adminpb.SurveyResponse) (all []Finding) {
	for _, n := range s.GetNodes() {
		if n.GetLaggingWatchers() == 0 || time.Duration(n.GetLaggingMs())*time.Millisecond < LagNote {
			continue
		}
		what := fmt.Sprintf("watchers of %s lag (%d), one or another for %s", n.GetNode().GetName(), n.GetLaggingWatchers(), span(n.GetLaggingMs()))
		if n.GetLaggingClient() != "" {
			what += fmt.Sprintf(": lately that of client %s most, by %d revisions", n.GetLaggingClient(), n.GetLaggingRevisions())
		}
		all = append(all, Finding{
			Note, "watchers", what,
			"skein debug watchers names them and what they watch: have these clients take their events sooner, or restart them",
		})
	}
	return all
}

// checkRestarts finds nodes that start again and again. Each time they may be heard again before anybody calls them dead.
func checkRestarts(s *adminpb.SurveyResponse) (all []Finding) {
	for _, n := range s.GetNodes() {
		if n.GetRestarts() < restartsWarning {
			continue
		}
		name := n.GetNode().GetName()
		all = append(all, Finding{
			Warning, "restarts", fmt.Sprintf("%s starts again and again: at least %d times within %d minutes", name, n.GetRestarts(), int(RestartsKept.Minutes())),
			"see the end of its log, and what its supervisor says of it (systemctl status skein); placement counts on it only once it stays up",
		})
	}
	return all
}

// checkHeat finds a range that has most of the load.
func checkHeat(s *adminpb.SurveyResponse) []Finding {
	hot, all := s.GetHottestRequestsPerSecond(), s.GetRequestsPerSecond()
	if s.GetRanges() < 2 || hot < hotRequests || hot*100 < all*hotPercent {
		return nil
	}
	return []Finding{{
		Note, "load",
		fmt.Sprintf("range %d is hot: it has %.0f of %.0f requests a second, and %s leads it", s.GetHottestRange(), hot, all, s.GetHottestLeader()),
		fmt.Sprintf("skein range show %d has its keys, the heat map of the console since when. It splits by itself, unless one key has most of its load: "+
			"then spread that over several keys", s.GetHottestRange()),
	}}
}

// checkFsync finds slow disks.
func checkFsync(s *adminpb.SurveyResponse) (all []Finding) {
	for _, n := range s.GetNodes() {
		took := time.Duration(n.GetFsyncP99Us()) * time.Microsecond
		if took < FsyncWarning {
			continue
		}
		what := fmt.Sprintf("the disk of %s is slow", n.GetNode().GetName())
		if n.GetFsyncSlowMs() > 0 {
			what += ", for " + span(n.GetFsyncSlowMs())
		}
		all = append(all, Finding{
			Warning, "fsync", fmt.Sprintf("%s: one in a hundred fsyncs takes %v or more, and writes wait for it", what, took.Round(time.Millisecond)),
			"see what else uses its disk, or move the log to one of its own (--wal-dir, docs/OPERATIONS.md); skein doctor --local there measures it",
		})
	}
	return all
}

// checkClocks finds clocks that are wrong. Most clocks are taken for right: with that of the asked node for the measure all others
// would be wrong where it is. Of two nodes nobody can say which one is right.
func checkClocks(s *adminpb.SurveyResponse) (all []Finding) {
	var ahead []time.Duration
	for _, n := range s.GetNodes() {
		if tellsTime(n) {
			ahead = append(ahead, time.Duration(n.GetClockAheadMs())*time.Millisecond)
		}
	}
	right, whose := time.Duration(0), "that of "+s.GetAsked()
	if len(ahead) > 2 {
		slices.Sort(ahead)
		right, whose = ahead[(len(ahead)-1)/2], "those of most nodes"
	}
	for _, n := range s.GetNodes() {
		off := time.Duration(n.GetClockAheadMs())*time.Millisecond - right
		if !tellsTime(n) || off.Abs() < clockWarning {
			continue
		}
		way := "ahead of"
		if off < 0 {
			way = "behind"
		}
		what := fmt.Sprintf("the clock of %s is %v %s %s", n.GetNode().GetName(), off.Abs().Round(100*time.Millisecond), way, whose)
		if step := time.Duration(n.GetClockStepMs()) * time.Millisecond; step != 0 {
			to := "forward"
			if step < 0 {
				to = "back"
			}
			what += fmt.Sprintf("; it was set %s by %v, %s ago", to, step.Abs(), span(n.GetClockSteppedAgoMs()))
		}
		all = append(all, Finding{
			Warning, "clock", what,
			"let the nodes keep their time by NTP; no promise depends on it, but times in logs, of certificates and of leases after a restart do",
		})
	}
	return all
}

func tellsTime(n *adminpb.NodeSurvey) bool { return n.GetNode().GetAlive() && n.GetError() == "" }

// deadNext is what to do about a node that others do not hear, by what answers at its client URL.
func deadNext(name string, n *adminpb.NodeSurvey) string {
	switch n.GetAtClientUrl() {
	case adminpb.AtClientURL_BAD_CERTIFICATE:
		return "if an unknown authority has signed it, first see whether --cacert of this command is the authority's own; else make it another certificate where the authority's directory certs is (" +
			RenewCertificate(name, hostsOf(n)) + "), and put it in the place of the old one; skein cert check --certs-dir " + name + " says what is wrong with one"
	case adminpb.AtClientURL_NODE_ANSWERS:
		return "see its log, its certificates, and the network: the peer port needs UDP and TCP"
	case adminpb.AtClientURL_ANOTHER_NODE_ANSWERS:
		return "start it again if its process has ended; give each node a client URL of its own (--advertise-client-urls) that leads to it from everywhere"
	case adminpb.AtClientURL_SOMETHING_ANSWERS:
		return "see whether its process runs. If it does: its log, its certificates, and the network (the peer port needs UDP and TCP); if not, start it again"
	case adminpb.AtClientURL_NOT_ASKED, adminpb.AtClientURL_NOTHING_ANSWERS:
	}
	return "start it again; skein node show " + name + " says what becomes of its replicas"
}

// fullText says since when and why a node takes no writes, "" where it does not say.
func fullText(s *adminpb.SurveyResponse, node string) string {
	for _, n := range s.GetNodes() {
		if n.GetNode().GetName() == node && n.GetFullMs() > 0 {
			return fmt.Sprintf(", and takes no writes for %s: %s", span(n.GetFullMs()), cmp.Or(n.GetFullWhy(), "it has no room"))
		}
	}
	return ""
}
