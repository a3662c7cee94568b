package loadtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/clock"
)

// ReadsConfig describes a load of large answers.
type ReadsConfig struct {
	Access

	// Endpoint is the address of a client port.
	Endpoint string `json:"endpoint"`
	// Clients each read all keys again and again, with a connection of their own. An answer has
	// about AnswerBytes, in values of ValueBytes. Without clients there is only the watcher, and the keys
	// are left alone: beside the clients of another process it does not wait for the work of these.
	Clients     int `json:"clients"`
	AnswerBytes int `json:"answer_bytes"`
	ValueBytes  int `json:"value_bytes"`
	// Duration is how long reads are begun. One under way then is waited for, and counts. Each client reads once at least.
	Duration time.Duration `json:"duration_ns"`
	// Cleanup deletes the keys at the end.
	Cleanup bool        `json:"cleanup"`
	Clock   clock.Clock `json:"-"`
}

// readsPrefix stands before the keys of Reads. watchedKey is put again and again meanwhile.
const (
	readsPrefix = "reads/"
	watchedKey  = "reads-watched"
	// watchPause is the pause between two puts of the watched key.
	watchPause = 20 * time.Millisecond
)

// Validate says what is wrong with the settings.
func (c *ReadsConfig) Validate() error {
	switch {
	case c.Endpoint == "":
		return errors.New("endpoint: none is given")
	case c.Clients < 0 || c.Clients > maxClients:
		return fmt.Errorf("clients: %d is not between 0 and %d", c.Clients, maxClients)
	case c.ValueBytes < 1 || c.ValueBytes > maxValueBytes:
		return fmt.Errorf("value-size: %d is not between 1 and %d", c.ValueBytes, maxValueBytes)
	case c.AnswerBytes < c.ValueBytes:
		return fmt.Errorf("answer-size: %d bytes are less than one value of %d", c.AnswerBytes, c.ValueBytes)
	case c.Duration <= 0:
		return fmt.Errorf("duration: %v is not above 0", c.Duration)
	}
	return nil
}

// ReadsReport is what came of a load of large answers.
type ReadsReport struct {
	Config ReadsConfig `json:"settings"`
	// Answers were right; Bytes are those of their values.
	Answers int64         `json:"answers"`
	Bytes   int64         `json:"bytes"`
	Took    time.Duration `json:"elapsed_ns"`
	// Errors counts reads that failed, by kind.
	Errors map[string]int64 `json:"errors,omitempty"`
	// Late is how late a watcher got each of its events meanwhile, in order: from before the put to the event's arrival.
	Late []time.Duration `json:"late_ns"`
}

// WriteJSON writes the report to a file, or to stdout for "-".
func (r *ReadsReport) WriteJSON(name string, stdout io.Writer) error {
	return WriteJSON(r, name, stdout)
}

// Write writes the report.
func (r *ReadsReport) Write(w io.Writer) error {
	var b bytes.Buffer
	seconds := r.Took.Seconds()
	fmt.Fprintf(&b, "%d clients, answers of %d bytes in values of %d: %d answers in %.1f s, %.0f MB/s\n",
		r.Config.Clients, r.Config.AnswerBytes, r.Config.ValueBytes, r.Answers, seconds, float64(r.Bytes)/1e6/seconds)
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(&b, "%d errors: %s\n", r.Errors[kind], kind)
	}
	if n := len(r.Late); n > 0 {
		fmt.Fprintf(&b, "%d events late by: p50 %v, p99 %v, max %v\n", n,
			r.Late[n/2].Round(time.Millisecond), r.Late[n*99/100].Round(time.Millisecond), r.Late[n-1].Round(time.Millisecond))
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("reads: report: %w", err)
	}
	return nil
}

