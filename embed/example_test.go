package embed_test

import (
	"context"
	"fmt"
	"os"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/embed"
)

// A node within a program, with a client that needs no socket.
func Example() {
	dir, err := os.MkdirTemp("", "skein-example-")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cfg, err := onLoopback(dir + "/data") // config.Default() with other ports
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	s, err := embed.Start(ctx, cfg)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = s.Stop(ctx) }()
	<-s.Ready()
	if _, err := s.Client().Put(ctx, "greeting", "hello"); err != nil {
		fmt.Println(err)
		return
	}
	r, err := s.Client().Get(ctx, "greeting")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s at revision %d\n", r.Kvs[0].Value, r.Header.Revision)
	// Output: hello at revision 2
}

// A client of another user, once users are checked.
func ExampleServer_NewClient() {
	dir, err := os.MkdirTemp("", "skein-example-")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	cfg, err := onLoopback(dir + "/data")
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	s, err := embed.Start(ctx, cfg, embed.SurelyNew())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = s.Stop(ctx) }()
	<-s.Ready()
	if _, err := s.Client().UserAdd(ctx, "ann", "secret"); err != nil {
		fmt.Println(err)
		return
	}
	ann, err := s.NewClient(clientv3.Config{Username: "ann", Password: "secret"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer ann.Close()
	users, err := ann.UserList(ctx)
	fmt.Println(users.Users, err)
	// Output: [ann] <nil>
}
