package sim

import (
	"fmt"
	"slices"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/sim/judge"
)

// readDisks reads all versions from the disks of stopped nodes. The disks must agree,
// except for versions that a compaction may have removed from some; those come from
// kept.
func readDisks(c *cluster, kept *keptVersions) ([]judge.Version, error) {
	machines := c.standing()
	all := make([][]judge.Version, len(machines))
	for i, m := range machines {
		var err error
		if all[i], err = readDisk(m); err != nil {
			return nil, fmt.Errorf("sim: disk of node %s: %w", m.id(), err)
		}
	}
	all = kept.divide(all)
	for i := range machines {
		if len(c.machines) > 3 {
			break // no disk has all ranges
		}
		if d := judge.FirstDifference(all[0], all[i]); d != "" {
			return nil, fmt.Errorf("sim: the disks of nodes %s and %s differ: %s", machines[0].id(), machines[i].id(), d)
		}
	}
	return merge(all), nil
}

func readDisk(m *machine) (vs []judge.Version, err error) {
	e, err := engine.Open(engine.Options{FS: m.disk.mem, Dir: dataDir + "/engine", Clock: m.clock, BallastBytes: -1, LowSpaceBytes: -1})
	if err != nil {
		return nil, err
	}
	defer func() {
		if cerr := e.Close(); err == nil {
			err = cerr
		}
	}()
	return readStore(e, keyspace.MaxRevision-1)
}

// readStore reads all versions up to a revision.
func readStore(r engine.Reader, to keyspace.Revision) (vs []judge.Version, err error) {
	for from := keyspace.Revision(0); from <= to; {
		next, err := mvcc.History(r, mvcc.HistoryOptions{From: from, To: to}, func(v *mvcc.Version) error {
			vs = append(vs, judge.Version{
				Key: string(v.Key), Value: string(v.Value), Mod: int64(v.Mod), Create: int64(v.Create), Version: v.Version, Deleted: v.Tombstone,
				Lease: int64(v.Lease), Sub: v.Sub,
			})
			return nil
		})
		if err != nil {
			return nil, err
		}
		from = next
	}
	return vs, nil
}

// merge unites the versions of the disks. If two differ in a version it keeps both,
// which the replay rejects.
func merge(all [][]judge.Version) []judge.Version {
	set := map[judge.Version]bool{}
	for _, vs := range all {
		for _, v := range vs {
			set[v] = true
		}
	}
	vs := make([]judge.Version, 0, len(set))
	for v := range set {
		vs = append(vs, v)
	}
	slices.SortFunc(vs, judge.CompareVersions)
	return vs
}
