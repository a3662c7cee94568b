package fakekv

import (
	"bytes"
	"context"
	"maps"
	"slices"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// apply does the operations of a transaction whose compares are of versions above -1 or equal mod_revisions. All of
// them have one revision.
func (s *Store) apply(in *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &etcdserverpb.TxnResponse{Succeeded: true}
	for _, c := range in.Compare {
		switch {
		case c.Target == etcdserverpb.Compare_VERSION && c.Result == etcdserverpb.Compare_GREATER && c.GetVersion() == -1:
		case c.Target == etcdserverpb.Compare_MOD && c.Result == etcdserverpb.Compare_EQUAL:
			out.Succeeded = out.Succeeded && s.kvs[string(c.Key)].GetModRevision() == c.GetModRevision()
		default:
			return nil, status.Errorf(codes.Unimplemented, "compare %v", c)
		}
	}
	ops := in.Success
	if !out.Succeeded {
		ops = in.Failure
	}
	at := s.revision + 2
	changed := false
	for _, op := range ops {
		switch r := op.Request.(type) {
		case *etcdserverpb.RequestOp_RequestPut:
			s.put(at, r.RequestPut)
			changed = true
			out.Responses = append(out.Responses, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponsePut{ResponsePut: &etcdserverpb.PutResponse{}}})
		case *etcdserverpb.RequestOp_RequestDeleteRange:
			n := s.remove(at, r.RequestDeleteRange)
			changed = changed || n > 0
			out.Responses = append(out.Responses, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponseDeleteRange{
				ResponseDeleteRange: &etcdserverpb.DeleteRangeResponse{Deleted: n},
			}})
		case *etcdserverpb.RequestOp_RequestRange:
			out.Responses = append(out.Responses, &etcdserverpb.ResponseOp{Response: &etcdserverpb.ResponseOp_ResponseRange{ResponseRange: s.read(r.RequestRange)}})
		default:
			return nil, status.Errorf(codes.Unimplemented, "operation %T", r)
		}
	}
	if changed {
		s.advance(at)
	}
	out.Header = &etcdserverpb.ResponseHeader{Revision: s.revision + 1}
	return out, nil
}

// at returns the keys as they were at a revision. The caller holds the lock.
func (s *Store) at(revision int64) map[string]*mvccpb.KeyValue {
	kvs := map[string]*mvccpb.KeyValue{}
	for _, e := range s.events {
		switch {
		case e.Kv.ModRevision > revision:
		case e.Type == mvccpb.DELETE:
			delete(kvs, string(e.Kv.Key))
		default:
			kvs[string(e.Kv.Key)] = e.Kv
		}
	}
	return kvs
}

// advance makes a revision the last one, and wakes the watchers. The caller holds the lock.
func (s *Store) advance(at int64) {
	s.revision = at - 1
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
}

// put stores a key at a revision. The caller holds the lock.
func (s *Store) put(at int64, in *etcdserverpb.PutRequest) {
	if s.kvs == nil {
		s.kvs = map[string]*mvccpb.KeyValue{}
	}
	kv := &mvccpb.KeyValue{Key: slices.Clone(in.Key), Value: slices.Clone(in.Value), ModRevision: at, Lease: in.Lease}
	s.kvs[string(in.Key)] = kv
	s.events = append(s.events, &mvccpb.Event{Kv: kv})
}

// remove deletes keys at a revision. The caller holds the lock.
func (s *Store) remove(at int64, in *etcdserverpb.DeleteRangeRequest) (n int64) {
	for _, key := range slices.Sorted(maps.Keys(s.kvs)) {
		if key == string(in.Key) || len(in.RangeEnd) > 0 && key >= string(in.Key) && key < string(in.RangeEnd) {
			delete(s.kvs, key)
			s.events = append(s.events, &mvccpb.Event{Type: mvccpb.DELETE, Kv: &mvccpb.KeyValue{Key: []byte(key), ModRevision: at}})
			n++
		}
	}
	return n
}

// DeleteRange implements etcdserverpb.KVServer.
func (s *Store) DeleteRange(_ context.Context, in *etcdserverpb.DeleteRangeRequest) (*etcdserverpb.DeleteRangeResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.remove(s.revision+2, in)
	if n > 0 {
		s.advance(s.revision + 2)
	}
	return &etcdserverpb.DeleteRangeResponse{Header: &etcdserverpb.ResponseHeader{Revision: s.revision + 1}, Deleted: n}, nil
}

// LeaseGrant implements etcdserverpb.LeaseServer. No lease expires.
func (s *Store) LeaseGrant(_ context.Context, in *etcdserverpb.LeaseGrantRequest) (*etcdserverpb.LeaseGrantResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := in.ID
	if id == 0 {
		s.granted++
		id = s.granted
	}
	if s.leases[id] {
		return nil, rpctypes.ErrGRPCLeaseExist
	}
	if s.leases == nil {
		s.leases = map[int64]bool{}
	}
	s.leases[id] = true
	return &etcdserverpb.LeaseGrantResponse{ID: id, TTL: in.TTL}, nil
}

