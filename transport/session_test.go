package transport

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

const (
	testCall   Method = 0xf100
	testStream Method = 0xf101
	testSend   Method = 0xf102
)

// newTestEndpoint is node 1 with the peer 2 and no carrier: tests play the network.
func newTestEndpoint(t testing.TB, tune func(*Config)) *Endpoint {
	t.Helper()
	cfg := Config{Cluster: 1, Node: 1, Boot: 1, Clock: clock.Virtual(), Lanes: [numClasses]int{1, 1, 1, 1}}
	if tune != nil {
		tune(&cfg)
	}
	e, err := NewEndpoint(cfg)
	if err != nil {
		t.Fatal(err)
	}
	e.HandleCall(testCall, ClassRequest, func(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
		if string(payload) == "wait" {
			<-ctx.Done()
		}
		return payload, nil
	})
	e.HandleStream(testStream, ClassRequest, func(ctx context.Context, _ keyspace.NodeID, _ []byte, _ Stream) error {
		<-ctx.Done()
		return nil
	})
	e.HandleSend(testSend, ClassRaft, func(keyspace.NodeID, []byte) {})
	e.AddPeer(2)
	if err := e.Run(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Stop()
		e.Wait()
	})
	return e
}

func attach(t testing.TB, e *Endpoint, k Kind) *Session {
	t.Helper()
	s, err := e.Attach(SessionConfig{Peer: 2, Boot: 9, Kind: k, MaxMessageBytes: 1 << 20, StreamWindowBytes: 1 << 16})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// take returns what a lane has to send.
func take(t testing.TB, s *Session, c Class) []byte {
	t.Helper()
	b, ok := s.lanes[c][0].Take()
	if !ok {
		t.Fatal("the lane is closed")
	}
	defer b.Done()
	return bytes.Clone(b.Bytes())
}

var errGone = errors.New("gone")

// TestCallFate: a call whose frame the writer never took was certainly not delivered.
// The fate of a call whose frame it took is unknown.
func TestCallFate(t *testing.T) {
	for _, taken := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			e := newTestEndpoint(t, nil)
			s := attach(t, e, KindMain)
			results := make(chan error, 2)
			call := func() {
				_, err := e.Call(context.Background(), 2, testCall, []byte("x"))
				results <- err
			}
			go call()
			synctest.Wait()
			if taken {
				take(t, s, ClassRequest)
			}
			go call()
			synctest.Wait()
			s.End(errGone)
			first, second := <-results, <-results
			unknown := 0
			for _, err := range []error{first, second} {
				if !errors.Is(err, ErrUnreachable) || !errors.Is(err, errGone) {
					t.Errorf("call of a lost session: %v", err)
				}
				if !NotDelivered(err) {
					unknown++
				}
			}
			if taken && unknown != 1 || !taken && unknown != 0 {
				t.Errorf("taken %t: %v, %v", taken, first, second)
			}
			if _, err := e.Call(context.Background(), 2, testCall, nil); !errors.Is(err, ErrNoRoute) {
				t.Errorf("call without a session: %v", err)
			}
		})
	}
}

// TestBudget: a queue takes frames up to its bound, one message of any size when it is
// empty, and small forced frames beyond. A waiter gets room once it is free.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, func(c *Config) { c.QueueBytes = 1000 })
		s := attach(t, e, KindMain)
		l := s.lanes[ClassRequest][0]
		put := func(size int, force bool) error {
			h := messageFrame(testSend)
			return l.enqueue(&h, make([]byte, size), force, nil)
		}
		if err := put(5000, false); err != nil {
			t.Errorf("large message into an empty queue: %v", err)
		}
		if err := put(1, false); !errors.Is(err, ErrQueueFull) {
			t.Errorf("message into a full queue: %v", err)
		}
		if err := put(10, true); err != nil {
			t.Errorf("forced frame: %v", err)
		}
		if err := put(forcedBytes+1000, true); !errors.Is(err, ErrQueueFull) {
			t.Errorf("forced frame without bound: %v", err)
		}
		waited := make(chan error, 1)
		go func() {
			h := messageFrame(testSend)
			waited <- l.enqueueWait(context.Background(), &h, make([]byte, 900))
		}()
		synctest.Wait()
		select {
		case err := <-waited:
			t.Errorf("did not wait: %v", err)
		default:
		}
		take(t, s, ClassRequest)
		if err := <-waited; err != nil {
			t.Errorf("waiting for room: %v", err)
		}
		go func() {
			h := messageFrame(testSend)
			waited <- l.enqueueWait(context.Background(), &h, make([]byte, 900))
		}()
		synctest.Wait()
		s.End(errGone)
		if err := <-waited; !errors.Is(err, ErrNoRoute) {
			t.Errorf("waiting at the session's end: %v", err)
		}
		if used, total := l.budget.used, l.budget.total.Load(); used != 0 || total != 0 {
			t.Errorf("%d bytes used, %d over all, after the end", used, total)
		}
	})
}

