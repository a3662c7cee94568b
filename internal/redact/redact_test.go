package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"
)

const planted = "planted-key-5d21"

func TestKeyKeepsItsSlashes(t *testing.T) {
	r := New([]byte("salt"))
	a, b := string(r.Key([]byte("/registry/pods/a"))), string(r.Key([]byte("/registry/leases/a")))
	pa, pb := strings.Split(a, "/"), strings.Split(b, "/")
	if len(pa) != 4 || len(pb) != 4 || pa[0] != "" || pa[1] != pb[1] || pa[2] == pb[2] || pa[3] != pb[3] {
		t.Errorf("%s and %s", a, b)
	}
	if other := string(New([]byte("other")).Key([]byte("/registry/pods/a"))); other == a {
		t.Errorf("another salt gives %s too", other)
	}
	if got := string((&Redactor{}).Key([]byte("/registry"))); got != "/registry" {
		t.Errorf("without a salt: %s", got)
	}
}

// A key goes from all forms in which code writes keys.
func TestTextHasNoKeys(t *testing.T) {
	r := New([]byte("salt"))
	key := "/a/" + planted + "\x00\xff\"q\\"
	for _, text := range []string{
		fmt.Sprintf("shard: split range 4 at %q: busy", key),
		fmt.Sprintf("[%q, ∞)", key), fmt.Sprintf("[%q, %q)", "a", key),
		fmt.Sprintf("key/%q@7", key), fmt.Sprintf("engine: bad key: versioned key %x: revision 0", key),
		fmt.Sprintf("placement: range 3 under key %x", "p"+planted),
		"pebble: keys out of order: " + planted + "#7,SET >= [b#3,DEL",
		fmt.Sprintf("cut off: %.20q", key), fmt.Sprintf("cut off: %q", key)[:25],
		fmt.Sprintf("an error in an error: %q", fmt.Sprintf("no key %q", key)),
	} {
		got := r.Text(text)
		if strings.Contains(got, "planted") || strings.Contains(got, hex.EncodeToString([]byte("planted"))) {
			t.Errorf("%s\nbecomes %s", text, got)
		}
	}
	for _, text := range []string{
		"range 17 of node 8e9e05c52164694d: no quorum for 3s", "took 412ms at 10.0.0.1:2380", "term 5, index 77",
	} {
		if got := r.Text(text); got != text {
			t.Errorf("%s\nbecomes %s", text, got)
		}
	}
}

func TestSecretsGoInAnyCase(t *testing.T) {
	for _, text := range []string{
		"https://root:planted@10.0.0.1:2379/", "s3://bucket?secret-access-key=planted&region=a", `--password=planted`, `password: "planted"`,
		"password=ab,planted", "password=ab&planted next", `password=ab"planted`, "password='a planted'", `password: "a planted"`, `password: "a \" planted"`,
		`password: "a planted`, `"password":"a planted"`, `bad "{\"password\":\"a planted\"}"`, `bad "{\"password\":\"a \\\" planted\"}"`,
		"AWS_SECRET_ACCESS_KEY=planted", "Authorization: Bearer planted.a.b", "token plAntedplAntedpl.1234", "eyJplanted.eyJ9.c2ln",
		"-----BEGIN EC PRIVATE KEY-----\nplanted\n-----END EC PRIVATE KEY-----",
	} {
		for _, r := range []*Redactor{{}, New([]byte("salt"))} {
			if got := r.Text(text); strings.Contains(strings.ToLower(got), "planted") {
				t.Errorf("%s\nbecomes %s", text, got)
			}
		}
	}
}

// What stands around a secret stays, and keys behind it are found.
func TestSecretsEnd(t *testing.T) {
	for text, want := range map[string]string{
		`password=a,b c`:          `password=(hidden) c`,
		`password: "a b" c`:       `password: "(hidden)" c`,
		`password: "a\\" c "d"`:   `password: "(hidden)" c "d"`,
		`password: 'a "b' c`:      `password: '(hidden)"' c`,
		`"password=a" for "b"`:    `"password=(hidden)" for "b"`,
		`"{\"token\":\"a b\"}" c`: `"{\"token\":\"(hidden)\"}" c`,
		`password: `:              `password: `,
		`token=a secret='b`:       `token=(hidden) secret='(hidden)`,
	} {
		if got := Secrets(text); got != want || Secrets(got) != want {
			t.Errorf("%s becomes %s, not %s", text, got, want)
		}
	}
	for _, text := range []string{`"password=a" for "planted"`, `bad "{\"a\":\"password=x\"}" for "planted"`, `"token: 'x" for 'k' "planted"`} {
		if got := New([]byte("salt")).Text(text); strings.Contains(got, "planted") {
			t.Errorf("%s becomes %s", text, got)
		}
	}
}

func TestJSONKeepsItsOrder(t *testing.T) {
	in := fmt.Sprintf(`{"level":"info","ts":"2026-11-28T20:00:00Z","msg":"split","span":"[\"a/%s\", ∞)","split_key":%q,"start":"planted","args":["--x","planted"],"n":12345678901234567890,"password":"planted","list":[1,null,true,{}]}`,
		planted, base64.StdEncoding.EncodeToString([]byte(planted)))
	var out bytes.Buffer
	if err := New([]byte("salt")).JSON(&out, []byte(in+"\n"+in+"\n")); err != nil {
		t.Fatal(err)
	}
	got := out.String()
	if strings.Count(got, "\n") != 2 || !strings.HasPrefix(got, `{"level":"info","ts":"2026-11-28T20:00:00Z","msg":"split","span":"[\"`) ||
		!strings.Contains(got, `"args":["(hidden)","(hidden)"],"n":12345678901234567890,"password":"(hidden)","list":[1,null,true,{}]}`) {
		t.Error(got)
	}
	if strings.Contains(got, "planted") || strings.Contains(got, base64.StdEncoding.EncodeToString([]byte(planted))) {
		t.Error(got)
	}
	out.Reset()
	if err := New([]byte("salt")).JSON(&out, []byte(`{"cut":"off`)); err != nil || strings.Contains(out.String(), "off") {
		t.Errorf("%v: %s", err, &out)
	}
}

func FuzzJSON(f *testing.F) {
	f.Add([]byte(`{"a":"\"k\"","start":"YQ=="}`))
	f.Add([]byte(`[1,"x`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var out bytes.Buffer
		if err := New([]byte("salt")).JSON(&out, in); err != nil {
			t.Error(err)
		}
	})
}
