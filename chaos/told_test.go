package chaos

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/skeindb/skein/sim/judge"
)

// tellings records the messages of the machines' streams to the clients' watchers, one
// by one, in a file. clientv3 hides from its callers that it changes streams, and where
// to. A message out of order on a stream is wrong, whether clientv3 minds or not, and
// is judged as it comes; the file is for people. It is compressed to a tenth: an hour
// of storm is 75 MB.
type tellings struct {
	began time.Time
	file  *os.File

	mu sync.Mutex
	// Guarded by mu: when the file was last flushed, how many streams there were, which
	// machines members are on, the violations, and the first error of the file.
	out      *gzip.Writer
	flushed  time.Duration
	streams  int
	machines map[uint64]string
	wrong    []string
	err      error
}

// newTellings writes to a new file.
func newTellings(path string, began time.Time) (*tellings, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	return &tellings{began: began, file: f, out: gzip.NewWriter(f), machines: map[uint64]string{}}, nil
}

// close ends the file. It returns the first error of the file.
func (t *tellings) close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return errors.Join(t.err, t.out.Close(), t.file.Close())
}

// at is the time of the run.
func (t *tellings) at() time.Duration { return time.Since(t.began).Round(time.Millisecond) }

// flushEach is how often the file is flushed, so that little is missing after a panic.
// At this rate flushes cost hardly any more bytes.
const flushEach = time.Second

// note writes a line.
func (t *tellings) note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.at()
	_, err := fmt.Fprintf(t.out, "%v %s\n", now, line)
	if now >= t.flushed+flushEach {
		t.flushed = now
		err = errors.Join(err, t.out.Flush())
	}
	if t.err == nil {
		t.err = err
	}
}

// blame records a violation.
func (t *tellings) blame(wrong string) {
	t.note("WRONG: %s", wrong)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wrong = append(t.wrong, fmt.Sprintf("%s, at %v", wrong, t.at()))
}

// judged are the violations.
func (t *tellings) judged() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.wrong)
}

// teller is the machine of the member that sent a response.
func (t *tellings) teller(h *etcdserverpb.ResponseHeader) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprintf("member %x on %s", h.GetMemberId(), t.machines[h.GetMemberId()])
}

// intercept is between clientv3 and each of its streams.
func (t *tellings) intercept(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := open(ctx, desc, cc, method, opts...)
	if err != nil || method != etcdserverpb.Watch_Watch_FullMethodName {
		return s, err
	}
	t.mu.Lock()
	t.streams++
	told := &toldStream{ClientStream: s, t: t, number: t.streams, order: judge.NewStream()}
	t.mu.Unlock()
	return told, nil
}

// toldStream is one stream.
type toldStream struct {
	grpc.ClientStream
	t      *tellings
	number int

	mu sync.Mutex
	// Guarded by mu, because requests and responses come at the same time: the order of
	// responses, and the unanswered requests, which are answered in this order.
	order *judge.Stream
	asked []*etcdserverpb.WatchCreateRequest
}

// SendMsg is a request of clientv3.
func (s *toldStream) SendMsg(m any) error {
	if req, ok := m.(*etcdserverpb.WatchRequest); ok {
		s.request(req)
	}
	return s.ClientStream.SendMsg(m)
}

// RecvMsg is a response for clientv3.
func (s *toldStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err != nil {
		s.t.note("stream %d ends: %v", s.number, err)
		return err
	}
	if resp, ok := m.(*etcdserverpb.WatchResponse); ok {
		s.response(machineAt(s.Context()), resp)
	}
	return nil
}

// machineAt is the machine that a stream comes from.
func machineAt(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "no machine"
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	for i := range stormMachines + 1 {
		if err == nil && host == address(i) {
			return fmt.Sprintf("machine %d", i+1)
		}
	}
	return p.Addr.String()
}

func (s *toldStream) request(req *etcdserverpb.WatchRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch r := req.GetRequestUnion().(type) {
	case *etcdserverpb.WatchRequest_CreateRequest:
		c := r.CreateRequest
		s.asked = append(s.asked, c)
		s.t.note("stream %d is asked for %q to %q from %d, notify %t", s.number, c.GetKey(), c.GetRangeEnd(), c.GetStartRevision(), c.GetProgressNotify())
	case *etcdserverpb.WatchRequest_CancelRequest:
		s.order.Ended(r.CancelRequest.GetWatchId())
		s.t.note("stream %d is to cancel watch %d", s.number, r.CancelRequest.GetWatchId())
	case *etcdserverpb.WatchRequest_ProgressRequest:
		s.t.note("stream %d is asked for progress", s.number)
	}
}

