package config

import (
	"cmp"
	"crypto/sha1"
	"encoding/binary"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/skeindb/skein/keyspace"
)

// Founder is a node of a new cluster.
type Founder struct {
	ID   keyspace.NodeID
	Name string
	// PeerURLs are ascending.
	PeerURLs []string
}

// Bootstrap is what the founders of a cluster agree on without talking: each works
// it out of the same initial-cluster and token.
type Bootstrap struct {
	Cluster keyspace.ClusterID
	// Self is this node's id.
	Self keyspace.NodeID
	// Founders are all nodes, this one among them, ascending by id.
	Founders []Founder
}

// Bootstrap derives the ids of the cluster and of its founders as etcd does. A node's id
// is the SHA-1 of its peer URLs and the token, the cluster's that of all node ids. It is
// for an empty data directory. As in etcd, a node that was started before knows its ids
// and ignores initial-cluster. Where SRV records name the founders, the caller has put them
// into InitialCluster, and they name this node by an address that may be another one than in its peer URLs.
func (c *Config) Bootstrap() (*Bootstrap, error) {
	self, ok := c.InitialCluster[c.Name]
	if !ok {
		return nil, fmt.Errorf("couldn't find local name %q in the initial cluster configuration: add %s=URL to --initial-cluster", c.Name, c.Name)
	}
	if have, want := sorted(self), sorted(c.AdvertisePeerURLs); c.DiscoverySRV == "" && !slices.Equal(have, want) {
		return nil, fmt.Errorf("--initial-cluster has %s=%s but --initial-advertise-peer-urls has %s: both must list the same URLs",
			c.Name, strings.Join(have, ","), strings.Join(want, ","))
	}
	b := &Bootstrap{}
	owner := make(map[string]string)
	for name, urls := range c.InitialCluster {
		f := Founder{Name: name, PeerURLs: sorted(urls)}
		for _, u := range f.PeerURLs {
			if other, taken := owner[u]; taken {
				return nil, fmt.Errorf("--initial-cluster gives the URL %s to both %s and %s", u, min(other, name), max(other, name))
			}
			owner[u] = name
		}
		f.ID = nodeID(f.PeerURLs, c.InitialClusterToken)
		b.Founders = append(b.Founders, f)
	}
	slices.SortFunc(b.Founders, func(x, y Founder) int { return cmp.Compare(x.ID, y.ID) })
	for i, f := range b.Founders {
		if f.ID == 0 || i > 0 && b.Founders[i-1].ID == f.ID {
			return nil, fmt.Errorf("--initial-cluster derives the unusable id %s for %s: change its URLs or the token", f.ID, f.Name)
		}
		if f.Name == c.Name {
			b.Self = f.ID
		}
	}
	b.Cluster = clusterID(b.Founders)
	return b, nil
}

// nodeID derives a founder's id from its ascending peer URLs.
func nodeID(peerURLs []string, token string) keyspace.NodeID {
	sum := sha1.Sum([]byte(strings.Join(peerURLs, "") + token))
	return keyspace.NodeID(binary.BigEndian.Uint64(sum[:]))
}

// clusterID derives the cluster's id from the founders, ascending by id.
func clusterID(founders []Founder) keyspace.ClusterID {
	b := make([]byte, 0, 8*len(founders))
	for _, f := range founders {
		b = binary.BigEndian.AppendUint64(b, uint64(f.ID))
	}
	sum := sha1.Sum(b)
	return keyspace.ClusterID(binary.BigEndian.Uint64(sum[:]))
}

func sorted(urls []url.URL) []string {
	s := make([]string, len(urls))
	for i := range urls {
		s[i] = urls[i].String()
	}
	slices.Sort(s)
	return s
}
