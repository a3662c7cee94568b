// Package testserver replaces the package of the same name below
// k8s.io/apiserver/pkg/storage/etcd3. Its functions have the same names and the same
// effect for their callers, but the server is a Skein of three nodes. The process that
// runs the suite starts it on request.
//
// It guarantees that every field that a test changes in the configuration takes effect
// or fails the test. It is compiled in place of the original, never beside it: see the
// package above.
package testserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"reflect"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// Variable is the environment variable with the URL from which to request clusters.
const Variable = "SKEIN_SUITE"

const (
	dialTimeout = 10 * time.Second
	// startTimeout is how long the start of a cluster may take; etcd has as long.
	startTimeout = 60 * time.Second
)

// Wanted is a request for a cluster: the supported part of etcd's configuration.
type Wanted struct {
	Test             string
	ProgressInterval time.Duration
	MaxRequestBytes  uint
	MaxTxnOps        uint
	HTTPS            bool
	CertFile         string
	KeyFile          string
	TrustedCAFile    string
	ClientCertAuth   bool
}

// Given is a cluster that serves.
type Given struct {
	ID        int
	Endpoints []string
}

// taken are the fields of etcd's configuration that Wanted carries, and those without
// an effect on the tests: ports, directory and log, and a quota that Skein does not
// have.
var taken = map[string]bool{
	"WatchProgressNotifyInterval": true, "MaxRequestBytes": true, "MaxTxnOps": true, "ClientTLSInfo": true,
	"ListenClientUrls": true, "AdvertiseClientUrls": true, "QuotaBackendBytes": true,
}

// NewTestConfig returns a configuration that a test may change before it passes it to
// RunEtcd.
func NewTestConfig(_ testing.TB) *embed.Config { return embed.NewConfig() }

// RunEtcd starts a cluster, by cfg or by the defaults if cfg is nil, and returns a
// client of all its nodes. The cluster ends when the test does.
func RunEtcd(t testing.TB, cfg *embed.Config) *kubernetes.Client {
	t.Helper()
	if cfg == nil {
		cfg = NewTestConfig(t)
	}
	wanted, err := read(cfg)
	if err != nil {
		t.Fatal(err)
	}
	wanted.Test = t.Name()
	var given Given
	if err := ask("start", wanted, &given); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ask("stop", given, nil); err != nil {
			t.Error(err)
		}
	})
	tls, err := cfg.ClientTLSInfo.ClientConfig()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.New(clientv3.Config{
		TLS: tls, Endpoints: given.Endpoints, DialTimeout: dialTimeout,
		Logger: zaptest.NewLogger(t, zaptest.Level(zapcore.ErrorLevel)).Named("etcd-client"),
	})
	if err != nil {
		t.Fatal(err)
	}
	recorder := storagetesting.NewKubernetesRecorder(client.Kubernetes)
	client.KV = storagetesting.NewKVRecorder(client.KV, recorder)
	client.Kubernetes = recorder
	return client
}

// Default is the request of a test that changes nothing.
func Default() (Wanted, error) { return read(embed.NewConfig()) }

// read translates a configuration, and refuses unsupported settings.
func read(cfg *embed.Config) (Wanted, error) {
	now, fresh := reflect.ValueOf(cfg).Elem(), reflect.ValueOf(embed.NewConfig()).Elem()
	for i := range now.NumField() {
		field := now.Type().Field(i)
		if !field.IsExported() || taken[field.Name] || field.Type.Kind() == reflect.Func {
			continue
		}
		if a, b := now.Field(i).Interface(), fresh.Field(i).Interface(); !reflect.DeepEqual(a, b) {
			return Wanted{}, fmt.Errorf("the test sets %s to %v, of which the stand-in knows nothing", field.Name, a)
		}
	}
	tls := cfg.ClientTLSInfo
	return Wanted{
		ProgressInterval: cfg.WatchProgressNotifyInterval, MaxRequestBytes: cfg.MaxRequestBytes, MaxTxnOps: cfg.MaxTxnOps,
		HTTPS: cfg.ListenClientUrls[0].Scheme == "https", CertFile: tls.CertFile, KeyFile: tls.KeyFile,
		TrustedCAFile: tls.TrustedCAFile, ClientCertAuth: tls.ClientCertAuth,
	}, nil
}

// ask sends a request to the process that runs the suite.
func ask(what string, question, answer any) error {
	base := os.Getenv(Variable)
	if base == "" {
		return fmt.Errorf("%s is empty: these tests are run by conformance/apiserver", Variable)
	}
	text, err := json.Marshal(question)
	if err != nil {
		return fmt.Errorf("%s a cluster: %w", what, err)
	}
	client := http.Client{Timeout: startTimeout}
	defer client.CloseIdleConnections()
	resp, err := client.Post(base+"/"+what, "application/json", bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("%s a cluster: %w", what, err)
	}
	defer resp.Body.Close()
	if text, err = io.ReadAll(resp.Body); err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	if err == nil && answer != nil {
		err = json.Unmarshal(text, answer)
	}
	if err != nil {
		return fmt.Errorf("%s a cluster: %w", what, err)
	}
	return nil
}
