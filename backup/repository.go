package backup

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/keyspace"
)

// Names below the folder of a backup, <cluster>/<chain>/<number>/.
const (
	manifestFile = "manifest.json"
	// Below <revision>/: drafts of backups, records of their segments, and these.
	draftFile     = "draft.json"
	recordPrefix  = "record-"
	segmentPrefix = "segment-"
)

// Repository is a target with backups, of any number of clusters. Its methods may be called
// concurrently, and so may those of other processes on the same target.
type Repository struct {
	target target.Target
	keys   Keys
	clock  clock.Clock
}

// NewRepository returns the Repository of the target.
func NewRepository(t target.Target, k Keys, c clock.Clock) *Repository {
	return &Repository{target: t, keys: k, clock: c}
}

// A Chain is a full backup and the backups on top of it.
type Chain struct {
	Cluster keyspace.ClusterID
	Name    string
	// Backups are the finished ones, by number. Unfinished counts those that are not.
	Backups    []Backup
	Unfinished int
	// StoredBytes is the size of all files.
	StoredBytes int64
	entries     []*entry
}

// End is when the chain's newest backup was taken, zero if there is none that can be read.
func (c *Chain) End() time.Time {
	for _, b := range slices.Backward(c.Backups) {
		if b.Err == nil {
			return b.Manifest.Time
		}
	}
	return time.Time{}
}

// A Backup is a finished backup of a chain.
type Backup struct {
	Number int
	// Revision is that of the name of its folder, 0 if there are several.
	Revision keyspace.Revision
	// Manifest is nil if Err says why it cannot be read.
	Manifest *Manifest
	Err      error
	// sha256 is that of the manifest's file.
	sha256 string
	entry  *entry
}

// entry is the folder of a backup.
type entry struct {
	cluster  keyspace.ClusterID
	chain    string
	number   int
	manifest *target.Object // nil if there is none
	files    []target.Object
}

func (e *entry) folder() string { return backupFolder(e.cluster, e.chain, e.number) }

func backupFolder(cluster keyspace.ClusterID, chain string, number int) string {
	return fmt.Sprintf("%s/%s/%06d/", cluster, chain, number)
}

// revisions are those of the folders below.
func (e *entry) revisions() (revs []keyspace.Revision) {
	for _, f := range e.files {
		name := strings.TrimPrefix(f.Name, e.folder())
		rev, ok := parseRevisionFolder(name)
		if ok && !slices.Contains(revs, rev) {
			revs = append(revs, rev)
		}
	}
	return revs
}

func parseRevisionFolder(name string) (keyspace.Revision, bool) {
	dir, _, ok := strings.Cut(name, "/")
	rev, err := strconv.ParseInt(dir, 10, 64)
	return keyspace.Revision(rev), ok && err == nil && rev > 0
}

// parseName reads the name of a file of a backup.
func parseName(name string) (cluster keyspace.ClusterID, chain string, number int, ok bool) {
	parts := strings.SplitN(name, "/", 4)
	if len(parts) < 4 {
		return 0, "", 0, false
	}
	id, err := strconv.ParseUint(parts[0], 16, 64)
	n, nErr := strconv.Atoi(parts[2])
	cluster = keyspace.ClusterID(id)
	return cluster, parts[1], n, err == nil && nErr == nil && n > 0 &&
		strings.HasPrefix(name, backupFolder(cluster, parts[1], n))
}

// entries returns what there is of a cluster, or of all if it is 0, by cluster, chain and
// number. Files with other names than those of backups are left alone.
func (r *Repository) entries(ctx context.Context, cluster keyspace.ClusterID, chain string) ([]*entry, error) {
	folder := ""
	if cluster != 0 {
		folder = cluster.String() + "/"
		if chain != "" {
			folder += chain + "/"
		}
	}
	byFolder := map[string]*entry{}
	for o, err := range r.target.List(ctx, folder) {
		if err != nil {
			return nil, err
		}
		id, chain, number, ok := parseName(o.Name)
		if !ok {
			continue
		}
		f := backupFolder(id, chain, number)
		e := byFolder[f]
		if e == nil {
			e = &entry{cluster: id, chain: chain, number: number}
			byFolder[f] = e
		}
		if o.Name == f+manifestFile {
			e.manifest = &o
		} else {
			e.files = append(e.files, o)
		}
	}
	return slices.SortedFunc(maps.Values(byFolder), func(a, b *entry) int {
		return cmp.Or(cmp.Compare(a.cluster, b.cluster), compareChains(a.chain, b.chain), cmp.Compare(a.number, b.number))
	}), nil
}