func (s *toldStream) response(machine string, resp *etcdserverpb.WatchResponse) {
	h, id := resp.GetHeader(), resp.GetWatchId()
	s.t.mu.Lock()
	s.t.machines[h.GetMemberId()] = machine
	s.t.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var what, wrong string
	switch events := resp.GetEvents(); {
	case resp.GetCreated() && len(s.asked) == 0:
		wrong = fmt.Sprintf("watch %d is created, and nobody has asked for it", id)
	case resp.GetCreated():
		from := s.asked[0].GetStartRevision()
		s.asked = s.asked[1:]
		what = fmt.Sprintf("created, from %d", from)
		if resp.GetCanceled() {
			what = "refused: " + resp.GetCancelReason()
			break
		}
		s.order.Created(id, from)
	case resp.GetCanceled():
		s.order.Ended(id)
		what = fmt.Sprintf("cancelled, compacted %d: %s", resp.GetCompactRevision(), resp.GetCancelReason())
	case len(events) > 0:
		what = show(events)
		wrong = s.order.Events(id, events[0].GetKv().GetModRevision(), events[len(events)-1].GetKv().GetModRevision())
	default:
		what, wrong = "progress", s.order.Progress(id, h.GetRevision())
	}
	s.t.note("stream %d of %s, member %x, watch %d at %d: %s", s.number, machine, h.GetMemberId(), id, h.GetRevision(), what)
	if wrong != "" {
		s.t.blame(fmt.Sprintf("%s, on stream %d of %s, member %x", wrong, s.number, machine, h.GetMemberId()))
	}
}

// show has the revisions of events and their keys.
func show(events []*mvccpb.Event) string {
	var b strings.Builder
	for _, e := range events {
		sign := "="
		if e.GetType() == mvccpb.Event_DELETE {
			sign = "-"
		}
		fmt.Fprintf(&b, " %d%s%s", e.GetKv().GetModRevision(), sign, e.GetKv().GetKey())
	}
	return b.String()
}

// tellingStream answers a stream with prepared responses.
type tellingStream struct {
	grpc.ClientStream
	responses []*etcdserverpb.WatchResponse
}

func (s *tellingStream) Context() context.Context {
	return peer.NewContext(context.Background(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(address(2)), Port: 2379}})
}

func (s *tellingStream) SendMsg(any) error { return nil }

func (s *tellingStream) RecvMsg(m any) error {
	if len(s.responses) == 0 {
		return errors.New("the machine is gone")
	}
	next := s.responses[0]
	s.responses = s.responses[1:]
	resp := m.(*etcdserverpb.WatchResponse)
	resp.Header, resp.WatchId, resp.Events = next.GetHeader(), next.GetWatchId(), next.GetEvents()
	resp.Created, resp.Canceled = next.GetCreated(), next.GetCanceled()
	return nil
}

// readTellings returns the content of a file of tellings, and io.ErrUnexpectedEOF if it
// was not closed.
func readTellings(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	r, err := gzip.NewReader(f)
	if err != nil {
		return "", errors.Join(err, f.Close())
	}
	text, err := io.ReadAll(r)
	return string(text), errors.Join(err, f.Close())
}

// A long run's file stays small, and after a panic it lacks at most a second.
func TestTellingsAreCompact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "told.txt.gz")
		told, err := newTellings(path, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		const lines, perSecond = 10_000, 500
		rng, raw := rand.New(rand.NewPCG(1, 1)), 0
		for i := range lines {
			time.Sleep(time.Second / perSecond)
			rev := 10 * i
			line := fmt.Sprintf("stream %d of machine %d, member 79c4fb063b06262a, watch %d at %d: %d=r%d/%d", rng.IntN(40), rng.IntN(5), rng.IntN(3), rev, rev, rng.IntN(4), rng.IntN(500))
			told.note("%s", line)
			raw += len(line)
		}
		text, err := readTellings(path)
		if there := strings.Count(text, "\n"); !errors.Is(err, io.ErrUnexpectedEOF) || there < lines-perSecond {
			t.Errorf("%d lines of %d are in the file: %v", there, lines, err)
		}
		if err := told.close(); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if text, err := readTellings(path); err != nil || strings.Count(text, "\n") != lines || info.Size() > int64(raw/4) {
			t.Errorf("%d bytes of %d, with %d lines: %v", info.Size(), raw, strings.Count(text, "\n"), err)
		}
	})
}

