package config

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"go.uber.org/zap/zapcore"
)

// TestStories walks testdata/stories. Commands:
//
//	load [file]         the input's lines are arguments; NAME=VALUE lines with the
//	                    prefix "env " are the environment; what follows a line "---"
//	                    is a configuration file. Prints what differs from the default, then notices.
//	bootstrap           the same input; prints the ids
//	splits n=N          the keys of --initial-ranges N
//	split-keys          the input is a file of split keys
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "load":
				c, notices, err := loadStory(t, d.Input)
				if err != nil {
					return describe(err)
				}
				return diff(c) + printNotices(notices)
			case "bootstrap":
				c, _, err := loadStory(t, d.Input)
				if err != nil {
					return describe(err)
				}
				b, err := c.Bootstrap()
				if err != nil {
					return describe(err)
				}
				return printBootstrap(b)
			case "splits":
				var n int
				d.ScanArgs(t, "n", &n)
				return printKeys(evenSplits(n))
			case "split-keys":
				keys, err := parseSplitKeys([]byte(d.Input))
				if err != nil {
					return describe(err)
				}
				return printKeys(keys)
			}
			d.Fatalf(t, "unknown command %q", d.Cmd)
			return ""
		})
	})
}

func loadStory(t *testing.T, input string) (*Config, []Notice, error) {
	t.Helper()
	head, file, hasFile := strings.Cut(input+"\n", "---\n")
	var args, env []string
	for line := range strings.Lines(head) {
		line = strings.TrimRight(line, "\n")
		if v, ok := strings.CutPrefix(line, "env "); ok {
			env = append(env, v)
		} else if line != "" {
			args = append(args, line)
		}
	}
	if hasFile {
		t.Chdir(t.TempDir())
		if err := os.WriteFile("skein.yaml", []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config-file", "skein.yaml")
	}
	return Load(args, env)
}

func describe(err error) string {
	kind := "error"
	if u := (*UsageError)(nil); errors.As(err, &u) {
		kind = "usage error"
	}
	return kind + ": " + strings.ReplaceAll(err.Error(), "\n", "\n       ") + "\n"
}

// diff prints the fields that are not as in a configuration without any setting.
func diff(c *Config) string {
	d := Default()
	d.Complete()
	var b strings.Builder
	var walk func(prefix string, x, y reflect.Value)
	walk = func(prefix string, x, y reflect.Value) {
		for i := range x.NumField() {
			name, a, o := prefix+x.Type().Field(i).Name, x.Field(i), y.Field(i)
			switch {
			case reflect.DeepEqual(a.Interface(), o.Interface()):
			case a.Kind() == reflect.Struct:
				walk(name+".", a, o)
			default:
				fmt.Fprintf(&b, "%s: %s\n", name, fmt.Sprint(printable(a.Interface())))
			}
		}
	}
	walk("", reflect.ValueOf(*c), reflect.ValueOf(*d))
	if b.Len() == 0 {
		return "as by default\n"
	}
	return b.String()
}

func printable(x any) any {
	v := reflect.ValueOf(x)
	if v.Kind() == reflect.Slice {
		var s []string
		for i := range v.Len() {
			if str, ok := v.Index(i).Addr().Interface().(fmt.Stringer); ok {
				s = append(s, str.String())
			} else {
				s = append(s, fmt.Sprintf("%v", v.Index(i).Interface()))
			}
		}
		return s
	}
	return x
}

func printNotices(notices []Notice) string {
	var b strings.Builder
	for _, n := range notices {
		enc := zapcore.NewMapObjectEncoder()
		var keys []string
		for _, f := range n.Fields {
			f.AddTo(enc)
			keys = append(keys, fmt.Sprintf("%s=%v", f.Key, enc.Fields[f.Key]))
		}
		fmt.Fprintf(&b, "notice: %s (%s)\n", n.Message, strings.Join(keys, ", "))
	}
	return b.String()
}

func printBootstrap(b *Bootstrap) string {
	var s strings.Builder
	fmt.Fprintf(&s, "cluster %s, self %s\n", b.Cluster, b.Self)
	for _, f := range b.Founders {
		fmt.Fprintf(&s, "%s %s %v\n", f.ID, f.Name, f.PeerURLs)
	}
	return s.String()
}

func printKeys(keys [][]byte) string {
	if !slices.IsSortedFunc(keys, func(a, b []byte) int { return strings.Compare(string(a), string(b)) }) {
		return "not ascending\n"
	}
	s := make([]string, len(keys))
	for i := range keys {
		s[i] = fmt.Sprintf("%q", keys[i])
	}
	return fmt.Sprintf("%d: %s\n", len(keys), strings.Join(s, " "))
}
