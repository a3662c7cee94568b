// Package config turns a command line, the environment and a configuration file
// into one validated [Config], reading them as etcd 3.7 does.
//
// Every flag of etcd 3.7 is a row of one table ([Flags]). Skein honours the flag, or
// ignores it with a log line, or does not have the feature yet. In the last case it
// refuses to start with the reason, unless the value asks for what Skein does anyway.
// docs/flags.md is rendered from the table, and a test compares the two.
//
// Guarantees: an unknown flag and an unknown key of the file are errors. An unknown
// environment variable is only reported. A result of [Load] has passed
// [Config.Validate]. Cluster and node ids are derived as etcd derives them.
//
// Precedence: a flag, then SKEIN_X, then ETCD_X, then the default. A
// configuration file excludes flags and environment, as in etcd: they are reported
// and not used.
//
// The package does not open sockets or the data directory. It reads the
// configuration file, the file of split keys and, when asked for TLS settings, the
// certificates. cmd/skein calls it; package node is given the Config.
//
// # Files
//
// From the top down: calls between files go down this list.
//
//	settings.go       Settings: what holds for each flag, and where it comes from
//	check.go          Check: what would keep a node from starting
//	load.go           Load: command line, environment and file become one Config
//	file.go           the configuration file
//	config.go         Config, Validate, Default
//	cluster.go        Bootstrap: what the founders agree on without talking
//	usage.go          the text of --help
//	table.go          the table of flags that Skein honours
//	table_sockets.go  rows of sockets, memory and the log's files
//	table_rest.go     the rows of the others
//	tracing.go        flags of slow requests and of traces
//	compaction.go     flags of automatic compaction
//	join.go           flags of a node that joins
//	discovery.go      flags of founders that SRV records name
//	ranges.go         the first ranges' borders, and limits of ranges
//	tls.go            TLS settings and certificates
//	logger.go         the log's settings and the logger of them
//	rotation.go       a log that is rotated, and systemd's journal
//	setters.go        how a flag's value gets into the Config
//	flags.go          Flag: a row, and how a value is read
//	nearest.go        what a mistyped word means
package config
