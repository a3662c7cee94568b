package backup

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"filippo.io/age"

	"github.com/skeindb/skein/backup/block"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
)

// When is a state, by its revision or by a time; the zero When is that of the newest backup.
type When struct {
	// Revision is the state at it, Time the last known state at or before it.
	Revision keyspace.Revision
	Time     time.Time
}

// A Plan says which backups make a state.
type Plan struct {
	Cluster keyspace.ClusterID
	Chain   string
	// Revision is that of the state. Compacted is the revision from which on its history is
	// whole: what lies below is no longer there.
	Revision, Compacted keyspace.Revision
	// Manifests are those that are read, the full one first.
	Manifests []*Manifest
	// Leases are those alive at the last backup, and at the one before if the state lies
	// between both: a lease may have been revoked after the state. Granted in between, and
	// revoked, it is in neither.
	Leases []Lease
	// Users are those of the last backup.
	Users []byte
	// TempDir is where Versions merges more than 64 backups. Empty, as Plan leaves it, is the system's.
	TempDir string
}

// Plan chooses the backups for a state of a cluster. Cluster 0 is the only one that the
// target has.
func (r *Repository) Plan(ctx context.Context, cluster keyspace.ClusterID, w When) (*Plan, error) {
	chains, err := r.chains(ctx, cluster, "")
	if err != nil {
		return nil, err
	}
	if err := oneCluster(chains); err != nil {
		return nil, fmt.Errorf("%s: %w", r.target, err)
	}
	var broken []error
	var newest *Manifest
	for _, c := range w.order(chains) {
		if err := r.load(ctx, c); err != nil {
			return nil, err
		}
		ms, err := c.usable()
		if err != nil {
			broken = append(broken, err)
		}
		if len(ms) == 0 {
			continue
		}
		if newest == nil || ms[len(ms)-1].Revision > newest.Revision {
			newest = ms[len(ms)-1]
		}
		if p := choose(ms, w); p != nil {
			p.Cluster, p.Chain = c.Cluster, c.Name
			return p, nil
		}
	}
	switch {
	case len(broken) > 0:
		return nil, fmt.Errorf("no whole chain has %s: %w", w, errors.Join(broken...))
	case newest == nil:
		return nil, fmt.Errorf("%w in %s", ErrNoChain, r.target)
	default:
		return nil, fmt.Errorf("no backup has %s; the newest is revision %d of %s, and backup list shows all",
			w, newest.Revision, newest.Time.Format(time.RFC3339))
	}
}

// order returns chains in the order in which they are asked: those that begin before the
// state, the newest first; then the others, whose full backup may have it in its history.
// So few manifests are read.
func (w When) order(chains []Chain) (out []*Chain) {
	var later []*Chain
	for i := range slices.Backward(chains) {
		c := &chains[i]
		at, rev := c.begin()
		if w.Revision != 0 && rev > w.Revision || w.Revision == 0 && !w.Time.IsZero() && at.After(w.Time) {
			later = append(later, c)
		} else {
			out = append(out, c)
		}
	}
	slices.Reverse(later)
	return append(out, later...)
}

// String returns the point in words.
func (w When) String() string {
	switch {
	case w.Revision != 0:
		return fmt.Sprintf("revision %d", w.Revision)
	case !w.Time.IsZero():
		return "a state at or before " + w.Time.Format(time.RFC3339)
	}
	return "a state"
}

func oneCluster(chains []Chain) error {
	for i := range chains {
		if chains[i].Cluster != chains[0].Cluster {
			return fmt.Errorf("there are backups of several clusters, %s and %s among them: say of which", chains[0].Cluster, chains[i].Cluster)
		}
	}
	return nil
}

