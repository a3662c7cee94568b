package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Entry is something that happened.
type Entry struct {
	// User is who asked: the name of a user, or whom a failed login named.
	User string
	// Certificate is the common name in the client's verified certificate, or the URI in a node's. It names the
	// user only with --client-cert-auth.
	Certificate string
	// From is the client's address.
	From string
	// Method is the full name of a gRPC method, or an HTTP path.
	Method string
	// What names what it was about, as user="alice".
	What string
	// Outcome is "ok", or the name of a gRPC code.
	Outcome string
}

// Methods of entries that the log makes itself.
const (
	// methodStart begins what one process writes.
	methodStart = "start"
	// methodLost says how many entries were lost, and methodLeftOut how many denials of a user were left out.
	methodLost    = "lost"
	methodLeftOut = "denials-left-out"
)

// line is the form of an entry in the file.
type line struct {
	Time        time.Time `json:"time"`
	Node        string    `json:"node"`
	User        string    `json:"user,omitempty"`
	Certificate string    `json:"certificate,omitempty"`
	From        string    `json:"from,omitempty"`
	Method      string    `json:"method"`
	What        string    `json:"what,omitempty"`
	Outcome     string    `json:"outcome,omitempty"`
	Prev        string    `json:"prev"`
}

const (
	// maxField bounds the texts of an entry, which clients choose; maxLine is more than any line then has.
	maxField = 1 << 10
	maxLine  = 64 << 10
)

// clip cuts a text that is too long, and says so.
func clip(s string) string {
	if len(s) <= maxField {
		return s
	}
	return strings.ToValidUTF8(s[:maxField], "") + fmt.Sprintf("... (%d bytes)", len(s))
}

// encode returns the line without its newline.
func encode(at time.Time, node string, e *Entry, prev string) []byte {
	b, err := json.Marshal(line{
		Time: at.UTC(), Node: node, User: clip(e.User), Certificate: clip(e.Certificate), From: clip(e.From),
		Method: clip(e.Method), What: clip(e.What), Outcome: clip(e.Outcome), Prev: prev,
	})
	if err != nil {
		panic(fmt.Sprintf("audit: marshal texts and a time %v of %+v: %v", at, e, err))
	}
	return b
}

// hashOf returns the hash by which the next line names a line.
func hashOf(line []byte) string {
	sum := sha256.Sum256(line)
	return hex.EncodeToString(sum[:])
}
