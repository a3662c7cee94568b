package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/backup"
	"github.com/skeindb/skein/backup/target"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
	"github.com/skeindb/skein/transfer"
)

// withCluster calls do with a cluster. It takes as long as it takes: --command-timeout is for the connection.
func (f *adminFlags) withCluster(c *cobra.Command, do func(context.Context, *transfer.Cluster) error) error {
	if err := f.fromEnvironment(c.Flags()); err != nil {
		return err
	}
	t, err := f.tls()
	if err == nil && t == nil && strings.Contains(strings.Join(f.endpoints, ","), "https://") {
		t = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	user, password := "", ""
	if err == nil {
		user, password, err = f.login(c)
	}
	if err != nil {
		return &config.UsageError{Err: err}
	}
	client, err := clientv3.New(clientv3.Config{
		Context: c.Context(), Endpoints: f.endpoints, TLS: t, Username: user, Password: password, DialTimeout: f.dial,
		DialKeepAliveTime: keepAlive, DialKeepAliveTimeout: keepAlive, MaxCallRecvMsgSize: diff.MaxMessageBytes, Logger: zap.NewNop(),
	})
	if err != nil {
		return fmt.Errorf("cluster at %s: %w", strings.Join(f.endpoints, ","), err)
	}
	defer client.Close()
	probe, cancel := context.WithTimeout(c.Context(), f.timeout)
	_, err = client.MemberList(probe)
	cancel()
	if err != nil {
		return fmt.Errorf("cluster at %s: %w: give client URLs of running nodes to --endpoints", strings.Join(f.endpoints, ","), err)
	}
	line := &progressLine{out: c.ErrOrStderr()}
	defer line.clear()
	cluster := &transfer.Cluster{Client: client, Clock: clock.System(), Report: line.report}
	if width := line.width(); width > 0 {
		cluster.Progress = line.show
	}
	return do(c.Context(), cluster)
}

// repository opens the backups at a URL, to be written to these recipients and read with the identities of a file.
func repository(url string, recipients []string, identity string) (*backup.Repository, error) {
	var file io.Reader
	if identity != "" {
		b, err := os.ReadFile(identity)
		if err != nil {
			return nil, fmt.Errorf("--identity: %w", err)
		}
		file = bytes.NewReader(b)
	}
	keys, err := backup.ParseKeys(recipients, file)
	switch {
	case err != nil && identity != "":
		return nil, fmt.Errorf("--identity %s: %w", identity, err)
	case err != nil:
		return nil, &config.UsageError{Err: err}
	}
	t, err := target.Open(url, clock.System())
	if err != nil {
		return nil, &config.UsageError{Err: err}
	}
	return backup.NewRepository(t, keys, clock.System()), nil
}

// parseCluster reads --cluster; 0 is none given.
func parseCluster(text string) (keyspace.ClusterID, error) {
	if text == "" {
		return 0, nil
	}
	id, err := strconv.ParseUint(text, 16, 64)
	if err != nil || id == 0 {
		return 0, &config.UsageError{Err: fmt.Errorf("--cluster %q: want an id in hexadecimal, as backup list shows it", text)}
	}
	return keyspace.ClusterID(id), nil
}

// makeFlags are those of backups that are made.
type makeFlags struct {
	rate       string
	recipients []string
	parallel   int
}

func (m *makeFlags) add(fs *pflag.FlagSet) {
	fs.StringVar(&m.rate, "rate", "8MiB", "bytes a second that are read of the cluster at most; 0 is no bound")
	fs.StringSliceVar(&m.recipients, "encrypt-to", nil, "public keys of age (age1…), separated by commas: who has a key of one of them can read the backup")
	fs.IntVar(&m.parallel, "parallel", 0, "spans that are read at once, each in 16 MiB of memory; 0 is one, and 4 where there is no --rate: a backup that takes its time leaves the processors to others")
}

func (m *makeFlags) options() (o backup.Options, err error) {
	if o.RateBytesPerSecond, err = parseBytes(m.rate); err != nil {
		return o, &config.UsageError{Err: fmt.Errorf("--rate %s: %w", m.rate, err)}
	}
	if o.Parallel = m.parallel; m.parallel < 0 || m.parallel > 64 {
		return o, &config.UsageError{Err: fmt.Errorf("--parallel %d: want 1 to 64, or 0", m.parallel)}
	}
	if o.Parallel == 0 && o.RateBytesPerSecond > 0 {
		o.Parallel = 1
	}
	return o, nil
}

// parseBytes reads a number of bytes, as in 64MiB.
func parseBytes(s string) (int64, error) {
	number, factor := s, int64(1)
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if n, ok := strings.CutSuffix(s, unit); ok {
			number, factor = n, 1<<(10*(i+1))
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > (1<<62)/factor {
		return 0, errors.New("want a number of bytes, as 1000000, 64MiB or 1GiB")
	}
	return n * factor, nil
}

func newBackupCreate(environ []string, b *backupFlags) *cobra.Command {
	f, m := &adminFlags{environ: environ}, &makeFlags{}
	var o transfer.BackupOptions
	c := &cobra.Command{
		Use: "create URL", Short: "Make a backup of a running cluster", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) (err error) {
			if o.Options, err = m.options(); err != nil {
				return err
			}
			r, err := repository(args[0], m.recipients, b.identity)
			if err != nil {
				return err
			}
			return f.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) error {
				made, err := transfer.Backup(ctx, cluster, r, o)
				switch {
				case err == nil && made == nil:
					fmt.Fprintln(c.OutOrStdout(), "nothing has changed since the newest backup")
				case err == nil:
					fmt.Fprintf(c.OutOrStdout(), "%s %s/%d: %s at revision %d, %d versions, %d bytes\n", made.Cluster, made.Chain, made.Number, made.Kind, made.Revision, made.Sum.Versions, made.StoredBytes)
				}
				return err
			})
		}),
	}
	f.addConnection(c.Flags())
	m.add(c.Flags())
	c.Flags().BoolVar(&o.Incremental, "incremental", false, "only what has changed since the newest backup of the cluster there")
	c.Flags().BoolVar(&o.Resume, "resume", false, "go on with a backup that was broken off, if there is one")
	return c
}

