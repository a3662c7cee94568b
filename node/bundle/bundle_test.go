package bundle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"reflect"
	"runtime/pprof"
	"runtime/trace"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/redact"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// gather is a Gatherer.
type gather func() ([]*dto.MetricFamily, error)

func (g gather) Gather() ([]*dto.MetricFamily, error) { return g() }

// parts are the files of a bundle, and their errors.
func parts(t *testing.T, s *Source, q *adminpb.BundleRequest) (files, problems map[string]string) {
	t.Helper()
	files, problems = map[string]string{}, map[string]string{}
	last := true
	err := s.Bundle(t.Context(), q, func(p *adminpb.BundleResponse) error {
		if (p.GetAbout() != "") != last || p.GetNode() != "n1" {
			t.Errorf("%s: about %q, node %q", p.GetFile(), p.GetAbout(), p.GetNode())
		}
		last = p.GetLast()
		files[p.GetFile()] += string(p.GetData())
		if p.GetError() != "" {
			problems[p.GetFile()] = p.GetError()
		}
		return nil
	})
	if err != nil || !last {
		t.Errorf("%v, the last piece has come: %t", err, last)
	}
	return files, problems
}

func source() (*Source, *zap.Logger) {
	s := &Source{Node: "n1", Config: config.Default(), Log: &Ring{}, SlowCalls: func() []*adminpb.SlowCall { return nil }, Metrics: prometheus.NewRegistry(), Clock: clock.System()}
	kept := zapcore.NewCore(zapcore.NewJSONEncoder(zapcore.EncoderConfig{}), zapcore.AddSync(io.Discard), zapcore.InfoLevel)
	return s, s.Log.Attach(zap.New(kept))
}

func TestPartHasAllFiles(t *testing.T) {
	s, _ := source()
	files, problems := parts(t, s, &adminpb.BundleRequest{ProfileMs: 50, Salt: []byte("s")})
	for _, name := range []string{"build.txt", "config.txt", "process.txt", "slow.json", "goroutines.txt", "heap.pb.gz", "cpu.pb.gz", "trace.out"} {
		if files[name] == "" {
			t.Errorf("%s is empty: %s", name, problems[name])
		}
	}
	if len(files) != 10 || len(problems) > 0 {
		t.Errorf("%d files, %v", len(files), problems)
	}
}

// A file that hangs costs itself alone: the others come at once, and it is named when the time is over.
func TestFileThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := source()
		let := make(chan struct{})
		defer close(let)
		s.Metrics = gather(func() ([]*dto.MetricFamily, error) { <-let; return nil, nil })
		begun := time.Now()
		files, problems := parts(t, s, &adminpb.BundleRequest{})
		if len(files) != 8 || len(problems) != 1 || !strings.Contains(problems["metrics.txt"], "not made") || time.Since(begun) != nodeTime {
			t.Errorf("%d files after %v, %v", len(files), time.Since(begun), problems)
		}
	})
}

// Whoever asked has gone: nothing more is sent.
func TestNobodyTakesThePart(t *testing.T) {
	s, _ := source()
	gone, sent := errors.New("gone"), 0
	err := s.Bundle(t.Context(), &adminpb.BundleRequest{}, func(*adminpb.BundleResponse) error { sent++; return gone })
	if !errors.Is(err, gone) || sent != 1 {
		t.Errorf("%v after %d", err, sent)
	}
}

// Who asks for a part and does not read keeps the node from no other bundle for longer than its time. Until then
// another one is refused, and nothing is made for it.
func TestPartThatNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := source()
		ended, first := make(chan struct{}), make(chan error)
		go func() {
			first <- s.Bundle(t.Context(), &adminpb.BundleRequest{}, func(*adminpb.BundleResponse) error {
				<-ended // as gRPC's send does, until the call has returned
				return errors.New("the stream is done")
			})
		}()
		synctest.Wait()
		begun := time.Now()
		err := s.Bundle(t.Context(), &adminpb.BundleRequest{}, func(*adminpb.BundleResponse) error { t.Error("sent"); return nil })
		if r := (*adminapi.Refusal)(nil); !errors.As(err, &r) || !strings.Contains(r.Reason, "another debug bundle") || time.Since(begun) != 0 {
			t.Errorf("the second one: %v after %v", err, time.Since(begun))
		}
		if err := <-first; !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != takeTime {
			t.Errorf("the first one: %v after %v", err, time.Since(begun))
		}
		close(ended)
		synctest.Wait()
		if files, _ := parts(t, s, &adminpb.BundleRequest{}); len(files) != 8 {
			t.Errorf("the third one has %d files", len(files))
		}
	})
}

