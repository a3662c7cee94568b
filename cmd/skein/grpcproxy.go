package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// proxyProgram is in deploy/grpcproxy.
const proxyProgram = "skein-grpc-proxy"

// newGRPCProxy is skein grpc-proxy, which becomes another program: etcd's proxy links etcd's server, and no node is to.
func newGRPCProxy() *cobra.Command {
	return &cobra.Command{
		Use: "grpc-proxy start [FLAGS]", Short: "Start etcd's gRPC proxy, with its flags: a namespace, one watch for many",
		DisableFlagParsing: true,
		RunE: failing(func(_ *cobra.Command, args []string) error {
			self, err := os.Executable()
			if err != nil {
				self = "/usr/local/bin/skein" // of the image, where there is no /proc
			}
			if target, err := filepath.EvalSymlinks(self); err == nil {
				self = target
			}
			path := filepath.Join(filepath.Dir(self), proxyProgram)
			if err := unix.Exec(path, append([]string{proxyProgram}, args...), os.Environ()); err != nil {
				return fmt.Errorf("%s: %w: it lies beside skein in the image and in the Debian package, and is made by make release", path, err)
			}
			return nil
		}),
	}
}
