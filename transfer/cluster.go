package transfer

import (
	"context"
	"fmt"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/dataapi"
	"github.com/skeindb/skein/keyspace"
)

// Cluster is a running cluster.
type Cluster struct {
	// Client reaches its nodes, in the name of a user who may read and change everything.
	Client *clientv3.Client
	Clock  clock.Clock
	// Report gets lines that say what happens, for people. It may be called from many goroutines.
	Report func(format string, args ...any)
	// Progress, if not nil, gets what says how far the work is, several times a second: a terminal shows the last of it.
	// Without it Report gets a line every five seconds. It is called as Report is.
	Progress func(text string)
}

// releaseTime bounds how long a hold is released when its work is over. It ends by itself otherwise.
const releaseTime = 5 * time.Second

// owner says who this is, for those who look at holds.
func owner() string {
	host, err := os.Hostname()
	if err != nil || len(host) > maxHostBytes {
		host = "unknown host"
	}
	return fmt.Sprintf("%s, process %d", host, os.Getpid())
}

// maxHostBytes bounds a host's name within an owner's.
const maxHostBytes = 200

// hold renews a cut's hold until stop, which releases it, or leaves it to expire.
func (c *Cluster) hold(ctx context.Context, client *dataapi.Client, cut *dataapi.Cut) (held context.Context, stop func(release bool)) {
	held, end := client.Hold(ctx, cut.Hold)
	return held, func(release bool) {
		end()
		if !release {
			return
		}
		call, cancel := clock.WithTimeout(context.WithoutCancel(ctx), c.Clock, releaseTime)
		defer cancel()
		if err := client.Release(call, cut.Hold); err != nil {
			c.Report("the hold of old versions is left to expire within %v: %v", dataapi.HoldLife, err)
		}
	}
}

// clusterOf returns the id of the cluster.
func clusterOf(ctx context.Context, c *Cluster) (keyspace.ClusterID, error) {
	r, err := c.Client.MemberList(ctx)
	if err != nil {
		return 0, err
	}
	return keyspace.ClusterID(r.Header.GetClusterId()), nil
}
