package placement

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// serveHold changes a hold.
func (s *Service) serveHold(ctx context.Context, term uint64, q *request) (response, error) {
	if err := s.knows(keyspace.VersionData, "holds of old versions"); err != nil {
		return response{}, err
	}
	if q.Kind == requestEndHold {
		return response{}, s.propose(ctx, term, q.EndHold).Err
	}
	return s.servePutHold(ctx, term, q.PutHold)
}

// servePutHold makes a hold, renews it or moves it up, by this node's clock.
func (s *Service) servePutHold(ctx context.Context, term uint64, o fsm.PutHold) (response, error) {
	if o.Life <= 0 {
		return response{}, kverror.New(kverror.BadRequest, "a hold for %s", o.Life)
	}
	if err := storable(o.Revision); err != nil {
		return response{}, err
	}
	_, known := s.View().Holds.Find(o.ID)
	o.Now = s.wall()
	r := s.propose(ctx, term, o)
	a := response{MapVersion: s.View().Version}
	if r.Hold != nil {
		a.Hold = *r.Hold
		if !known {
			s.o.Logger.Info("old versions are held for a cut through the whole store: no range removes them until it is released or expires",
				zap.Stringer("hold", o.ID), zap.String("kind", o.Kind), zap.String("owner", o.Owner), zap.Int64("revision", int64(r.Hold.Revision)))
		}
	}
	return a, r.Err
}
