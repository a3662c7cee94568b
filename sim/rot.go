package sim

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/keyspace"
)

// Rot changes a byte of one table of a node. The node meets it, puts its replicas with keys there in
// quarantine, and placement rebuilds them. The next fault waits for that: two nodes with rot may
// have the only two copies of a write.
const Rot Fault = "rot"

const (
	// rotStep bounds the reading of all that a node has.
	rotStep = 5 * time.Second
	// rebuiltWithin is how long a fault waits for replicas to be rebuilt. If they are not, there are no
	// more faults, and the end of the run finds it. A node that has started twice in a row gets no
	// replica before it has run for a third of NodeDeadAfter, 100 s.
	rebuiltWithin = 2 * time.Minute
)

// rot stops a node in order, so that its tables have all it knows, and changes a byte of one of them.
func (n *nemesis) rot() func() error {
	m := n.pick()
	values := n.values(m)
	if len(values) == 0 {
		return func() error { return nil }
	}
	err := m.stop()
	return func() error {
		if err != nil {
			return err
		}
		m.mu.Lock()
		// Below what makes syncs hang: the lock is held, and in virtual time nobody may wait for a lock
		// whose holder waits for the time.
		table, rerr := rotIn(m.disk.mem, dataDir+"/engine", values, n.rng)
		m.mu.Unlock()
		if rerr != nil {
			return rerr
		}
		n.c.logf("nemesis: a byte of node %s's table %q has changed", m.id(), table)
		if err := m.boot(); err != nil {
			return err
		}
		if table != "" {
			n.happened[Rot]++
			n.scrub(m)
		}
		return nil
	}
}

// values are the values of a node's store.
func (n *nemesis) values(m *machine) (values []string) {
	n.c.stores.RLock()
	defer n.c.stores.RUnlock()
	r := m.current()
	if r == nil {
		return nil
	}
	vs, err := readStore(r.core.Store(), keyspace.MaxRevision-1)
	if err != nil {
		n.c.logf("nemesis: node %s: %v", m.id(), err)
	}
	for i := range vs {
		if len(vs[i].Value) >= 4 {
			values = append(values, vs[i].Value)
		}
	}
	return values
}

// rotIn changes a byte of one of the values in one of the tables below a directory. It returns the
// table, or "" if none of the values is found.
func rotIn(fs vfs.FS, dir string, values []string, rng *rand.Rand) (table string, err error) {
	names, err := fs.List(dir)
	if err != nil {
		return "", err
	}
	rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for _, name := range names {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		f, err := fs.OpenReadWrite(fs.PathJoin(dir, name), vfs.WriteCategoryUnspecified)
		if err != nil {
			return "", err
		}
		whole, err := io.ReadAll(f)
		at := -1
		for try := 0; try < 100 && at < 0; try++ {
			at = bytes.Index(whole, []byte(values[rng.IntN(len(values))]))
		}
		if err == nil && at >= 0 {
			table = name
			if _, err = f.WriteAt([]byte{whole[at] ^ 1}, int64(at)); err == nil {
				err = f.Sync()
			}
		}
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil || table != "" {
			return table, err
		}
	}
	return "", nil
}

// scrub has a node read all that it has, as an operator does who compares replicas.
func (n *nemesis) scrub(m *machine) {
	r := m.current()
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(r.ctx, rotStep)
	defer cancel()
	l, err := r.core.Ranges().List(ctx, m.id())
	for i := range l {
		_, herr := r.core.Ranges().HashAt(ctx, m.id(), l[i].Descriptor.Range, keyspace.MaxRevision-1, 0)
		if herr != nil {
			n.c.logf("nemesis: range %s on node %s: %v", l[i].Descriptor.Range, m.id(), herr)
		}
	}
	if err != nil {
		n.c.logf("nemesis: the replicas of node %s: %v", m.id(), err)
	}
}

// awaitRebuilt waits until every range has all its voters, and none of them is in quarantine.
func (n *nemesis) awaitRebuilt() {
	if n.happened[Rot] == 0 {
		return
	}
	rebuilt := func() bool {
		for _, m := range n.c.standing() {
			if r := m.current(); r == nil || r.count(quarantined) > 0 {
				return false
			}
		}
		return fullyReplicated(n.c) == nil
	}
	n.await(rebuiltWithin, rebuilt)
	n.unbuilt = !rebuilt()
}
