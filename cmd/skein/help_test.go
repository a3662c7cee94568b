package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
)

// namedBackend has two nodes.
type namedBackend struct{ fakeBackend }

func (namedBackend) Nodes(context.Context) (*adminpb.NodeListResponse, error) {
	return &adminpb.NodeListResponse{Nodes: []*adminpb.Node{{Name: "n1", State: "serving"}, {Name: "n2", State: "dead"}, {State: "unstarted"}}}, nil
}

// serveNamed serves it and returns its address.
func serveNamed(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	adminapi.Register(s, namedBackend{})
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return l.Addr().String()
}

// leaves calls visit with each command that does something.
func leaves(c *cobra.Command, visit func(*cobra.Command)) {
	for _, sub := range c.Commands() {
		leaves(sub, visit)
	}
	if !c.HasSubCommands() && c.Name() != "help" && c.Parent() != nil && c.Parent().Name() != "completion" {
		visit(c)
	}
}

// shellWords divides a line as a shell does: quotes of both kinds, and no escapes.
func shellWords(t *testing.T, line string) (words []string) {
	t.Helper()
	word, in := []byte(nil), byte(0)
	for i := range len(line) {
		switch b := line[i]; {
		case b == in:
			in = 0
		case in == 0 && (b == '\'' || b == '"'):
			in = b
		case in == 0 && b == ' ':
			words, word = append(words, string(word)), nil
		default:
			word = append(word, b)
		}
	}
	if in != 0 {
		t.Fatalf("a quote does not end: %s", line)
	}
	return append(words, string(word))
}

