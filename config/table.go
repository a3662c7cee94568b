package config

import (
	"errors"
	"math"
	"net/url"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
)

// The sections of the table, in the order of the documentation.
const (
	sectionMember     = "Member"
	sectionClustering = "Clustering"
	sectionSecurity   = "Security"
	sectionAuth       = "Auth"
	sectionProfiling  = "Profiling and monitoring"
	sectionLogging    = "Logging"
	sectionTracing    = "Distributed tracing"
	sectionFeatures   = "Features"
	sectionUnsafe     = "Unsafe"
	sectionDiscovery  = "Discovery"
	sectionRelics     = "Relics that etcd ignores too"
	sectionSkein      = "Skein's own"
)

// Flags returns the table: every flag of etcd 3.7.3, then Skein's own.
func Flags() []Flag {
	t := make([]Flag, 0, 140)
	t = append(t, memberFlags()...)
	t = append(t, dataFlags()...)
	t = append(t, gatewayFlag())
	t = append(t, socketFlags()...)
	t = append(t, clusterFlags()...)
	t = append(t, securityFlags()...)
	t = append(t, tlsFlags()...)
	t = append(t, browserFlags()...)
	t = append(t, authFlags()...)
	t = append(t, loggingFlags()...)
	t = append(t, compactionFlags()...)
	t = append(t, ownFlags()...)
	t = append(t, commandFlags()...)
	t = append(t, flagsOfPlacement()...)
	t = append(t, joinFlags()...)
	t = append(t, srvFlags()...)
	t = append(t, slowFlags()...)
	t = append(t, unsafeFlags()...)
	t = append(t, meaninglessFlags()...)
	t = append(t, notYetFlags()...)
	t = append(t, discoveryFlags()...)
	return append(t, relicFlags()...)
}

// dataFlags are about the store of this node.
func dataFlags() []Flag {
	return []Flag{
		{
			Name: "corrupt-check-time", kind: kindDuration, Default: "0s", File: "corrupt-check-time", Section: sectionFeatures,
			Usage: "How often this node reads its replicas from disk and compares them with others. 0 is never.",
			Note:  "A replica that differs from a majority goes into quarantine and is replaced. What replicas apply is always compared.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.CorruptCheckTime }),
		},
		{
			Name: "quota-backend-bytes", kind: kindInt, Default: "0", File: "quota-backend-bytes", Section: sectionMember,
			Usage: "Size of this node's store above which it takes no more data. 0 or less means that the disk is the bound.",
			Note:  "For each node. The alarm NOSPACE ends by itself below the quota; nothing has to be defragmented or disarmed.",
			set:   func(c *Config, v value) error { c.QuotaBytes = v.i; return nil },
		},
	}
}

