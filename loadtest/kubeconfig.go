package loadtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// KubernetesConfig is the size of the cluster whose API servers workload Kubernetes plays.
type KubernetesConfig struct {
	// Nodes each have a lease object that is renewed again and again. Each client renews those of its own
	// nodes, as kubelets do, so there are at least as many as clients.
	Nodes int `json:"nodes"`
	// Pods is how many pods there are at the begin.
	Pods int `json:"pods"`
	// Watchers is how many API servers watch: each has one watcher of each of the three resources, on one stream,
	// and asks it for progress, as for lists from its cache.
	Watchers int `json:"watchers"`
	// Mix is the kinds of operations with their weights: renew=50,status=25. Left out is not sent.
	Mix string `json:"mix"`
}

// DefaultMix is an average of busy clusters: most writes are renewals.
const DefaultMix = "renew=50,status=25,event=14,create=5,delete=5,page=1"

// kubeKinds are the kinds of operations. Each write is one transaction that compares the key's mod_revision and, if
// that has changed, reads the key: this is how an API server writes.
var kubeKinds = []opKind{
	{"renew", classRenew},   // of a node's lease object
	{"status", classStatus}, // of a pod
	{"event", classEvent},   // is created, with one of etcd's leases
	{"create", classCreate}, // a pod
	{"delete", classDelete}, // a pod
	{"page", classPage},     // of a list of all pods, at the revision of its first page
}

// resource is a kind of objects.
type resource int

const (
	pods resource = iota
	nodeLeases
	kubeEvents
	resourceCount
)

// kubePrefix stands before all keys. It lies below /registry/, where ranges of a Kubernetes' store are,
// but no API server has a resource of this name: it never sees these objects.
const kubePrefix = "/registry/loadtest/"

var (
	resourcePrefix = [resourceCount]string{kubePrefix + "pods/", kubePrefix + "leases/kube-node-lease/", kubePrefix + "events/"}
	// resourceBytes are sizes of such objects in etcd.
	resourceBytes = [resourceCount]int{2500, 350, 700}
)

const (
	// namespaces is how many namespaces pods and events lie in.
	namespaces = 100
	// pageLimit is an API server's own.
	pageLimit = 500
	// An API server gives the same lease of etcd's to so many events, for so long. Events live an hour.
	leaseObjects = 1000
	leaseReuse   = time.Minute
	eventTTL     = time.Hour
	// kubeTries is how often a write that met another revision is tried.
	kubeTries = 3
)

func (k *KubernetesConfig) validate(clients int) (wrong []error) {
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if k.Nodes < clients || k.Nodes > maxKubeObjects {
		bad("nodes: %d is not between the number of clients, %d, and %d: each client renews leases of its own nodes", k.Nodes, clients, maxKubeObjects)
	}
	if k.Pods < 0 || k.Pods > maxKubeObjects {
		bad("pods: %d is not between 0 and %d", k.Pods, maxKubeObjects)
	}
	if k.Watchers < 0 || k.Watchers > maxKubeWatchers {
		bad("watchers: %d is not between 0 and %d", k.Watchers, maxKubeWatchers)
	}
	if _, err := parseMix(k.Mix); err != nil {
		bad("mix: %w", err)
	}
	return wrong
}

// Bounds of a KubernetesConfig.
const (
	maxKubeObjects  = 1 << 24
	maxKubeWatchers = 10_000
	maxKubeWeight   = 1_000_000
)

// mix has each kind as often as its weight, as places between 0 and all.
type mix struct {
	ends []int // of kind i of kubeKinds; its places begin at the end before
	all  int
}

func parseMix(text string) (mix, error) {
	weights := make([]int, len(kubeKinds))
	for part := range strings.SplitSeq(text, ",") {
		name, number, ok := strings.Cut(strings.TrimSpace(part), "=")
		i := slices.IndexFunc(kubeKinds, func(k opKind) bool { return k.name == name })
		weight, err := strconv.Atoi(number)
		if !ok || i < 0 || err != nil || weight < 0 || weight > maxKubeWeight {
			return mix{}, fmt.Errorf("%q is not KIND=WEIGHT, with a kind of renew, status, event, create, delete, page and a weight of 0 to %d", part, maxKubeWeight)
		}
		weights[i] = weight
	}
	var m mix
	for _, w := range weights {
		m.all += w
		m.ends = append(m.ends, m.all)
	}
	if m.all == 0 {
		return mix{}, errors.New("no kind has a weight above 0")
	}
	return m, nil
}

func (m *mix) draw(rng *rand.Rand) class {
	at := rng.IntN(m.all)
	return kubeKinds[slices.IndexFunc(m.ends, func(end int) bool { return at < end })].class
}