func newBackupFollow(environ []string, b *backupFlags) *cobra.Command {
	f, m := &adminFlags{environ: environ}, &makeFlags{}
	var o transfer.FollowOptions
	c := &cobra.Command{
		Use: "follow URL", Short: "Make backups of a running cluster again and again", Args: cobra.ExactArgs(1),
		Long: `Make a full backup of a running cluster, and then backups of every version since the last
one, until it is stopped. The state at any revision can be restored (skein restore --revision, --at).`,
		RunE: failing(func(c *cobra.Command, args []string) (err error) {
			if o.Options, err = m.options(); err != nil {
				return err
			}
			if o.Interval <= 0 || o.FullEvery < 0 {
				return &config.UsageError{Err: fmt.Errorf("--interval %v, --full-every %v: want times above 0", o.Interval, o.FullEvery)}
			}
			r, err := repository(args[0], m.recipients, b.identity)
			if err != nil {
				return err
			}
			return f.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) error { return transfer.Follow(ctx, cluster, r, o) })
		}),
	}
	f.addConnection(c.Flags())
	m.add(c.Flags())
	c.Flags().DurationVar(&o.Interval, "interval", time.Minute, "time between two backups")
	c.Flags().DurationVar(&o.FullEvery, "full-every", 24*time.Hour, "age of a full backup at which the next one is made")
	return c
}

func newRestore(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var o transfer.RestoreOptions
	var identity, source, at, prefix string
	var exact, asNew bool
	c := &cobra.Command{
		Use: "restore URL", Short: "Make a new cluster what a backup is", Args: cobra.ExactArgs(1),
		Long: `Make a new, empty cluster what a backup is: keys, leases, users and roles. The cluster may have
any number of nodes.

Clients have seen more of the lost cluster than the backup has. So the revision is raised by
--bump-revision, and everything below counts as compacted: what watches or caches begins anew.
--exact keeps revision and history.

With --prefix and --as-new it is another command: keys with the prefix are put into a cluster that
serves, with the values of the backup and without leases. It deletes nothing.`,
		RunE: failing(func(c *cobra.Command, args []string) error {
			if err := when(&o.When, at); err != nil {
				return err
			}
			if exact {
				o.Bump = 0
			}
			var err error
			if o.Source, err = parseCluster(source); err != nil {
				return err
			}
			r, err := repository(args[0], nil, identity)
			if err != nil {
				return err
			}
			return f.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) error {
				if asNew {
					return transfer.RestoreAsNew(ctx, cluster, r, o, prefix)
				}
				return transfer.Restore(ctx, cluster, r, o)
			})
		}),
	}
	f.addConnection(c.Flags())
	c.Flags().StringVar(&identity, "identity", "", "file with identities of age (age-keygen), for encrypted backups")
	c.Flags().StringVar(&source, "cluster", "", "id of the cluster whose backup it is, in hexadecimal, if there are several")
	c.Flags().StringVar(&at, "at", "", "restore the last state at or before a time, as 2026-11-24T12:00:00Z")
	c.Flags().Int64Var((*int64)(&o.When.Revision), "revision", 0, "restore the state at a revision")
	c.Flags().Int64Var((*int64)(&o.Bump), "bump-revision", transfer.DefaultBump, "add to the revision")
	c.Flags().BoolVar(&exact, "exact", false, "keep revision and history as they are")
	c.Flags().BoolVar(&o.WithoutAuth, "without-auth", false, "leave users and roles out")
	c.Flags().StringVar(&o.TempDir, "temp-dir", "", "directory for merging more than 64 backups, with room for all of them but the full one; the system's by default")
	c.Flags().StringVar(&prefix, "prefix", "", "with --as-new: put only the keys with this prefix")
	c.Flags().BoolVar(&asNew, "as-new", false, "put keys into a cluster that serves, as a client does")
	c.MarkFlagsMutuallyExclusive("at", "revision")
	c.MarkFlagsMutuallyExclusive("exact", "bump-revision")
	c.MarkFlagsRequiredTogether("prefix", "as-new")
	for _, other := range []string{"exact", "bump-revision", "without-auth"} {
		c.MarkFlagsMutuallyExclusive("as-new", other)
	}
	return c
}

