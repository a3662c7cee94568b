package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/internal/limits"
	"github.com/skeindb/skein/node/process"
)

// run runs a node as this process until ctx ends or the node cannot go on. Tests replace it.
var run = runProcess

// runProcess stops the node in order. The error is nil after a clean stop that was asked for, and of a node that was removed
// from its cluster while it ran. A stage of the stop, or of a start that the stop ends, has a bound that a working disk and
// working peers keep. Beyond it runProcess logs the stage and returns. The process should then leave; after a few seconds it
// is ended.
func runProcess(ctx context.Context, cfg *config.Config, logger *zap.Logger) error {
	if err := process.LockMemory(cfg.LockMemory); err != nil {
		return err
	}
	stopPacing := process.UseMemoryBudget(cfg.MemoryBytes)
	defer stopPacing()
	s := process.NewStages(clock.System(), os.Exit)
	v, release := process.Supervise(clock.System(), s, logger)
	defer release()
	return s.Run(ctx, logger, func() error { return runNode(ctx, cfg, logger, s, v) })
}

func runNode(ctx context.Context, cfg *config.Config, logger *zap.Logger, s *process.Stages, v *process.Supervisor) error {
	n, err := embed.Start(ctx, cfg, embed.WithLogger(logger), embed.OnStage(s.Enter))
	switch {
	case ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx))):
		logger.Info("stopped before the node served clients")
		return nil
	case err != nil:
		return err
	}
	v.Serving(n.DiskStalled)
	allProcessors := process.UseProcessors()
	defer allProcessors()
	logger = n.Logger()
	logger.Info("the node's memory budget is --memory-budget-bytes",
		zap.Int64("bytes", cfg.MemoryBytes), zap.Int64("available-bytes", limits.Memory()))
	select {
	case <-ctx.Done():
		logger.Info("stopping", zap.Duration("shutdown-delay", cfg.ShutdownDelay))
		n.Stopping()
		s.End()
		s.EnterFor("serve on for --shutdown-delay", cfg.ShutdownDelay)
		v.Stopping()
		serveOn(n, cfg.ShutdownDelay)
	case <-n.Done():
		s.End()
		v.Stopping()
	}
	failure := n.Err()
	stopping := clock.StartStopwatch()
	err = n.Stop(context.Background())
	logger.Info("the node has stopped", zap.Duration("took", stopping.Elapsed()), zap.Error(err))
	switch {
	case errors.Is(failure, embed.ErrRemoved): // it was asked for, by whoever decommissioned the node
		logger.Warn("the node has left the cluster", zap.Error(failure), zap.NamedError("stop", err))
		return nil
	case failure == nil && err != nil:
		return fmt.Errorf("stop: %w", err)
	}
	return failure
}

// serveOn waits for as long as clients take to see that the node stops, or until it cannot go on.
func serveOn(n *embed.Server, delay time.Duration) {
	timer := clock.System().NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C():
	case <-n.Done():
	}
}
