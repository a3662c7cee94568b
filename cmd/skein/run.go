package main

import (
	"context"
	"errors"

	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
)

// run runs a node until ctx is done or the node cannot go on.
var run = func(context.Context, *config.Config, *zap.Logger) error {
	return errors.New("this build has no node in it")
}
