package auth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
	"github.com/skeindb/skein/sim/simclock"
)

// keyFiles are a key's private and public file.
type keyFiles struct{ private, public string }

// testKeys makes one key of each type. They are made once: RSA takes its time.
var testKeys = sync.OnceValues(func() (map[string]crypto.Signer, error) {
	keys := map[string]crypto.Signer{}
	var errs []error
	add := func(name string, k crypto.Signer, err error) {
		keys[name] = k
		errs = append(errs, err)
	}
	for _, name := range []string{"rsa", "rsa2"} {
		k, err := rsa.GenerateKey(rand.Reader, 2048)
		add(name, k, err)
	}
	for name, curve := range map[string]elliptic.Curve{"p256": elliptic.P256(), "p384": elliptic.P384(), "p521": elliptic.P521()} {
		k, err := ecdsa.GenerateKey(curve, rand.Reader)
		add(name, k, err)
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	add("ed", ed, err)
	return keys, errors.Join(errs...)
})

// writeKeys writes the keys to files.
func writeKeys(t *testing.T) map[string]keyFiles {
	t.Helper()
	keys, err := testKeys()
	if err != nil {
		t.Fatal(err)
	}
	dir, out := t.TempDir(), map[string]keyFiles{}
	write := func(name, kind string, b []byte, err error) string {
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, k := range keys {
		private, err := x509.MarshalPKCS8PrivateKey(k)
		p := write(name+".key", "PRIVATE KEY", private, err)
		public, err := x509.MarshalPKIXPublicKey(k.Public())
		out[name] = keyFiles{p, write(name+".pub", "PUBLIC KEY", public, err)}
	}
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("a secret of the cluster's nodes"), 0o600); err != nil {
		t.Fatal(err)
	}
	out["secret"] = keyFiles{private: secret}
	return out
}

// methods are all methods of signing, with the keys for them.
var methods = map[string]string{
	"RS256": "rsa", "RS384": "rsa", "RS512": "rsa", "PS256": "rsa", "PS384": "rsa", "PS512": "rsa",
	"ES256": "p256", "ES384": "p384", "ES512": "p521", "EdDSA": "ed", "HS256": "secret", "HS384": "secret", "HS512": "secret",
}

// open returns the tokens of options at a clock.
func open(t *testing.T, clk *simclock.Clock, options string) Tokens {
	t.Helper()
	o, err := ParseOptions(options)
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := o.Open(clk, testRandom(), testTTL)
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// TestJWT: with each method a token is made, verified by who has the key or its public half, and refused
// when it has expired.
func TestJWT(t *testing.T) {
	keys := writeKeys(t)
	for method, key := range methods {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				clk := simclock.New(0, 1)
				k := keys[key]
				maker := open(t, clk, "jwt,ttl=90s,sign-method="+method+",priv-key="+k.private)
				token, err := maker.Issue(Keys{}, Proof{User: "u", Index: 5, Revision: 7})
				if err != nil {
					t.Fatal(err)
				}
				all := []Tokens{maker}
				if k.public != "" {
					verifier := open(t, clk, "jwt,sign-method="+method+",pub-key="+k.public)
					if token, err := verifier.Issue(Keys{}, Proof{User: "u"}); !errors.Is(err, ErrVerifyOnly) {
						t.Errorf("a public key makes %q: %v", token, err)
					}
					all = append(all, verifier, open(t, clk, "jwt,sign-method="+method+",priv-key="+k.private+",pub-key="+k.public))
				}
				for i, v := range all {
					if id, err := v.Verify(nil, token); err != nil || id.User != "u" || id.Revision != 7 {
						t.Errorf("node %d: %+v, %v", i, id, err)
					}
				}
				clk.StepWall(91 * time.Second)
				for i, v := range all {
					if _, err := v.Verify(nil, token); !errors.Is(err, kverror.InvalidAuthToken) || !strings.Contains(err.Error(), "expired") {
						t.Errorf("node %d, after the ttl: %v", i, err)
					}
				}
			})
		})
	}
}

