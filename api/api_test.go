package api

import (
	"testing"

	"github.com/skeindb/skein/api/adminpb"
)

// TestAdminService pins the names and numbers that older commands rely on.
func TestAdminService(t *testing.T) {
	sd := adminpb.File_adminpb_admin_proto.Services().Get(0)
	if got := string(sd.FullName()); got != "skein.admin.v1.Admin" {
		t.Errorf("service %s", got)
	}
	for i, want := range []string{"RangeList", "RangeSplit", "RangeShow", "RangeMove", "RangeTransferLeader", "OperationList", "NodeList", "RangeMerge"} {
		if got := string(sd.Methods().Get(i).Name()); got != want {
			t.Errorf("method %d is %s, want %s", i, got, want)
		}
	}
	fields := (&adminpb.Range{}).ProtoReflect().Descriptor().Fields()
	for i, want := range []string{"id", "generation", "start", "end", "leader", "replicas", "keys", "bytes", "state"} {
		if f := fields.Get(i); string(f.Name()) != want || int(f.Number()) != i+1 {
			t.Errorf("field %d of Range is %s, want %s", i+1, f.Name(), want)
		}
	}
}
