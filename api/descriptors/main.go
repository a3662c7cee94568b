// Command descriptors writes etcd's protobuf files, as they are linked into Go's code, as a descriptor set:
//
//	go run ./api/descriptors > etcd.binpb
//	protoc --descriptor_set_in=etcd.binpb ...
//
// pipe.proto imports them, and they import files that few machines have. With the set, protoc needs none of these.
package main

import (
	"fmt"
	"os"
	"path"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	set := &descriptorpb.FileDescriptorSet{}
	err := add(set, map[string]bool{}, pb.File_rpc_proto)
	var b []byte
	if err == nil {
		b, err = proto.Marshal(set)
	}
	if err == nil {
		_, err = os.Stdout.Write(b)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// add adds a file behind all that it imports, each once.
func add(set *descriptorpb.FileDescriptorSet, seen map[string]bool, f protoreflect.FileDescriptor) error {
	name := f.Path()
	if seen[name] {
		return nil
	}
	seen[name] = true
	if f.IsPlaceholder() {
		// etcd's own files are linked by their bare names, and import each other by longer ones.
		var err error
		if f, err = protoregistry.GlobalFiles.FindFileByPath(path.Base(name)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for i := range f.Imports().Len() {
		if err := add(set, seen, f.Imports().Get(i).FileDescriptor); err != nil {
			return err
		}
	}
	d := protodesc.ToFileDescriptorProto(f)
	d.Name = &name
	set.File = append(set.File, d)
	return nil
}
