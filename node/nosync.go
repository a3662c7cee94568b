package node

import "github.com/cockroachdb/pebble/v2/vfs"

// noSync is a file system that never waits for the disk (--unsafe-no-fsync). A crash of the process loses nothing: the
// kernel has what was written. One of the machine may.
type noSync struct{ vfs.FS }

// noSyncFile is a file of a noSync.
type noSyncFile struct{ vfs.File }

// Sync implements vfs.File.
func (noSyncFile) Sync() error { return nil }

// SyncData implements vfs.File.
func (noSyncFile) SyncData() error { return nil }

// SyncTo implements vfs.File.
func (noSyncFile) SyncTo(int64) (fullSync bool, err error) { return false, nil }

func unsynced(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return noSyncFile{f}, nil
}

// Create implements vfs.FS.
func (fs noSync) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return unsynced(fs.FS.Create(name, category))
}

// OpenReadWrite implements vfs.FS.
func (fs noSync) OpenReadWrite(name string, category vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	return unsynced(fs.FS.OpenReadWrite(name, category, opts...))
}

// OpenDir implements vfs.FS.
func (fs noSync) OpenDir(name string) (vfs.File, error) { return unsynced(fs.FS.OpenDir(name)) }

// ReuseForWrite implements vfs.FS.
func (fs noSync) ReuseForWrite(oldname, newname string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return unsynced(fs.FS.ReuseForWrite(oldname, newname, category))
}

// Unwrap implements vfs.FS.
func (fs noSync) Unwrap() vfs.FS { return fs.FS }
