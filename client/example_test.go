package client_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/client"
	"github.com/skeindb/skein/config"
	"github.com/skeindb/skein/embed"
	"github.com/skeindb/skein/internal/ports"
)

// A put and a get: the first lines of a program.
func Example() {
	ctx := context.Background()
	endpoints, stop := node(ctx)
	defer stop()

	c, err := client.Open(ctx, client.Config{Etcd: clientv3.Config{Endpoints: endpoints}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = c.Close() }()
	put, err := c.Put(ctx, "greeting", "hello")
	if err != nil {
		fmt.Println(err)
		return
	}
	got, err := c.Get(ctx, "greeting")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(string(got.GetKvs()[0].GetValue()), got.GetKvs()[0].GetModRevision() == put.GetHeader().GetRevision())
	// Output: hello true
}

// A hundred puts that are under way at the same time, and all keys of a span, page by page.
func ExampleDo() {
	ctx := context.Background()
	endpoints, stop := node(ctx)
	defer stop()

	c, err := client.Open(ctx, client.Config{Etcd: clientv3.Config{Endpoints: endpoints}, PageKeys: 30})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = c.Close() }()
	var all []*client.Future
	for i := range 100 {
		all = append(all, client.Do(ctx, c, &pb.PutRequest{Key: fmt.Appendf(nil, "job/%03d", i), Value: []byte("new")}))
	}
	for _, f := range all {
		if _, err := f.Put(); err != nil {
			fmt.Println(err)
			return
		}
	}
	jobs := 0
	for kv, err := range c.Range(ctx, &pb.RangeRequest{Key: []byte("job/"), RangeEnd: []byte("job0")}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		if string(kv.GetValue()) == "new" {
			jobs++
		}
	}
	fmt.Println(jobs, "jobs")
	// Output: 100 jobs
}

// A watch from a put on. It goes on where a node is lost, and ends with the loop.
func ExampleClient_Watch() {
	ctx := context.Background()
	endpoints, stop := node(ctx)
	defer stop()

	c, err := client.Open(ctx, client.Config{Etcd: clientv3.Config{Endpoints: endpoints}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = c.Close() }()
	put, err := c.Put(ctx, "greeting", "hello")
	if err != nil {
		fmt.Println(err)
		return
	}
	for event, err := range c.Watch(ctx, &pb.WatchCreateRequest{Key: []byte("greeting"), StartRevision: put.GetHeader().GetRevision()}) {
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(event.GetType(), string(event.GetKv().GetValue()))
		break
	}
	// Output: PUT hello
}

// node starts a node, and returns its endpoints once it serves. An example has no testing.TB for package embedtest.
func node(ctx context.Context) (endpoints []string, stop func()) {
	dir, err := os.MkdirTemp("", "skein-example-")
	if err != nil {
		panic(err)
	}
	free, err := ports.Unused(2)
	if err != nil {
		panic(err)
	}
	at := func(port int) []url.URL { return []url.URL{{Scheme: "http", Host: fmt.Sprintf("127.0.0.1:%d", port)}} }
	cfg := config.Default()
	cfg.DataDir, cfg.MemoryBytes = dir+"/data", 256<<20
	cfg.ListenClientURLs, cfg.AdvertiseClientURLs = at(free[0]), at(free[0])
	cfg.ListenPeerURLs, cfg.AdvertisePeerURLs = at(free[1]), at(free[1])
	s, err := embed.Start(ctx, cfg, embed.SurelyNew())
	if err != nil {
		panic(err)
	}
	<-s.Ready()
	return []string{cfg.ListenClientURLs[0].Host}, func() {
		if err := s.Stop(ctx); err != nil {
			panic(err)
		}
		_ = os.RemoveAll(dir)
	}
}

// TestReadmeSnippet: the lines that the README has of this package are those of Example, in their order.
func TestReadmeSnippet(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	must(t, err)
	source, err := os.ReadFile("example_test.go")
	must(t, err)
	_, section, found := strings.Cut(string(readme), "## By the pipe\n")
	_, section, fenced := strings.Cut(section, "```go\n")
	snippet, _, closed := strings.Cut(section, "```")
	if !found || !fenced || !closed {
		t.Fatal("the README has no snippet of the pipe")
	}
	_, rest, _ := strings.Cut(string(source), "func Example() {")
	rest, _, _ = strings.Cut(rest, "\n}")
	for line := range strings.Lines(snippet) {
		if _, rest, found = strings.Cut(rest, "\t"+strings.TrimSpace(line)+"\n"); !found {
			t.Errorf("%q is in the README, and not run by Example at its place", line)
		}
	}
}
