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
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/skeindb/skein/adminapi"
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
	f.addConnection(fs)
	fs.StringVarP(&f.output, "write-out", "w", "table", "table or json")
}

// addConnection adds those by which nodes are reached.
func (f *adminFlags) addConnection(fs *pflag.FlagSet) {
	fs.StringSliceVar(&f.endpoints, "endpoints", []string{"127.0.0.1:2379"}, "client URLs of nodes; the first that answers is asked")
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
			if !ok || text == "" || fs.Changed(flag) || fs.Lookup(flag) == nil {
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
	user, password, err := f.login(os.Stdin, c.ErrOrStderr())
	if err != nil {
		return &config.UsageError{Err: err}
	}
	client.As(user, password)
	ctx, cancel := context.WithTimeout(c.Context(), f.timeout)
	defer cancel()
	return do(ctx, client, format)
}

// format reads the environment, and returns how the command prints.
func (f *adminFlags) format(c *cobra.Command) (adminapi.Format, error) {
	if err := f.fromEnvironment(c.Flags()); err != nil {
		return "", err
	}
	format := adminapi.Format(f.output)
	if format != adminapi.Table && format != adminapi.JSON {
		return "", &config.UsageError{Err: fmt.Errorf("-w %s: there are table and json", f.output)}
	}
	return format, nil
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
