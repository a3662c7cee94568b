package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"

	"github.com/skeindb/skein/internal/prompt"
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
	a.User, a.Password, err = prompt.Login(f.user, f.password, "ETCDCTL_PASSWORD", os.Stdin, prompts)
	return a, err
}