// TestBatches: frames leave in order, many at once, in batches of at most 64 KiB.
func TestBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, nil)
		s := attach(t, e, KindMain)
		const messages = 1000
		for i := range uint32(messages) {
			size := 100
			if i == 500 {
				size = 100 << 10
			}
			payload := binary.BigEndian.AppendUint32(make([]byte, 0, size), i)[:size]
			if err := e.Send(2, testSend, 0, payload); err != nil {
				t.Fatal(err)
			}
		}
		next, batches := uint32(0), 0
		for ; next < messages; batches++ {
			b := take(t, s, ClassRaft)
			for frame := range SplitFrames(b) {
				if !IsMessage(frame) {
					t.Fatalf("frame %x", frame[:8])
				}
				if got := binary.BigEndian.Uint32(frame[lengthBytes+messageHeader:]); got != next {
					t.Fatalf("message %d, want %d", got, next)
				}
				next++
			}
			if len(b) > chunkBytes && len(b) < 100<<10 {
				t.Errorf("batch of %d bytes", len(b))
			}
		}
		if batches > 5 {
			t.Errorf("%d batches for %d messages", batches, messages)
		}
	})
}

// TestOwnCallsEndWithTheirContext: a handler of this node returns its context's error,
// and the caller sees it as its own. It is no remote error, even if it arrives before
// the caller notices its context's end.
func TestOwnCallsEndWithTheirContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		r := e.loop.runCall(ctx, ClassRequest, func(ctx context.Context, _ keyspace.NodeID, _ []byte) ([]byte, error) {
			return nil, fmt.Errorf("the handler: %w", ctx.Err())
		}, nil)
		if !errors.Is(r.err, context.Canceled) || r.notDelivered {
			t.Errorf("ended with %v, not delivered: %v", r.err, r.notDelivered)
		}
	})
}

// TestProbes: a session whose probes stay unanswered ends; an answered one lives and
// knows its round trip.
func TestProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, func(c *Config) { c.PingInterval, c.MaxMissedPings = time.Second, 3 })
		s := attach(t, e, KindMain)
		for range 10 {
			ping := take(t, s, ClassControl)
			time.Sleep(30 * time.Millisecond)
			ping[lengthBytes] = byte(framePong)
			if err := s.Receive(ClassControl, ping); err != nil {
				t.Fatal(err)
			}
		}
		if got := e.Peer(2); !got.Up || got.RTT != 30*time.Millisecond {
			t.Errorf("%+v", got)
		}
		quiet := time.Now()
		<-s.Done()
		if d := time.Since(quiet); d < 3*time.Second || d > 5*time.Second {
			t.Errorf("given up after %v", d)
		}
		synctest.Wait() // Done comes first; the endpoint updates the peer's state afterwards
		if e.Peer(2).Up {
			t.Error("still up")
		}
	})
}

// TestRestingProbes: a peer that is heard and answers is probed in one of four intervals, and in each one if it does
// not answer.
func TestRestingProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, func(c *Config) { c.PingInterval, c.MaxMissedPings = time.Second, 3 })
		s := attach(t, e, KindMain)
		var probes atomic.Int32
		var silent atomic.Bool
		go func() {
			for {
				b, ok := s.lanes[ClassControl][0].Take()
				if !ok {
					return
				}
				ping := bytes.Clone(b.Bytes())
				b.Done()
				probes.Add(1)
				if !silent.Load() {
					ping[lengthBytes] = byte(framePong)
					_ = s.Receive(ClassControl, ping) // the session's end is looked at below
				}
			}
		}()
		during := func(seconds int) int32 {
			before := probes.Load()
			for range seconds {
				time.Sleep(time.Second)
				synctest.Wait()
				_ = s.receive(ClassControl, &frame{kind: frameMessage, method: 255}) // nobody knows the method, and it is heard
			}
			return probes.Load() - before
		}
		during(4)
		if n := during(40); n != 10 {
			t.Errorf("%d probes in 40 s of a peer that is heard and answers, want 10", n)
		}
		silent.Store(true)
		if n := during(8); n != 3 || s.ctx.Err() == nil {
			t.Errorf("%d probes in 8 s of a peer that is heard and does not answer, want 3; the session has ended: %t", n, s.ctx.Err() != nil)
		}
	})
}

