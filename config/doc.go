// Package config turns a command line, the environment and a configuration file
// into one validated [Config], reading them as etcd 3.7 does.
//
// Every flag that etcd 3.7 knows is a row of one table ([Flags]). A row says
// whether the flag is honoured, means nothing here (it is accepted and a line of
// the log says so), or asks for something that is not there yet (the start is
// refused with the reason, unless the value asks for what Skein does anyway).
// docs/flags.md is rendered from the table and a test compares the two.
//
// Guarantees: an unknown flag and an unknown key of the file are errors; an unknown
// environment variable is only reported; what [Load] returns has passed
// [Config.Validate]; cluster and node ids are derived as etcd derives them.
//
// What takes precedence: a flag, then SKEIN_X, then ETCD_X, then the default. A
// configuration file excludes flags and environment, as in etcd: they are reported
// and not used.
//
// The package does not open sockets or the data directory. It reads the
// configuration file, the file of split keys and, when asked for TLS settings, the
// certificates. cmd/skein calls it; package node is given the Config.
package config
