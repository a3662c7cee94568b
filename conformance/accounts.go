package conformance

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"hash"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// secretOfAll signs JWTs.
const secretOfAll = "a secret of all nodes"

// stores are the two of a pair: tokens have their order.
func (p *pair) stores() [2]*store { return [2]*store{p.etcd, p.skein} }

// methodNamed returns a method by its name, which is the only one of that name.
func methodNamed(name protoreflect.Name) protoreflect.MethodDescriptor {
	for _, m := range allMethods() {
		if m.Name() == name {
			return m
		}
	}
	panic(fmt.Sprintf("conformance: no method has the name %q", name))
}

// both makes a call at both stores, each with its token; no tokens make it as nobody. It returns an error where codes
// and texts differ, or where the call fails and must not.
func (p *pair) both(ctx context.Context, tokens []string, must bool, method protoreflect.Name, req proto.Message) error {
	var got [2]answer
	m := methodNamed(method)
	_ = each(2, func(i int) error {
		ctx := ctx
		if tokens != nil {
			ctx = withBearer(ctx, tokens[i])
		}
		got[i] = invoke(ctx, p.stores()[i].conns[0], m, overGRPC, req)
		return nil
	})
	if got[0].code != got[1].code || got[0].text != got[1].text || must && got[0].code != codes.OK {
		return fmt.Errorf("%s{%s}:\n  etcd:  %s\n  Skein: %s", method, short(req), got[0], got[1])
	}
	return nil
}

// login returns a token of each store.
func (p *pair) login(ctx context.Context, user, password string) (tokens [2]string, err error) {
	return tokens, each(2, func(i int) error {
		r, err := pb.NewAuthClient(p.stores()[i].conns[0]).Authenticate(ctx, &pb.AuthenticateRequest{Name: user, Password: password})
		if err != nil {
			return fmt.Errorf("log in as %q: %s: %w", user, p.stores()[i].name, err)
		}
		tokens[i] = r.GetToken()
		return nil
	})
}

// signed returns a JWT, as whoever has the secret can make one. A zero revision is left out.
func signed(secret, method, user string, revision uint64, until time.Time) string {
	claims := map[string]any{"username": user, "exp": until.Unix()}
	if revision > 0 {
		claims["revision"] = revision
	}
	part := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err) // a map of strings and numbers
		}
		return base64.RawURLEncoding.EncodeToString(b)
	}
	made := map[string]func() hash.Hash{"HS256": sha256.New, "HS512": sha512.New}[method]
	text := part(map[string]string{"alg": method, "typ": "JWT"}) + "." + part(claims)
	mac := hmac.New(made, []byte(secret))
	mac.Write([]byte(text))
	return text + "." + base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}
