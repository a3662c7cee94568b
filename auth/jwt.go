package auth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
)

// ErrOptions says that the options of tokens are wrong. Its text is etcd's, as are those of the others;
// what was wrong stands behind it.
var (
	ErrOptions     = errors.New("auth: invalid auth options")
	ErrMissingKey  = errors.New("auth: missing key data")
	ErrKeyMismatch = errors.New("auth: public and private keys don't match")
	ErrVerifyOnly  = errors.New("auth: token signing attempted with verify-only key")
)

// maxJWT bounds the bytes of a token whose signature is looked at.
const maxJWT = 16 << 10

// never is when a token expires that does not say when.
var never = time.Unix(1<<33, 0)

// Names of claims, etcd's and RFC 7519's.
const (
	claimUser     = "username"
	claimRevision = "revision"
	claimExpires  = "exp"
)

// jwtOptions are those of --auth-token=jwt.
type jwtOptions struct {
	method                  jwt.SigningMethod
	publicFile, privateFile string
	ttl                     time.Duration
}

// jwtTokens are JSON web tokens (RFC 7519) with etcd's claims. Programs outside of the cluster may make
// them too, if they have the private key. They carry the auth revision, which all changes of rights move:
// Identity.Current refuses those of an older one.
type jwtTokens struct {
	clk    clock.Clock
	ttl    time.Duration
	method jwt.SigningMethod
	// sign is nil on a node that can only verify.
	sign, verify any
	parser       *jwt.Parser
}

var _ Tokens = (*jwtTokens)(nil)

func newJWT(clk clock.Clock, o *jwtOptions) (*jwtTokens, error) {
	t := &jwtTokens{clk: clk, ttl: o.ttl, method: o.method}
	var err error
	if t.sign, t.verify, err = o.keys(); err != nil {
		return nil, err
	}
	// The token's header does not choose the method: only this one is read.
	t.parser = jwt.NewParser(jwt.WithValidMethods([]string{o.method.Alg()}), jwt.WithTimeFunc(clk.Wall))
	return t, nil
}

// Issue implements Tokens.
func (t *jwtTokens) Issue(_ Keys, p Proof) (string, error) {
	if t.sign == nil {
		return "", ErrVerifyOnly
	}
	token, err := jwt.NewWithClaims(t.method, jwt.MapClaims{
		claimUser:     p.User,
		claimRevision: p.Revision,
		claimExpires:  t.clk.Wall().Add(t.ttl).Unix(),
	}).SignedString(t.sign)
	if err != nil {
		return "", fmt.Errorf("auth: sign a token for user %q with %s: %w", p.User, t.method.Alg(), err)
	}
	return token, nil
}

// Verify implements Tokens. As in etcd a token may lack a time at which it expires.
func (t *jwtTokens) Verify(_ *View, token string) (Identity, error) {
	bad := func(why string) (Identity, error) {
		return Identity{}, kverror.New(kverror.InvalidAuthToken, "%s", why)
	}
	if len(token) > maxJWT {
		return bad("it is longer than 16 KiB")
	}
	claims := jwt.MapClaims{}
	_, err := t.parser.ParseWithClaims(token, claims, func(*jwt.Token) (any, error) { return t.verify, nil })
	switch {
	case errors.Is(err, jwt.ErrTokenExpired):
		return bad("it has expired")
	case errors.Is(err, jwt.ErrTokenNotValidYet):
		return bad("it is not valid yet")
	case errors.Is(err, jwt.ErrTokenSignatureInvalid):
		return bad("its signature is not that of this cluster's key and " + t.method.Alg())
	case err != nil: // The library's text may quote parts of the token.
		return bad("it is no JSON web token")
	}
	user, ok := claims[claimUser].(string)
	if !ok {
		return bad("it has no " + claimUser)
	}
	revision, ok := claims[claimRevision].(float64)
	if !ok || revision < 0 || revision >= 1<<63 {
		return bad("it has no " + claimRevision)
	}
	until := never
	if at, err := claims.GetExpirationTime(); err == nil && at != nil {
		until = at.Time
	}
	return Identity{User: user, Revision: uint64(revision), Until: until}, nil
}

// keys reads the files and returns the keys to sign and to verify with.
func (o *jwtOptions) keys() (sign, verify any, err error) {
	var public, private []byte
	for _, f := range []struct {
		name string
		to   *[]byte
	}{{o.publicFile, &public}, {o.privateFile, &private}} {
		if f.name == "" {
			continue
		}
		if *f.to, err = os.ReadFile(f.name); err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrOptions, err)
		}
	}
	switch m := o.method.(type) {
	case *jwt.SigningMethodHMAC:
		if len(private) == 0 {
			return nil, nil, fmt.Errorf("%w: %s needs priv-key", ErrMissingKey, m.Alg())
		}
		return private, private, nil
	case *jwt.SigningMethodRSA, *jwt.SigningMethodRSAPSS:
		return pair(o, private, public, jwt.ParseRSAPrivateKeyFromPEM, jwt.ParseRSAPublicKeyFromPEM)
	case *jwt.SigningMethodECDSA:
		sign, verify, err = pair(o, private, public, jwt.ParseECPrivateKeyFromPEM, jwt.ParseECPublicKeyFromPEM)
		if key, ok := verify.(*ecdsa.PublicKey); ok && key.Curve.Params().BitSize != m.CurveBits {
			return nil, nil, fmt.Errorf("%w: %s needs a key of %d bits, and this one has %d", ErrOptions, m.Alg(), m.CurveBits, key.Curve.Params().BitSize)
		}
		return sign, verify, err
	case *jwt.SigningMethodEd25519:
		return pair(o, private, public, edPrivate, edPublic)
	}
	return nil, nil, fmt.Errorf("unsupported signing method: %T", o.method)
}

func edPrivate(pem []byte) (ed25519.PrivateKey, error) {
	k, err := jwt.ParseEdPrivateKeyFromPEM(pem)
	private, _ := k.(ed25519.PrivateKey)
	return private, err
}

func edPublic(pem []byte) (ed25519.PublicKey, error) {
	k, err := jwt.ParseEdPublicKeyFromPEM(pem)
	public, _ := k.(ed25519.PublicKey)
	return public, err
}

// pair reads a private and a public key. One of them is enough: the public one to verify with, the
// private one for both.
func pair[Private crypto.Signer, Public interface {
	Equal(other crypto.PublicKey) bool
}](o *jwtOptions, private, public []byte, readPrivate func([]byte) (Private, error), readPublic func([]byte) (Public, error)) (sign, verify any, err error) {
	var signer Private
	if len(private) > 0 {
		if signer, err = readPrivate(private); err != nil {
			return nil, nil, fmt.Errorf("%w: priv-key %s", err, o.privateFile)
		}
		sign, verify = signer, signer.Public()
	}
	if len(public) > 0 {
		key, err := readPublic(public)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: pub-key %s", err, o.publicFile)
		}
		if sign != nil && !key.Equal(verify) {
			return nil, nil, fmt.Errorf("%w: %s, %s", ErrKeyMismatch, o.publicFile, o.privateFile)
		}
		verify = key
	}
	if verify == nil {
		return nil, nil, fmt.Errorf("%w: %s needs pub-key to verify tokens, and priv-key to make them", ErrMissingKey, o.method.Alg())
	}
	return sign, verify, nil
}
