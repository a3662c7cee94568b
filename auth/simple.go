package auth

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

const (
	// simpleVersion is the first byte of a token: how to read the others.
	simpleVersion = 1
	// Offsets of the fields.
	atKeyID, atIndex, atIssued, atRandom, atUser = 1, 5, 13, 21, 29
	macBytes                                     = sha256.Size
	// maxSimple bounds a token: the longest name, and the longest index.
	maxSimple = (atUser+rights.MaxNameBytes+macBytes)*4/3 + 1 + 1 + 20
	// maxUses bounds the tokens whose last use a node remembers.
	maxUses = 65536
	// useResolution is how long a use counts for those that follow: etcd looks for old tokens as often.
	useResolution = time.Second
)

// Simple makes and verifies simple tokens.
type Simple struct {
	clk    clock.Clock
	random io.Reader
	ttl    time.Duration
	uses   *recent[struct{}]
}

var _ Tokens = (*Simple)(nil)

// NewSimple returns simple tokens that are valid for the TTL after they were made or used. random is
// crypto/rand.Reader, or a simulation's.
func NewSimple(clk clock.Clock, random io.Reader, ttl time.Duration) *Simple {
	return &Simple{clk: clk, random: random, ttl: ttl, uses: newRecent[struct{}](ttl, maxUses)}
}

// Issue implements Tokens.
func (t *Simple) Issue(keys Keys, p Proof) (string, error) {
	if keys.Current.id == 0 {
		return "", kverror.New(kverror.Internal, "this node has no key for tokens yet")
	}
	if n := len(p.User); n == 0 || n > rights.MaxNameBytes {
		panic(fmt.Sprintf("auth: a token for a user whose name has %d bytes, at most %d", n, rights.MaxNameBytes))
	}
	b := make([]byte, atUser, atUser+len(p.User)+macBytes)
	b[0] = simpleVersion
	binary.BigEndian.PutUint32(b[atKeyID:], uint32(keys.Current.id))
	binary.BigEndian.PutUint64(b[atIndex:], p.Index)
	binary.BigEndian.PutUint64(b[atIssued:], uint64(t.clk.Wall().UnixMilli()))
	if _, err := io.ReadFull(t.random, b[atRandom:atUser]); err != nil {
		return "", fmt.Errorf("auth: random bytes of a token for user %q: %w", p.User, err)
	}
	b = append(b, p.User...)
	return simpleText(append(b, keys.Current.mac(b)...)), nil
}

// Verify implements Tokens.
func (t *Simple) Verify(v *View, token string) (Identity, error) {
	p, err := parseSimple(token)
	if err != nil {
		return Identity{}, err
	}
	key, ok := v.Keys.find(p.key)
	if !ok {
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "its key %d is not known here", p.key)
	}
	if !hmac.Equal(key.mac(p.signed), p.mac) {
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "its MAC is not that of key %d", p.key)
	}
	now, wall, id := t.clk.Now(), t.clk.Wall(), recentID(p.mac)
	_, used := t.uses.get(id, now)
	if age := wall.Sub(p.issued); age.Abs() > t.ttl && !used {
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "it was made %v ago and not used here for %v", age, t.ttl)
	}
	if p.index > v.Index {
		return Identity{}, AheadOf{p.index}
	}
	switch u := v.Rights.User(p.user); {
	case u == nil:
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "there is no user %q", p.user)
	case p.index < u.Since:
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "user %q is new, or has a new password, since index %d; the token is of %d", p.user, u.Since, p.index)
	case p.index < v.Rights.EnabledSince:
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "authentication was enabled at index %d; the token is of %d", v.Rights.EnabledSince, p.index)
	}
	t.uses.note(id, now, func(struct{}) struct{} { return struct{}{} })
	return Identity{User: p.user, Revision: v.Rights.Revision, Until: wall.Add(min(useResolution, t.ttl/8))}, nil
}

// simple is a token's fields. They are claims until the MAC is verified.
type simple struct {
	key    KeyID
	index  uint64
	issued time.Time
	user   string
	signed []byte // all bytes before the MAC
	mac    []byte
}

// parseSimple reads a token. There is one text for each token: what base64 or a number could say in
// another way is refused.
func parseSimple(token string) (p simple, err error) {
	bad := func(why string) (simple, error) { return simple{}, kverror.New(kverror.InvalidAuthToken, "%s", why) }
	if len(token) > maxSimple {
		return bad("it is longer than any token")
	}
	text, _, ok := strings.Cut(token, ".")
	if !ok {
		return bad("it has no dot")
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return bad("it is not base64")
	}
	if len(b) <= atUser+macBytes || b[0] != simpleVersion {
		return bad("it is too short, or of another version")
	}
	end := len(b) - macBytes
	if end-atUser > rights.MaxNameBytes {
		return bad("its user's name is too long")
	}
	if simpleText(b) != token {
		return bad("it is not written as tokens are")
	}
	return simple{
		key:    KeyID(binary.BigEndian.Uint32(b[atKeyID:])),
		index:  binary.BigEndian.Uint64(b[atIndex:]),
		issued: time.UnixMilli(int64(binary.BigEndian.Uint64(b[atIssued:]))),
		user:   string(b[atUser:end]),
		signed: b[:end:end],
		mac:    b[end:],
	}, nil
}

// simpleText is the text of a token. The index stands behind the dot as in etcd's, where people look
// for it; the one that counts is below the MAC.
func simpleText(b []byte) string {
	index := binary.BigEndian.Uint64(b[atIndex:])
	return base64.RawURLEncoding.EncodeToString(b) + "." + strconv.FormatUint(index, 10)
}

func (k Key) mac(b []byte) []byte {
	h := hmac.New(sha256.New, k.secret)
	h.Write(b)
	return h.Sum(nil)
}
