// Package compactor compacts the cluster's history by itself, in etcd's two modes:
//
//	periodic  keeps the revisions of a period. It looks at the current revision every
//	          tenth of the period or of an hour, whichever is shorter, and compacts once
//	          a period, or an hour, at the newest one that is older than a period.
//	revision  keeps a number of revisions, and compacts every five minutes.
//
// It runs on every node, so a new leader has noted the revisions of the period already. Only the
// leader compacts. Two nodes that both consider themselves the leader do no harm: a compacted
// revision never goes back, and each of them keeps enough. A failed compaction is repeated at the
// next look.
//
// It knows neither etcd's messages nor ranges. node makes it with the placement group's client.
package compactor
