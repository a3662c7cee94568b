package conformance

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/conformance/cluster"
)

const skeinNodes = cluster.Nodes

// startSkein starts a Skein of three nodes in dir, with one range.
func startSkein(ctx context.Context, dir, tokens string, logger *zap.Logger) (*store, error) {
	c, err := cluster.Start(ctx, cluster.Options{Dir: dir, Logger: logger, Configure: func(c *config.Config) {
		c.AuthToken, c.BcryptCost = tokens, bcryptCost
	}})
	if err != nil {
		return nil, fmt.Errorf("skein: %w", err)
	}
	s := &store{name: "Skein", stop: c.Stop}
	for _, addr := range c.Addrs() {
		conn, err := dial(addr)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("skein: %w", err), s.close())
		}
		s.conns = append(s.conns, conn)
	}
	return s, nil
}

// each runs f for 0 to n−1 at the same time.
func each(n int, f func(int) error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
