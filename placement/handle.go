package placement

import (
	"context"
	"errors"

	"go.uber.org/zap"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement/decide"
	"github.com/skeindb/skein/placement/driver"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/placement/sequencer"
	"github.com/skeindb/skein/transport"
)

// handleSequence answers method 32.
func (s *Service) handleSequence(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
	b, err := sequencer.DecodeBatch(payload)
	if err != nil {
		return fsm.EncodeError(kverror.New(kverror.BadRequest, "%v", err)), nil
	}
	g, err := s.sequencer.Begin(from, b).Wait(ctx)
	if err != nil {
		return fsm.EncodeError(err), nil
	}
	return g.Encode(), nil
}

// handleRequest answers method 33.
func (s *Service) handleRequest(ctx context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
	q, err := decodeRequest(payload)
	if err != nil {
		return fsm.EncodeError(kverror.New(kverror.BadRequest, "%v", err)), nil
	}
	a, err := s.serve(ctx, from, &q)
	if err != nil {
		return fsm.EncodeError(err), nil
	}
	return a.encode(q.Kind), nil
}

// handleFeed answers method 34: any replica of the placement group can that has a leader.
// Other nodes tell what they know, and who leads.
func (s *Service) handleFeed(ctx context.Context, _ keyspace.NodeID, first []byte, st transport.Stream) error {
	since, err := decodeFeedRequest(first)
	if err != nil {
		return err
	}
	// Before anything is asked of the replica: one that goes meanwhile is seen to have gone.
	s.mu.Lock()
	gone := s.detached
	s.mu.Unlock()
	if ok, _ := s.led(); ok {
		if err := s.serveFeed(ctx, gone, since, st); err != nil {
			return err
		}
	} else if m := s.heardMap(); m != nil && m.Version > since {
		// This node's map may be old, but the asker knows less. So a node that was away for
		// long learns who has the placement group now.
		if err := sendMap(ctx, m, m.Version, since, st); err != nil {
			return err
		}
	}
	return s.streamRefusal()
}

// streamRefusal ends a stream as refusal does a call.
func (s *Service) streamRefusal() error {
	e := kverror.Of(s.refusal())
	return &transport.RemoteError{Message: e.Error(), Detail: kverror.Append(nil, e)}
}

// handleLog answers method 35: the sequencer can.
func (s *Service) handleLog(ctx context.Context, _ keyspace.NodeID, first []byte, st transport.Stream) error {
	known, err := sequencer.DecodeLogRequest(first)
	if err != nil {
		return err
	}
	s.o.Metrics.LogFollowers.Inc()
	defer s.o.Metrics.LogFollowers.Dec()
	if err := sequencer.ServeLog(ctx, s.Log(), known, st); !errors.Is(err, sequencer.ErrNoSequencer) {
		return err
	}
	return s.streamRefusal()
}

// handleReport answers method 36: the leader can.
func (s *Service) handleReport(_ context.Context, from keyspace.NodeID, payload []byte) ([]byte, error) {
	p, err := driver.DecodePart(payload)
	if err != nil {
		return fsm.EncodeError(kverror.New(kverror.BadRequest, "%v", err)), nil
	}
	anew, err := s.takeReport(from, &p)
	if err != nil {
		return fsm.EncodeError(err), nil
	}
	return driver.EncodePartAnswer(anew), nil
}

// takeReport takes a part of what a node says of itself; anew says that a part before it
// is missing.
func (s *Service) takeReport(from keyspace.NodeID, p *driver.Part) (anew bool, err error) {
	s.mu.Lock()
	h := s.tracker
	s.mu.Unlock()
	if h == nil {
		return false, s.refusal()
	}
	return h.Report(from, p), nil
}

