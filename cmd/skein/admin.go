package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/internal/prompt"
)

// adminFlags are the flags of all commands that ask a running cluster. They are
// named, and read from the environment, as etcdctl's are.
type adminFlags struct {
	environ           []string
	endpoints         []string
	output, keyFormat string
	dial, timeout     time.Duration
	cacert, cert, key string
	skipVerify        bool
	user, password    string
}

func (f *adminFlags) add(fs *pflag.FlagSet) {
	f.addConnection(fs)
	fs.StringVarP(&f.output, "write-out", "w", "table", "table or json"+variable("write-out"))
}

// addKeyFormat adds the flag of commands that print or read keys.
func (f *adminFlags) addKeyFormat(fs *pflag.FlagSet) {
	fs.StringVar(&f.keyFormat, "key-format", string(adminapi.QuotedKeys), keyFormatUsage)
}

// keyFormatUsage is the same for all commands.
const keyFormatUsage = "how keys are printed and read: quoted (plain text, or \"a\\x00\" with Go's escapes), hex or base64"

// keys returns the format of keys.
func (f *adminFlags) keys() (adminapi.KeyFormat, error) {
	k, err := adminapi.ParseKeyFormat(f.keyFormat)
	if err != nil {
		return "", &config.UsageError{Err: err}
	}
	return k, nil
}

// parseKey reads a key of the command line.
func (f *adminFlags) parseKey(text string) ([]byte, error) {
	k, err := f.keys()
	if err != nil {
		return nil, err
	}
	key, err := k.Key(text)
	if err != nil {
		return nil, &config.UsageError{Err: err}
	}
	return key, nil
}

// addConnection adds those by which nodes are reached.
func (f *adminFlags) addConnection(fs *pflag.FlagSet) {
	fs.StringSliceVar(&f.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "client URLs of nodes; the first that answers is asked"+variable("endpoints"))
	fs.DurationVar(&f.dial, "dial-timeout", 2*time.Second, "time in which a node has to take the connection"+variable("dial-timeout"))
	fs.DurationVar(&f.timeout, "command-timeout", 10*time.Second, "time in which a node has to answer"+variable("command-timeout"))
	fs.StringVar(&f.cacert, "cacert", "", "authorities of the nodes' certificates"+variable("cacert"))
	fs.StringVar(&f.cert, "cert", "", "certificate to show"+variable("cert"))
	fs.StringVar(&f.key, "key", "", "file of the key of --cert"+variable("key"))
	fs.StringVar(&f.user, "user", "", "user NAME or NAME:PASSWORD, where users are checked; without a password the terminal is asked for it"+variable("user"))
	fs.StringVar(&f.password, "password", "", "password of --user; in the environment others on this machine do not see it"+variable("password"))
	fs.BoolVar(&f.skipVerify, "insecure-skip-tls-verify", false, "do not check the nodes' certificates"+variable("insecure-skip-tls-verify"))
}

// environmentFlags are those that the environment has too, and its prefixes, of which the first one counts.
var (
	environmentFlags = []string{
		"endpoints", "dial-timeout", "command-timeout", "cacert", "cert", "key", "user", "password", "insecure-skip-tls-verify", "write-out",
	}
	environmentPrefixes = []string{"SKEIN_", "ETCDCTL_"}
)

// suffix is a flag's name as the environment has it.
func suffix(flag string) string { return strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }

// variable names the variable of a flag in the flag's usage.
func variable(flag string) string { return " [" + environmentPrefixes[0] + suffix(flag) + "]" }

