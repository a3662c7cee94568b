package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"
)

// maxFileBytes bounds the configuration file.
const maxFileBytes = 1 << 20

// readFile reads the settings of a configuration file.
func readFile(table []Flag, path string) ([]given, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFileBytes {
		return nil, fmt.Errorf("larger than %d bytes", maxFileBytes)
	}
	return parseFile(table, b)
}

// parseFile reads YAML, or JSON, which is YAML too. A key without a value counts as
// not there, and so does an empty string of URLs. Unknown keys and keys that are
// there twice are errors, all of them named at once.
func parseFile(table []Flag, b []byte) ([]given, error) {
	j, err := yaml.YAMLToJSONStrict(b)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(j))
	d.UseNumber()
	var top map[string]any
	if err := d.Decode(&top); err != nil {
		return nil, err
	}
	extra := fileOnly()
	byKey := make(map[string]*Flag, len(table)+len(extra))
	for i := range table {
		if table[i].File != "" {
			byKey[table[i].File] = &table[i]
		}
	}
	for i := range extra {
		byKey[extra[i].Name] = &extra[i]
	}
	w := fileWalk{byKey: byKey, sections: sections(byKey), names: flagNames(table)}
	w.walk("", top)
	return w.out, errors.Join(w.errs...)
}

// fileWalk visits the keys of a file in ascending order.
type fileWalk struct {
	byKey    map[string]*Flag
	sections map[string]bool
	names    map[string]string
	out      []given
	errs     []error
}

func (w *fileWalk) walk(prefix string, m map[string]any) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		key, x := prefix+k, m[k]
		if w.sections[key] {
			sub, ok := x.(map[string]any)
			if !ok && x != nil {
				w.errs = append(w.errs, fmt.Errorf("invalid %s: %v is no section", key, x))
			}
			w.walk(key+".", sub)
			continue
		}
		f, ok := w.byKey[key]
		switch {
		case !ok && w.names[k] != "":
			w.errs = append(w.errs, fmt.Errorf("unknown key %s: in the file it is %s", key, w.names[k]))
			continue
		case !ok:
			w.errs = append(w.errs, w.unknown(prefix, k))
			continue
		case x == nil || x == "" && f.kind == kindURLs:
			continue
		}
		v, err := f.kind.parseFile(x)
		if err != nil {
			w.errs = append(w.errs, fmt.Errorf("invalid %s: %w", key, err))
			continue
		}
		w.out = append(w.out, given{flag: f, value: v, source: key, origin: FromFile})
	}
}

// unknown is the error of an unknown key, with the one of the same section that was meant. Names are compared without the
// section's.
func (w *fileWalk) unknown(prefix, name string) error {
	var names []string
	for _, keys := range [...][]string{slices.Sorted(maps.Keys(w.byKey)), slices.Sorted(maps.Keys(w.sections))} {
		for _, key := range keys {
			if rest, ok := strings.CutPrefix(key, prefix); ok && !strings.Contains(rest, ".") {
				names = append(names, rest)
			}
		}
	}
	if n := Nearest(name, names); n != "" {
		return fmt.Errorf("unknown key %s%s; did you mean %s%s?", prefix, name, prefix, n)
	}
	return fmt.Errorf("unknown key %s%s", prefix, name)
}

// sections returns the keys that hold other keys.
func sections(byKey map[string]*Flag) map[string]bool {
	s := make(map[string]bool)
	for key := range byKey {
		for i := range key {
			if key[i] == '.' {
				s[key[:i]] = true
			}
		}
	}
	return s
}

// flagNames maps the flags whose key in the file is another one to that key.
func flagNames(table []Flag) map[string]string {
	n := make(map[string]string)
	for i := range table {
		if f := &table[i]; f.File != "" && f.File != f.Name {
			n[f.Name] = f.File
		}
	}
	return n
}
