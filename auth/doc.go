// Package auth says who sends a request, and whether that user may. It compares the passwords of users who
// log in, and makes and verifies their tokens. What users and roles mean is package rights.
//
// # Files
//
//	login.go     who has logged in, and who has failed too often
//	rules.go     who may call which method, and send which request
//	gate.go      who sends a request, by the newest view; remembers it
//	claim.go     what a request brings to say who sends it: a token, a certificate
//	caller.go    who sends a request, and what that user may do
//	password.go  bcrypt, a few at a time
//	tokens.go    the options of --auth-token, and the tokens that they name
//	jwt.go       JSON web tokens, as in etcd
//	simple.go    simple tokens: a MAC instead of a table of logins
//	recent.go    what is remembered of tokens and failures, bounded
//	view.go      what a node knows of users and keys; the words of this package
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
// A5. Keys, tokens, passwords and their hashes stand in no error, and the methods of formatted output hide
// keys and hashes.
//
// A6. A login computes with bcrypt once for each credential that it reads, whoever the user is: how long
// it takes does not tell who there is. No hash of a cost above 14 is computed with.
//
// A7. A proof has the index of a read after the comparison, and the credential was the same in it. So what
// ends a token by A2 ends one too whose login was under way.
//
// A8. [Gate.Update] returns, and from then on nobody gets rights of an earlier view. No token is accepted any
// more that the view ends by A2. Callers are remembered together with the rights and keys that identified
// them, and go with them.
//
// A9. A method without a row in the table of rules is refused, whoever calls it, and so is a message of which
// nobody says what it asks for. A name that is not written exactly as the method's is another method.
//
// A10. A token wins over a certificate, also a bad one. A node's certificate makes nobody a user.
//
// Indices belong to one log. Whoever starts a new log from the data of an old one must make new keys.
package auth
