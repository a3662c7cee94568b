package node

import (
	"fmt"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// refuseEtcd returns an error where the data directory is that of an etcd, or the directory
// "member" within it. The way that works stands in it: who is told to empty the directory
// loses the data.
func refuseEtcd(fs vfs.FS, dataDir string, clientURLs []string) error {
	for _, member := range []string{fs.PathJoin(dataDir, "member"), dataDir} {
		db := fs.PathJoin(member, "snap", "db")
		var found string
		for _, path := range []string{db, fs.PathJoin(member, "wal")} {
			if member == dataDir && path != db {
				continue // a directory "wal" may be Skein's own
			}
			if _, err := fs.Stat(path); err == nil {
				found = path
				break
			}
		}
		if found == "" {
			continue
		}
		endpoint := "ENDPOINT"
		if len(clientURLs) > 0 {
			endpoint = clientURLs[0]
		}
		return fmt.Errorf("--data-dir %s is an etcd's: it holds %s. Skein cannot run on it, and leaves it as it is. "+
			"Start this node with another --data-dir. Once the new cluster is up, and this etcd stopped, bring its data in with: "+
			"skein import etcd %s --skip-hash-check --endpoints %s", dataDir, found, db, endpoint)
	}
	return nil
}
