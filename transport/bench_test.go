package transport_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"go.uber.org/zap"

	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/transport"
)

// report gives the rate and the CPU per message beside the benchmark's own figures.
func report(b *testing.B, start time.Duration) {
	b.Helper()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "msg/s")
	b.ReportMetric(float64((measure.CPU()-start).Nanoseconds())/1e3/float64(b.N), "cpu-µs/msg")
}

func benchPair(b *testing.B, register func(*transport.QUIC)) (*transport.QUIC, *transport.QUIC) {
	b.Helper()
	return benchPairOver(b, transport.CarrierQUIC, register)
}

func benchPairOver(b *testing.B, carrier transport.Carrier, register func(*transport.QUIC)) (*transport.QUIC, *transport.QUIC) {
	b.Helper()
	h := newQUICHarness()
	var nodes []*transport.QUIC
	for id := range keyspace.NodeID(2) {
		q := h.new(b, transport.Options{
			Config:   transport.Config{Cluster: 1, Node: id + 1, Logger: zap.NewNop()},
			Security: transport.Security{SelfMade: true},
			Carrier:  carrier,
		})
		register(q)
		nodes = append(nodes, q)
	}
	x, y := nodes[0], nodes[1]
	up := make(chan struct{}, 16)
	x.OnPeer(func(_ keyspace.NodeID, s transport.PeerState) {
		if s.Up {
			up <- struct{}{}
		}
	})
	x.SetPeer(2, y.Addrs())
	y.SetPeer(1, x.Addrs())
	for _, q := range nodes {
		if err := q.Start(); err != nil {
			b.Fatal(err)
		}
	}
	<-up
	return x, y
}

const messageBytes = 256

// BenchmarkSend sends messages of 256 bytes from several goroutines as fast as the
// queue takes them. The bus makes the batches.
func BenchmarkSend(b *testing.B) {
	for _, senders := range []int{1, 8} {
		b.Run(fmt.Sprintf("senders=%d", senders), func(b *testing.B) {
			var got atomic.Int64
			done := make(chan struct{})
			var want int64
			x, _ := benchPair(b, func(q *transport.QUIC) {
				q.HandleSend(transport.MethodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) {
					if got.Add(1) == atomic.LoadInt64(&want) {
						close(done)
					}
				})
			})
			atomic.StoreInt64(&want, int64(b.N))
			b.ReportAllocs()
			b.ResetTimer()
			start := measure.CPU()
			for s := range senders {
				go func() {
					payload := make([]byte, messageBytes)
					for i := s; i < b.N; i += senders {
						for x.Send(2, transport.MethodRaft, uint64(s), payload) != nil {
							time.Sleep(50 * time.Microsecond)
						}
					}
				}()
			}
			<-done
			report(b, start)
		})
	}
}

// BenchmarkBareQUIC sends the same bytes with quic-go alone, by the number of messages
// per write.
func BenchmarkBareQUIC(b *testing.B) {
	for _, batch := range []int{1, 8, 32, 128} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			out, in := bareStream(b)
			done := make(chan error, 1)
			go func() {
				_, err := io.CopyN(io.Discard, in, int64(b.N)*(messageBytes+4))
				done <- err
			}()
			buf := make([]byte, batch*(messageBytes+4))
			b.ReportAllocs()
			b.ResetTimer()
			start := measure.CPU()
			for sent := 0; sent < b.N; sent += batch {
				if _, err := out.Write(buf[:min(batch, b.N-sent)*(messageBytes+4)]); err != nil {
					b.Fatal(err)
				}
			}
			if err := <-done; err != nil {
				b.Fatal(err)
			}
			report(b, start)
		})
	}
}

// BenchmarkBurst sends bursts of messages of 256 bytes, each when the last one has
// arrived. The bus puts most of a burst into one batch; quic-go alone gets one write
// per burst.
func BenchmarkBurst(b *testing.B) {
	for _, burst := range []int{1, 8, 32, 128} {
		b.Run(fmt.Sprintf("bus/batch=%d", burst), func(b *testing.B) {
			var got, want atomic.Int64
			arrived := make(chan struct{}, 1)
			x, _ := benchPair(b, func(q *transport.QUIC) {
				q.HandleSend(transport.MethodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) {
					if got.Add(1) == want.Load() {
						arrived <- struct{}{}
					}
				})
			})
			payload := make([]byte, messageBytes)
			benchBursts(b, burst, func(n int) error {
				want.Add(int64(n))
				for range n {
					if err := x.Send(2, transport.MethodRaft, 1, payload); err != nil {
						return err
					}
				}
				<-arrived
				return nil
			})
		})
		b.Run(fmt.Sprintf("bare/batch=%d", burst), func(b *testing.B) {
			out, in := bareStream(b)
			sizes, arrived := make(chan int, 1), make(chan error, 1)
			go func() {
				buf := make([]byte, burst*(messageBytes+4))
				for n := range sizes {
					_, err := io.ReadFull(in, buf[:n])
					arrived <- err
				}
			}()
			buf := make([]byte, burst*(messageBytes+4))
			benchBursts(b, burst, func(n int) error {
				sizes <- n * (messageBytes + 4)
				if _, err := out.Write(buf[:n*(messageBytes+4)]); err != nil {
					return err
				}
				return <-arrived
			})
			close(sizes)
		})
	}
}

