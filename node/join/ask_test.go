package join

import (
	"context"
	"net"
	"testing"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/engine"
	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/placement"
	"github.com/skeindb/skein/placement/fsm"
)

// joinService is a node that only answers who joins.
type joinService struct {
	adminapi.Backend
	answer func() (*adminpb.NodeJoinResponse, error)
}

func (s joinService) JoinNode(context.Context, *adminpb.NodeJoinRequest) (*adminpb.NodeJoinResponse, error) {
	return s.answer()
}

// A node of --join that hears no quorum does not keep the next one from admitting the joiner.
func TestJoinByTheNextNode(t *testing.T) {
	cfg := config.Default()
	for _, answer := range []func() (*adminpb.NodeJoinResponse, error){
		func() (*adminpb.NodeJoinResponse, error) { return nil, kverror.Timeout },
		func() (*adminpb.NodeJoinResponse, error) {
			return &adminpb.NodeJoinResponse{Cluster: "c1", Node: "4", NodeTable: placement.EncodeNodeTable([]fsm.Node{{ID: 4}})}, nil
		},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		adminapi.Register(s, joinService{answer: answer})
		served := make(chan error, 1)
		go func() { served <- s.Serve(l) }()
		t.Cleanup(func() {
			s.Stop()
			if err := <-served; err != nil {
				t.Error(err)
			}
		})
		cfg.Join = append(cfg.Join, "http://"+l.Addr().String())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	j := &Joiner{Config: cfg, Clock: clock.System(), Logger: zap.NewNop(), Ask: ByAdminService(cfg)}
	if a, err := j.join(ctx, engine.Identity{Instance: 9}); err != nil || a.self != 4 {
		t.Errorf("%+v, %v", a, err)
	}
}