// TestJWTMethodIsPinned: a token that is signed in any other way is refused, whatever its header says;
// with the public key as the secret of HS256 too, which everybody has.
func TestJWTMethodIsPinned(t *testing.T) {
	files := writeKeys(t)
	keys, _ := testKeys()
	public, err := os.ReadFile(files["rsa"].public)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := os.ReadFile(files["secret"].private)
	if err != nil {
		t.Fatal(err)
	}
	signers := map[string]any{"none": jwt.UnsafeAllowNoneSignatureType}
	for method, key := range methods {
		signers[method] = secret
		if k := keys[key]; k != nil {
			signers[method] = k
		}
	}
	claims := jwt.MapClaims{claimUser: "root", claimRevision: 7}
	synctest.Test(t, func(t *testing.T) {
		for _, pinned := range []string{"RS256", "PS256", "HS256", "ES256", "EdDSA"} {
			k := files[methods[pinned]]
			v := open(t, simclock.New(0, 1), "jwt,sign-method="+pinned+",priv-key="+k.private)
			check := func(what, token string, want bool) {
				if id, err := v.Verify(nil, token); (err == nil) != want || err != nil && !errors.Is(err, kverror.InvalidAuthToken) {
					t.Errorf("pinned to %s, signed with %s: %+v, %v", pinned, what, id, err)
				}
			}
			for method, key := range signers {
				token, err := jwt.NewWithClaims(jwt.GetSigningMethod(method), claims).SignedString(key)
				if err != nil {
					t.Fatal(err)
				}
				check(method, token, method == pinned)
				// The same signature below a header that names the pinned method.
				_, rest, _ := strings.Cut(token, ".")
				header := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"` + pinned + `","typ":"JWT"}`))
				if method != pinned {
					check(method+" as "+pinned, header+"."+rest, false)
				}
			}
			for _, method := range []string{"HS256", "HS384"} {
				for _, key := range [][]byte{public, {}} {
					token, err := jwt.NewWithClaims(jwt.GetSigningMethod(method), claims).SignedString(key)
					if err != nil {
						t.Fatal(err)
					}
					check(method+" by the public key", token, false)
				}
			}
			other, err := jwt.NewWithClaims(jwt.SigningMethodRS256, claims).SignedString(keys["rsa2"])
			if err != nil {
				t.Fatal(err)
			}
			check("another key", other, false)
		}
	})
}

// TestJWTClaims: what a genuine token must say. One that lacks a time at which it expires is etcd's too.
func TestJWTClaims(t *testing.T) {
	files := writeKeys(t)
	secret, err := os.ReadFile(files["secret"].private)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		v := open(t, simclock.New(0, 1), "jwt,sign-method=HS256,priv-key="+files["secret"].private)
		soon := time.Now().Add(time.Minute).Unix()
		for _, c := range []struct {
			claims jwt.MapClaims
			want   string
		}{
			{jwt.MapClaims{claimUser: "u", claimRevision: 7}, ""},
			{jwt.MapClaims{claimUser: "u", claimRevision: 7, claimExpires: soon, "more": "x"}, ""},
			{jwt.MapClaims{claimUser: "u", claimRevision: 7, claimExpires: "soon"}, "no JSON web token"},
			{jwt.MapClaims{claimUser: "u", claimRevision: 7, "nbf": soon}, "not valid yet"},
			{jwt.MapClaims{claimUser: "u"}, "no revision"},
			{jwt.MapClaims{claimUser: "u", claimRevision: "7"}, "no revision"},
			{jwt.MapClaims{claimUser: "u", claimRevision: -1}, "no revision"},
			{jwt.MapClaims{claimUser: "u", claimRevision: 1e30}, "no revision"},
			{jwt.MapClaims{claimRevision: 7}, "no username"},
			{jwt.MapClaims{claimUser: 1, claimRevision: 7}, "no username"},
			{jwt.MapClaims{claimUser: "u", claimRevision: 7, "more": strings.Repeat("x", maxJWT)}, "longer than"},
		} {
			token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, c.claims).SignedString(secret)
			if err != nil {
				t.Fatal(err)
			}
			id, err := v.Verify(nil, token)
			if c.want == "" {
				if err != nil || id.User != "u" || id.Revision != 7 {
					t.Errorf("%v: %+v, %v", c.claims, id, err)
				}
			} else if !errors.Is(err, kverror.InvalidAuthToken) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v: %+v, %v, want %q", c.claims, id, err, c.want)
			}
		}
	})
}

// TestCurrent: an identity of an older auth revision is to be proved anew.
func TestCurrent(t *testing.T) {
	s := rights.New()
	s.Revision = 7
	for revision, want := range map[uint64]error{0: kverror.UserEmpty, 6: kverror.AuthOldRevision, 7: nil, 8: nil} {
		if err := (Identity{User: "u", Revision: revision}).Current(s); !errors.Is(err, want) {
			t.Errorf("revision %d: %v, want %v", revision, err, want)
		}
	}
}

// TestOptions: a wrong option is refused with etcd's text and what was wrong. conformance has more of
// them beside etcd's own reader.
func TestOptions(t *testing.T) {
	k := writeKeys(t)
	for _, c := range []struct {
		options string
		want    []string
	}{
		{"bearer", []string{ErrOptions.Error(), `"bearer"`, "simple", "jwt"}},
		{"simple,x", []string{ErrOptions.Error(), `"x"`}},
		{"jwt,a=b=c", []string{ErrOptions.Error(), `"a=b=c"`}},
		{"jwt,ttl=1s,ttl=2s", []string{ErrOptions.Error(), "ttl", "twice"}},
		{"jwt,ttl=0s,sign-method=HS256", []string{ErrOptions.Error(), "ttl=0s"}},
		{"jwt,ttl=5,sign-method=HS256", []string{ErrOptions.Error(), "ttl", "unit"}},
		{"jwt", []string{ErrOptions.Error(), "sign-method", "EdDSA"}},
		{"jwt,sign-method=hs256", []string{ErrOptions.Error(), `"hs256"`}},
		{"jwt,sign-method=none", []string{"unsupported signing method"}},
		{"jwt,sign-method=HS256", []string{ErrMissingKey.Error(), "priv-key"}},
		{"jwt,sign-method=RS256", []string{ErrMissingKey.Error(), "pub-key"}},
		{"jwt,sign-method=RS256,pub-key=/missing", []string{ErrOptions.Error(), "/missing"}},
		{"jwt,sign-method=RS256,priv-key=" + k["rsa"].private + ",pub-key=" + k["rsa2"].public, []string{ErrKeyMismatch.Error(), k["rsa2"].public}},
		{"jwt,sign-method=RS256,priv-key=" + k["p256"].private, []string{"RSA", k["p256"].private}},
		{"jwt,sign-method=EdDSA,priv-key=" + k["rsa"].private, []string{"Ed25519", k["rsa"].private}},
		{"jwt,sign-method=ES256,priv-key=" + k["p384"].private, []string{"256 bits", "384"}},
		{"jwt,sign-method=ES384,pub-key=" + k["p256"].public, []string{"384 bits", "256"}},
	} {
		o, err := ParseOptions(c.options)
		if err == nil {
			_, err = o.Open(fixedClock{}, testRandom(), testTTL)
		}
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q", c.options, err, want)
			}
		}
	}
	o, err := ParseOptions("jwt,sign-method=HS256,b=1,a=2,priv-key=" + k["secret"].private)
	if err != nil || !slices.Equal(o.Ignored, []string{"a", "b"}) {
		t.Errorf("%+v, %v", o, err)
	}
	if o, err = ParseOptions(""); err != nil {
		t.Fatal(err)
	}
	tokens, err := o.Open(fixedClock{}, testRandom(), testTTL)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tokens.Issue(Keys{}, Proof{User: "u"}); !errors.Is(err, kverror.AuthFailed) {
		t.Errorf("a login without tokens: %v", err)
	}
	if _, err := tokens.Verify(nil, "x"); !errors.Is(err, kverror.InvalidAuthToken) {
		t.Errorf("a token without tokens: %v", err)
	}
}

// FuzzJWT: no text without the key's signature is accepted, and no error quotes it.
func FuzzJWT(f *testing.F) {
	file := filepath.Join(f.TempDir(), "key")
	if err := os.WriteFile(file, []byte(fmt.Sprint(testRandom().Uint64(), "secret")), 0o600); err != nil {
		f.Fatal(err)
	}
	o, err := ParseOptions("jwt,sign-method=HS256,priv-key=" + file)
	if err != nil {
		f.Fatal(err)
	}
	v, err := o.Open(fixedClock{}, testRandom(), testTTL)
	if err != nil {
		f.Fatal(err)
	}
	for _, header := range []map[string]any{{"alg": "none"}, {"alg": "HS256", "typ": "JWT"}, {"alg": []string{"HS256"}}} {
		h, err := json.Marshal(header)
		if err != nil {
			f.Fatal(err)
		}
		enc := base64.RawURLEncoding.EncodeToString
		f.Add(enc(h) + "." + enc([]byte(`{"username":"root","revision":7}`)) + "." + enc(make([]byte, 32)))
	}
	f.Fuzz(func(t *testing.T, token string) {
		id, err := v.Verify(nil, token)
		if !errors.Is(err, kverror.InvalidAuthToken) {
			t.Errorf("%q is the token of %q: %v", token, id.User, err)
		}
		if len(token) > 20 && strings.Contains(err.Error(), token) {
			t.Errorf("the error %q has the token", err)
		}
	})
}
