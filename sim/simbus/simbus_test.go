package simbus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
	"github.com/skeindb/skein/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	for _, test := range []struct {
		name   string
		faults Faults
	}{
		{"perfect", Faults{}},
		{"lan", Faults{Delay: Delay{Min: 50 * time.Microsecond, Max: 500 * time.Microsecond, Tail: 0.01, TailMean: 5 * time.Millisecond}}},
		{"wan", Faults{Delay: Delay{Min: 20 * time.Millisecond, Max: 60 * time.Millisecond}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var n *Network
			boot := keyspace.BootID(0)
			transporttest.Run(t, transporttest.Harness{
				Test: func(t *testing.T, name string, fn func(t *testing.T)) {
					t.Run(name, func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							n = New(1, test.faults)
							fn(t)
						})
					})
				},
				New: func(t *testing.T, node keyspace.NodeID, tune func(*transport.Config)) transporttest.Bus {
					boot++
					cfg := transport.Config{Cluster: 1, Node: node, Boot: boot, Clock: clock.Virtual()}
					if tune != nil {
						tune(&cfg)
					}
					b, err := n.NewBus(cfg)
					if err != nil {
						t.Fatal(err)
					}
					return b
				},
				Connect: func(buses ...transporttest.Bus) {
					for _, b := range buses {
						for _, o := range buses {
							b.(*Bus).SetPeer(o.Self(), nil)
						}
					}
				},
				Break: func(a, b transporttest.Bus) { n.Cut(a.Self(), b.Self()) },
				Mend:  func(a, b transporttest.Bus) { n.Heal(a.Self(), b.Self()) },
				Crash: func(b transporttest.Bus) {
					n.Crash(b.Self())
					_ = b.Close()
				},
			})
		})
	}
}

const (
	methodMessage = transport.MethodRaft
	methodCall    = transport.MethodShardRequest
	methodStream  = transport.MethodRaftSnapshot
)

// world is some nodes and a trace of every arrival.
type world struct {
	t     *testing.T
	net   *Network
	buses map[keyspace.NodeID]*Bus
	trace []string // only used by node 2's handlers: one class, one goroutine
	boot  keyspace.BootID
	start time.Time
	// relays is that of the nodes to come; nil is none.
	relays func(keyspace.NodeID) []keyspace.NodeID
}

func newWorld(t *testing.T, seed uint64, f Faults, nodes ...keyspace.NodeID) *world {
	t.Helper()
	w := &world{t: t, net: New(seed, f), buses: map[keyspace.NodeID]*Bus{}, start: time.Now()}
	for _, id := range nodes {
		w.add(id, nodes...)
	}
	time.Sleep(time.Second)
	synctest.Wait()
	t.Cleanup(func() {
		for _, b := range w.buses {
			_ = b.Close()
		}
	})
	return w
}

