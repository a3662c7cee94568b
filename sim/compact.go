package sim

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/sim/judge"
)

// keptVersions are versions that were read from the nodes' stores before a compaction
// that may remove them. The replay needs every version there ever was.
type keptVersions struct {
	set map[judge.Version]bool
	// compacted is the highest revision of a compaction attempt.
	compacted int64
}

// compactLoop compacts now and then until stop is closed.
func (n *nemesis) compactLoop(stop <-chan struct{}, wg *sync.WaitGroup, cl *client) {
	n.kept = &keptVersions{set: map[judge.Version]bool{}}
	n.beside(stop, wg, repeat{times: n.c.cfg.Compactions, least: 2 * time.Second, spread: 4 * time.Second, stream: 4}, func(rng *rand.Rand) {
		n.compact(cl, rng)
	})
}

// compact reads everything at the present revision. Once that is answered, no change at
// or below the revision can still arrive. Then it copies the versions from the stores
// and compacts. It does nothing if a node came or went meanwhile: that node may have
// been the only one to have applied a change.
func (n *nemesis) compact(cl *client, rng *rand.Rand) {
	m := n.c.machines[rng.IntN(len(n.c.machines))]
	runs := n.c.runs()
	r := runs[m]
	if r == nil {
		return
	}
	o := cl.do(m, r, &pb.RangeRequest{Key: []byte{0}, RangeEnd: []byte{0}}, 2*time.Second)
	if o == nil || o.Outcome != judge.Answered || o.Revision() < 3 || !n.keepVersions(runs, o.Revision()) {
		return
	}
	at := max(2, o.Revision()-rng.Int64N(60))
	if at > n.kept.compacted {
		n.kept.compacted = at
	}
	// A physical compaction waits until no transaction over several ranges can read the
	// versions. Crashes interrupt it, so a logical one must succeed first.
	physical, patience := rng.IntN(2) == 0, 3*time.Second
	if physical = physical && n.compactions.Load() > 0; physical {
		patience = 25 * time.Second
	}
	c := cl.do(m, r, &pb.CompactionRequest{Revision: at, Physical: physical}, patience)
	if c != nil && c.Outcome == judge.Answered {
		n.compactions.Add(1)
		n.c.logf("nemesis: compacted up to %d", at)
	}
}

// keepVersions reads the stores of the runs up to a revision, if the runs are still the
// same.
func (n *nemesis) keepVersions(runs map[*machine]*run, to int64) bool {
	n.c.stores.RLock()
	defer n.c.stores.RUnlock()
	if !maps.Equal(runs, n.c.runs()) {
		return false
	}
	for m, r := range runs {
		vs, err := readStore(r.core.Store(), keyspace.Revision(to))
		if engine.IsCorruption(err) {
			return false // Rot
		}
		if err != nil {
			// A second look says whether the disk has it so.
			_, again := readStore(r.core.Store(), keyspace.Revision(to))
			panic(fmt.Sprintf("sim: read the store of node %s after %d flipped bytes: %v; once more: %v", m.id(), n.happened[Rot], err, again))
		}
		for _, v := range vs {
			n.kept.set[v] = true
		}
	}
	return true
}

// divide removes from each disk's versions those that a compaction may have removed
// from another disk. It returns them, with those kept of it, as one more list. The
// disks themselves must have every version that a compaction leaves alone.
func (k *keptVersions) divide(all [][]judge.Version) [][]judge.Version {
	union := maps.Clone(k.set)
	for _, vs := range all {
		for _, v := range vs {
			union[v] = true
		}
	}
	newest := map[string]judge.Version{} // of each key, at or below the compacted revision
	for v := range union {
		if last, ok := newest[v.Key]; v.Mod <= k.compacted && (!ok || judge.CompareVersions(last, v) < 0) {
			newest[v.Key] = v
		}
	}
	// The writes of one transaction to a key go or stay as a whole.
	may := func(v judge.Version) bool {
		last := newest[v.Key]
		return v.Mod <= k.compacted && (v.Mod < last.Mod || last.Deleted)
	}
	out := make([][]judge.Version, 0, len(all)+1)
	for _, vs := range all {
		out = append(out, slices.DeleteFunc(vs, may))
	}
	var gone []judge.Version
	for v := range union {
		if may(v) {
			gone = append(gone, v)
		}
	}
	slices.SortFunc(gone, judge.CompareVersions)
	return append(out, gone)
}
