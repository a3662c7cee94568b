// Package client is a Go client of Skein that sends many operations by one stream, the pipe, instead of a call for each.
// What it does means what etcd's API means: the requests and responses are etcd's, and so are the errors.
//
//	c, err := client.Open(ctx, client.Config{Etcd: clientv3.Config{Endpoints: endpoints}})
//	...
//	defer c.Close()
//	put, err := c.Put(ctx, "greeting", "hello")
//
// Calls may come from any number of goroutines, and each waits for its own answer. [Client.Do] does not wait. What comes
// while a message is being sent shares the next one, so messages grow with the load. Operations that are under way at the
// same time happen in any order: whoever needs an order waits for the answer.
//
// # Where it sends
//
// It begins at any of its endpoints, and learns from the answers which nodes lead the ranges that it uses. To these it opens pipes of
// its own, at the URLs that they advertise to clients. What cannot go there goes by an endpoint, which costs a hop. [Config].EndpointsOnly
// turns that off.
//
// # What it repeats
//
// The client goes on at another endpoint when its node stops or is lost. What was not sent is sent there. So are reads
// that have no answer. A change that was sent and has no answer ends with [ErrUnknownFate]: it may have happened.
// An error of the node's is returned as it is, and only that of an outdated token is met by another login.
//
// # What it leaves to etcd's client
//
// [Client.Watch] is a watch of etcd's that goes on through lost nodes. Leases and everything else are [Client.Etcd]'s, on the same
// endpoints.
package client