// chainTime is the form of the time in the name of a chain.
const chainTime = "20060102T150405Z"

// begin is what the name of a chain says about its full backup, zero if it says nothing.
func (c *Chain) begin() (at time.Time, rev keyspace.Revision) {
	first, second, _ := strings.Cut(c.Name, "-")
	at, err := time.Parse(chainTime, first)
	n, revErr := strconv.ParseInt(second, 10, 64)
	if err != nil || revErr != nil {
		return time.Time{}, 0
	}
	return at, keyspace.Revision(n)
}

// compareChains compares names of chains by time, then by revision.
func compareChains(a, b string) int {
	aTime, aRev, _ := strings.Cut(a, "-")
	bTime, bRev, _ := strings.Cut(b, "-")
	return cmp.Or(cmp.Compare(aTime, bTime), cmp.Compare(len(aRev), len(bRev)), cmp.Compare(aRev, bRev))
}

// chains groups entries, without reading manifests. chain is a name, or empty for all.
func (r *Repository) chains(ctx context.Context, cluster keyspace.ClusterID, chain string) (chains []Chain, err error) {
	entries, err := r.entries(ctx, cluster, chain)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if n := len(chains); n == 0 || chains[n-1].Cluster != e.cluster || chains[n-1].Name != e.chain {
			chains = append(chains, Chain{Cluster: e.cluster, Name: e.chain})
		}
		c := &chains[len(chains)-1]
		c.entries = append(c.entries, e)
		for _, f := range e.files {
			c.StoredBytes += f.Bytes
		}
		if e.manifest == nil {
			c.Unfinished++
		} else {
			c.StoredBytes += e.manifest.Bytes
		}
	}
	return chains, nil
}

// List returns the chains of a cluster, or of all clusters if it is 0, the oldest first. What
// is wrong with a backup stands in its Err.
func (r *Repository) List(ctx context.Context, cluster keyspace.ClusterID) ([]Chain, error) {
	chains, err := r.chains(ctx, cluster, "")
	for i := range chains {
		if err = r.load(ctx, &chains[i]); err != nil {
			break
		}
	}
	return chains, err
}

// Chain returns one chain of a cluster.
func (r *Repository) Chain(ctx context.Context, cluster keyspace.ClusterID, name string) (*Chain, error) {
	c, err := r.chain(ctx, cluster, name)
	if err == nil {
		err = r.load(ctx, c)
	}
	return c, err
}

// chain is Chain without manifests.
func (r *Repository) chain(ctx context.Context, cluster keyspace.ClusterID, name string) (*Chain, error) {
	chains, err := r.chains(ctx, cluster, name)
	if err != nil {
		return nil, err
	}
	if len(chains) == 0 {
		return nil, fmt.Errorf("no chain %s of cluster %s in %s: backup list shows what is there", name, cluster, r.target)
	}
	return &chains[0], nil
}

// manifestsAtOnce is how many manifests are read at once: a chain that was followed has
// thousands of small ones.
const manifestsAtOnce = 16

