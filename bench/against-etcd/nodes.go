package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

const (
	// askLimit bounds a request to a node that is not part of the measure.
	askLimit = 5 * time.Second
	// redialLimit is how long a client waits at most before it tries a node again.
	redialLimit = 250 * time.Millisecond
	// clockTick is the unit of a process's times in /proc; Linux shows no other.
	clockTick = 10 * time.Millisecond
)

// connect makes a client of one node, with one connection, that soon finds the node
// after its return.
func (c *cluster) connect(i int) (*clientv3.Client, error) {
	pause := backoff.Config{BaseDelay: redialLimit / 5, Multiplier: 1.5, Jitter: 0.2, MaxDelay: redialLimit}
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{c.clientURL(i)}, Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{Backoff: pause, MinConnectTimeout: time.Second})},
	})
	if err != nil {
		return nil, fmt.Errorf("connect to %s of %s: %w", nodeName(i), c.name, err)
	}
	return client, nil
}

// connectAll makes a client of each node. close closes them.
func (c *cluster) connectAll() (clients [nodes]*clientv3.Client, err error) {
	for i := range nodes {
		if clients[i], err = c.connect(i); err != nil {
			break
		}
	}
	if err != nil {
		closeAll(clients)
	}
	return clients, err
}

// endpoints are the client URLs of the running nodes.
func (c *cluster) endpoints() (urls []string) {
	for i, p := range c.running {
		if p != nil {
			urls = append(urls, c.clientURL(i))
		}
	}
	return urls
}

func closeAll(clients [nodes]*clientv3.Client) {
	for _, client := range clients {
		if client != nil {
			// Nothing is under way any more.
			_ = client.Close()
		}
	}
}

// leader returns the node that claims to lead: etcd's leader, and of Skein the one that
// leads placement. Of several it is the one with the highest term.
func (c *cluster) leader(ctx context.Context, clients [nodes]*clientv3.Client) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	best, term := -1, uint64(0)
	var wrong []error
	for i, client := range clients {
		s, err := client.Status(ctx, c.clientURL(i))
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		if s.Leader == s.Header.MemberId && s.RaftTerm >= term {
			best, term = i, s.RaftTerm
		}
	}
	if best < 0 {
		return 0, fmt.Errorf("%s: no node says that it leads: %w", c.name, errors.Join(wrong...))
	}
	return best, nil
}

// rangeState is one range of Skein, as `skein range list -w json` shows it.
type rangeState struct {
	ID       uint64   `json:"id"`
	Start    []byte   `json:"start_base64"`
	Leader   string   `json:"leader"`
	Replicas []string `json:"replicas"`
	Bytes    int64    `json:"bytes"` // on the leader's disk, without what is only in memory
	State    string   `json:"state"`
}

// leads says whether node i leads the range.
func (r *rangeState) leads(i int) bool { return r.Leader == nodeName(i) }

// ranges lists Skein's ranges, in the order of their keys.
func (c *cluster) ranges(ctx context.Context) ([]rangeState, error) {
	cmd := exec.CommandContext(ctx, c.binary, "range", "list", "-w", "json", "--endpoints", strings.Join(c.endpoints(), ","))
	text, err := cmd.Output()
	var out struct {
		Ranges []rangeState `json:"ranges"`
		Stale  bool         `json:"stale"`
	}
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err == nil && out.Stale {
		err = errors.New("no quorum answers")
	}
	if err != nil {
		return nil, fmt.Errorf("list the ranges: %w", err)
	}
	return out.Ranges, nil
}

// led counts the ranges that each node leads, and those without leader.
func led(ranges []rangeState) (by [nodes]int, nobody int) {
	nobody = len(ranges)
	for i := range nodes {
		for _, r := range ranges {
			if r.leads(i) {
				by[i]++
				nobody--
			}
		}
	}
	return by, nobody
}

// page is a node's /metrics: values by name and labels, unparsed.
type page map[string]float64

func (c *cluster) metrics(ctx context.Context, i int) (page, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	body, err := c.get(ctx, i, "/metrics")
	if err != nil {
		return nil, fmt.Errorf("metrics of %s: %w", nodeName(i), err)
	}
	defer body.Close()
	return parsePage(body)
}

// get asks a node for a page; the caller closes it.
func (c *cluster) get(ctx context.Context, i int, path string) (io.ReadCloser, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, c.webURL(i)+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	// Compressing pages would be most of a node's work if it is asked often.
	r.Header.Set("Accept-Encoding", "identity")
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode != http.StatusOK {
		answer.Body.Close()
		return nil, errors.New(answer.Status)
	}
	return answer.Body, nil
}

func parsePage(text io.Reader) (page, error) {
	p := page{}
	lines := bufio.NewScanner(text)
	for lines.Scan() {
		line := lines.Text()
		at := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || at < 0 {
			continue
		}
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("metrics: %q: %w", line, err)
		}
		p[line[:at]] = v
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return p, nil
}

// perOp returns the time, in µs, that a histogram of seconds has gathered since an
// earlier page, divided by the number of operations.
func (p page) perOp(before page, name, labels string, operations int) float64 {
	return (p[name+"_sum"+labels] - before[name+"_sum"+labels]) * 1e6 / float64(operations)
}

// cpuTime is the CPU time of a process, user and system.
func cpuTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(text))
}

// parseStat reads utime and stime, the 14th and 15th fields. The second field is the
// command's name in parentheses, which may contain blanks.
func parseStat(text string) (time.Duration, error) {
	_, rest, _ := strings.Cut(text[max(0, strings.LastIndexByte(text, ')')):], " ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/PID/stat: %q", text)
	}
	user, err1 := strconv.ParseInt(fields[11], 10, 64)
	system, err2 := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * clockTick, errors.Join(err1, err2)
}
