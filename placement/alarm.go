package placement

import (
	"context"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
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
	if at := v.Map.ClusterVersion; at < keyspace.VersionAccess {
		return response{}, kverror.New(kverror.BadRequest, "alarms that clients raise and end need cluster version %d, and it is %d: skein upgrade status says what is missing", keyspace.VersionAccess, at)
	}
	r := s.propose(ctx, term, o)
	a := response{MapVersion: s.View().Version}
	if r.Alarm != nil {
		a.Alarms = []fsm.Alarm{*r.Alarm}
	}
	return a, r.Err
}
