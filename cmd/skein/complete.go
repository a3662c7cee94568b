package main

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
)

// completionTime bounds how long a user who has typed a tab waits for names from a cluster.
const completionTime = time.Second

// completer says what may stand in a place of a command line.
type completer = cobra.CompletionFunc

// words completes some words.
func words(all ...string) completer {
	return cobra.FixedCompletions(all, cobra.ShellCompDirectiveNoFileComp)
}

// firstArgument completes the first argument of a command that has one.
func (f *adminFlags) firstArgument(complete completer) completer {
	return func(c *cobra.Command, args []string, typed string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return complete(c, args, typed)
	}
}

// completeFlag has a flag's value completed.
func (f *adminFlags) completeFlag(c *cobra.Command, flag string, complete completer) {
	if err := c.RegisterFlagCompletionFunc(flag, complete); err != nil {
		panic(err) // there is no such flag
	}
}

// asked completes what the cluster names. Without an answer in time there is nothing to choose from, and a password is not asked for.
func (f *adminFlags) asked(c *cobra.Command, list func(context.Context, *adminapi.Client) ([]cobra.Completion, error)) ([]cobra.Completion, cobra.ShellCompDirective) {
	const none = cobra.ShellCompDirectiveNoFileComp
	if f.fromEnvironment(c.Flags()) != nil || f.user != "" && f.password == "" && !strings.Contains(f.user, ":") {
		return nil, none
	}
	f.timeout, f.output = min(f.timeout, completionTime), string(adminapi.JSON)
	var names []cobra.Completion
	err := f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) (err error) {
		names, err = list(ctx, client)
		return err
	})
	if err != nil {
		return nil, none
	}
	return names, none
}

// completeNode completes names of nodes.
func (f *adminFlags) completeNode(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return f.asked(c, func(ctx context.Context, client *adminapi.Client) (names []cobra.Completion, err error) {
		l, err := client.NodeList(ctx)
		for _, n := range l.GetNodes() {
			if n.GetName() != "" {
				names = append(names, cobra.CompletionWithDesc(n.GetName(), n.GetState()))
			}
		}
		return names, err
	})
}

// completeRange completes ids of ranges, with the keys at which they begin.
func (f *adminFlags) completeRange(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return f.asked(c, func(ctx context.Context, client *adminapi.Client) (ids []cobra.Completion, err error) {
		l, err := client.RangeList(ctx)
		for _, r := range l.GetRanges() {
			ids = append(ids, cobra.CompletionWithDesc(strconv.FormatUint(r.GetId(), 10), "from "+cmp.Or(adminapi.QuotedKeys.Text(r.GetStart()), "the first key")))
		}
		return ids, err
	})
}

// completeNodeFlags completes the flags of a node, which cobra does not know.
func completeNodeFlags(_ *cobra.Command, _ []string, typed string) (flags []cobra.Completion, _ cobra.ShellCompDirective) {
	if !strings.HasPrefix(typed, "-") {
		return nil, cobra.ShellCompDirectiveDefault // the value of a flag, which may be a file
	}
	all := config.Flags()
	for i := range all {
		if name := "--" + all[i].Name; all[i].Support == config.Honoured && strings.HasPrefix(name, typed) {
			flags = append(flags, cobra.CompletionWithDesc(name, all[i].Usage))
		}
	}
	return flags, cobra.ShellCompDirectiveNoFileComp
}
