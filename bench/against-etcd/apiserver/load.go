package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
)

// What clients ask for.
const (
	Create = "create" // pods
	Renew  = "renew"  // the leases of nodes
	Delete = "delete" // the pods that were created last
)

// heldLeases is how many nodes renew their leases.
const heldLeases = 1024

const (
	pods   = "/api/v1/namespaces/default/pods"
	leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
)

// Result is what a run gave.
type Result struct {
	PerSecond float64
	P50, P99  time.Duration
}

// Load has so many workers do one thing, as fast as the server answers. Delete takes as many pods as were created last.
func (s *Server) Load(ctx context.Context, what string, total, workers int) (Result, error) {
	first := s.created
	switch what {
	case Create:
		s.created += total
	case Delete:
		first -= total
	case Renew:
		if workers > heldLeases {
			return Result{}, fmt.Errorf("%d workers, and %d leases", workers, heldLeases)
		}
		if err := s.Grant(ctx, workers); err != nil {
			return Result{}, err
		}
	default:
		return Result{}, fmt.Errorf("%q is nothing that clients ask for", what)
	}
	return s.each(ctx, total, workers, func(ctx context.Context, worker, i int) error {
		switch what {
		case Create:
			_, err := s.do(ctx, worker, http.MethodPost, pods, pod(first+i))
			return err
		case Delete:
			_, err := s.do(ctx, worker, http.MethodDelete, fmt.Sprintf("%s/pod-%d?gracePeriodSeconds=0", pods, first+i), "")
			return err
		default:
			// A worker renews leases of its own.
			return s.renew(ctx, worker, worker+i/workers%(heldLeases/workers)*workers)
		}
	})
}

// each does something so many times, a worker with the number w all i with i%workers == w.
func (s *Server) each(ctx context.Context, total, workers int, do func(ctx context.Context, worker, i int) error) (Result, error) {
	took := make([]time.Duration, total)
	begin := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for w := range workers {
		g.Go(func() error {
			for i := w; i < total; i += workers {
				at := time.Now()
				if err := do(ctx, w, i); err != nil {
					return err
				}
				took[i] = time.Since(at)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil || total == 0 {
		return Result{}, err
	}
	r := Result{PerSecond: float64(total) / time.Since(begin).Seconds()}
	slices.Sort(took)
	r.P50, r.P99 = took[total/2], took[total*99/100]
	return r, nil
}

// Grant has the nodes make their leases, if they have not yet.
func (s *Server) Grant(ctx context.Context, workers int) error {
	if s.leases != nil {
		return nil
	}
	s.leases = make([]string, heldLeases)
	_, err := s.each(ctx, heldLeases, workers, func(ctx context.Context, worker, i int) error {
		text, err := s.do(ctx, worker, http.MethodPost, leases, lease(i, ""))
		if err == nil {
			s.leases[i], err = revisionOf(text)
		}
		return err
	})
	return err
}

// renew renews a lease as a node does: with the version that its last answer had.
func (s *Server) renew(ctx context.Context, worker, i int) error {
	text, err := s.do(ctx, worker, http.MethodPut, fmt.Sprintf("%s/node-%d", leases, i), lease(i, s.leases[i]))
	if err == nil {
		s.leases[i], err = revisionOf(text)
	}
	return err
}

// revisionOf is the resource version of an object.
func revisionOf(object []byte) (string, error) {
	var o struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	err := json.Unmarshal(object, &o)
	if err == nil && o.Metadata.ResourceVersion == "" {
		err = fmt.Errorf("an object without a version: %.200s", object)
	}
	return o.Metadata.ResourceVersion, err
}

// lease is the object of a node's lease, renewed now.
func lease(i int, version string) string {
	return fmt.Sprintf(`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"node-%d","namespace":"kube-node-lease",`+
		`"resourceVersion":%q},"spec":{"holderIdentity":"node-%d","leaseDurationSeconds":40,"renewTime":%q}}`,
		i, version, i, time.Now().UTC().Format("2006-01-02T15:04:05.000000Z07:00"))
}

// pod is the object of a pod as a controller makes it. Nobody runs it.
func pod(i int) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"pod-%d","namespace":"default","labels":{"app":"bench","pod-template-hash":"5d59d67564"},`+
		`"annotations":{"prometheus.io/scrape":"true","prometheus.io/port":"8080"}},`+
		`"spec":{"containers":[{"name":"app","image":"registry.example.com/team/app:1.2.3","args":["--listen=:8080","--log-level=info"],`+
		`"env":[{"name":"POD_NAME","valueFrom":{"fieldRef":{"fieldPath":"metadata.name"}}},{"name":"REGION","value":"eu-1"}],`+
		`"ports":[{"name":"http","containerPort":8080}],"resources":{"requests":{"cpu":"100m","memory":"128Mi"},"limits":{"memory":"256Mi"}},`+
		`"readinessProbe":{"httpGet":{"path":"/ready","port":8080}},"livenessProbe":{"httpGet":{"path":"/live","port":8080}}}]}}`, i)
}
