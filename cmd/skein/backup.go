package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/keyspace"
)

// backupFlags are the flags of all commands that read backups.
type backupFlags struct {
	identity, cluster, output string
}

func newBackup(environ []string) *cobra.Command {
	f := &backupFlags{}
	c := &cobra.Command{
		Use: "backup", Short: "Make, show, check and remove backups", Args: cobra.NoArgs, RunE: needsCommand,
		Long: `Make, show, check and remove backups. Only create and follow need a cluster.

URL is file:///FOLDER or s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path-style=1. Keys of
S3 come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), the shared
credentials file or the machine's role.`,
	}
	p := c.PersistentFlags()
	p.StringVar(&f.identity, "identity", "", "file with identities of age (age-keygen), for encrypted backups")
	p.StringVar(&f.cluster, "cluster", "", "id of the cluster in hexadecimal; without it, all that have backups there")
	p.StringVarP(&f.output, "write-out", "w", "table", "table or json")
	c.AddCommand(newBackupCreate(environ, f), newBackupFollow(environ, f), newBackupList(f), newBackupShow(f), newBackupVerify(f), newBackupPrune(f))
	return c
}

// open opens the repository at a URL, and reads the flags.
func (f *backupFlags) open(url string) (r *backup.Repository, cluster keyspace.ClusterID, err error) {
	if f.output != "table" && f.output != "json" {
		return nil, 0, &config.UsageError{Err: fmt.Errorf("-w %s: there are table and json", f.output)}
	}
	if cluster, err = parseCluster(f.cluster); err != nil {
		return nil, 0, err
	}
	r, err = repository(url, nil, f.identity)
	return r, cluster, err
}

// only returns the one cluster that has backups, if none was given.
func only(c *cobra.Command, r *backup.Repository, cluster keyspace.ClusterID) (keyspace.ClusterID, error) {
	if cluster != 0 {
		return cluster, nil
	}
	chains, err := r.List(c.Context(), 0)
	if err != nil {
		return 0, err
	}
	for i := range chains {
		if chains[i].Cluster != chains[0].Cluster {
			return 0, fmt.Errorf("there are backups of several clusters, %s and %s among them: say of which with --cluster", chains[0].Cluster, chains[i].Cluster)
		}
	}
	if len(chains) == 0 {
		return 0, backup.ErrNoChain
	}
	return chains[0].Cluster, nil
}

// table writes rows of cells, the first as a head.
func table(w io.Writer, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// listedBackup is a backup in the JSON of backup list.
type listedBackup struct {
	Cluster     string            `json:"cluster"`
	Chain       string            `json:"chain"`
	Number      int               `json:"number"`
	Kind        backup.Kind       `json:"kind,omitempty"`
	Revision    keyspace.Revision `json:"revision"`
	Time        time.Time         `json:"time,omitzero"`
	Versions    int64             `json:"versions"`
	StoredBytes int64             `json:"storedBytes"`
	Error       string            `json:"error,omitempty"`
}

func listed(chains []backup.Chain) []listedBackup {
	out := []listedBackup{}
	for i := range chains {
		for _, b := range chains[i].Backups {
			l := listedBackup{Cluster: chains[i].Cluster.String(), Chain: chains[i].Name, Number: b.Number, Revision: b.Revision}
			if b.Err != nil {
				l.Error = b.Err.Error()
			} else {
				m := b.Manifest
				l.Kind, l.Time, l.Versions, l.StoredBytes = m.Kind, m.Time, m.Sum.Versions, m.StoredBytes
			}
			out = append(out, l)
		}
	}
	return out
}

func newBackupList(f *backupFlags) *cobra.Command {
	return &cobra.Command{
		Use: "list URL", Short: "List all backups, the oldest first", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error {
			r, cluster, err := f.open(args[0])
			if err != nil {
				return err
			}
			chains, err := r.List(c.Context(), cluster)
			if err != nil {
				return err
			}
			if f.output == "json" {
				return writeJSON(c.OutOrStdout(), listed(chains))
			}
			if len(chains) == 0 {
				fmt.Fprintf(c.OutOrStdout(), "no backups in %s\n", args[0])
				return nil
			}
			return writeBackups(c.OutOrStdout(), chains)
		}),
	}
}

