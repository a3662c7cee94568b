// Package dataapi is Skein's data service, which every node offers beside etcd's services on its client port, and
// its client. Data of the whole cluster leave by it, as of one revision: for backups, exports and comparisons.
//
//	command ──▶ Client ──gRPC──▶ server ──▶ Cutter ──┬─▶ placement: hold, leases, settings, users
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
// # Files
//
//	cut_client.go  the client
//	cut_server.go  the service
//	cut.go         Cutter: makes and reads cuts on a node
package dataapi
