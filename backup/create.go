package backup

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/internal/background"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// A Source is where the versions of a cut come from.
type Source interface {
	// Read gives the blocks of the cut's versions in the span to emit, by key, each with the versions that
	// block.Decoder has found in it, until emit fails. The spans of concurrent calls are disjoint.
	Read(ctx context.Context, span keyspace.Span, emit func(b []byte, vs []mvcc.Version) error) error
}

// Options say how a backup is written.
type Options struct {
	// RateBytesPerSecond bounds what is written, before encryption. 0 is no bound.
	RateBytesPerSecond int64
	// Parallel is how many spans are read at once, 4 if it is 0. Each takes about 16 MiB of
	// memory.
	Parallel int
	// SegmentBytes is the size from which a segment ends at the next key, 64 MiB if it is 0.
	SegmentBytes int64
	// Progress, if there is one, is called after each block, by one goroutine at a time. It
	// must not wait.
	Progress func(Progress)
}

// Progress is how far a backup is. What a run before had written counts, too.
type Progress struct {
	SpansDone, Spans int
	Versions         int64
	// Bytes are those of keys and values, StoredBytes those of blocks.
	Bytes, StoredBytes int64
}

const (
	defaultParallel     = 4
	defaultSegmentBytes = 64 << 20
)

// ErrTaken says that another writer has made, or makes, the same backup.
var ErrTaken = errors.New("another backup is there already")

// A Draft is a backup that is not finished.
type Draft struct {
	m Manifest
	// records are those of segments that are finished, by span and index.
	records []record
}

// Cut returns the draft's cut. A Source of it must have the same revisions and kind.
func (d *Draft) Cut() Cut { return d.m.Cut }

// Chain returns the name of the chain, and the number that the backup will have in it.
func (d *Draft) Chain() (name string, number int) { return d.m.Chain, d.m.Number }

// ClusterID returns the cluster of the backup.
func (d *Draft) ClusterID() (keyspace.ClusterID, error) { return d.m.ClusterID() }

// folder is where segments and records lie.
func (d *Draft) folder() string { return fmt.Sprintf("%s%d/", d.m.folder(), d.m.Revision) }

// Begin notes a new backup of the cut, so that another run can go on with it. A full one
// begins a chain, and chain is empty; any other goes on with the chain, as Latest returned it.
// borders are the keys at which the keyspace is divided into spans, ascending.
func (r *Repository) Begin(ctx context.Context, cluster keyspace.ClusterID, chain string, cut Cut, borders [][]byte) (*Draft, error) {
	d := &Draft{m: Manifest{Cluster: cluster.String(), Chain: chain, Number: 1, Cut: cut}}
	start := []byte(nil)
	for _, b := range borders {
		d.m.Spans = append(d.m.Spans, SpanFiles{Start: start, End: b})
		start = b
	}
	d.m.Spans = append(d.m.Spans, SpanFiles{Start: start})
	switch {
	case (cut.Kind == Full) != (chain == ""):
		return nil, fmt.Errorf("backup: a backup %s in chain %q", cut.Kind, chain)
	case cut.Kind == Full:
		// Two full backups of the same second and revision are one.
		d.m.Chain = fmt.Sprintf("%s-%d", cut.Time.UTC().Format(chainTime), cut.Revision)
	default:
		c, err := r.chain(ctx, cluster, chain)
		if err != nil {
			return nil, err
		}
		last, err := r.last(ctx, c)
		if err != nil {
			return nil, err
		}
		if last.Revision != cut.Previous {
			return nil, fmt.Errorf("chain %s ends at revision %d, the cut begins above %d: make a full backup", chain, last.Revision, cut.Previous)
		}
		d.m.Number, d.m.PreviousManifest = last.Number+1, last.sha256
	}
	if err := d.m.check(); err != nil {
		return nil, fmt.Errorf("backup: %w", err)
	}
	err := r.write(ctx, d.folder()+draftFile, &d.m)
	switch {
	case errors.Is(err, target.ErrExists) && cut.Kind == Full:
		return nil, fmt.Errorf("%w: a full backup of the same revision %d began within the same second, so chain %s has what this one would have: "+
			"wait until it is finished, or begin another one a second later", ErrTaken, cut.Revision, d.m.Chain)
	case errors.Is(err, target.ErrExists):
		return nil, fmt.Errorf("%w: somebody else has gone on with chain %s to the same revision %d: "+
			"wait until that backup is finished, or make a full one", ErrTaken, d.m.Chain, cut.Revision)
	case err != nil:
		return nil, err
	}
	return d, nil
}

