package main

import (
	"context"

	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/node"
)

// run runs a node until ctx is done or the node cannot go on. Tests replace it.
var run = func(ctx context.Context, cfg *config.Config, logger *zap.Logger) error {
	return node.Run(ctx, cfg, logger)
}
