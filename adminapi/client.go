package adminapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// connectTimeout bounds how long one endpoint may take to be reached before the next
// one is tried, if nothing else is said.
const connectTimeout = time.Second

// Client calls the admin service of the first of some nodes that answers. It is for
// one command: it keeps no connection between calls.
type Client struct {
	endpoints []endpoint
	tls       *tls.Config
	login     login
	dial      time.Duration
}

// DialWithin bounds how long one endpoint may take to be reached before the next one is tried.
func (c *Client) DialWithin(d time.Duration) { c.dial = d }

type endpoint struct {
	name   string // as it was given
	target string
	secure bool
	creds  credentials.TransportCredentials
}

// NewClient makes a client of endpoints in etcdctl's forms: HOST:PORT,
// http://HOST:PORT, https://HOST:PORT, unix:PATH. https demands TLS; an endpoint
// without a scheme uses it where tlsConfig is not nil.
func NewClient(endpoints []string, tlsConfig *tls.Config) (*Client, error) {
	c := &Client{dial: connectTimeout, tls: tlsConfig}
	for _, e := range endpoints {
		e = strings.TrimSpace(e)
		if e == "" {
			continue
		}
		ep, err := parseEndpoint(e, tlsConfig)
		if err != nil {
			return nil, err
		}
		c.endpoints = append(c.endpoints, ep)
	}
	if len(c.endpoints) == 0 {
		return nil, errors.New("no endpoints: give --endpoints HOST:PORT")
	}
	return c, nil
}

// At returns a client of other endpoints that reaches them as this one does its own. It logs in by itself.
func (c *Client) At(endpoints ...string) (*Client, error) {
	o, err := NewClient(endpoints, c.tls)
	if err != nil {
		return nil, err
	}
	o.dial = c.dial
	o.As(c.login.user, c.login.password)
	return o, nil
}

// Endpoints are those that the client asks, as they were given.
func (c *Client) Endpoints() []string {
	names := make([]string, len(c.endpoints))
	for i, ep := range c.endpoints {
		names[i] = ep.name
	}
	return names
}

