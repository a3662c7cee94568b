// Package dataapi is Skein's data service, which every node offers beside etcd's services on its client port, and
// its client. Data of the whole cluster leave by it, as of one revision: for backups, exports and comparisons. And
// they come by it into a new cluster: from a backup, from etcd's files, from a running etcd.
//
//	command ──▶ Client ──gRPC──▶ server ──▶ Cutter ──┬─▶ placement: hold, leases, users
//	                                                 ├─▶ router: the revision of now
//	                                                 └─▶ router: pages of versions from the ranges
//
// It has no state: a hold is placement's, and who reads a cut says where it goes on. Package etcdapi checks who may
// use the service, with the rules of package auth.
//
// # A cut
//
//  1. A hold keeps what is readable from its revision on. It travels to all nodes with the map.
//  2. The leases are listed.
//  3. The sequencer names the current revision R: every write that was acknowledged before is at or below R.
//  4. The leases are listed again. A key at R may be attached to a lease that neither list has, since the lease
//     was granted and revoked between them. Whoever restores gives it one of LostLeaseTTL.
//  5. Versions are read page by page. A range answers once everything up to R is applied where it is read, and if its
//     own compacted revision says that nothing of the cut is removed. So a cut is right or refused: whether the hold
//     came in time to every node, has expired or was released makes no other difference.
//
// # What if
//
//   - ranges split, merge or move: pages are routed anew.
//   - the client dies: its hold expires within an hour.
//   - a page fails for a moment: the client goes on behind the last version that it has.
//
// # A load
//
// A new cluster takes finished versions at given revisions: from a backup, from etcd's files, from a running etcd.
//
//	loader ──gRPC──▶ Load ──┬─▶ placement: phase, position, leases, users
//	                        └─▶ router ──▶ leaders of ranges: versions, cursors
//
// The service has no state. What is durable is placement's phase and the cursor of each range. So a loader that has
// crashed begins again with its number, asks the ranges where they are, and leaves out what they have. Each call can
// be repeated. The number keeps a second loader out.
//
//  1. LoadBegin, while the cluster is empty. LoadSplit makes ranges, so that several take versions at a time.
//  2. LoadLeases: versions of leases that were not granted attach nothing.
//  3. LoadPut in bulk, in the order of keys, the newest version of a key first.
//  4. LoadAdvance to follow, then LoadPut in the order of revisions and LoadAdvance, as often as wanted. Clients read at
//     the position.
//  5. LoadAccess: users and roles. Every node goes by them before the cluster serves anybody.
//  6. LoadFinish compares the number of versions and the sum of their hashes with what the loader says. Then the
//     cluster serves, and the next write has the revision behind.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	collect.go      a whole cut, sorted for a file of etcd's
//	load_client.go  Loader: the client of a load
//	cut_client.go   the client of cuts
//	load_server.go  the service of loads
//	cut_server.go   the service of cuts
//	cut.go          Cutter: makes and reads cuts on a node
package dataapi
