package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
)

// Support says what Skein does with a flag.
type Support uint8

// What there is to do with a flag.
const (
	// Honoured: the flag does what etcd's does, up to its note.
	Honoured Support = iota
	// Meaningless: nothing here corresponds to it. It is accepted, so that the scripts
	// and manifests of etcd work, and reported.
	Meaningless
	// NotYet: it asks for something that is missing. The start is refused, unless the
	// value asks for what Skein does anyway.
	NotYet
)

// String returns the support in the words of the documentation.
func (s Support) String() string {
	switch s {
	case Honoured:
		return "honoured"
	case Meaningless:
		return "meaningless here"
	case NotYet:
		return "not there yet"
	}
	return "support-" + strconv.Itoa(int(s))
}

// Flag is one row of the table of flags.
type Flag struct {
	Name    string
	Section string
	Support Support
	// Default is the value where nothing is given, as it would be written.
	Default string
	Usage   string
	// Note says how an honoured flag differs from etcd's, or why another one is
	// meaningless or not there yet.
	Note string
	// File is the flag's key in the configuration file, "" where it has none. A dot
	// separates the levels.
	File string
	// Own is set for the flags that etcd does not have.
	Own bool

	kind kind
	// set takes an honoured flag's value over.
	set func(*Config, value) error
	// check finds fault with a value that parses and is not used.
	check func(value) error
}

// IsBool says whether the flag may stand without a value.
func (f *Flag) IsBool() bool { return f.kind == kindBool || f.kind == kindIgnored }

// refuses says why the start is refused with this value, or nil.
func (f *Flag) refuses(v value) error {
	if f.check != nil {
		if err := f.check(v); err != nil {
			return fmt.Errorf("--%s: %w", f.Name, err)
		}
	}
	if f.Support != NotYet || v.text == f.Default {
		return nil
	}
	return fmt.Errorf("--%s=%s is refused: %s", f.Name, v.text, f.Note)
}

// kind is how a flag's value is written.
type kind uint8

const (
	kindString kind = iota
	kindBool
	kindInt
	kindUint
	kindUint32
	kindDuration
	kindMillis // milliseconds as a number
	kindURLs   // separated by commas
	kindList   // separated by commas; a list in the file
	kindSet    // kindList in ascending order without repetition, as etcd keeps some
	kindIgnored
)

// value is a parsed value.
type value struct {
	// text is the value as this package would write it.
	text string
	b    bool
	i    int64
	u    uint64
	d    time.Duration
	list []string
	urls []url.URL
}

// parse reads a value as it stands on a command line or in a variable.
func (k kind) parse(s string) (v value, err error) {
	v.text = s
	switch k {
	case kindBool:
		v.b, err = strconv.ParseBool(s)
		v.text = strconv.FormatBool(v.b)
	case kindInt:
		v.i, err = strconv.ParseInt(s, 0, 64)
		v.text = strconv.FormatInt(v.i, 10)
	case kindUint, kindUint32, kindMillis:
		bits := 64
		if k == kindUint32 {
			bits = 32
		}
		v.u, err = strconv.ParseUint(s, 0, bits)
		v.text = strconv.FormatUint(v.u, 10)
		if k == kindMillis && err == nil {
			if v.u > uint64(time.Hour/time.Millisecond)*24*365 {
				return v, errors.New("value out of range")
			}
			v.d = time.Duration(v.u) * time.Millisecond
		}
	case kindDuration:
		v.d, err = time.ParseDuration(s)
		v.text = v.d.String()
	case kindURLs:
		err = v.parseURLs(s)
	case kindList, kindSet:
		v.setList(k, strings.Split(s, ","), s == "")
	case kindString, kindIgnored:
		// The text is the value.
	}
	if ne := (*strconv.NumError)(nil); errors.As(err, &ne) {
		err = ne.Err // the value itself is named by whoever reports the error
	}
	return v, err
}

func (v *value) parseURLs(s string) error {
	if s == "" {
		return nil
	}
	urls, err := types.NewURLs(strings.Split(s, ","))
	if err != nil {
		return err
	}
	v.urls = slices.CompactFunc(urls, func(a, b url.URL) bool { return a == b })
	v.text = types.URLs(v.urls).String()
	return nil
}

func (v *value) setList(k kind, list []string, empty bool) {
	v.list = nil
	if !empty {
		v.list = list
	}
	if k == kindSet {
		slices.Sort(v.list)
		v.list = slices.Compact(v.list)
	}
	v.text = strings.Join(v.list, ",")
}

// parseFile reads a value as it stands in the configuration file, where YAML has
// types: durations are integer nanoseconds, lists are lists, and a string may also be
// a number.
func (k kind) parseFile(x any) (value, error) {
	switch x := x.(type) {
	case bool:
		if k == kindBool {
			return k.parse(strconv.FormatBool(x))
		}
		if k == kindString {
			// etcd takes "true" or "false" then, and a node named n is called false.
			return value{}, errors.New("YAML takes this word (y, n, yes, no, on, off, true, false) for a truth value: put it in quotes")
		}
	case json.Number:
		return k.parseFileNumber(x)
	case string:
		if k == kindString || k == kindURLs {
			return k.parse(x)
		}
		if k == kindDuration {
			return value{}, fmt.Errorf("%q: a duration is an integer number of nanoseconds here", x)
		}
	case []any:
		if k == kindList || k == kindSet {
			return k.parseFileList(x)
		}
	}
	return value{}, k.wrongType(x)
}

func (k kind) parseFileNumber(x json.Number) (value, error) {
	switch k {
	case kindString, kindInt, kindUint, kindUint32, kindMillis:
		return k.parse(x.String())
	case kindDuration:
		ns, err := x.Int64()
		if err != nil {
			return value{}, errors.New("a duration is an integer number of nanoseconds here")
		}
		return value{text: time.Duration(ns).String(), d: time.Duration(ns)}, nil
	default:
		return value{}, k.wrongType(x)
	}
}

func (k kind) parseFileList(x []any) (v value, err error) {
	list := make([]string, len(x))
	for i := range x {
		s, ok := x[i].(string)
		if !ok {
			return value{}, fmt.Errorf("element %d is no string", i+1)
		}
		list[i] = s
	}
	v.setList(k, list, len(list) == 0)
	return v, nil
}

func (k kind) wrongType(x any) error { return fmt.Errorf("%v is no %s", x, k.fileType()) }

// fileType names the kind as it is written in the file.
func (k kind) fileType() string {
	switch k {
	case kindBool:
		return "truth value"
	case kindInt, kindUint, kindUint32, kindMillis:
		return "number"
	case kindDuration:
		return "integer number of nanoseconds"
	case kindURLs:
		return "string of URLs separated by commas"
	case kindList, kindSet:
		return "list of strings"
	default:
		return "string"
	}
}
