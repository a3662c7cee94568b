package adminapi

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
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

// probeTime is how long a node that the others do not hear may take to answer at its client URL.
const probeTime = 2 * time.Second

// Probe asks the dead nodes of a survey at their client URLs, and notes what they say: an ended process is to be started, and one that
// runs has another trouble. Of its certificate such a node alone can tell.
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
	own, err := callOne(ctx, at, at.endpoints[0], &adminpb.SurveyRequest{}, adminpb.AdminClient.Survey)
	switch text := status.Convert(err).Message(); {
	case err == nil:
	case strings.Contains(text, "connection refused"):
		n.Error = "nothing listens at " + at.endpoints[0].name
		return
	case status.Code(err) == codes.DeadlineExceeded || status.Code(err) == codes.Unavailable:
		if _, why, bad := strings.Cut(text, badX509); bad {
			n.Error = fmt.Sprintf("%s: its certificate is refused: %s%s", at.endpoints[0].name, badX509, why)
			return
		}
		n.Error = fmt.Sprintf("%s does not answer: %s", at.endpoints[0].name, text)
		return
	}
	// It has answered, if only that it may not be asked.
	n.Error = runsUnheard
	for _, o := range own.GetNodes() {
		if o.GetNode().GetId() == n.GetNode().GetId() {
			n.CertificateFile, n.CertificateLeftMs, n.CertificateLifeMs = o.GetCertificateFile(), o.GetCertificateLeftMs(), o.GetCertificateLifeMs()
		}
	}
}
