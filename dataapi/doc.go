// Package dataapi is Skein's data service, which every node offers beside etcd's services on its client port, and
// its client: data of the whole cluster come and go by it.
//
// # A load
//
// A new cluster takes finished versions at given revisions: from a backup, from etcd's files, from a running etcd.
//
//	loader ──gRPC──▶ Load ──┬─▶ placement: phase, position, leases
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
//  5. LoadFinish compares the number of versions and the sum of their hashes with what the loader says. Then the
//     cluster serves, and the next write has the revision behind.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	load_client.go  Loader: the client of a load
//	load_server.go  the service
package dataapi
