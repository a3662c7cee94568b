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
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "seed of the calls; 0 takes a new one, which is printed")
	callsFlag = flag.Int("calls", 1500, "how many calls are made")
	splitFlag = flag.Int("split", 60, "how many calls lie between two splits")
	verbose   = flag.Bool("nodelog", false, "show the nodes' warnings")
)

// startTimeout bounds the start of both stores.
const startTimeout = time.Minute

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
			p.skein, err = startSkein(context.Background(), dir, logger)
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
	p.ready(t, ctx)
	return p
}

// ready waits until every node of Skein serves.
func (p *pair) ready(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, conn := range p.skein.conns {
		for {
			_, err := pb.NewKVClient(conn).Range(ctx, &pb.RangeRequest{Key: []byte("x")})
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				t.Fatalf("Skein does not serve: %v", err)
			}
		}
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
	if err != nil {
		t.Fatalf("seed %d: %v\n\ngo test . -run '^%s$' -seed %d -calls %d -split %d", seed, err, t.Name(), seed, *callsFlag, *splitFlag)
	}
}

func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		var b [8]byte
		rand.Read(b[:])
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