// TestRidingProbes: the ping of a peer that is heard and answers goes with a message of ClassControl, and alone where none
// goes within an interval.
func TestRidingProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, func(c *Config) { c.PingInterval, c.MaxMissedPings = time.Second, 3 })
		s := attach(t, e, KindMain)
		var alone, riding atomic.Int32
		go func() {
			h := pingFrame(framePing, 1)
			h.finish(len(pingPadding))
			size := h.n + len(pingPadding)
			var message time.Time // when the last message was taken
			for {
				b, ok := s.lanes[ClassControl][0].Take()
				if !ok {
					return
				}
				// The ping is behind the message, in one batch or the next.
				ping := bytes.Clone(b.Bytes()[max(0, len(b.Bytes())-size):])
				isPing, frames := len(ping) == size && ping[lengthBytes] == byte(framePing), b.frames
				b.Done()
				if frames == 2 || !isPing {
					message = time.Now()
				}
				switch {
				case !isPing:
					continue
				case message.Equal(time.Now()):
					riding.Add(1)
				default:
					alone.Add(1)
				}
				ping[lengthBytes] = byte(framePong)
				_ = s.Receive(ClassControl, ping) // the session's end is looked at below
			}
		}()
		during := func(seconds int, every time.Duration) (int32, int32) {
			a, r := alone.Load(), riding.Load()
			for end := time.Now().Add(time.Duration(seconds) * time.Second); time.Now().Before(end); synctest.Wait() {
				if every > 0 {
					time.Sleep(every)
					if err := e.Send(2, MethodRaftControl, 0, []byte("x")); err != nil {
						t.Fatal(err)
					}
				} else {
					time.Sleep(time.Second)
				}
				_ = s.receive(ClassControl, &frame{kind: frameMessage, method: 255}) // nobody knows the method, and it is heard
			}
			return alone.Load() - a, riding.Load() - r
		}
		during(4, 0)
		if a, r := during(40, 170*time.Millisecond); a != 0 || r != 10 {
			t.Errorf("%d probes went alone and %d with a message in 40 s, want 0 and 10", a, r)
		}
		if a, r := during(40, 0); a != 10 || r != 0 {
			t.Errorf("without messages %d probes went alone and %d with one in 40 s, want 10 and 0", a, r)
		}
		if s.ctx.Err() != nil {
			t.Error("the session has ended")
		}
	})
}

// TestReplacedReaders: a session handles received messages only after the session
// before it has handled its own.
func TestReplacedReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, nil)
		old := attach(t, e, KindMain)
		if !old.BeginRead(ClassRaft) {
			t.Fatal("no reading")
		}
		s := attach(t, e, KindMain)
		select {
		case <-old.Done():
		default:
			t.Error("the replaced session stands")
		}
		if old.BeginRead(ClassRaft) {
			t.Error("a replaced session reads on")
		}
		began := make(chan bool, 2)
		go func() { began <- s.BeginRead(ClassRaft) }()
		synctest.Wait()
		if len(began) != 0 {
			t.Error("did not wait for the reader of the old session")
		}
		if !s.BeginRead(ClassControl) {
			t.Error("control waits for raft")
		}
		old.EndRead(ClassRaft)
		if !<-began {
			t.Error("no reading")
		}
	})
}

// TestBulkFollowsMain: the bulk session ends with the main one, and when the peer
// has another boot id.
func TestBulkFollowsMain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, nil)
		s, bulk := attach(t, e, KindMain), attach(t, e, KindBulk)
		s.End(errGone)
		<-bulk.Done()
		_, bulk = attach(t, e, KindMain), attach(t, e, KindBulk)
		if _, err := e.Attach(SessionConfig{Peer: 2, Boot: 10, Kind: KindMain, MaxMessageBytes: 1, StreamWindowBytes: 1}); err != nil {
			t.Fatal(err)
		}
		<-bulk.Done()
		if got := e.Peer(2); got.Boot != 10 || !got.Up {
			t.Errorf("%+v", got)
		}
		if _, err := e.Attach(SessionConfig{Peer: 3}); !errors.Is(err, ErrNoRoute) {
			t.Errorf("session with an unknown node: %v", err)
		}
	})
}

