package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"go.uber.org/zap"

	"github.com/skeindb/skein/placement/fsm"
)

// maxJoin bounds the addresses of join.
const maxJoin = 64

// joinFlags are those of a node that joins a running cluster.
func joinFlags() []Flag {
	return []Flag{
		{
			Name: "max-learners", kind: kindInt, Default: "1", File: "max-learners", Section: sectionClustering,
			Usage: "Maximum number of learners among the members.",
			Note:  "A learner is a node that holds nothing before it is promoted.",
			set: func(c *Config, v value) (err error) {
				c.MaxLearners, err = strconv.Atoi(v.text)
				return err
			},
		},
		{
			Name: "join", kind: kindList, Default: "", File: "join", Section: sectionSkein, Own: true,
			Usage: "Client addresses of nodes of a running cluster, which this node joins: the first that answers admits it.",
			Note:  "HOST:PORT or URL. If --initial-cluster is given too, the nodes that it names found the cluster, and all others join: all nodes may have the same flags. Not read once the node has data, but for a look whether that is of the same cluster.",
			set:   setList(func(c *Config) *[]string { return &c.Join }),
		},
		{
			Name: "node-attributes", kind: kindList, Default: "", File: "node-attributes", Section: sectionSkein, Own: true,
			Usage: "What is to be known of this node: KEY=VALUE,KEY=VALUE, as zone=a,rack=b.",
			Note:  "Read at each start: what is not given any more is gone.",
			set: func(c *Config, v value) (err error) {
				c.NodeAttributes, err = fsm.ParseAttributes(strings.Join(v.list, ","))
				return err
			},
		},
	}
}

// validateJoin says where a node's cluster comes from, if that is clear.
func (c *Config) validateJoin() error {
	switch {
	case len(c.InitialCluster) == 0 && len(c.Join) == 0 && c.DiscoverySRV == "":
		return errors.New("--initial-cluster must not be empty")
	case len(c.Join) > maxJoin:
		return fmt.Errorf("--join has %d addresses, at most %d", len(c.Join), maxJoin)
	}
	return c.validateDiscovery()
}

// JoinTLS returns the settings for asking the nodes of join over https, or nil if no
// setting suggests that their clients use TLS. This node shows its own client-side
// certificate, and checks theirs like those of its clients. With auto-tls no certificate
// proves anything, and none is checked.
func (c *Config) JoinTLS() (*tls.Config, error) {
	t := &c.ClientTLS
	if !t.given() && t.Auto {
		return &tls.Config{MinVersion: c.TLSMinVersion, MaxVersion: c.TLSMaxVersion, InsecureSkipVerify: true}, nil
	}
	if !t.given() && t.TrustedCAFile == "" && !anySecure(c.ListenClientURLs) {
		return nil, nil
	}
	info, err := c.clientInfo(nil, zap.NewNop())
	if err != nil {
		return nil, fmt.Errorf("client TLS: %w", err)
	}
	// It is a server's certificate: the names of its clients are none of the other nodes'.
	info.AllowedCNs, info.AllowedHostnames = nil, nil
	conf, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("client TLS: %w", err)
	}
	return conf, nil
}