// load reads the manifests of a chain and compares each with those before. The error is that
// of the context alone.
func (r *Repository) load(ctx context.Context, c *Chain) error {
	c.Backups = nil
	for _, e := range c.entries {
		if e.manifest != nil {
			c.Backups = append(c.Backups, Backup{Number: e.number, entry: e})
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(manifestsAtOnce)
	for i := range c.Backups {
		g.Go(func() error { return r.loadBackup(gctx, &c.Backups[i]) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for i := range c.Backups {
		b := &c.Backups[i]
		if b.Err != nil {
			continue
		}
		if err := b.follows(c.Backups[:i]); err != nil {
			b.Manifest, b.Err = nil, fmt.Errorf("%s%s: %w", b.entry.folder(), manifestFile, err)
		}
	}
	return nil
}

// loadBackup reads the manifest of a backup. The error is that of the context alone.
func (r *Repository) loadBackup(ctx context.Context, b *Backup) error {
	if revs := b.entry.revisions(); len(revs) == 1 {
		b.Revision = revs[0]
	}
	b.Manifest, b.sha256, b.Err = r.manifest(ctx, b.entry.folder())
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if b.Err == nil {
		b.Revision = b.Manifest.Revision
	}
	return nil
}

// follows refuses a manifest that was not made on top of the last backup of the chain before it.
func (b *Backup) follows(chain []Backup) error {
	if b.Number == 1 {
		return nil
	}
	n := len(chain)
	if n == 0 || chain[n-1].Number != b.Number-1 {
		return fmt.Errorf("backup %d of the chain is missing", b.Number-1)
	}
	before := &chain[n-1]
	switch {
	case before.sha256 != b.Manifest.PreviousManifest:
		return fmt.Errorf("made on top of another backup %d: its manifest has SHA-256 %s, noted %s",
			before.Number, before.sha256, b.Manifest.PreviousManifest)
	case before.Err == nil && before.Manifest.Revision != b.Manifest.Previous:
		return fmt.Errorf("begins above revision %d, backup %d ends at %d", b.Manifest.Previous, before.Number, before.Manifest.Revision)
	}
	return nil
}

// manifest reads the manifest in a folder.
func (r *Repository) manifest(ctx context.Context, folder string) (*Manifest, string, error) {
	m := new(Manifest)
	sum, err := r.read(ctx, folder+manifestFile, m)
	if err != nil {
		return nil, sum, err
	}
	if err := m.check(); err != nil {
		return nil, sum, fmt.Errorf("%s%s: %w", folder, manifestFile, err)
	}
	if got := m.folder(); got != folder {
		return nil, sum, fmt.Errorf("%s%s: %w: it is the manifest of %s", folder, manifestFile, ErrForeign, got)
	}
	return m, sum, nil
}

// folder is where the manifest says that it lies.
func (m *Manifest) folder() string { return fmt.Sprintf("%s/%s/%06d/", m.Cluster, m.Chain, m.Number) }

// read reads a file that write wrote, and returns its SHA-256.
func (r *Repository) read(ctx context.Context, name string, v any) (sum string, err error) {
	body, err := r.target.Get(ctx, name, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = body.Close() }()
	h := sha256.New()
	raw := io.TeeReader(body, h)
	plain, err := r.keys.open(raw)
	if err == nil {
		err = decode(plain, v)
	}
	// The rest belongs to the sum, too.
	if _, copyErr := io.Copy(io.Discard, io.LimitReader(raw, maxManifestBytes)); err == nil {
		err = copyErr
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", name, err)
	}
	return hex.EncodeToString(h.Sum(nil)), err
}

// write creates a file, and fails with target.ErrExists if there is one.
func (r *Repository) write(ctx context.Context, name string, v any) error {
	var b bytes.Buffer
	w, err := r.keys.seal(&b)
	if err == nil {
		_, err = w.Write(encode(v))
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return fmt.Errorf("encrypt %s: %w", name, err)
	}
	return r.target.Put(ctx, name, &b)
}

// Latest returns the newest chain of the cluster that can be gone on with, and the revision
// of its last backup. Without an identity an encrypted chain is known by its names alone.
// It fails with ErrNoChain if there is none.
func (r *Repository) Latest(ctx context.Context, cluster keyspace.ClusterID) (chain string, rev keyspace.Revision, err error) {
	chains, err := r.chains(ctx, cluster, "")
	if err != nil {
		return "", 0, err
	}
	for i := range slices.Backward(chains) {
		last, err := r.last(ctx, &chains[i])
		if errors.Is(err, ErrNoChain) {
			continue
		}
		if err != nil {
			return "", 0, err
		}
		return chains[i].Name, last.Revision, nil
	}
	return "", 0, fmt.Errorf("%w of cluster %s in %s", ErrNoChain, cluster, r.target)
}

// last returns the last backup of a chain, on which another one can be made. It reads no
// other manifest.
func (r *Repository) last(ctx context.Context, c *Chain) (*Backup, error) {
	n := 0
	var last *entry
	for _, e := range c.entries {
		if e.manifest != nil {
			n, last = n+1, e
		}
	}
	if last == nil {
		return nil, fmt.Errorf("chain %s: %w", c.Name, ErrNoChain)
	}
	b := &Backup{Number: last.number, entry: last}
	if err := r.loadBackup(ctx, b); err != nil {
		return nil, err
	}
	var err error
	switch {
	case b.Number != n:
		err = errors.New("a manifest before its last one is missing")
	case b.Err != nil && !errors.Is(b.Err, ErrNoIdentity):
		err = b.Err
	case b.Revision == 0: // two writers have left their folders
		err = ErrNoIdentity
	}
	if err != nil {
		return nil, fmt.Errorf("chain %s cannot be gone on with, make a full backup: %w", c.Name, err)
	}
	return b, nil
}

// ErrNoChain says that a cluster has no finished backup.
var ErrNoChain = errors.New("there is no backup")
