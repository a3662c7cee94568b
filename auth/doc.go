// Package auth says who sends a request. It makes and verifies the tokens of users who have logged in.
// What a user may do is package rights.
//
// # Files
//
//	tokens.go  the options of --auth-token, and the tokens that they name
//	jwt.go     JSON web tokens, as in etcd
//	simple.go  simple tokens: a MAC instead of a table of logins
//	uses.go    which tokens were used lately
//	view.go    what a node knows of users and keys; the words of this package
//
// # Simple tokens
//
// A token carries the user's name, and the index of the placement group's log at which the user had
// proved to be that. All nodes have the keys of the MAC, so each takes the tokens of every other, and
// none remembers a login. docs/format/auth.md has the bytes.
//
//	Verify:  look ─▶ MAC ─▶ age ─▶ index ≤ this node's? ─▶ the user's Since, EnabledSince ─▶ Identity
//	           │       │      │         │ no                     │
//	           └───────┴──────┴─────────┼────────────────────────┴─▶ InvalidAuthToken
//	                                    └─▶ AheadOf: wait until this node has the index
//
// # What holds
//
// A1. Nothing in a token counts before its MAC is verified. Above all nobody waits for the index of a
// forged one.
//
// A2. A token proves nothing any more once the user's password has changed, the user was deleted, or
// checks were switched on anew. A user who is created again has a later Since than the old tokens' index.
//
// A3. A token is valid for the TTL after it was made, and for the TTL after each use on the same node.
// The first is a matter of wall clocks: a token from further in the future than the TTL is refused as an
// old one is. A node forgets uses when it restarts, and the oldest ones when it has too many.
//
// A4. A JSON web token is verified by the one method of the options. Its header chooses nothing. It stands
// for the auth revision of its login, and an identity of an older revision than the state's is refused.
//
// A5. Keys and tokens stand in no error, and the methods of formatted output hide a key.
//
// Indices belong to one log. Whoever starts a new log from the data of an old one must make new keys.
package auth
