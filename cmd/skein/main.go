package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	_ "golang.org/x/crypto/x509roots/fallback" // an image FROM scratch has no certificates of authorities, and buckets need them
	"golang.org/x/sys/unix"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/mirror/diff"
)

// Exit codes.
const (
	exitRefused = 1 // with the reason and the next step on standard error
	exitUsage   = 2
	exitDiffers = 3 // of skein diff
	exitNotYet  = 4 // of skein recover verify: nothing is wrong, and not all can be checked yet
	exitRemoved = 5 // of a node that was removed from its cluster before this start; a supervisor need not start it again
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	// The first signal ends what runs in good order, the second one at once.
	context.AfterFunc(ctx, stop)
	os.Exit(execute(ctx, byName(os.Args), os.Environ(), os.Stdout, os.Stderr))
}

// byName returns the arguments of a command line. A link named etcdctl is skein etcdctl. One named etcd needs nothing:
// a node takes etcd's flags, and skein gateway is etcd's command too.
func byName(argv []string) []string {
	if filepath.Base(argv[0]) == "etcdctl" {
		return append([]string{"etcdctl"}, argv[1:]...)
	}
	return argv[1:]
}

// execute runs a command line and returns the exit code.
func execute(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	root := newRoot(environ)
	root.SetArgs(withStart(args))
	root.SetOut(stdout)
	root.SetErr(stderr)
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	code := exitRefused
	var u *config.UsageError
	switch {
	case !errors.As(err, new(failure)) || errors.As(err, &u):
		code = exitUsage
	case errors.Is(err, diff.ErrDifferent):
		code = exitDiffers
	case errors.As(err, new(notYet)):
		code = exitNotYet
	case errors.Is(err, embed.ErrRemoved):
		code = exitRemoved
	}
	var r *adminapi.Refusal
	switch {
	case errors.As(err, new(unwell)): // which its output has said
	case errors.As(err, &r):
		fmt.Fprintf(stderr, "skein: %s\nnext: %s\n", r.Reason, r.NextStep)
	case code == exitUsage:
		fmt.Fprintf(stderr, "skein: %v\nnext: see %s --help\n", err, command.CommandPath())
	default:
		fmt.Fprintf(stderr, "skein: %v\n", err)
	}
	return code
}

// withStart makes skein without a subcommand skein start, so that etcd's command
// lines work as they are, but for those that ask for the version.
func withStart(args []string) []string {
	if len(args) > 0 && (args[0] == "-v" || args[0] == "--version" && (len(args) == 1 || strings.HasPrefix(args[1], "-w") || strings.HasPrefix(args[1], "--write-out"))) {
		return append([]string{"version"}, args[1:]...)
	}
	if len(args) == 0 || strings.HasPrefix(args[0], "-") && args[0] != "-h" && args[0] != "--help" {
		return append([]string{"start"}, args...)
	}
	// A tab behind such flags is one behind skein start.
	if asks := args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd; asks && len(args) > 1 && strings.HasPrefix(args[1], "-") {
		return append([]string{args[0], "start"}, args[1:]...)
	}
	return args
}

func newRoot(environ []string) *cobra.Command {
	root := &cobra.Command{
		Use:           "skein",
		Short:         "An etcd that scales out",
		Long:          "Skein is an etcd that scales out. Without a command, skein starts a node: skein [FLAGS] is skein start [FLAGS].",
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(
		newStart(environ), newConfig(environ), newDemo(), newStatus(environ), newDoctor(environ), newTop(environ), newDebug(environ), newRange(environ), newNode(environ), newPlacement(environ), newCluster(environ), newHold(environ),
		newCert(), newAudit(), newRecover(environ), newDiff(), newBackup(environ), newRestore(environ), newImport(environ), newExport(environ),
		newMirror(environ), newExplain(), newVersion(), newEtcdctl(), newGateway(), newGRPCProxy(),
	)
	root.InitDefaultCompletionCmd()
	addHelp(root)
	return root
}
