package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/conformance/apiserver/testserver"
	"github.com/skeindb/skein/conformance/cluster"
)

const (
	// spares is how many clusters are started in advance, so that a test does not wait
	// for one.
	spares = 2
	// startTimeout bounds the start of a cluster. readyPause lies between two checks
	// whether it serves.
	startTimeout = 50 * time.Second
	readyPause   = 10 * time.Millisecond
)

// splitKeys are the borders of the ranges. They lie between the suite's names for the
// namespaces of its pods, and between those of the pods if it has one namespace. Its
// packages use different prefixes.
var splitKeys = splits("/pods/", "/registry/pods/", "compact_rev_key", "increaseRV")

func splits(etcd3, cacher string, others ...string) (keys []string) {
	for _, prefix := range []string{etcd3, cacher} {
		for _, k := range []string{"", "g", "ns/pod-1", "ns2", "second/foo", "test-ns/c", "test-ns/foo-0003", "test-ns/fooa", "test-ns/o"} {
			keys = append(keys, prefix+k)
		}
	}
	return append(keys, others...)
}

// supply starts a cluster for each test that asks for one, and stops it when the test
// has ended. It serves HTTP to package testserver.
type supply struct {
	dir    string
	logger *zap.Logger
	// usual is the configuration that most tests want. spare are clusters of that kind.
	usual testserver.Wanted
	spare chan *lent
	// work are the goroutines that fill spare and stop clusters.
	work   sync.WaitGroup
	cancel context.CancelFunc

	mu sync.Mutex
	// Guarded by mu: the last id, the clusters in use, and the errors.
	last int
	lent map[int]*lent
	errs []error
	// several is how many clusters had two keys or more at the end. spread counts those
	// by the number of their ranges with keys. Guarded by mu.
	several int
	spread  map[int]int
}

// lent is a cluster for one test, or the reason why there is none.
type lent struct {
	id      int
	cluster *cluster.Cluster
	dir     string
	wanted  testserver.Wanted
	err     error
}

func newSupply(dir string, logger *zap.Logger) (*supply, error) {
	usual, err := testserver.Default()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &supply{
		dir: dir, logger: logger, usual: usual, spare: make(chan *lent, spares-1), cancel: cancel,
		lent: map[int]*lent{}, spread: map[int]int{},
	}
	s.work.Go(func() { s.fill(ctx) })
	return s, nil
}

// fill keeps clusters ready until ctx ends.
func (s *supply) fill(ctx context.Context) {
	for ctx.Err() == nil {
		l := s.start(ctx, &s.usual)
		select {
		case s.spare <- l:
		case <-ctx.Done():
			s.end(l)
		}
	}
}

// close stops all clusters and returns the errors so far.
func (s *supply) close() error {
	s.cancel()
	s.mu.Lock()
	for id := range s.lent {
		s.takeBackLocked(id)
	}
	s.mu.Unlock()
	s.work.Wait()
	for len(s.spare) > 0 {
		s.end(<-s.spare)
	}
	return errors.Join(s.errs...)
}

// start starts a cluster and waits until each of its nodes serves.
func (s *supply) start(ctx context.Context, w *testserver.Wanted) *lent {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	s.mu.Lock()
	s.last++
	l := &lent{id: s.last, dir: filepath.Join(s.dir, fmt.Sprintf("cluster-%d", s.last)), wanted: *w}
	s.mu.Unlock()
	l.cluster, l.err = cluster.Start(ctx, cluster.Options{
		Dir: l.dir, Logger: s.logger, Configure: func(cfg *config.Config) { configure(cfg, w) },
	})
	// With TLS only the test knows the client's side of it, and its clientv3 waits too.
	if l.err == nil && !w.HTTPS {
		l.err = ready(ctx, l.cluster.Endpoints())
	}
	return l
}

// ready waits until all keys can be read through every node.
func ready(ctx context.Context, endpoints []string) error {
	for _, e := range endpoints {
		client, err := connect(e)
		if err != nil {
			return err
		}
		for err = errNotAsked; err != nil; {
			if _, err = client.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithCountOnly()); err == nil {
				break
			}
			if clock.Sleep(ctx, clock.System(), readyPause) != nil {
				break
			}
		}
		client.Close()
		if err != nil {
			return fmt.Errorf("%s does not serve: %w", e, err)
		}
	}
	return nil
}

