package config

import (
	"crypto/tls"
	"flag"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/goleak"

	"github.com/skeindb/skein/placement/fsm"
)

// rewriting says whether golden files are to be written; datadriven owns the flag.
func rewriting() bool { return flag.Lookup("rewrite").Value.String() == "true" }

func TestMain(m *testing.M) {
	// The library that rotates logs never ends its goroutine.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("gopkg.in/natefinch/lumberjack%2ev2.(*Logger).millRun"))
}

func mustLoad(t *testing.T, args []string, env ...string) (*Config, []Notice) {
	t.Helper()
	c, notices, err := Load(args, env)
	if err != nil {
		t.Fatalf("Load(%q, %q): %v", args, env, err)
	}
	return c, notices
}

func urls(s string) []url.URL {
	if s == "" {
		return nil
	}
	return types.MustNewURLs(strings.Split(s, ","))
}

// honouredCase gives a flag a value other than its default and says what must
// arrive, and where.
type honouredCase struct {
	value string
	file  string // as written in the file, if otherwise than value
	with  []string
	get   func(*Config) any
	want  any
}

func honouredCases(t *testing.T) map[string]honouredCase {
	t.Helper()
	split := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(split, []byte("m\nd\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	str := func(v string, get func(*Config) any) honouredCase { return honouredCase{value: v, get: get, want: v} }
	u := func(v string, get func(*Config) any) honouredCase {
		return honouredCase{value: v, get: get, want: urls(v)}
	}
	list := func(v string, get func(*Config) any) honouredCase {
		return honouredCase{value: v, file: "[" + v + "]", get: get, want: strings.Split(v, ",")}
	}
	peerKey := []string{"peer-key-file", "pk"}
	return map[string]honouredCase{
		"name":                         str("n1", func(c *Config) any { return c.Name }),
		"data-dir":                     str("d1", func(c *Config) any { return c.DataDir }),
		"wal-dir":                      str("w1", func(c *Config) any { return c.WALDir }),
		"heartbeat-interval":           {value: "150", get: func(c *Config) any { return c.HeartbeatInterval }, want: 150 * time.Millisecond},
		"election-timeout":             {value: "2500", get: func(c *Config) any { return c.ElectionTimeout }, want: 2500 * time.Millisecond},
		"listen-peer-urls":             u("http://127.0.0.1:1", func(c *Config) any { return c.ListenPeerURLs }),
		"listen-client-urls":           {value: "http://127.0.0.1:2", with: []string{"advertise-client-urls", "http://h:2"}, get: func(c *Config) any { return c.ListenClientURLs }, want: urls("http://127.0.0.1:2")},
		"listen-metrics-urls":          u("http://127.0.0.1:3,http://127.0.0.1:4", func(c *Config) any { return c.ListenMetricsURLs }),
		"advertise-client-urls":        u("http://h:5", func(c *Config) any { return c.AdvertiseClientURLs }),
		"auto-compaction-mode":         str("revision", func(c *Config) any { return c.Compaction.Mode }),
		"auto-compaction-retention":    str("1h30m", func(c *Config) any { return c.Compaction.Retention }),
		"compaction-batch-limit":       {value: "77", get: func(c *Config) any { return c.Compaction.BatchLimit }, want: 77},
		"compaction-sleep-interval":    {value: "15ms", file: "15000000", get: func(c *Config) any { return c.Compaction.SleepInterval }, want: 15 * time.Millisecond},
		"enable-grpc-gateway":          {value: "false", get: func(c *Config) any { return c.Gateway }, want: false},
		"max-txn-ops":                  {value: "500", get: func(c *Config) any { return c.MaxTxnOps }, want: 500},
		"max-request-bytes":            {value: "2000000", get: func(c *Config) any { return c.MaxRequestBytes }, want: 2000000},
		"corrupt-check-time":           {value: "12h", file: "43200000000000", get: func(c *Config) any { return c.CorruptCheckTime }, want: 12 * time.Hour},
		"quota-backend-bytes":          {value: "8589934592", get: func(c *Config) any { return c.QuotaBytes }, want: int64(8 << 30)},
		"max-concurrent-streams":       {value: "77", get: func(c *Config) any { return c.MaxConcurrentStreams }, want: uint32(77)},
		"grpc-keepalive-min-time":      {value: "1s", file: "1000000000", get: func(c *Config) any { return c.KeepAliveMinTime }, want: time.Second},
		"grpc-keepalive-interval":      {value: "3h", file: "10800000000000", get: func(c *Config) any { return c.KeepAliveInterval }, want: 3 * time.Hour},
		"grpc-keepalive-timeout":       {value: "9s", file: "9000000000", get: func(c *Config) any { return c.KeepAliveTimeout }, want: 9 * time.Second},
		"initial-advertise-peer-urls":  u("http://h:6", func(c *Config) any { return c.AdvertisePeerURLs }),
		"initial-cluster":              {value: "a=http://h:1,b=http://h:2", get: func(c *Config) any { return c.InitialCluster.String() }, want: "a=http://h:1,b=http://h:2"},
		"discovery-srv":                str("example.com", func(c *Config) any { return c.DiscoverySRV }),
		"discovery-srv-name":           {value: "x", with: []string{"discovery-srv", "example.com"}, get: func(c *Config) any { return c.DiscoverySRVName }, want: "x"},
		"initial-cluster-token":        str("tok", func(c *Config) any { return c.InitialClusterToken }),
		"max-learners":                 {value: "3", get: func(c *Config) any { return c.MaxLearners }, want: 3},
		"node-attributes":              {value: "zone=a,rack=b", file: "[zone=a, rack=b]", get: func(c *Config) any { return c.NodeAttributes }, want: []fsm.Attribute{{Key: "rack", Value: "b"}, {Key: "zone", Value: "a"}}},
		"join":                         list("h1:2379,https://h2:2379", func(c *Config) any { return c.Join }),
		"strict-reconfig-check":        {value: "false", get: func(c *Config) any { return c.StrictReconfigCheck }, want: false},
		"pre-vote":                     {value: "false", get: func(c *Config) any { return c.PreVote }, want: false},
		"cert-file":                    {value: "c", with: []string{"key-file", "k"}, get: func(c *Config) any { return c.ClientTLS.CertFile }, want: "c"},
		"key-file":                     {value: "k", with: []string{"cert-file", "c"}, get: func(c *Config) any { return c.ClientTLS.KeyFile }, want: "k"},
		"client-cert-auth":             {value: "true", get: func(c *Config) any { return c.ClientTLS.ClientCertAuth }, want: true},
		"client-cert-file":             {value: "c", with: []string{"client-key-file", "k"}, get: func(c *Config) any { return c.ClientTLS.ClientCertFile }, want: "c"},
		"client-key-file":              {value: "k", with: []string{"client-cert-file", "c"}, get: func(c *Config) any { return c.ClientTLS.ClientKeyFile }, want: "k"},
		"client-crl-file":              str("crl", func(c *Config) any { return c.ClientTLS.CRLFile }),
		"client-cert-allowed-hostname": list("h1,h2", func(c *Config) any { return c.ClientTLS.AllowedHostnames }),
		"trusted-ca-file":              str("ca", func(c *Config) any { return c.ClientTLS.TrustedCAFile }),
		"auto-tls":                     {value: "true", get: func(c *Config) any { return c.ClientTLS.Auto }, want: true},
		"peer-cert-file":               {value: "pc", with: peerKey, get: func(c *Config) any { return c.PeerTLS.CertFile }, want: "pc"},
		"peer-key-file":                {value: "pk", with: []string{"peer-cert-file", "pc"}, get: func(c *Config) any { return c.PeerTLS.KeyFile }, want: "pk"},
		"peer-client-cert-auth":        {value: "true", get: func(c *Config) any { return c.PeerTLS.ClientCertAuth }, want: true},
		"peer-client-cert-file":        {value: "c", with: []string{"peer-client-key-file", "k"}, get: func(c *Config) any { return c.PeerTLS.ClientCertFile }, want: "c"},
		"peer-client-key-file":         {value: "k", with: []string{"peer-client-cert-file", "c"}, get: func(c *Config) any { return c.PeerTLS.ClientKeyFile }, want: "k"},
		"peer-trusted-ca-file":         str("pca", func(c *Config) any { return c.PeerTLS.TrustedCAFile }),
		"peer-cert-allowed-cn":         list("a,b", func(c *Config) any { return c.PeerTLS.AllowedCNs }),
		"peer-cert-allowed-hostname":   list("h1,h2", func(c *Config) any { return c.PeerTLS.AllowedHostnames }),
		"peer-auto-tls":                {value: "true", get: func(c *Config) any { return c.PeerTLS.Auto }, want: true},
		"peer-crl-file":                str("crl", func(c *Config) any { return c.PeerTLS.CRLFile }),
		"auth-token":                   str("jwt,sign-method=HS256", func(c *Config) any { return c.AuthToken }),
		"auth-token-ttl":               {value: "60", get: func(c *Config) any { return c.AuthTokenTTL }, want: time.Minute},
		"bcrypt-cost":                  {value: "4", get: func(c *Config) any { return c.BcryptCost }, want: 4},
		"certs-dir":                    str("cd", func(c *Config) any { return c.CertsDir }),
		"audit-log":                    str("/tmp/audit", func(c *Config) any { return c.AuditLog }),
		"shutdown-delay":               {value: "20s", file: "20000000000", get: func(c *Config) any { return c.ShutdownDelay }, want: 20 * time.Second},
		"peer-transport":               {value: "tls", get: func(c *Config) any { return c.PeersByTCP }, want: true},
		"console":                      {value: "full", get: func(c *Config) any { return c.Console }, want: ConsoleFull},
		"listen-console-urls":          u("http://127.0.0.1:5", func(c *Config) any { return c.ListenConsoleURLs }),
		"insecure-admin":               {value: "true", get: func(c *Config) any { return c.InsecureAdmin }, want: true},
		"self-signed-cert-validity":    {value: "3", get: func(c *Config) any { return c.SelfSignedCertYears }, want: uint(3)},
		"cors":                         {value: "http://b:2,http://a:1", get: func(c *Config) any { return c.CORS }, want: []string{"http://a:1", "http://b:2"}},
		"host-whitelist":               {value: "b,a", get: func(c *Config) any { return c.HostWhitelist }, want: []string{"a", "b"}},
		"cipher-suites": {
			value: "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", file: "[TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]",
			get: func(c *Config) any { return c.CipherSuites }, want: []uint16{tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256},
		},
		"tls-min-version":                   {value: "TLS1.3", get: func(c *Config) any { return c.TLSMinVersion }, want: uint16(tls.VersionTLS13)},
		"tls-max-version":                   {value: "TLS1.2", get: func(c *Config) any { return c.TLSMaxVersion }, want: uint16(tls.VersionTLS12)},
		"log-outputs":                       list("/tmp/x,stderr", func(c *Config) any { return c.Log.Outputs }),
		"log-level":                         str("debug", func(c *Config) any { return c.Log.Level }),
		"log-format":                        str("console", func(c *Config) any { return c.Log.Format }),
		"warning-unary-request-duration":    {value: "2s", file: "2000000000", get: func(c *Config) any { return c.WarnUnaryRequest }, want: 2 * time.Second},
		"warning-apply-duration":            {value: "2s", file: "2000000000", get: func(c *Config) any { return c.WarnApply }, want: 2 * time.Second},
		"enable-distributed-tracing":        {value: "true", get: func(c *Config) any { return c.Tracing.Enabled }, want: true},
		"distributed-tracing-address":       str("collector:4317", func(c *Config) any { return c.Tracing.Address }),
		"distributed-tracing-service-name":  str("skein", func(c *Config) any { return c.Tracing.Service }),
		"distributed-tracing-instance-id":   str("n1", func(c *Config) any { return c.Tracing.Instance }),
		"distributed-tracing-sampling-rate": {value: "1000", get: func(c *Config) any { return c.Tracing.SamplingRate }, want: 1000},
		"watch-progress-notify-interval":    {value: "5s", file: "5000000000", get: func(c *Config) any { return c.WatchProgressInterval }, want: 5 * time.Second},
		"enable-pprof":                      {value: "true", get: func(c *Config) any { return c.EnablePprof }, want: true},
		"metrics":                           {value: "extensive", get: func(c *Config) any { return c.ExtensiveMetrics }, want: true},
		"initial-ranges":                    {value: "9", get: func(c *Config) any { return c.InitialRanges }, want: 9},
		"initial-split-keys":                {value: split, get: func(c *Config) any { return c.InitialSplitKeys }, want: [][]byte{[]byte("d"), []byte("m")}},
		"force-new-cluster":                 {value: "true", get: func(c *Config) any { return c.ForceNewCluster }, want: true},
		"lease-reads":                       {value: "false", get: func(c *Config) any { return c.LeaseReads }, want: false},
		"range-max-bytes":                   {value: "2097152", get: func(c *Config) any { return c.RangeMaxBytes }, want: int64(2 << 20)},
		"range-split-load":                  {value: "500", get: func(c *Config) any { return c.RangeSplitLoad }, want: int64(500)},
		"range-merge-after":                 {value: "20m", file: "1200000000000", get: func(c *Config) any { return c.RangeMergeAfter }, want: 20 * time.Minute},
		"copy-bytes-per-second":             {value: "4194304", get: func(c *Config) any { return c.CopyBytesPerSecond }, want: int64(4 << 20)},
		"node-dead-after":                   {value: "20m", file: "1200000000000", get: func(c *Config) any { return c.NodeDeadAfter }, want: 20 * time.Minute},
		"upgrade-after":                     {value: "20m", file: "1200000000000", get: func(c *Config) any { return c.UpgradeAfter }, want: 20 * time.Minute},
		"memory-budget-bytes":               {value: "134217728", get: func(c *Config) any { return c.MemoryBytes }, want: int64(128 << 20)},
		"listen-client-http-urls":           u("http://127.0.0.1:3", func(c *Config) any { return c.ListenClientHTTPURLs }),
		"socket-reuse-port":                 {value: "true", get: func(c *Config) any { return c.SocketReusePort }, want: true},
		"memory-mlock":                      {value: "true", get: func(c *Config) any { return c.LockMemory }, want: true},
		"unsafe-no-fsync":                   {value: "true", get: func(c *Config) any { return c.NoFsync }, want: true},
		"enable-log-rotation":               {value: "true", with: []string{"log-outputs", "[/tmp/x]"}, get: func(c *Config) any { return c.Log.Rotate }, want: true},
		"log-rotation-config-json":          {value: `{"maxsize": 5}`, file: `'{"maxsize": 5}'`, get: func(c *Config) any { return c.Log.Rotation }, want: `{"maxsize": 5}`},
	}
}

// TestHonoured fails for every honoured flag that does not arrive in the Config from
// the command line, either variable or the file, and for one without a case here.
func TestHonoured(t *testing.T) {
	cases := honouredCases(t)
	// These have one allowed value only, and tests of their own.
	apart := []string{"config-file", "version", "logger", "initial-cluster-state"}
	for _, f := range Flags() {
		if f.Support != Honoured || slices.Contains(apart, f.Name) {
			continue
		}
		tc, ok := cases[f.Name]
		if !ok {
			t.Errorf("%s: no case", f.Name)
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			if reflect.DeepEqual(tc.get(mustDefault(t)), tc.want) {
				t.Fatalf("the case proves nothing: %v is the default", tc.want)
			}
			check := func(from string, c *Config) {
				t.Helper()
				if got := tc.get(c); !reflect.DeepEqual(got, tc.want) {
					t.Errorf("from %s: got %v, want %v", from, got, tc.want)
				}
			}
			var with []string
			if tc.with != nil {
				with = []string{"--" + tc.with[0] + "=" + tc.with[1]}
			}
			variable := strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
			c, _ := mustLoad(t, append(with, "--"+f.Name+"="+tc.value))
			check("the command line", c)
			c, _ = mustLoad(t, with, "ETCD_"+variable+"="+tc.value)
			check("ETCD_"+variable, c)
			c, _ = mustLoad(t, with, "SKEIN_"+variable+"="+tc.value, "ETCD_"+variable+"=nonsense")
			check("SKEIN_"+variable, c)
			if f.File != "" {
				c, _ = mustLoad(t, []string{"--config-file", writeFile(t, &f, tc)})
				check("the file", c)
			}
		})
	}
}

func mustDefault(t *testing.T) *Config {
	t.Helper()
	c, _ := mustLoad(t, nil)
	return c
}

// writeFile writes the case as a configuration file, dots as sections.
func writeFile(t *testing.T, f *Flag, tc honouredCase) string {
	t.Helper()
	tree := map[string][]string{}
	add := func(key, value string) {
		section, leaf, nested := strings.Cut(key, ".")
		if !nested {
			section, leaf = "", key
		}
		tree[section] = append(tree[section], leaf+": "+value)
	}
	text := tc.file
	if text == "" {
		text = tc.value
	}
	add(f.File, text)
	for _, o := range Flags() {
		if tc.with != nil && o.Name == tc.with[0] {
			add(o.File, tc.with[1])
		}
	}
	var b strings.Builder
	for section, lines := range tree {
		indent := ""
		if section != "" {
			b.WriteString(section + ":\n")
			indent = "  "
		}
		b.WriteString(indent + strings.Join(lines, "\n"+indent) + "\n")
	}
	path := filepath.Join(t.TempDir(), "skein.yaml")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTableIsComplete compares the table with the flags of etcd 3.7.3 and their
// defaults.
func TestTableIsComplete(t *testing.T) {
	b, err := os.ReadFile("testdata/etcd-3.7.3-flags.tsv")
	if err != nil {
		t.Fatal(err)
	}
	etcd := map[string]string{}
	for line := range strings.Lines(string(b)) {
		name, def, _ := strings.Cut(strings.TrimRight(line, "\n"), "\t")
		etcd[name] = def
	}
	seen := map[string]bool{}
	for _, f := range Flags() {
		if seen[f.Name] {
			t.Errorf("%s is in the table twice", f.Name)
		}
		seen[f.Name] = true
		def, known := etcd[f.Name]
		if known == f.Own {
			t.Errorf("%s: in etcd %v, Own %v", f.Name, known, f.Own)
		}
		if known && f.Default != def {
			t.Errorf("%s: default %q, etcd's is %q", f.Name, f.Default, def)
		}
		if v, err := f.kind.parse(f.Default); f.Default != "" && (err != nil || v.text != f.Default) {
			t.Errorf("%s: the default %q parses to %q, %v", f.Name, f.Default, v.text, err)
		}
		if f.Support == Honoured != (f.set != nil) || f.Support != Honoured && f.Note == "" || f.Section == "" {
			t.Errorf("%s: incomplete row", f.Name)
		}
	}
	for name := range etcd {
		if !seen[name] {
			t.Errorf("etcd's flag %s is not in the table", name)
		}
	}
}

// TestMeaninglessAndNotYet: every default is accepted, meaningless ones are
// reported, and each flag that is not there yet refuses another value by its reason.
func TestMeaninglessAndNotYet(t *testing.T) {
	other := map[kind]string{
		kindString: "other", kindBool: "", kindInt: "4711", kindUint: "4711", kindDuration: "4711s",
		kindURLs: "http://127.0.0.1:4711", kindSet: "other", kindIgnored: "other",
	}
	for _, f := range Flags() {
		v := other[f.kind]
		if f.kind == kindBool {
			v = map[string]string{"true": "false", "false": "true"}[f.Default]
		}
		if f.Name == "feature-gates" {
			v = "InitialCorruptCheck=true"
		}
		switch f.Support {
		case Honoured:
			// TestHonoured's matter.
		case Meaningless:
			_, notices := mustLoad(t, []string{"--name=n", "--" + f.Name + "=" + v})
			if len(notices) != 1 || notices[0].Message != "this setting means nothing here" {
				t.Errorf("%s: %v", f.Name, notices)
			}
		case NotYet:
			if f.Default != "" {
				mustLoad(t, []string{"--" + f.Name + "=" + f.Default})
			}
			if _, _, err := Load([]string{"--" + f.Name + "=" + v}, nil); err == nil || !strings.Contains(err.Error(), f.Note) {
				t.Errorf("--%s=%s: %v", f.Name, v, err)
			}
		}
	}
}

func TestDocs(t *testing.T) {
	path := "../docs/flags.md"
	if rewriting() {
		if err := os.WriteFile(path, []byte(docs()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(b) != docs() {
		t.Error("docs/flags.md is not what the table says: run go test ./config -run TestDocs -rewrite")
	}
}

// What etcd reads in its two modes.
func TestCompactionRetention(t *testing.T) {
	for _, c := range []struct {
		mode, retention string
		period          time.Duration
		revisions       int64
		fails           bool
	}{
		{mode: CompactPeriodic, retention: "0"},
		{mode: CompactPeriodic, retention: ""},
		{mode: CompactPeriodic, retention: "0s"},
		{mode: CompactPeriodic, retention: "10", period: 10 * time.Hour},
		{mode: CompactPeriodic, retention: "1h", period: time.Hour},
		{mode: CompactPeriodic, retention: "90s", period: 90 * time.Second},
		{mode: CompactPeriodic, retention: "10ms", period: 10 * time.Millisecond},
		{mode: CompactPeriodic, retention: "9ms", fails: true},
		{mode: CompactPeriodic, retention: "-1h", fails: true},
		{mode: CompactPeriodic, retention: "-1", fails: true},
		{mode: CompactPeriodic, retention: "5 minutes", fails: true},
		{mode: CompactPeriodic, retention: "9223372036854775807", fails: true},
		{mode: CompactRevision, retention: "0"},
		{mode: CompactRevision, retention: "1000", revisions: 1000},
		{mode: CompactRevision, retention: "1us", revisions: 1000},
		{mode: CompactRevision, retention: "-5", fails: true},
		{mode: "hourly", retention: "1", fails: true},
		{mode: "", retention: "1", fails: true},
	} {
		cfg := Compaction{Mode: c.mode, Retention: c.retention}
		if err := cfg.validate(); (err != nil) != c.fails {
			t.Errorf("%s %q: %v", c.mode, c.retention, err)
			continue
		}
		if c.fails {
			continue
		}
		if period, revisions, err := cfg.Keep(); err != nil || period != c.period || revisions != c.revisions {
			t.Errorf("%s %q: %v, %d, %v", c.mode, c.retention, period, revisions, err)
		}
	}
}

// What would trace nothing, or everything by mistake, is refused, but only where traces are sent.
func TestTracingIsChecked(t *testing.T) {
	for flags, want := range map[string]string{
		"--distributed-tracing-sampling-rate=2000000":                              "",
		"--enable-distributed-tracing --distributed-tracing-sampling-rate=1000000": "",
		"--enable-distributed-tracing --distributed-tracing-sampling-rate=1000001": "from 0 to 1000000",
		"--enable-distributed-tracing --distributed-tracing-sampling-rate=-1":      "from 0 to 1000000",
		"--enable-distributed-tracing --distributed-tracing-address=":              "--distributed-tracing-address must not be empty",
	} {
		_, _, err := Load(append([]string{"--name=n"}, strings.Fields(flags)...), nil)
		if err == nil && want != "" || err != nil && (want == "" || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", flags, err, want)
		}
	}
}
