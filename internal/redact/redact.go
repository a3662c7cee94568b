// Package redact takes keys and secrets out of what leaves the cluster in a debug bundle.
//
// Keys are hashed part by part with a salt that nobody keeps: equal parts look equal within one bundle, and nobody
// can try guesses. It finds keys in text because all of Skein's code writes them in double quotes (%q), or in hex
// where they are part of a record's name. Secrets go without a trace, whatever is said of keys.
package redact

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// Hidden stands in the place of a secret.
const Hidden = "(hidden)"

// hashBytes is how much of a part's hash is shown: enough that two parts of a large store rarely look equal.
const hashBytes = 6

// Redactor takes keys out of text. A zero Redactor leaves keys as they are, and hides secrets all the same.
type Redactor struct{ salt []byte }

// New returns one that hashes keys with the salt. With an empty one it leaves them as they are.
func New(salt []byte) *Redactor { return &Redactor{salt} }

// Key returns a key whose parts between slashes are hashed.
func (r *Redactor) Key(key []byte) []byte {
	if len(r.salt) == 0 || len(key) == 0 {
		return key
	}
	parts := bytes.Split(key, []byte{'/'})
	for i, p := range parts {
		if len(p) > 0 {
			parts[i] = r.hash(p)
		}
	}
	return bytes.Join(parts, []byte{'/'})
}

func (r *Redactor) hash(part []byte) []byte {
	h := hmac.New(sha256.New, r.salt)
	h.Write(part)
	return hex.AppendEncode(nil, h.Sum(nil)[:hashBytes])
}

var (
	// quoted is what stands in double quotes. The text may have been cut before the second one.
	quoted = regexp.MustCompile(`"(?:[^"\\]|\\.)*(?:"|\\?$)`)
	// longHex is longer than an id in hex, which has 16 digits at most; namedHex is said to be a key, of any length.
	longHex  = regexp.MustCompile(`\b[0-9a-fA-F]{17,}\b`)
	namedHex = regexp.MustCompile(`\b(keys?|prefix|unknown record) ((?:[0-9a-f]{2})+)\b`)
	// storeKey is a key as Pebble's own errors have it.
	storeKey = regexp.MustCompile(`[^\s\[(]+#[0-9]+,[A-Z]+`)

	// credentials are the password of a URL, what is said to be a secret, and tokens of users by their looks.
	urlPassword = regexp.MustCompile(`(://[^\s/@:]*):[^\s/@]+@`)
	saidSecret  = regexp.MustCompile(`(?i)\b([\w-]*(?:password|passwd|secret|token|access[-_]?key)[\w-]*)\\*["']?\s*[=:]\s*`)
	doubleQuote = regexp.MustCompile(`\\*"`)
	openQuote   = regexp.MustCompile(`^\\*["']`)
	simpleToken = regexp.MustCompile(`\b[A-Za-z]{16}\.[0-9]+\b`)
	webToken    = regexp.MustCompile(`\beyJ[\w-]+\.[\w-]+\.[\w-]*`)
	bearer      = regexp.MustCompile(`(?i)\b(bearer|basic)\s+[\w.+/=-]+`)
	privateKey  = regexp.MustCompile(`(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)`)
	secretName  = regexp.MustCompile(`(?i)password|passwd|secret|token$|^authorization$|access[-_]?key|^args$`)
)

// The fields of JSON that hold keys as they are, and in base64.
var (
	plainKeys  = map[string]bool{"start": true, "end": true}
	base64Keys = map[string]bool{"start_base64": true, "end_base64": true, "Start": true, "End": true, "split_key": true}
)

// Secrets returns the text without passwords, tokens and private keys.
func Secrets(text string) string {
	text = privateKey.ReplaceAllString(text, Hidden)
	text = urlPassword.ReplaceAllString(text, "$1:"+Hidden+"@")
	text = bearer.ReplaceAllString(text, "$1 "+Hidden)
	text = hideSaid(text)
	text = webToken.ReplaceAllString(text, Hidden)
	return simpleToken.ReplaceAllString(text, Hidden)
}

