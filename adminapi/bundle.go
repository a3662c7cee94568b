package adminapi

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/redact"
)

// Bounds of a bundle.
const (
	// bundleNodeTime is how long a node may take for its part, and bundleNodeBytes how large that may be.
	bundleNodeTime  = 30 * time.Second
	bundleNodeBytes = 64 << 20
	// bundleAskTime bounds each question about the cluster.
	bundleAskTime = 5 * time.Second
	// bundleAtOnce bounds the nodes, and the ranges, that are asked at a time.
	bundleAtOnce = 16
	// troubledRanges is how many ranges are shown one by one.
	troubledRanges = 64
)

// BundleOptions say what goes into a debug bundle.
type BundleOptions struct {
	// Name is that of the folder within the archive.
	Name string
	// Nodes are the names of the nodes that are asked; empty means all.
	Nodes []string
	// Profile is how long processors are profiled and traced; 0 leaves both out.
	Profile time.Duration
	// Salt is what keys are hashed with; empty leaves them as they are. It must not be told to anybody.
	Salt []byte
	// Told is called with each node whose part has ended, one at a time.
	Told func(*BundledNode)
}

// BundledNode says what of a node is in a bundle.
type BundledNode struct {
	Node  string `json:"node"`
	Files int    `json:"files"`
	Bytes int64  `json:"bytes"`
	// TookMs is how long the part took, in milliseconds.
	TookMs int64 `json:"took_ms"`
	// Error is why there is no part, or not all of it.
	Error string `json:"error,omitempty"`
}

// bundleNode is a node that is asked for its part.
type bundleNode struct {
	name string // empty until it has said it
	urls []string
	// stranger says that the others do not hear it: whoever has its address now is told no password.
	stranger bool
}

// label is the node's name, or what is known of it instead.
func (n *bundleNode) label() string { return cmp.Or(n.name, strings.Join(n.urls, ",")) }

// WriteBundle writes a debug bundle of the cluster to w, as a tar.gz. Nodes that do not answer are named in it and in the
// result. There is an error where no node answers, or w takes no more.
func (c *Client) WriteBundle(ctx context.Context, w io.Writer, o BundleOptions) ([]BundledNode, error) {
	started := clock.StartStopwatch()
	view := c.lookAround(ctx)
	nodes, err := view.nodes(o.Nodes)
	if err != nil {
		return nil, err
	}
	a := newBundleArchive(w, &o)
	var parts sync.WaitGroup
	done, failed := make([]BundledNode, len(nodes)), make([]error, len(nodes))
	slots, told := make(chan struct{}, bundleAtOnce), sync.Mutex{}
	for i := range nodes {
		parts.Go(func() {
			slots <- struct{}{}
			done[i], failed[i] = c.bundleNode(ctx, a, &nodes[i], &o)
			<-slots
			told.Lock()
			defer told.Unlock()
			o.Told(&done[i])
		})
	}
	parts.Go(func() { c.bundleCluster(ctx, a, view) })
	parts.Wait()
	if !slices.ContainsFunc(done, func(n BundledNode) bool { return n.Files > 0 }) {
		return done, noPart(done, failed)
	}
	a.add("index.txt", "", a.index(done, started.Elapsed()), "")
	return done, errors.Join(a.close(), ctx.Err())
}

// noPart says why there is no bundle: somebody has refused it, or nobody answers.
func noPart(nodes []BundledNode, failed []error) error {
	why := make([]string, len(nodes))
	for i := range nodes {
		if r := (*Refusal)(nil); errors.As(failed[i], &r) && !r.Later {
			return r
		}
		why[i] = nodes[i].Node + ": " + nodes[i].Error
	}
	return &Refusal{
		Reason:   "no endpoint can be reached: " + strings.Join(why, "; "),
		NextStep: "give the client URL of a running node to --endpoints",
		Later:    true,
	}
}

// around is what the endpoints have said of the cluster.
type around struct {
	survey *adminpb.SurveyResponse // nil if none answers
	// asked are the endpoints by the names of the nodes there, and at one that made the survey.
	asked  map[string]string
	at     string
	silent []EndpointError
}

