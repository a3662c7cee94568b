package config

import (
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
)

// Origin says where a setting comes from.
type Origin string

// The origins.
const (
	FromFlag        Origin = "flag"
	FromEnvironment Origin = "environment"
	FromFile        Origin = "file"
	FromDefault     Origin = "default"
	// Implied settings are those that another one stands for, as certs-dir does.
	Implied Origin = "implied"
)

// Setting is what holds for one honoured flag.
type Setting struct {
	Name  string
	Value string
	// Origin says where the value comes from, and Source what it is called there: the variable, the key of the file,
	// the flag that implies it. Source is empty for a default.
	Origin Origin
	Source string
}

// Settings reads a configuration as [Load] does. It returns what holds for each honoured flag, defaults included, in the
// order of the table, and the file that was read, if one was.
func Settings(args, environ []string) (all []Setting, file string, notices []Notice, err error) {
	table := Flags()
	l, err := load(table, args, environ)
	if err != nil {
		return nil, "", nil, err
	}
	effective := l.config.effective()
	for i := range table {
		f := &table[i]
		if f.Support != Honoured || f.Name == "version" || f.Name == "config-file" {
			continue
		}
		s := Setting{Name: f.Name, Value: f.Default, Origin: FromDefault}
		if l.config.CertsDir != "" && (slices.Contains(certsDirSets, f.Name) || strings.HasSuffix(f.Name, "client-cert-auth")) {
			s.Origin, s.Source = Implied, "certs-dir"
		}
		if j := slices.IndexFunc(l.given, func(g given) bool { return g.flag.Name == f.Name }); j >= 0 {
			g := &l.given[j]
			s.Value, s.Origin, s.Source = g.value.text, g.origin, g.source
		}
		if v, ok := effective[f.Name]; ok {
			s.Value = v
		}
		all = append(all, s)
	}
	return all, l.file, l.notices, nil
}

// effective are the values of flags whose meaning is not what was given alone: something completes them, or stands for them.
func (c *Config) effective() map[string]string {
	urls := func(u []url.URL) string { return types.URLs(u).String() }
	return map[string]string{
		"data-dir": c.DataDir, "wal-dir": c.WALDir, "memory-budget-bytes": strconv.FormatInt(c.MemoryBytes, 10), "initial-cluster": c.InitialCluster.String(),
		"listen-client-urls": urls(c.ListenClientURLs), "advertise-client-urls": urls(c.AdvertiseClientURLs),
		"listen-peer-urls": urls(c.ListenPeerURLs), "initial-advertise-peer-urls": urls(c.AdvertisePeerURLs),
		"log-outputs": strings.Join(c.Log.Outputs, ","), "log-format": c.Log.Format,
		"auth-token-ttl": strconv.FormatInt(int64(c.AuthTokenTTL/time.Second), 10), "bcrypt-cost": strconv.Itoa(c.BcryptCost),
		"warning-unary-request-duration": c.WarnUnaryRequest.String(), "warning-apply-duration": c.WarnApply.String(),
		"cert-file": c.ClientTLS.CertFile, "key-file": c.ClientTLS.KeyFile, "trusted-ca-file": c.ClientTLS.TrustedCAFile,
		"client-crl-file": c.ClientTLS.CRLFile, "client-cert-auth": strconv.FormatBool(c.ClientTLS.ClientCertAuth),
		"peer-cert-file": c.PeerTLS.CertFile, "peer-key-file": c.PeerTLS.KeyFile, "peer-trusted-ca-file": c.PeerTLS.TrustedCAFile,
		"peer-crl-file": c.PeerTLS.CRLFile, "peer-client-cert-auth": strconv.FormatBool(c.PeerTLS.ClientCertAuth),
	}
}
