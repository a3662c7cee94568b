package driver

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/placement/fsm"
)

// upgradeAfter is UpgradeAfter's default: a day in which every node can go back to the build before.
const upgradeAfter = 24 * time.Hour

// upgrade raises the cluster version once all nodes have read the next one for long enough. A new
// cluster gets its first version as soon as its nodes have said what they read. Nothing goes back
// after that, so a hold and a pause stop it.
func (d *decider) upgrade(ctx context.Context, v *fsm.View) {
	to := v.NextVersion()
	if to == 0 || v.Map.ClusterVersion != 0 && !d.s.upgradeDue(v) {
		return
	}
	if err := d.s.o.Group.Propose(ctx, d.term, fsm.RaiseVersion{To: to}).Err; err != nil {
		d.s.o.Logger.Warn("the cluster version cannot be raised yet", zap.Uint32("to", uint32(to)), zap.Error(err))
		return
	}
	d.s.o.Logger.Info("the cluster version is raised", zap.Uint32("from", uint32(v.Map.ClusterVersion)), zap.Uint32("to", uint32(to)))
}

// upgradeDue says whether the cluster version is raised by itself now.
func (s *Driver) upgradeDue(v *fsm.View) bool {
	if s.o.UpgradeAfter < 0 || v.Paused() || v.UpgradeHeld() || len(v.CannotRead(v.NextVersion())) > 0 {
		return false
	}
	now := s.o.Group.Wall()
	for _, n := range v.NodeRows() {
		if n.State.Started() && (n.ReadsSince == 0 || now.Time().Sub(n.ReadsSince.Time()) < s.o.UpgradeAfter) {
			return false
		}
	}
	return true
}
