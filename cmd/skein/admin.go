package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
)

// adminFlags are the flags of all commands that ask a running cluster. They are
// named, and read from the environment, as etcdctl's are.
type adminFlags struct {
	environ           []string
	endpoints         []string
	output            string
	timeout           time.Duration
	cacert, cert, key string
	skipVerify        bool
	user, password    string
}

func (f *adminFlags) add(fs *pflag.FlagSet) {
	fs.StringSliceVar(&f.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "client URLs of nodes; the first that answers is asked")
	fs.StringVarP(&f.output, "write-out", "w", "table", "table or json")
	fs.DurationVar(&f.timeout, "command-timeout", 10*time.Second, "time that the command may take")
	fs.StringVar(&f.cacert, "cacert", "", "authorities of the nodes' certificates")
	fs.StringVar(&f.cert, "cert", "", "certificate to show")
	fs.StringVar(&f.key, "key-file", "", "key of --cert")
	fs.StringVar(&f.user, "user", "", "user NAME or NAME:PASSWORD, where users are checked; without a password the terminal is asked for it")
	fs.StringVar(&f.password, "password", "", "password of --user; in ETCDCTL_PASSWORD others on this machine do not see it")
	fs.BoolVar(&f.skipVerify, "insecure-skip-tls-verify", false, "do not check the nodes' certificates")
}

// fromEnvironment reads ETCDCTL_ENDPOINTS and its like for flags that were not given.
func (f *adminFlags) fromEnvironment(fs *pflag.FlagSet) error {
	names := map[string]string{
		"endpoints": "ENDPOINTS", "cacert": "CACERT", "cert": "CERT", "key-file": "KEY",
		"command-timeout": "COMMAND_TIMEOUT", "write-out": "WRITE_OUT", "insecure-skip-tls-verify": "INSECURE_SKIP_TLS_VERIFY",
		"user": "USER", "password": "PASSWORD",
	}
	for flag, name := range names {
		for _, v := range f.environ {
			text, ok := strings.CutPrefix(v, "ETCDCTL_"+name+"=")
			if !ok || text == "" || fs.Changed(flag) {
				continue
			}
			if err := fs.Set(flag, text); err != nil {
				return &config.UsageError{Err: fmt.Errorf("ETCDCTL_%s: %w", name, err)}
			}
		}
	}
	return nil
}

// ask calls do with a client, within the command's time.
func (f *adminFlags) ask(c *cobra.Command, do func(context.Context, *adminapi.Client, adminapi.Format) error) error {
	if err := f.fromEnvironment(c.Flags()); err != nil {
		return err
	}
	format := adminapi.Format(f.output)
	if format != adminapi.Table && format != adminapi.JSON {
		return &config.UsageError{Err: fmt.Errorf("-w %s: there are table and json", f.output)}
	}
	t, err := f.tls()
	if err != nil {
		return &config.UsageError{Err: err}
	}
	client, err := adminapi.NewClient(f.endpoints, t)
	if err != nil {
		return &config.UsageError{Err: err}
	}
	user, password, err := f.login(os.Stdin, c.ErrOrStderr())
	if err != nil {
		return &config.UsageError{Err: err}
	}
	client.As(user, password)
	ctx, cancel := context.WithTimeout(c.Context(), f.timeout)
	defer cancel()
	return do(ctx, client, format)
}

// login returns the user in whose name the command asks, if one was given. It asks a terminal for a password that is
// missing.
func (f *adminFlags) login(in *os.File, prompts io.Writer) (user, password string, err error) {
	if f.user == "" && f.password != "" {
		return "", "", errors.New("--password without a user: give --user")
	}
	if f.user == "" || f.password != "" {
		return f.user, f.password, nil
	}
	user, password, given := strings.Cut(f.user, ":")
	if user != "" && !given && term.IsTerminal(int(in.Fd())) {
		fmt.Fprintf(prompts, "Password of %s: ", user)
		typed, err := term.ReadPassword(int(in.Fd()))
		fmt.Fprintln(prompts)
		if err != nil {
			return "", "", fmt.Errorf("read the password of %s from the terminal: %w", user, err)
		}
		password = string(typed)
	}
	if user == "" || password == "" {
		return "", "", errors.New("--user without a name or a password: give --user NAME:PASSWORD, or --user NAME at a terminal, or --user NAME and ETCDCTL_PASSWORD in the environment")
	}
	return user, password, nil
}