// Reads has many clients read large answers, and watches meanwhile.
func Reads(ctx context.Context, c ReadsConfig) (*ReadsReport, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	connect := func() (*clientv3.Client, error) {
		return c.connect(c.Endpoint, func(cfg *clientv3.Config) { cfg.MaxCallRecvMsgSize, cfg.MaxUnaryRetries = math.MaxInt32, 1 })
	}
	if _, err := c.status(ctx, c.Endpoint); err != nil {
		return nil, fmt.Errorf("reads: %w", err)
	}
	client, err := connect()
	if err != nil {
		return nil, fmt.Errorf("reads: %w", err)
	}
	defer client.Close()
	keys := c.AnswerBytes / c.ValueBytes
	if c.Clients > 0 {
		if err := c.fill(ctx, client, keys); err != nil {
			return nil, err
		}
	}
	loadCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	report := &ReadsReport{Config: c}
	var watched error
	var watching, reading sync.WaitGroup
	watching.Go(func() { report.Late, watched = c.watch(loadCtx, client) })
	var answers, read atomic.Int64
	tally := errorTally{}
	began := c.Clock.Now()
	for range c.Clients {
		reading.Go(func() {
			own, err := connect()
			if err != nil {
				tally.add(errorKind(err), 1)
				return
			}
			defer own.Close()
			for first := true; ctx.Err() == nil && (first || c.Clock.Now().Sub(began) < c.Duration); first = false {
				resp, err := own.Get(ctx, readsPrefix, clientv3.WithPrefix())
				switch {
				case err != nil:
					tally.add(errorKind(err), 1)
				case len(resp.Kvs) != keys:
					tally.add(fmt.Sprintf("an answer of %d keys in place of %d", len(resp.Kvs), keys), 1)
				default:
					answers.Add(1)
					read.Add(int64(keys) * int64(c.ValueBytes))
				}
			}
		})
	}
	if c.Clients == 0 {
		_ = clock.Sleep(ctx, c.Clock, c.Duration)
	}
	reading.Wait()
	report.Took = c.Clock.Now().Sub(began)
	cancel()
	watching.Wait()
	if watched != nil {
		return nil, fmt.Errorf("reads: watch: %w", watched)
	}
	if c.Cleanup {
		if err := c.clean(ctx, client); err != nil {
			return nil, err
		}
	}
	report.Answers, report.Bytes, report.Errors = answers.Load(), read.Load(), tally.kinds
	slices.Sort(report.Late)
	return report, nil
}

// fill puts the keys that are read, and no others with their prefix are left.
func (c *ReadsConfig) fill(ctx context.Context, client *clientv3.Client, keys int) error {
	value := string(bytes.Repeat([]byte{'v'}, c.ValueBytes))
	if _, err := client.Delete(ctx, readsPrefix, clientv3.WithPrefix()); err != nil {
		return fmt.Errorf("reads: empty the store: %w", err)
	}
	for i := range keys {
		if _, err := client.Put(ctx, fmt.Sprintf("%s%08d", readsPrefix, i), value); err != nil {
			return fmt.Errorf("reads: put key %d: %w", i, err)
		}
	}
	return nil
}

// clean deletes what fill and watch have put.
func (c *ReadsConfig) clean(ctx context.Context, client *clientv3.Client) error {
	// An interrupted run cleans up too.
	ctx = context.WithoutCancel(ctx)
	_, err := client.Delete(ctx, watchedKey)
	if err == nil && c.Clients > 0 {
		_, err = client.Delete(ctx, readsPrefix, clientv3.WithPrefix())
	}
	if err != nil {
		return fmt.Errorf("reads: clean up: %w", err)
	}
	return nil
}

// watch puts a key again and again until ctx ends, and returns how late a watcher gets each event.
func (c *ReadsConfig) watch(ctx context.Context, client *clientv3.Client) (late []time.Duration, err error) {
	events := client.Watch(ctx, watchedKey)
	for ctx.Err() == nil {
		began := c.Clock.Now()
		sent := binary.BigEndian.AppendUint64(nil, uint64(began))
		if _, err := client.Put(ctx, watchedKey, string(sent)); err != nil {
			if ctx.Err() != nil {
				break
			}
			return late, err
		}
		for got := false; !got; {
			resp, ok := <-events
			if !ok {
				return late, nil
			}
			if err := resp.Err(); err != nil && ctx.Err() == nil {
				return late, err
			}
			for _, e := range resp.Events {
				got = got || bytes.Equal(e.Kv.Value, sent)
			}
		}
		late = append(late, c.Clock.Now().Sub(began))
		if clock.Sleep(ctx, c.Clock, watchPause) != nil {
			break
		}
	}
	return late, nil
}