func writeBackups(w io.Writer, chains []backup.Chain) error {
	rows := [][]string{{"CLUSTER", "CHAIN", "NUMBER", "KIND", "REVISION", "TIME", "VERSIONS", "STORED"}}
	var notes []string
	for _, l := range listed(chains) {
		row := []string{l.Cluster, l.Chain, strconv.Itoa(l.Number), "?", strconv.FormatInt(int64(l.Revision), 10), "?", "?", "?"}
		if l.Error == "" {
			row[3], row[5] = string(l.Kind), l.Time.UTC().Format(time.RFC3339)
			row[6], row[7] = strconv.FormatInt(l.Versions, 10), adminapi.SizeText(l.StoredBytes)
		} else {
			notes = append(notes, fmt.Sprintf("chain %s, backup %d: %s", l.Chain, l.Number, l.Error))
		}
		rows = append(rows, row)
	}
	for i := range chains {
		if n := chains[i].Unfinished; n > 0 {
			notes = append(notes, fmt.Sprintf("chain %s: %d unfinished", chains[i].Name, n))
		}
	}
	if err := table(w, rows); err != nil {
		return err
	}
	for _, n := range notes {
		fmt.Fprintln(w, n)
	}
	return nil
}

func newBackupShow(f *backupFlags) *cobra.Command {
	return &cobra.Command{
		Use: "show URL CHAIN [NUMBER]", Short: "Show one backup, without NUMBER the newest of the chain", Args: cobra.RangeArgs(2, 3),
		RunE: failing(func(c *cobra.Command, args []string) error {
			number := 0
			if len(args) == 3 {
				var err error
				if number, err = strconv.Atoi(args[2]); err != nil || number < 1 {
					return &config.UsageError{Err: fmt.Errorf("%q is no number of a backup", args[2])}
				}
			}
			r, cluster, err := f.open(args[0])
			if err != nil {
				return err
			}
			if cluster, err = only(c, r, cluster); err != nil {
				return err
			}
			chain, err := r.Chain(c.Context(), cluster, args[1])
			if err != nil {
				return err
			}
			for i := range chain.Backups {
				b := &chain.Backups[len(chain.Backups)-1-i]
				if number != 0 && b.Number != number {
					continue
				}
				if b.Err != nil {
					return b.Err
				}
				if f.output == "json" {
					return writeJSON(c.OutOrStdout(), b.Manifest)
				}
				return writeManifest(c.OutOrStdout(), b.Manifest)
			}
			return fmt.Errorf("chain %s has no such backup: backup list shows what is there", args[1])
		}),
	}
}

func writeManifest(w io.Writer, m *backup.Manifest) error {
	segments := 0
	for _, s := range m.Spans {
		segments += len(s.Segments)
	}
	rows := [][]string{
		{"cluster", m.Cluster},
		{"chain", m.Chain},
		{"number", strconv.Itoa(m.Number)},
		{"kind", string(m.Kind)},
		{"revision", strconv.FormatInt(int64(m.Revision), 10)},
		{"compacted", strconv.FormatInt(int64(m.Compacted), 10)},
		{"time", m.Time.UTC().Format(time.RFC3339)},
		{"versions", strconv.FormatInt(m.Sum.Versions, 10)},
		{"keys and values", adminapi.SizeText(m.Sum.Bytes)},
		{"stored", fmt.Sprintf("%s in %d segments of %d spans", adminapi.SizeText(m.StoredBytes), segments, len(m.Spans))},
		{"hash", fmt.Sprintf("%016x", m.Sum.Hash)},
		{"leases", strconv.Itoa(len(m.Leases))},
	}
	if m.Kind != backup.Full {
		rows = append(rows, []string{"previous revision", strconv.FormatInt(int64(m.Previous), 10)})
	}
	return table(w, rows)
}

