package adminapi

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/skeindb/skein/api/adminpb"
)

// SlowBackend is what the service asks of the node about slow requests.
type SlowBackend interface {
	// Slow returns the slow requests of all nodes, in any order, and the nodes that do not answer.
	Slow(ctx context.Context) (*adminpb.SlowResponse, error)
}

func (s *server) Slow(ctx context.Context, q *adminpb.SlowRequest) (*adminpb.SlowResponse, error) {
	r, err := s.backend.Slow(ctx)
	if err != nil {
		return nil, grpcError("list the slow requests", err, readAgain)
	}
	r.Calls = slices.DeleteFunc(r.Calls, func(c *adminpb.SlowCall) bool { return c.GetMicros() < q.GetMinMicros() })
	newestFirst(r.GetCalls())
	slices.SortFunc(r.Missing, func(a, b *adminpb.SlowMissing) int { return cmp.Compare(a.GetNode(), b.GetNode()) })
	return r, nil
}

func newestFirst(calls []*adminpb.SlowCall) {
	slices.SortFunc(calls, func(a, b *adminpb.SlowCall) int {
		return cmp.Or(cmp.Compare(b.GetAtUnixNanos(), a.GetAtUnixNanos()), cmp.Compare(a.GetNode(), b.GetNode()))
	})
}

// Slow lists the last requests of all nodes that took at least so long, the newest first.
func (c *Client) Slow(ctx context.Context, atLeast time.Duration) (*adminpb.SlowResponse, error) {
	return call(ctx, c, &adminpb.SlowRequest{MinMicros: atLeast.Microseconds()}, adminpb.AdminClient.Slow)
}

// slowJSON is what skein debug slow prints with -w json; the order of the fields is part of the output.
type slowJSON struct {
	Calls   []slowCallJSON    `json:"calls"`
	Missing []slowMissingJSON `json:"missing,omitempty"`
}

type slowCallJSON struct {
	At            string          `json:"at"`
	Node          string          `json:"node"`
	Method        string          `json:"method"`
	Range         uint64          `json:"range,omitempty"`
	Micros        int64           `json:"took_us"`
	Cause         string          `json:"cause"`
	Stages        []slowStageJSON `json:"stages"`
	Retries       uint32          `json:"retries,omitempty"`
	RequestBytes  uint64          `json:"request_bytes"`
	ResponseBytes uint64          `json:"response_bytes"`
}

type slowStageJSON struct {
	Name   string `json:"name"`
	Micros int64  `json:"took_us"`
}

type slowMissingJSON struct {
	Node   string `json:"node"`
	Reason string `json:"reason"`
}

// WriteSlow prints slow requests.
func WriteSlow(out io.Writer, format Format, r *adminpb.SlowResponse) error {
	if format == JSON {
		return writeJSON(out, slowToJSON(r))
	}
	for _, m := range r.GetMissing() {
		fmt.Fprintf(out, "%s does not answer: %s\n", m.GetNode(), m.GetReason())
	}
	if len(r.GetCalls()) == 0 {
		_, err := fmt.Fprintln(out, "no slow requests")
		return err
	}
	return writeSlowCalls(out, slowToJSON(r).Calls)
}

func writeSlowCalls(out io.Writer, calls []slowCallJSON) error {
	rows := [][]string{{"AT", "NODE", "METHOD", "TOOK", "RANGE", "RETRIES", "CAUSE"}}
	for i := range calls {
		c := &calls[i]
		id := "-"
		if c.Range != 0 {
			id = strconv.FormatUint(c.Range, 10)
		}
		took := time.Duration(c.Micros) * time.Microsecond
		rows = append(rows, []string{
			c.At, c.Node, c.Method, took.Round(time.Millisecond).String(), id, strconv.FormatUint(uint64(c.Retries), 10), orDash(c.Cause),
		})
	}
	return writeTable(out, rows)
}

// WriteSlowOf prints the slow requests of one node as JSON, the newest first.
func WriteSlowOf(out io.Writer, calls []*adminpb.SlowCall) error {
	newestFirst(calls)
	return WriteSlow(out, JSON, &adminpb.SlowResponse{Calls: calls})
}

func slowAt(c *adminpb.SlowCall) string {
	return time.Unix(0, c.GetAtUnixNanos()).UTC().Format("2006-01-02T15:04:05.000Z07:00")
}

func slowToJSON(r *adminpb.SlowResponse) *slowJSON {
	j := &slowJSON{Calls: []slowCallJSON{}}
	for _, c := range r.GetCalls() {
		s := slowCallJSON{
			At: slowAt(c), Node: cmp.Or(c.GetNodeName(), strconv.FormatUint(c.GetNode(), 16)), Method: c.GetMethod(), Range: c.GetRangeId(),
			Micros: c.GetMicros(), Cause: c.GetCause(), Stages: []slowStageJSON{}, Retries: c.GetRetries(),
			RequestBytes: c.GetRequestBytes(), ResponseBytes: c.GetResponseBytes(),
		}
		for _, p := range c.GetStages() {
			s.Stages = append(s.Stages, slowStageJSON{p.GetName(), p.GetMicros()})
		}
		j.Calls = append(j.Calls, s)
	}
	for _, m := range r.GetMissing() {
		j.Missing = append(j.Missing, slowMissingJSON{m.GetNode(), m.GetReason()})
	}
	return j
}
