package recovery

import (
	"context"
	"errors"
	"fmt"
	"io"
	iofs "io/fs"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// ForcePlanName is the file in the data directory that keeps the plan of Force. It may be deleted once the
// node has started.
const ForcePlanName = "force-new-cluster.plan.json"

// Force makes a cluster of one node of a directory: it collects, plans and applies with all other nodes
// dead, as etcd's --force-new-cluster does. It returns nil without an error
// if the node needs nobody else already. Its plan is durable before anything is changed: so after a crash
// Force goes on with it.
// Spans of which the node has no copy are not given up: the error names them.
func Force(ctx context.Context, d Dir, now time.Time) (*Plan, error) {
	c, err := Collect(d)
	if err != nil {
		return nil, err
	}
	p, err := d.forcePlan(c)
	if errors.Is(err, ErrNothing) {
		return nil, nil
	}
	if err != nil {
		return p, err
	}
	_, err = Apply(ctx, d, p, now)
	return p, err
}

// forcePlan returns the plan that was begun here, or makes one and keeps it.
func (d Dir) forcePlan(c *Collected) (*Plan, error) {
	if c.Interrupted != "" {
		// MakePlan says what to do where it is not the plan that is kept here.
		if p, err := d.readPlan(); err == nil && p.ID == c.Interrupted {
			return p, nil
		} else if err != nil && !errors.Is(err, iofs.ErrNotExist) {
			return nil, err
		}
	}
	var o PlanOptions
	if c.Placement != nil {
		for _, n := range c.Placement.Nodes {
			if n.Node != c.Node && n.State != "removed" {
				o.Dead = append(o.Dead, n.Node.node().String())
			}
		}
	}
	p, err := MakePlan([]*Collected{c}, o)
	if err != nil {
		return p, err
	}
	return p, d.keepPlan(p)
}

// readPlan reads the plan that keepPlan has written.
func (d Dir) readPlan() (*Plan, error) {
	path := d.fs().PathJoin(d.Data, ForcePlanName)
	f, err := d.fs().Open(path)
	if err != nil {
		return nil, fmt.Errorf("recovery: open %s: %w", path, err)
	}
	b, err := io.ReadAll(io.LimitReader(f, MaxFileBytes+1))
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("recovery: read %s: %w", path, err)
	}
	p, err := DecodePlan(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// keepPlan makes the plan durable, in place of one that is there.
func (d Dir) keepPlan(p *Plan) error {
	b, err := p.Encode()
	if err != nil {
		return err
	}
	fs, path := d.fs(), d.fs().PathJoin(d.Data, ForcePlanName)
	if err := writeDurable(fs, d.Data, path, b); err != nil {
		return fmt.Errorf("recovery: write %s: %w", path, err)
	}
	return nil
}

func writeDurable(fs vfs.FS, dir, path string, b []byte) error {
	f, err := fs.Create(path+".new", vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = fs.Rename(path+".new", path)
	}
	if err != nil {
		return errors.Join(err, fs.Remove(path+".new"))
	}
	at, err := fs.OpenDir(dir)
	if err != nil {
		return err
	}
	return errors.Join(at.Sync(), at.Close())
}