// benchBursts sends b.N messages in bursts.
func benchBursts(b *testing.B, burst int, send func(n int) error) {
	b.Helper()
	b.ReportAllocs()
	b.ResetTimer()
	start := measure.CPU()
	for sent := 0; sent < b.N; sent += burst {
		if err := send(min(burst, b.N-sent)); err != nil {
			b.Fatal(err)
		}
	}
	report(b, start)
}

// bareStream returns the two ends of a quic-go stream on loopback.
func bareStream(b *testing.B) (io.Writer, io.Reader) {
	b.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{}, key.Public(), key)
	if err != nil {
		b.Fatal(err)
	}
	sock := func() *quic.Transport {
		c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			b.Fatal(err)
		}
		tr := &quic.Transport{Conn: c}
		b.Cleanup(func() { _ = errors.Join(tr.Close(), c.Close()) })
		return tr
	}
	cfg := &quic.Config{InitialStreamReceiveWindow: 1 << 20, MaxStreamReceiveWindow: 4 << 20, InitialConnectionReceiveWindow: 16 << 20, MaxConnectionReceiveWindow: 16 << 20}
	server, client := sock(), sock()
	ln, err := server.Listen(&tls.Config{NextProtos: []string{"x"}, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, cfg)
	if err != nil {
		b.Fatal(err)
	}
	out, err := client.Dial(context.Background(), ln.Addr(), &tls.Config{NextProtos: []string{"x"}, InsecureSkipVerify: true}, cfg)
	if err != nil {
		b.Fatal(err)
	}
	in, err := ln.Accept(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	w, err := out.OpenUniStream()
	if err != nil {
		b.Fatal(err)
	}
	if _, err := w.Write([]byte{0}); err != nil {
		b.Fatal(err)
	}
	r, err := in.AcceptUniStream(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	if _, err := io.ReadFull(r, make([]byte, 1)); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = out.CloseWithError(0, "")
		_ = in.CloseWithError(0, "")
	})
	return w, r
}

// BenchmarkPacedSend sends one message of 256 bytes at fixed intervals: the cost of an
// idle bus.
func BenchmarkPacedSend(b *testing.B) {
	for _, every := range []time.Duration{20 * time.Microsecond, 100 * time.Microsecond} {
		b.Run(every.String(), func(b *testing.B) {
			done := make(chan struct{})
			var got, want atomic.Int64
			x, _ := benchPair(b, func(q *transport.QUIC) {
				q.HandleSend(transport.MethodRaft, transport.ClassRaft, func(keyspace.NodeID, []byte) {
					if got.Add(1) == want.Load() {
						close(done)
					}
				})
			})
			want.Store(int64(b.N))
			payload := make([]byte, messageBytes)
			b.ResetTimer()
			start := measure.CPU()
			begin := time.Now()
			for i := range b.N {
				if d := time.Duration(i)*every - time.Since(begin); d > 200*time.Microsecond {
					time.Sleep(d)
				}
				for x.Send(2, transport.MethodRaft, uint64(i%8), payload) != nil {
					time.Sleep(time.Millisecond)
				}
			}
			<-done
			report(b, start)
		})
	}
}

// BenchmarkStream sends messages of 63 KiB over one stream, as a copy of a range does.
func BenchmarkStream(b *testing.B) {
	const bytes = 63 << 10
	done := make(chan error, 1)
	x, _ := benchPair(b, func(q *transport.QUIC) {
		q.HandleStream(transport.MethodRaftSnapshot, transport.ClassBulk, func(ctx context.Context, _ keyspace.NodeID, _ []byte, st transport.Stream) error {
			for {
				p, err := st.Recv(ctx)
				if err != nil {
					done <- err
					return nil
				}
				transport.Recycle(p)
			}
		})
	})
	ctx, cancel := context.WithTimeout(b.Context(), 5*time.Minute)
	defer cancel()
	st, err := x.OpenStream(ctx, 2, transport.MethodRaftSnapshot, nil)
	for ; errors.Is(err, transport.ErrNoRoute); st, err = x.OpenStream(ctx, 2, transport.MethodRaftSnapshot, nil) {
		time.Sleep(time.Millisecond) // the way of a class comes up by itself
	}
	if err != nil {
		b.Fatal(err)
	}
	payload := make([]byte, bytes)
	b.SetBytes(bytes)
	b.ReportAllocs()
	b.ResetTimer()
	start := measure.CPU()
	for range b.N {
		if err := st.Send(ctx, payload); err != nil {
			b.Fatal(err)
		}
	}
	st.Close(nil)
	if err := <-done; !errors.Is(err, io.EOF) {
		b.Fatal(err)
	}
	report(b, start)
}

