package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// TestRangePage: the page of a range is made of what its replicas say of themselves, and lists show the load that the leaders serve.
func TestRangePage(t *testing.T) {
	url, client := runningCluster(t, 3)
	type row struct {
		ID     uint64
		Leader string
		Writes float64 `json:"writes_per_second"`
		Bytes  float64 `json:"write_bytes_per_second"`
	}
	list := func(args string) (l struct{ Ranges []row }) {
		t.Helper()
		if err := json.Unmarshal([]byte(said(t.Context(), t, "skein range list "+args+" -w json --endpoints "+url)), &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	written := list("--holding zz").Ranges[0]
	awaits(t, "a load in the list", func() bool {
		for range 20 {
			mustPut(t, client, "zz", strings.Repeat("v", 100))
		}
		busiest := list("--sort load").Ranges[0]
		return busiest.ID == written.ID && busiest.Writes > 0 && busiest.Bytes > 100*busiest.Writes
	})
	show := fmt.Sprintf("skein range show %d --endpoints %s", written.ID, url)
	page := said(t.Context(), t, show)
	for _, part := range []string{"leader      " + written.Leader + ", in term ", "state       awake", "live keys   1\n", " writes/s with ", "revisions   compacted at 0, last write at ", "| leads ", "| follows "} {
		if !strings.Contains(page, part) {
			t.Errorf("%q is not on the page:\n%s", part, page)
		}
	}
	if strings.Contains(page, "?") || strings.Contains(page, "{") || strings.Count(page, "| voter ") != 3 {
		t.Errorf("a replica has not said what it is:\n%s", page)
	}
	if all := said(t.Context(), t, show+" -w json"); !strings.Contains(all, `"overlay_keys"`) {
		t.Errorf("the JSON has not all:\n%s", all)
	}
}
