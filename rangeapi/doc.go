// Package rangeapi is how the rest of a node talks to the replicas of ranges: requests and
// answers, transaction commands, feeds of events, their wire forms, and the client that sends
// them. It knows no replica; package shard serves the requests.
//
//	router, watch ──▶ Client ──┬─ on this node: Local, a function call ──▶ shard
//	                           └─ elsewhere: bus methods 16, 18, 21 to 24, 27 ─▶ shard
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
//	27      VersionsRequest                  VersionsPage: versions as they are stored
//	26      LoadRequest                      LoadAnswer
//
// # What is guaranteed
//
// A request carries the range's generation by which it was routed. A replica of another
// generation refuses it and returns its descriptor. Every error is of package kverror and says
// whether the request may have been applied. A decoder refuses unknown versions, and allocates
// no more than its input can hold. docs/format/rangeapi.md has the bytes, and testdata/format
// the golden files.
//
// # Files
//
// From the top down; calls go downwards (internal/archtest holds it):
//
//	client.go    the client: sends by the bus, or to this node's replicas
//	versions.go  pages of a cut: versions at and below a revision, their wire forms and client
//	load.go      versions for a new cluster, how far ranges have taken them, and their wire forms
//	check.go     refuses malformed requests
//	txnwire.go   wire forms of transaction commands and their answers
//	pagewire.go  wire forms of pages
//	feedwire.go  feeds, history and their wire forms
//	event.go     Event and its wire form
//	page.go      Page, and key values as they stand in etcd's answers
//	lease.go     commands about a lease
//	txn.go       transaction commands and their answers
//	shape.go     orders, filters and limits keys as etcd does
//	codec.go     wire forms of requests and answers
//	plain.go     shorter wire forms of the most frequent requests
//	request.go   Request, Response, and the keys that they name
//	reader.go    elements that several wire forms share
package rangeapi
