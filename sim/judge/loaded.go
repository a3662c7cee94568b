package judge

import (
	"slices"

	"github.com/anishathalye/porcupine"
)

// Loaded is a store that was loaded into the cluster: what clients find when they begin. A nil one is an empty store.
type Loaded struct {
	// Versions are in the order of revisions. Those that a compaction at Compacted may remove are not among them.
	// Revision is that of the cluster when the load has finished.
	Versions            []Version
	Compacted, Revision int64
	// Reads are the reads of clients while the load followed its source.
	Reads []*Op
}

// last is the last revision that is there.
func (l *Loaded) last() int64 {
	if l == nil {
		return 1
	}
	return l.Revision
}

// check compares the disks with what was loaded.
func (l *Loaded) check(vs []Version) []string {
	if l == nil {
		return nil
	}
	had := slices.DeleteFunc(slices.Clone(vs), func(v Version) bool { return v.Mod > l.Revision })
	if d := FirstDifference(l.Versions, had); d != "" {
		return []string{"load: the source, then the disks: " + d}
	}
	return nil
}

// leased adds the keys that have leases.
func (l *Loaded) leased(keys map[string]bool) {
	if l == nil {
		return
	}
	for _, v := range l.Versions {
		keys[v.Key] = keys[v.Key] || v.Lease != 0
	}
}

// written is the write of a key before all operations, for the check of the key alone.
func (l *Loaded) written(key string) (h []porcupine.Operation) {
	if l == nil {
		return nil
	}
	var value string
	for _, v := range l.Versions {
		if v.Key == key {
			value = v.Value
		}
	}
	return []porcupine.Operation{{ClientId: LoaderID, Input: fact{writes: true, value: value}}}
}
