package transfer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// TestTooLargeVersions (trap 115): a version that is too large is named before the cluster is asked for anything, with what really
// helps: larger requests, or for what no cluster takes, a smaller value. A larger --max-version-bytes does not hide that.
func TestTooLargeVersions(t *testing.T) {
	for _, c := range []struct {
		size, most int64
		want       string
	}{
		{1 << 20, 0, ""},
		{2 << 20, 0, "1 version is larger than 1572864 bytes with its key: \"large\" at revision 2 has 2097157 bytes. " +
			"Raise --max-version-bytes to 2097157, and to as much --max-request-bytes of all nodes; or make these values smaller"},
		{2 << 20, 2<<20 + 5, ""},
		{rangeapi.MaxRequestBytes - 5, 64 << 20, ""},
		{rangeapi.MaxRequestBytes, 0, "No cluster takes more than 4194304 bytes: make these values smaller"},
		{rangeapi.MaxRequestBytes, 64 << 20, "larger than 4194304 bytes with its key: \"large\" at revision 2 has 4194309 bytes. No cluster takes more than 4194304 bytes: make"},
	} {
		path := t.TempDir() + "/db"
		w, err := etcdfile.Create(path, etcdfile.Header{Revision: 2})
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Add(&mvcc.Version{Key: []byte("large"), Mod: 2, Create: 2, Version: 1, Value: make([]byte, c.size)}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Finish(t.Context()); err != nil {
			t.Fatal(err)
		}
		l, done, err := loadOfFile(t.Context(), &Cluster{Report: t.Logf}, &ImportOptions{Path: path, MaxVersionBytes: c.most, TempDir: t.TempDir()})
		if err == nil {
			if l.revision != keyspace.Revision(2) {
				t.Errorf("revision %d", l.revision)
			}
			done()
		}
		if got := fmt.Sprint(err); (err != nil) != (c.want != "") || !strings.Contains(got, c.want) && c.want != "" {
			t.Errorf("%d bytes, at most %d: %v, want %q", c.size, c.most, err, c.want)
		}
	}
}