// serve answers one request of a node, this one or another.
func (s *Service) serve(ctx context.Context, from keyspace.NodeID, q *request) (response, error) {
	if q.maybeOld() {
		return s.serveLast(q.Kind) // any replica can
	}
	if at := s.View().AccessIndex(); q.Permit.Ended(at) {
		// This is for what is no command. Of the others the state has the last word.
		return response{}, kverror.New(kverror.AccessChanged, "rights were taken away at index %d", at)
	}
	ctx = keyspace.WithPermit(ctx, q.Permit)
	if q.Kind == requestLease {
		a, err := s.serveLease(ctx, &q.Lease)
		return response{Lease: a}, err
	}
	term, last, err := s.leads(ctx, q)
	if err != nil {
		return response{}, err
	}
	switch q.Kind {
	case requestAllocate:
		if q.Count == 0 {
			return response{}, kverror.New(kverror.BadRequest, "no range id asked for")
		}
		r := s.propose(ctx, term, fsm.AllocateRanges{Count: q.Count})
		return response{First: r.First}, r.Err
	case requestReport:
		return s.serveReport(ctx, term, q.Descriptors)
	case requestCompact:
		return s.serveCompact(ctx, term, last, q.Revision)
	case requestMembers:
		return response{Nodes: s.View().NodeTable()}, nil
	case requestPutNode:
		return response{}, s.servePutNode(ctx, term, from, q)
	case requestSetNodeState:
		return response{}, s.propose(ctx, term, fsm.SetNodeState{Node: q.To, From: q.From, To: q.Becomes, Leave: q.Leave, Beside: q.Beside, Now: s.wall()}).Err
	case requestRemoveNode:
		return response{}, s.propose(ctx, term, fsm.RemoveNode{Node: q.To, Now: s.wall()}).Err
	case requestKeepBorder:
		return response{}, s.propose(ctx, term, fsm.KeepBorder{Key: q.Key}).Err
	case requestRaiseVersion:
		return response{}, s.propose(ctx, term, fsm.RaiseVersion{To: q.Version}).Err
	case requestCredential:
		return s.serveCredential(q.User), nil
	case requestChangeAccess:
		return s.changeAccess(ctx, term, q)
	case requestAccessRows:
		return s.serveAccessRows(q.Key), nil
	case requestTakenAccess:
		s.taken.note(from, q.Index, s.o.Clock.Now())
		return response{Index: s.View().AccessIndex()}, nil
	case requestAwaitAccess:
		return s.serveAwaitAccess(ctx, term, q), nil
	case requestAlarms:
		return s.serveAlarms(ctx, term, q.Alarm)
	case requestPutHold, requestEndHold:
		return s.serveHold(ctx, term, q)
	case requestLoad:
		return s.serveLoad(ctx, term, q.Load)
	case requestTransfer:
		return response{}, s.TransferLeader(ctx, q.To)
	case requestPutSetting:
		if err := s.View().CheckSetting(q.Name, q.Value); err != nil {
			return response{}, err
		}
		return response{}, s.propose(ctx, term, fsm.PutSetting{Name: q.Name, Value: q.Value}).Err
	case requestBegin:
		q.Operation.Reason = decide.None // it was asked for, whoever asks
		o, err := s.driver.Begin(ctx, term, &q.Operation)
		return response{Operations: []fsm.Operation{o}}, err
	case requestSettings, requestOperations, requestStatus:
		return s.serveLast(q.Kind) // it leads, by now
	case requestLease:
	}
	return response{}, kverror.New(kverror.BadRequest, "request of kind %d", q.Kind)
}

// leads returns the term in which this node leads. If the answer must not be older than the
// question, leadership is proven at a moment after the request arrived. A proposal proves it by
// itself.
func (s *Service) leads(ctx context.Context, q *request) (term uint64, last keyspace.Revision, err error) {
	switch {
	case q.Linearizable, q.Kind == requestCompact, q.Kind == requestCredential, q.Kind == requestTakenAccess, q.Kind == requestAwaitAccess,
		q.Kind == requestAccessRows, q.Kind == requestAlarms && q.Alarm.Change == 0, q.Kind == requestLoad && q.Load.Step == 0:
		return s.sequencer.Confirm(ctx)
	}
	ls := s.machine.leaderState()
	if !ls.Ready {
		return 0, 0, s.refusal()
	}
	return ls.Term, 0, nil
}

