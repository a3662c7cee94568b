// Package audit keeps the audit log of a node. It says who logged in, who was denied something, and who changed users,
// members, alarms or the cluster. Each entry is one line of JSON, and each line has the hash of the line before.
//
//	log.go    Log: takes entries, writes them, follows the file's rotation
//	sample.go denials of one user: a few a second, and how many were left out
//	check.go  Check: finds lines that were removed or changed
//	line.go   an entry, its line, and the hash of a line
//
// # What holds
//
// L1. No request waits for the log. Entries wait in a queue of bounded length. An entry that finds it full is
// lost. A metric counts it, and so does an entry once the log can be written again. So a change of the cluster is
// done also where it cannot be logged: a full disk must not keep an operator from making room.
//
// L2. A line's hash is SHA-256 of its bytes without the newline. The next line has it as "prev". A new file goes on with
// the hash of the old one's last line.
//
// L3. A line that was written in part is cut off before the next one is written. After a crash it stays, and where the
// disk does not let it be cut off. Then the next line is a "start" that has its hash.
//
// L4. No entry has a value, a password, a hash of one, or a token. The keys of a permission are in the entry of its
// grant and its revocation, which would not say what was changed without them. No other keys are.
//
// # What it does not prove
//
// The hashes have no secret. Whoever may write the file can write it anew from some line on, and can cut off its end. Send
// the lines to another machine as they come, or keep the last hash that Check returns elsewhere.
package audit