// TestExamplesAreCommands: each command has examples, and each of them is a command line that skein understands.
func TestExamplesAreCommands(t *testing.T) {
	file := filepath.Join(t.TempDir(), "n1.yaml")
	if err := os.WriteFile(file, []byte("name: n1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{}
	leaves(newRoot(nil), func(c *cobra.Command) {
		used[strings.TrimPrefix(c.CommandPath(), "skein ")] = true
		if c.Example == "" {
			t.Errorf("%s has no example", c.CommandPath())
			return
		}
		for line := range strings.Lines(c.Example) {
			line = strings.Trim(line, " \n")
			args := shellWords(t, strings.ReplaceAll(line, "/etc/skein/n1.yaml", file))
			if c.DisableFlagParsing { // etcdctl reads its own
				continue
			}
			if err := understood(args[1:], c.CommandPath()); err != nil || args[0] != "skein" {
				t.Errorf("%s: %v", line, err)
			}
		}
	})
	for path := range helpTexts {
		if !used[path] {
			t.Errorf("there is no command %q", path)
		}
	}
}

// understood says why a command line is none of the command at a path.
func understood(args []string, path string) error {
	c, rest, err := newRoot(nil).Find(withStart(args))
	switch {
	case err != nil:
		return err
	case c.CommandPath() != path:
		return errors.New("it is of " + c.CommandPath())
	case path == "skein config show":
		_, _, _, err = config.Settings(nodeArgs(slicesWithout(rest, "--effective", "-w", "json")), nil)
		return err
	case path == "skein etcdctl", path == "skein grpc-proxy":
		return nil // etcd's own: tests with a cluster run them
	case c.DisableFlagParsing:
		_, _, err = config.Load(nodeArgs(rest), nil)
		return err
	}
	if err := c.ParseFlags(rest); err != nil {
		return err
	}
	return errors.Join(c.ValidateArgs(c.Flags().Args()), c.ValidateRequiredFlags(), c.ValidateFlagGroups())
}

func slicesWithout(all []string, some ...string) (left []string) {
	for _, a := range all {
		if !strings.Contains(" "+strings.Join(some, " ")+" ", " "+a+" ") {
			left = append(left, a)
		}
	}
	return left
}

// TestExamplesRun runs the examples of commands that ask a cluster, or nobody. They may be refused, and are never wrong usage.
func TestExamplesRun(t *testing.T) {
	address := serveNamed(t)
	leaves(newRoot(nil), func(c *cobra.Command) {
		switch name, _, _ := strings.Cut(strings.TrimPrefix(c.CommandPath(), "skein "), " "); name {
		case "range", "node", "placement", "cluster", "hold", "explain", "version":
		default:
			return
		}
		for line := range strings.Lines(c.Example) {
			args := shellWords(t, strings.Trim(line, " \n"))[1:]
			if c.Flags().Lookup("endpoints") != nil || c.InheritedFlags().Lookup("endpoints") != nil {
				args = append(args, "--endpoints", address)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // one of them waits for what the fake never does
			var out, errs bytes.Buffer
			code := execute(ctx, args, nil, &out, &errs)
			cancel()
			if code == exitUsage || code == 0 && out.Len() == 0 {
				t.Errorf("%s exit %d\n%s%s", line, code, &out, &errs)
			}
		}
	})
}

// TestFlagsAreSpelledAlike: a flag means the same in all commands that have it, but for those that are about different things by their nature.
func TestFlagsAreSpelledAlike(t *testing.T) {
	several := map[string]bool{
		"to": true, "host": true, "cluster": true, "temp-dir": true, "revision": true, "output": true, "bump-revision": true, "wait": true,
		"data-dir": true, "days": true, "dry-run": true, "key-format": true, "prefix": true, "nodes": true, "interval": true,
		"endpoints": true, // those of etcd's gateway are hosts and ports, and no variable
		"write-out": true, // only commands that ask a cluster have the variable
	}
	usages := map[string]string{}
	leaves(newRoot(nil), func(c *cobra.Command) {
		if c.DisableFlagParsing || strings.HasPrefix(c.CommandPath(), "skein gateway") { // etcd's own flags
			return
		}
		visit := func(f *pflag.Flag) {
			if several[f.Name] || f.Name == "help" {
				return
			}
			if other, ok := usages[f.Name]; ok && other != f.Usage {
				t.Errorf("%s: --%s is %q, and elsewhere %q", c.CommandPath(), f.Name, f.Usage, other)
			}
			usages[f.Name] = f.Usage
		}
		c.LocalFlags().VisitAll(visit)
		c.InheritedFlags().VisitAll(visit)
	})
	for _, old := range []string{"no-wait", "key-base64", "prefix-base64", "key-file", "left", "range"} {
		if _, ok := usages[old]; ok {
			t.Errorf("--%s is another spelling of what has one already", old)
		}
	}
}

// TestCompletion: a tab completes names and ids that the cluster knows, and a node's flags.
func TestCompletion(t *testing.T) {
	env := []string{"SKEIN_ENDPOINTS=" + serveNamed(t)}
	for _, c := range []struct{ line, want string }{
		{"node drain ", "n1\tserving\nn2\tdead\n:4"},
		{"node drain n1 ", ":4"},
		{"range show ", "1\tfrom the first key"},
		{"range move 1 --from ", "n2\tdead"},
		{"range list --sort ", "load"},
		{"placement add ", "n1\tserving"},
		{"node drain --user root ", ":4"},
		{"start --initial-r", "--initial-ranges\t"},
		{"--initial-r", "--initial-ranges\t"},
		{"--name n1 --data-", "--data-dir\t"},
		{"explain no-l", "no-leader"},
		{"vers", "version\t"},
	} {
		var out, errs bytes.Buffer
		if code := execute(t.Context(), append([]string{"__complete"}, strings.Split(c.line, " ")...), env, &out, &errs); code != 0 || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: exit %d\n%s%s", c.line, code, &out, &errs)
		}
	}
	var out, errs bytes.Buffer
	if execute(t.Context(), []string{"__complete", "node", "drain", ""}, []string{"SKEIN_ENDPOINTS=127.0.0.1:1"}, &out, &errs); !strings.HasPrefix(out.String(), ":4") {
		t.Errorf("without a cluster:\n%s%s", &out, &errs)
	}
}

// TestVariablesAreNoFlagsOfNodes: a node says nothing about the variables of commands.
func TestVariablesAreNoFlagsOfNodes(t *testing.T) {
	for _, flag := range environmentFlags {
		if _, notices, err := config.Load([]string{"--name=n1"}, []string{"SKEIN_" + suffix(flag) + "=x"}); err != nil || len(notices) > 0 {
			t.Errorf("SKEIN_%s: %v, %v", suffix(flag), notices, err)
		}
	}
}