// lookAround asks each endpoint for a survey. That of a node which reaches a quorum counts before all others.
func (c *Client) lookAround(ctx context.Context) *around {
	ctx, cancel := context.WithTimeout(ctx, bundleAskTime)
	defer cancel()
	a := &around{asked: map[string]string{}}
	var mu sync.Mutex // guards a
	var all sync.WaitGroup
	for _, name := range c.Endpoints() {
		all.Go(func() {
			one, err := c.At(name)
			var s *adminpb.SurveyResponse
			if err == nil {
				s, _, err = one.Survey(ctx)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				a.silent = append(a.silent, EndpointError{name, err.Error()})
				return
			}
			a.asked[s.GetAsked()] = name
			if a.survey == nil || a.survey.GetStale() && !s.GetStale() {
				a.survey, a.at = s, name
			}
		})
	}
	all.Wait()
	slices.SortFunc(a.silent, func(x, y EndpointError) int { return cmp.Compare(x.Endpoint, y.Endpoint) })
	return a
}

// nodes are those to ask. Without a survey nothing is known of others than the endpoints.
func (a *around) nodes(only []string) (all []bundleNode, err error) {
	known := map[string]bool{}
	for _, n := range a.survey.GetNodes() {
		row := n.GetNode()
		if row.GetState() == "unstarted" || row.GetState() == "removed" {
			continue
		}
		known[row.GetName()] = true
		if len(only) > 0 && !slices.Contains(only, row.GetName()) {
			continue
		}
		urls := slices.Clone(row.GetClientUrls())
		at := a.asked[row.GetName()]
		switch {
		case at != "" && row.GetState() == StateDead:
			urls = []string{at} // who answers there is known
		case at != "":
			urls = append([]string{at}, urls...)
		}
		all = append(all, bundleNode{row.GetName(), urls, at == "" && row.GetState() == StateDead})
	}
	if a.survey == nil {
		for _, s := range a.silent {
			all = append(all, bundleNode{urls: []string{s.Endpoint}})
		}
		return all, nil
	}
	for _, name := range only {
		if !known[name] {
			return nil, &Refusal{Reason: fmt.Sprintf("there is no node %q", name), NextStep: "skein node list shows the nodes"}
		}
	}
	return all, nil
}

// bundleNode brings a node's part.
func (c *Client) bundleNode(ctx context.Context, a *bundleArchive, n *bundleNode, o *BundleOptions) (BundledNode, error) {
	watch := clock.StartStopwatch()
	ctx, cancel := context.WithTimeout(ctx, bundleNodeTime)
	defer cancel()
	part := bundlePart{archive: a, node: n, taken: map[string]bool{}}
	at, err := c.At(n.urls...)
	if err == nil {
		if n.stranger {
			at.As("", "")
		}
		err = at.Bundle(ctx, &adminpb.BundleRequest{ProfileMs: o.Profile.Milliseconds(), Salt: o.Salt}, part.take)
	}
	part.end(err)
	b := BundledNode{Node: n.label(), Files: len(part.taken), Bytes: part.bytes, TookMs: watch.Elapsed().Milliseconds()}
	if err != nil {
		b.Error = a.keys.Text(err.Error())
	}
	return b, err
}

// bundlePart is the part of a node on its way.
type bundlePart struct {
	archive *bundleArchive
	node    *bundleNode
	taken   map[string]bool
	bytes   int64
	// The file whose pieces come. whole says that all have.
	file, about, problem string
	data                 bytes.Buffer
	whole                bool
}

// take takes the next piece.
func (p *bundlePart) take(piece *adminpb.BundleResponse) error {
	if p.node.name == "" {
		p.node.name = piece.GetNode()
	}
	if piece.GetAbout() != "" {
		p.end(nil)
		p.file, p.about = piece.GetFile(), piece.GetAbout()
	}
	p.problem, p.whole = cmp.Or(p.problem, piece.GetError()), piece.GetLast()
	if p.bytes+int64(p.data.Len()+len(piece.GetData())) > bundleNodeBytes {
		return fmt.Errorf("the part is larger than %d MiB, and its rest was left out", bundleNodeBytes>>20)
	}
	p.data.Write(piece.GetData())
	return nil
}

