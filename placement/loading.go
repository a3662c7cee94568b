package placement

import (
	"context"
	"crypto/rand"
	"errors"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
)

// serveLoad takes a step of the load of a new cluster, or answers how far it is. Before a load begins, the
// allocations end and the ceiling is lowered to the last revision, as before a hand-over: so the state can
// tell that no revision was used.
func (s *Service) serveLoad(ctx context.Context, term uint64, o fsm.ChangeLoad) (response, error) {
	if o.Step == 0 {
		v := s.View()
		return response{MapVersion: v.Version, Loading: v.Loading}, nil
	}
	if err := errors.Join(s.knows(keyspace.VersionData, "loads"), storable(o.Position, o.Compacted)); err != nil {
		return response{}, kverror.Of(err)
	}
	if o.Step == fsm.LoadBegin {
		o.Now = s.wall()
		if err := s.sequencer.End(ctx, 0); err != nil {
			s.sequencer.Resume()
			return response{}, kverror.New(kverror.Timeout, "end the allocations of revisions: %v", err)
		}
		defer s.sequencer.Resume()
	}
	if o.Step == fsm.LoadAccess {
		o.Key = newSecret() // it counts if the step switches checks on
	}
	r := s.propose(ctx, term, o)
	if r.Err == nil && r.Loading != nil && (o.Step == fsm.LoadBegin || o.Step == fsm.LoadFinish || o.Step == fsm.LoadAbandon) {
		s.o.Logger.Warn("the load of this cluster goes into another phase: until it has finished no client can write",
			zap.Stringer("phase", r.Loading.Phase), zap.String("source", r.Loading.Source), zap.Int64("revision", int64(r.Loading.Position)))
	}
	return response{MapVersion: s.View().Version, Loading: r.Loading, Index: r.Access}, r.Err
}

// storable refuses revisions that an entry cannot have: every replica would refuse it, and nobody be answered.
func storable(revisions ...keyspace.Revision) error {
	for _, r := range revisions {
		if r < 0 || r >= keyspace.MaxRevision {
			return kverror.New(kverror.BadRequest, "revision %d: want 0 to %d", r, keyspace.MaxRevision-1)
		}
	}
	return nil
}

// secretBytes is the length of the secret of tokens' MACs.
const secretBytes = 32

// newSecret makes a secret of tokens' MACs.
func newSecret() []byte {
	key := make([]byte, secretBytes)
	_, _ = rand.Read(key) // never fails
	return key
}
