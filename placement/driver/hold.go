package driver

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/placement/fsm"
)

// endHolds ends the holds that nobody has renewed in time. A leader's clock that is wrong ends one too early:
// who reads by it is told so by the ranges.
func (d *decider) endHolds(ctx context.Context, v *fsm.View) {
	if v.Holds == nil {
		return
	}
	now := d.s.o.Group.Wall()
	for _, h := range v.Holds.All {
		if h.Expires > now {
			continue
		}
		fields := []zap.Field{zap.Stringer("hold", h.ID), zap.String("kind", h.Kind), zap.String("owner", h.Owner), zap.Int64("revision", int64(h.Revision))}
		if err := d.s.o.Group.Propose(ctx, d.term, fsm.EndHold{ID: h.ID, Expires: h.Expires}).Err; err != nil {
			// The next round tries again.
			d.s.o.Logger.Warn("a hold of old versions has expired and cannot be ended yet", append(fields, zap.Error(err))...)
			continue
		}
		d.s.o.Logger.Warn("a hold of old versions has expired, since nobody has renewed it: they are removed now", fields...)
	}
}
