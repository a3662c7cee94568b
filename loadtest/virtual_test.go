package loadtest

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/loadtest/fakekv"
)

// The tests of this file run whole runs in virtual time: a server with exact latencies
// gives exactly known figures.

// noMeter is a meter without servers.
type noMeter struct{}

func (noMeter) usages(context.Context, []string) []usage { return nil }

func virtualConfig() Config {
	cfg := DefaultConfig()
	cfg.Endpoints, cfg.Clock = []string{"fake"}, clock.Virtual()
	cfg.Conns, cfg.Clients, cfg.Keys, cfg.ValueBytes = 1, 1, 100, 32
	return cfg
}

// virtualRun does a run against a store without network.
func virtualRun(ctx context.Context, t *testing.T, cfg Config, s *fakekv.Store, out io.Writer) Report {
	t.Helper()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	r := newRun(cfg, []kv{s.Direct()}, noMeter{}, 1, out)
	if err := r.do(ctx); err != nil {
		t.Fatal(err)
	}
	return r.report
}

// takes makes a store whose requests take so long, and from number n on longer for one
// request.
func takes(d time.Duration, n int64, stall time.Duration) *fakekv.Store {
	return &fakekv.Store{Before: func(ctx context.Context, i int64) error {
		wait := d
		if i == n {
			wait += stall
		}
		select {
		case <-time.After(wait):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}}
}

// near says whether a latency in µs is as expected, within the histogram's three
// digits.
func near(got int64, want time.Duration) bool {
	w := float64(want.Microseconds())
	return float64(got) >= w*0.998 && float64(got) <= w*1.002
}

func TestClosedLoopByTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Total, cfg.Clients = 0, 1000, 10
		r := virtualRun(t.Context(), t, cfg, takes(10*time.Millisecond, 0, 0), io.Discard)
		// 10 clients, 10 ms: 1,000/s, and 1,000 take one second.
		if r.Operations != 1000 || r.ElapsedSeconds != 1 || r.Throughput != 1000 || !near(r.Put.P50, 10*time.Millisecond) || !near(r.Put.Max, 10*time.Millisecond) {
			t.Errorf("got %d operations in %g s, %g/s, %+v", r.Operations, r.ElapsedSeconds, r.Throughput, r.Put)
		}
	})
}

func TestClosedLoopByDuration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Warmup, cfg.Clients = 2*time.Second, time.Second, 5
		var out strings.Builder
		cfg.Live = true
		r := virtualRun(t.Context(), t, cfg, takes(7*time.Millisecond, 0, 0), &out)
		// Each client begins 286 operations, the last of which, begun at 1,995 ms, is
		// answered after the end.
		if r.Operations != 5*286 || r.ElapsedSeconds != 2 || r.Throughput != 5*285/2.0 {
			t.Errorf("got %d operations in %g s, %g/s", r.Operations, r.ElapsedSeconds, r.Throughput)
		}
		if len(r.Seconds) != 3 || r.Seconds[0].At != 1 || r.Seconds[0].Length != 1 {
			t.Errorf("seconds: %+v", r.Seconds)
		}
		for _, want := range []string{"warm-up", "run        2s", "run        2s         5 in 0.002s"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("no %q in the lines:\n%s", want, out.String())
			}
		}
	})
}

// TestSecondsAddUp: answers and failures after the last full second are reported too,
// with the length of that rest.
func TestSecondsAddUp(t *testing.T) {
	for _, run := range []struct {
		total    int64
		duration time.Duration
	}{{total: 1234}, {total: 2000}, {total: 7}, {duration: 2 * time.Second}, {duration: 1500 * time.Millisecond}} {
		synctest.Test(t, func(t *testing.T) {
			cfg := virtualConfig()
			cfg.Duration, cfg.Total, cfg.Clients = run.duration, run.total, 10
			s := takes(10*time.Millisecond, 0, 0)
			wait := s.Before
			s.Before = func(ctx context.Context, i int64) error {
				if err := wait(ctx, i); err != nil || i%100 != 5 {
					return err
				}
				return status.Error(codes.ResourceExhausted, "every hundredth fails")
			}
			r := virtualRun(t.Context(), t, cfg, s, io.Discard)
			var operations, failed int64
			length := 0.0
			for _, s := range r.Seconds {
				operations, failed, length = operations+s.Operations, failed+s.Failed, length+s.Length
			}
			if operations != r.Operations || failed != r.Failed || operations == 0 || failed == 0 {
				t.Errorf("%+v: the seconds have %d operations and %d failures of %d and %d: %+v", run, operations, failed, r.Operations, r.Failed, r.Seconds)
			}
			if at := r.Seconds[len(r.Seconds)-1].At; length < at-1e-6 || length > at+1e-6 {
				t.Errorf("%+v: %g s of %g s", run, length, at)
			}
		})
	}
}

