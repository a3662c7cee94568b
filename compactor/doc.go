// Package compactor compacts the cluster's history by itself, in etcd's two modes:
//
//	periodic  keeps the revisions of a period. It looks at the current revision every
//	          tenth of the period, or of an hour where that is shorter, and compacts once
//	          a period, or an hour, at the newest one that is older than a period.
//	revision  keeps a number of revisions, and compacts every five minutes.
//
// It runs on every node, so that a node that becomes the leader has noted the
// revisions of the period already; only the leader compacts. Two that take themselves
// for it do no harm: a compacted revision never goes back, and each of them keeps what
// is to be kept. A failed compaction is tried again at the next look.
//
// It knows no etcd messages and no ranges. node makes it and gives it the placement
// group's client.
package compactor
