package embedtest_test

import (
	"os"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/skeindb/skein/embedtest"
)

// README.md begins here.
func TestGreeting(t *testing.T) {
	s := embedtest.New(t, embedtest.Nodes(3))
	greet(t, s.Endpoints(), "hello") // your program
	s.Node(0).Kill()
	r, err := s.Client().Get(t.Context(), "greeting")
	if err != nil || string(r.Kvs[0].Value) != "hello" {
		t.Errorf("%v, %v", r, err)
	}
	s.Node(0).Start()
}

// README.md ends here.

func greet(t *testing.T, endpoints []string, text string) {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: endpoints})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put(t, c, "greeting", text)
}

// README.md shows a test that runs.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile("readme_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(own), "// README.md begins here.\n")
	code, _, ok := strings.Cut(code, "\n// README.md ends here.")
	if !ok || !strings.Contains(string(readme), "```go\n"+code+"```\n") {
		t.Errorf("README.md does not show\n%s", code)
	}
}
