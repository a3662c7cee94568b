package api

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/api/adminpb"
)

// TestAdminService pins the names and numbers that older commands rely on.
func TestAdminService(t *testing.T) {
	sd := adminpb.File_adminpb_admin_proto.Services().Get(0)
	if got := string(sd.FullName()); got != "skein.admin.v1.Admin" {
		t.Errorf("service %s", got)
	}
	for _, want := range []protoreflect.Name{"RangeList", "RangeSplit", "RangeShow", "RangeMove", "RangeTransferLeader", "OperationList", "PlacementShow", "PlacementMove", "PlacementTransferLeader", "NodeList", "NodeShow", "NodeDrain", "NodeUndrain", "NodeDecommission", "NodeRecommission", "NodeRemove", "PlacementPause", "NodeJoin", "RangeMerge", "PlacementSetReplication", "PlacementSetMergeAfter", "Survey", "Heat", "Bundle", "Series", "Slow"} {
		if sd.Methods().ByName(want) == nil {
			t.Errorf("there is no method %s", want)
		}
	}
	fields := (&adminpb.Range{}).ProtoReflect().Descriptor().Fields()
	for i, want := range []string{"id", "generation", "start", "end", "leader", "replicas", "keys", "bytes", "state", "members", "conf_index", "operation", "kept", "waits_for"} {
		if f := fields.Get(i); string(f.Name()) != want || int(f.Number()) != i+1 {
			t.Errorf("field %d of Range is %s, want %s", i+1, f.Name(), want)
		}
	}
	fields = (&adminpb.Node{}).ProtoReflect().Descriptor().Fields()
	for i, want := range []string{"id", "name", "peer_urls", "client_urls", "alive", "ranges", "leaders", "bytes", "state", "since_unix_ms", "attributes", "placement", "placement_leader"} {
		if f := fields.Get(i); string(f.Name()) != want || int(f.Number()) != i+1 {
			t.Errorf("field %d of Node is %s, want %s", i+1, f.Name(), want)
		}
	}
}
