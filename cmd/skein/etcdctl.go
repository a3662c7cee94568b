package main

import (
	"os"
	"os/signal"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/etcdctl/v3/ctlv3"
	"golang.org/x/sys/unix"
)

// etcdctl takes a command by its first letters. That is etcd's habit and not ours: a new command could change what an
// old script does. Its package switches it on for the whole process.
func init() { cobra.EnablePrefixMatching = false }

// newEtcdctl is skein etcdctl, so that one download is enough.
func newEtcdctl() *cobra.Command {
	return &cobra.Command{
		Use: "etcdctl COMMAND [FLAGS]", Short: "Use keys, leases, users and members: etcd's own command line",
		Example:            "  skein etcdctl --endpoints 127.0.0.1:12379 put greeting hello\n  skein etcdctl --endpoints 127.0.0.1:12379 get --prefix greet",
		DisableFlagParsing: true,
		Run:                func(_ *cobra.Command, args []string) { runEtcdctl(args) },
	}
}

// runEtcdctl becomes etcdctl, which reads the process's own arguments and variables, handles its signals, and ends the
// process.
func runEtcdctl(args []string) {
	signal.Reset(os.Interrupt, unix.SIGTERM)
	os.Args = append([]string{"etcdctl"}, args...)
	cobra.EnablePrefixMatching = true
	ctlv3.MustStart()
}
