package loadtest

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// askTimeout bounds each request to a server that is no part of the load.
	askTimeout = 5 * time.Second
	// maxPage bounds the bytes read of a server's HTTP answer.
	maxPage = 32 << 20
)

// servers are the connections to the measured servers.
type servers struct {
	clients []io.Closer
	kvs     []kv
	http    *http.Client
}

// conn is one connection to them.
type conn struct {
	etcdserverpb.KVClient
	etcdserverpb.LeaseClient
}

// dial makes the connections. It waits for logins and for pipes, but otherwise for no connection.
func dial(cfg *Config) (*servers, error) {
	s := &servers{http: webClient(cfg.TLS)}
	s.clients, s.kvs = make([]io.Closer, cfg.Conns), make([]kv, cfg.Conns)
	wrong := make([]error, cfg.Conns)
	// With a user each connection logs in, and a server takes its time for each password.
	eachOf(cfg.Conns, func(i int) {
		endpoint := cfg.Endpoints[i%len(cfg.Endpoints)]
		if cfg.API == APIPipe {
			s.kvs[i], s.clients[i], wrong[i] = cfg.openPipe(endpoint)
			return
		}
		client, err := cfg.connect(endpoint, nil)
		if err != nil {
			wrong[i] = err
			return
		}
		s.kvs[i], s.clients[i] = conn{clientv3.RetryKVClient(client), clientv3.RetryLeaseClient(client)}, client
	})
	for _, err := range wrong {
		if err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

func (s *servers) close() {
	for _, c := range s.clients {
		if c != nil {
			// Nothing is under way any more and nothing follows, so nobody needs the error.
			_ = c.Close()
		}
	}
	s.http.CloseIdleConnections()
}

// versions asks each endpoint for its version. An endpoint that does not answer is an
// error: without a third of its servers a run measures something else.
func versions(ctx context.Context, cfg *Config) ([]ServerVersion, error) {
	s := &servers{http: webClient(cfg.TLS)}
	defer s.close()
	out := make([]ServerVersion, len(cfg.Endpoints))
	for i, endpoint := range cfg.Endpoints {
		out[i].Endpoint = endpoint
		// With fewer connections than endpoints the later ones are not part of the
		// load.
		if i >= cfg.Conns {
			continue
		}
		status, err := cfg.status(ctx, endpoint)
		if err != nil {
			return nil, err
		}
		out[i].Version = status.Version
		out[i].HTTP = s.httpVersion(ctx, cfg, endpoint)
	}
	return out, nil
}

// httpVersion returns the answer of /version, and nil if there is none.
func (s *servers) httpVersion(ctx context.Context, cfg *Config, endpoint string) map[string]string {
	base := endpoint
	if !strings.Contains(base, "://") {
		base = "http://" + base
		if cfg.TLS != nil {
			base = "https://" + endpoint
		}
	}
	var out map[string]string
	err := s.page(ctx, strings.TrimSuffix(base, "/")+"/version", func(body io.Reader) error {
		return json.NewDecoder(body).Decode(&out)
	})
	if err != nil {
		return nil
	}
	return out
}

// webClient asks the servers' pages.
func webClient(t *tls.Config) *http.Client {
	return &http.Client{Timeout: askTimeout, Transport: &http.Transport{TLSClientConfig: t, DisableKeepAlives: true}}
}

// page gets a URL and passes its bounded body to read.
func (s *servers) page(ctx context.Context, url string, read func(io.Reader) error) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	answer, err := s.http.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, answer.Status)
	}
	return read(io.LimitReader(answer.Body, maxPage))
}

// usage is the part of a server's metrics about its process.
type usage struct {
	cpuSeconds    float64
	residentBytes float64
	startSeconds  float64 // when the process began; 0 if unknown
	err           error
}

// usages asks all metrics URLs at once. A server that does not answer, for instance
// because it was killed, has an error in its place.
func (s *servers) usages(ctx context.Context, urls []string) []usage {
	out := make([]usage, len(urls))
	var wg sync.WaitGroup
	for i, url := range urls {
		wg.Go(func() {
			out[i].err = s.page(ctx, url, func(body io.Reader) error {
				u, err := parseUsage(body)
				out[i] = u
				return err
			})
		})
	}
	wg.Wait()
	return out
}

// parseUsage finds the metrics of the process in a page in Prometheus' text format.
func parseUsage(page io.Reader) (usage, error) {
	var u usage
	found := false
	lines := bufio.NewScanner(page)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, rest, _ := strings.Cut(lines.Text(), " ")
		var to *float64
		switch name {
		case "process_cpu_seconds_total":
			to, found = &u.cpuSeconds, true
		case "process_resident_memory_bytes":
			to = &u.residentBytes
		case "process_start_time_seconds":
			to = &u.startSeconds
		default:
			continue
		}
		// A timestamp may follow the value.
		value, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
		var err error
		if *to, err = strconv.ParseFloat(value, 64); err != nil {
			return u, fmt.Errorf("metrics: %s: %w", name, err)
		}
	}
	if err := lines.Err(); err != nil {
		return u, fmt.Errorf("metrics: %w", err)
	}
	if !found {
		return u, errors.New("metrics: no process_cpu_seconds_total")
	}
	return u, nil
}

// opening is how many connections, watchers or deletions are under way at a time.
const opening = 64

// eachOf calls f with the numbers below n, several at a time.
func eachOf(n int, f func(i int)) {
	var wg sync.WaitGroup
	for first := range opening {
		wg.Go(func() {
			for i := first; i < n; i += opening {
				f(i)
			}
		})
	}
	wg.Wait()
}
