package dataapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
	"github.com/skeindb/skein/rangeapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a store with a few versions.
type store struct {
	mu       sync.Mutex
	holds    map[fsm.HoldID]fsm.Hold
	leases   [][]keyspace.LeaseID // of each question for them
	asked    int
	versions []mvcc.Version // in the order of a cut
	// pageVersions are those of a page. fails are how many pages fail, each one behind.
	pageVersions, fails int
	broken              error
	// ended are the failures of the next reads. withoutAccess leaves out users, which are none.
	ended         []error
	withoutAccess bool
	renewed       atomic.Int64
}

func (s *store) PutHold(_ context.Context, o fsm.PutHold) (fsm.Hold, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, ok := s.holds[o.ID]
	if !ok && !o.Create {
		return h, kverror.New(kverror.HoldEnded, "a test")
	}
	s.renewed.Add(1)
	h = fsm.Hold{ID: o.ID, Owner: o.Owner, Revision: max(h.Revision, o.Revision)}
	s.holds[o.ID] = h
	return h, nil
}

func (s *store) EndHold(_ context.Context, id fsm.HoldID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.holds, id)
	return nil
}

func (s *store) ListLeases(context.Context) (all []placement.LeaseStatus, _ keyspace.Revision, _ error) {
	for _, id := range s.leases[min(s.asked, len(s.leases)-1)] {
		all = append(all, placement.LeaseStatus{LeaseRef: fsm.LeaseRef{ID: id}, TTL: 60, Remaining: time.Duration(60-s.asked) * time.Second})
	}
	s.asked++
	return all, 0, nil
}

func (s *store) AccessRows(context.Context) ([]fsm.AccessRow, error) {
	if s.withoutAccess {
		return nil, s.broken
	}
	var rows []fsm.AccessRow
	for i := range 40 {
		rows = append(rows, fsm.AccessRow{Key: fmt.Appendf(nil, "p%02d", i), Value: make([]byte, 100<<10)})
	}
	return rows, s.broken
}

func (s *store) RangeMap(context.Context) ([]keyspace.Descriptor, error) {
	return []keyspace.Descriptor{{Span: keyspace.Span{End: []byte("g")}}, {Span: keyspace.Span{Start: []byte("g")}}}, nil
}

func (s *store) Present(context.Context) (current, compacted keyspace.Revision, err error) {
	return 50, 20, nil
}

func (s *store) ReadCut(_ context.Context, c mvcc.Cut, from mvcc.VersionCursor, end []byte, send func(p *rangeapi.VersionsPage, next *mvcc.VersionCursor) error) error {
	if len(s.ended) > 0 {
		err := s.ended[0]
		s.ended = s.ended[1:]
		return err
	}
	rest := slices.DeleteFunc(slices.Clone(s.versions), func(v mvcc.Version) bool {
		k := string(v.Key)
		return k < string(from.Key) || k == string(from.Key) && from.Below > 0 && v.Mod >= from.Below || len(end) > 0 && k >= string(end)
	})
	for {
		p := &rangeapi.VersionsPage{}
		var last []byte
		for len(rest) > 0 && p.N < int64(s.pageVersions) {
			v := rest[0]
			p.Add(last, &mvcc.StoredVersion{Key: v.Key, Mod: v.Mod, Value: v.AppendValue(nil)})
			last, rest = v.Key, rest[1:]
		}
		if len(rest) == 0 {
			return send(p, nil)
		}
		next := c.Behind(last, s.versions[len(s.versions)-len(rest)-1].Mod)
		if err := send(p, &next); err != nil {
			return err
		}
		if s.fails > 0 {
			s.fails--
			return kverror.New(kverror.Timeout, "a test")
		}
	}
}

func newStore() *store {
	s := &store{holds: map[fsm.HoldID]fsm.Hold{}, leases: [][]keyspace.LeaseID{{1, 2}, {2, 3}}, pageVersions: 3}
	for i := range 10 {
		key := fmt.Appendf(nil, "k%d", i)
		for mod := keyspace.Revision(30); mod > 28; mod-- {
			s.versions = append(s.versions, mvcc.Version{Key: key, Mod: mod, Create: 9, Version: int64(mod), Value: []byte(strings.Repeat("v", i))})
		}
	}
	return s
}

func (s *store) cutter() *Cutter {
	return NewCutter(Options{Cluster: 0xc1, Holds: s, Records: s, Keys: s, Clock: clock.System(), Logger: zap.NewNop()})
}

// client returns a client of a server of the store.
func (s *store) client(t *testing.T) *Client {
	t.Helper()
	l := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	RegisterData(server, s.cutter())
	go func() { _ = server.Serve(l) }()
	conn, err := grpc.NewClient("passthrough:///test", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
	})
	return NewClient(conn, clock.System())
}