func newBackupVerify(f *backupFlags) *cobra.Command {
	var deep bool
	c := &cobra.Command{
		Use: "verify URL [CHAIN]", Short: "Check that backups are whole", Args: cobra.RangeArgs(1, 2),
		Long: `Check that each manifest can be read, fits the one before, and has all its files with their
sizes. With --deep each file is read, and all hashes and versions are checked. What is wrong is
listed, and the exit code is 1.`,
		RunE: failing(func(c *cobra.Command, args []string) error {
			r, cluster, err := f.open(args[0])
			if err != nil {
				return err
			}
			chain := ""
			if len(args) == 2 {
				chain = args[1]
			}
			report, err := r.Verify(c.Context(), cluster, chain, deep)
			if err != nil {
				return err
			}
			return writeReport(c.OutOrStdout(), f.output, report, deep)
		}),
	}
	c.Flags().BoolVar(&deep, "deep", false, "read every file")
	return c
}

func writeReport(w io.Writer, output string, r *backup.Report, deep bool) error {
	problems := len(r.Problems) + r.MoreProblems
	if output == "json" {
		texts := []string{}
		for _, p := range r.Problems {
			texts = append(texts, p.String())
		}
		if err := writeJSON(w, map[string]any{
			"chains": r.Chains, "backups": r.Backups, "segments": r.Segments, "storedBytes": r.StoredBytes,
			"deep": deep, "versions": r.Sum.Versions, "problems": texts, "moreProblems": r.MoreProblems,
		}); err != nil {
			return err
		}
	} else {
		for _, p := range r.Problems {
			fmt.Fprintln(w, p)
		}
		fmt.Fprintf(w, "%d chains, %d backups, %d segments, %s", r.Chains, r.Backups, r.Segments, adminapi.SizeText(r.StoredBytes))
		if deep {
			fmt.Fprintf(w, "; %d versions read", r.Sum.Versions)
		}
		fmt.Fprintf(w, "; %d problems\n", problems)
	}
	if problems > 0 {
		return fmt.Errorf("%d problems: restore from a chain without any, and make a full backup", problems)
	}
	return nil
}

func newBackupPrune(f *backupFlags) *cobra.Command {
	var keepFull int
	var keep string
	var dryRun bool
	c := &cobra.Command{
		Use: "prune URL", Short: "Remove old backups", Args: cobra.ExactArgs(1),
		Long: `Remove chains, a full backup with all on top of it, that neither --keep-full nor --keep keeps. The
newest chain that can be restored always stays, and so do chains that cannot be read. Files of
backups that were given up go after a week.`,
		RunE: failing(func(c *cobra.Command, args []string) error {
			age, err := parseAge(keep)
			if err != nil {
				return &config.UsageError{Err: fmt.Errorf("--keep %q: %w", keep, err)}
			}
			if keepFull < 0 || keepFull == 0 && age == 0 {
				return &config.UsageError{Err: errors.New("say how many chains to keep (--keep-full 7), or for how long (--keep 30d)")}
			}
			r, cluster, err := f.open(args[0])
			if err != nil {
				return err
			}
			if cluster, err = only(c, r, cluster); err != nil {
				return err
			}
			p, err := r.Prune(c.Context(), cluster, backup.Retention{KeepFull: keepFull, Keep: age}, dryRun)
			if err != nil {
				return err
			}
			if f.output == "json" {
				return writeJSON(c.OutOrStdout(), map[string]any{
					"dryRun": dryRun, "chains": append([]string{}, p.Chains...), "leftovers": p.Leftovers, "files": p.Files, "bytes": p.Bytes,
				})
			}
			word := "removed"
			if dryRun {
				word = "would remove"
			}
			for _, name := range p.Chains {
				fmt.Fprintf(c.OutOrStdout(), "%s chain %s\n", word, name)
			}
			fmt.Fprintf(c.OutOrStdout(), "%s %d files, %s; %d of them were of no finished backup\n", word, p.Files, adminapi.SizeText(p.Bytes), p.Leftovers)
			return nil
		}),
	}
	c.Flags().IntVar(&keepFull, "keep-full", 0, "keep so many of the newest chains")
	c.Flags().StringVar(&keep, "keep", "", "keep what restores any time since then, as 30d or 12h")
	c.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be removed")
	return c
}

// parseAge reads a duration that may be in days.
func parseAge(s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(s)
	if days, ok := strings.CutSuffix(s, "d"); ok {
		var n int
		if n, err = strconv.Atoi(days); n > 36500 {
			n = -1
		}
		d = time.Duration(n) * 24 * time.Hour
	}
	if err != nil || d <= 0 {
		return 0, errors.New("want a duration as 30d or 12h")
	}
	return d, nil
}