func memberFlags() []Flag {
	return []Flag{
		{
			Name: "name", kind: kindString, Default: "default", File: "name", Section: sectionMember,
			Usage: "Human-readable name of this node.", set: setString(func(c *Config) *string { return &c.Name }),
		},
		{
			Name: "data-dir", kind: kindString, Default: "", File: "data-dir", Section: sectionMember,
			Usage: "Path to the data directory.", Note: "Empty means NAME.skein, not NAME.etcd: the formats differ.",
			set: setString(func(c *Config) *string { return &c.DataDir }),
		},
		{
			Name: "wal-dir", kind: kindString, Default: "", File: "wal-dir", Section: sectionMember,
			Usage: "Path to the directory of the wal.", Note: "Empty means the directory wal in the data directory.",
			set: setString(func(c *Config) *string { return &c.WALDir }),
		},
		{
			Name: "heartbeat-interval", kind: kindMillis, Default: "100", File: "heartbeat-interval", Section: sectionMember,
			Usage: "Time between heartbeats, in milliseconds.",
			Note:  "The placement group leaves out every second one while nobody asks it for anything.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.HeartbeatInterval }),
		},
		{
			Name: "election-timeout", kind: kindMillis, Default: "1000", File: "election-timeout", Section: sectionMember,
			Usage: "Time without a heartbeat after which an election begins, in milliseconds.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.ElectionTimeout }),
		},
		{
			Name: "listen-peer-urls", kind: kindURLs, Default: "http://localhost:2380", File: "listen-peer-urls", Section: sectionMember,
			Usage: "URLs to listen on for the other nodes.",
			Note:  "Nodes talk QUIC, and TCP for copies of ranges: each port is taken for UDP and for TCP. http means self-made certificates without authentication; unix sockets are refused.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.ListenPeerURLs }),
		},
		{
			Name: "listen-client-urls", kind: kindURLs, Default: "http://localhost:2379", File: "listen-client-urls", Section: sectionMember,
			Usage: "URLs to listen on for clients: gRPC and HTTP on one port.",
			Note:  "An address may have both an http and an https URL. HTTP is HTTP/1.1 or HTTP/2; a connection of HTTP/2 is for gRPC or for HTTP, as its first request is.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.ListenClientURLs }),
		},
		{
			Name: "max-txn-ops", kind: kindUint, Default: "128", File: "max-txn-ops", Section: sectionMember,
			Usage: "Maximum number of operations in a transaction.", set: setInt(func(c *Config) *int { return &c.MaxTxnOps }),
		},
		{
			Name: "max-request-bytes", kind: kindUint, Default: "1572864", File: "max-request-bytes", Section: sectionMember,
			Usage: "Maximum size of a request in bytes.", Note: "1 to 4194304: what a request writes is one entry of the log.",
			set: setInt(func(c *Config) *int { return &c.MaxRequestBytes }),
		},
		{
			Name: "max-concurrent-streams", kind: kindUint32, Default: "4294967295", File: "max-concurrent-streams", Section: sectionMember,
			Usage: "Maximum number of calls at a time on one client connection.",
			set:   func(c *Config, v value) error { c.MaxConcurrentStreams = uint32(v.u); return nil },
		},
		{
			Name: "grpc-keepalive-min-time", kind: kindDuration, Default: "5s", File: "grpc-keepalive-min-time", Section: sectionMember,
			Usage: "Least time between pings of a client.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.KeepAliveMinTime }),
		},
		{
			Name: "grpc-keepalive-interval", kind: kindDuration, Default: "2h0m0s", File: "grpc-keepalive-interval", Section: sectionMember,
			Usage: "Time after which a silent client is pinged (0 to disable).",
			set:   setDuration(func(c *Config) *time.Duration { return &c.KeepAliveInterval }),
		},
		{
			Name: "grpc-keepalive-timeout", kind: kindDuration, Default: "20s", File: "grpc-keepalive-timeout", Section: sectionMember,
			Usage: "Time after which a pinged, still silent client is cut off (0 to disable).",
			set:   setDuration(func(c *Config) *time.Duration { return &c.KeepAliveTimeout }),
		},
	}
}

func gatewayFlag() Flag {
	return Flag{
		Name: "enable-grpc-gateway", kind: kindBool, Default: "true", File: "enable-grpc-gateway", Section: sectionMember,
		Usage: "Serve the JSON gateway at the client URLs under /v3/.", Note: "Websockets are for its streams alone, as watches are.",
		set: setBool(func(c *Config) *bool { return &c.Gateway }),
	}
}

