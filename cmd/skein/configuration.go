package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.uber.org/zap/zapcore"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
)

// newConfig is skein config. Its commands take the arguments of skein start, so cobra leaves them alone.
func newConfig(environ []string) *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "Check and show the configuration of a node before it is started", RunE: needsCommand}
	c.AddCommand(&cobra.Command{
		Use: "check [FILE | FLAGS]", Short: "Say what would keep a node from starting", DisableFlagParsing: true, ValidArgsFunction: completeNodeFlags,
		Long: `Say what would keep a node from starting with a configuration file, or with the flags of skein start, and the environment.
It reads the configuration, certificates and keys of tokens, and looks whether this user can write the directories, the audit log and
the outputs of the log. It changes nothing, opens no port and does not look into the data directory. The exit code is 1 if something is refused.`,
		RunE: failing(func(c *cobra.Command, args []string) error { return checkConfig(c, args, environ) }),
	}, &cobra.Command{
		Use: "show [--effective] [-w json] [FILE | FLAGS]", Short: "Show the settings of a node, and where each comes from", DisableFlagParsing: true,
		ValidArgsFunction: completeNodeFlags,
		Long: `Show the settings of a node, and where each comes from: a flag, the environment, the file, or another setting that implies it.
With --effective the defaults are shown too.`,
		RunE: failing(func(c *cobra.Command, args []string) error { return showConfig(c, args, environ) }),
	})
	return c
}

// nodeArgs are the arguments of a node. A file alone is its configuration file.
func nodeArgs(args []string) []string {
	if len(args) == 1 && !strings.HasPrefix(args[0], "-") {
		return []string{"--config-file", args[0]}
	}
	return args
}

func checkConfig(c *cobra.Command, args, environ []string) error {
	cfg, notices, err := config.Check(nodeArgs(args), environ, clock.System().Wall)
	if errors.Is(err, config.ErrHelp) {
		return c.Help()
	}
	w := c.OutOrStdout()
	for _, n := range notices {
		fmt.Fprintf(w, "warning: %s\n", noticeText(n))
	}
	if err != nil {
		reasons := strings.Split(err.Error(), "\n")
		for _, r := range reasons {
			fmt.Fprintf(w, "refused: %s\n", r)
		}
		return fmt.Errorf("the node would not start; reasons: %d", len(reasons))
	}
	_, err = fmt.Fprintf(w, "nothing was found that keeps node %s from starting, with its data in %s\n", cfg.Name, cfg.DataDir)
	return err
}

// noticeText is a notice in one line.
func noticeText(n config.Notice) string {
	e := zapcore.NewMapObjectEncoder()
	for _, f := range n.Fields {
		f.AddTo(e)
	}
	var fields []string
	for _, name := range slices.Sorted(maps.Keys(e.Fields)) {
		fields = append(fields, fmt.Sprintf("%s %v", name, e.Fields[name]))
	}
	if len(fields) == 0 {
		return n.Message
	}
	return n.Message + " (" + strings.Join(fields, ", ") + ")"
}

func showConfig(c *cobra.Command, args, environ []string) error {
	effective, output, rest := false, string(adminapi.Table), []string(nil)
	for i := 0; i < len(args); i++ {
		name, value, given := strings.Cut(args[i], "=")
		switch {
		case args[i] == "--effective":
			effective = true
		case (name == "-w" || name == "--write-out") && given:
			output = value
		case (name == "-w" || name == "--write-out") && i+1 < len(args):
			i++
			output = args[i]
		default:
			rest = append(rest, args[i])
		}
	}
	format, err := outputFormat(output)
	if err != nil {
		return err
	}
	all, file, _, err := config.Settings(nodeArgs(rest), environ)
	switch {
	case errors.Is(err, config.ErrHelp):
		return c.Help()
	case err != nil:
		return err
	}
	if !effective {
		all = slices.DeleteFunc(all, func(s config.Setting) bool { return s.Origin == config.FromDefault })
	}
	return writeSettings(c.OutOrStdout(), format, all, file)
}

// writeSettings prints settings. file is the configuration file, if there is one.
func writeSettings(w io.Writer, format adminapi.Format, all []config.Setting, file string) error {
	if format == adminapi.JSON {
		type setting struct {
			Name   string        `json:"name"`
			Value  string        `json:"value"`
			Origin config.Origin `json:"origin"`
			Source string        `json:"source,omitempty"`
		}
		out := struct {
			File     string    `json:"file,omitempty"`
			Settings []setting `json:"settings"`
		}{file, []setting{}}
		for _, s := range all {
			out.Settings = append(out.Settings, setting(s))
		}
		return json.NewEncoder(w).Encode(out)
	}
	if file != "" {
		fmt.Fprintf(w, "configuration file %s\n", file)
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "FLAG\tVALUE\tFROM")
	for _, s := range all {
		from := string(s.Origin)
		switch s.Origin {
		case config.FromEnvironment, config.FromFile:
			from += ": " + s.Source
		case config.Implied:
			from = "implied by " + s.Source
		case config.FromFlag, config.FromDefault:
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\n", s.Name, s.Value, from)
	}
	return tw.Flush()
}
