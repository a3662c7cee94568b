package adminapi

import (
	"context"
	"fmt"
	"io"

	"github.com/skeindb/skein/api/adminpb"
)

// ClusterBackend is what the service asks of the node about the cluster version.
type ClusterBackend interface {
	// ClusterVersion returns the cluster version, and what each node reads.
	ClusterVersion(ctx context.Context) (*adminpb.ClusterShowResponse, error)
	// Upgrade raises the cluster version by one and returns it. A [Refusal] names the nodes that
	// do not read it.
	Upgrade(ctx context.Context) (version uint32, err error)
	// HoldUpgrade has the version be raised by command alone, or by itself again.
	HoldUpgrade(ctx context.Context, hold bool) error
}

// lookAtCluster is the next step after an upgrade whose outcome is not known.
const lookAtCluster = "look with skein cluster show whether it happened, then try again with a longer --command-timeout" + lookForQuorum

func (s *server) ClusterShow(ctx context.Context, _ *adminpb.ClusterShowRequest) (*adminpb.ClusterShowResponse, error) {
	resp, err := s.backend.ClusterVersion(ctx)
	if err != nil {
		return nil, grpcError("show the cluster version", err, readAgain)
	}
	return resp, nil
}

func (s *server) ClusterUpgrade(ctx context.Context, q *adminpb.ClusterUpgradeRequest) (*adminpb.ClusterUpgradeResponse, error) {
	if q.Hold != nil {
		if err := s.backend.HoldUpgrade(ctx, q.GetHold()); err != nil {
			return nil, grpcError("set whether the cluster is upgraded by itself", err, lookAtCluster)
		}
		return &adminpb.ClusterUpgradeResponse{}, nil
	}
	v, err := s.backend.Upgrade(ctx)
	if err != nil {
		return nil, grpcError("upgrade the cluster", err, lookAtCluster)
	}
	return &adminpb.ClusterUpgradeResponse{Version: v}, nil
}

// ClusterShow returns the cluster version, and what each node reads.
func (c *Client) ClusterShow(ctx context.Context) (*adminpb.ClusterShowResponse, error) {
	return call(ctx, c, &adminpb.ClusterShowRequest{}, adminpb.AdminClient.ClusterShow)
}

// ClusterUpgrade raises the cluster version by one and returns it. There is no way back. A
// [Refusal] names the nodes that do not read it.
func (c *Client) ClusterUpgrade(ctx context.Context) (version uint32, err error) {
	a, err := call(ctx, c, &adminpb.ClusterUpgradeRequest{}, adminpb.AdminClient.ClusterUpgrade)
	return a.GetVersion(), err
}

// ClusterHold has the cluster version be raised by command alone, or by itself again. Asking twice
// is harmless.
func (c *Client) ClusterHold(ctx context.Context, hold bool) error {
	_, err := call(ctx, c, &adminpb.ClusterUpgradeRequest{Hold: &hold}, adminpb.AdminClient.ClusterUpgrade)
	return err
}

// clusterJSON is what skein cluster show prints with -w json; the order of the fields is part of
// the output.
type clusterJSON struct {
	Version uint32             `json:"version"`
	Next    uint32             `json:"next,omitempty"`
	Held    bool               `json:"held,omitempty"`
	Nodes   []nodeVersionsJSON `json:"nodes"`
	Stale   bool               `json:"stale,omitempty"`
}

type nodeVersionsJSON struct {
	Name   string `json:"name"`
	Build  string `json:"build"`
	Oldest uint32 `json:"oldest"`
	Newest uint32 `json:"newest"`
	Since  string `json:"since,omitempty"`
}

// WriteCluster prints the cluster version, and what each node reads.
func WriteCluster(out, notes io.Writer, format Format, r *adminpb.ClusterShowResponse) error {
	if format == JSON {
		j := clusterJSON{Version: r.GetVersion(), Next: r.GetNext(), Held: r.GetHeld(), Nodes: []nodeVersionsJSON{}, Stale: r.GetStale()}
		for _, n := range r.GetNodes() {
			j.Nodes = append(j.Nodes, nodeVersionsJSON{n.GetName(), n.GetBuild(), n.GetOldest(), n.GetNewest(), when(n.GetSinceUnixMs())})
		}
		return writeJSON(out, j)
	}
	if r.GetStale() {
		fmt.Fprintln(notes, staleNote)
	}
	fmt.Fprintf(out, "cluster version %d", r.GetVersion())
	if r.GetNext() != 0 {
		fmt.Fprintf(out, ", next %d", r.GetNext())
	}
	if r.GetHeld() {
		fmt.Fprint(out, ", raised by command alone")
	}
	fmt.Fprintln(out)
	rows := [][]string{{"NODE", "BUILD", "READS", "SINCE"}}
	for _, n := range r.GetNodes() {
		reads := "unknown"
		if n.GetNewest() != 0 {
			reads = fmt.Sprintf("%d to %d", n.GetOldest(), n.GetNewest())
		}
		rows = append(rows, []string{n.GetName(), n.GetBuild(), reads, when(n.GetSinceUnixMs())})
	}
	return writeTable(out, rows)
}
