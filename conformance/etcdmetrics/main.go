// Command etcdmetrics prints the metrics of the etcd that this module requires, one a line: name, type and labels,
// with tabs between. It starts a member with --metrics=extensive, puts a key and scrapes it. A metric without a
// value, which a scrape leaves out, has ? for its type. Those of Go and of the process are left out: Skein has
// them of the same library.
//
//	cd conformance && go run ./etcdmetrics >../node/testdata/etcd-3.7.3-metrics.tsv
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"

	"github.com/skeindb/skein/internal/ports"
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "etcdmetrics:", err)
		os.Exit(1)
	}
}

func run(out io.Writer) error {
	dir, err := os.MkdirTemp("", "etcdmetrics")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	types, err := scrapeEtcd(dir)
	if err != nil {
		return err
	}
	labels, err := described()
	if err != nil {
		return err
	}
	for name := range types {
		if _, ok := labels[name]; !ok {
			return fmt.Errorf("%s is in the scrape, and nobody describes it", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		kind := types[name]
		if kind == "" {
			kind = "?"
		}
		if _, err := fmt.Fprintf(out, "%s\t%s\t%s\n", name, kind, labels[name]); err != nil {
			return err
		}
	}
	return nil
}

// common says which metrics are those of Go and of the process.
func common(name string) bool {
	return strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_")
}

var typeLine = regexp.MustCompile(`(?m)^# TYPE (\S+) (\S+)$`)

// scrapeEtcd returns the types of what a member of one shows.
func scrapeEtcd(dir string) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	port, err := ports.Unused(1) // its own gateway dials this address
	if err != nil {
		return nil, err
	}
	client := []url.URL{{Scheme: "http", Host: fmt.Sprint("127.0.0.1:", port[0])}}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.Metrics = filepath.Join(dir, "etcd"), "error", "extensive"
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = client, client
	cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}}
	cfg.AdvertisePeerUrls = cfg.ListenPeerUrls
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return nil, err
	}
	defer e.Close()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{client[0].Host}})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if _, err := c.Put(ctx, "k", "v"); err != nil {
		return nil, err
	}
	types := map[string]string{}
	for range 2 { // the second has what counts the first
		q, err := http.NewRequestWithContext(ctx, http.MethodGet, client[0].String()+"/metrics", http.NoBody)
		if err != nil {
			return nil, err
		}
		resp, err := http.DefaultClient.Do(q)
		if err != nil {
			return nil, err
		}
		page, err := io.ReadAll(resp.Body)
		if err := errors.Join(err, resp.Body.Close()); err != nil {
			return nil, err
		}
		for _, m := range typeLine.FindAllStringSubmatch(string(page), -1) {
			if !common(m[1]) {
				types[m[1]] = m[2]
			}
		}
	}
	return types, nil
}

var (
	descLine  = regexp.MustCompile(`^Desc\{fqName: "([^"]+)", .*constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	constName = regexp.MustCompile(`([a-zA-Z_]+)=`)
)

// described returns the labels of all metrics that etcd has registered.
func described() (map[string]string, error) {
	registry, ok := prometheus.DefaultRegisterer.(*prometheus.Registry)
	if !ok {
		return nil, fmt.Errorf("the default registry is a %T", prometheus.DefaultRegisterer)
	}
	ch := make(chan *prometheus.Desc)
	go func() {
		registry.Describe(ch)
		close(ch)
	}()
	all := map[string]string{}
	var err error
	for d := range ch {
		m := descLine.FindStringSubmatch(d.String())
		if m == nil {
			err = fmt.Errorf("no description: %s", d)
			continue
		}
		if common(m[1]) {
			continue
		}
		var names []string
		for _, n := range constName.FindAllStringSubmatch(m[2], -1) {
			names = append(names, n[1])
		}
		if m[3] != "" {
			names = append(names, strings.Split(m[3], ",")...)
		}
		slices.Sort(names)
		all[m[1]] = strings.Join(names, ",")
	}
	return all, err
}
