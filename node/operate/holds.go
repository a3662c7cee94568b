package operate

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/placement/fsm"
)

// Holds implements adminapi.HoldBackend.
func (a *Admin) Holds(ctx context.Context) (*adminpb.HoldListResponse, error) {
	if _, err := a.o.Placement.Map(ctx); err != nil { // it waits until there is one
		return nil, err
	}
	l := &adminpb.HoldListResponse{}
	for _, h := range a.o.Placement.KnownHolds() {
		l.Holds = append(l.Holds, holdRow(&h))
	}
	asked, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	if current, _, err := a.o.Routes.Present(asked); err == nil { // the holds are to be seen without it
		l.Revision = int64(current)
	}
	return l, nil
}

func holdRow(h *fsm.Hold) *adminpb.Hold {
	return &adminpb.Hold{
		Id: h.ID.String(), Kind: h.Kind, Owner: h.Owner, Revision: int64(h.Revision), MadeUnixMs: int64(h.Made), ExpiresUnixMs: int64(h.Expires),
	}
}

// ReleaseHold implements adminapi.HoldBackend. It returns when this node has heard of it.
func (a *Admin) ReleaseHold(ctx context.Context, id string) (_ *adminpb.Hold, err error) {
	defer a.explain(ctx, &err)
	n, err := strconv.ParseUint(id, 16, 64)
	if err != nil || n == 0 {
		return nil, &adminapi.Refusal{Reason: fmt.Sprintf("%q is no id of a hold", id), NextStep: "give one as skein hold list shows it"}
	}
	if _, err := a.o.Placement.Map(ctx); err != nil {
		return nil, err
	}
	find := func() (fsm.Hold, bool) {
		all := a.o.Placement.KnownHolds()
		i := slices.IndexFunc(all, func(h fsm.Hold) bool { return h.ID == fsm.HoldID(n) })
		if i < 0 {
			return fsm.Hold{}, false
		}
		return all[i], true
	}
	h, known := find()
	if !known {
		return nil, &adminapi.Refusal{Reason: "there is no such hold: it has expired or was released", NextStep: "skein hold list shows those that there are"}
	}
	if err := a.o.Placement.EndHold(ctx, h.ID); err != nil {
		return nil, err
	}
	for {
		_, changed := a.o.Placement.WatchMap()
		if _, known := find(); !known {
			return holdRow(&h), nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