// BenchmarkCall is the round trip of a call: alone, from many goroutines, and to the
// node itself.
func BenchmarkCall(b *testing.B) {
	for _, test := range []struct {
		name    string
		to      keyspace.NodeID
		callers int
		carrier transport.Carrier
	}{
		{"remote", 2, 1, transport.CarrierQUIC},
		{"remote/tls", 2, 1, transport.CarrierTLS},
		{"remote/callers=4", 2, 4, transport.CarrierQUIC},
		{"remote/callers=4/tls", 2, 4, transport.CarrierTLS},
		{"remote/callers=16", 2, 16, transport.CarrierQUIC},
		{"remote/callers=16/tls", 2, 16, transport.CarrierTLS},
		{"remote/callers=64", 2, 64, transport.CarrierQUIC},
		{"remote/callers=64/tls", 2, 64, transport.CarrierTLS},
		{"loopback", 1, 1, transport.CarrierQUIC},
	} {
		b.Run(test.name, func(b *testing.B) {
			x, _ := benchPairOver(b, test.carrier, func(q *transport.QUIC) {
				q.HandleCall(transport.MethodShardRequest, transport.ClassRequest, func(_ context.Context, _ keyspace.NodeID, p []byte) ([]byte, error) {
					return p, nil
				})
			})
			payload := make([]byte, messageBytes)
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			b.ReportAllocs()
			b.ResetTimer()
			start := measure.CPU()
			failed := make(chan error, test.callers)
			for c := range test.callers {
				go func() {
					var err error
					for i := c; i < b.N && err == nil; i += test.callers {
						_, err = x.Call(ctx, test.to, transport.MethodShardRequest, payload)
					}
					failed <- err
				}()
			}
			for range test.callers {
				if err := <-failed; err != nil {
					b.Fatal(err)
				}
			}
			report(b, start)
		})
	}
}

// BenchmarkIdlePeers has a node with 48 peers to each of which it has sent a message by each lane, and
// they to it. It reports the memory of one end of such a pair, all ends being in this process. Run it
// with -benchtime 1x.
func BenchmarkIdlePeers(b *testing.B) {
	const peers = 48
	for b.Loop() {
		before := memory()
		var got atomic.Int64
		count := func(keyspace.NodeID, []byte) { got.Add(1) }
		h := newQUICHarness()
		var nodes []*transport.QUIC
		for id := range keyspace.NodeID(peers + 1) {
			q := h.new(b, transport.Options{
				Config:   transport.Config{Cluster: 1, Node: id + 1, Logger: zap.NewNop(), QueueBytes: 200 << 20},
				Security: transport.Security{SelfMade: true},
			})
			for c, m := range idleMethods {
				q.HandleSend(m, transport.Class(c), count)
			}
			nodes = append(nodes, q)
		}
		alone := memory() - before
		for _, q := range nodes[1:] {
			nodes[0].SetPeer(q.Self(), q.Addrs())
			q.SetPeer(1, nodes[0].Addrs())
		}
		for _, q := range nodes {
			if err := q.Start(); err != nil {
				b.Fatal(err)
			}
		}
		for _, q := range nodes[1:] {
			for _, pair := range [2][2]*transport.QUIC{{nodes[0], q}, {q, nodes[0]}} {
				for c, m := range idleMethods {
					for order := range uint64(32) {
						for pair[0].Send(pair[1].Self(), m, order, []byte{byte(c)}) != nil {
							time.Sleep(time.Millisecond)
						}
					}
				}
			}
		}
		for got.Load() < 2*peers*32*int64(len(idleMethods)) {
			time.Sleep(time.Millisecond)
		}
		b.ReportMetric(float64(memory()-before-alone)/(2*peers), "B/peer")
		for _, q := range nodes {
			q.Close()
		}
	}
}

// idleMethods are methods of each class.
var idleMethods = [4]transport.Method{0xfff0, 0xfff1, 0xfff2, 0xfff3}

// memory returns the bytes of live heap and of stacks.
func memory() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