func clusterFlags() []Flag {
	return []Flag{
		{
			Name: "initial-advertise-peer-urls", kind: kindURLs, Default: "http://localhost:2380", File: "initial-advertise-peer-urls", Section: sectionClustering,
			Usage: "URLs at which the other nodes reach this one.",
			Note:  "A listen address of 0.0.0.0 does not change the default to the machine's own address, as it does in etcd.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.AdvertisePeerURLs }),
		},
		{
			Name: "initial-cluster", kind: kindString, Default: "default=http://localhost:2380", File: "initial-cluster", Section: sectionClustering,
			Usage: "The founders of a new cluster: NAME=URL,NAME=URL,…",
			Note:  "Without it this node bootstraps the cluster alone, under its own name and peer URLs. Not read once the node has data.",
			set: func(c *Config, v value) error {
				m, err := types.NewURLsMap(v.text)
				if err != nil {
					return err
				}
				c.InitialCluster = m
				return nil
			},
		},
		{
			Name: "initial-cluster-state", kind: kindString, Default: "new", File: "initial-cluster-state", Section: sectionClustering,
			Usage: "Whether a new cluster is bootstrapped (new), or this node was added to one that runs (existing).",
			Note:  "With existing, initial-cluster says whom to ask, and under which URLs this node was added. Not read once the node has data.",
			set:   setString(func(c *Config) *string { return &c.InitialClusterState }),
		},
		{
			Name: "initial-cluster-token", kind: kindString, Default: "etcd-cluster", File: "initial-cluster-token", Section: sectionClustering,
			Usage: "Tells clusters with the same URLs apart.", set: setString(func(c *Config) *string { return &c.InitialClusterToken }),
		},
		{
			Name: "advertise-client-urls", kind: kindURLs, Default: "http://localhost:2379", File: "advertise-client-urls", Section: sectionClustering,
			Usage: "URLs at which clients reach this node. Required where listen-client-urls is given.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.AdvertiseClientURLs }),
		},
		{
			Name: "strict-reconfig-check", kind: kindBool, Default: "true", File: "strict-reconfig-check", Section: sectionClustering,
			Usage: "Refuse changes of membership that would lose the quorum.", Note: "Removals alone: a new member is in no quorum. Without the check a removal for which a quorum is missing begins, and waits for it.",
			set: setBool(func(c *Config) *bool { return &c.StrictReconfigCheck }),
		},
		{
			Name: "pre-vote", kind: kindBool, Default: "true", File: "pre-vote", Section: sectionClustering,
			Usage: "Ask before an election whether it could be won.", set: setBool(func(c *Config) *bool { return &c.PreVote }),
		},
	}
}

func securityFlags() []Flag {
	client := func(key string) string { return "client-transport-security." + key }
	peer := func(key string) string { return "peer-transport-security." + key }
	str := func(name, file, usage string, f func(*Config) *string) Flag {
		return Flag{Name: name, kind: kindString, File: file, Section: sectionSecurity, Usage: usage, set: setString(f)}
	}
	flag := func(name, file, usage string, f func(*Config) *bool) Flag {
		return Flag{Name: name, kind: kindBool, Default: "false", File: file, Section: sectionSecurity, Usage: usage, set: setBool(f)}
	}
	list := func(name, file, usage string, f func(*Config) *[]string) Flag {
		return Flag{Name: name, kind: kindList, File: file, Section: sectionSecurity, Usage: usage, set: setList(f)}
	}
	return []Flag{
		str("cert-file", client("cert-file"), "Certificate of the client listeners.", func(c *Config) *string { return &c.ClientTLS.CertFile }),
		str("key-file", client("key-file"), "Key of the client listeners.", func(c *Config) *string { return &c.ClientTLS.KeyFile }),
		flag("client-cert-auth", client("client-cert-auth"), "Demand a certificate of clients.", func(c *Config) *bool { return &c.ClientTLS.ClientCertAuth }),
		str("client-cert-file", client("client-cert-file"), "Certificate shown as a client.", func(c *Config) *string { return &c.ClientTLS.ClientCertFile }),
		str("client-key-file", client("client-key-file"), "Key of client-cert-file.", func(c *Config) *string { return &c.ClientTLS.ClientKeyFile }),
		str("client-crl-file", "", "Revocation list for clients' certificates.", func(c *Config) *string { return &c.ClientTLS.CRLFile }),
		list("client-cert-allowed-hostname", client("allowed-hostname"), "Host names of which a client's certificate must bear one.",
			func(c *Config) *[]string { return &c.ClientTLS.AllowedHostnames }),
		str("trusted-ca-file", client("trusted-ca-file"), "Authorities of clients' certificates; demands one of every client.",
			func(c *Config) *string { return &c.ClientTLS.TrustedCAFile }),
		flag("auto-tls", client("auto-tls"), "Make a self-signed certificate for clients.", func(c *Config) *bool { return &c.ClientTLS.Auto }),
		str("peer-cert-file", peer("cert-file"), "Certificate of the peer listeners.", func(c *Config) *string { return &c.PeerTLS.CertFile }),
		str("peer-key-file", peer("key-file"), "Key of the peer listeners.", func(c *Config) *string { return &c.PeerTLS.KeyFile }),
		flag("peer-client-cert-auth", peer("client-cert-auth"), "Demand a certificate of peers. peer-trusted-ca-file does that too.", func(c *Config) *bool { return &c.PeerTLS.ClientCertAuth }),
		str("peer-client-cert-file", peer("client-cert-file"), "Certificate shown to peers.", func(c *Config) *string { return &c.PeerTLS.ClientCertFile }),
		str("peer-client-key-file", peer("client-key-file"), "Key of peer-client-cert-file.", func(c *Config) *string { return &c.PeerTLS.ClientKeyFile }),
		str("peer-trusted-ca-file", peer("trusted-ca-file"), "Authorities of peers' certificates. https peer URLs need it, unless peer-auto-tls makes the certificates.", func(c *Config) *string { return &c.PeerTLS.TrustedCAFile }),
		list("peer-cert-allowed-cn", peer("allowed-cn"), "Common names of which a peer's certificate must bear one.",
			func(c *Config) *[]string { return &c.PeerTLS.AllowedCNs }),
		list("peer-cert-allowed-hostname", peer("allowed-hostname"), "Host names of which a peer's certificate must bear one.",
			func(c *Config) *[]string { return &c.PeerTLS.AllowedHostnames }),
		flag("peer-auto-tls", peer("auto-tls"), "Make a self-signed certificate for peers: encrypted, and open to whoever reaches the port.", func(c *Config) *bool { return &c.PeerTLS.Auto }),
		str("peer-crl-file", "", "Revocation list for peers' certificates.", func(c *Config) *string { return &c.PeerTLS.CRLFile }),
	}
}

