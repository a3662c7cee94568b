package adminapi

import (
	"context"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// PlacementBackend is what the service asks of the node about who holds the placement
// group. Nodes are named as for Mover.
type PlacementBackend interface {
	// PlacementGroup returns the members of the placement group and its leader. Without a quorum
	// it returns the last known state, marked as stale.
	PlacementGroup(ctx context.Context) (*adminpb.PlacementShowResponse, error)
	// MovePlacement begins to put its replica on one node in the place of that on another. Without
	// from it adds a voter, and without to it removes one.
	MovePlacement(ctx context.Context, from, to string) (*adminpb.Operation, error)
	// TransferPlacement has the node lead it.
	TransferPlacement(ctx context.Context, to string) error
	// SetReplication has each range get so many voters, or with dryRun only says what that
	// would mean.
	SetReplication(ctx context.Context, factor int, dryRun bool) (*adminpb.PlacementSetReplicationResponse, error)
	// SetMergeAfter has small and cold neighbours merged by themselves after so long; 0 is by
	// command alone, nil what each node was started with.
	SetMergeAfter(ctx context.Context, after *time.Duration) error
}

// lookAtPlacement is the next step after a change whose outcome is not known.
const lookAtPlacement = "look with skein placement show whether it happened, then try again with a longer --command-timeout" + lookForQuorum

func (s *server) PlacementShow(ctx context.Context, _ *adminpb.PlacementShowRequest) (*adminpb.PlacementShowResponse, error) {
	resp, err := s.backend.PlacementGroup(ctx)
	if err != nil {
		return nil, grpcError("show the placement group", err, readAgain)
	}
	return resp, nil
}

func (s *server) PlacementMove(ctx context.Context, r *adminpb.PlacementMoveRequest) (*adminpb.PlacementMoveResponse, error) {
	o, err := s.backend.MovePlacement(ctx, r.From, r.To)
	if err != nil {
		what := fmt.Sprintf("move the placement group from %s to %s", r.From, r.To)
		switch {
		case r.From == "":
			what = fmt.Sprintf("add a voter of the placement group on %s", r.To)
		case r.To == "":
			what = fmt.Sprintf("remove the voter of the placement group on %s", r.From)
		}
		return nil, grpcError(what, err, lookForOperations)
	}
	return &adminpb.PlacementMoveResponse{Operation: o}, nil
}

func (s *server) PlacementTransferLeader(ctx context.Context, r *adminpb.PlacementTransferLeaderRequest) (*adminpb.PlacementTransferLeaderResponse, error) {
	if err := s.backend.TransferPlacement(ctx, r.To); err != nil {
		return nil, grpcError(fmt.Sprintf("have %s lead the placement group", r.To), err, lookAtPlacement)
	}
	return &adminpb.PlacementTransferLeaderResponse{}, nil
}

// PlacementMoved returns who holds the placement group once a move of it is over, or a
// *Refusal where its replica has not moved, or nobody knows.
func (c *Client) PlacementMoved(ctx context.Context, move *adminpb.Operation) (*adminpb.PlacementShowResponse, error) {
	for {
		p, err := c.PlacementShow(ctx)
		switch {
		case err == nil && !p.GetStale():
			return p, Moved(move, p.GetReplicas())
		case err != nil && ctx.Err() == nil:
			return nil, err
		}
		if clock.Sleep(ctx, clock.System(), movePoll) != nil {
			return nil, notKnownYet(move, "no quorum of the placement group answers", "skein placement show")
		}
	}
}

// PlacementMove begins to put the placement group's replica on one node in the place of
// that on another. Without from it adds a voter, and without to it removes one. Asking twice is
// harmless: the second time is refused.
func (c *Client) PlacementMove(ctx context.Context, from, to string) (*adminpb.PlacementMoveResponse, error) {
	return call(ctx, c, &adminpb.PlacementMoveRequest{From: from, To: to}, adminpb.AdminClient.PlacementMove)
}

// PlacementTransferLeader has another replica of the placement group lead it.
func (c *Client) PlacementTransferLeader(ctx context.Context, to string) error {
	_, err := call(ctx, c, &adminpb.PlacementTransferLeaderRequest{To: to}, adminpb.AdminClient.PlacementTransferLeader)
	return err
}

// PlacementSetMergeAfter has small and cold neighbours merged by themselves after so long; 0
// is by command alone, nil what each node was started with. Asking twice is harmless.
func (c *Client) PlacementSetMergeAfter(ctx context.Context, after *time.Duration) error {
	q := &adminpb.PlacementSetMergeAfterRequest{}
	if after != nil {
		q.MergeAfterMs = new(after.Milliseconds())
		if *after != 0 && *q.MergeAfterMs == 0 {
			q.MergeAfterMs = new(int64(1)) // too short, and not off
		}
	}
	_, err := call(ctx, c, q, adminpb.AdminClient.PlacementSetMergeAfter)
	return err
}

func (s *server) PlacementSetMergeAfter(ctx context.Context, q *adminpb.PlacementSetMergeAfterRequest) (*adminpb.PlacementSetMergeAfterResponse, error) {
	var after *time.Duration
	if q.MergeAfterMs != nil {
		// The backend refuses negative times, and times too long for nanoseconds.
		ms := min(max(q.GetMergeAfterMs(), -1), int64(math.MaxInt64/time.Millisecond))
		after = new(time.Duration(ms) * time.Millisecond)
	}
	if err := s.backend.SetMergeAfter(ctx, after); err != nil {
		return nil, grpcError("set after how long ranges are merged", err, lookAtPlacement)
	}
	return &adminpb.PlacementSetMergeAfterResponse{}, nil
}

// mergeAfterText says after how long ranges are merged by themselves, "" where only the flags
// of the nodes say it.
func mergeAfterText(p *adminpb.PlacementShowResponse) string {
	switch {
	case p.MergeAfterMs == nil:
		return ""
	case p.GetMergeAfterMs() == 0:
		return "off"
	}
	return (time.Duration(p.GetMergeAfterMs()) * time.Millisecond).String()
}

// stalePlacementNote goes beside what may be old of placement; JSON says it in a field.
const stalePlacementNote = "stale: no quorum of the placement group answers; this is what one of its replicas, or the asked node, knew last"

// WritePlacement prints who holds the placement group, and on notes what a table has no place
// for.
func WritePlacement(w, notes io.Writer, f Format, p *adminpb.PlacementShowResponse) error {
	if f == JSON {
		type replica struct {
			Node      string `json:"node"`
			ReplicaID uint64 `json:"replica_id"`
			Role      string `json:"role"`
		}
		out := struct {
			Leader      string           `json:"leader"`
			Term        uint64           `json:"term"`
			Replicas    []replica        `json:"replicas"`
			Replication *replicationJSON `json:"replication,omitempty"`
			MergeAfter  string           `json:"merge_after,omitempty"`
			Stale       bool             `json:"stale,omitempty"`
		}{p.GetLeader(), p.GetTerm(), []replica{}, replicationToJSON(p.GetReplication()), mergeAfterText(p), p.GetStale()}
		for _, r := range p.GetReplicas() {
			out.Replicas = append(out.Replicas, replica{r.GetNode(), r.GetReplicaId(), r.GetRole()})
		}
		return writeJSON(w, out)
	}
	if p.GetStale() {
		if _, err := fmt.Fprintln(notes, stalePlacementNote); err != nil {
			return err
		}
	}
	rows, voters := [][]string{{"NODE", "REPLICA", "ROLE", "LEADS"}}, 0
	for _, r := range p.GetReplicas() {
		if r.GetRole() == "voter" {
			voters++
		}
		leads := ""
		if r.GetNode() == p.GetLeader() {
			leads = fmt.Sprintf("in term %d", p.GetTerm())
		}
		rows = append(rows, []string{r.GetNode(), fmt.Sprint(r.GetReplicaId()), r.GetRole(), leads})
	}
	if voters > 0 && voters%2 == 0 {
		if _, err := fmt.Fprintf(notes, "note: %d voters survive no more losses than %d\n", voters, voters-1); err != nil {
			return err
		}
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	if err := writeReplicationTable(w, p.GetReplication()); err != nil {
		return err
	}
	if after := mergeAfterText(p); after != "" {
		return writeTable(w, [][]string{{"MERGE AFTER"}, {after}})
	}
	return nil
}
