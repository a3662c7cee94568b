package main

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/etcdapi"
)

// failure marks the errors of commands that were understood. All others, which cobra
// finds itself, are wrong usage.
type failure struct{ error }

func (f failure) Unwrap() error { return f.error }

// failing marks a command's own errors as such.
func failing(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		if err := run(c, args); err != nil {
			return failure{err}
		}
		return nil
	}
}

// needsCommand refuses a command that only groups others.
func needsCommand(c *cobra.Command, _ []string) error {
	return fmt.Errorf("%s needs a command", c.CommandPath())
}

func printVersion(w io.Writer) {
	fmt.Fprintf(w, "skein Version: %s\netcd Version: %s\nGo Version: %s\nGo OS/Arch: %s/%s\n",
		etcdapi.SkeinVersion, etcdapi.EtcdVersion, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
