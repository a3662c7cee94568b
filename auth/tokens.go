package auth

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/kverror"
)

// The kinds of tokens, as --auth-token names them. Without a kind nobody can log in, and users come by
// certificates.
const (
	kindNone   = ""
	kindSimple = "simple"
	kindJWT    = "jwt"
)

// Options says which tokens a cluster has.
type Options struct {
	kind string
	// Ignored are the options of JWT that mean nothing. etcd warns of them, as their reader should.
	Ignored []string
	jwt     jwtOptions
}

// defaultJWTTTL is etcd's.
const defaultJWTTTL = 5 * time.Minute

// ParseOptions reads options in etcd's form: the kind, and for JWT a list of NAME=VALUE with sign-method,
// pub-key, priv-key and ttl. It reads no file.
func ParseOptions(text string) (*Options, error) {
	kind, rest, more := strings.Cut(text, ",")
	o := &Options{kind: kind, jwt: jwtOptions{ttl: defaultJWTTTL}}
	seen := map[string]string{}
	for more {
		var option string
		option, rest, more = strings.Cut(rest, ",")
		name, value, ok := strings.Cut(option, "=")
		if !ok || strings.Contains(value, "=") {
			return nil, fmt.Errorf("%w: %q is not NAME=VALUE", ErrOptions, option)
		}
		if _, twice := seen[name]; twice {
			return nil, fmt.Errorf("%w: %s is given twice", ErrOptions, name)
		}
		seen[name] = value
	}
	switch kind {
	case kindNone, kindSimple:
		return o, nil
	case kindJWT:
		return o, o.parseJWT(seen)
	}
	return nil, fmt.Errorf("%w: there are no tokens of kind %q, but %s and %s", ErrOptions, kind, kindSimple, kindJWT)
}

func (o *Options) parseJWT(values map[string]string) error {
	for name, value := range values {
		switch name {
		case "sign-method":
			o.jwt.method = jwt.GetSigningMethod(value)
		case "pub-key":
			o.jwt.publicFile = value
		case "priv-key":
			o.jwt.privateFile = value
		case "ttl":
			if value == "" {
				continue
			}
			ttl, err := time.ParseDuration(value)
			if err != nil {
				return fmt.Errorf("%w: ttl: %w", ErrOptions, err)
			}
			if ttl <= 0 {
				return fmt.Errorf("%w: with ttl=%v a token would expire before its first use", ErrOptions, ttl)
			}
			o.jwt.ttl = ttl
		default:
			o.Ignored = append(o.Ignored, name)
		}
	}
	slices.Sort(o.Ignored)
	if o.jwt.method == nil {
		return fmt.Errorf("%w: sign-method %q is not one of RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, ES512, EdDSA, HS256, HS384, HS512",
			ErrOptions, values["sign-method"])
	}
	if o.jwt.method == jwt.SigningMethodNone {
		return fmt.Errorf("unsupported signing method: %T, which signs nothing", o.jwt.method)
	}
	return nil
}

// Secrets returns the files of keys that nobody but the nodes may read.
func (o *Options) Secrets() []string {
	if o.jwt.privateFile == "" {
		return nil
	}
	return []string{o.jwt.privateFile}
}

// Open reads the files of keys, and returns the tokens of the options. ttl is for simple tokens; JWT has
// its own. random is crypto/rand.Reader, or a simulation's.
func (o *Options) Open(clk clock.Clock, random io.Reader, ttl time.Duration) (Tokens, error) {
	switch o.kind {
	case kindSimple:
		return NewSimple(clk, random, ttl), nil
	case kindJWT:
		return newJWT(clk, &o.jwt)
	}
	return none{}, nil
}

// none are the tokens of a cluster without any.
type none struct{}

func (none) Issue(Keys, Proof) (string, error) { return "", kverror.AuthFailed }

func (none) Verify(*View, string) (Identity, error) {
	return Identity{}, kverror.New(kverror.InvalidAuthToken, "--auth-token has no kind of tokens")
}
