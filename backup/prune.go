package backup

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/keyspace"
)

// Retention says what Prune keeps. At least one of the two must be given.
type Retention struct {
	// KeepFull keeps so many of the newest chains, if it is not 0.
	KeepFull int
	// Keep keeps what restores any state of the time since then, if it is not 0: the last one before it too, which was
	// the state until the next.
	Keep time.Duration
}

// Pruned is what Prune has removed, or would remove.
type Pruned struct {
	// Chains are the names of whole chains.
	Chains []string
	// Leftovers counts files that no manifest names: of writers that lost or were given up.
	Leftovers int
	Files     int
	Bytes     int64
}

// leftoverAge is how old files without a manifest must be: their writer might still be
// at work, or be resumed.
const leftoverAge = 7 * 24 * time.Hour

// Prune removes chains of the cluster that the retention does not keep, and old leftovers.
// It removes whole chains only, and always keeps the newest that can be restored. A chain
// that cannot be read is left alone, since what it is worth is not known. A dry run removes
// nothing.
func (r *Repository) Prune(ctx context.Context, cluster keyspace.ClusterID, keep Retention, dryRun bool) (*Pruned, error) {
	if keep.KeepFull < 0 || keep.Keep < 0 || keep.KeepFull == 0 && keep.Keep == 0 {
		return nil, errors.New("prune: say how many chains to keep (--keep-full), or for how long (--keep)")
	}
	if cluster == 0 {
		return nil, errors.New("prune: say of which cluster")
	}
	chains, err := r.List(ctx, cluster)
	if err != nil {
		return nil, err
	}
	now := r.clock.Wall()
	p := new(Pruned)
	whole := 0       // chains so far that are restorable, the newest first
	covered := false // one of them begins before the time to keep: nothing older was a state of it
	for i := range slices.Backward(chains) {
		c := &chains[i]
		ms, err := c.usable()
		switch {
		case errors.Is(err, ErrNoIdentity) || errors.Is(err, ErrWrongIdentity):
			return nil, fmt.Errorf("prune: %w", err)
		case err != nil && whole == 0 || len(ms) == 0:
			// Nothing newer stands in for it, or it has nothing but leftovers.
		default:
			whole++
			byNumber := keep.KeepFull == 0 || whole > keep.KeepFull
			byAge := keep.Keep == 0 || covered && now.Sub(c.End()) > keep.Keep
			covered = covered || err == nil && now.Sub(ms[0].Time) >= keep.Keep
			if whole > 1 && byNumber && byAge && err == nil {
				if err := r.removeChain(ctx, c, p, dryRun); err != nil {
					return p, err
				}
				continue
			}
		}
		if err := r.removeLeftovers(ctx, c, now, p, dryRun); err != nil {
			return p, err
		}
	}
	return p, nil
}

// removeChain removes the manifests first, the newest of them first of all. So what a crash
// leaves is a shorter chain and leftovers, and never a manifest without its segments.
func (r *Repository) removeChain(ctx context.Context, c *Chain, p *Pruned, dryRun bool) error {
	p.Chains = append(p.Chains, c.Name)
	for _, e := range slices.Backward(c.entries) {
		if e.manifest == nil {
			continue
		}
		if err := r.remove(ctx, []target.Object{*e.manifest}, p, dryRun); err != nil {
			return err
		}
	}
	for _, e := range c.entries {
		if err := r.remove(ctx, e.files, p, dryRun); err != nil {
			return err
		}
	}
	return nil
}

// removeLeftovers removes old files of a chain that no manifest names.
func (r *Repository) removeLeftovers(ctx context.Context, c *Chain, now time.Time, p *Pruned, dryRun bool) error {
	named := map[string]bool{}
	for _, b := range c.Backups {
		if b.Err != nil {
			return nil
		}
		for _, s := range b.Manifest.Spans {
			for _, seg := range s.Segments {
				named[b.Manifest.folder()+seg.File] = true
			}
		}
		// It says without an identity which revision the backup has.
		named[fmt.Sprintf("%s%d/%s", b.Manifest.folder(), b.Manifest.Revision, draftFile)] = true
	}
	for _, e := range c.entries {
		var old []target.Object
		young := false
		for _, f := range e.files {
			if now.Sub(f.Modified) <= leftoverAge {
				young = true
			}
			if !named[f.Name] {
				old = append(old, f)
			}
		}
		if young {
			continue // somebody may be at work here
		}
		p.Leftovers += len(old)
		if err := r.remove(ctx, old, p, dryRun); err != nil {
			return err
		}
	}
	return nil
}

// remove removes files, a few at a time.
func (r *Repository) remove(ctx context.Context, files []target.Object, p *Pruned, dryRun bool) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(defaultParallel)
	for _, f := range files {
		p.Files++
		p.Bytes += f.Bytes
		if !dryRun {
			g.Go(func() error { return r.target.Delete(ctx, f.Name) })
		}
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	return nil
}

// Folder is the name of a chain's folder in its target.
func (c *Chain) Folder() string { return strings.Join([]string{c.Cluster.String(), c.Name, ""}, "/") }
