package etcdapi

// The versions that this build reports. Clients compare etcd's. They are digits and dots alone,
// because Patroni turns each part into a number.
const (
	// SkeinVersion is Skein's own version.
	SkeinVersion = "0.1.0"
	// EtcdVersion is the version of etcd whose API this is.
	EtcdVersion = "3.7.3"
	// ClusterVersion is etcd's cluster version: that of the oldest member without its patch level.
	ClusterVersion = "3.7.0"
	// PreviousVersion stands in etcd's Downgrade calls for Skein's release before this one, whichever
	// it is: it is one minor version below ClusterVersion, as etcd wants the target to be.
	PreviousVersion = "3.6.0"
	// StorageVersion is etcd's storage version.
	StorageVersion = "3.7.0"
)