// The same over gRPC: the send that waits for the reader ends with the call.
func TestPartThatNobodyReadsOverGRPC(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, log := source()
		for range 1000 {
			log.Info(strings.Repeat("x", 1<<10)) // more than a stream takes unread
		}
		l, server := bufconn.Listen(1<<20), grpc.NewServer()
		adminapi.Register(server, struct {
			adminapi.Backend
			*Source
		}{nil, s})
		go func() { _ = server.Serve(l) }()
		defer server.Stop()
		conn, err := grpc.NewClient("passthrough:///n1", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if _, err := adminpb.NewAdminClient(conn).Bundle(ctx, &adminpb.BundleRequest{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(takeTime - time.Second)
		if !s.busy.Load() {
			t.Error("the part ended although nobody reads it")
		}
		time.Sleep(2 * time.Second)
		if s.busy.Load() {
			t.Error("the part has not ended")
		}
	})
}

func TestLargeFileIsCut(t *testing.T) {
	s, _ := source()
	var got []*adminpb.BundleResponse
	m := made{&file{name: "f", about: "a"}, bytes.Repeat([]byte("x"), 2*pieceBytes+1), fmt.Errorf("at https://u:planted@h/")}
	if err := s.send(m, func(p *adminpb.BundleResponse) error { got = append(got, p); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || len(got[2].GetData()) != 1 || got[0].GetLast() || !got[2].GetLast() || strings.Contains(got[0].GetError(), "planted") {
		t.Errorf("%d pieces, %q", len(got), got[0].GetError())
	}
	b := &bounded{most: 3}
	if n, err := fmt.Fprint(b, "12345"); n != 5 || err != nil || b.String() != "123" || b.cut != 2 {
		t.Errorf("%d, %v, %q, %d", n, err, b, b.cut)
	}
}

// The ring has the last lines, in their order, whatever their sizes.
func TestRing(t *testing.T) {
	s, log := source()
	total, i := 0, 0
	for ; total < 3*RingBytes; i++ {
		pad := strings.Repeat("x", i*7919%3000)
		log.Info("line", zap.Int("i", i), zap.String("pad", pad))
		total += len(pad)
	}
	lines := bytes.Split(bytes.TrimSuffix(s.Log.Lines(), []byte("\n")), []byte("\n"))
	if size := len(s.Log.Lines()); size > RingBytes || size < RingBytes-4096 {
		t.Errorf("%d bytes", size)
	}
	for j, line := range lines {
		if want := fmt.Sprintf(`"i":%d,`, i-len(lines)+j); !bytes.Contains(line, []byte(want)) || !bytes.HasPrefix(line, []byte("{")) {
			t.Fatalf("line %d of %d is not %s: %.100s", j, len(lines), want, line)
		}
	}
	before := len(s.Log.Lines())
	if log.Debug("below the level of the log"); len(s.Log.Lines()) != before {
		t.Error("a line that is not logged is kept")
	}
	if n, err := s.Log.Write(bytes.Repeat([]byte("y"), 2*RingBytes)); n != 2*RingBytes || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// Traps: neither a key nor a secret is in a node's part, whatever field or line it is in.
func TestNothingPlantedIsInAPart(t *testing.T) {
	const planted = "planted5d21"
	s, log := source()
	c := s.Config
	c.InitialClusterToken, c.InitialSplitKeys = planted, [][]byte{[]byte("a/" + planted)}
	c.AdvertiseClientURLs = []url.URL{{Scheme: "https", Host: "h", User: url.UserPassword("root", planted)}}
	c.Join = []string{"https://root:" + planted + "@h:2379"}
	log = log.With(zap.Strings("args", []string{"--password", planted}))
	log.Info("split", zap.String("key", fmt.Sprintf("%q", planted)), zap.String("secret_access_key", planted))
	log.Warn("request", zap.Error(fmt.Errorf("put %q: bearer %s", planted, planted)), zap.String("url", "s3://k:"+planted+"@b"))
	files, _ := parts(t, s, &adminpb.BundleRequest{Salt: []byte("salt")})
	for name, text := range files {
		if i := strings.Index(text, planted); i >= 0 {
			t.Errorf("%s: %s", name, text[max(0, i-100):i+len(planted)])
		}
	}
	if n := strings.Count(files["log.jsonl"], "\n"); n != 2 {
		t.Errorf("%d lines of the log:\n%s", n, files["log.jsonl"])
	}
}

// Each setting is in the file, in words.
func TestConfigHasAllSettings(t *testing.T) {
	var b bytes.Buffer
	c := config.Default()
	c.DataDir = "/var/lib/skein"
	if err := writeConfig(&b, c, redact.New(nil)); err != nil {
		t.Fatal(err)
	}
	for i := range reflect.TypeFor[config.Config]().NumField() {
		if name := reflect.TypeFor[config.Config]().Field(i).Name; !strings.Contains("\n"+b.String(), "\n"+name) {
			t.Errorf("%s is missing", name)
		}
	}
	for _, want := range []string{"DataDir: /var/lib/skein\n", "ListenClientURLs: http://localhost:2379\n", "Log.Level: info\n", "HeartbeatInterval: 100ms\n", "InitialClusterToken: (hidden)\n"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%s is missing in\n%s", want, &b)
		}
	}
}

// Somebody else profiles and traces the process: the bundle says so, and has all else.
func TestBundleBesideAnother(t *testing.T) {
	s, _ := source()
	r := trace.NewFlightRecorder(trace.FlightRecorderConfig{})
	if err := errors.Join(pprof.StartCPUProfile(io.Discard), r.Start()); err != nil {
		t.Fatal(err)
	}
	defer pprof.StopCPUProfile()
	defer r.Stop()
	files, problems := parts(t, s, &adminpb.BundleRequest{ProfileMs: 1})
	if len(files) != 10 || len(problems) != 2 || problems["cpu.pb.gz"] == "" || problems["trace.out"] == "" {
		t.Errorf("%d files, %v", len(files), problems)
	}
}