func tlsFlags() []Flag {
	return []Flag{
		{
			Name: "self-signed-cert-validity", kind: kindUint, Default: "1", File: "self-signed-cert-validity", Section: sectionSecurity,
			Usage: "Years for which the certificate of auto-tls is valid.", Note: "Peers make theirs anew at each start.",
			set: func(c *Config, v value) error {
				if v.u > 100 {
					return errors.New("value out of range")
				}
				c.SelfSignedCertYears = uint(v.u)
				return nil
			},
		},
		{
			Name: "cipher-suites", kind: kindList, File: "cipher-suites", Section: sectionSecurity,
			Usage: "Cipher suites of TLS 1.2, separated by commas.", Note: "For clients; the bus always uses TLS 1.3.",
			set: func(c *Config, v value) (err error) {
				c.CipherSuites, err = parseCipherSuites(v.list)
				return err
			},
		},
		{
			Name: "tls-min-version", kind: kindString, Default: "TLS1.2", File: "tls-min-version", Section: sectionSecurity,
			Usage: "Oldest version of TLS: TLS1.2 or TLS1.3.", Note: "The bus always uses TLS 1.3.",
			set: func(c *Config, v value) (err error) {
				c.TLSMinVersion, err = parseTLSVersion(v.text)
				return err
			},
		},
		{
			Name: "tls-max-version", kind: kindString, Default: "", File: "tls-max-version", Section: sectionSecurity,
			Usage: "Newest version of TLS: TLS1.2 or TLS1.3.", Note: "For clients; the bus always uses TLS 1.3.",
			set: func(c *Config, v value) (err error) {
				c.TLSMaxVersion, err = parseTLSVersion(v.text)
				return err
			},
		},
	}
}

func authFlags() []Flag {
	return []Flag{
		{
			Name: "auth-token", kind: kindString, Default: "simple", File: "auth-token", Section: sectionAuth,
			Usage: "Tokens of users who log in: simple, or jwt,sign-method=METHOD,pub-key=FILE,priv-key=FILE,ttl=TIME.",
			Note:  "Any node takes a simple token of any other.",
			set:   setString(func(c *Config) *string { return &c.AuthToken }),
		},
		{
			Name: "auth-token-ttl", kind: kindUint, Default: "300", File: "auth-token-ttl", Section: sectionAuth,
			Usage: "Seconds for which a simple token is valid without use.", Note: "0 means 300.",
			set: func(c *Config, v value) error {
				if v.u > uint64(math.MaxInt64/time.Second) {
					return errors.New("value out of range")
				}
				c.AuthTokenTTL = time.Duration(v.u) * time.Second
				return nil
			},
		},
		{
			Name: "bcrypt-cost", kind: kindUint, Default: "10", File: "bcrypt-cost", Section: sectionAuth,
			Usage: "Cost of the hashes of new passwords.", Note: "4 to 14: each step doubles the time of a login, which 14 makes a second.",
			set: setInt(func(c *Config) *int { return &c.BcryptCost }),
		},
	}
}