func parseEndpoint(e string, tlsConfig *tls.Config) (endpoint, error) {
	secure, host := tlsConfig != nil, e
	scheme, rest, hasScheme := strings.Cut(e, "://")
	switch {
	case strings.HasPrefix(e, "unix:"), strings.HasPrefix(e, "unixs:"):
		_, path, _ := strings.Cut(e, ":")
		secure = strings.HasPrefix(e, "unixs:")
		host = "unix:" + strings.TrimPrefix(path, "//")
	case hasScheme && (scheme == "http" || scheme == "https"):
		u, err := url.Parse(e)
		if err != nil || u.Path != "" {
			return endpoint{}, fmt.Errorf("endpoint %s is not of the form %s://HOST:PORT", e, scheme)
		}
		secure, host = scheme == "https", rest
	case hasScheme:
		return endpoint{}, fmt.Errorf("endpoint %s: the scheme must be http, https, unix or unixs", e)
	}
	if !strings.HasPrefix(host, "unix:") {
		// Without it gRPC would ask a resolver of its own what a colon means.
		host = "dns:///" + host
	}
	ep := endpoint{name: e, target: host, secure: secure, creds: insecure.NewCredentials()}
	if secure {
		if tlsConfig == nil {
			tlsConfig = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		ep.creds = credentials.NewTLS(tlsConfig)
	}
	return ep, nil
}

// RangeList lists all ranges in the order of their spans.
func (c *Client) RangeList(ctx context.Context) (*adminpb.RangeListResponse, error) {
	return c.RangeListOf(ctx, &adminpb.RangeListRequest{})
}

// RangeListOf lists the ranges that the request asks for, in the order of their spans.
func (c *Client) RangeListOf(ctx context.Context, q *adminpb.RangeListRequest) (*adminpb.RangeListResponse, error) {
	return call(ctx, c, q, adminpb.AdminClient.RangeList)
}

// RangeSplit makes a new range begin at the key. Asking twice is harmless: the second
// time is refused.
func (c *Client) RangeSplit(ctx context.Context, key []byte) (*adminpb.RangeSplitResponse, error) {
	return call(ctx, c, &adminpb.RangeSplitRequest{Key: key}, adminpb.AdminClient.RangeSplit)
}

// RangeShow dumps the state of a range's replicas.
func (c *Client) RangeShow(ctx context.Context, id uint64) (*adminpb.RangeShowResponse, error) {
	return call(ctx, c, &adminpb.RangeShowRequest{Id: id}, adminpb.AdminClient.RangeShow)
}

// RangeMove begins to put a range's replica on one node in the place of that on another.
// Asking twice is harmless: the second time is refused.
func (c *Client) RangeMove(ctx context.Context, id uint64, from, to string) (*adminpb.RangeMoveResponse, error) {
	return call(ctx, c, &adminpb.RangeMoveRequest{Id: id, From: from, To: to}, adminpb.AdminClient.RangeMove)
}

// RangeMerge begins to let a range absorb its right neighbour. Asking twice is harmless: the
// second time is refused, or is about the next neighbour if the first one is over.
func (c *Client) RangeMerge(ctx context.Context, left uint64) (*adminpb.RangeMergeResponse, error) {
	return call(ctx, c, &adminpb.RangeMergeRequest{Left: left}, adminpb.AdminClient.RangeMerge)
}

// RangeTransferLeader has another replica of a range lead it.
func (c *Client) RangeTransferLeader(ctx context.Context, id uint64, to string) error {
	_, err := call(ctx, c, &adminpb.RangeTransferLeaderRequest{Id: id, To: to}, adminpb.AdminClient.RangeTransferLeader)
	return err
}

// OperationList lists the operations under way, oldest first.
func (c *Client) OperationList(ctx context.Context) (*adminpb.OperationListResponse, error) {
	return call(ctx, c, &adminpb.OperationListRequest{}, adminpb.AdminClient.OperationList)
}

// movePoll lies between two looks at an operation that is waited for.
const movePoll = 200 * time.Millisecond

// operationLook bounds one look at an operation that is waited for.
const operationLook = 10 * time.Second

// AwaitOperation returns when the operation is over, or with ctx's error, or with that of many looks in a row. A stale
// list does not count.
func (c *Client) AwaitOperation(ctx context.Context, id uint64) error {
	for failed := 0; ; {
		look, cancel := context.WithTimeout(ctx, operationLook)
		l, err := c.OperationList(look)
		cancel()
		switch {
		case err != nil && (ctx.Err() != nil || failed == maxFailedLooks):
			return err
		case err != nil:
			failed++
		case !l.GetStale() && !slices.ContainsFunc(l.GetOperations(), func(o *adminpb.Operation) bool { return o.GetId() == id }):
			return nil
		default:
			failed = 0
		}
		if err := clock.Sleep(ctx, clock.System(), movePoll); err != nil {
			return err
		}
	}
}

// RangeMoved returns the range of a move that is over, or a *Refusal if its replica has not
// moved, or nobody knows. It asks the range's leader for the result, since the leader has
// carried the operation out. The map of the asked node may be older.
func (c *Client) RangeMoved(ctx context.Context, move *adminpb.Operation) (*adminpb.Range, error) {
	for {
		s, err := c.RangeShow(ctx, move.GetRange())
		switch r := s.GetRange(); {
		case err == nil && r.GetLeader() != "":
			return r, Moved(move, r.GetMembers())
		case err != nil && ctx.Err() == nil:
			return nil, err
		}
		if clock.Sleep(ctx, clock.System(), movePoll) != nil {
			return nil, notKnownYet(move, fmt.Sprintf("no leader of range %d answers", move.GetRange()), fmt.Sprintf("skein range show %d", move.GetRange()))
		}
	}
}

// RangesMerged returns the ranges as they are once a merge is over, or a *Refusal if nobody
// knows. A list that is stale, or lacks keys, does not tell the result.
func (c *Client) RangesMerged(ctx context.Context, merge *adminpb.Operation) (*adminpb.RangeListResponse, error) {
	for {
		l, err := c.RangeList(ctx)
		switch {
		case err == nil && !l.GetStale() && len(l.GetMissing()) == 0:
			return l, nil
		case err != nil && ctx.Err() == nil:
			return nil, err
		}
		if clock.Sleep(ctx, clock.System(), movePoll) != nil {
			return nil, &Refusal{
				Reason:   fmt.Sprintf("operation %d has ended, and whether range %d has absorbed range %d is not known yet: no node knows all ranges as they are now", merge.GetId(), merge.GetRange(), merge.GetRight()),
				NextStep: "look with skein range list what has come of it, and with skein node list which nodes are down",
				Later:    true,
			}
		}
	}
}

// notKnownYet says of a move that is over that nobody could say how it has ended.
func notKnownYet(move *adminpb.Operation, why, look string) error {
	hoped, _ := outcomes(move)
	return &Refusal{
		Reason:   fmt.Sprintf("operation %d has ended, and whether %s now is not known yet: %s", move.GetId(), hoped, why),
		NextStep: "look with " + look + " what has come of it, and with skein node list which nodes are down",
		Later:    true,
	}
}

// outcomes says in words what a move, the addition or the removal of a replica is to come to, and
// the contrary.
func outcomes(move *adminpb.Operation) (hoped, failed string) {
	switch from, to := move.GetFrom(), move.GetTo(); {
	case from == "":
		return to + " has a voter", to + " has no voter"
	case to == "":
		return from + " has no replica", from + " still has its replica"
	default:
		return fmt.Sprintf("the replica on %s is on %s", from, to), fmt.Sprintf("the replica on %s is not on %s", from, to)
	}
}

// Moved returns a *Refusal if a finished move has not replaced the old replica by a voter on its
// target: placement gives a move up when a node falls silent. A replica that was only added
// need only be there, and one that was removed only be gone.
func Moved[R interface {
	GetNode() string
	GetRole() string
}](move *adminpb.Operation, now []R) error {
	come := move.GetTo() == "" || slices.ContainsFunc(now, func(r R) bool { return r.GetNode() == move.GetTo() && r.GetRole() == "voter" })
	gone := move.GetFrom() == "" || !slices.ContainsFunc(now, func(r R) bool { return r.GetNode() == move.GetFrom() })
	if come && gone {
		return nil
	}
	_, failed := outcomes(move)
	return &Refusal{
		Reason: fmt.Sprintf("operation %d has ended, and %s now: it was given up, as where a node does not answer, or another change has followed",
			move.GetId(), failed),
		NextStep: "look with skein node list whether all answer, and with skein range list and skein placement show who holds what; then try again",
	}
}

// NodeList lists all nodes.
func (c *Client) NodeList(ctx context.Context) (*adminpb.NodeListResponse, error) {
	return call(ctx, c, &adminpb.NodeListRequest{}, adminpb.AdminClient.NodeList)
}

// NodeShow says what a node holds, and what it could not be asked for.
func (c *Client) NodeShow(ctx context.Context, node string) (*adminpb.NodeShowResponse, error) {
	return call(ctx, c, &adminpb.NodeShowRequest{Node: node}, adminpb.AdminClient.NodeShow)
}

// ChangeNode begins a change of a node and returns the node as it is then. Asking twice is
// harmless.
func (c *Client) ChangeNode(ctx context.Context, change NodeChange, node string) (*adminpb.Node, error) {
	f, ok := map[NodeChange]func(adminpb.AdminClient, context.Context, *adminpb.NodeChangeRequest, ...grpc.CallOption) (*adminpb.NodeChangeResponse, error){
		Drain: adminpb.AdminClient.NodeDrain, Undrain: adminpb.AdminClient.NodeUndrain,
		Decommission: adminpb.AdminClient.NodeDecommission, Recommission: adminpb.AdminClient.NodeRecommission,
		Remove: adminpb.AdminClient.NodeRemove,
	}[change]
	if !ok {
		return nil, fmt.Errorf("there is no change %q of a node", change)
	}
	r, err := call(ctx, c, &adminpb.NodeChangeRequest{Node: node}, f)
	return r.GetNode(), err
}

// PlacementPause has placement decide nothing by itself, or go on.
func (c *Client) PlacementPause(ctx context.Context, paused bool) error {
	_, err := call(ctx, c, &adminpb.PlacementPauseRequest{Paused: paused}, adminpb.AdminClient.PlacementPause)
	return err
}

// call asks the endpoints in their order until one answers. An endpoint that cannot
// be reached is passed over; every other error is the answer.
func call[Q, A any](ctx context.Context, c *Client, req *Q, f func(adminpb.AdminClient, context.Context, *Q, ...grpc.CallOption) (*A, error)) (*A, error) {
	var silent silence
	for _, ep := range c.endpoints {
		answer, err := callOne(ctx, c, ep, req, f)
		if err == nil {
			return answer, nil
		}
		if status.Code(err) != codes.Unavailable || refusal(err) != nil {
			return nil, asRefusal(ep, err)
		}
		silent.add(ep.name, ep.secure, err)
	}
	return nil, silent.refusal()
}

func callOne[Q, A any](ctx context.Context, c *Client, ep endpoint, req *Q, f func(adminpb.AdminClient, context.Context, *Q, ...grpc.CallOption) (*A, error)) (*A, error) {
	conn, err := c.connect(ep)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return callAs(ctx, &c.login, conn, req, f)
}

// connect returns a connection that its first call makes.
func (c *Client) connect(ep endpoint) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient(ep.target, grpc.WithTransportCredentials(ep.creds),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.DefaultConfig, MinConnectTimeout: c.dial}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
	if err != nil {
		return nil, fmt.Errorf("endpoint %s: %w", ep.name, err)
	}
	return conn, nil
}

