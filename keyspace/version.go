package keyspace

import (
	"errors"
	"fmt"
)

// VersionError says that bytes have another format version than this build reads. A build
// reads one version only: formats may change until the first release.
type VersionError struct {
	// What names the format, as in "wal segment".
	What string
	// Found is the version of the bytes, Reads the one that this build reads.
	Found, Reads uint64
}

// Error implements error. It names the remedy.
func (e *VersionError) Error() string {
	return fmt.Sprintf("%s has format version %d, and this build reads version %d: a directory is opened by the build that wrote it, or emptied so that its node joins anew; nodes that speak to each other run the same build",
		e.What, e.Found, e.Reads)
}

// IsVersionError says whether err is about a format version that this build does not read.
// Another build may read it: such an entry of a log must not be taken for one without effect.
func IsVersionError(err error) bool {
	var v *VersionError
	return errors.As(err, &v)
}

// CheckVersion returns a *VersionError if found differs from reads.
func CheckVersion(what string, found, reads uint64) error {
	if found == reads {
		return nil
	}
	return &VersionError{What: what, Found: found, Reads: reads}
}
