// Package rangeapi is how the rest of a node talks to the replicas of ranges: requests and
// their answers, transactions' commands, feeds of events, their forms on the bus, and the
// client that carries them. It knows no replica; package shard serves what is asked here.
//
//	router, watch ──▶ Client ──┬─ on this node: Local, a function call ──▶ shard
//	                           └─ elsewhere: bus methods 16, 18, 21 to 24 ─▶ shard
//
//	method  question                       answer
//	16      Request (get, put, delete,     Response, or a kverror
//	        txn within one range)
//	24      Request whose Op is a Page     PageAnswer: keys as on the client's wire
//	18      Prepare, Revoke, LeaseKeys,    Prepared, Revoked, Attached
//	        a read on behalf of a txn      Response
//	23      Commit, Resolve, Decide,       Decided, Resolved
//	        Forget: what ends locks
//	21      FeedOrder (a stream)           FeedPart (a stream)
//	22      ResolvedRequest, HistoryRequest  FeedPosition, HistoryPage
//
// # The files, from the top down
//
// client.go sends. check.go refuses malformed requests; shape.go orders, filters and limits
// keys as etcd does. request.go, page.go, txn.go, lease.go and event.go are the types.
// codec.go, plain.go, pagewire.go, txnwire.go and feedwire.go are their wire forms, on
// reader.go.
//
// # What holds
//
// A request carries the range's generation by which it was routed; a replica of another
// generation refuses it and returns its descriptor. Every error is of package kverror and
// says whether the request may have been applied. A decoder takes nothing that its input
// only claims to have, and refuses unknown versions; docs/format/rangeapi.md has the bytes
// and testdata/format the golden files.
package rangeapi
