package keyspace

import (
	"errors"
	"fmt"
)

// Version is a version of all formats together: on disks and between nodes. The cluster version
// is the one in which all nodes write. A build knows which formats each Version has.
type Version uint32

// The versions in which a form changed: written from that cluster version on. A form asks for the
// one that brought it, and never for NewestVersion.
const (
	// VersionFullNodes: a node's report says that it is full of replicas (placement/driver).
	VersionFullNodes Version = 4
	// VersionAccess: users, roles and permissions are records of placement.
	VersionAccess Version = 4
	// VersionData: holds, and a cluster that is being loaded.
	VersionData Version = 4
	// VersionLeases: a lease can be granted with a span, and an entry has keys of a lease that it attaches.
	VersionLeases Version = 4
)

// A build reads and writes these two versions, and no other. The cluster version is raised from
// one to the next when each node runs a build that reads the next. Until then every node can go
// back to the build before.
const (
	// OldestVersion is the version of the release before.
	OldestVersion Version = 3
	// NewestVersion is this build's.
	NewestVersion Version = 4
)

// Versions are those that a build reads and writes, both ends included. The zero value is not
// known.
type Versions struct{ Oldest, Newest Version }

// OwnVersions are those of this build.
func OwnVersions() Versions { return Versions{OldestVersion, NewestVersion} }

// Has says whether v is one of them.
func (vs Versions) Has(v Version) bool { return vs.Oldest <= v && v <= vs.Newest }

// String returns the versions for people.
func (vs Versions) String() string {
	switch {
	case vs == (Versions{}):
		return "unknown versions"
	case vs.Oldest == vs.Newest:
		return fmt.Sprintf("version %d", vs.Newest)
	}
	return fmt.Sprintf("versions %d to %d", vs.Oldest, vs.Newest)
}

// VersionError says that bytes have a version of their format that this build does not read.
type VersionError struct {
	// What names the format, as in "wal segment".
	What string
	// Found is the version of the bytes. This build reads Oldest to Newest.
	Found, Oldest, Newest uint64
}

// Error implements error. It names the remedy.
func (e *VersionError) Error() string {
	reads := fmt.Sprintf("version %d", e.Newest)
	if e.Oldest != e.Newest {
		reads = fmt.Sprintf("versions %d to %d", e.Oldest, e.Newest)
	}
	remedy := "start a newer build: the cluster has been upgraded, and does not go back"
	if e.Found < e.Oldest {
		remedy = "start the release between first: each release reads the formats of one release before"
	}
	return fmt.Sprintf("%s has format version %d, and this build reads %s: %s; or empty the directory, so that its node joins anew",
		e.What, e.Found, reads, remedy)
}

// IsVersionError says whether err is about a format version that this build does not read.
// Another build may read it: such an entry of a log must not be taken for one without effect.
func IsVersionError(err error) bool {
	var v *VersionError
	return errors.As(err, &v)
}

// CheckVersion returns a *VersionError if a build that reads one version of a format alone finds
// another one.
func CheckVersion(what string, found, reads uint64) error {
	return CheckVersions(what, found, reads, reads)
}

// CheckVersions returns a *VersionError if found is not from oldest to newest.
func CheckVersions(what string, found, oldest, newest uint64) error {
	if oldest <= found && found <= newest {
		return nil
	}
	return &VersionError{What: what, Found: found, Oldest: oldest, Newest: newest}
}
