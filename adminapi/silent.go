package adminapi

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/status"
)

// silence is why no endpoint could be reached.
type silence struct {
	why []string
	// next is what to do, "" where no endpoint's error tells it.
	next string
}

// add notes why one endpoint could not be reached.
func (s *silence) add(endpoint string, secure bool, err error) {
	text := status.Convert(err).Message()
	s.why = append(s.why, fmt.Sprintf("%s: %s", endpoint, text))
	if s.next == "" {
		s.next = tlsAdvice(secure, text)
	}
}

func (s *silence) refusal() *Refusal {
	r := &Refusal{
		Reason:   "no endpoint can be reached: " + strings.Join(s.why, "; "),
		NextStep: "give the client URL of a running node to --endpoints",
		Later:    true,
	}
	if s.next != "" {
		r.NextStep = s.next
	}
	return r
}

// tlsAdvice says what to do about a connection that failed by TLS or for want of it, "" for all others. secure says
// whether the client has spoken TLS. Go and gRPC have no types for most of these errors.
func tlsAdvice(secure bool, why string) string {
	has := func(parts ...string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(why, p) })
	}
	// Which of them a client sees when the other side hangs up depends on who is quicker.
	hungUp := has("server preface", "broken pipe", "connection reset by peer", "EOF")
	switch {
	case !secure && hungUp:
		return "give the client URL of a running node to --endpoints: if that one has certificates, https://HOST:PORT with --cacert, and --cert and --key where it asks for a client's"
	case !secure:
		return ""
	case has("certificate signed by unknown authority"):
		return "give the authority of the node's certificate to --cacert"
	case has("certificate is valid for", "certificate is not valid for any names", "cannot validate certificate for"):
		return "give an address that the node's certificate names to --endpoints; skein cert create-node --host makes one for another address"
	case has("certificate has expired or is not yet valid"):
		return "look at the node's certificate with skein cert list, and at the clocks of both machines"
	case has("authentication handshake failed") && !has("remote error: tls: "):
		return "give the client URL of a running node to --endpoints: if that one has no certificates, http://HOST:PORT"
	case hungUp, has("remote error: tls: "):
		return "the node may want a client's certificate that its authority has signed: give --cert and --key (skein cert create-client makes them)"
	}
	return ""
}
