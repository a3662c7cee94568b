package node

import (
	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/etcdapi"
	"github.com/skeindb/skein/node/bundle"
	"github.com/skeindb/skein/node/join"
	"github.com/skeindb/skein/node/operate"
)

// admin is the node's backend of the admin service.
type admin struct {
	*operate.Admin
	join.Admitter
	charted
	watched
}

// withBundles is the backend of a node with ports, which makes its part of debug bundles.
type withBundles struct {
	adminapi.Backend
	*bundle.Source
}

var (
	_ adminapi.Backend       = (*admin)(nil)
	_ adminapi.BundleBackend = withBundles{}
)

// Admin answers operators' questions about the whole cluster, executes their commands, and
// admits nodes.
func (c *Core) Admin() adminapi.Backend {
	return &admin{c.admin, join.Admitter{Cluster: c.o.Cluster, Self: c.o.Self, Clock: c.o.Clock, Table: c.client}, charted{c}, watched{c}}
}

// Members gives etcd's clients access to the members, with etcd's flags --max-learners and
// --strict-reconfig-check.
func (c *Core) Members(maxLearners int, strict bool) etcdapi.Cluster {
	return c.admin.Members(maxLearners, strict)
}