// usable returns the manifests of the chain up to the first that cannot be used, and why.
func (c *Chain) usable() (ms []*Manifest, err error) {
	for i := range c.Backups {
		b := &c.Backups[i]
		if b.Err != nil {
			return ms, b.Err
		}
		if b.Number != i+1 {
			return ms, fmt.Errorf("chain %s: backup %d is missing", c.Name, i+1)
		}
		ms = append(ms, b.Manifest)
	}
	return ms, nil
}

// choose returns the plan that a chain has for a point, nil if it has none.
func choose(ms []*Manifest, w When) *Plan {
	rev := w.Revision
	switch {
	case rev != 0:
	case w.Time.IsZero():
		rev = ms[len(ms)-1].Revision
	default:
		if rev = revisionAt(ms, w.Time); rev == 0 {
			return nil
		}
	}
	i, _ := slices.BinarySearchFunc(ms, rev, func(m *Manifest, rev keyspace.Revision) int { return cmp.Compare(m.Revision, rev) })
	if i == len(ms) {
		return nil
	}
	last := ms[i]
	switch {
	case rev == last.Revision:
	case last.Kind == Tombstones, last.Kind == Full && rev < last.Compacted:
		return nil
	}
	p := &Plan{Revision: rev, Manifests: ms[:i+1], Leases: slices.Clone(last.Leases), Users: last.Users}
	for _, m := range p.Manifests {
		if m.Kind == Tombstones {
			p.Compacted = m.Revision
		} else if m.Compacted <= rev {
			p.Compacted = max(p.Compacted, m.Compacted)
		}
	}
	if i > 0 && rev < last.Revision {
		for _, l := range ms[i-1].Leases {
			if !slices.ContainsFunc(p.Leases, func(o Lease) bool { return o.ID == l.ID }) {
				p.Leases = append(p.Leases, l)
			}
		}
	}
	return p
}

// revisionAt returns the highest revision that the chain knows, and can restore, at or before
// the time, 0 if there is none.
func revisionAt(ms []*Manifest, at time.Time) (rev keyspace.Revision) {
	for _, m := range ms {
		if !m.Time.After(at) {
			rev = m.Revision
			continue
		}
		for _, p := range m.Points {
			restorable := m.Kind == Versions && p.Revision > m.Previous || m.Kind == Full && p.Revision >= m.Compacted
			if restorable && !p.Time.After(at) {
				rev = max(rev, p.Revision)
			}
		}
		break // all that follow are later
	}
	return rev
}

// maxOpen bounds the backups that are read at once: each has a connection, or a file, and up to
// a MiB of memory.
const maxOpen = 64

// Versions returns the versions of the plan's state in the span, by key, the newest of a key
// first: what the state's compacted revision leaves of them. A version is valid until the
// next. Segments that are read to their end are compared with their manifests.
//
// A plan of more than 64 backups is merged in several steps, with temporary files of the size
// of all backups but the full one, in the plan's TempDir. They are encrypted if the backups are.
func (r *Repository) Versions(ctx context.Context, p *Plan, span keyspace.Span) iter.Seq2[*mvcc.Version, error] {
	return func(yield func(*mvcc.Version, error) bool) {
		var in []input
		for _, m := range p.Manifests {
			in = append(in, input{r, m})
		}
		t := &temporary{keys: r.keys, clock: r.clock, in: p.TempDir}
		defer t.remove()
		for len(in) > maxOpen {
			var err error
			if in, err = t.shrink(ctx, in, span); err != nil {
				yield(nil, err)
				return
			}
		}
		rule := compactionRule{at: p.Revision, compacted: p.Compacted}
		for v, err := range merge(ctx, in, span) {
			if err != nil {
				yield(nil, err)
				return
			}
			if rule.keeps(v) && !yield(v, nil) {
				return
			}
		}
	}
}

// input is one backup that is merged with others.
type input struct {
	r *Repository
	m *Manifest
}

