package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/kverror"
)

func newExplain() *cobra.Command {
	var names []string
	for _, r := range kverror.Table() {
		names = append(names, strings.ReplaceAll(r.Name, " ", "-"))
	}
	return &cobra.Command{
		Use: "explain [NAME|TEXT...]", Short: "Say what an error means, and what to do", ValidArgsFunction: words(names...),
		Long: `Say what an error means, and what to do. Give its name, or a line that has it, as a client prints it or a log has it.
Without any it lists all. docs/ERRORS.md has the same.`,
		RunE: failing(func(c *cobra.Command, args []string) error { return explain(c.OutOrStdout(), strings.Join(args, " ")) }),
	}
}

func explain(w io.Writer, text string) error {
	if text == "" {
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, r := range kverror.Table() {
			fmt.Fprintf(tw, "%s\t%s\n", strings.ReplaceAll(r.Name, " ", "-"), status.Convert(r.GRPC).Message())
		}
		return tw.Flush()
	}
	kinds := kverror.InText(text)
	if k, ok := kverror.Named(text); ok {
		kinds = []kverror.Kind{k}
	}
	if len(kinds) == 0 {
		return errors.New("none of Skein's errors is in that text: skein explain without arguments lists them")
	}
	for i, k := range kinds {
		if i > 0 {
			fmt.Fprintln(w)
		}
		row, e := kverror.Table()[k], k.Explanation()
		s := status.Convert(row.GRPC)
		applied := "no"
		if row.Fate == kverror.Unknown {
			applied = "perhaps"
		}
		repeats := "nobody"
		switch row.Retry {
		case kverror.RetryRouter:
			repeats = "the node that the client is connected to, until the deadline"
		case kverror.RetryClient:
			repeats = "the client may, after a pause"
		case kverror.RetryNever:
		}
		if _, err := fmt.Fprintf(w, "%s\n  clients get  %s (%s)\n  applied      %s\n  repeated by  %s\n%s\nnext: %s\n",
			row.Name, s.Message(), s.Code(), applied, repeats, e.Means, e.Next); err != nil {
			return err
		}
	}
	return nil
}
