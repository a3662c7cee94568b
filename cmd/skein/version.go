package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/keyspace"
)

// build says what this program was made from, as -w json prints it.
type build struct {
	Skein string `json:"skein"`
	// Commit is empty where the build did not note it, and Modified says that it is not all.
	Commit   string `json:"commit,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	// Oldest and Newest are the cluster versions that it reads and writes.
	Oldest   keyspace.Version `json:"oldest_cluster_version"`
	Newest   keyspace.Version `json:"newest_cluster_version"`
	Etcd     string           `json:"etcd"`
	Go       string           `json:"go"`
	Platform string           `json:"platform"`
}

func builtFrom() build {
	own := keyspace.OwnVersions()
	b := build{
		Skein: etcdapi.SkeinVersion, Oldest: own.Oldest, Newest: own.Newest, Etcd: etcdapi.EtcdVersion,
		Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Commit = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}

func writeVersion(w io.Writer, format adminapi.Format) error {
	b := builtFrom()
	if format == adminapi.JSON {
		return json.NewEncoder(w).Encode(b)
	}
	commit := b.Commit
	switch {
	case commit == "":
		commit = "unknown"
	case b.Modified:
		commit += ", modified"
	}
	_, err := fmt.Fprintf(w, "skein Version: %s\nCommit: %s\nCluster Versions: %d to %d\netcd Version: %s\nGo Version: %s\nGo OS/Arch: %s\n",
		b.Skein, commit, b.Oldest, b.Newest, b.Etcd, b.Go, b.Platform)
	return err
}

func newVersion() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use: "version", Short: "Print the versions of this build", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			format, err := outputFormat(output)
			if err != nil {
				return err
			}
			return writeVersion(c.OutOrStdout(), format)
		}),
	}
	c.Flags().StringVarP(&output, "write-out", "w", string(adminapi.Table), "table or json")
	return c
}