// refusal returns the refusal that came with a status, if one did.
func refusal(err error) *Refusal {
	for _, d := range status.Convert(err).Details() {
		if r, ok := d.(*adminpb.Refusal); ok {
			return &Refusal{Reason: r.Reason, NextStep: r.NextStep, Removed: r.Removed}
		}
	}
	return nil
}

func asRefusal(ep endpoint, err error) error {
	s := status.Convert(err)
	if r := refusal(err); r != nil {
		r.Later = passes(s.Code())
		return r
	}
	reason, next := s.Message(), ""
	switch who := whoMay(err); {
	case who != nil:
		reason, next = who.Reason, who.NextStep
	case s.Code() == codes.Unimplemented:
		next = "check that the endpoint is a Skein node and not an etcd member"
	case s.Code() == codes.DeadlineExceeded || s.Code() == codes.Canceled:
		// Which of the two it is depends on who looks at the clock first.
		next = "try again with a longer --command-timeout, or with other --endpoints; of a split, look with skein range list first whether it happened"
	default:
		next = "see the log of that node"
	}
	return &Refusal{Reason: fmt.Sprintf("%s: %s", ep.name, reason), NextStep: next, Later: passes(s.Code())}
}

// passes says whether what a call ended with may pass by itself.
func passes(code codes.Code) bool {
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted:
		return true
	default:
		return false
	}
}

// PlacementShow returns who holds the placement group and who leads it.
func (c *Client) PlacementShow(ctx context.Context) (*adminpb.PlacementShowResponse, error) {
	return call(ctx, c, &adminpb.PlacementShowRequest{}, adminpb.AdminClient.PlacementShow)
}