// end puts the file into the archive, if it is not there from an address of the node that has fallen silent. err is why no
// more comes.
func (p *bundlePart) end(err error) {
	if p.file != "" && !p.taken[p.file] && (p.whole || err != nil) {
		if !p.whole {
			p.problem = cmp.Or(p.problem, "not whole: "+err.Error())
		}
		data := p.data.Bytes()
		if len(data) == 0 && p.problem != "" {
			data = nil
		}
		p.archive.add("nodes/"+folder(p.node.label())+"/"+folder(p.file), p.about, data, p.problem)
		p.taken[p.file] = true
		p.bytes += int64(len(data))
	}
	p.file, p.about, p.problem, p.whole = "", "", "", false
	p.data = bytes.Buffer{}
}

// folder is a name that leads nowhere else.
func folder(name string) string {
	return strings.TrimLeft(strings.Map(func(r rune) rune {
		if r < 0x80 && (unicode.IsLetter(r) || unicode.IsDigit(r)) || strings.ContainsRune("._-", r) {
			return r
		}
		return '_'
	}, name), ".")
}

// bundleCluster brings what the cluster as a whole is like.
func (c *Client) bundleCluster(ctx context.Context, a *bundleArchive, view *around) {
	if view.survey == nil {
		a.add("cluster/status.txt", "the cluster at a glance", nil, "no endpoint has answered")
		return
	}
	c.Probe(ctx, view.survey)
	found := Diagnose(view.survey, view.silent)
	for _, f := range []struct {
		name, about string
		write       func(io.Writer) error
	}{
		{"cluster/status.txt", "the cluster at a glance, as skein status shows it", func(w io.Writer) error {
			return WriteStatus(w, Table, view.survey, view.silent, found)
		}},
		{"cluster/status.json", "the same, for programs", func(w io.Writer) error { return WriteStatus(w, JSON, view.survey, view.silent, found) }},
		{"cluster/doctor.txt", "what is wrong, as skein doctor says it", func(w io.Writer) error { return WriteFindings(w, Table, found) }},
	} {
		a.write(f.name, f.about, f.write)
	}
	at, err := c.At(append([]string{view.at}, c.Endpoints()...)...)
	if err != nil {
		a.add("cluster/ranges.json", "all ranges", nil, err.Error())
		return
	}
	listing, cancel := context.WithTimeout(ctx, 2*bundleAskTime)
	defer cancel()
	l, err := at.RangeList(listing)
	if err != nil {
		a.add("cluster/ranges.json", "all ranges", nil, err.Error())
		return
	}
	a.write("cluster/ranges.json", "all ranges, as skein range list -w json", func(w io.Writer) error { return WriteRanges(w, w, JSON, QuotedKeys, l) })
	at.bundleRanges(ctx, a, troubled(l.GetRanges()))
}

// troubled returns the ranges that are worth a look, those in trouble before those with the most load.
func troubled(all []*adminpb.Range) []*adminpb.Range {
	rank := func(r *adminpb.Range) int {
		switch {
		case len(r.GetWaitsFor()) > 0:
			return 0
		case r.GetLeader() == "":
			return 1
		case slices.ContainsFunc(r.GetMembers(), func(m *adminpb.Replica) bool { return m.GetQuarantine() != "" }):
			return 2
		case r.GetOperation() != nil:
			return 3
		case r.GetWritesPerSecond()+r.GetReadsPerSecond() > 0:
			return 4
		}
		return 5
	}
	all = slices.DeleteFunc(slices.Clone(all), func(r *adminpb.Range) bool { return rank(r) == 5 })
	slices.SortStableFunc(all, func(x, y *adminpb.Range) int {
		return cmp.Or(cmp.Compare(rank(x), rank(y)), cmp.Compare(y.GetWritesPerSecond()+y.GetReadsPerSecond(), x.GetWritesPerSecond()+x.GetReadsPerSecond()))
	})
	return all[:min(len(all), troubledRanges)]
}

// bundleRanges brings what the replicas of ranges say of themselves.
func (c *Client) bundleRanges(ctx context.Context, a *bundleArchive, ranges []*adminpb.Range) {
	ctx, cancel := context.WithTimeout(ctx, bundleNodeTime/2)
	defer cancel()
	next := make(chan *adminpb.Range, len(ranges))
	for _, r := range ranges {
		next <- r
	}
	close(next)
	var all sync.WaitGroup
	for range min(len(ranges), bundleAtOnce) {
		all.Go(func() {
			one, err := c.At(c.Endpoints()...) // calls of one client wait for each other
			for r := range next {
				name, about := fmt.Sprintf("cluster/ranges/%d.json", r.GetId()), "what the replicas of a range in trouble, or under load, say of themselves"
				var s *adminpb.RangeShowResponse
				if err == nil {
					asking, cancel := context.WithTimeout(ctx, bundleAskTime)
					s, err = one.RangeShow(asking, r.GetId())
					cancel()
				}
				if err != nil {
					a.add(name, about, nil, err.Error())
					err = nil
					continue
				}
				a.write(name, about, func(w io.Writer) error { return WriteShow(w, JSON, QuotedKeys, s) })
			}
		})
	}
	all.Wait()
}