// browserFlags are about the pages that a browser shows to somebody who reaches the client URLs.
func browserFlags() []Flag {
	return []Flag{
		{
			Name: "cors", kind: kindString, Default: "*", File: "cors", Section: sectionSecurity,
			Usage: "Origins whose pages may use the HTTP of the client URLs, separated by commas: scheme://host:port. Empty or `*` means all.",
			Note:  "A page of another origin is also refused, not only kept from reading the answer. The default port may be left out in the request.",
			set: func(c *Config, v value) error {
				if c.CORS = []string{"*"}; v.text == "" || v.text == "*" {
					return nil
				}
				urls, err := types.NewURLs(strings.Split(v.text, ","))
				if err != nil {
					return err
				}
				c.CORS = slices.Compact(urls.StringSlice())
				return nil
			},
		},
		{
			Name: "host-whitelist", kind: kindString, Default: "*", File: "host-whitelist", Section: sectionSecurity,
			Usage: "Names by which HTTP requests without TLS may call this node, separated by commas. Empty or `*` means any.",
			set: func(c *Config, v value) error {
				if c.HostWhitelist = strings.Split(v.text, ","); v.text == "" {
					c.HostWhitelist = []string{"*"}
				}
				slices.Sort(c.HostWhitelist)
				c.HostWhitelist = slices.Compact(c.HostWhitelist)
				return nil
			},
		},
	}
}

func loggingFlags() []Flag {
	return []Flag{
		{
			Name: "logger", kind: kindString, Default: "zap", File: "logger", Section: sectionLogging,
			Usage: "The kind of logger: zap.", set: setString(func(c *Config) *string { return &c.Log.Logger }),
		},
		{
			Name: "log-outputs", kind: kindSet, Default: "default", File: "log-outputs", Section: sectionLogging,
			Usage: "Where the log goes: default, stderr, stdout, systemd/journal or paths, separated by commas.",
			Note:  "systemd/journal, which stands alone, is where systemd also brings stderr.",
			set:   setList(func(c *Config) *[]string { return &c.Log.Outputs }),
		},
		{
			Name: "log-level", kind: kindString, Default: "info", File: "log-level", Section: sectionLogging,
			Usage: "Lowest level that is logged: debug, info, warn, error, panic or fatal.",
			set:   setString(func(c *Config) *string { return &c.Log.Level }),
		},
		{
			Name: "log-format", kind: kindString, Default: "json", File: "log-format", Section: sectionLogging,
			Usage: "Format of the log: json or console.", set: setString(func(c *Config) *string { return &c.Log.Format }),
		},
		{
			Name: "warning-unary-request-duration", kind: kindDuration, Default: "300ms", File: "warning-unary-request-duration", Section: sectionLogging,
			Usage: "Duration above which a request is logged as a warning.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.WarnUnaryRequest }),
		},
		{
			Name: "watch-progress-notify-interval", kind: kindDuration, Default: "0s", File: "watch-progress-notify-interval", Section: sectionFeatures,
			Usage: "How often idle watchers that ask for progress are told of it. 0 means 10m, less than 100ms that.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.WatchProgressInterval }),
		},
		{
			Name: "enable-pprof", kind: kindBool, Default: "false", File: "enable-pprof", Section: sectionProfiling,
			Usage: "Serve Go's profiles at the client URLs under /debug/pprof/.",
			Note:  "To root alone, once users are checked: by a token in the header Authorization, or with client-cert-auth by a certificate.", set: setBool(func(c *Config) *bool { return &c.EnablePprof }),
		},
		{
			Name: "metrics", kind: kindString, Default: "basic", File: "metrics", Section: sectionProfiling,
			Usage: "basic, or extensive for histograms of the times of each method (grpc_server_handling_seconds).",
			set:   setExtensive,
		},
		{
			Name: "listen-metrics-urls", kind: kindURLs, Default: "", File: "listen-metrics-urls", Section: sectionProfiling,
			Usage: "Extra URLs to listen on for /metrics and the health checks.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.ListenMetricsURLs }),
		},
		{
			Name: "config-file", kind: kindString, Default: "", Section: sectionMember,
			Usage: "Path to a configuration file (YAML or JSON). With it, other flags and the environment are not used.",
			Note:  "Strict: an unknown key is an error.", set: func(*Config, value) error { return nil },
		},
		{
			Name: "version", kind: kindBool, Default: "false", Section: sectionMember,
			Usage: "Print the versions and exit.", set: func(*Config, value) error { return nil },
		},
	}
}

