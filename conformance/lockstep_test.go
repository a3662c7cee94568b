package conformance

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of the calls; 0 takes a new one, which is printed")
	callsFlag = flag.Int("calls", 1000, "how many calls are made")
	splitFlag = flag.Int("split", 60, "how many calls lie between two splits")
	verbose   = flag.Bool("nodelog", false, "show the nodes' warnings")
)

// startTimeout bounds the start of both stores, and readyPause lies between two
// attempts to find out whether a node serves.
const (
	startTimeout = time.Minute
	readyPause   = 10 * time.Millisecond
)

// newPair starts an etcd and a Skein for one test.
func newPair(t *testing.T, seed uint64) *pair {
	t.Helper()
	logger := zap.NewNop()
	if *verbose {
		cfg := zap.NewDevelopmentConfig()
		cfg.Level.SetLevel(zap.WarnLevel)
		logger, _ = cfg.Build()
	}
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	p := &pair{source: newSource(seed), outcomes: map[string]int{}}
	dir := t.TempDir()
	err := each(2, func(i int) (err error) {
		if i == 0 {
			p.etcd, err = startEtcd(ctx, dir)
		} else {
			p.skein, err = startSkein(ctx, dir, logger)
		}
		return err
	})
	t.Cleanup(func() {
		for _, s := range []*store{p.etcd, p.skein} {
			if s == nil {
				continue
			}
			if err := s.close(); err != nil {
				t.Errorf("stop %s: %v", s.name, err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	var endpoints []string
	for _, c := range p.skein.conns {
		endpoints = append(endpoints, strings.TrimPrefix(c.Target(), "passthrough:///"))
	}
	if p.splits.admin, err = adminapi.NewClient(endpoints, nil); err != nil {
		t.Fatal(err)
	}
	p.ready(ctx, t)
	return p
}

// ready waits until every node of Skein serves.
func (p *pair) ready(ctx context.Context, t *testing.T) {
	t.Helper()
	for _, conn := range p.skein.conns {
		for {
			_, err := pb.NewKVClient(conn).Range(ctx, &pb.RangeRequest{Key: []byte("x")})
			if err == nil {
				break
			}
			if clock.Sleep(ctx, clock.System(), readyPause) != nil {
				t.Fatalf("Skein does not serve: %v", err)
			}
		}
	}
}

// promised are the outcomes that so many calls must have had at least once, or the
// generators no longer do what they are for.
var promised = []struct {
	outcome string
	calls   int
}{
	{"Range: OK", 100},
	{"RangeStream: OK", 200},
	{"RangeStream: RangeStream does not support custom sort orders", 10_000},
	{"Put: OK", 100},
	{"DeleteRange: OK", 500},
	{"Txn: OK", 500},
	{writtenTwice, 1000},
	{"LeaseGrant: OK", 1000},
	{"LeaseRevoke: OK", 5000},
	{"LeaseTimeToLive: OK", 1000},
	{"LeaseKeepAlive: OK", 1000},
	{"LeaseLeases: OK", 1000},
	{"LeaseRevoke: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCLeaseNotFound), 5000},
	{"LeaseGrant: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCLeaseExist), 5000},
	{"LeaseGrant: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCLeaseTTLTooLarge), 5000},
	{"Compact: OK", 2000},
	{"Range: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCFutureRev), 2000},
	{"Range: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCCompacted), 5000},
	{"Range: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCInvalidSortOption), 2000},
	{"Put: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCEmptyKey), 5000},
	{"Put: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCLeaseNotFound), 5000},
	{"Put: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCRequestTooLarge), 20_000},
	{"Txn: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCDuplicateKey), 2000},
	{"Txn: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCTooManyOps), 5000},
}

// promisedAlone are outcomes that only calls one after the other have.
var promisedAlone = []string{
	"Put: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCKeyNotFound),
	"Put: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCValueProvided),
	"Txn: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCKeyNotFound),
	"Txn: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCFutureRev),
	"Txn: " + rpctypes.ErrorDesc(rpctypes.ErrGRPCCompacted),
}

// kept says what was promised and did not happen.
func (p *pair) kept(t *testing.T) {
	t.Helper()
	for _, o := range promised {
		if p.calls >= o.calls && p.outcomes[o.outcome] == 0 {
			t.Errorf("%d calls and not one %q", p.calls, o.outcome)
		}
	}
	for _, o := range promisedAlone {
		if p.calls >= 5000 && !p.source.steady && p.outcomes[o] == 0 {
			t.Errorf("%d calls and not one %q", p.calls, o)
		}
	}
	if want := min(len(groups), p.calls / *splitFlag) / 2; p.splits.done < want {
		t.Errorf("%d splits, want %d at least", p.splits.done, want)
	}
}

// report prints how often each outcome was had, and what to run to have it again.
func (p *pair) report(t *testing.T, seed uint64, err error) {
	t.Helper()
	var b strings.Builder
	for _, o := range slices.Sorted(maps.Keys(p.outcomes)) {
		fmt.Fprintf(&b, "%7d %s\n", p.outcomes[o], o)
	}
	t.Logf("%d calls, %d splits, revision %d\n%s", p.calls, p.splits.done, p.source.revision, b.String())
	if err == nil {
		p.kept(t)
	} else {
		t.Fatalf("seed %d: %v\n\ngo test . -run '^%s$' -seed %d -calls %d -split %d", seed, err, t.Name(), seed, *callsFlag, *splitFlag)
	}
}

func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		var b [8]byte
		_, _ = rand.Read(b[:])
		seed = uint64(binary.LittleEndian.Uint32(b[:])) + 1
	}
	t.Logf("seed %d", seed)
	return seed
}

func TestLockstep(t *testing.T) {
	seed := seedOf(t)
	p := newPair(t, seed)
	p.report(t, seed, p.lockstep(t.Context(), *callsFlag, *splitFlag))
}

func TestWaves(t *testing.T) {
	seed := seedOf(t)
	p := newPair(t, seed)
	p.report(t, seed, p.waves(t.Context(), *callsFlag, *splitFlag))
}
