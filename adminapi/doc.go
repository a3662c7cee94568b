// Package adminapi is Skein's admin service, which every node offers beside etcd's
// services on its client port, its client, and the output of the commands skein
// range, skein node, skein placement, skein status and skein doctor.
//
// It checks requests, words refusals, each with the next step, and prints. It asks a
// [Backend], which package node implements, for ranges and nodes. It holds no state. Of etcd's
// API the client uses Authenticate alone. Package etcdapi checks who may use
// the service, with the rules of package auth.
//
// # Files
//
//	bundle.go        a debug bundle of all nodes
//	top.go           what happens between two looks at a cluster
//	status.go        the cluster at a glance, for people and as JSON
//	doctor.go        what is wrong, and what to do about it
//	trouble.go       what nodes say of their troubles, and what to do
//	bundlepart.go    a node's part of it: service, client
//	watchers.go      watchers of clients: service, client, output
//	slow.go          slow requests: service, client, output
//	survey.go        what there is to know at a glance: service, client
//	heat.go          the heat map: service, client, output
//	series.go        what nodes have measured of themselves, for charts
//	wait.go          commands that wait for what they have begun
//	placement.go     the placement group: service, client, output
//	cluster.go       the cluster version: service, client, output
//	hold.go          holds of old versions: service, client, output
//	replication.go   the replication factor, and merges by themselves
//	join.go          a node that joins
//	output_node.go   nodes as tables and JSON
//	page.go          one range and its replicas
//	output_range.go  ranges as tables and JSON
//	output.go        operations as tables and JSON, and what all of these use
//	keys.go          keys, sizes and rates as text
//	client.go        the client
//	silent.go        why no node can be reached, and what to do
//	login.go         the user in whose name the client calls
//	server.go        the service, and what it asks of the node
package adminapi