// when reads --at.
func when(w *backup.When, at string) (err error) {
	if at == "" {
		return nil
	}
	if w.Time, err = time.Parse(time.RFC3339, at); err != nil {
		return &config.UsageError{Err: fmt.Errorf("--at %s: want a time as 2026-11-24T12:00:00Z", at)}
	}
	return nil
}

func newImport(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var o transfer.ImportOptions
	var history string
	etcd := &cobra.Command{
		Use: "etcd FILE", Short: "Make a new cluster what a file of etcd's is", Args: cobra.ExactArgs(1),
		Long: `Make a new, empty cluster what an etcd is: FILE is what etcdctl snapshot save has written, or
with --skip-hash-check the member/snap/db of a stopped etcd. Every key keeps its revisions,
version and lease, and the next write has the revision behind the last one.`,
		RunE: failing(func(c *cobra.Command, args []string) error {
			if history != "keep" && history != "latest" {
				return &config.UsageError{Err: fmt.Errorf("--history %s: there are keep and latest", history)}
			}
			o.Path, o.Latest = args[0], history == "latest"
			return f.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) error { return transfer.Import(ctx, cluster, o) })
		}),
	}
	f.addConnection(etcd.Flags())
	etcd.Flags().StringVar(&history, "history", "keep", "keep or latest: with or without the versions before the newest of each key")
	etcd.Flags().StringVar(&o.TempDir, "temp-dir", "", "directory for sorting, with room for 1.2 times the data; the system's by default")
	etcd.Flags().BoolVar(&o.SkipHashCheck, "skip-hash-check", false, "take a file without a hash, as a copy of member/snap/db")
	etcd.Flags().BoolVar(&o.WithoutAuth, "without-auth", false, "leave users and roles out")
	etcd.Flags().Int64Var(&o.MaxVersionBytes, "max-version-bytes", 3<<19, "largest key with its value: raise it with the nodes' --max-request-bytes")
	c := &cobra.Command{Use: "import", Short: "Make a new cluster what another store is", Args: cobra.NoArgs, RunE: needsCommand}
	c.AddCommand(etcd)
	return c
}

func newExport(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var o transfer.ExportOptions
	var maxBytes, version string
	etcd := &cobra.Command{
		Use: "etcd FILE", Short: "Write a file that etcdutl snapshot restore takes", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) (err error) {
			if o.MaxBytes, err = parseBytes(maxBytes); err != nil {
				return &config.UsageError{Err: fmt.Errorf("--max-bytes %s: %w", maxBytes, err)}
			}
			if o.EtcdVersion = etcdfile.EtcdVersion(version); !o.EtcdVersion.Known() {
				return &config.UsageError{Err: fmt.Errorf("--etcd-version %s: there are %s, %s and %s", version, etcdfile.Etcd35, etcdfile.Etcd36, etcdfile.Etcd37)}
			}
			o.Path = args[0]
			return f.withCluster(c, func(ctx context.Context, cluster *transfer.Cluster) error {
				done, err := transfer.Export(ctx, cluster, o)
				if err == nil {
					fmt.Fprintf(c.OutOrStdout(), "%s: revision %d, compacted at %d, %d records, %d bytes\n", o.Path, done.Revision, done.Compacted, done.Records, done.Bytes)
				}
				return err
			})
		}),
	}
	f.addConnection(etcd.Flags())
	etcd.Flags().Int64Var((*int64)(&o.Revision), "revision", 0, "the state at a revision; 0 is the current one")
	etcd.Flags().StringVar(&maxBytes, "max-bytes", "8GiB", "largest file: an etcd does not support more")
	etcd.Flags().StringVar(&version, "etcd-version", string(etcdfile.Etcd35), "oldest etcd that is to restore it: 3.5, 3.6 or 3.7")
	etcd.Flags().StringVar(&o.TempDir, "temp-dir", "", "directory for sorting, with room for the data; the system's by default")
	c := &cobra.Command{Use: "export", Short: "Write what others read", Args: cobra.NoArgs, RunE: needsCommand}
	c.AddCommand(etcd)
	return c
}