func (w *world) add(id keyspace.NodeID, peers ...keyspace.NodeID) {
	w.boot++
	b, err := w.net.NewBus(transport.Config{
		Cluster: 1, Node: id, Boot: w.boot, Clock: clock.Virtual(),
		Lanes: [4]int{1, 1, 2, 1}, Relays: w.relays,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	b.HandleSend(methodMessage, transport.ClassRaft, func(from keyspace.NodeID, payload []byte) {
		if id == 2 {
			w.trace = append(w.trace, fmt.Sprintf("%v %s %s", time.Since(w.start), from, payload))
		}
	})
	b.HandleCall(methodCall, transport.ClassRequest, func(ctx context.Context, _ keyspace.NodeID, payload []byte) ([]byte, error) {
		if string(payload) == "wait" {
			<-ctx.Done()
		}
		return payload, ctx.Err()
	})
	b.HandleStream(methodStream, transport.ClassBulk, func(ctx context.Context, _ keyspace.NodeID, _ []byte, s transport.Stream) error {
		for {
			if _, err := s.Recv(ctx); err != nil {
				return nil
			}
		}
	})
	for _, p := range peers {
		b.SetPeer(p, nil)
	}
	w.buses[id] = b
	if err := b.Start(); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) send(n int) {
	for i := range n {
		if err := w.buses[1].Send(2, methodMessage, 0, fmt.Append(nil, i)); err != nil {
			w.t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	time.Sleep(time.Second)
	synctest.Wait()
}

// arrived returns the payloads that node 2 received.
func (w *world) arrived() []string {
	var out []string
	for _, line := range w.trace {
		out = append(out, line[strings.LastIndex(line, " ")+1:])
	}
	return out
}

func TestMessageFaults(t *testing.T) {
	lan := Delay{Min: 100 * time.Microsecond, Max: 300 * time.Microsecond}
	for _, test := range []struct {
		name   string
		faults Faults
		check  func(t *testing.T, s Stats, got []string)
	}{
		{"none", Faults{Delay: lan}, func(t *testing.T, _ Stats, got []string) {
			if len(got) != 1000 || !ascending(got) {
				t.Errorf("%d arrived, ascending %t", len(got), ascending(got))
			}
		}},
		{"loss", Faults{Delay: lan, Loss: 0.2}, func(t *testing.T, s Stats, got []string) {
			if s.Lost < 100 || len(got) != 1000-int(s.Lost) || !ascending(got) {
				t.Errorf("%d arrived, %+v, ascending %t", len(got), s, ascending(got))
			}
		}},
		{"duplicate", Faults{Delay: lan, Duplicate: 0.2}, func(t *testing.T, s Stats, got []string) {
			if s.Duplicated < 100 || len(got) != 1000+int(s.Duplicated) {
				t.Errorf("%d arrived, %+v", len(got), s)
			}
		}},
		{"reorder", Faults{Delay: lan, Reorder: 0.2, ReorderBy: 20 * time.Millisecond}, func(t *testing.T, s Stats, got []string) {
			if s.Reordered < 100 || len(got) != 1000 || ascending(got) {
				t.Errorf("%d arrived, %+v, ascending %t", len(got), s, ascending(got))
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 7, test.faults, 1, 2)
				w.send(1000)
				test.check(t, w.net.Stats(), w.arrived())
			})
		})
	}
}

func ascending(got []string) bool {
	return slices.IsSortedFunc(got, func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
}

// TestSameSeedSameTrace: the same calls with the same seed give the same arrivals at
// the same moments.
func TestSameSeedSameTrace(t *testing.T) {
	f := Faults{
		Delay: Delay{Min: time.Millisecond, Max: 5 * time.Millisecond, Tail: 0.1, TailMean: 20 * time.Millisecond},
		Loss:  0.1, Duplicate: 0.1, Reorder: 0.1, ReorderBy: 10 * time.Millisecond,
	}
	run := func(seed uint64) (trace []string) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, seed, f, 1, 2)
			w.send(300)
			trace = w.trace
		})
		return trace
	}
	first := run(3)
	if again := run(3); !slices.Equal(first, again) {
		t.Error("one seed gave two traces")
	}
	if slices.Equal(first, run(4)) {
		t.Error("two seeds gave one trace")
	}
}

// TestCut: a cut of one direction loses messages and holds calls. A lasting cut ends
// the session, and after Heal there is another.
func TestCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, Faults{Delay: Delay{Min: time.Millisecond}}, 1, 2, 3)
		a := w.buses[1]
		ctx := t.Context()
		w.net.Cut(1, 2)
		w.send(3)
		if len(w.trace) != 0 || w.net.Stats().CutOff != 3 {
			t.Errorf("over a cut: %v, %+v", w.trace, w.net.Stats())
		}
		result := make(chan error, 1)
		go func() {
			_, err := a.Call(ctx, 2, methodCall, nil)
			result <- err
		}()
		time.Sleep(100 * time.Millisecond)
		w.net.Heal(1, 2)
		if err := <-result; err != nil {
			t.Errorf("call held by a short cut: %v", err)
		}

		w.net.Cut(2, 1)
		_, err := a.Call(ctx, 2, methodCall, nil)
		if !errors.Is(err, transport.ErrUnreachable) || transport.NotDelivered(err) {
			t.Errorf("call over a lasting cut: %v", err)
		}
		synctest.Wait()
		if a.Peer(2).Up {
			t.Error("up behind a lasting cut")
		}
		if !a.Peer(3).Up {
			t.Error("a cut of others took node 3 down")
		}
		time.Sleep(10 * time.Second)
		w.net.HealAll()
		time.Sleep(time.Second)
		synctest.Wait()
		if _, err := a.Call(ctx, 2, methodCall, nil); err != nil {
			t.Errorf("after healing: %v", err)
		}
	})
}

func TestPartitionAndPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, Faults{Delay: Delay{Min: time.Millisecond}}, 1, 2, 3)
		w.net.Partition(3)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if !w.buses[1].Peer(2).Up || w.buses[1].Peer(3).Up || w.buses[3].Peer(1).Up || w.buses[3].Peer(2).Up {
			t.Error("a partition of node 3")
		}
		w.net.HealAll()
		time.Sleep(time.Second)
		w.net.Pause(2)
		w.send(3)
		w.net.HealCuts()
		time.Sleep(100 * time.Millisecond)
		if len(w.trace) != 0 {
			t.Errorf("paused node got %v", w.trace)
		}
		w.net.Resume(2)
		time.Sleep(time.Second)
		synctest.Wait()
		if len(w.trace) != 3 || !w.buses[1].Peer(3).Up {
			t.Errorf("resumed node got %v", w.trace)
		}
	})
}

// TestCrash: frames under way are lost in both directions, nobody is told, and the
// peers find out.
func TestCrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, Faults{Delay: Delay{Min: 50 * time.Millisecond}}, 1, 2)
		if err := w.buses[1].Send(2, methodMessage, 0, []byte("x")); err != nil {
			t.Fatal(err)
		}
		result := make(chan error, 1)
		go func() {
			_, err := w.buses[2].Call(t.Context(), 1, methodCall, nil)
			result <- err
		}()
		time.Sleep(20 * time.Millisecond)
		w.net.Crash(1)
		if err := w.buses[1].Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if len(w.trace) != 0 {
			t.Errorf("arrived after the crash: %v", w.trace)
		}
		if !w.buses[2].Peer(1).Up {
			t.Error("somebody told of a crash")
		}
		if err := <-result; !errors.Is(err, transport.ErrUnreachable) || transport.NotDelivered(err) {
			t.Errorf("call to a crashed node: %v", err)
		}
		before := w.buses[2].Peer(1)
		w.add(1, 1, 2)
		time.Sleep(time.Second)
		synctest.Wait()
		if after := w.buses[2].Peer(1); !after.Up || after.Boot == before.Boot {
			t.Errorf("after the restart: %+v, before: %+v", after, before)
		}
		if w.net.Stats().Crashes != 1 {
			t.Errorf("%+v", w.net.Stats())
		}
	})
}

// TestBreak: a broken session fails what is under way, and a new one is made.
func TestBreak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, Faults{Delay: Delay{Min: time.Millisecond}}, 1, 2)
		s, err := w.buses[1].OpenStream(t.Context(), 2, methodStream, nil)
		if err != nil {
			t.Fatal(err)
		}
		w.net.SetFaults(1, 2, Faults{Delay: Delay{Min: time.Millisecond}, Break: 0.5})
		for err = nil; err == nil; {
			err = s.Send(t.Context(), []byte("x"))
			time.Sleep(time.Millisecond)
		}
		if _, err := s.Recv(t.Context()); !errors.Is(err, transport.ErrUnreachable) || errors.Is(err, io.EOF) {
			t.Errorf("stream of a broken session: %v", err)
		}
		s.Close(nil)
		w.net.SetFaults(1, 2, Faults{Delay: Delay{Min: time.Millisecond}})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if _, err := w.buses[1].Call(t.Context(), 2, methodCall, nil); err != nil {
			t.Errorf("after the break: %v", err)
		}
		if w.net.Stats().Broken == 0 {
			t.Errorf("%+v", w.net.Stats())
		}
	})
}

// A relay that has lost its own session with the receiver asks no other relay, even if it knows one:
// calls could go round for ever.
func TestARelayAsksNoRelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, Faults{})
		next := map[keyspace.NodeID]keyspace.NodeID{1: 3, 3: 4}
		nodes := []keyspace.NodeID{1, 2, 3, 4}
		for _, id := range nodes {
			w.relays = func(keyspace.NodeID) []keyspace.NodeID {
				if next[id] == 0 {
					return nil
				}
				return []keyspace.NodeID{next[id]}
			}
			w.add(id, nodes...)
		}
		time.Sleep(time.Second)
		call := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := w.buses[1].Call(ctx, 2, methodCall, []byte("x"))
			return err
		}
		cut := func(a, b keyspace.NodeID) {
			w.net.Cut(a, b)
			w.net.Cut(b, a)
			time.Sleep(5 * time.Second)
		}
		cut(1, 2)
		if err := call(); err != nil {
			t.Errorf("by way of node 3: %v", err)
		}
		cut(3, 2)
		if err := call(); !errors.Is(err, transport.ErrNoRoute) {
			t.Errorf("by way of nodes 3 and 4: %v, want %v", err, transport.ErrNoRoute)
		}
	})
}