// fromEnvironment reads SKEIN_ENDPOINTS, ETCDCTL_ENDPOINTS and their like for flags that were not given.
func (f *adminFlags) fromEnvironment(fs *pflag.FlagSet) error {
	for _, prefix := range environmentPrefixes {
		for _, flag := range environmentFlags {
			for _, v := range f.environ {
				text, ok := strings.CutPrefix(v, prefix+suffix(flag)+"=")
				if !ok || text == "" || fs.Changed(flag) || fs.Lookup(flag) == nil {
					continue
				}
				if _, err := outputFormat(text); flag == "write-out" && err != nil && prefix != environmentPrefixes[0] {
					continue // etcdctl has forms that are not here
				}
				if err := fs.Set(flag, text); err != nil {
					return &config.UsageError{Err: fmt.Errorf("%s%s: %w", prefix, suffix(flag), err)}
				}
			}
		}
	}
	return nil
}

// ask calls do with a client, within the command's time.
func (f *adminFlags) ask(c *cobra.Command, do func(context.Context, *adminapi.Client, adminapi.Format) error) error {
	format, err := f.format(c)
	if err != nil {
		return err
	}
	t, err := f.tls()
	if err != nil {
		return &config.UsageError{Err: err}
	}
	client, err := adminapi.NewClient(f.endpoints, t)
	if err != nil {
		return &config.UsageError{Err: err}
	}
	user, password, err := f.login(c)
	if err != nil {
		return &config.UsageError{Err: err}
	}
	f.user, f.password = user, password // a terminal is asked once, however often the command asks the cluster
	client.As(user, password)
	client.DialWithin(f.dial)
	ctx, cancel := context.WithTimeout(c.Context(), f.timeout)
	defer cancel()
	return do(ctx, client, format)
}

// format reads the environment, and returns how the command prints.
func (f *adminFlags) format(c *cobra.Command) (adminapi.Format, error) {
	if err := f.fromEnvironment(c.Flags()); err != nil {
		return "", err
	}
	return outputFormat(f.output)
}

// do calls change, and says what is done then.
func (f *adminFlags) do(c *cobra.Command, done string, change func(context.Context, *adminapi.Client) error) error {
	return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
		if err := change(ctx, client); err != nil {
			return err
		}
		return adminapi.WriteDone(c.OutOrStdout(), format, done)
	})
}

// operate begins an operation, waits for its end, and prints what has come of it. If it is not to wait, it prints the operation.
func (f *adminFlags) operate(c *cobra.Command, w *waitFlags, begin func(context.Context, *adminapi.Client) (*adminpb.Operation, error),
	outcome func(context.Context, *adminapi.Client, adminapi.Format, *adminpb.Operation) error,
) error {
	var op *adminpb.Operation
	if err := f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) (err error) {
		if op, err = begin(ctx, client); err != nil {
			return err
		}
		if !w.wait {
			return adminapi.WriteOperations(c.OutOrStdout(), c.ErrOrStderr(), format, &adminpb.OperationListResponse{Operations: []*adminpb.Operation{op}})
		}
		waiting, cancel := context.WithTimeout(c.Context(), w.limit)
		defer cancel()
		if err := client.AwaitOperation(waiting, op.GetId()); err != nil {
			return fmt.Errorf("operation %d has begun and goes on, though this command ends (skein placement operations shows it): %w", op.GetId(), err)
		}
		return nil
	}); err != nil || !w.wait {
		return err
	}
	return f.ask(c, func(ctx context.Context, client *adminapi.Client, format adminapi.Format) error {
		return outcome(ctx, client, format, op)
	})
}

// login returns the user in whose name the command asks, if one was given.
func (f *adminFlags) login(c *cobra.Command) (user, password string, err error) {
	return prompt.Login(f.user, f.password, environmentPrefixes[0]+suffix("password"), os.Stdin, c.ErrOrStderr())
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
	if (f.cert == "") != (f.key == "") {
		return nil, errors.New("give both --cert and --key, or neither: --key is the file of the key of --cert")
	}
	if f.cert != "" {
		pair, err := tls.LoadX509KeyPair(f.cert, f.key)
		if err != nil {
			return nil, fmt.Errorf("--cert and --key: %w", err)
		}
		t.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}
