package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/audit"
)

// newAudit is skein audit.
func newAudit() *cobra.Command {
	c := &cobra.Command{Use: "audit", Short: "Check the audit log of a node", Args: cobra.NoArgs, RunE: needsCommand}
	c.AddCommand(&cobra.Command{
		Use:   "check FILE...",
		Short: "Find lines of an audit log that were removed or changed",
		Long: "Find lines of an audit log that were removed or changed. Give the files of a rotated log from the oldest on.\n" +
			"The end of the last file can be cut off, and a file written anew, without a trace in it: compare the last hash with one that was kept elsewhere.",
		Args: cobra.MinimumNArgs(1),
		RunE: failing(func(c *cobra.Command, files []string) error { return checkAudit(c, files) }),
	})
	return c
}

func checkAudit(c *cobra.Command, files []string) error {
	hash := ""
	for i, path := range files {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		r, err := audit.Check(f)
		_ = f.Close()
		switch {
		case err != nil:
			return fmt.Errorf("%s: %w", path, err)
		case r.Lines == 0:
			continue
		case i > 0 && r.Begins != hash:
			return fmt.Errorf("%s does not follow %s, whose last line has the hash %s: its first line names %q. Lines or a file between them are missing, or the order is another", path, files[i-1], hash, r.Begins)
		case i == 0 && r.Begins != "":
			fmt.Fprintf(c.OutOrStdout(), "%s goes on with an earlier file, whose last line has the hash %s\n", path, r.Begins)
		}
		for _, n := range r.Torn {
			fmt.Fprintf(c.OutOrStdout(), "%s: line %d was cut short by a crash\n", path, n)
		}
		fmt.Fprintf(c.OutOrStdout(), "%s: %d lines from %s to %s, last hash %s\n", path, r.Lines, r.First.Format(time.RFC3339), r.Last.Format(time.RFC3339), r.Hash)
		hash = r.Hash
	}
	return nil
}