// LeaseRevoke implements etcdserverpb.LeaseServer. It leaves the keys.
func (s *Store) LeaseRevoke(_ context.Context, in *etcdserverpb.LeaseRevokeRequest) (*etcdserverpb.LeaseRevokeResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.leases[in.ID] {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	delete(s.leases, in.ID)
	return &etcdserverpb.LeaseRevokeResponse{}, nil
}

// Leases returns how many leases there are.
func (s *Store) Leases() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.leases)
}

// Authenticate implements etcdserverpb.AuthServer: with a User, a login must be his.
func (s *Store) Authenticate(_ context.Context, in *etcdserverpb.AuthenticateRequest) (*etcdserverpb.AuthenticateResponse, error) {
	switch {
	case s.User == "":
		return nil, rpctypes.ErrGRPCAuthNotEnabled
	case in.Name != s.User || in.Password != s.Password:
		return nil, rpctypes.ErrGRPCAuthFailed
	}
	return &etcdserverpb.AuthenticateResponse{Token: s.token()}, nil
}

func (s *Store) token() string { return "token of " + s.User }

// allowed checks the token of a request, if there is a User.
func (s *Store) allowed(ctx context.Context) error {
	sent, _ := metadata.FromIncomingContext(ctx)
	if s.User != "" && !slices.Contains(sent.Get(rpctypes.TokenFieldNameGRPC), s.token()) {
		return rpctypes.ErrGRPCUserEmpty
	}
	return nil
}

// Watch implements etcdserverpb.WatchServer: watchers of spans from a revision on, and progress on request.
func (s *Store) Watch(stream etcdserverpb.Watch_WatchServer) error {
	requests := make(chan *etcdserverpb.WatchRequest)
	go func() {
		defer close(requests)
		for {
			in, err := stream.Recv()
			if err != nil {
				return
			}
			select {
			case requests <- in:
			case <-stream.Context().Done():
				return
			}
		}
	}()
	var watchers []*etcdserverpb.WatchCreateRequest
	next := 0 // of the store's events
	for {
		events, more, revision := s.eventsFrom(next)
		next += len(events)
		if err := s.send(stream, watchers, events); err != nil {
			return err
		}
		header := &etcdserverpb.ResponseHeader{Revision: revision}
		select {
		case in, ok := <-requests:
			switch c := in.GetCreateRequest(); {
			case !ok:
				return nil
			case c != nil:
				if c.StartRevision == 0 {
					c.StartRevision = revision + 1
				}
				// What had been sent to the others before this one was there.
				past, _, _ := s.eventsFrom(0)
				id := int64(len(watchers))
				watchers = append(watchers, c)
				if err := stream.Send(&etcdserverpb.WatchResponse{Header: header, WatchId: id, Created: true}); err != nil {
					return err
				}
				if err := s.sendTo(stream, id, c, past[:next]); err != nil {
					return err
				}
			case in.GetProgressRequest() != nil:
				if err := stream.Send(&etcdserverpb.WatchResponse{Header: header, WatchId: -1}); err != nil {
					return err
				}
			}
		case <-more:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

// eventsFrom returns the events with number from and higher, a channel that is closed when there are more, and the
// revision up to which these are.
func (s *Store) eventsFrom(from int) (events []*mvccpb.Event, more <-chan struct{}, revision int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more == nil {
		s.more = make(chan struct{})
	}
	return slices.Clone(s.events[from:]), s.more, s.revision + 1
}

func (s *Store) send(stream etcdserverpb.Watch_WatchServer, watchers []*etcdserverpb.WatchCreateRequest, events []*mvccpb.Event) error {
	for id, w := range watchers {
		if err := s.sendTo(stream, int64(id), w, events); err != nil {
			return err
		}
	}
	return nil
}

// sendTo sends a watcher those events that are its own, each as often as Copies says.
func (s *Store) sendTo(stream etcdserverpb.Watch_WatchServer, id int64, w *etcdserverpb.WatchCreateRequest, events []*mvccpb.Event) error {
	out := &etcdserverpb.WatchResponse{Header: &etcdserverpb.ResponseHeader{}, WatchId: id}
	for _, e := range events {
		within := bytes.Equal(e.Kv.Key, w.Key) || bytes.Compare(e.Kv.Key, w.Key) > 0 && bytes.Compare(e.Kv.Key, w.RangeEnd) < 0
		if !within || e.Kv.ModRevision < w.StartRevision {
			continue
		}
		out.Header.Revision = e.Kv.ModRevision
		copies := 1
		if s.Copies != nil {
			copies = s.Copies(e)
		}
		for range copies {
			out.Events = append(out.Events, e)
		}
	}
	if len(out.Events) == 0 {
		return nil
	}
	return stream.Send(out)
}
