// Package transfer brings the data of a cluster out and in, from where a command runs: to backups and from them, to
// etcd's database files and from them. It joins the client of a cluster (package dataapi) to what is outside of one
// (packages backup and etcdfile). Keys of object stores and of encryption never enter a node.
//
//	Export  Backup    cluster ──cut──▶ versions ──▶ etcd's file | chain of backups
//	Import  Restore   cluster ◀──load── versions ◀── etcd's file | chain of backups
//	Mirror            cluster ◀──load── versions ◀── a running etcd (package mirror)
//
// # Out
//
// A cut holds the whole store at one revision for as long as it is read. A hold that ends before is an error that says
// to begin anew; nothing is left that looks whole.
//
// # In
//
// A new cluster takes finished versions: every key keeps its revisions, version and lease, and the next write has the
// revision behind the last one. The cluster says how much it has. So a command that was broken off goes on when it is
// given again, with the number of its load. It finishes only if the cluster has all that the source has, by count and
// hash. Users come last. They are checked, if they were at the source, before the cluster serves anybody.
//
// # Files
//
//	restore.go   from a backup into a new cluster
//	mirror.go    from a running etcd into a new cluster
//	users.go     the users of that etcd, which come last
//	import.go    from etcd's file into a new cluster
//	load.go      what these do
//	backup.go    into a chain of backups
//	export.go    into etcd's file
//	progress.go  how far the work is, in words
//	cluster.go   a cluster, cuts through it
package transfer
