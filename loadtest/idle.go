package loadtest

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/skeindb/skein/clock"
)

// IdleConfig describes connections and watchers that a server holds without work.
type IdleConfig struct {
	Access

	// Endpoint is the address of a client port. MetricsURL is where the server's /metrics tells its
	// memory; empty means Endpoint. A server with --enable-pprof collects its garbage before, but only
	// if it is asked at its client port.
	Endpoint   string `json:"endpoint"`
	MetricsURL string `json:"metrics_url,omitempty"`
	// Connections each answer one read and then rest. Watchers are spread over Streams, on one
	// connection; each watches a key of its own.
	Connections int `json:"connections"`
	Watchers    int `json:"watchers"`
	Streams     int `json:"streams"`
	// Pause is how long all is held before the memory is read.
	Pause time.Duration `json:"pause_ns"`
	Clock clock.Clock   `json:"-"`
}

// Validate says what is wrong with the settings.
func (c *IdleConfig) Validate() error {
	switch {
	case c.Endpoint == "":
		return errors.New("endpoint: none is given")
	case c.Connections < 0 || c.Watchers < 0:
		return fmt.Errorf("connections and watchers: %d and %d are not both at least 0", c.Connections, c.Watchers)
	case c.Streams < 1:
		return fmt.Errorf("streams: %d is not above 0", c.Streams)
	case c.Pause < 0:
		return fmt.Errorf("pause: %v is below 0", c.Pause)
	}
	return nil
}

// serverMemory is what a server's metrics say of its memory, in bytes.
type serverMemory struct {
	Resident float64 `json:"resident_bytes"`
	Heap     float64 `json:"heap_bytes"`
	Stacks   float64 `json:"stack_bytes"`
}

// IdleReport is what came of idle connections and watchers.
type IdleReport struct {
	Config IdleConfig `json:"settings"`
	// Connections and Watchers are those that the server took, Errors what it said to the others.
	Connections int              `json:"connections"`
	Watchers    int              `json:"watchers"`
	Errors      map[string]int64 `json:"errors,omitempty"`
	Before      serverMemory     `json:"before"`
	After       serverMemory     `json:"after"`
}

// WriteJSON writes the report to a file, or to stdout for "-".
func (r *IdleReport) WriteJSON(name string, stdout io.Writer) error {
	return WriteJSON(r, name, stdout)
}

// Write writes the report.
func (r *IdleReport) Write(w io.Writer) error {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%d of %d connections, %d of %d watchers in %d streams\n",
		r.Connections, r.Config.Connections, r.Watchers, r.Config.Watchers, r.Config.Streams)
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(&b, "%d errors: %s\n", r.Errors[kind], kind)
	}
	items := float64(max(r.Connections+r.Watchers, 1))
	for _, m := range []struct {
		name          string
		before, after float64
	}{{"resident", r.Before.Resident, r.After.Resident}, {"heap", r.Before.Heap, r.After.Heap}, {"stacks", r.Before.Stacks, r.After.Stacks}} {
		fmt.Fprintf(&b, "%-8s %7.1f MiB before, %7.1f MiB after, %7.0f bytes each\n", m.name, m.before/(1<<20), m.after/(1<<20), (m.after-m.before)/items)
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("idle: report: %w", err)
	}
	return nil
}

// Idle opens connections and watchers, and reads what the server's memory grew by.
func Idle(ctx context.Context, c IdleConfig) (*IdleReport, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if _, err := c.status(ctx, c.Endpoint); err != nil {
		return nil, fmt.Errorf("idle: %w", err)
	}
	r := &IdleReport{Config: c}
	var err error
	if r.Before, err = c.memory(ctx); err != nil {
		return nil, err
	}
	var mu sync.Mutex // guards r and the clients
	tally := errorTally{}
	var clients []*clientv3.Client
	defer func() {
		for _, client := range clients {
			_ = client.Close() // nothing is under way that would be lost
		}
	}()
	connect := func() (*clientv3.Client, error) {
		client, err := c.connect(c.Endpoint, once)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		clients = append(clients, client)
		mu.Unlock()
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		_, err = client.Get(ctx, "idle")
		return client, err
	}
	eachOf(c.Connections, func(int) {
		_, err := connect()
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			tally.add(errorKind(err), 1)
			return
		}
		r.Connections++
	})
	if c.Watchers > 0 {
		client, err := connect()
		if err != nil {
			return nil, fmt.Errorf("idle: connect to %s: %w", c.Endpoint, err)
		}
		watching, end := context.WithCancel(ctx)
		defer end()
		eachOf(c.Watchers, func(i int) {
			// clientv3 has a stream for each set of metadata.
			own := metadata.AppendToOutgoingContext(watching, "stream", strconv.Itoa(i%c.Streams))
			resp, ok := <-client.Watch(own, fmt.Sprintf("idle/%08d", i), clientv3.WithCreatedNotify())
			err := resp.Err()
			if !ok {
				err = errors.New("the channel was closed")
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				tally.add(errorKind(err), 1)
				return
			}
			r.Watchers++
		})
	}
	r.Errors = tally.kinds
	if err := clock.Sleep(ctx, c.Clock, c.Pause); err != nil {
		return nil, err
	}
	r.After, err = c.memory(ctx)
	return r, err
}

// memory reads the server's memory.
func (c *IdleConfig) memory(ctx context.Context) (m serverMemory, err error) {
	s := &servers{http: webClient(c.TLS)}
	base := strings.TrimSuffix(cmp.Or(c.MetricsURL, c.Endpoint), "/")
	// A server without profiles says so; its figures then have garbage in them.
	_ = s.page(ctx, base+"/debug/pprof/heap?gc=1", func(body io.Reader) error {
		_, err := io.Copy(io.Discard, body)
		return err
	})
	err = s.page(ctx, base+"/metrics", func(body io.Reader) error {
		lines := bufio.NewScanner(body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			name, value, _ := strings.Cut(lines.Text(), " ")
			to := map[string]*float64{
				"process_resident_memory_bytes": &m.Resident, "go_memstats_heap_alloc_bytes": &m.Heap, "go_memstats_stack_inuse_bytes": &m.Stacks,
			}[name]
			if to == nil {
				continue
			}
			var err error
			if *to, err = strconv.ParseFloat(value, 64); err != nil {
				return fmt.Errorf("metrics: %s: %w", name, err)
			}
		}
		return lines.Err()
	})
	if err == nil && m.Resident == 0 {
		err = errors.New("no process_resident_memory_bytes")
	}
	if err != nil {
		return m, fmt.Errorf("idle: memory of %s: %w", base, err)
	}
	return m, nil
}
