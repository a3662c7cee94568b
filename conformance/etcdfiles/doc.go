// Package etcdfiles checks package etcdfile against etcd itself: a snapshot of an etcd is read
// and written again, etcd's tools restore what was written, and the etcd on it must answer as
// the one on the original does.
//
// It guarantees that a difference in any event above the compacted revision, in the state at
// it, in leases, users, rights or HashKV fails. The etcd of this module runs in the process.
// Other versions run as binaries etcd-3.5, etcdutl-3.5 and so on in the directory of the flag
// -binaries (make etcd-files builds them).
package etcdfiles
