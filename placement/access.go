package placement

import (
	"context"
	"crypto/rand"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rights"
)

// secretBytes is the length of the secret of tokens' MACs.
const secretBytes = 32

// serveCredential answers with what is applied here, which is not older than the question. Its index is that of
// the last change: nodes hear of changes, and would wait for any later index in vain.
func (s *Service) serveCredential(user string) response {
	v := s.View()
	if v.Access == nil {
		return response{}
	}
	return response{Credential: v.Access.Credential(user, v.Access.Changed)}
}

// changeAccess proposes a change of users and roles. The secret of the tokens' MAC is made with the change
// that switches checks on, so that no token from before counts.
func (s *Service) changeAccess(ctx context.Context, term uint64, q *request) error {
	if v := s.View().Map.ClusterVersion; v < keyspace.VersionAccess {
		return kverror.New(kverror.BadRequest, "users and roles need cluster version %d, and it is %d: skein upgrade status says what is missing", keyspace.VersionAccess, v)
	}
	o := fsm.ChangeAccess{Caller: q.Caller, Change: q.Access}
	if q.Access.Kind == rights.Enable {
		o.Key = make([]byte, secretBytes)
		_, _ = rand.Read(o.Key) // never fails
	}
	return s.propose(ctx, term, o).Err
}