// Each message of a stream is recorded with its time and machine, and one out of order
// is found.
func TestTellingsAreKeptAndJudged(t *testing.T) {
	at := func(rev int64) *etcdserverpb.ResponseHeader {
		return &etcdserverpb.ResponseHeader{Revision: rev, MemberId: 0xabc}
	}
	events := func(id int64, revs ...int64) *etcdserverpb.WatchResponse {
		r := &etcdserverpb.WatchResponse{Header: at(revs[len(revs)-1]), WatchId: id}
		for _, rev := range revs {
			r.Events = append(r.Events, &mvccpb.Event{Kv: &mvccpb.KeyValue{Key: []byte("k"), ModRevision: rev}})
		}
		return r
	}
	created := func(id int64) *etcdserverpb.WatchResponse {
		return &etcdserverpb.WatchResponse{Header: at(5), WatchId: id, Created: true}
	}
	progress := func(id, rev int64) *etcdserverpb.WatchResponse {
		return &etcdserverpb.WatchResponse{Header: at(rev), WatchId: id}
	}
	canceled := &etcdserverpb.WatchResponse{Header: at(0), WatchId: 0, Canceled: true}
	for name, c := range map[string]struct {
		told []*etcdserverpb.WatchResponse
		want string
	}{
		"right":                      {[]*etcdserverpb.WatchResponse{created(0), created(1), events(0, 6, 7), progress(1, 6), events(1, 7), progress(-1, 7)}, ""},
		"progress behind an event":   {[]*etcdserverpb.WatchResponse{created(0), created(1), events(0, 6, 7), progress(-1, 6)}, "watch 0 is at 7, on stream 1 of machine 3, member abc, at "},
		"behind where one begins":    {[]*etcdserverpb.WatchResponse{created(0), created(1), progress(-1, 3)}, "watch 1 is at 4"},
		"of one that was cancelled":  {[]*etcdserverpb.WatchResponse{created(0), created(1), events(0, 7), canceled, progress(-1, 6)}, ""},
		"an event behind progress":   {[]*etcdserverpb.WatchResponse{created(0), created(1), progress(-1, 6), events(1, 6)}, "watch 1 received an event of revision 6"},
		"an event twice":             {[]*etcdserverpb.WatchResponse{created(0), created(1), events(1, 6), events(1, 6)}, "revision 6, and is at 6"},
		"a watch that nobody wanted": {[]*etcdserverpb.WatchResponse{created(0), created(1), created(2)}, "nobody has asked for it"},
	} {
		path := filepath.Join(t.TempDir(), "told.txt.gz")
		told, err := newTellings(path, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		s, err := told.intercept(t.Context(), nil, nil, etcdserverpb.Watch_Watch_FullMethodName, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			return &tellingStream{responses: c.told}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, from := range []int64{0, 5} {
			if err := s.SendMsg(&etcdserverpb.WatchRequest{RequestUnion: &etcdserverpb.WatchRequest_CreateRequest{
				CreateRequest: &etcdserverpb.WatchCreateRequest{Key: []byte("k"), StartRevision: from},
			}}); err != nil {
				t.Fatal(err)
			}
		}
		for err == nil {
			err = s.RecvMsg(&etcdserverpb.WatchResponse{})
		}
		if err := told.close(); err != nil {
			t.Fatal(err)
		}
		got := strings.Join(told.judged(), "; ")
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		file, err := readTellings(path)
		if err != nil {
			t.Fatal(err)
		}
		// Two requests, each response, the violation, and the end.
		if lines, want := strings.Count(file, "\n"), 2+len(c.told)+len(told.judged())+1; lines != want ||
			!strings.Contains(file, "stream 1 of machine 3, member abc, watch 1 at 5: created, from 5") {
			t.Errorf("%s: %d lines, want %d:\n%s", name, lines, want, file)
		}
	}
}
