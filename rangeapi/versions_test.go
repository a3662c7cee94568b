package rangeapi

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/skeindb/skein/internal/golden"
	"github.com/skeindb/skein/internal/measure"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

var sampleVersionsRequest = VersionsRequest{
	Range: 7, Generation: 3, Cut: mvcc.Cut{Select: mvcc.SelectAll, At: 300, After: 200},
	From: mvcc.VersionCursor{Key: []byte("k"), Below: 250}, End: []byte("m"), MaxBytes: 1 << 20, Position: FeedPosition{Term: 6, Number: 300},
}

func sampleVersions() []mvcc.Version {
	return []mvcc.Version{
		{Key: []byte("k"), Mod: 249, Create: 201, Version: 4, Lease: 9, Value: []byte("v")},
		{Key: []byte("k"), Mod: 240, Create: 201, Version: 3, Sub: 2, Earlier: &mvcc.Version{Key: []byte("k"), Mod: 240, Sub: 1, Tombstone: true}},
		{Key: []byte("l"), Mod: 290, Tombstone: true},
	}
}

func sampleVersionsPage() *VersionsPage {
	p := &VersionsPage{Next: &mvcc.VersionCursor{Key: []byte("l"), Below: 290}}
	var last []byte
	for _, v := range sampleVersions() {
		p.Add(last, &mvcc.StoredVersion{Key: v.Key, Mod: v.Mod, Value: v.AppendValue(nil)})
		last = v.Key
	}
	return p
}

func decodedVersions(p *VersionsPage) (vs []mvcc.Version, err error) {
	err = p.Each(func(s *mvcc.StoredVersion) error {
		var v mvcc.Version
		err := s.Decode(&v)
		vs = append(vs, v)
		return err
	})
	return vs, err
}

// TestGoldenVersions fixes the formats of method 27, as TestGolden does.
func TestGoldenVersions(t *testing.T) {
	page := AppendVersionsPage(nil, sampleVersionsPage(), nil)
	golden.Formats(t, map[string][]byte{
		"versions.v1": sampleVersionsRequest.Encode(), "versions-page.v1": page,
		"versions-end.v1": AppendVersionsPage(nil, &VersionsPage{}, nil), "versions-error.v1": AppendVersionsPage(nil, nil, kverror.New(kverror.HoldEnded, "a test")),
	})
	if q, err := DecodeVersionsRequest(sampleVersionsRequest.Encode()); err != nil || !reflect.DeepEqual(q, &sampleVersionsRequest) {
		t.Errorf("%+v, %v", q, err)
	}
	p, failed, err := DecodeVersionsPage(page)
	if err != nil || failed != nil || !reflect.DeepEqual(p, sampleVersionsPage()) {
		t.Fatalf("%+v, %v, %v", p, failed, err)
	}
	vs, err := decodedVersions(p)
	if want := sampleVersions(); err != nil || len(vs) != len(want) || vs[1].Earlier == nil || !vs[1].Earlier.Tombstone || string(vs[2].Key) != "l" || vs[0].Lease != 9 {
		t.Errorf("%+v, %v, want %+v", vs, err, want)
	}
	for n := range page {
		if p, _, err := DecodeVersionsPage(page[:n]); err == nil {
			if vs, err := decodedVersions(p); err == nil && len(vs) == 3 {
				t.Errorf("%d of %d bytes are a whole page", n, len(page))
			}
		}
	}
}

// FuzzVersions: what is accepted survives another round trip.
func FuzzVersions(f *testing.F) {
	f.Add(sampleVersionsRequest.Encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		measure.Claims(t, b, func() { _, _ = DecodeVersionsRequest(b) })
		q, err := DecodeVersionsRequest(b)
		if err != nil {
			return
		}
		if again, err := DecodeVersionsRequest(q.Encode()); err != nil || !reflect.DeepEqual(again, q) {
			t.Fatalf("%+v is %+v again, %v", q, again, err)
		}
	})
}

// FuzzVersionsPage is FuzzVersions for pages, and decodes what they hold.
func FuzzVersionsPage(f *testing.F) {
	f.Add(AppendVersionsPage(nil, sampleVersionsPage(), nil))
	f.Add(AppendVersionsPage(nil, nil, kverror.New(kverror.HoldEnded, "a test")))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p *VersionsPage
		measure.Claims(t, b, func() { p, _, _ = DecodeVersionsPage(b) })
		if p == nil {
			return
		}
		_, _ = decodedVersions(p)
		c := AppendVersionsPage(nil, p, nil)
		again, _, err := DecodeVersionsPage(c)
		if err != nil || !reflect.DeepEqual(again, p) || !bytes.Equal(AppendVersionsPage(nil, again, nil), c) {
			t.Fatalf("%+v is %+v again, %v", p, again, err)
		}
	})
}
