package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mirror/diff"
)

// sideFlags say how one of two stores is reached. Their names begin with the side's.
type sideFlags struct {
	name string
	adminFlags
}

func (f *sideFlags) add(fs *pflag.FlagSet) {
	what := "store " + strings.ToUpper(f.name)
	fs.StringVar(&f.cacert, f.name+"-cacert", "", "authorities of the certificates of "+what)
	fs.StringVar(&f.cert, f.name+"-cert", "", "certificate to show to "+what)
	fs.StringVar(&f.key, f.name+"-key", "", "file of the key of --"+f.name+"-cert")
	fs.StringVar(&f.user, f.name+"-user", "", "user NAME or NAME:PASSWORD at "+what+"; without a password the terminal is asked for it")
	fs.StringVar(&f.password, f.name+"-password", "", "password of --"+f.name+"-user")
	fs.BoolVar(&f.skipVerify, f.name+"-insecure-skip-tls-verify", false, "do not check the certificates of "+what)
}

// dialTime bounds the wait for a connection and for the first answer, keepAlive the time in which a silent one is
// found dead.
const (
	dialTime  = 5 * time.Second
	keepAlive = 10 * time.Second
)

// config is that of clients of the endpoints, which are separated by commas.
func (f *sideFlags) config(c *cobra.Command, endpoints string) (clientv3.Config, error) {
	t, err := f.tls()
	if err == nil && t == nil && strings.Contains(endpoints, "https://") {
		t = &tls.Config{MinVersion: tls.VersionTLS12}
	}
	user, password := "", ""
	if err == nil {
		user, password, err = f.login(c)
	}
	if err != nil {
		return clientv3.Config{}, &config.UsageError{Err: fmt.Errorf("store %s: %w", strings.ToUpper(f.name), err)}
	}
	return clientv3.Config{
		Context: c.Context(), Endpoints: strings.Split(endpoints, ","), TLS: t, Username: user, Password: password,
		DialTimeout: dialTime, DialKeepAliveTime: keepAlive, DialKeepAliveTimeout: keepAlive,
		MaxCallRecvMsgSize: diff.MaxMessageBytes, Logger: zap.NewNop(),
	}, nil
}

// dial connects to the endpoints and asks for an answer.
func (f *sideFlags) dial(c *cobra.Command, endpoints string) (*clientv3.Client, error) {
	cfg, err := f.config(c, endpoints)
	if err != nil {
		return nil, err
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, fmt.Errorf("store %s at %s: %w", strings.ToUpper(f.name), endpoints, err)
	}
	ctx, cancel := context.WithTimeout(c.Context(), dialTime)
	defer cancel()
	if _, err := client.Get(ctx, "\x00", clientv3.WithKeysOnly()); err != nil && !errors.Is(err, rpctypes.ErrPermissionDenied) {
		client.Close()
		return nil, fmt.Errorf("store %s at %s does not answer: %w", strings.ToUpper(f.name), endpoints, err)
	}
	return client, nil
}

// diffFlags are those of skein diff.
type diffFlags struct {
	a, b              sideFlags
	revision          int64
	prefix, keyFormat string
	show              int
}

func (f *diffFlags) options() (diff.Options, error) {
	o := diff.Options{Revision: keyspace.Revision(f.revision), Show: f.show}
	k, err := adminapi.ParseKeyFormat(f.keyFormat)
	if err == nil {
		o.Prefix, err = k.Key(f.prefix)
	}
	switch {
	case err != nil:
	case f.revision < 0:
		err = fmt.Errorf("--revision %d: a revision is above 0; without the flag each side is read as it is now", f.revision)
	case f.show < 0:
		err = fmt.Errorf("--show %d is below 0", f.show)
	}
	if err != nil {
		return o, &config.UsageError{Err: err}
	}
	return o, nil
}

func newDiff() *cobra.Command {
	f := &diffFlags{a: sideFlags{name: "a"}, b: sideFlags{name: "b"}}
	c := &cobra.Command{
		Use: "diff A B", Short: "Compare two stores, etcd or Skein, key by key", Args: cobra.ExactArgs(2),
		Long: `Compare two stores, etcd or Skein, key by key.

A and B are endpoints; those of one store are separated by commas. Each side is read at
one revision, so that writes which go on do not matter. Values, create and mod revisions,
versions and leases of keys are compared, then the leases with their granted TTLs.

The exit code is 0 if the sides are equal, 3 if they differ, 1 if one of them could not be
read and 2 for wrong usage.`,
		RunE: failing(func(c *cobra.Command, args []string) error {
			o, err := f.options()
			if err != nil {
				return err
			}
			return f.run(c, args, o)
		}),
	}
	fs := c.Flags()
	f.a.add(fs)
	f.b.add(fs)
	fs.Int64Var(&f.revision, "revision", 0, "revision to read on both sides; without it each side is read as it is now")
	fs.StringVar(&f.prefix, "prefix", "", "compare only keys that begin so, and no leases")
	fs.StringVar(&f.keyFormat, "key-format", string(adminapi.QuotedKeys), "how --prefix is read: quoted (plain text, or \"a\\x00\" with Go's escapes), hex or base64")
	fs.IntVar(&f.show, "show", 20, "number of differences to show; the others are counted")
	return c
}

func (f *diffFlags) run(c *cobra.Command, args []string, o diff.Options) error {
	a, err := f.a.dial(c, args[0])
	if err != nil {
		return err
	}
	defer a.Close()
	b, err := f.b.dial(c, args[1])
	if err != nil {
		return err
	}
	defer b.Close()
	r, err := diff.Compare(c.Context(), diff.NewEndpoint(a), diff.NewEndpoint(b), o)
	if err != nil {
		return err
	}
	r.Write(c.OutOrStdout())
	if !r.Equal() {
		return diff.ErrDifferent
	}
	return nil
}