// commandFlags are about who may command the cluster, and who did.
func commandFlags() []Flag {
	return []Flag{
		{
			Name: "audit-log", kind: kindString, Default: "", File: "audit-log", Section: sectionSkein, Own: true,
			Usage: "File to which logins, denials, and changes of users, members, alarms and the cluster are appended, one line of JSON each.",
			Note:  "Each line has the hash of the one before; skein audit check verifies that. A file that is moved away is begun anew. No request waits for it.",
			set:   setString(func(c *Config) *string { return &c.AuditLog }),
		},
		{
			Name: "peer-transport", kind: kindString, Default: "quic", File: "peer-transport", Section: sectionSkein, Own: true,
			Usage: "What this node dials its peers by: quic, or tls for TLS over TCP where the network blocks UDP.",
			Note:  "A node accepts both, so nodes are changed one after the other. With tls on all nodes the peer port needs TCP alone.",
			set:   setPeerTransport,
		},
		{
			Name: "console", kind: kindString, Default: "read-only", File: "console", Section: sectionSkein, Own: true,
			Usage: "What the console at /console/ of the client URLs can do: read-only, full for commands and edits too, or off.",
			Note:  "It may do what its reader may: while users are checked, root sees all, and others only keys, by their permissions. Over http it is served by addresses, localhost, the names in this node's URLs and those of host-whitelist, of which * counts for none.",
			set:   setConsole,
		},
		{
			Name: "listen-console-urls", kind: kindURLs, Default: "", File: "listen-console-urls", Section: sectionSkein, Own: true,
			Usage: "URLs to serve the console at, and not at the client URLs.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.ListenConsoleURLs }),
		},
		{
			Name: "insecure-admin", kind: kindBool, Default: "false", File: "insecure-admin", Section: sectionSkein, Own: true,
			Usage: "Let whoever reaches a client URL command the cluster while users are not checked (etcdctl auth enable).",
			Note:  "Commands are drain, decommission, join, split, move, debug bundle and the like. Without it loopback, unix sockets and clients with a certificate may command, and all others look only.",
			set:   setBool(func(c *Config) *bool { return &c.InsecureAdmin }),
		},
	}
}

