package etcdapi

// The versions that this build reports. Clients compare etcd's: they are pure digits
// and dots, since Patroni turns each part into a number.
const (
	// SkeinVersion is Skein's own version.
	SkeinVersion = "0.1.0"
	// EtcdVersion is the version of etcd whose API this is.
	EtcdVersion = "3.7.3"
	// ClusterVersion is what etcd calls the cluster's version: that of the oldest
	// member without its patch level.
	ClusterVersion = "3.7.0"
	// StorageVersion is what etcd calls the version of its storage.
	StorageVersion = "3.7.0"
)
