package adminapi

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// SurveyBackend is what the service asks of the node for a look at everything.
type SurveyBackend interface {
	// Survey returns what is known of the cluster, in any order, also without a quorum.
	Survey(ctx context.Context) (*adminpb.SurveyResponse, error)
}

func (s *server) Survey(ctx context.Context, _ *adminpb.SurveyRequest) (*adminpb.SurveyResponse, error) {
	r, err := s.backend.Survey(ctx)
	if err != nil {
		return nil, grpcError("look at the cluster", err, readAgain)
	}
	slices.SortFunc(r.Nodes, func(a, b *adminpb.NodeSurvey) int {
		return cmp.Or(cmp.Compare(a.GetNode().GetName(), b.GetNode().GetName()), cmp.Compare(a.GetNode().GetId(), b.GetNode().GetId()))
	})
	slices.SortFunc(r.Operations, func(a, b *adminpb.Operation) int { return cmp.Compare(a.GetId(), b.GetId()) })
	slices.SortFunc(r.Alarms, func(a, b *adminpb.Alarm) int {
		return cmp.Or(cmp.Compare(a.GetType(), b.GetType()), cmp.Compare(a.GetNode(), b.GetNode()))
	})
	slices.SortFunc(r.Holds, func(a, b *adminpb.Hold) int {
		return cmp.Or(cmp.Compare(a.GetMadeUnixMs(), b.GetMadeUnixMs()), cmp.Compare(a.GetId(), b.GetId()))
	})
	return r, nil
}

// EndpointError is an endpoint that was asked and did not answer.
type EndpointError struct {
	Endpoint string `json:"endpoint"`
	Error    string `json:"error"`
}

// Survey asks the endpoints in their order until one answers. silent are those that did not, also where nobody did and
// there is an error: a [Refusal] then. Each has an equal part of the time that ctx leaves.
func (c *Client) Survey(ctx context.Context) (s *adminpb.SurveyResponse, silent []EndpointError, err error) {
	var none silence
	for i, ep := range c.endpoints {
		s, err := c.surveyAt(ctx, ep, len(c.endpoints)-i)
		if err == nil {
			return s, silent, nil
		}
		late := status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil
		if !late && status.Code(err) != codes.Unavailable || refusal(err) != nil {
			return nil, silent, asRefusal(ep, err)
		}
		silent = append(silent, EndpointError{ep.name, status.Convert(err).Message()})
		none.add(ep.name, ep.secure, err)
	}
	return nil, silent, none.refusal()
}

// surveyAt asks one of so many endpoints that are left.
func (c *Client) surveyAt(ctx context.Context, ep endpoint, left int) (*adminpb.SurveyResponse, error) {
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, end.Sub(clock.System().Wall())/time.Duration(left))
		defer cancel()
	}
	return callOne(ctx, c, ep, &adminpb.SurveyRequest{}, adminpb.AdminClient.Survey)
}

// probeTime is how long the nodes that the others do not hear may take to answer at their client URLs. It is longer than
// such a node waits in vain for the others before it tells what it knows (package operate's askTimeout).
const probeTime = 5 * time.Second

// Probe asks the dead nodes of a survey at their client URLs, and notes what they say: an ended process is to be started, and one that
// runs has another trouble. Of its certificate such a node alone can tell. Nobody is logged in: a node without a quorum knows
// no passwords, and they are no business of whoever has the address now.
func (c *Client) Probe(ctx context.Context, s *adminpb.SurveyResponse) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	var wg sync.WaitGroup
	for _, n := range s.GetNodes() {
		if n.GetNode().GetState() == StateDead && len(n.GetNode().GetClientUrls()) > 0 {
			wg.Go(func() { c.probe(ctx, n) })
		}
	}
	wg.Wait()
}

