// Package follow tests package mirror with real sources, clusters of three whose leader is killed while clients write. With an
// etcd as the source and a target in memory, which keeps every version and checks their order, source and target are
// compared at many revisions. TestKills has real processes on both sides, of etcd and of Skein, and kills any of them.
// TestUsersOfEachWayIn has users come with a mirror, and with an import and a restore too.
package follow