// merge returns the versions of all inputs in the span, by key.
func merge(ctx context.Context, in []input, span keyspace.Span) iter.Seq2[*mvcc.Version, error] {
	return func(yield func(*mvcc.Version, error) bool) {
		m := &merger{}
		defer m.close()
		for _, i := range in {
			if err := m.add(newStream(ctx, i.r, i.m, span)); err != nil {
				yield(nil, err)
				return
			}
		}
		for m.Len() > 0 {
			if v := m.streams[0].head(); span.Contains(v.Key) && !yield(v, nil) {
				return
			}
			if err := m.next(); err != nil {
				yield(nil, err)
				return
			}
		}
	}
}

// temporary has merged backups in files.
type temporary struct {
	keys  Keys
	clock clock.Clock
	in    string // the directory to make one in
	dir   string
	r     *Repository // nil until the first
	n     int
}

func (t *temporary) remove() {
	if t.dir != "" {
		_ = os.RemoveAll(t.dir)
	}
}

func (t *temporary) open() (err error) {
	if t.dir, err = os.MkdirTemp(t.in, "skein-backup-"); err != nil {
		return fmt.Errorf("folder for the merge: %w", err)
	}
	abs, err := filepath.Abs(t.dir)
	if err != nil {
		return fmt.Errorf("folder for the merge: %w", err)
	}
	dir, err := target.Open("file://"+filepath.ToSlash(abs), t.clock)
	if err != nil {
		return err
	}
	var k Keys
	if len(t.keys.identities) > 0 {
		id, err := age.GenerateX25519Identity()
		if err != nil {
			return err
		}
		k = Keys{recipients: []age.Recipient{id.Recipient()}, identities: []age.Identity{id}}
	}
	t.r = NewRepository(dir, k, t.clock)
	return nil
}

// shrink merges all inputs but the first, maxOpen at a time.
func (t *temporary) shrink(ctx context.Context, in []input, span keyspace.Span) ([]input, error) {
	if t.r == nil {
		if err := t.open(); err != nil {
			return nil, err
		}
	}
	out := in[:1:1]
	for some := range slices.Chunk(in[1:], maxOpen) {
		m, err := t.merge(ctx, some, span)
		if err != nil {
			return nil, err
		}
		out = append(out, input{t.r, m})
	}
	return out, nil
}

// merge writes what the inputs have in the span into one segment, and returns a manifest of it.
func (t *temporary) merge(ctx context.Context, in []input, span keyspace.Span) (*Manifest, error) {
	t.n++
	m := &Manifest{Cluster: "0", Chain: "merged", Number: t.n, Spans: []SpanFiles{{}}, Cut: Cut{
		Kind: Versions, Previous: in[0].m.Previous, Revision: in[len(in)-1].m.Revision,
	}}
	seg, err := t.r.newSegment(ctx, m.folder(), "segment")
	if err != nil {
		return nil, err
	}
	w := block.NewWriter(block.ByKey, func(b []byte, s block.Sum) error {
		vs, _, err := block.Decode(b)
		if err != nil {
			return err
		}
		return seg.add(b, vs, s)
	})
	for v, err := range merge(ctx, in, span) {
		if err == nil {
			err = w.Add(v)
		}
		if err != nil {
			return nil, seg.abort(err)
		}
	}
	if err := w.Flush(); err != nil {
		return nil, seg.abort(err)
	}
	done, err := seg.finish()
	if err != nil {
		return nil, err
	}
	if done.Sum.Versions > 0 {
		m.Spans[0].Segments = []Segment{*done}
	}
	return m, nil
}

// compactionRule is that of package mvcc: it is asked version by version.
type compactionRule struct {
	at, compacted keyspace.Revision
	key           []byte
	settled       bool // the newest version of key at or below compacted was there
}

func (c *compactionRule) keeps(v *mvcc.Version) bool {
	if v.Mod > c.at {
		return false
	}
	if v.Mod > c.compacted {
		return true
	}
	if c.settled && bytes.Equal(c.key, v.Key) {
		return false
	}
	c.key, c.settled = append(c.key[:0], v.Key...), true
	return !v.Tombstone || v.Mod == c.compacted
}

