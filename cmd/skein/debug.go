package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
)

// newDebug is skein debug: what shows the inside of nodes.
func newDebug(environ []string) *cobra.Command {
	c := &cobra.Command{Use: "debug", Short: "Look into nodes, and gather what a bug report needs", RunE: needsCommand}
	c.AddCommand(newBundle(environ), newSlow(environ), newWatchers(environ))
	return c
}

const bundleLong = `Gather into one archive what a bug report needs: of each node its settings, build, log, metrics, goroutines, heap, a profile of
its processor and a trace of its last seconds; of the cluster what skein status and skein doctor say, the ranges, and the state of
those that are in trouble or under load. index.txt in it says what each file is.

Each node is asked at its client URL. One that cannot be reached is named, and costs its own part alone. Without a quorum give all
nodes to --endpoints, and once users are checked the certificate of root (--cert and --key, with --client-cert-auth at the nodes): a
login by --user needs a quorum. While users are not checked, nodes elsewhere want a client's certificate or --insecure-admin. A node takes
30 seconds, sends 64 MiB at most, and makes one part at a time.

The archive has no values, no passwords, no tokens and no private keys. What keys consist of between slashes is hashed, so that equal parts
look alike within the archive and cannot be guessed; --redact=none leaves keys as they are. Names of nodes, addresses, files and users
are in it. Look at it before you send it to somebody.`

func newBundle(environ []string) *cobra.Command {
	f := &adminFlags{environ: environ}
	var file, hide string
	var nodes []string
	var profile time.Duration
	c := &cobra.Command{Use: "bundle", Short: "Gather what a bug report needs, of all nodes, into one archive", Long: bundleLong, Args: cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions}
	f.add(c.Flags())
	c.Flags().StringVarP(&file, "output", "o", "", "the archive, which must not be there yet (default skein-bundle-TIME.tar.gz)")
	c.Flags().StringSliceVar(&nodes, "nodes", nil, "names of the nodes that are asked (default all)")
	c.Flags().DurationVar(&profile, "cpu", 5*time.Second, "how long processors are profiled and traced, at most 20s; 0 leaves both out")
	c.Flags().StringVar(&hide, "redact", "keys", "keys hashes keys, none leaves them as they are")
	f.completeFlag(c, "nodes", f.completeNode)
	f.completeFlag(c, "redact", words("keys", "none"))
	c.RunE = failing(func(c *cobra.Command, _ []string) error {
		if hide != "keys" && hide != "none" {
			return &config.UsageError{Err: fmt.Errorf("--redact %s: there are keys and none", hide)}
		}
		if profile < 0 || profile > 20*time.Second {
			return &config.UsageError{Err: fmt.Errorf("--cpu %v: from 0 to 20s", profile)}
		}
		if file == "" {
			file = "skein-bundle-" + clock.System().Wall().UTC().Format("20060102T150405Z") + ".tar.gz"
		}
		o := adminapi.BundleOptions{Name: strings.TrimSuffix(filepath.Base(file), ".tar.gz"), Nodes: nodes, Profile: profile}
		if hide == "keys" {
			o.Salt = make([]byte, 32)
			rand.Read(o.Salt)
		}
		return f.bundle(c, file, &o)
	})
	return c
}

// bundle makes a bundle in a file. Without a bundle there is no file.
func (f *adminFlags) bundle(c *cobra.Command, file string, o *adminapi.BundleOptions) error {
	return f.ask(c, func(_ context.Context, client *adminapi.Client, format adminapi.Format) (err error) {
		out, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if errors.Is(err, os.ErrExist) {
			return &adminapi.Refusal{Reason: "the file " + file + " is there already", NextStep: "give another one to -o"}
		}
		if err != nil {
			return err
		}
		defer func() {
			if err != nil {
				err = errors.Join(err, os.Remove(file))
			}
		}()
		o.Told = func(n *adminapi.BundledNode) { tellPart(c.ErrOrStderr(), n) }
		nodes, err := client.WriteBundle(c.Context(), out, *o)
		size, serr := out.Seek(0, io.SeekCurrent)
		if err := errors.Join(err, serr, out.Sync(), out.Close()); err != nil {
			return err
		}
		return adminapi.WriteBundled(c.OutOrStdout(), format, file, size, nodes)
	})
}

// tellPart says that a node's part has come, or why not.
func tellPart(w io.Writer, n *adminapi.BundledNode) {
	if n.Error != "" {
		fmt.Fprintf(w, "%s: %s\n", n.Node, n.Error)
		return
	}
	fmt.Fprintf(w, "%s: %d files, %s\n", n.Node, n.Files, adminapi.SizeText(n.Bytes))
}