// Trap 119: a cut has the leases of before its revision and those of behind it. It comes over the wire in parts of
// bounded size, and a cut that fails leaves no hold.
func TestCut(t *testing.T) {
	s := newStore()
	c := s.client(t)
	cut, err := c.Cut(t.Context(), CutOptions{Owner: "me", From: 30})
	if err != nil {
		t.Fatal(err)
	}
	rows, _ := s.AccessRows(t.Context())
	if len(s.holds) != 1 || s.holds[cut.Hold].Owner != "me" || cut.Held != 30 || cut.Revision != 50 || cut.Compacted != 20 || cut.Cluster != 0xc1 || cut.Time.IsZero() ||
		!reflect.DeepEqual(cut.Access, rows) || len(cut.Borders) != 1 || string(cut.Borders[0]) != "g" {
		t.Errorf("%+v with %d rows, holds %v", cut, len(cut.Access), s.holds)
	}
	want := []Lease{{1, 60, time.Minute}, {2, 60, 59 * time.Second}, {3, 60, 59 * time.Second}}
	if !slices.Equal(cut.Leases, want) {
		t.Errorf("leases %v, want %v", cut.Leases, want)
	}
	if again, err := c.Cut(t.Context(), CutOptions{Hold: cut.Hold, From: 40}); err != nil || again.Hold != cut.Hold || again.Held != 40 {
		t.Errorf("%+v, %v", again, err)
	}
	s.broken = kverror.New(kverror.NoLeader, "a test")
	if _, err := c.Cut(t.Context(), CutOptions{}); status.Code(err) != codes.Unavailable || len(s.holds) != 1 {
		t.Errorf("a cut that fails: %v, holds %v", err, s.holds)
	}
	if _, err := c.Cut(t.Context(), CutOptions{Owner: strings.Repeat("x", 300)}); status.Code(err) != codes.InvalidArgument {
		t.Error(err)
	}
	s.broken = kverror.New(kverror.TooManyRequests, "there are 16 holds")
	if _, err := c.Cut(t.Context(), CutOptions{}); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "skein: there are 16 holds") {
		t.Error(err)
	}
	s.broken = nil
	if err := errors.Join(c.Renew(t.Context(), cut.Hold, 45), c.Release(t.Context(), cut.Hold)); err != nil || len(s.holds) > 0 {
		t.Errorf("%v, holds %v", err, s.holds)
	}
	if _, err := c.Cut(t.Context(), CutOptions{Hold: cut.Hold}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("with a hold that has ended: %v", err)
	}
}

// A client goes on behind what it has when its stream fails, whatever the selection.
func TestReadGoesOn(t *testing.T) {
	s := newStore()
	c := s.client(t)
	var want block.Sum
	for i := range s.versions {
		want.Add(&s.versions[i])
	}
	for _, span := range []keyspace.Span{{}, {Start: []byte("k"), End: []byte("k9x")}, {End: []byte("k9\x00")}} {
		s.fails = 4
		vs := c.Read(t.Context(), ReadOptions{Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 50}, Span: span})
		var got []string
		for {
			v, err := vs.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%s@%d", v.Key, v.Mod))
		}
		if len(got) != len(s.versions) || got[0] != "k0@30" || got[1] != "k0@29" || vs.Sum() != want || s.fails != 0 {
			t.Errorf("%s: %v, sum %v, want %v; %d failures are left", span, got, vs.Sum(), want, s.fails)
		}
		vs.Close()
		s.fails = 4
		vs = c.Read(t.Context(), ReadOptions{Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 50}, Span: span})
		n, dec := 0, block.Decoder{}
		for {
			b, of, err := vs.NextBlock()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			again, err := dec.Decode(b)
			if err != nil || len(again) != len(of) || string(again[0].Key) != string(of[0].Key) {
				t.Fatalf("a block of %d versions, given as %d: %v", len(again), len(of), err)
			}
			n += len(of)
		}
		if n != len(s.versions) || vs.Sum() != want || s.fails != 0 {
			t.Errorf("%s: %d versions in blocks, sum %v, want %v; %d failures are left", span, n, vs.Sum(), want, s.fails)
		}
		vs.Close()
	}
	for what, o := range map[string]ReadOptions{
		"no selection": {}, "after the cut": {Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 5, After: 6}},
		"an empty span": {Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 5}, Span: keyspace.Span{Start: []byte("b"), End: []byte("a")}},
	} {
		vs := c.Read(t.Context(), o)
		if _, err := vs.Next(); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
		vs.Close()
	}
}

// A hold is renewed each minute until it is stopped. Whoever works by it learns at once that it has ended.
func TestHoldIsRenewed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		h, err := s.PutHold(t.Context(), fsm.PutHold{Create: true, ID: 7})
		if err != nil {
			t.Fatal(err)
		}
		c := &Client{data: renewer{s: s}, clock: clock.Virtual()}
		held, stop := c.Hold(t.Context(), h.ID)
		time.Sleep(10*time.Minute + time.Second)
		if n := s.renewed.Load(); n != 11 || held.Err() != nil {
			t.Errorf("renewed %d times, %v", n-1, held.Err())
		}
		stop()
		if held.Err() == nil {
			t.Error("it is held after stop")
		}
		held, stop = c.Hold(t.Context(), h.ID)
		defer stop()
		_ = s.EndHold(t.Context(), h.ID)
		time.Sleep(time.Minute + time.Second)
		if cause := context.Cause(held); status.Code(cause) != codes.FailedPrecondition {
			t.Errorf("it has ended: %v", cause)
		}
	})
}

// renewer is a data service that can renew.
type renewer struct {
	datapb.DataClient
	s *store
}

// Renew implements datapb.DataClient.
func (r renewer) Renew(ctx context.Context, q *datapb.RenewRequest, _ ...grpc.CallOption) (*datapb.RenewResponse, error) {
	return (&dataServer{c: r.s.cutter()}).Renew(ctx, q)
}
