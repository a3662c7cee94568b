package placement

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/placement/fsm"
)

// serveAlarms changes an alarm for a client, or answers with all of them as they are applied here, which is
// not older than the question.
func (s *Service) serveAlarms(ctx context.Context, term uint64, o fsm.ChangeAlarm) (response, error) {
	v := s.View()
	if o.Change == 0 {
		a := response{MapVersion: v.Version}
		if v.Alarms != nil {
			a.Alarms = v.Alarms.All
		}
		return a, nil
	}
	if err := s.knowsAccess("alarms that clients raise and end"); err != nil {
		return response{}, err
	}
	r := s.propose(ctx, term, o)
	a := response{MapVersion: s.View().Version}
	if r.Alarm != nil {
		a.Alarms = []fsm.Alarm{*r.Alarm}
		s.o.Logger.Warn("a client has raised or ended an alarm (1 is NOSPACE, 2 is CORRUPT): a raised one refuses writes on all nodes until a client ends it",
			zap.Stringer("peer", o.Alarm.Member), zap.Int32("type", int32(o.Alarm.Type)), zap.Bool("raised", o.Change == fsm.AlarmActivated))
	}
	return a, r.Err
}
