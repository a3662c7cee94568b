package adminapi

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
)

// Bounds of a look.
const (
	// scrapeTime is how long a node may take to tell its metrics, and scrapeBytes how large they may be.
	scrapeTime  = 2 * time.Second
	scrapeBytes = 32 << 20
	// topRangesEvery lies between two lists of all ranges: their load is a mean of ten seconds anyway.
	topRangesEvery = 10 * time.Second
	// topRanges is how many of the busiest are shown.
	topRanges = 10
	// topSlow is how many of the slow requests are shown, the newest ones of that time.
	topSlow     = 5
	topSlowTime = 5 * time.Minute
	// topSlowWait is how long they may take. A node has the larger of 2 s and half of it to tell its own, so that one that hangs
	// takes 2 s, and those of the others still come.
	topSlowWait = 4 * time.Second
)

// The metrics that a look reads.
const (
	cpuMetric       = "process_cpu_seconds_total"
	putsMetric      = "etcd_mvcc_put_total"
	getsMetric      = "etcd_mvcc_range_total"
	committedMetric = "etcd_server_proposals_committed_total"
	appliedMetric   = "etcd_server_proposals_applied_total"
)

// Top looks at a cluster again and again, and says what has happened in between.
type Top struct {
	client *Client
	http   *http.Client
	clock  clock.Clock
	last   map[string]scrape // by the ids of nodes
	ranges []*adminpb.Range
	slow   []slowCallJSON
	listed clock.Time // when ranges and slow requests were
}

// scrape is what a node's metrics have said, and when.
type scrape struct {
	at     clock.Time
	values map[string]float64
}

// NewTop returns one that asks by the client. Close lets its connections go.
func NewTop(c *Client) *Top {
	return &Top{client: c, http: &http.Client{Transport: &http.Transport{TLSClientConfig: c.tls.Clone()}}, clock: clock.System(), last: map[string]scrape{}}
}

// Close closes the connections to nodes.
func (t *Top) Close() { t.http.CloseIdleConnections() }

// TopFrame is what one look has found; the order of the fields is part of the output.
type TopFrame struct {
	At       time.Time       `json:"at"`
	Stale    bool            `json:"stale,omitempty"`
	Silent   []EndpointError `json:"silent_endpoints,omitempty"`
	Nodes    []TopNode       `json:"nodes"`
	Ranges   []TopRange      `json:"hottest_ranges"`
	Total    int64           `json:"ranges"`
	NoQuorum int64           `json:"ranges_without_quorum"`
	// Slow are the last slow requests, the newest first.
	Slow     []slowCallJSON `json:"slow_requests"`
	Findings []Finding      `json:"findings"`
}

// TopNode is a node in a look. What is nil is not known, as the rates at the first look.
type TopNode struct {
	Node  string `json:"node"`
	State string `json:"state"`
	// CPU is in percent of one processor.
	CPU  *float64 `json:"cpu_percent,omitempty"`
	Puts *float64 `json:"puts_per_second,omitempty"`
	Gets *float64 `json:"gets_per_second,omitempty"`
	// Lag is how many committed entries of all its groups the node has not applied.
	Lag        *float64 `json:"lag_entries,omitempty"`
	Leaders    int64    `json:"leaders"`
	DiskUsed   int64    `json:"disk_used"`
	DiskSize   int64    `json:"disk_capacity"`
	FsyncP99Us int64    `json:"fsync_p99_us"`
	// Error is why its metrics are not known.
	Error string `json:"error,omitempty"`
}

// TopRange is one of the busiest ranges.
type TopRange struct {
	ID         uint64  `json:"id"`
	Start      []byte  `json:"start_base64"`
	Leader     string  `json:"leader"`
	Writes     float64 `json:"writes_per_second"`
	Reads      float64 `json:"reads_per_second"`
	WriteBytes float64 `json:"write_bytes_per_second"`
}