// bundleArchive is the archive that is written.
type bundleArchive struct {
	name string
	at   time.Time
	keys *redact.Redactor

	mu sync.Mutex
	// Guarded by mu. err is the first error, after which nothing is written.
	zip  *gzip.Writer
	tar  *tar.Writer
	rows [][]string
	err  error
}

func newBundleArchive(w io.Writer, o *BundleOptions) *bundleArchive {
	z := gzip.NewWriter(w)
	return &bundleArchive{zip: z, tar: tar.NewWriter(z), name: o.Name, at: clock.System().Wall(), keys: redact.New(o.Salt)}
}

func (a *bundleArchive) close() error { return errors.Join(a.err, a.tar.Close(), a.zip.Close()) }

// write adds a file of the cluster, without secrets and with each key hashed.
func (a *bundleArchive) write(name, about string, write func(io.Writer) error) {
	var plain, out bytes.Buffer
	problem := ""
	if err := write(&plain); err != nil {
		problem = err.Error()
	}
	if strings.HasSuffix(name, ".json") {
		if err := a.keys.JSON(&out, plain.Bytes()); err != nil {
			problem = cmp.Or(problem, err.Error())
		}
	} else {
		out.WriteString(a.keys.Text(plain.String()))
	}
	a.add(name, about, out.Bytes(), problem)
}

// add adds a file as it is. problem is why it is not there, or not whole.
func (a *bundleArchive) add(name, about string, data []byte, problem string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rows = append(a.rows, []string{name, SizeText(int64(len(data))), about, a.keys.Text(problem)})
	if a.err != nil || data == nil {
		return
	}
	h := &tar.Header{Name: a.name + "/" + name, Mode: 0o600, Size: int64(len(data)), ModTime: a.at, Format: tar.FormatPAX}
	if a.err = a.tar.WriteHeader(h); a.err == nil {
		_, a.err = a.tar.Write(data)
	}
}

// index says what each file is.
func (a *bundleArchive) index(nodes []BundledNode, took time.Duration) []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	var b bytes.Buffer
	fmt.Fprintf(&b, "A debug bundle of Skein, made at %s in %.1f s.\n", a.at.UTC().Format(time.RFC3339), took.Seconds())
	fmt.Fprint(&b, "It has no values of keys, no passwords, no tokens and no private keys. Keys are hashed part by part, unless --redact=none was given.\n\n")
	rows := [][]string{{"NODE", "FILES", "SIZE", "TOOK", "PROBLEM"}}
	for _, n := range nodes {
		rows = append(rows, bundledRow(&n))
	}
	slices.SortFunc(a.rows, func(x, y []string) int { return cmp.Compare(x[0], y[0]) })
	if err := errors.Join(writeTable(&b, rows), writeTable(&b, append([][]string{{"FILE", "SIZE", "WHAT IT IS", "PROBLEM"}}, a.rows...))); err != nil {
		panic(err) // a buffer takes everything
	}
	return b.Bytes()
}

func bundledRow(n *BundledNode) []string {
	return []string{n.Node, fmt.Sprint(n.Files), SizeText(n.Bytes), fmt.Sprintf("%.1fs", float64(n.TookMs)/1000), n.Error}
}

// WriteBundled prints what of each node is in a bundle, and which file that is.
func WriteBundled(w io.Writer, f Format, file string, bytes int64, nodes []BundledNode) error {
	if f == JSON {
		return writeJSON(w, struct {
			File  string        `json:"file"`
			Bytes int64         `json:"bytes"`
			Nodes []BundledNode `json:"nodes"`
		}{file, bytes, nodes})
	}
	rows := [][]string{{"NODE", "FILES", "SIZE", "TOOK", "PROBLEM"}}
	for i := range nodes {
		rows = append(rows, bundledRow(&nodes[i]))
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "wrote %s, %s\n", file, SizeText(bytes))
	return err
}
