package conformance

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/clock"
)

// recorder is one stream of watchers: it records what each watcher receives.
type recorder struct {
	stream pb.Watch_WatchClient
	cancel context.CancelFunc
	done   chan struct{}

	mu sync.Mutex
	// told is the events received in order, by watch id, one by one: the number of
	// events in a response is not promised. divided are revisions that came in two
	// responses. partly are the watchers whose last response continues in the next,
	// which may begin within a revision.
	told    map[int64][]string
	last    map[int64]int64
	partly  map[int64]bool
	divided []string
	// compacted says that a watcher ended because its start is compacted.
	compacted bool
	// once records a progress only once, however often it was requested.
	once bool
	err  error
}

func newRecorder(ctx context.Context, conn *grpc.ClientConn) (*recorder, error) {
	ctx, cancel := context.WithCancel(ctx)
	s, err := pb.NewWatchClient(conn).Watch(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	r := &recorder{stream: s, cancel: cancel, done: make(chan struct{}), told: map[int64][]string{}, last: map[int64]int64{}, partly: map[int64]bool{}}
	go r.receive()
	return r, nil
}

func (r *recorder) receive() {
	defer close(r.done)
	for {
		resp, err := r.stream.Recv()
		r.mu.Lock()
		if err != nil {
			r.err = err
			r.mu.Unlock()
			return
		}
		r.take(resp)
		r.mu.Unlock()
	}
}

func (r *recorder) close() {
	r.cancel()
	<-r.done
}

// take notes a response.
func (r *recorder) take(resp *pb.WatchResponse) {
	id := resp.GetWatchId()
	if len(resp.GetEvents()) == 0 {
		note := fmt.Sprintf("revision %d", resp.GetHeader().GetRevision())
		if resp.GetCreated() {
			note += " created"
			r.last[id] = 0
		}
		if resp.GetCanceled() {
			r.compacted = r.compacted || resp.GetCompactRevision() != 0
			note += fmt.Sprintf(" canceled %q compact %d", resp.GetCancelReason(), resp.GetCompactRevision())
		}
		if before := r.told[id]; r.once && id == progressID && len(before) > 0 && before[len(before)-1] == note {
			return
		}
		r.told[id] = append(r.told[id], note)
		return
	}
	for i, e := range resp.GetEvents() {
		rev := e.GetKv().GetModRevision()
		if i == 0 && rev == r.last[id] && !r.partly[id] {
			r.divided = append(r.divided, fmt.Sprintf("watcher %d: revision %d", id, rev))
		}
		if rev > resp.GetHeader().GetRevision() {
			r.divided = append(r.divided, fmt.Sprintf("watcher %d: revision %d under a header of %d", id, rev, resp.GetHeader().GetRevision()))
		}
		r.last[id] = rev
		r.told[id] = append(r.told[id], describe(e))
	}
	r.partly[id] = resp.GetFragment()
}

func describe(e *mvccpb.Event) string {
	s := e.GetType().String() + " " + describeKey(e.GetKv())
	if e.GetPrevKv() != nil {
		s += " before " + describeKey(e.GetPrevKv())
	}
	return s
}

func describeKey(kv *mvccpb.KeyValue) string {
	return fmt.Sprintf("%q=%.40q create %d mod %d version %d lease %d", kv.GetKey(), kv.GetValue(),
		kv.GetCreateRevision(), kv.GetModRevision(), kv.GetVersion(), kv.GetLease())
}

// watchers are one stream of watchers at each store, with the same requests.
type watchers struct {
	etcd, skein *recorder
	requests    []string
}

func (p *pair) watch(ctx context.Context, gateway int) (*watchers, error) {
	theirs, err := newRecorder(ctx, p.etcd.conns[0])
	if err != nil {
		return nil, err
	}
	ours, err := newRecorder(ctx, p.skein.conns[gateway])
	if err != nil {
		theirs.close()
		return nil, err
	}
	return &watchers{etcd: theirs, skein: ours}, nil
}

func (w *watchers) close() {
	w.etcd.close()
	w.skein.close()
}

// send sends a request to both, and waits for etcd's answer if there is one, so that
// the next request does not overtake it.
func (w *watchers) send(req *pb.WatchRequest) error {
	w.requests = append(w.requests, req.String())
	if err := w.etcd.stream.Send(req); err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	if err := w.skein.stream.Send(req); err != nil {
		return fmt.Errorf("skein: %w", err)
	}
	return nil
}

// progressID is the watch id of the answer to a request for progress.
const progressID = -1

// A request for progress is repeated this often, at this interval. etcd drops it while
// one of the stream's watchers is not synced, which it checks ten times a second. If no
// request was answered, both stores must have answered none.
const (
	progressTurns = 20
	progressPause = 100 * time.Millisecond
)

// tellsProgress says whether etcd 3.7.3 sends progress on this stream. If a watcher's
// start was compacted, etcd keeps it among the watchers to be synced for ever and sends
// none.
func (w *watchers) tellsProgress() bool {
	w.etcd.mu.Lock()
	defer w.etcd.mu.Unlock()
	return !w.etcd.compacted
}

// progress asks both for progress until etcd has sent that of the revision.
func (w *watchers) progress(rev int64) error {
	want := fmt.Sprintf("revision %d", rev)
	for range progressTurns {
		if err := w.send(progress()); err != nil {
			return err
		}
		_ = clock.Sleep(context.Background(), clock.System(), progressPause)
		w.etcd.mu.Lock()
		told := w.etcd.told[progressID]
		come := len(told) > 0 && told[len(told)-1] == want
		w.etcd.mu.Unlock()
		if come {
			break
		}
	}
	return w.settle()
}

// settleTimeout bounds the wait until both have sent the same. settlePause is how long
// both must stay equal.
const (
	settleTimeout = time.Minute
	settlePause   = 150 * time.Millisecond
)

// settle waits until both have sent the same.
func (w *watchers) settle() error {
	diff := ""
	ck := clock.System()
	for end := ck.Now().Add(settleTimeout); ck.Now() < end; _ = clock.Sleep(context.Background(), ck, 10*time.Millisecond) {
		if diff = w.compare(); diff != "" {
			continue
		}
		_ = clock.Sleep(context.Background(), ck, settlePause)
		if diff = w.compare(); diff == "" {
			return nil
		}
	}
	return fmt.Errorf("watchers differ after\n  %s\n%s", strings.Join(w.requests[max(0, len(w.requests)-20):], "\n  "), diff)
}

// compare returns the first difference, "" where there is none.
func (w *watchers) compare() string {
	w.etcd.mu.Lock()
	defer w.etcd.mu.Unlock()
	w.skein.mu.Lock()
	defer w.skein.mu.Unlock()
	for name, r := range map[string]*recorder{"etcd": w.etcd, "Skein": w.skein} {
		if r.err != nil || len(r.divided) > 0 {
			return fmt.Sprintf("%s: error %v, divided %v", name, r.err, r.divided)
		}
	}
	ids := map[int64]bool{}
	for _, r := range []*recorder{w.etcd, w.skein} {
		for id := range r.told {
			ids[id] = true
		}
	}
	for id := range ids {
		theirs, ours := w.etcd.told[id], w.skein.told[id]
		for i := range max(len(theirs), len(ours)) {
			a, b := "nothing", "nothing"
			if i < len(theirs) {
				a = theirs[i]
			}
			if i < len(ours) {
				b = ours[i]
			}
			if a != b {
				from := max(0, i-3)
				return fmt.Sprintf("watcher %d, message %d:\n  etcd:  %s\n  skein: %s\nbefore that %v", id, i, a, b, slices.Clone(theirs[from:min(i, len(theirs))]))
			}
		}
	}
	return ""
}

// create makes a request for a watcher.
func create(r *pb.WatchCreateRequest) *pb.WatchRequest {
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: r}}
}

func cancelWatch(id int64) *pb.WatchRequest {
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_CancelRequest{CancelRequest: &pb.WatchCancelRequest{WatchId: id}}}
}

func progress() *pb.WatchRequest {
	return &pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}
}
