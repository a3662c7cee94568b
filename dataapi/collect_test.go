package dataapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/etcdfile"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
)

// collected is what a file would have.
func collected(ctx context.Context, c Cuts, o CollectOptions) (string, error) {
	o.Clock = clock.System()
	h, sorter, err := Collect(ctx, c, o)
	if err != nil {
		return "", err
	}
	defer sorter.Close()
	text := fmt.Sprint(h.Revision, h.Compacted, h.DataBytes, h.Leases)
	for {
		v, err := sorter.Next()
		if errors.Is(err, io.EOF) {
			return text, nil
		}
		if err != nil {
			return "", err
		}
		text += fmt.Sprintf(" %s@%d", v.Key, v.Mod)
	}
}

// A node and a client collect the same, by revision and with the leases around the cut. A hold that comes too late is
// gone on with; one that somebody ends is an error that says so.
func TestCollect(t *testing.T) {
	s := newStore()
	s.withoutAccess = true
	for i := range s.versions {
		s.versions[i].Lease = 9
	}
	s.versions = append(s.versions, mvcc.Version{Key: []byte("z"), Mod: 29, Create: 29, Version: 1, Lease: 8}, mvcc.Version{Key: []byte("z"), Mod: 28, Create: 28, Version: 1, Lease: 7})
	client := s.client(t)
	// Those of both lists, and the two of which newest versions alone know.
	const leases = "[{1 60 60} {2 60 59} {3 60 59} {8 60 60} {9 60 60}]"
	for name, c := range map[string]Cuts{"node": s.cutter(), "client": client} {
		s.asked = 0
		s.ended = []error{kverror.New(kverror.HoldEnded, "late"), kverror.New(kverror.HoldEnded, "late once more")}
		again := 0
		got, err := collected(t.Context(), c, CollectOptions{Again: func(error) { again++ }})
		if err != nil || !strings.HasPrefix(got, "50 20 ") || again != 2 || len(s.holds) != 0 || !strings.Contains(got, " z@28 k0@29") || strings.Count(got, "@") != 22 {
			t.Errorf("%s: %s, %v, begun anew %d times, holds %v", name, got, err, again, s.holds)
		}
		s.asked = 0
		if got, err = collected(t.Context(), c, CollectOptions{}); err != nil || !strings.Contains(got, leases) {
			t.Errorf("%s: %s, %v", name, got, err)
		}
		if _, err := collected(t.Context(), c, CollectOptions{Revision: 51}); err == nil || !strings.Contains(err.Error(), "the cluster has the revisions 20 to 50") {
			t.Errorf("%s: a revision of the future: %v", name, err)
		}
		var large *etcdfile.TooLargeError
		if _, err := collected(t.Context(), c, CollectOptions{MaxBytes: 10}); !errors.As(err, &large) || len(s.holds) != 0 {
			t.Errorf("%s: too large: %v, holds %v", name, err, s.holds)
		}
		s.ended = []error{kverror.New(kverror.HoldEnded, "removed")}
		ended := func(error) {
			for id := range s.holds {
				_ = s.EndHold(t.Context(), id)
			}
		}
		if _, err := collected(t.Context(), c, CollectOptions{Again: ended}); !IsHoldEnded(err) || len(s.holds) != 0 {
			t.Errorf("%s: an operator ends the hold: %v, holds %v", name, err, s.holds)
		}
		s.ended = []error{kverror.New(kverror.Corrupt, "a test")}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, err := collected(ctx, c, CollectOptions{}); IsHoldEnded(err) || status.Code(kverror.GRPC(err)) == codes.OK || len(s.ended) != 0 {
			t.Errorf("%s: a range that cannot be read: %v", name, err)
		}
		cancel()
	}
	looks := 0
	s.versions = []mvcc.Version{{Key: []byte("a"), Mod: 30, Create: 30, Version: 1, Value: make([]byte, LookBytes)}, {Key: []byte("b"), Mod: 31, Create: 30, Version: 1, Value: make([]byte, LookBytes)}}
	full := errors.New("full")
	_, err := collected(t.Context(), s.cutter(), CollectOptions{Look: func() error {
		looks++
		return full
	}})
	if !errors.Is(err, full) || looks != 1 {
		t.Errorf("%v after %d looks", err, looks)
	}
}
