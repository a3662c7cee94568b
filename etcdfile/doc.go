// Package etcdfile reads and writes etcd's database files: what etcdctl snapshot save writes,
// and what member/snap/db is. docs/format/etcdfile.md says what of them.
//
// It has no goroutine and knows no cluster. [Open] and [File.Versions] give the versions of a
// file in the order of keys, as they are loaded. [Create] takes versions in the order of
// revisions, as etcd stores them. A [Sorter] turns one order into the other outside of memory.
//
// # What it guarantees
//
//   - A source is opened for reading alone, under the lock that bbolt takes. A file that is
//     not what etcd writes is an error that wraps ErrCorrupt, whatever its bytes are.
//   - Create revision, revision, version, lease and operation number are those that an etcd
//     with the file serves. What etcd would not serve any more, because a compaction was
//     scheduled, is left out. So is what etcd's tools alone have written.
//   - What was read and is written again makes the same records, byte for byte, so that etcd's
//     HashKV is the same.
//   - Memory is bounded by options, but for the leases: 24 bytes each.
//   - A file has its name only when it is complete and synced.
//
// # What if
//
//   - the source is a copy that was made while etcd ran: its hash is missing or wrong. With
//     SkipHashCheck a torn page is found if it is no page, or its keys do not ascend.
//   - the temporary directory is full: the error names it. The file goes with its process.
//   - the disk of the written file is full: Add or Finish fails, and Abort removes the file.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	versions.go   the versions of a file, by the compaction rule
//	file.go       a file: its hash, and all that it has beside versions
//	create.go     writes a file
//	auth.go       users and roles in both forms
//	sort.go       versions in another order, outside of memory
//	run.go        sorted runs in a temporary file
//	pages.go      the pages of a bbolt file
//	record.go     the bytes of etcd's records
package etcdfile
