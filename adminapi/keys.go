package adminapi

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// KeyFormat is how commands print keys and read them, so that what one prints can be given to another.
type KeyFormat string

// The formats.
const (
	// QuotedKeys are plain text. What is no plain text, or might be mistaken for another word of a command line, stands in double quotes
	// with the escapes of Go: "a\x00\"".
	QuotedKeys KeyFormat = "quoted"
	HexKeys    KeyFormat = "hex"
	Base64Keys KeyFormat = "base64"
)

// ParseKeyFormat returns the format of a name.
func ParseKeyFormat(name string) (KeyFormat, error) {
	switch f := KeyFormat(name); f {
	case QuotedKeys, HexKeys, Base64Keys:
		return f, nil
	}
	return "", fmt.Errorf("--key-format %s: there are quoted, hex and base64", name)
}

// Text returns a key as it is printed. Key reads it back.
func (f KeyFormat) Text(key []byte) string {
	switch {
	case f == HexKeys:
		return hex.EncodeToString(key)
	case f == Base64Keys:
		return base64.StdEncoding.EncodeToString(key)
	case plain(key):
		return string(key)
	}
	return strconv.Quote(string(key))
}

// plain says whether a key needs no quotes.
func plain(key []byte) bool {
	if len(key) > 0 && key[0] == '-' || !utf8.Valid(key) {
		return false
	}
	return !strings.ContainsFunc(string(key), func(r rune) bool {
		return !strconv.IsPrint(r) || r == utf8.RuneError || strings.ContainsRune(` "'\`, r)
	})
}

// Key reads a key of a command line.
func (f KeyFormat) Key(text string) (key []byte, err error) {
	switch {
	case f == HexKeys:
		key, err = hex.DecodeString(text)
	case f == Base64Keys:
		key, err = base64.StdEncoding.DecodeString(text)
	case strings.HasPrefix(text, `"`): // also what the shell has taken the second quote of
		var s string
		if s, err = strconv.Unquote(text); err == nil {
			key = []byte(s)
		} else {
			err = errors.New(`a key that begins with a quote is written as Go writes strings, in quotes: '"\x00\""'`)
		}
	default:
		key = []byte(text)
	}
	if err != nil {
		return nil, fmt.Errorf("%s is no %s key: %w", text, f, err)
	}
	return key, nil
}

// border is a key at which a range begins or ends, or other words for none.
func (f KeyFormat) border(key []byte, none string) string {
	if len(key) == 0 {
		return none
	}
	return f.Text(key)
}

// SizeText is a number of bytes for people.
func SizeText(n int64) string {
	f, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB"}
	i := 0
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}

// perSecond is a rate for people, "" for none.
func perSecond(n float64) string {
	switch {
	case n == 0:
		return ""
	case n < 10:
		return strconv.FormatFloat(n, 'f', 1, 64)
	}
	return strconv.FormatFloat(n, 'f', 0, 64)
}