// stream has the versions of one backup, by key.
type stream struct {
	ctx  context.Context
	r    *Repository
	m    *Manifest
	span keyspace.Span
	// todo are the segments to come, seg is the one that is read.
	todo []todoSegment
	seg  *segmentReader
	vs   []mvcc.Version
}

type todoSegment struct {
	seg  *Segment
	span keyspace.Span
}

func newStream(ctx context.Context, r *Repository, m *Manifest, span keyspace.Span) *stream {
	s := &stream{ctx: ctx, r: r, m: m, span: span}
	for i := range m.Spans {
		f := &m.Spans[i]
		for j := range f.Segments {
			g := &f.Segments[j]
			if span.Overlaps(keyspace.Span{Start: g.First, End: keyspace.Next(g.Last)}) {
				s.todo = append(s.todo, todoSegment{g, f.span()})
			}
		}
	}
	return s
}

func (s *stream) head() *mvcc.Version { return &s.vs[0] }

// advance moves to the next version. It returns io.EOF at the end.
func (s *stream) advance() error {
	if len(s.vs) > 1 {
		s.vs = s.vs[1:]
		return nil
	}
	s.vs = nil
	for {
		if s.seg == nil {
			if len(s.todo) == 0 {
				return io.EOF
			}
			var err error
			t := s.todo[0]
			s.todo = s.todo[1:]
			if s.seg, err = s.r.openSegment(s.ctx, s.m.folder(), t.seg, s.m.limits(t.span)); err != nil {
				return s.failed(err)
			}
		}
		vs, err := s.seg.next()
		if err == nil {
			s.vs = vs
			return nil
		}
		closeErr := s.seg.close()
		s.seg = nil
		if !errors.Is(err, io.EOF) {
			return s.failed(err)
		}
		if closeErr != nil {
			return s.failed(closeErr)
		}
	}
}

func (s *stream) failed(err error) error {
	return fmt.Errorf("backup %s: %w", strings.TrimSuffix(s.m.folder(), "/"), err)
}

func (s *stream) close() {
	if s.seg != nil {
		_ = s.seg.close()
		s.seg = nil
	}
}

// merger is a heap of streams by their next version.
type merger struct{ streams []*stream }

// Len implements heap.Interface.
func (m *merger) Len() int { return len(m.streams) }

// Less implements heap.Interface.
func (m *merger) Less(i, j int) bool {
	a, b := m.streams[i].head(), m.streams[j].head()
	return cmp.Or(bytes.Compare(a.Key, b.Key), cmp.Compare(b.Mod, a.Mod)) < 0
}

// Swap implements heap.Interface.
func (m *merger) Swap(i, j int) { m.streams[i], m.streams[j] = m.streams[j], m.streams[i] }

// Push implements heap.Interface.
func (m *merger) Push(s any) { m.streams = append(m.streams, s.(*stream)) } //nolint:forcetypeassert // only add pushes

// Pop implements heap.Interface.
func (m *merger) Pop() any {
	n := len(m.streams) - 1
	s := m.streams[n]
	m.streams = m.streams[:n]
	return s
}

func (m *merger) add(s *stream) error {
	switch err := s.advance(); {
	case err == nil:
		heap.Push(m, s)
		return nil
	case errors.Is(err, io.EOF):
		return nil
	default:
		s.close()
		return err
	}
}

// next moves behind the lowest version. Two backups of a chain have no revision in common,
// so no version is there twice.
func (m *merger) next() error {
	s := m.streams[0]
	switch err := s.advance(); {
	case err == nil:
		heap.Fix(m, 0)
		return nil
	case errors.Is(err, io.EOF):
		heap.Pop(m)
		return nil
	default:
		return err
	}
}

func (m *merger) close() {
	for _, s := range m.streams {
		s.close()
	}
}
