package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"golang.org/x/term"

	"github.com/skeindb/skein/loadtest"
)

// accessFlags are named, and read from the environment, as etcdctl's are.
type accessFlags struct {
	cacert, cert, key  string
	insecureSkipVerify bool
	user, password     string
}

func (f *accessFlags) add(set *pflag.FlagSet) {
	set.StringVar(&f.cacert, "cacert", "", "CA certificates that the servers' certificates are checked against")
	set.StringVar(&f.cert, "cert", "", "client certificate")
	set.StringVar(&f.key, "key", "", "key of the client certificate")
	set.BoolVar(&f.insecureSkipVerify, "insecure-skip-tls-verify", false, "do not check the servers' certificates")
	set.StringVar(&f.user, "user", "", "user NAME or NAME:PASSWORD, where users are checked; without a password the terminal is asked for it")
	set.StringVar(&f.password, "password", "", "password of --user; in ETCDCTL_PASSWORD others on this machine do not see it")
}

// access returns what the flags say, those that were not given as the environment has them.
func (f *accessFlags) access(set *pflag.FlagSet, prompts io.Writer) (a loadtest.Access, err error) {
	for _, name := range []string{"endpoints", "cacert", "cert", "key", "insecure-skip-tls-verify", "user", "password"} {
		variable := "ETCDCTL_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
		if text := os.Getenv(variable); text != "" && set.Lookup(name) != nil && !set.Changed(name) {
			if err := set.Set(name, text); err != nil {
				return a, fmt.Errorf("%s: %w", variable, err)
			}
		}
	}
	switch {
	case (f.cert == "") != (f.key == ""):
		return a, errors.New("--cert and --key go together")
	case f.cacert != "" || f.cert != "" || f.insecureSkipVerify:
		a.TLS, err = transport.TLSInfo{
			TrustedCAFile:      f.cacert,
			CertFile:           f.cert,
			KeyFile:            f.key,
			InsecureSkipVerify: f.insecureSkipVerify,
		}.ClientConfig()
		if err != nil {
			return a, err
		}
	}
	a.User, a.Password, err = f.login(os.Stdin, prompts)
	return a, err
}

// login returns the user, if one was given. It asks a terminal for a password that is missing.
func (f *accessFlags) login(in *os.File, prompts io.Writer) (user, password string, err error) {
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