// taken says that a file that exists was made by another writer.
func taken(err error) error {
	if errors.Is(err, target.ErrExists) {
		return fmt.Errorf("%w: %w", ErrTaken, err)
	}
	return err
}

// Unfinished returns the newest backup of the cluster that was broken off behind the last
// finished one of its chain, nil if there is none.
func (r *Repository) Unfinished(ctx context.Context, cluster keyspace.ClusterID) (*Draft, error) {
	entries, err := r.entries(ctx, cluster, "")
	if err != nil {
		return nil, err
	}
	for _, e := range slices.Backward(entries) {
		if e.manifest != nil {
			return nil, nil //nolint:nilnil // documented: there is none
		}
		var newest keyspace.Revision
		for _, f := range e.files {
			rev, ok := parseRevisionFolder(strings.TrimPrefix(f.Name, e.folder()))
			if ok && path.Base(f.Name) == draftFile {
				newest = max(newest, rev)
			}
		}
		if newest > 0 {
			return r.draft(ctx, e, newest)
		}
	}
	return nil, nil //nolint:nilnil // documented: there is none
}

// draft reads the draft of an entry at a revision, and its records.
func (r *Repository) draft(ctx context.Context, e *entry, rev keyspace.Revision) (*Draft, error) {
	folder := fmt.Sprintf("%s%d/", e.folder(), rev)
	d := new(Draft)
	if _, err := r.read(ctx, folder+draftFile, &d.m); err != nil {
		return nil, err
	}
	if err := d.m.check(); err != nil {
		return nil, fmt.Errorf("%s%s: %w", folder, draftFile, err)
	}
	if got := d.folder(); got != folder {
		return nil, fmt.Errorf("%s%s: %w: it is the draft of %s", folder, draftFile, ErrForeign, got)
	}
	for _, f := range e.files {
		if !strings.HasPrefix(f.Name, folder+recordPrefix) {
			continue
		}
		var rec record
		if _, err := r.read(ctx, f.Name, &rec); err != nil {
			return nil, err
		}
		if f.Name != folder+rec.file() || rec.Span >= len(d.m.Spans) || rec.Segment == nil && !rec.Done {
			return nil, fmt.Errorf("%s: %w: it is %s", f.Name, ErrForeign, rec.file())
		}
		d.records = append(d.records, rec)
	}
	slices.SortFunc(d.records, func(a, b record) int {
		return cmp.Or(cmp.Compare(a.Span, b.Span), cmp.Compare(a.Index, b.Index))
	})
	return d, nil
}

func (rec *record) file() string {
	return fmt.Sprintf("%s%06d-%06d.json", recordPrefix, rec.Span, rec.Index)
}

// Write reads what is missing of the draft from the source, and finishes the backup. If
// another writer finishes it first it fails with ErrTaken.
func (r *Repository) Write(ctx context.Context, d *Draft, src Source, o Options) (*Manifest, error) {
	w := &writer{r: r, d: d, src: src, o: o, spans: make([]SpanFiles, len(d.m.Spans)), limiter: limiter{clock: r.clock, perSecond: o.RateBytesPerSecond}}
	w.o.Parallel = cmp.Or(o.Parallel, defaultParallel)
	w.o.SegmentBytes = cmp.Or(o.SegmentBytes, defaultSegmentBytes)
	w.progress.Spans = len(w.spans)
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(w.o.Parallel)
	for i := range w.spans {
		g.Go(func() error {
			// A node on the same machine has the processors first.
			background.LowPriority()
			return w.span(gctx, i)
		})
	}
	if err := g.Wait(); err != nil {
		return nil, taken(err)
	}
	m := d.m
	m.Spans, m.Sum, m.StoredBytes = w.spans, block.Sum{}, 0
	for _, s := range m.Spans {
		for _, seg := range s.Segments {
			m.Sum.Merge(seg.Sum)
			m.StoredBytes += seg.Bytes
		}
	}
	m.Finished = r.clock.Wall().UTC().Truncate(time.Second)
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("backup: %w", err)
	}
	if err := r.write(ctx, m.folder()+manifestFile, &m); err != nil {
		return nil, taken(err)
	}
	w.tidy(ctx)
	return &m, nil
}

// writer is one Write.
type writer struct {
	r       *Repository
	d       *Draft
	src     Source
	o       Options
	spans   []SpanFiles // each belongs to the goroutine of its span
	limiter limiter

	mu       sync.Mutex
	progress Progress
}

