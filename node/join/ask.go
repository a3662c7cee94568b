package join

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/placement"
)

// ByAdminService returns a Joiner.Ask that asks the admin service of the nodes of --join.
func ByAdminService(cfg *config.Config) func(context.Context, *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	asked := 0
	return func(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
		tls, err := cfg.JoinTLS()
		if err != nil {
			return nil, err
		}
		// Each time another node comes first: the one that answers may hear no quorum while others do.
		first := asked % len(cfg.Join)
		asked++
		client, err := adminapi.NewClient(slices.Concat(cfg.Join[first:], cfg.Join[:first]), tls)
		if err != nil {
			return nil, fmt.Errorf("--join: %w", err)
		}
		a, err := client.NodeJoin(ctx, q)
		if r := (*adminapi.Refusal)(nil); errors.As(err, &r) && r.Later {
			// Its own next step speaks of a flag of skein's commands.
			err = later(&adminapi.Refusal{Reason: r.Reason, NextStep: joinLater, Later: true})
		}
		return a, err
	}
}

// AskAgain returns a Joiner.Ask that asks once more whatever is no final *adminapi.Refusal.
func AskAgain(
	ask func(context.Context, *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error),
) func(context.Context, *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	return func(ctx context.Context, q *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
		a, err := ask(ctx, q)
		if r := (*adminapi.Refusal)(nil); err != nil && (!errors.As(err, &r) || r.Later) {
			err = later(err)
		}
		return a, err
	}
}

func later(err error) error { return fmt.Errorf("%w: %w", ErrLater, err) }

// joinLater is the next step of an operator whose node cannot join yet.
const joinLater = "it asks again by itself: look whether --join names client URLs of running nodes, and with skein node list whether these have a quorum"

// request asks to be admitted, or, for the directory of a node, what has become of that node.
func request(name string, peerURLs []string, who engine.Identity) *adminpb.NodeJoinRequest {
	q := &adminpb.NodeJoinRequest{Name: name, PeerUrls: slices.Sorted(slices.Values(peerURLs)), Instance: who.Instance}
	if who.Node != 0 {
		q.Cluster, q.Node = who.Cluster.String(), who.Node.String()
	}
	return q
}

func answerOf(a *adminpb.NodeJoinResponse) (*answer, error) {
	cluster, err := parseID(a.GetCluster())
	if err != nil {
		return nil, err
	}
	self, err := parseID(a.GetNode())
	if err != nil {
		return nil, err
	}
	nodes, err := placement.DecodeNodeTable(a.GetNodeTable())
	return &answer{cluster: keyspace.ClusterID(cluster), self: keyspace.NodeID(self), nodes: nodes}, err
}

func parseID(text string) (uint64, error) {
	id, err := strconv.ParseUint(text, 16, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is no id: %w", text, err)
	}
	return id, nil
}

// sameURLs reports whether both are the same URLs, in any order.
func sameURLs(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// ErrLater is wrapped by an answer to Joiner.Ask that may pass by itself.
var ErrLater = errors.New("nobody could tell")
