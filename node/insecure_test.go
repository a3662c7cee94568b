package node

import (
	"net/url"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/skeindb/skein/config"
)

// A node without TLS beyond loopback says so in its log and its metrics. One on loopback has the metric too.
func TestInsecureIsTold(t *testing.T) {
	for host, want := range map[string]string{"127.0.0.1:1": "0", "10.0.0.1:1": "1"} {
		cfg := config.Default()
		cfg.ListenClientURLs = []url.URL{{Scheme: "http", Host: host}}
		lines, logs := observer.New(zap.WarnLevel)
		reg := prometheus.NewRegistry()
		tellInsecure(cfg, zap.New(lines), reg)
		const head = "# HELP skein_insecure 1 if a client or peer URL beyond loopback is without TLS, else 0.\n# TYPE skein_insecure gauge\nskein_insecure "
		if err := testutil.GatherAndCompare(reg, strings.NewReader(head+want+"\n")); err != nil {
			t.Error(err)
		}
		if told := logs.FilterMessageSnippet("WITHOUT TLS").FilterField(zap.Strings("urls", []string{"http://" + host})).Len(); (told == 1) != (want == "1") {
			t.Errorf("%s: told %d times", host, told)
		}
	}
}
