package api

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/skeindb/skein/api/adminpb"
	"github.com/skeindb/skein/api/pipepb"
)

// TestAdminService pins the names and numbers that older commands rely on.
func TestAdminService(t *testing.T) {
	sd := adminpb.File_adminpb_admin_proto.Services().Get(0)
	if got := string(sd.FullName()); got != "skein.admin.v1.Admin" {
		t.Errorf("service %s", got)
	}
	for _, want := range []protoreflect.Name{"RangeList", "RangeSplit", "RangeShow", "RangeMove", "RangeTransferLeader", "OperationList", "PlacementShow", "PlacementMove", "PlacementTransferLeader", "NodeList", "NodeShow", "NodeDrain", "NodeUndrain", "NodeDecommission", "NodeRecommission", "NodeRemove", "PlacementPause", "NodeJoin", "RangeMerge", "PlacementSetReplication", "PlacementSetMergeAfter", "Survey", "Heat", "Bundle", "Series", "Slow", "WatcherList"} {
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

// TestPipeService pins the names and numbers of the pipe, which is public: clients in other languages rely on them.
func TestPipeService(t *testing.T) {
	f := pipepb.File_pipepb_pipe_proto
	if m := f.Services().ByName("Pipe").Methods().ByName("Open"); f.Package() != "skein.pipe.v1" || m == nil || !m.IsStreamingClient() || !m.IsStreamingServer() {
		t.Errorf("package %s, Open %v", f.Package(), m)
	}
	got := ""
	for i := range f.Messages().Len() {
		m := f.Messages().Get(i)
		got += string(m.Name()) + ":"
		for j := range m.Fields().Len() {
			got += fmt.Sprintf(" %s=%d", m.Fields().Get(j).Name(), m.Fields().Get(j).Number())
		}
		got += "\n"
	}
	const want = `ClientFrame: operations=1 cancels=2
Operation: tag=1 timeout_ms=2 range=3 put=4 delete_range=5 txn=6 compare_and_put=7 locate=8
CompareAndPut: mod_revision=1 put=2
ServerFrame: window=1 answers=2 closing=3
Window: operations=1 bytes=2 frame_bytes=3 node=4
Answer: tag=1 error=2 range=3 put=4 delete_range=5 txn=6 place=7
Error: code=1 message=2
Place: node=1 client_urls=2 key=3 range_end=4
`
	if got != want {
		t.Errorf("the pipe has\n%s\nwant\n%s", got, want)
	}
}