// serveLast answers with what this node's replica has applied.
func (s *Service) serveLast(kind requestKind) (response, error) {
	g, v := s.replica(), s.View()
	if g == nil {
		return response{}, s.refusal()
	}
	switch kind {
	case requestSettings:
		return response{Revision: v.SettingsRevision(), Settings: v.Settings()}, nil
	case requestOperations:
		return response{Operations: v.Operations()}, nil
	default:
		st, own := g.Status(), v.PlacementGroup()
		return response{Status: Status{
			Leader: st.LeaderNode, Term: st.Term, Index: st.Commit, Applied: st.Applied,
			Replicas: own.Replicas, ConfIndex: own.ConfIndex,
		}}, nil
	}
}

// serveCompact raises the compacted revision as etcd does. last is the current
// revision at a moment after the request arrived. The answer leaves when the
// entry is applied here, after every allocation to come tells of it (P5).
func (s *Service) serveCompact(ctx context.Context, term uint64, last, at keyspace.Revision) (response, error) {
	if compacted := s.View().Compacted; at <= compacted {
		return response{}, &kverror.Error{Kind: kverror.Compacted, CompactRevision: max(compacted, 0)}
	}
	if at > last {
		return response{}, kverror.New(kverror.FutureRevision, "compact at %d, the current revision is %d", at, last)
	}
	r := s.propose(ctx, term, fsm.Compact{At: at})
	return response{Revision: last}, r.Err
}

func (s *Service) servePutNode(ctx context.Context, term uint64, from keyspace.NodeID, q *request) error {
	if err := q.Node.Validate(); err != nil || q.Node.ID == 0 || q.Change == fsm.NodePublishes && q.Node.ID != from {
		return kverror.New(kverror.BadRequest, "node %s describes node %s: %v", from, q.Node.ID, err)
	}
	if q.Change == fsm.NodePublishes {
		if old, ok := s.View().Node(from); ok && old.State.Started() && old.Says(&q.Node) {
			return nil
		}
	}
	return s.propose(ctx, term, fsm.PutNode{Change: q.Change, Now: s.wall(), Node: q.Node}).Err
}

// serveReport brings reported descriptors into the map. Descriptors that do not fit yet are
// kept and tried again with the next report, which may close their holes. The reporter is told
// of its own ones, and keeps them too.
func (s *Service) serveReport(ctx context.Context, term uint64, ds []keyspace.Descriptor) (response, error) {
	v := s.View()
	s.mu.Lock()
	all := append([]keyspace.Descriptor(nil), ds...)
	for id, d := range s.held {
		if old, ok := v.ByID(id); ok && !d.Newer(&old.Descriptor) || v.Outrun(&d) {
			delete(s.held, id)
			continue
		}
		if len(all) < fsm.MaxDescriptors {
			all = append(all, d)
		}
	}
	s.mu.Unlock()
	res := s.propose(ctx, term, fsm.Report{Descriptors: all})
	if res.Err != nil {
		return response{}, res.Err
	}
	if len(res.Held) == len(all) && len(all) > len(ds) {
		// The older held descriptors may be the ones that do not fit: try the report alone.
		if res = s.propose(ctx, term, fsm.Report{Descriptors: ds}); res.Err != nil {
			return response{}, res.Err
		}
	}
	return response{Held: s.keepHeld(ds, res.Held)}, nil
}

// keepHeld remembers what did not fit and returns those that are of the report.
func (s *Service) keepHeld(ds, held []keyspace.Descriptor) []keyspace.Descriptor {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := map[keyspace.RangeID]bool{}
	for i := range ds {
		own[ds[i].Range] = true
	}
	var mine []keyspace.Descriptor
	for _, d := range held {
		old, known := s.held[d.Range]
		if known && d.Newer(&old) || !known && len(s.held) < maxHeld {
			s.held[d.Range] = d
		}
		if own[d.Range] {
			mine = append(mine, d)
		}
	}
	if len(mine) > 0 {
		s.o.Logger.Debug("reported ranges do not fit into the map yet",
			zap.Int("ranges", len(mine)), zap.Stringer("range", mine[0].Range))
	}
	return mine
}