// Look asks the cluster and its nodes. There is an error where no endpoint answers.
func (t *Top) Look(ctx context.Context) (*TopFrame, error) {
	s, silent, err := t.client.Survey(ctx)
	if err != nil {
		return nil, err
	}
	f := &TopFrame{
		At: time.UnixMilli(s.GetUnixMs()).UTC(), Stale: s.GetStale(), Silent: silent, Nodes: make([]TopNode, len(s.GetNodes())), Total: s.GetRanges(),
		Findings: append([]Finding{}, Diagnose(s, silent)...),
	}
	for _, o := range s.GetOutages() {
		f.NoQuorum += o.GetRanges()
	}
	scrapes := make([]scrape, len(f.Nodes))
	var all sync.WaitGroup
	for i, n := range s.GetNodes() {
		f.Nodes[i] = TopNode{
			Node: cmp.Or(n.GetNode().GetName(), n.GetNode().GetId()), State: plainState(n.GetNode()), Leaders: n.GetNode().GetLeaders(),
			DiskUsed: n.GetDiskUsed(), DiskSize: n.GetDiskCapacity(), FsyncP99Us: n.GetFsyncP99Us(),
		}
		if !n.GetNode().GetAlive() {
			continue
		}
		all.Go(func() {
			var err error
			if scrapes[i], err = t.scrape(ctx, n.GetNode().GetClientUrls()); err != nil {
				f.Nodes[i].Error = err.Error()
			}
		})
	}
	t.list(ctx)
	all.Wait()
	for i, n := range s.GetNodes() {
		f.Nodes[i].since(t.last[n.GetNode().GetId()], scrapes[i])
		t.last[n.GetNode().GetId()] = scrapes[i]
	}
	f.Ranges, f.Slow = hottest(t.ranges), newest(t.slow, f.At)
	return f, nil
}

// since says what has happened between two scrapes of the node. A counter that has gone back is one of a new process.
func (n *TopNode) since(was, now scrape) {
	committed, ok := now.values[committedMetric]
	if applied, also := now.values[appliedMetric]; ok && also {
		n.Lag = new(max(0, committed-applied))
	}
	if was.values == nil || now.values == nil {
		return
	}
	seconds := now.at.Sub(was.at).Seconds()
	rate := func(name string, factor float64) *float64 {
		a, before := was.values[name]
		b, after := now.values[name]
		if !before || !after || b < a || seconds <= 0 {
			return nil
		}
		return new((b - a) / seconds * factor)
	}
	n.CPU, n.Puts, n.Gets = rate(cpuMetric, 100), rate(putsMetric, 1), rate(getsMetric, 1)
}

// scrape reads the metrics of a node at the first of its client URLs that answers.
func (t *Top) scrape(ctx context.Context, urls []string) (s scrape, err error) {
	err = errors.New("it has no client URL that HTTP is spoken at")
	for _, u := range urls {
		if !strings.HasPrefix(u, "http://") && !strings.HasPrefix(u, "https://") {
			continue
		}
		var values map[string]float64
		if values, err = t.metricsAt(ctx, u); err == nil {
			return scrape{t.clock.Now(), values}, nil
		}
	}
	return scrape{}, err
}

func (t *Top) metricsAt(ctx context.Context, url string) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, scrapeTime)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(url, "/")+"/metrics", http.NoBody)
	if err != nil {
		return nil, err
	}
	a, err := t.http.Do(q)
	if err != nil {
		return nil, noHTTP(url, err)
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s/metrics: %s", url, a.Status)
	}
	return readMetrics(io.LimitReader(a.Body, scrapeBytes))
}

// noHTTP says in words that a URL does not answer HTTP, if it looks so: a gRPC server hangs up on it, or does not agree to it in
// TLS. What error that gives depends on who is quicker, and Go has no types for most of them.
func noHTTP(url string, err error) error {
	var dial *net.OpError
	switch {
	case errors.As(err, &dial) && dial.Op == "dial", errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return err
	case strings.HasPrefix(url, "https:") && !strings.Contains(err.Error(), "no application protocol") && !errors.Is(err, io.EOF):
		return err // certificates
	}
	return fmt.Errorf("no metrics: %s answers no HTTP; beside --listen-client-http-urls client URLs speak gRPC alone", url)
}

// readMetrics returns those that a look is about. None of them has labels.
func readMetrics(r io.Reader) (map[string]float64, error) {
	values := map[string]float64{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, text, _ := strings.Cut(lines.Text(), " ")
		switch name {
		case cpuMetric, putsMetric, getsMetric, committedMetric, appliedMetric:
			v, err := strconv.ParseFloat(text, 64)
			if err != nil {
				return nil, fmt.Errorf("metric %s: %w", name, err)
			}
			values[name] = v
		}
	}
	return values, lines.Err()
}

