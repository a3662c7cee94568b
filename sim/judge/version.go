package judge

import (
	"cmp"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
)

// Version is one version of one key on the disks.
type Version struct {
	Key     string
	Value   string
	Mod     int64
	Create  int64
	Version int64
	Deleted bool
	Lease   int64
	// Sub is the number of the operation within its transaction: the order of what has one
	// revision, and one key. A key may be written more than once.
	Sub uint32
}

// CompareVersions orders versions as watchers receive them.
func CompareVersions(a, b Version) int {
	return cmp.Or(cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub), cmp.Compare(a.Key, b.Key), cmp.Compare(a.Value, b.Value))
}

// CompareByKey orders versions by keys, revisions and operations.
func CompareByKey(a, b Version) int {
	return cmp.Or(cmp.Compare(a.Key, b.Key), cmp.Compare(a.Mod, b.Mod), cmp.Compare(a.Sub, b.Sub))
}

// FirstDifference is the first place at which two lists of versions differ, "" if there is none.
func FirstDifference(a, b []Version) string {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return fmt.Sprintf("%+v, %+v", a[i], b[i])
		}
	}
	if len(a) != len(b) {
		return fmt.Sprintf("%d versions, %d versions", len(a), len(b))
	}
	return ""
}

// versionOf returns the version of a key on a disk.
func versionOf(kv *mvccpb.KeyValue) Version {
	return Version{
		Key: string(kv.GetKey()), Value: string(kv.GetValue()), Mod: kv.GetModRevision(), Create: kv.GetCreateRevision(),
		Version: kv.GetVersion(), Lease: kv.GetLease(),
	}
}