func (c *Client) probe(ctx context.Context, n *adminpb.NodeSurvey) {
	at, err := c.At(n.GetNode().GetClientUrls()[0])
	if err != nil {
		n.Error = err.Error()
		return
	}
	at.As("", "")
	n.AtClientUrl, n.Error = at.whoAnswers(ctx, n.GetNode().GetId())
	if n.AtClientUrl != adminpb.AtClientURL_NODE_ANSWERS {
		return
	}
	own, err := callOne(ctx, at, at.endpoints[0], &adminpb.SurveyRequest{}, adminpb.AdminClient.Survey)
	if err != nil {
		return // that it runs is known
	}
	for _, o := range own.GetNodes() {
		if o.GetNode().GetId() == n.GetNode().GetId() {
			n.CertificateFile, n.CertificateLeftMs, n.CertificateLifeMs = o.GetCertificateFile(), o.GetCertificateLeftMs(), o.GetCertificateLifeMs()
		}
	}
}

// whoAnswers says who answers at the only endpoint, where a node of this id is looked for, and the same in words. The node's own
// list of members is asked for, since it waits for nobody, and its header has the id of the node that answers.
func (c *Client) whoAnswers(ctx context.Context, id string) (adminpb.AtClientURL, string) {
	at := c.endpoints[0]
	shake := &handshakes{TransportCredentials: at.creds}
	at.creds = shake
	conn, err := c.connect(at)
	if err != nil {
		return adminpb.AtClientURL_NOT_ASKED, err.Error()
	}
	defer conn.Close()
	list, err := etcdserverpb.NewClusterClient(conn).MemberList(ctx, &etcdserverpb.MemberListRequest{})
	if err == nil {
		return whoIs(list, id, at.name)
	}
	text := status.Convert(err).Message()
	var bad *tls.CertificateVerificationError
	switch code := status.Code(err); {
	case errors.As(shake.last(), &bad):
		return adminpb.AtClientURL_BAD_CERTIFICATE, fmt.Sprintf("%s: its certificate is refused: %s", at.name, bad.Err)
	case failedFor(shake.last()):
		return adminpb.AtClientURL_SOMETHING_ANSWERS, fmt.Sprintf("something answers at %s, and no TLS connection comes about: %s", at.name, shake.last())
	case errors.As(rpctypes.Error(err), new(rpctypes.EtcdError)): // whatever its code, somebody has sent it
	case strings.Contains(text, "connection refused"):
		return adminpb.AtClientURL_NOTHING_ANSWERS, "nothing listens at " + at.name
	case code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Canceled:
		return adminpb.AtClientURL_NOTHING_ANSWERS, fmt.Sprintf("%s does not answer: %s", at.name, text)
	}
	return adminpb.AtClientURL_SOMETHING_ANSWERS, fmt.Sprintf("something answers at %s, and does not say which node it is: %s", at.name, text)
}

// failedFor says whether a TLS handshake has failed by what the other side has sent, and not since it was silent or the time was over.
func failedFor(err error) bool {
	late := net.Error(nil)
	return err != nil && !(errors.As(err, &late) && late.Timeout()) && !errors.Is(err, context.Canceled) && !errors.Is(err, net.ErrClosed)
}

// whoIs says of a node that has answered whether it is the one of this id.
func whoIs(list *etcdserverpb.MemberListResponse, id, at string) (adminpb.AtClientURL, string) {
	who := list.GetHeader().GetMemberId()
	name := strconv.FormatUint(who, 16)
	if name == id {
		return adminpb.AtClientURL_NODE_ANSWERS, "its process runs and answers clients, and the others do not hear it"
	}
	for _, m := range list.GetMembers() {
		if m.GetID() == who {
			name = cmp.Or(m.GetName(), name)
		}
	}
	return adminpb.AtClientURL_ANOTHER_NODE_ANSWERS, fmt.Sprintf("another node (%s) answers at %s", name, at)
}

// handshakes keeps the error of the last TLS handshake, of which gRPC hands on no more than the text.
type handshakes struct {
	credentials.TransportCredentials

	mu  sync.Mutex
	err error // guarded by mu
}

// ClientHandshake implements [credentials.TransportCredentials].
func (h *handshakes) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := h.TransportCredentials.ClientHandshake(ctx, authority, raw)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
	return conn, info, err
}

// Clone implements [credentials.TransportCredentials]. It is the same one, so that no error is lost.
func (h *handshakes) Clone() credentials.TransportCredentials { return h }

func (h *handshakes) last() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}