// list lists the ranges and the slow requests anew, if that is due. The last list stays if there is no other.
func (t *Top) list(ctx context.Context) {
	now := t.clock.Now()
	if t.listed != 0 && now.Sub(t.listed) < topRangesEvery {
		return
	}
	t.listed = now
	var both sync.WaitGroup
	both.Go(func() {
		if l, err := t.client.RangeList(ctx); err == nil {
			t.ranges = l.GetRanges()
		}
	})
	both.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, topSlowWait)
		defer cancel()
		if l, err := t.client.Slow(ctx, 0); err == nil {
			t.slow = slowToJSON(l).Calls
		}
	})
	both.Wait()
}

// newest returns those of the slow requests, the newest first, that are to be shown at that time.
func newest(all []slowCallJSON, now time.Time) []slowCallJSON {
	out := []slowCallJSON{}
	for i := range all {
		at, err := time.Parse(time.RFC3339, all[i].At)
		if err == nil && now.Sub(at) < topSlowTime && len(out) < topSlow {
			out = append(out, all[i])
		}
	}
	return out
}

func hottest(all []*adminpb.Range) []TopRange {
	load := func(r *adminpb.Range) float64 { return r.GetWritesPerSecond() + r.GetReadsPerSecond() }
	all = slices.DeleteFunc(slices.Clone(all), func(r *adminpb.Range) bool { return load(r) < 0.05 })
	slices.SortStableFunc(all, func(x, y *adminpb.Range) int { return cmp.Compare(load(y), load(x)) })
	out := []TopRange{}
	for _, r := range all[:min(len(all), topRanges)] {
		out = append(out, TopRange{r.GetId(), r.GetStart(), r.GetLeader(), r.GetWritesPerSecond(), r.GetReadsPerSecond(), r.GetWriteBytesPerSecond()})
	}
	return out
}

// WriteTop prints a look.
func WriteTop(w io.Writer, f Format, k KeyFormat, t *TopFrame) error {
	if f == JSON {
		return writeJSON(w, t)
	}
	var puts, gets float64
	rows := [][]string{{"NODE", "STATE", "CPU", "PUTS/S", "GETS/S", "LEADERS", "LAG", "DISK", "FSYNC P99", ""}}
	for i := range t.Nodes {
		n := &t.Nodes[i]
		puts, gets = puts+deref(n.Puts), gets+deref(n.Gets)
		rows = append(rows, n.row())
	}
	stale := ""
	if t.Stale {
		stale = "; no quorum answers: this is what one node knew last"
	}
	fmt.Fprintf(w, "%s  %d nodes, %d ranges, %d without a quorum; %.0f puts/s, %.0f gets/s%s\n", t.At.Format("15:04:05Z"), len(t.Nodes), t.Total, t.NoQuorum, puts, gets, stale)
	if err := writeTable(w, rows); err != nil {
		return err
	}
	hot := [][]string{{"RANGE", "FROM", "LEADER", "WRITES/S", "READS/S", "WRITTEN/S"}}
	for _, r := range t.Ranges {
		hot = append(hot, []string{
			strconv.FormatUint(r.ID, 10), k.border(r.Start, "the first key"), r.Leader, fmt.Sprintf("%.1f", r.Writes), fmt.Sprintf("%.1f", r.Reads), SizeText(int64(r.WriteBytes)),
		})
	}
	if len(t.Ranges) > 0 {
		if err := writeTable(w, hot); err != nil {
			return err
		}
	}
	if len(t.Slow) > 0 {
		if err := writeSlowCalls(w, t.Slow); err != nil {
			return err
		}
	}
	return writeBrief(w, t.Findings)
}

// row is the node's row of the table.
func (n *TopNode) row() []string {
	number := func(v *float64, format string) string {
		if v == nil {
			return "?"
		}
		return fmt.Sprintf(format, *v)
	}
	disk, fsync := "", ""
	if n.DiskSize > 0 {
		disk = fmt.Sprintf("%d %%", n.DiskUsed*100/n.DiskSize)
	}
	if n.FsyncP99Us > 0 {
		fsync = fmt.Sprintf("%.1f ms", float64(n.FsyncP99Us)/1000)
	}
	return []string{
		n.Node, n.State, number(n.CPU, "%.0f %%"), number(n.Puts, "%.0f"), number(n.Gets, "%.0f"), strconv.FormatInt(n.Leaders, 10), number(n.Lag, "%.0f"),
		disk, fsync, n.Error,
	}
}

func deref(v *float64) float64 {
	if v == nil {
		return 0
	}
	return *v
}
