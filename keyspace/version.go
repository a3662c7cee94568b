package keyspace

import "fmt"

// VersionError says that bytes have another format version than this build reads. No build
// reads several: formats may change until the first release.
type VersionError struct {
	// What has the version, as "wal segment".
	What string
	// Found is the version of the bytes, Reads the one that this build reads.
	Found, Reads uint64
}

// Error implements error. It says what to do.
func (e *VersionError) Error() string {
	return fmt.Sprintf("%s has format version %d, and this build reads version %d: a directory is opened by the build that wrote it, or emptied so that its node joins anew; nodes that speak to each other run the same build",
		e.What, e.Found, e.Reads)
}

// CheckVersion returns a *VersionError where found is not the version that is read.
func CheckVersion(what string, found, reads uint64) error {
	if found == reads {
		return nil
	}
	return &VersionError{What: what, Found: found, Reads: reads}
}