// tls returns the settings for secure endpoints, or nil where no flag asks for any.
func (f *adminFlags) tls() (*tls.Config, error) {
	if f.cacert == "" && f.cert == "" && f.key == "" && !f.skipVerify {
		return nil, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: f.skipVerify}
	if f.cacert != "" {
		pem, err := os.ReadFile(f.cacert)
		if err != nil {
			return nil, fmt.Errorf("--cacert: %w", err)
		}
		t.RootCAs = x509.NewCertPool()
		if !t.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--cacert: no certificate in %s", f.cacert)
		}
	}
	if f.cert != "" || f.key != "" {
		pair, err := tls.LoadX509KeyPair(f.cert, f.key)
		if err != nil {
			return nil, fmt.Errorf("--cert and --key-file: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}

func newRange(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	c := &cobra.Command{Use: "range", Short: "List, split, move and show ranges", Args: cobra.NoArgs, RunE: needsCommand}
	f.add(c.PersistentFlags())
	c.AddCommand(newRangeList(f), newSplit(f), newMove(f), newMerge(f), newTransfer(f), &cobra.Command{
		Use: "show ID", Short: "Dump the state of one range's replicas", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil {
				return &config.UsageError{Err: fmt.Errorf("%q is no id of a range", args[0])}
			}
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
				s, err := client.RangeShow(ctx, id)
				if err != nil {
					return err
				}
				return adminapi.WriteShow(c.OutOrStdout(), format, s)
			})
		}),
	})
	return c
}

// keyFlags are the two ways to give a key.
type keyFlags struct{ plain, coded string }

func (k *keyFlags) add(fs *pflag.FlagSet, what string) {
	fs.StringVar(&k.plain, "key", "", what)
	fs.StringVar(&k.coded, "key-base64", "", "the same in base64, for keys that are no text")
}

// key returns the key, and whether one was given.
func (k *keyFlags) key(fs *pflag.FlagSet) (key []byte, given bool, err error) {
	switch plain, coded := fs.Changed("key"), fs.Changed("key-base64"); {
	case plain && coded:
		return nil, true, &config.UsageError{Err: errors.New("give either --key or --key-base64")}
	case coded:
		if key, err = base64.StdEncoding.DecodeString(k.coded); err != nil {
			return nil, true, &config.UsageError{Err: fmt.Errorf("--key-base64: %w", err)}
		}
		return key, true, nil
	default:
		return []byte(k.plain), plain, nil
	}
}

func newRangeList(f *adminFlags) *cobra.Command {
	var node string
	var key keyFlags
	ranges := &cobra.Command{Use: "list", Short: "List all ranges, or those of a node or a key", Args: cobra.NoArgs}
	ranges.Flags().StringVar(&node, "node", "", "name or id of a node: only ranges with a replica there")
	key.add(ranges.Flags(), "only the range that holds the key")
	ranges.RunE = failing(func(c *cobra.Command, _ []string) error {
		q := &adminpb.RangeListRequest{Node: node}
		k, given, err := key.key(c.Flags())
		if err != nil {
			return err
		}
		if given {
			q.Key = append([]byte{}, k...) // the empty key is one too
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			l, err := client.RangeListOf(ctx, q)
			if err != nil {
				return err
			}
			return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, l)
		})
	})
	return ranges
}

func newSplit(f *adminFlags) *cobra.Command {
	var key keyFlags
	split := &cobra.Command{Use: "split --key KEY", Short: "Make a new range begin at a key", Args: cobra.NoArgs}
	key.add(split.Flags(), "first key of the new range")
	split.RunE = failing(func(c *cobra.Command, _ []string) error {
		k, given, err := key.key(c.Flags())
		if err != nil {
			return err
		}
		if !given {
			return &config.UsageError{Err: errors.New("give either --key or --key-base64")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			s, err := client.RangeSplit(ctx, k)
			if err != nil {
				return err
			}
			return adminapi.WriteSplit(c.OutOrStdout(), format, s)
		})
	})
	return split
}

