package config

import "errors"

// srvFlags have the founders named by SRV records of a domain.
func srvFlags() []Flag {
	return []Flag{
		{
			Name: "discovery-srv", kind: kindString, Default: "", File: "discovery-srv", Section: sectionClustering,
			Usage: "Domain whose SRV records name the founders of a new cluster, in the place of --initial-cluster.",
			Note:  "The records are those of _etcd-server-ssl._tcp where the peer URLs are https, and of _etcd-server._tcp otherwise: one for each founder. A node finds itself among them by the host of --initial-advertise-peer-urls, or by its address. The records have no names of nodes: give each founder its own --name, or all are called default, and commands that name a node are refused. Not needed once the node has data.",
			set:   setString(func(c *Config) *string { return &c.DiscoverySRV }),
		},
		{
			Name: "discovery-srv-name", kind: kindString, Default: "", File: "discovery-srv-name", Section: sectionClustering,
			Usage: "Suffix of the service's name in these records: with x they are those of _etcd-server-ssl-x._tcp.",
			set:   setString(func(c *Config) *string { return &c.DiscoverySRVName }),
		},
	}
}

// PeerService is the name of the service whose SRV records name the founders, without protocol and domain.
func (c *Config) PeerService() string {
	service := "etcd-server"
	if secure(&c.AdvertisePeerURLs[0]) {
		service += "-ssl"
	}
	if c.DiscoverySRVName != "" {
		service += "-" + c.DiscoverySRVName
	}
	return service
}

// validateDiscovery refuses two sources of the founders.
func (c *Config) validateDiscovery() error {
	switch {
	case c.DiscoverySRV == "" && c.DiscoverySRVName != "":
		return errors.New("--discovery-srv-name is the suffix of a service's name: give the domain too, by --discovery-srv")
	case c.DiscoverySRV == "":
		return nil
	case len(c.InitialCluster) > 0:
		return errors.New("--discovery-srv and --initial-cluster both name the founders: give one of them")
	case len(c.Join) > 0:
		return errors.New("--discovery-srv names the founders of a new cluster, and --join nodes of one that runs: give one of them")
	}
	return nil
}