var errNotAsked = errors.New("not asked yet")

func connect(endpoints ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: endpoints, Logger: zap.NewNop()})
}

// configure sets a node's options as the test wants them.
func configure(cfg *config.Config, w *testserver.Wanted) {
	for _, k := range splitKeys {
		cfg.InitialSplitKeys = append(cfg.InitialSplitKeys, []byte(k))
	}
	if w.ProgressInterval > 0 {
		cfg.WatchProgressInterval = w.ProgressInterval
	}
	if w.MaxRequestBytes > 0 {
		cfg.MaxRequestBytes = int(w.MaxRequestBytes)
	}
	if w.MaxTxnOps > 0 {
		cfg.MaxTxnOps = int(w.MaxTxnOps)
	}
	if w.HTTPS {
		cfg.ListenClientURLs[0].Scheme = "https"
		cfg.ClientTLS.CertFile, cfg.ClientTLS.KeyFile = w.CertFile, w.KeyFile
		cfg.ClientTLS.TrustedCAFile, cfg.ClientTLS.ClientCertAuth = w.TrustedCAFile, w.ClientCertAuth
	}
}

// end stops a cluster and removes it.
func (s *supply) end(l *lent) {
	keys, ranges, err := int64(0), 0, l.err
	if l.wanted.Test != "" {
		err = nil // the test knows that it did not start, and is judged by that
	}
	if l.cluster != nil {
		if l.err == nil && !l.wanted.HTTPS {
			keys, ranges, err = used(l.cluster.Endpoints())
		}
		err = errors.Join(err, l.cluster.Stop())
	}
	err = errors.Join(err, os.RemoveAll(l.dir))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && !errors.Is(err, context.Canceled) {
		s.errs = append(s.errs, fmt.Errorf("the cluster of %q: %w", l.wanted.Test, err))
	}
	if l.wanted.Test != "" && keys > 1 {
		s.several++
		s.spread[ranges]++
	}
}

// used counts the keys and the ranges that have any.
func used(endpoints []string) (keys int64, ranges int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	client, err := connect(endpoints...)
	if err != nil {
		return 0, 0, err
	}
	defer client.Close()
	for i, from := range append([]string{"\x00"}, splitKeys...) {
		to := "\x00" // as a range's end: no end
		if i < len(splitKeys) {
			to = splitKeys[i]
		}
		got, err := client.Get(ctx, from, clientv3.WithRange(to), clientv3.WithCountOnly())
		if err != nil {
			return 0, 0, fmt.Errorf("count the keys: %w", err)
		}
		keys += got.Count
		if got.Count > 0 {
			ranges++
		}
	}
	return keys, ranges, nil
}

// ServeHTTP starts and stops clusters for package testserver.
func (s *supply) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, err := any(nil), error(nil)
	switch r.URL.Path {
	case "/start":
		var wanted testserver.Wanted
		if err = json.NewDecoder(r.Body).Decode(&wanted); err == nil {
			answer, err = s.lend(r.Context(), wanted)
		}
	case "/stop":
		var given testserver.Given
		if err = json.NewDecoder(r.Body).Decode(&given); err == nil {
			s.mu.Lock()
			s.takeBackLocked(given.ID)
			s.mu.Unlock()
		}
	default:
		err = fmt.Errorf("nothing is at %s", r.URL.Path)
	}
	if err == nil {
		err = json.NewEncoder(w).Encode(answer)
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// lend gives a cluster to a test.
func (s *supply) lend(ctx context.Context, w testserver.Wanted) (testserver.Given, error) {
	usual := w
	usual.Test = ""
	var l *lent
	if usual != s.usual {
		l = s.start(ctx, &w)
	} else {
		select {
		case l = <-s.spare:
		case <-ctx.Done():
			return testserver.Given{}, ctx.Err()
		}
	}
	l.wanted = w
	if l.err != nil {
		err := l.err
		s.end(l)
		return testserver.Given{}, err
	}
	s.mu.Lock()
	s.lent[l.id] = l
	s.mu.Unlock()
	return testserver.Given{ID: l.id, Endpoints: l.cluster.Endpoints()}, nil
}

// takeBackLocked takes a test's cluster; it is stopped while the next tests run.
func (s *supply) takeBackLocked(id int) {
	if l := s.lent[id]; l != nil {
		delete(s.lent, id)
		s.work.Go(func() { s.end(l) })
	}
}