// TestViolations: each violation of the protocol ends the session, and nothing else.
func TestViolations(t *testing.T) {
	window := make([]byte, 1<<16)
	for _, test := range []struct {
		name   string
		frames []frame
		class  Class
	}{
		{"class of a method", []frame{{kind: frameMessage, method: testSend}}, ClassRequest},
		{"class of the session", []frame{{kind: frameMessage, method: testSend}}, ClassBulk},
		{"call twice", []frame{{kind: frameCall, method: testCall, id: 1, payload: []byte("wait")}, {kind: frameCall, method: testCall, id: 1}}, ClassRequest},
		{"stream twice", []frame{{kind: frameOpen, method: testStream, id: 1}, {kind: frameOpen, method: testStream, id: 1}}, ClassRequest},
		{"data beyond credit", []frame{
			{kind: frameOpen, method: testStream, id: 1},
			{kind: frameData, id: 1, payload: window},
			{kind: frameData, id: 1, payload: window},
		}, ClassRequest},
		{"credit for nothing", []frame{{kind: frameOpen, method: testStream, id: 1}, {kind: frameCredit, id: 1, credit: 1}}, ClassRequest},
		{"malformed error", []frame{{kind: frameReply, id: 1, status: statusError}}, ClassRequest},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newTestEndpoint(t, func(c *Config) { c.StreamWindowBytes = len(window) })
				s := attach(t, e, KindMain)
				var err error
				for i, f := range test.frames {
					if err = s.Receive(test.class, encodeFrame(&f)); err != nil && i < len(test.frames)-1 {
						t.Fatalf("frame %d: %v", i, err)
					}
				}
				if !errors.Is(err, errProtocol) && !errors.Is(err, errMalformed) {
					t.Errorf("error %v", err)
				}
				<-s.Done()
			})
		})
	}
}

// TestLateFrames: frames for finished calls and streams are no violation.
func TestLateFrames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, nil)
		s := attach(t, e, KindMain)
		for _, f := range []frame{
			{kind: frameReply, id: 99},
			{kind: frameCancel, id: 99},
			{kind: frameData, id: 99},
			{kind: frameCredit, id: 99, credit: 5},
			{kind: frameEnd, id: 99, side: sideHandler},
			{kind: frameMessage, method: 0xeeee},
		} {
			if err := s.Receive(ClassRequest, encodeFrame(&f)); err != nil {
				t.Errorf("kind %d: %v", f.kind, err)
			}
		}
	})
}

// TestUnreadAnswers: a peer that asks and does not read the answers loses its session;
// the node loses no memory.
func TestUnreadAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, func(c *Config) { c.QueueBytes = 1 << 10 })
		s := attach(t, e, KindMain)
		for id := uint64(1); s.Receive(ClassRequest, encodeFrame(&frame{kind: frameCall, id: id, method: 0xeeee})) == nil; id++ {
			if id > 1<<20 {
				t.Fatal("refusals without bound")
			}
		}
		<-s.Done()
		if err := context.Cause(s.ctx); !errors.Is(err, errProtocol) {
			t.Errorf("ended by %v", err)
		}
	})
}

// TestBounds: calls and streams beyond their bounds are refused with the defined
// errors.
func TestBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, func(c *Config) { c.MaxCalls, c.MaxStreams = 1, 1 })
		s := attach(t, e, KindMain)
		ctx, cancel := context.WithCancel(context.Background())
		result := make(chan error, 1)
		go func() {
			_, err := e.Call(ctx, 2, testCall, nil)
			result <- err
		}()
		synctest.Wait()
		if _, err := e.Call(ctx, 2, testCall, nil); !errors.Is(err, ErrQueueFull) || !NotDelivered(err) {
			t.Errorf("second call: %v", err)
		}
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Errorf("canceled call: %v", err)
		}
		take(t, s, ClassRequest)
		for id := range uint64(2) {
			if err := s.Receive(ClassRequest, encodeFrame(&frame{kind: frameOpen, id: id, method: testStream})); err != nil {
				t.Fatal(err)
			}
		}
		f, err := parseFrame(take(t, s, ClassRequest)[lengthBytes:])
		if err != nil || f.kind != frameEnd || f.id != 1 || f.status != statusBusy {
			t.Errorf("second stream: %+v, %v", f, err)
		}
	})
}

