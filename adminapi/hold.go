package adminapi

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"

	"github.com/skeindb/skein/api/adminpb"
)

// HoldBackend is what the service asks of the node about holds of old versions.
type HoldBackend interface {
	// Holds returns all holds, in any order.
	Holds(ctx context.Context) (*adminpb.HoldListResponse, error)
	// ReleaseHold ends the hold with that id and returns what it was. A [Refusal] says that there is none.
	ReleaseHold(ctx context.Context, id string) (*adminpb.Hold, error)
}

// lookAtHolds is the next step after a release whose outcome is not known.
const lookAtHolds = "look with skein hold list whether it is there, then try again with a longer --command-timeout" + lookForQuorum

func (s *server) HoldList(ctx context.Context, _ *adminpb.HoldListRequest) (*adminpb.HoldListResponse, error) {
	l, err := s.backend.Holds(ctx)
	if err != nil {
		return nil, grpcError("list the holds", err, readAgain)
	}
	slices.SortFunc(l.Holds, func(a, b *adminpb.Hold) int {
		return cmp.Or(cmp.Compare(a.MadeUnixMs, b.MadeUnixMs), cmp.Compare(a.Id, b.Id))
	})
	return l, nil
}

func (s *server) HoldRelease(ctx context.Context, q *adminpb.HoldReleaseRequest) (*adminpb.HoldReleaseResponse, error) {
	h, err := s.backend.ReleaseHold(ctx, q.Id)
	if err != nil {
		return nil, grpcError("release hold "+strconv.Quote(q.Id), err, lookAtHolds)
	}
	return &adminpb.HoldReleaseResponse{Hold: h}, nil
}

// HoldList lists what keeps old versions from being removed, the oldest first.
func (c *Client) HoldList(ctx context.Context) (*adminpb.HoldListResponse, error) {
	return call(ctx, c, &adminpb.HoldListRequest{}, adminpb.AdminClient.HoldList)
}

// HoldRelease ends a hold and returns what it was. Whoever reads by it is told so. A [Refusal] says that there is none.
func (c *Client) HoldRelease(ctx context.Context, id string) (*adminpb.Hold, error) {
	a, err := call(ctx, c, &adminpb.HoldReleaseRequest{Id: id}, adminpb.AdminClient.HoldRelease)
	return a.GetHold(), err
}

// holdJSON is a hold as -w json prints it; the order of the fields is part of the output.
type holdJSON struct {
	ID       string `json:"id"`
	Kind     string `json:"kind"`
	Owner    string `json:"owner"`
	Revision int64  `json:"revision"`
	// Behind is how many revisions have come since; absent where the current one is not known.
	Behind  *int64 `json:"behind,omitempty"`
	Since   string `json:"since"`
	Expires string `json:"expires"`
	// Stale says that no quorum answered: it may have been ended, or its expiry put off, since.
	Stale bool `json:"stale,omitempty"`
}

func toHoldJSON(h *adminpb.Hold, current int64) holdJSON {
	j := holdJSON{ID: h.GetId(), Kind: h.GetKind(), Owner: h.GetOwner(), Revision: h.GetRevision(), Since: when(h.GetMadeUnixMs()), Expires: when(h.GetExpiresUnixMs())}
	if current > 0 {
		j.Behind = new(max(0, current-h.GetRevision()))
	}
	return j
}

// staleHoldsNote goes beside a table of holds that is stale; JSON says it in a field of each.
const staleHoldsNote = "stale: no quorum answers; these are the holds that the asked node knew last"

// WriteHolds prints holds, and on notes what a table has no place for. Whoever knows no current revision has had no answer
// of a quorum.
func WriteHolds(out, notes io.Writer, format Format, l *adminpb.HoldListResponse) error {
	all, stale := []holdJSON{}, l.GetRevision() == 0
	for _, h := range l.GetHolds() {
		j := toHoldJSON(h, l.GetRevision())
		j.Stale = stale
		all = append(all, j)
	}
	if format == JSON {
		return writeJSON(out, all)
	}
	if stale {
		if _, err := fmt.Fprintln(notes, staleHoldsNote); err != nil {
			return err
		}
	}
	if len(all) == 0 {
		fmt.Fprintln(out, "no holds: compactions remove old versions")
		return nil
	}
	rows := [][]string{{"HOLD", "KIND", "OWNER", "REVISION", "BEHIND", "SINCE", "EXPIRES"}}
	for _, h := range all {
		behind := "?"
		if h.Behind != nil {
			behind = strconv.FormatInt(*h.Behind, 10)
		}
		rows = append(rows, []string{h.ID, orDash(h.Kind), orDash(h.Owner), strconv.FormatInt(h.Revision, 10), behind, h.Since, h.Expires})
	}
	return writeTable(out, rows)
}

func orDash(s string) string { return cmp.Or(s, "-") }

// WriteReleased prints a hold that was ended.
func WriteReleased(out io.Writer, format Format, h *adminpb.Hold) error {
	if format == JSON {
		return writeJSON(out, toHoldJSON(h, 0))
	}
	_, err := fmt.Fprintf(out, "released hold %s of revision %d: %s of %s\n", h.GetId(), h.GetRevision(), orDash(h.GetKind()), orDash(h.GetOwner()))
	return err
}
