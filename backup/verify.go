package backup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/keyspace"
)

// A Report says what Verify has found.
type Report struct {
	Chains, Backups, Segments int
	StoredBytes               int64
	// Sum is that of all versions that were read; only a deep verification reads them.
	Sum block.Sum
	// Problems are what is wrong; at most maxProblems of them, the others are counted.
	Problems     []Problem
	MoreProblems int
}

const maxProblems = 1000

// A Problem is something wrong with a file.
type Problem struct {
	Cluster keyspace.ClusterID
	Chain   string
	Number  int
	Err     error
}

// String returns the problem in words.
func (p Problem) String() string {
	return fmt.Sprintf("cluster %s, chain %s, backup %d: %v", p.Cluster, p.Chain, p.Number, p.Err)
}

// Verify checks backups of a cluster (all clusters if it is 0) and of a chain (all if it is
// empty): that each manifest can be read and was made on top of the one before, and that each
// segment is there with its size. deep reads every segment, and compares hashes, sums, order
// and bounds of all versions. The error is one of the target as a whole; what is wrong with
// files stands in the report.
func (r *Repository) Verify(ctx context.Context, cluster keyspace.ClusterID, chain string, deep bool) (*Report, error) {
	chains, err := r.chains(ctx, cluster, "")
	if err != nil {
		return nil, err
	}
	v := &verifier{r: r, deep: deep}
	for i := range chains {
		c := &chains[i]
		if chain != "" && c.Name != chain {
			continue
		}
		v.report.Chains++
		if err := r.load(ctx, c); err != nil {
			return nil, err
		}
		if err := v.chain(ctx, c); err != nil {
			return nil, err
		}
	}
	if v.report.Chains == 0 {
		return nil, fmt.Errorf("%w to verify in %s", ErrNoChain, r.target)
	}
	return &v.report, nil
}

type verifier struct {
	r    *Repository
	deep bool

	mu     sync.Mutex
	report Report
}

func (v *verifier) problem(c *Chain, number int, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.report.Problems) == maxProblems {
		v.report.MoreProblems++
		return
	}
	v.report.Problems = append(v.report.Problems, Problem{c.Cluster, c.Name, number, err})
}

func (v *verifier) chain(ctx context.Context, c *Chain) error {
	if len(c.Backups) > 0 && c.Backups[0].Number != 1 {
		v.problem(c, 1, errors.New("the full backup is missing"))
	}
	for i := range c.Backups {
		b := &c.Backups[i]
		v.report.Backups++
		if b.Err != nil {
			v.problem(c, b.Number, b.Err)
			continue
		}
		if err := v.backup(ctx, c, b, b.entry); err != nil {
			return err
		}
	}
	return nil
}

func (v *verifier) backup(ctx context.Context, c *Chain, b *Backup, e *entry) error {
	sizes := map[string]int64{}
	for _, f := range e.files {
		sizes[f.Name] = f.Bytes
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(defaultParallel)
	for i := range b.Manifest.Spans {
		s := &b.Manifest.Spans[i]
		for j := range s.Segments {
			seg := &s.Segments[j]
			v.mu.Lock()
			v.report.Segments++
			v.report.StoredBytes += seg.Bytes
			v.mu.Unlock()
			size, there := sizes[e.folder()+seg.File]
			switch {
			case !there:
				v.problem(c, b.Number, fmt.Errorf("segment %s: %w", seg.File, target.ErrNotFound))
			case size != seg.Bytes:
				v.problem(c, b.Number, fmt.Errorf("segment %s: %d bytes, the manifest has %d", seg.File, size, seg.Bytes))
			case v.deep:
				g.Go(func() error {
					if err := v.segment(ctx, e.folder(), seg, b.Manifest.limits(s.span())); err != nil {
						v.problem(c, b.Number, err)
					}
					return context.Cause(ctx)
				})
			}
		}
	}
	return g.Wait()
}

// segment reads all of a segment.
func (v *verifier) segment(ctx context.Context, folder string, seg *Segment, l limits) error {
	s, err := v.r.openSegment(ctx, folder, seg, l)
	if err != nil {
		return err
	}
	defer func() { _ = s.close() }()
	for err == nil {
		_, err = s.next()
	}
	if !errors.Is(err, io.EOF) {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Sum.Merge(seg.Sum)
	return nil
}