func ownFlags() []Flag {
	return []Flag{
		{
			Name: "shutdown-delay", kind: kindDuration, Default: "0s", File: "shutdown-delay", Section: sectionSkein, Own: true,
			Usage: "How long the node serves on after SIGTERM, while /readyz and gRPC's health service say that it stops.",
			Note:  "At most 1h. For load balancers and proxies that need a while to send nobody any more. A second signal ends the node at once.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.ShutdownDelay }),
		},
		{
			Name: "initial-ranges", kind: kindUint, Default: "1", File: "initial-ranges", Section: sectionSkein, Own: true,
			Usage: "Number of ranges that a new cluster begins with, split evenly over printable ASCII.",
			Note:  "The same on all founders. Not read once the node has data.",
			set:   setInt(func(c *Config) *int { return &c.InitialRanges }),
		},
		{
			Name: "initial-split-keys", kind: kindString, Default: "", File: "initial-split-keys", Section: sectionSkein, Own: true,
			Usage: "File of the keys at which the ranges of a new cluster begin, one a line.",
			Note: `Escapes: \\ \n \r \t \xNN. Keys in double quotes are taken as skein range list prints them. Empty lines and lines that begin with # are left out; a key that begins with # is written \x23. ` +
				"Excludes initial-ranges. The same on all founders. Not read once the node has data.",
			set: func(c *Config, v value) (err error) {
				if v.text != "" {
					c.InitialSplitKeys, err = readSplitKeys(v.text)
				}
				return err
			},
		},
		{
			Name: "certs-dir", kind: kindString, Default: "", File: "certs-dir", Section: sectionSkein, Own: true,
			Usage: "Directory of a node's certificates, as skein cert makes them: TLS for clients and peers, with certificates demanded of both.",
			Note: "It stands for the flags of certificates, keys, authorities and revocation lists, and for client-cert-auth and peer-client-cert-auth; " +
				"with it the URLs are https by default.",
			set: func(*Config, value) error { return nil }, // useCertsDir has set it before all others
		},
		{
			Name: "memory-budget-bytes", kind: kindUint, Default: "", File: "memory-budget-bytes", Section: sectionSkein, Own: true,
			Usage: "Memory for caches, memtables, queues and overlays together, in bytes.",
			Note:  "64 MiB to 16 TiB. By default (0) a quarter of what the process may have: the machine's memory, or less by its cgroup; between 256 MiB and 4 GiB, but where there are less than 512 MiB, half of them. It is taken as data and load come. Go's runtime comes on top, about a quarter more. It bounds connections, watchers and replicas too: to 5,600, 70,000 and 50,000 for 1 GiB.",
			set:   setInt64(func(c *Config) *int64 { return &c.MemoryBytes }),
		},
		{
			Name: "range-max-bytes", kind: kindUint, Default: "268435456", File: "range-max-bytes", Section: sectionSkein, Own: true,
			Usage: "Size in bytes above which a range is split in the middle of its bytes.",
			Note:  "On disk, old versions included. At least 1 MiB; 0 splits no range for its size. Each node decides for what it leads.",
			set:   setInt64(func(c *Config) *int64 { return &c.RangeMaxBytes }),
		},
		{
			Name: "range-split-load", kind: kindUint, Default: "10000", File: "range-split-load", Section: sectionSkein, Own: true,
			Usage: "Requests a second above which a range is split where they divide.",
			Note:  "Reads and writes. A single hot key, and writes that move on along the keys, are left in one range. 0 splits no range for its load. Each node decides for what it leads.",
			set:   setInt64(func(c *Config) *int64 { return &c.RangeSplitLoad }),
		},
		{
			Name: "range-merge-after", kind: kindDuration, Default: "1h0m0s", File: "range-merge-after", Section: sectionSkein, Own: true,
			Usage: "How long two neighbours are small and cold before they become one range.",
			Note: "Together at most a quarter of range-max-bytes and of range-split-load, and for as long neither split nor merged. At least 5m; 0 merges none but by command. " +
				"A border that was set at bootstrap or by command stays. The same on all nodes: that of placement's leader counts, where skein placement set-merge-after has set nothing.",
			set: setDuration(func(c *Config) *time.Duration { return &c.RangeMergeAfter }),
		},
		{
			Name: "copy-bytes-per-second", kind: kindUint, Default: "67108864", File: "copy-bytes-per-second", Section: sectionSkein, Own: true,
			Usage: "Bytes a second that copies of ranges bring to this node, all together, and likewise that it sends for them.",
			Note:  "At least 1 MiB. A copy is as fast as the slower of its two nodes allows.",
			set:   setInt64(func(c *Config) *int64 { return &c.CopyBytesPerSecond }),
		},
		{
			Name: "lease-reads", kind: kindBool, Default: "true", File: "lease-reads", Section: sectionSkein, Own: true,
			Usage: "Answer linearizable reads under the leader's lease, without a round trip to a quorum.",
			Note:  "A lease trusts that no node's clock runs 1 % faster than another's, and that none stands still, as in a virtual machine that is paused or restored from a snapshot (docs/OPERATIONS.md); false trusts no clock. Each node decides for what it leads.",
			set:   setBool(func(c *Config) *bool { return &c.LeaseReads }),
		},
	}
}

// flagsOfPlacement say after how long placement does something by itself.
func flagsOfPlacement() []Flag {
	return []Flag{
		{
			Name: "node-dead-after", kind: kindDuration, Default: "5m0s", File: "node-dead-after", Section: sectionSkein, Own: true,
			Usage: "How long a node may be silent before its replicas are rebuilt on others.",
			Note:  "At least two election timeouts. The same on all nodes: that of placement's leader counts.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.NodeDeadAfter }),
		},
		{
			Name: "upgrade-after", kind: kindDuration, Default: "24h0m0s", File: "upgrade-after", Section: sectionSkein, Own: true,
			Usage: "How long all nodes run a new release before the cluster version is raised and none can go back.",
			Note:  "0 raises it by command alone (skein cluster upgrade). The same on all nodes: that of placement's leader counts.",
			set:   setDuration(func(c *Config) *time.Duration { return &c.UpgradeAfter }),
		},
	}
}