// TestNoCoordinatedOmission: the server stands still for one second. In an open loop
// all requests due in that second show the wait; the closed loop sees one slow request.
func TestNoCoordinatedOmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Rate = 10*time.Second, 100
		stalled := func() *fakekv.Store { return takes(time.Millisecond, 300, time.Second) }
		open := virtualRun(t.Context(), t, cfg, stalled(), io.Discard)
		if open.Operations != 1000 || open.OpenLoop.NeverStarted != 0 {
			t.Fatalf("open loop: %d operations, %d never started", open.Operations, open.OpenLoop.NeverStarted)
		}
		// The stalled request takes 1,001 ms, and the k-th behind it 9k ms less: it was
		// due 10k ms later, and the backlog is worked off in 1 ms each.
		for _, c := range []struct {
			name string
			got  int64
			k    int
		}{{"p90", open.Put.P90, 100}, {"p95", open.Put.P95, 50}, {"p99", open.Put.P99, 10}, {"p99.9", open.Put.P999, 1}, {"max", open.Put.Max, 0}} {
			if want := time.Duration(1001-9*c.k) * time.Millisecond; !near(c.got, want) {
				t.Errorf("open loop: %s is %d µs, want %s", c.name, c.got, want)
			}
		}
		cfg.Rate = 0
		closed := virtualRun(t.Context(), t, cfg, stalled(), io.Discard)
		if !near(closed.Put.Max, 1001*time.Millisecond) || !near(closed.Put.P999, time.Millisecond) {
			t.Errorf("closed loop: %+v", closed.Put)
		}
	})
}

// TestOverload: an open loop offers twice what the server can do. Latencies grow with
// the backlog. The run ends in time all the same: requests unsent then are counted, and the figures are those of
// the time that the report names.
func TestOverload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Rate, cfg.Timeout = 10*time.Second, 200, 2*time.Second
		began := cfg.Clock.Now()
		r := virtualRun(t.Context(), t, cfg, takes(10*time.Millisecond, 0, 0), io.Discard)
		// 10 seconds at 100/s are 1,000 of 2,000; the 1,000th was due at 4.995 s and is
		// answered at 10 s.
		if r.Operations != 1000 || r.OpenLoop.NeverStarted != 1000 || r.Failed != 1000 || r.Errors[neverStarted] != 1000 {
			t.Errorf("%d operations, %d never sent, errors %v", r.Operations, r.OpenLoop.NeverStarted, r.Errors)
		}
		if took := cfg.Clock.Now().Sub(began); took != 10*time.Second || r.ElapsedSeconds != 10 {
			t.Errorf("a run of 10 s lasted %v, and says %g s", took, r.ElapsedSeconds)
		}
		if !near(r.Put.Max, 5005*time.Millisecond) || r.Throughput != 100 {
			t.Errorf("%g/s, %+v", r.Throughput, r.Put)
		}
		if r.Err() == nil {
			t.Error("an overloaded run passes as clean")
		}
	})
}

func TestOpenLoopByTotal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Total, cfg.Rate, cfg.Clients = 0, 500, 250, 20
		r := virtualRun(t.Context(), t, cfg, takes(10*time.Millisecond, 0, 0), io.Discard)
		if r.Operations != 500 || r.ElapsedSeconds != 2 || !near(r.Put.Max, 10*time.Millisecond) || r.OpenLoop.NeverStarted != 0 {
			t.Errorf("%d operations in %g s: %+v", r.Operations, r.ElapsedSeconds, r.Put)
		}
		// In virtual time the generator is never late.
		if r.OpenLoop.Lateness.Max > 1 {
			t.Errorf("lateness %+v", r.OpenLoop.Lateness)
		}
	})
}

// TestShortOpenLoop: the rate of a few operations is over the whole time that they were given, and not until the last of them.
func TestShortOpenLoop(t *testing.T) {
	for _, run := range []struct {
		total    int64
		duration time.Duration
	}{{total: 5}, {duration: 500 * time.Millisecond}} {
		synctest.Test(t, func(t *testing.T) {
			cfg := virtualConfig()
			cfg.Duration, cfg.Total, cfg.Rate = run.duration, run.total, 10
			r := virtualRun(t.Context(), t, cfg, takes(10*time.Millisecond, 0, 0), io.Discard)
			if r.Operations != 5 || r.ElapsedSeconds != 0.5 || r.Throughput != 10 {
				t.Errorf("%+v: %d operations in %g s, %g/s", run, r.Operations, r.ElapsedSeconds, r.Throughput)
			}
		})
	}
}

