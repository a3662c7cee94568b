package mirror

import (
	"sync/atomic"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/skeindb/skein/internal/simdisk"
)

// fullDisk is a disk that takes nothing while it is full.
type fullDisk struct {
	*simdisk.Disk
	full atomic.Bool
}

func (d *fullDisk) set(full bool) { d.full.Store(full) }

func (d *fullDisk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	if d.full.Load() {
		return nil, errFull
	}
	f, err := d.Disk.Create(name, c)
	return fullFile{f, d}, err
}

type fullFile struct {
	vfs.File
	d *fullDisk
}

func (f fullFile) Write(p []byte) (int, error) {
	if f.d.full.Load() {
		return 0, errFull
	}
	return f.File.Write(p)
}
