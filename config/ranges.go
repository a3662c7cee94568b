package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
)

const (
	// maxSplitFileBytes bounds the file of initial-split-keys.
	maxSplitFileBytes = 64 << 20
	// Printable ASCII: 95 characters from space to tilde.
	firstPrintable, numPrintable = 0x20, 95
)

func (c *Config) validateRanges() error {
	switch {
	case c.InitialRanges < 1 || c.InitialRanges > MaxInitialRanges:
		return fmt.Errorf("--initial-ranges must be between 1 and %d (set to %d)", MaxInitialRanges, c.InitialRanges)
	case len(c.InitialSplitKeys) > 0 && c.InitialRanges != 1:
		return errors.New("--initial-ranges and --initial-split-keys exclude each other")
	case len(c.InitialSplitKeys) >= MaxInitialRanges:
		return fmt.Errorf("--initial-split-keys has %d keys, at most %d are possible", len(c.InitialSplitKeys), MaxInitialRanges-1)
	}
	for i, k := range c.InitialSplitKeys {
		if len(k) == 0 {
			return errors.New("--initial-split-keys has an empty key, where the first range begins anyway")
		}
		if i > 0 && bytes.Compare(c.InitialSplitKeys[i-1], k) >= 0 {
			return fmt.Errorf("--initial-split-keys: %q does not come after %q", k, c.InitialSplitKeys[i-1])
		}
	}
	return nil
}

// SplitKeys returns the keys at which the ranges of a new cluster begin, ascending,
// without the first range's: n keys make n+1 ranges.
func (c *Config) SplitKeys() [][]byte {
	if len(c.InitialSplitKeys) > 0 {
		return c.InitialSplitKeys
	}
	return evenSplits(c.InitialRanges)
}

// evenSplits returns the n-1 keys that divide the strings of printable ASCII into n
// parts of the same size, in as few characters as make the parts even to an eighth.
func evenSplits(n int) [][]byte {
	if n <= 1 {
		return nil
	}
	digits, space := 1, numPrintable
	for space < 8*n {
		digits++
		space *= numPrintable
	}
	keys := make([][]byte, 0, n-1)
	for i := 1; i < n; i++ {
		key := make([]byte, digits)
		v := i * space / n
		for d := digits - 1; d >= 0; d-- {
			key[d] = firstPrintable + byte(v%numPrintable)
			v /= numPrintable
		}
		// Trailing spaces are the lowest character: the order stays without them.
		if t := bytes.TrimRight(key, " "); len(t) > 0 {
			key = t
		}
		keys = append(keys, key)
	}
	return keys
}

// readSplitKeys reads the file of initial-split-keys.
func readSplitKeys(path string) ([][]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSplitFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxSplitFileBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxSplitFileBytes)
	}
	keys, err := parseSplitKeys(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return keys, nil
}

// parseSplitKeys reads one key a line. A backslash begins \\, \n, \r, \t or \xNN
// (two hexadecimal digits); every other byte stands for itself, spaces too. A line in
// double quotes is a quoted key, as skein range list prints it. A
// carriage return at the end of a line, empty lines and lines that begin with #
// are left out; a key that begins with # is written \x23. The order does not
// matter, a key twice is an error.
func parseSplitKeys(b []byte) ([][]byte, error) {
	var keys [][]byte
	for n, line := range bytes.Split(b, []byte("\n")) {
		line = bytes.TrimSuffix(line, []byte("\r"))
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		key, err := unescape(line)
		if len(line) > 1 && line[0] == '"' && line[len(line)-1] == '"' {
			key, err = unquote(line)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", n+1, err)
		}
		keys = append(keys, key)
	}
	if len(keys) == 0 {
		return nil, errors.New("no keys")
	}
	slices.SortFunc(keys, bytes.Compare)
	for i := 1; i < len(keys); i++ {
		if bytes.Equal(keys[i-1], keys[i]) {
			return nil, fmt.Errorf("the key %q is there twice", keys[i])
		}
	}
	return keys, nil
}

func unquote(line []byte) ([]byte, error) {
	key, err := strconv.Unquote(string(line))
	if err != nil {
		return nil, fmt.Errorf("%s is no quoted key: write \\\" and \\\\ for quotes and backslashes in it, or \\x22 for a first quote without quoting", line)
	}
	return []byte(key), nil
}

func unescape(line []byte) ([]byte, error) {
	key := make([]byte, 0, len(line))
	for i := 0; i < len(line); i++ {
		if line[i] != '\\' {
			key = append(key, line[i])
			continue
		}
		i++
		if i == len(line) {
			return nil, errors.New("a backslash at the end: write \\\\ for a backslash")
		}
		switch line[i] {
		case '\\':
			key = append(key, '\\')
		case 'n':
			key = append(key, '\n')
		case 'r':
			key = append(key, '\r')
		case 't':
			key = append(key, '\t')
		case 'x':
			if i+2 >= len(line) {
				return nil, errors.New("\\x needs two hexadecimal digits")
			}
			hi, ok1 := unhex(line[i+1])
			lo, ok2 := unhex(line[i+2])
			if !ok1 || !ok2 {
				return nil, fmt.Errorf("\\x needs two hexadecimal digits, not %q", line[i+1:i+3])
			}
			key = append(key, hi<<4|lo)
			i += 2
		default:
			return nil, fmt.Errorf("unknown escape \\%c: there are \\\\ \\n \\r \\t \\xNN", line[i])
		}
	}
	return key, nil
}

func unhex(c byte) (byte, bool) {
	switch {
	case c >= '0' && c <= '9':
		return c - '0', true
	case c >= 'a' && c <= 'f':
		return c - 'a' + 10, true
	case c >= 'A' && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}