// TestMixed: gets and puts have their share and their own latencies; fill lets every
// get find something.
func TestMixed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Total, cfg.Workload, cfg.ReadPercent, cfg.Fill, cfg.Verify = 0, 10_000, Mixed, 70, true, true
		cfg.Clients = 8
		s := takes(time.Millisecond, 0, 0)
		r := virtualRun(t.Context(), t, cfg, s, io.Discard)
		if s.Len() != cfg.Keys || r.Get.Count+r.Put.Count != 10_000 || r.Get.Count < 6_800 || r.Get.Count > 7_200 {
			t.Errorf("%d keys, %d gets, %d puts", s.Len(), r.Get.Count, r.Put.Count)
		}
		if err := r.Err(); err != nil || r.Verify.Acknowledged != 100 || r.Verify.Keys != 100 {
			t.Errorf("%v, %+v", err, r.Verify)
		}
	})
}

// TestTxn: each operation is a transaction, and what it put is verified.
func TestTxn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Total, cfg.Workload, cfg.Verify = 0, 1000, Txn, true
		s := takes(time.Millisecond, 0, 0)
		r := virtualRun(t.Context(), t, cfg, s, io.Discard)
		if s.Txns() != 1000 || r.Put.Count != 1000 {
			t.Errorf("%d transactions, %d counted", s.Txns(), r.Put.Count)
		}
		if err := r.Err(); err != nil || r.Verify.Acknowledged != int64(s.Len()) {
			t.Errorf("%v, %+v", err, r.Verify)
		}
		cfg.Verify = false
		s.Before = func(context.Context, int64) error { return rpctypes.ErrGRPCNoSpace }
		if r = virtualRun(t.Context(), t, cfg, s, io.Discard); r.Failed != 1000 {
			t.Errorf("%d failed", r.Failed)
		}
	})
}

// TestErrors: errors are counted by kind, do not end a run, and do not make a
// closed loop spin.
func TestErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Verify = time.Second, true
		s := &fakekv.Store{Before: func(_ context.Context, n int64) error {
			switch {
			case n%2 == 0:
				return rpctypes.ErrGRPCRequestTooManyRequests
			case n%11 == 0:
				return status.Error(codes.Unavailable, "line one\nline two")
			}
			time.Sleep(time.Millisecond)
			return nil
		}}
		r := virtualRun(t.Context(), t, cfg, s, io.Discard)
		refusals := r.Errors["ResourceExhausted: etcdserver: too many requests"]
		if lost := r.Errors["Unavailable: line one"]; refusals == 0 || lost == 0 || refusals+lost != r.Failed || r.FailedLatency.Count != r.Failed {
			t.Errorf("errors %v, %d failed", r.Errors, r.Failed)
		}
		// Of 22 requests 10 succeed, 1 ms each, and after 12 the client rests for 10 ms.
		if r.Operations < 75 || r.Operations > 80 {
			t.Errorf("%d operations", r.Operations)
		}
		if r.Broken() != nil || r.Err() == nil || r.Verify.Unknown != r.Errors["Unavailable: line one"] {
			t.Errorf("broken %v, err %v, %+v", r.Broken(), r.Err(), r.Verify)
		}
	})
}

// TestTimeout: a request that is never answered fails by its timeout, its fate is
// unknown.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Duration, cfg.Total, cfg.Verify, cfg.Timeout = 0, 10, true, time.Second
		r := virtualRun(t.Context(), t, cfg, takes(time.Millisecond, 5, time.Hour), io.Discard)
		if r.Operations != 9 || r.Failed != 1 || !near(r.FailedLatency.Max, time.Second) || r.Verify.Unknown != 1 || r.Broken() != nil {
			t.Errorf("%d operations, %d failed, %+v, %+v", r.Operations, r.Failed, r.FailedLatency, r.Verify)
		}
		for kind := range r.Errors {
			if !strings.HasPrefix(kind, "DeadlineExceeded") {
				t.Errorf("kind %q", kind)
			}
		}
	})
}

// TestInterrupted: a run that is ended from outside reports its figures so far.
func TestInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		cfg := virtualConfig()
		cfg.Duration, cfg.Verify = 10*time.Second, true
		r := virtualRun(ctx, t, cfg, takes(10*time.Millisecond, 0, 0), io.Discard)
		if !r.Interrupted || r.Operations < 148 || r.Operations > 150 || r.Failed != 0 || r.Verify != nil || r.ElapsedSeconds != 1.5 {
			t.Errorf("interrupted %v: %d operations, %d failed in %g s", r.Interrupted, r.Operations, r.Failed, r.ElapsedSeconds)
		}
		if r.Err() == nil {
			t.Error("an interrupted run passes as clean")
		}
	})
}

