package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"go.uber.org/zap"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/config"
)

// newStart is skein start. Its flags are etcd's, which package config reads with
// etcd's own syntax (one dash or two), so cobra leaves them alone.
func newStart(environ []string) *cobra.Command {
	return &cobra.Command{
		Use:                "start [FLAGS]",
		Short:              "Start a node",
		DisableFlagParsing: true,
		ValidArgsFunction:  completeNodeFlags,
		RunE:               failing(func(c *cobra.Command, args []string) error { return start(c, args, environ) }),
	}
}

func start(c *cobra.Command, args, environ []string) error {
	cfg, notices, err := config.Load(args, environ)
	switch {
	case errors.Is(err, config.ErrHelp):
		_, err := fmt.Fprintf(c.OutOrStdout(), "Start a node.\n\nUsage:\n  skein [start] [FLAGS]\n\nExamples:\n%s\n%s", c.Example, config.Usage())
		return err
	case errors.Is(err, config.ErrVersion):
		return writeVersion(c.OutOrStdout(), adminapi.Table)
	case err != nil:
		return err
	}
	logger, err := cfg.Log.Build()
	if err != nil {
		return err
	}
	defer func() { _ = logger.Sync() }() // standard error cannot be synced, and need not be
	v := builtFrom()
	logger.Info("starting skein", zap.String("version", v.Skein), zap.String("commit", v.Commit), zap.String("etcd-version", v.Etcd), zap.Strings("args", args))
	for _, n := range notices {
		logger.Warn(n.Message, n.Fields...)
	}
	if cfg.ForceNewCluster {
		if err := forceNewCluster(c.Context(), cfg, logger); err != nil {
			logger.Error("no node was started", zap.Error(err))
			return err
		}
		cfg.ForceNewCluster = false // it is done, and package embed does not do it
	}
	if err := run(c.Context(), cfg, logger); err != nil {
		logger.Error("the node ended", zap.Error(err))
		return err
	}
	return nil
}