// advance counts, and tells of it.
func (w *writer) advance(spans int, s block.Sum, stored int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.progress.SpansDone += spans
	w.progress.Versions += s.Versions
	w.progress.Bytes += s.Bytes
	w.progress.StoredBytes += stored
	if w.o.Progress != nil {
		w.o.Progress(w.progress)
	}
}

// span writes what is missing of a span.
func (w *writer) span(ctx context.Context, i int) error {
	s := &spanWriter{w: w, i: i, files: &w.spans[i]}
	s.files.Start, s.files.End = w.d.m.Spans[i].Start, w.d.m.Spans[i].End
	s.span = s.files.span()
	rest, done := s.resume()
	if !done {
		s.limits = w.d.m.limits(rest)
		err := w.src.Read(ctx, rest, func(b []byte, vs []mvcc.Version) error { return s.add(ctx, b, vs) })
		if err != nil {
			err = fmt.Errorf("read span %s: %w", rest, err)
		} else {
			err = s.cut(ctx, true)
		}
		if err != nil {
			return s.abort(err)
		}
	}
	w.advance(1, block.Sum{}, 0)
	return nil
}

// spanWriter writes one span.
type spanWriter struct {
	w      *writer
	i      int
	span   keyspace.Span
	files  *SpanFiles
	limits limits
	seg    *segmentWriter // nil between two segments
	index  int            // of the next record
	last   []byte         // the highest key so far
}

// resume takes over what an earlier run has finished, and returns the rest of the span. done
// says that there is none.
func (s *spanWriter) resume() (rest keyspace.Span, done bool) {
	rest = s.span
	for _, rec := range s.w.d.records {
		if rec.Span != s.i || rec.Index != s.index {
			continue // of another span, or behind one that is missing
		}
		s.index++
		if rec.Segment != nil {
			s.files.Segments = append(s.files.Segments, *rec.Segment)
			rest.Start = keyspace.Next(rec.Segment.Last)
			s.w.advance(0, rec.Segment.Sum, rec.Segment.Bytes)
		}
		if rec.Done {
			return rest, true
		}
	}
	return rest, false
}

// add appends a block. A segment ends only between two keys, so that another run can go on
// behind its last one.
func (s *spanWriter) add(ctx context.Context, b []byte, vs []mvcc.Version) error {
	if err := s.limits.check(vs, s.last); err != nil {
		return err
	}
	var sum block.Sum
	for i := range vs {
		sum.Add(&vs[i])
	}
	if s.seg != nil && s.seg.seg.Bytes >= s.w.o.SegmentBytes && !bytes.Equal(s.last, vs[0].Key) {
		if err := s.cut(ctx, false); err != nil {
			return err
		}
	}
	if err := s.w.limiter.wait(ctx, len(b)); err != nil {
		return err
	}
	if s.seg == nil {
		file := fmt.Sprintf("%d/%s%06d-%06d-%s", s.w.d.m.Revision, segmentPrefix, s.i, s.index, rand.Text()[:8])
		var err error
		if s.seg, err = s.w.r.newSegment(ctx, s.w.d.m.folder(), file); err != nil {
			return err
		}
	}
	if err := s.seg.add(b, vs, sum); err != nil {
		return err
	}
	s.last = append(s.last[:0], vs[len(vs)-1].Key...)
	s.w.advance(0, sum, int64(len(b)))
	return nil
}

// cut ends the segment and records it. done says that the span has nothing more.
func (s *spanWriter) cut(ctx context.Context, done bool) error {
	rec := record{Span: s.i, Index: s.index, Done: done}
	if s.seg != nil {
		seg, err := s.seg.finish()
		s.seg = nil
		if err != nil {
			return err
		}
		rec.Segment = seg
		s.files.Segments = append(s.files.Segments, *seg)
	}
	s.index++
	return s.w.r.write(ctx, s.w.d.folder()+rec.file(), &rec)
}

// abort ends the segment begun. What it had counts as not written.
func (s *spanWriter) abort(err error) error {
	if s.seg != nil {
		putErr := s.seg.abort(err)
		if !errors.Is(putErr, err) {
			err = errors.Join(err, putErr)
		}
	}
	return err
}

// tidy removes the records, which the manifest has made useless. What it leaves costs
// nothing but room, so errors do not matter.
func (w *writer) tidy(ctx context.Context) {
	var g errgroup.Group
	g.SetLimit(w.o.Parallel)
	for i, s := range w.spans {
		for j := range len(s.Segments) + 1 {
			rec := record{Span: i, Index: j}
			g.Go(func() error { return w.r.target.Delete(ctx, w.d.folder()+rec.file()) })
		}
	}
	_ = g.Wait()
}