// TestFillFails: a fill with errors ends the run.
func TestFillFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := virtualConfig()
		cfg.Fill = true
		s := &fakekv.Store{Before: func(_ context.Context, n int64) error {
			if n == 50 {
				return rpctypes.ErrGRPCNoSpace
			}
			return nil
		}}
		err := newRun(cfg, []kv{s.Direct()}, noMeter{}, 1, io.Discard).do(t.Context())
		if err == nil || !strings.Contains(err.Error(), "1 of 100 puts failed") {
			t.Errorf("got %v", err)
		}
	})
}

// TestVerifyFindsWhatIsBroken: each broken promise is found, with many clients and lost
// answers, and nothing else is.
func TestVerifyFindsWhatIsBroken(t *testing.T) {
	key := func(cfg *Config, i uint64) string {
		s := newKeySpace(cfg)
		return string(s.appendKey(nil, i))
	}
	for _, c := range []struct {
		name string
		edit func(cfg *Config, kvs map[string]*mvccpb.KeyValue) // what is changed behind the clients' backs
		want string
	}{
		{name: "nothing"},
		{"a key is lost", func(cfg *Config, kvs map[string]*mvccpb.KeyValue) {
			delete(kvs, key(cfg, 42))
		}, "key 42: absent"},
		{"the last key is lost", func(cfg *Config, kvs map[string]*mvccpb.KeyValue) {
			delete(kvs, key(cfg, 99))
		}, "key 99: absent"},
		{"a value has changed", func(cfg *Config, kvs map[string]*mvccpb.KeyValue) {
			kvs[key(cfg, 7)].Value[20] ^= 1
		}, "key 7: the value of put"},
		{"a value stands at another key", func(cfg *Config, kvs map[string]*mvccpb.KeyValue) {
			kvs[key(cfg, 7)].Value = kvs[key(cfg, 8)].Value
		}, "key 7: holds put"},
		{"two keys at one revision", func(cfg *Config, kvs map[string]*mvccpb.KeyValue) {
			kvs[key(cfg, 7)].ModRevision = kvs[key(cfg, 8)].ModRevision
		}, "were both put at revision"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := virtualConfig()
				cfg.Duration, cfg.Total, cfg.Clients, cfg.Verify = 0, 5000, 50, true
				s := &fakekv.Store{
					Before: func(ctx context.Context, n int64) error {
						return clock.Sleep(ctx, cfg.Clock, time.Duration(n%7)*time.Millisecond)
					},
					After: func(_ context.Context, n int64) error {
						if n%100 == 3 {
							return status.Error(codes.Unavailable, "the answer was lost")
						}
						return nil
					},
				}
				before := s.Before
				s.Before = func(ctx context.Context, n int64) error {
					// One foreign put, 5,000 of the run: this is the first request of the
					// verification.
					if n == 5002 && c.edit != nil {
						s.Edit(func(kvs map[string]*mvccpb.KeyValue) { c.edit(&cfg, kvs) })
					}
					return before(ctx, n)
				}
				// A foreign key lies between the run's own.
				if _, err := s.Direct().Put(t.Context(), foreignPut()); err != nil {
					t.Fatal(err)
				}
				r := virtualRun(t.Context(), t, cfg, s, io.Discard)
				if r.Verify.Keys != 100 || r.Verify.Unknown != 50 {
					t.Errorf("%+v", r.Verify)
				}
				switch {
				case c.want == "" && r.Broken() != nil:
					t.Error(r.Broken())
				case c.want != "" && !strings.Contains(strings.Join(r.Verify.First, "\n"), c.want):
					t.Errorf("found %v, want %q", r.Verify.First, c.want)
				}
			})
		})
	}
}

// TestVerifyWaitsForServers: servers that are in an election when the load ends are
// asked again, and given up in the end.
func TestVerifyWaitsForServers(t *testing.T) {
	for _, down := range []int64{5, 1000} {
		t.Run(fmt.Sprint(down), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg := virtualConfig()
				cfg.Duration, cfg.Total, cfg.Verify = 0, 100, true
				s := &fakekv.Store{Before: func(_ context.Context, n int64) error {
					if n > 100 && n <= 100+down {
						return rpctypes.ErrGRPCNoLeader
					}
					return nil
				}}
				err := newRun(cfg, []kv{s.Direct()}, noMeter{}, 1, io.Discard).do(t.Context())
				if (err == nil) != (down == 5) {
					t.Errorf("got %v", err)
				}
			})
		})
	}
}
