// Package certs makes, keeps and checks the certificates of a cluster: one authority, the nodes and
// the clients. It is what skein cert does. A directory holds
//
//	ca.crt               the authority's certificate
//	ca.key               its key; it belongs on no node
//	ca.crl               what the authority has revoked, signed by it (DER)
//	node.crt, node.key   a node's certificate and key
//	client.NAME.crt, client.NAME.key
//	issued/SERIAL.crt    all that the authority has issued, so that it can be revoked without its file
//
// A node's certificate has a role: the URI skein://node/NAME ([NodeURI], [NodeName]). NAME is the
// node's name in the node table. It serves as the node's certificate for clients and for both ends of
// the bus. A client's certificate has the client's name as common name, and no role. A node's has no
// common name, so that nobody can take a node for a user.
//
// # Guarantees
//
//   - A file is there in full or not at all, also after a crash. A key has mode 0600, a directory
//     that this package makes has 0700.
//   - Nothing is overwritten unless the caller says so, but for the revocation list, which only grows.
//   - A certificate is noted under issued before anybody can use it.
//   - Whoever changes a directory has a lock on it, so of two revocations at once none is lost.
//
// A running node reads its files by a [Live], which sees that they change. A change that cannot be taken leaves
// the last good content in use, and is tried again. So nothing that is revoked is trusted again because a file
// cannot be read. An older list in its place is taken: skein cert check finds that.
//
// A [Problem] is an error that the caller can mend. It says what to do.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	live.go       Live: the files of a running node
//	issue.go      certificates of nodes and clients
//	revoke.go     Revoke
//	authority.go  the authority
//	inspect.go    what list and check say
//	list.go       the revocation list
//	role.go       the name of a node in its certificate
//	dir.go        the directory and its files
package certs