// hideSaid hides what is said to be a secret: to the closing quote if it is quoted, else to the next space.
func hideSaid(text string) string {
	var out strings.Builder
	for {
		said := saidSecret.FindStringIndex(text)
		if said == nil {
			out.WriteString(text)
			return out.String()
		}
		out.WriteString(text[:said[1]])
		text = text[said[1]:]
		quote := openQuote.FindString(text)
		n := quotedLen(text, quote)
		if quote == "" {
			if n = strings.IndexFunc(text, unicode.IsSpace); n < 0 {
				n = len(text)
			}
		}
		value := text[:n]
		text = text[n:]
		if value == "" {
			continue
		}
		out.WriteString(quote + Hidden)
		if !strings.HasSuffix(quote, `"`) { // what is quoted around may end in it: keys are found by their quotes
			out.WriteString(strings.Join(doubleQuote.FindAllString(value, -1), ""))
		}
		if len(value) >= 2*len(quote) && strings.HasSuffix(value, quote) {
			out.WriteString(quote)
		}
	}
}

// quotedLen is how long what begins with the quote is, with its end. That has as many backslashes before it as the quote, which may
// be within another quoted text. Without an end it is all of the text.
func quotedLen(text, quote string) int {
	if quote == "" {
		return 0
	}
	slashes := 0
	for i := len(quote); i < len(text); i++ {
		switch {
		case text[i] == '\\':
			slashes++
			continue
		case text[i] == quote[len(quote)-1] && (slashes == len(quote)-1 || len(quote) == 1 && slashes%2 == 0):
			return i + 1
		}
		slashes = 0
	}
	return len(text)
}

// Text returns the text without secrets, and with each key hashed.
func (r *Redactor) Text(text string) string {
	text = Secrets(text)
	if len(r.salt) == 0 {
		return text
	}
	text = quoted.ReplaceAllStringFunc(text, func(q string) string {
		plain, err := strconv.Unquote(q)
		if err != nil {
			plain = strings.Trim(q, `"`)
		}
		if plain == Hidden {
			return q
		}
		return strconv.Quote(string(r.Key([]byte(plain))))
	})
	text = namedHex.ReplaceAllStringFunc(text, func(m string) string {
		i := strings.LastIndexByte(m, ' ') + 1
		return m[:i] + string(r.hash([]byte(m[i:])))
	})
	text = storeKey.ReplaceAllStringFunc(text, func(k string) string { return string(r.hash([]byte(k))) })
	return longHex.ReplaceAllStringFunc(text, func(digits string) string { return string(r.hash([]byte(digits))) })
}

// JSON writes a copy of JSON values without secrets and with each key hashed, in the same order. What is no JSON is
// treated as text.
func (r *Redactor) JSON(w io.Writer, values []byte) error {
	d := json.NewDecoder(bytes.NewReader(values))
	d.UseNumber()
	var out bytes.Buffer
	for {
		err := r.value(d, &out, "")
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			_, err = io.WriteString(w, r.Text(string(values)))
			return err
		}
		out.WriteByte('\n')
	}
	_, err := w.Write(out.Bytes())
	return err
}

// value copies one value, which has that name in its object.
func (r *Redactor) value(d *json.Decoder, out *bytes.Buffer, name string) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	switch t := t.(type) {
	case json.Delim:
		return r.members(d, out, name, t)
	case string:
		return encode(out, r.field(name, t))
	default:
		if secretName.MatchString(name) && t != nil {
			return encode(out, Hidden)
		}
		return encode(out, t)
	}
}

// members copies the members of an object or a list, behind its beginning.
func (r *Redactor) members(d *json.Decoder, out *bytes.Buffer, name string, begin json.Delim) error {
	out.WriteRune(rune(begin))
	for first := true; d.More(); first = false {
		if !first {
			out.WriteByte(',')
		}
		if begin == '{' {
			t, err := d.Token()
			if err != nil {
				return err
			}
			name = fmt.Sprint(t)
			if err := encode(out, name); err != nil {
				return err
			}
			out.WriteByte(':')
		}
		if err := r.value(d, out, name); err != nil {
			return unexpected(err)
		}
	}
	end, err := d.Token()
	if err != nil {
		return unexpected(err)
	}
	_, err = fmt.Fprint(out, end)
	return err
}

// unexpected says of an end within a value that it is none between two.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// field is the text of a field with that name.
func (r *Redactor) field(name, text string) string {
	if secretName.MatchString(name) && text != "" {
		return Hidden
	}
	if key, err := base64.StdEncoding.DecodeString(text); base64Keys[name] && err == nil {
		return base64.StdEncoding.EncodeToString(r.Key(key))
	}
	if plainKeys[name] || base64Keys[name] {
		return string(r.Key([]byte(text)))
	}
	return r.Text(text)
}

func encode(out *bytes.Buffer, v any) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	out.Truncate(out.Len() - 1) // the newline
	return nil
}