func newMove(f *adminFlags) *cobra.Command {
	var id uint64
	var from, to string
	var noWait bool
	move := &cobra.Command{Use: "move --range ID --from NODE --to NODE", Short: "Put a range's replica on one node in the place of that on another", Args: cobra.NoArgs}
	move.Flags().Uint64Var(&id, "range", 0, "id of the range")
	move.Flags().StringVar(&from, "from", "", "name or id of the node that gives its replica up")
	move.Flags().StringVar(&to, "to", "", "name or id of the node that gets one")
	move.Flags().BoolVar(&noWait, "no-wait", false, "return when the move has begun")
	move.RunE = failing(func(c *cobra.Command, _ []string) error {
		if id == 0 || from == "" || to == "" {
			return &config.UsageError{Err: errors.New("give --range, --from and --to")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			m, err := client.RangeMove(ctx, id, from, to)
			if err != nil {
				return err
			}
			if noWait {
				return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{m.GetOperation()}})
			}
			if err := client.AwaitOperation(ctx, m.GetOperation().GetId()); err != nil {
				return fmt.Errorf("operation %d has begun and goes on, though this command ends (skein placement operations shows it): %w", m.GetOperation().GetId(), err)
			}
			r, err := client.RangeMoved(ctx, m.GetOperation())
			if err != nil {
				return err
			}
			return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.RangeListResponse{Ranges: []*adminpb.Range{r}})
		})
	})
	return move
}

func newMerge(f *adminFlags) *cobra.Command {
	var left uint64
	var noWait bool
	merge := &cobra.Command{Use: "merge --left ID", Short: "Let a range absorb its right neighbour", Args: cobra.NoArgs}
	merge.Flags().Uint64Var(&left, "left", 0, "id of the range that stays")
	merge.Flags().BoolVar(&noWait, "no-wait", false, "return when the merge has begun")
	merge.RunE = failing(func(c *cobra.Command, _ []string) error {
		if left == 0 {
			return &config.UsageError{Err: errors.New("give --left")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
			m, err := client.RangeMerge(ctx, left)
			if err != nil {
				return err
			}
			op := m.GetOperation()
			if noWait {
				return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{op}})
			}
			if err := client.AwaitOperation(ctx, op.GetId()); err != nil {
				return fmt.Errorf("operation %d has begun and goes on, though this command ends (skein placement operations shows it): %w", op.GetId(), err)
			}
			l, err := client.RangesMerged(ctx, op)
			if err != nil {
				return err
			}
			return writeMerged(c, format, l.GetRanges(), op)
		})
	})
	return merge
}

// writeMerged writes the range that a merge has left, or says that it was given up.
func writeMerged(c *cobra.Command, format adminapi.Format, all []*adminpb.Range, op *adminpb.Operation) error {
	var merged []*adminpb.Range
	for _, r := range all {
		switch r.GetId() {
		case op.GetRight():
			return fmt.Errorf(
				"operation %d has ended, and range %d is there yet: a replica of one of the two ranges did not follow, one of them changed, or who leads placement did (skein node list, skein range list); try again",
				op.GetId(), op.GetRight())
		case op.GetRange():
			merged = append(merged, r)
		}
	}
	return adminapi.WriteRanges(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.RangeListResponse{Ranges: merged})
}

func newTransfer(f *adminFlags) *cobra.Command {
	var id uint64
	var to string
	transfer := &cobra.Command{Use: "transfer-leader --range ID --to NODE", Short: "Have another replica of a range lead it", Args: cobra.NoArgs}
	transfer.Flags().Uint64Var(&id, "range", 0, "id of the range")
	transfer.Flags().StringVar(&to, "to", "", "name or id of the node that is to lead")
	transfer.RunE = failing(func(c *cobra.Command, _ []string) error {
		if id == 0 || to == "" {
			return &config.UsageError{Err: errors.New("give --range and --to")}
		}
		return f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) error {
			return client.RangeTransferLeader(ctx, id, to)
		})
	})
	return transfer
}

// newSwitch is a command that turns something on or off.
func newSwitch(f *adminFlags, name, short string, set func(*adminapi.Client, context.Context, bool) error, on bool) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			return f.ask(c, func(ctx context.Context, client *adminapi.Client, _ adminapi.Format) error {
				return set(client, ctx, on)
			})
		}),
	}
}