// TestStreamOfLostSession: messages that arrived before the loss can be read; then
// comes the loss.
func TestStreamOfLostSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newTestEndpoint(t, nil)
		s := attach(t, e, KindMain)
		ctx := context.Background()
		st, err := e.OpenStream(ctx, 2, testStream, nil)
		if err != nil {
			t.Fatal(err)
		}
		id := uint64(1)
		if err := s.Receive(ClassRequest, encodeFrame(&frame{kind: frameData, id: id, side: sideHandler, payload: []byte("x")})); err != nil {
			t.Fatal(err)
		}
		s.End(errGone)
		if got, err := st.Recv(ctx); err != nil || string(got) != "x" {
			t.Errorf("%q, %v", got, err)
		}
		for _, f := range []func() error{
			func() error { _, err := st.Recv(ctx); return err },
			func() error { return st.Send(ctx, nil) },
		} {
			if err := f(); !errors.Is(err, ErrUnreachable) || errors.Is(err, io.EOF) || NotDelivered(err) {
				t.Errorf("after the loss: %v", err)
			}
		}
		st.Close(nil)
		if _, err := st.Recv(ctx); !errors.Is(err, ErrStreamClosed) {
			t.Errorf("after the close: %v", err)
		}
	})
}

// TestStreamSendCopies: the sender may reuse a message's memory at once, whatever the
// target.
func TestStreamSendCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		got := make(chan string, 2)
		e := newTestEndpoint(t, nil)
		e.streams[testStream] = streamEntry{ClassRequest, func(ctx context.Context, _ keyspace.NodeID, _ []byte, st Stream) error {
			for {
				b, err := st.Recv(ctx)
				if err != nil {
					return err
				}
				got <- string(b)
			}
		}}
		s := attach(t, e, KindMain)
		ctx := context.Background()
		for _, to := range []keyspace.NodeID{1, 2} {
			st, err := e.OpenStream(ctx, to, testStream, nil)
			if err != nil {
				t.Fatal(err)
			}
			b := []byte("first")
			for _, next := range []string{"other", "-----"} {
				if err := st.Send(ctx, b); err != nil {
					t.Fatal(err)
				}
				copy(b, next)
			}
			synctest.Wait()
			if to == 2 {
				for f := range SplitFrames(take(t, s, ClassRequest)) {
					if f, err := parseFrame(f[lengthBytes:]); err == nil && f.kind == frameData {
						got <- string(f.payload)
					}
				}
			}
			if x, y := <-got, <-got; x != "first" || y != "other" {
				t.Errorf("to node %s came %q and %q", to, x, y)
			}
			st.Close(nil)
		}
	})
}

// TestMisuse: mistakes of the program panic at once.
func TestMisuse(t *testing.T) {
	for _, cfg := range []Config{{}, {Node: 1}, {Node: 1, Clock: clock.System(), Lanes: [numClasses]int{2}}, {Node: 1, Clock: clock.System(), MaxMessageBytes: -1}} {
		if _, err := NewEndpoint(cfg); err == nil {
			t.Errorf("config %+v is accepted", cfg)
		}
	}
	e := newTestEndpoint(t, nil)
	if err := e.Run(); err == nil {
		t.Error("started twice")
	}
	for name, fn := range map[string]func(){
		"after start": func() { e.HandleSend(0xf200, ClassRaft, nil) },
		"other class": func() { e.HandleSend(MethodRaft, ClassBulk, nil) },
		"no such one": func() { e.HandleSend(0xf200, numClasses, nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			fn()
		}()
	}
}

// FuzzSession: no sequence of a peer's frames makes a session panic or leak.
func FuzzSession(f *testing.F) {
	var all []byte
	for kind := frameMessage; kind <= framePong; kind++ {
		all = append(all, encodeFrame(&frame{kind: kind, id: 1, method: testCall + Method(kind)%3})...)
	}
	f.Add(all)
	f.Add(encodeFrame(&frame{kind: frameOpen, id: 1, method: testStream}))
	f.Fuzz(func(t *testing.T, b []byte) {
		e := newTestEndpoint(t, func(c *Config) { c.MaxHandlers, c.MaxStreams = 4, 4 })
		s := attach(t, e, KindMain)
		fr := newFrameReader(bytes.NewReader(b), 1<<20)
		for i := 0; ; i++ {
			got, err := fr.next()
			if err != nil {
				break
			}
			if err := s.receive(Class(i%int(ClassBulk)), &got); err != nil {
				s.End(err)
				break
			}
		}
		s.End(errGone)
		e.Stop()
		e.Wait()
		if n := s.peer.streams.Load(); n != 0 {
			t.Errorf("%d streams left", n)
		}
		for i := range s.peer.handlers {
			if n := s.peer.handlers[i].Load(); n != 0 {
				t.Errorf("%d handlers of method %d left", n, i)
			}
		}
	})
}

func ExampleNotDelivered() {
	err := &CallError{Peer: 2, Method: MethodShardRequest, NotDelivered: true, Err: ErrQueueFull}
	fmt.Println(err, NotDelivered(err))
	// Output: call shard-request to node 2: transport: queue full (not delivered) true
}
