// Package console is what people see of a cluster in a browser, under /console/: the state of nodes and ranges, charts of
// the last hour, what is done with ranges, keys and their history.
//
// It is a page (ui, bundled into dist by go generate and linked into the program) and the API of that page. The API is
// JSON: the messages of the admin service and of etcd's services as protobuf writes them, and a few answers that are made
// for the page. It holds no state but what it has asked within the last second.
//
// # What is guaranteed
//
//   - Nobody sees or does here what they may not see or do by gRPC: every question goes to the services in the name of who
//     sent it ([Services]). What is shared between readers is for root alone.
//   - Nothing changes the cluster or a key unless the console is full.
//   - However many pages are open, a node surveys the cluster for them once a second, and lists the ranges once a second.
//   - A page of another origin can neither read nor write: each request to the API must have the header X-Skein-Console,
//     for which browsers ask first, and nobody answers that. No cookie is set or read. The page may load nothing from
//     elsewhere and run no script that stands in it.
//
// Package etcdapi serves it, refuses pages of other origins and strange hosts, and says who sends a request.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	console.go  New: the page's files, and the headers of every answer
//	api.go      the API: who is here, log in, calls of services
//	ranges.go   ranges by pages
//	keys.go     the history of a key, and leases
//	answer.go   requests and answers as JSON, and errors in their two halves
//	shared.go   an answer that all readers within a second share
package console

//go:generate go run -C tools .
