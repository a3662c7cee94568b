package dataapi

import (
	"context"
	"net"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/datapb"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/mvcc"
	"github.com/skeindb/skein/rangeapi"
)

// emptyRange is a cluster of one range without versions.
type emptyRange struct {
	datapb.UnimplementedLoadServer
}

func (emptyRange) LoadState(context.Context, *datapb.LoadStateRequest) (*datapb.LoadStateResponse, error) {
	return &datapb.LoadStateResponse{Ranges: []*datapb.LoadRange{{Cursor: &datapb.LoadCursor{Phase: datapb.LoadPhase_LOAD_BULK}}}}, nil
}

func (emptyRange) LoadPut(context.Context, *datapb.LoadPutRequest) (*datapb.LoadPutResponse, error) {
	return &datapb.LoadPutResponse{}, nil
}

// Nodes whose bound of a request is lower than by default may take no block of a load. The loader is told what to raise.
func TestLoadIntoNodesWithALowBound(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.MaxRecvMsgSize(576 << 10))
	datapb.RegisterLoadServer(s, emptyRange{})
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	defer func() {
		s.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	load := func(count, size int) error {
		return NewLoader(LoaderOptions{Conn: conn, Number: 7}).Bulk(t.Context(), func(yield func(*mvcc.Version, error) bool) {
			for i := range count {
				v := &mvcc.Version{Key: []byte{byte(i)}, Mod: keyspace.Revision(i + 2), Create: keyspace.Revision(i + 2), Version: 1, Value: make([]byte, size)}
				if !yield(v, nil) {
					return
				}
			}
		})
	}
	if err := load(50, 10<<10); err != nil {
		t.Errorf("a small block: %v", err)
	}
	if err := load(100, 10<<10); err == nil || !strings.Contains(err.Error(), "raise --max-request-bytes of all to 7") || !strings.Contains(err.Error(), "larger than max") {
		t.Errorf("a block that is too large: %v", err)
	}
	// A node does not start with a bound above rangeapi.MaxRequestBytes.
	if err := load(1, rangeapi.MaxRequestBytes-100); err == nil || !strings.Contains(err.Error(), "raise --max-request-bytes of all to 41942") {
		t.Errorf("a version that some cluster takes: %v", err)
	}
	if err := load(3, 6<<20); err == nil || strings.Contains(err.Error(), "raise") ||
		!strings.Contains(err.Error(), `no cluster takes key "\x00" at revision 2`) || !strings.Contains(err.Error(), "at the source") {
		t.Errorf("a version that no cluster takes: %v", err)
	}
}

// TestWhatDoesNotFollow: what a mirror ends for good at has a code of its own, which nothing else of a load has.
func TestWhatDoesNotFollow(t *testing.T) {
	for _, row := range kverror.Table() {
		err := loadError("versions of the load", kverror.New(row.Kind, "key %q", "k"))
		if got, want := status.Code(err) == codes.DataLoss, row.Kind == kverror.NotNext || row.Kind == kverror.Corrupt; got != want {
			t.Errorf("%s: %v", row.Kind, err)
		}
	}
	if err := loadError("versions of the load", kverror.New(kverror.NotNext, "key %q", "k")); !strings.Contains(err.Error(), `key "k"`) {
		t.Errorf("the key is not named: %v", err)
	}
}
