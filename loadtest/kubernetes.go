package loadtest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/clock"
)

// kubeObject is one that a client has written, and nobody else writes.
type kubeObject struct {
	key      string
	revision int64 // of the last change; 0 if it is absent
	// unsure says that the fate of a change is unknown. The next answer tells it.
	unsure bool
}

// kubeRun is the common part of the clients of workload Kubernetes.
type kubeRun struct {
	findings
	cfg     *Config
	kvs     []kv
	values  [resourceCount]*values
	mix     mix
	workers []*kubeWorker
	// What the fill has put: those with number i, i+clients and so on belong to client i.
	nodes, pods []kubeObject
	names       atomic.Int64 // of pods and events, made so far
	leases      kubeLeases
	changes     [resourceCount]changes
	watch       *kubeWatch // nil without watchers
	measuring   atomic.Bool
}

// changes are the changes of a resource.
type changes struct {
	mu       sync.Mutex
	revision revisionSet // guarded by mu: of those that were acknowledged
	last     int64       // guarded by mu: the highest of them
	unknown  atomic.Int64
}

func newKubeRun(cfg *Config, kvs []kv, id uint64) *kubeRun {
	k := &kubeRun{cfg: cfg, kvs: kvs, nodes: make([]kubeObject, cfg.Kubernetes.Nodes), pods: make([]kubeObject, cfg.Kubernetes.Pods)}
	k.leases.last = int64(id >> 2) // room to count in an int64
	// Validate has read it.
	k.mix, _ = parseMix(cfg.Kubernetes.Mix)
	for r, size := range resourceBytes {
		k.values[r] = newValues(id, size)
	}
	return k
}

// begin removes what an earlier run has left, and starts to watch.
func (k *kubeRun) begin(ctx context.Context) error {
	if _, err := k.clear(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, k.cfg.Timeout)
	defer cancel()
	now, err := k.kvs[0].Range(ctx, &etcdserverpb.RangeRequest{Key: []byte(kubePrefix)})
	if err != nil {
		return fmt.Errorf("read the revision: %w", err)
	}
	base := now.GetHeader().GetRevision()
	for r := range k.changes {
		k.changes[r].revision = revisionSet{base: base}
	}
	if k.cfg.Kubernetes.Watchers > 0 {
		k.watch, err = k.startWatch(ctx, base)
	}
	return err
}

// end ends the watchers.
func (k *kubeRun) end() {
	if k.watch != nil {
		k.watch.stop()
	}
}

// clear deletes everything below the prefix, page by page, and revokes the leases. It returns the number of keys.
func (k *kubeRun) clear(ctx context.Context) (deleted int64, err error) {
	span := etcdserverpb.RangeRequest{Key: []byte(kubePrefix), RangeEnd: prefixEnd(kubePrefix), Limit: pageLimit, KeysOnly: true}
	reader := &verifier{cfg: k.cfg, kvs: k.kvs}
	for page := 0; ; page++ {
		answer, err := reader.page(ctx, page, &span)
		if err != nil {
			return deleted, fmt.Errorf("clean up %s: %w", kubePrefix, err)
		}
		n := len(answer.Kvs)
		if n == 0 {
			break
		}
		call, cancel := context.WithTimeout(ctx, k.cfg.Timeout)
		gone, err := k.kvs[page%len(k.kvs)].Txn(call, &etcdserverpb.TxnRequest{
			Success: []*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestDeleteRange{
				RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{
					Key: answer.Kvs[0].Key, RangeEnd: append(bytes.Clone(answer.Kvs[n-1].Key), 0),
				},
			}}},
		})
		cancel()
		if err != nil {
			return deleted, fmt.Errorf("clean up %s: %w", kubePrefix, err)
		}
		deleted += onlyResponse(gone).GetResponseDeleteRange().GetDeleted()
	}
	return deleted, k.leases.revoke(ctx, k.cfg, k.kvs[0])
}

func prefixEnd(prefix string) []byte { return []byte(clientv3.GetPrefixRangeEnd(prefix)) }

// kubeLeases gives events their leases.
type kubeLeases struct {
	mu      sync.Mutex
	last    int64      // guarded by mu, as all below: the last id that was asked for; ids go up from a run's own
	id      int64      // of the lease that is given
	objects int        // that have it
	until   clock.Time // when it is given to no more events
	all     []int64
}

// one returns a lease for one event more. While one is granted all events wait, as in an API server.
func (l *kubeLeases) one(ctx context.Context, c clock.Clock, server kv) (int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.id == 0 || l.objects >= leaseObjects || c.Now() >= l.until {
		// The id is noted before the lease is asked for: it is there also where the answer is lost.
		l.last++
		l.all = append(l.all, l.last)
		if _, err := server.LeaseGrant(ctx, &etcdserverpb.LeaseGrantRequest{ID: l.last, TTL: int64(eventTTL / time.Second)}); err != nil {
			return 0, err
		}
		l.id, l.objects, l.until = l.last, 0, c.Now().Add(leaseReuse)
	}
	l.objects++
	return l.id, nil
}

// revoke ends all leases. One that has expired meanwhile is no error.
func (l *kubeLeases) revoke(ctx context.Context, cfg *Config, server kv) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range l.all {
		call, cancel := context.WithTimeout(ctx, cfg.Timeout)
		_, err := server.LeaseRevoke(call, &etcdserverpb.LeaseRevokeRequest{ID: id})
		cancel()
		if err != nil && status.Code(err) != codes.NotFound {
			return fmt.Errorf("clean up: revoke lease %x: %w", id, err)
		}
	}
	l.id, l.all = 0, nil
	return nil
}

// kubeWorker is a client of workload Kubernetes.
type kubeWorker struct {
	run     *kubeRun
	id      int
	kv      kv
	rng     *rand.Rand
	adopted bool // has its part of what the fill has put
	nodes   []*kubeObject
	pods    []*kubeObject
	list    kubeList
	value   []byte
}

func (k *kubeRun) worker(id int, server kv, rng *rand.Rand) *kubeWorker {
	w := &kubeWorker{run: k, id: id, kv: server, rng: rng, value: make([]byte, slices.Max(resourceBytes[:]))}
	k.workers = append(k.workers, w)
	return w
}

// adopt takes the worker's part of what the fill has put.
func (w *kubeWorker) adopt() {
	w.adopted = true
	for i := w.id; i < len(w.run.nodes); i += w.run.cfg.Clients {
		w.nodes = append(w.nodes, &w.run.nodes[i])
	}
	for i := w.id; i < len(w.run.pods); i += w.run.cfg.Clients {
		w.pods = append(w.pods, &w.run.pods[i])
	}
}

// operate does operation n of a phase.
func (w *kubeWorker) operate(ctx context.Context, fill bool, n int64) (class, error) {
	if fill {
		if n -= int64(len(w.run.nodes)); n >= 0 {
			w.run.pods[n].key = w.run.name(pods)
			return classCreate, w.write(ctx, pods, &w.run.pods[n], 0)
		}
		o := &w.run.nodes[n+int64(len(w.run.nodes))]
		o.key = fmt.Sprintf("%snode-%06d", resourcePrefix[nodeLeases], n+int64(len(w.run.nodes)))
		return classCreate, w.write(ctx, nodeLeases, o, 0)
	}
	if !w.adopted {
		w.adopt()
	}
	kind := w.run.mix.draw(w.rng)
	if len(w.pods) == 0 && (kind == classStatus || kind == classDelete) {
		kind = classCreate
	}
	switch kind {
	case classRenew:
		return kind, w.write(ctx, nodeLeases, w.nodes[w.rng.IntN(len(w.nodes))], 0)
	case classStatus:
		return kind, w.write(ctx, pods, w.pods[w.rng.IntN(len(w.pods))], 0)
	case classEvent:
		lease, err := w.run.leases.one(ctx, w.run.cfg.Clock, w.kv)
		if err != nil {
			return kind, err
		}
		return kind, w.write(ctx, kubeEvents, &kubeObject{key: w.run.name(kubeEvents)}, lease)
	case classCreate:
		o := &kubeObject{key: w.run.name(pods)}
		err := w.write(ctx, pods, o, 0)
		if err == nil || o.unsure {
			w.pods = append(w.pods, o)
		}
		return kind, err
	case classDelete:
		return kind, w.remove(ctx, w.rng.IntN(len(w.pods)))
	default:
		return kind, w.page(ctx)
	}
}

// name returns the key of a new object.
func (k *kubeRun) name(of resource) string {
	n := k.names.Add(1) - 1
	return fmt.Sprintf("%sns-%03d/%09d", resourcePrefix[of], n%namespaces, n)
}

// write creates or updates an object.
func (w *kubeWorker) write(ctx context.Context, of resource, o *kubeObject, lease int64) error {
	value := w.value[:resourceBytes[of]]
	// The moment stands for the operation, so that watchers can tell how late they are.
	w.run.values[of].put(value, opID(w.run.cfg.Clock.Now()))
	return w.change(ctx, of, o, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestPut{
		RequestPut: &etcdserverpb.PutRequest{Key: []byte(o.key), Value: value, Lease: lease},
	}})
}

// remove deletes pod i of the worker.
func (w *kubeWorker) remove(ctx context.Context, i int) error {
	o := w.pods[i]
	err := w.change(ctx, pods, o, &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestDeleteRange{
		RequestDeleteRange: &etcdserverpb.DeleteRangeRequest{Key: []byte(o.key)},
	}})
	if err == nil {
		w.pods = slices.Delete(w.pods, i, i+1)
	}
	return err
}

// change does op if the object is as it was last seen. If it is not, and the fate of a change was unknown, it is
// looked at and tried again; otherwise somebody has lost an update.
func (w *kubeWorker) change(ctx context.Context, of resource, o *kubeObject, op *etcdserverpb.RequestOp) error {
	key := []byte(o.key)
	for range kubeTries {
		answer, err := w.kv.Txn(ctx, &etcdserverpb.TxnRequest{
			Compare: []*etcdserverpb.Compare{{
				Target: etcdserverpb.Compare_MOD, Result: etcdserverpb.Compare_EQUAL, Key: key,
				TargetUnion: &etcdserverpb.Compare_ModRevision{ModRevision: o.revision},
			}},
			Success: []*etcdserverpb.RequestOp{op},
			Failure: []*etcdserverpb.RequestOp{{Request: &etcdserverpb.RequestOp_RequestRange{RequestRange: &etcdserverpb.RangeRequest{Key: key}}}},
		})
		if err != nil {
			if !refused(err) {
				o.unsure = true
				w.run.changes[of].unknown.Add(1)
			}
			return err
		}
		if answer.Succeeded {
			w.changed(of, o, answer)
			return nil
		}
		var found int64
		if kvs := onlyResponse(answer).GetResponseRange().GetKvs(); len(kvs) > 0 {
			found = kvs[0].ModRevision
			// The change of unknown fate was made.
			w.run.changes[of].add(found)
		}
		if !o.unsure {
			w.run.violation("%s: at revision %d, although its only writer was last answered at revision %d", o.key, found, o.revision)
		}
		o.revision, o.unsure = found, false
		if found == 0 && op.GetRequestDeleteRange() != nil {
			return nil
		}
	}
	return fmt.Errorf("txn: the object changed %d times although it has only one writer", kubeTries)
}

// onlyResponse returns the response of a transaction's only operation, and nil if there is none.
func onlyResponse(answer *etcdserverpb.TxnResponse) *etcdserverpb.ResponseOp {
	if len(answer.GetResponses()) == 0 {
		return nil
	}
	return answer.Responses[0]
}

// changed notes a transaction that was acknowledged.
func (w *kubeWorker) changed(of resource, o *kubeObject, answer *etcdserverpb.TxnResponse) {
	revision := answer.GetHeader().GetRevision()
	if d := onlyResponse(answer).GetResponseDeleteRange(); d != nil && d.Deleted == 0 {
		if !o.unsure {
			w.run.violation("%s: nothing was deleted, although it was last written at revision %d", o.key, o.revision)
		}
		return
	}
	if revision <= o.revision {
		w.run.violation("%s: changed at revision %d, although it was last changed at revision %d", o.key, revision, o.revision)
	}
	o.revision, o.unsure = revision, false
	w.run.changes[of].add(revision)
}

// add notes the revision of an acknowledged change.
func (c *changes) add(revision int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.revision.add(revision)
	c.last = max(c.last, revision)
}

// kubeList is a list of all pods that is under way.
type kubeList struct {
	revision    int64 // of its first page; 0 before that
	key         []byte
	total, seen int64
}

// page reads the next page of a list.
func (w *kubeWorker) page(ctx context.Context) error {
	l := &w.list
	if l.revision == 0 {
		*l = kubeList{key: []byte(resourcePrefix[pods])}
	}
	answer, err := w.kv.Range(ctx, &etcdserverpb.RangeRequest{
		Key: l.key, RangeEnd: prefixEnd(resourcePrefix[pods]), Limit: pageLimit, Revision: l.revision,
	})
	if err != nil {
		if status.Code(err) == codes.OutOfRange {
			l.revision = 0 // compacted: the list begins anew
		}
		return err
	}
	if l.revision == 0 {
		l.revision, l.total = answer.GetHeader().GetRevision(), answer.Count
	}
	for _, kv := range answer.Kvs {
		if bytes.Compare(kv.Key, l.key) < 0 || kv.ModRevision > l.revision {
			w.run.violation("a page from %q at revision %d has %q of revision %d", l.key, l.revision, kv.Key, kv.ModRevision)
		}
		l.key = append(bytes.Clone(kv.Key), 0)
	}
	l.seen += int64(len(answer.Kvs))
	if answer.More && len(answer.Kvs) > 0 {
		return nil
	}
	if l.seen != l.total {
		w.run.violation("a list at revision %d has %d pods, although %d were counted at its first page", l.revision, l.seen, l.total)
	}
	l.revision = 0
	return nil
}

// judge waits for the watchers and compares all with what was acknowledged. Without Verify it reads nothing.
func (k *kubeRun) judge(ctx context.Context) (*Watched, *Verified, error) {
	var watched *Watched
	if k.watch != nil {
		watched = k.watch.judge(ctx)
	}
	v := &Verified{}
	for r := range k.changes {
		v.Unknown += k.changes[r].unknown.Load()
	}
	if k.cfg.Verify {
		for of, objects := range k.objects() {
			if err := k.verify(ctx, resource(of), objects, v); err != nil {
				return watched, nil, err
			}
		}
	}
	v.Violations, v.First = k.violations()
	if !k.cfg.Verify && v.Violations == 0 {
		v = nil
	}
	return watched, v, nil
}

// objects returns the pods and node leases that must be there, by key.
func (k *kubeRun) objects() [2]map[string]*kubeObject {
	all := [2]map[string]*kubeObject{pods: {}, nodeLeases: {}}
	for _, w := range k.workers {
		if !w.adopted {
			w.adopt()
		}
		for of, objects := range [][]*kubeObject{pods: w.pods, nodeLeases: w.nodes} {
			for _, o := range objects {
				all[of][o.key] = o
			}
		}
	}
	return all
}

// verify compares the stored objects of a resource with those that must be there.
func (k *kubeRun) verify(ctx context.Context, of resource, objects map[string]*kubeObject, v *Verified) error {
	reader := &verifier{cfg: k.cfg, kvs: k.kvs}
	span := &etcdserverpb.RangeRequest{Key: []byte(resourcePrefix[of]), RangeEnd: prefixEnd(resourcePrefix[of]), Limit: maxVerifyPage, KeysOnly: true}
	unasked := int64(0)
	for page := 0; ; page++ {
		answer, err := reader.page(ctx, page, span)
		if err != nil {
			return fmt.Errorf("verify: read from %q: %w", span.Key, err)
		}
		for _, kv := range answer.Kvs {
			v.Keys++
			o := objects[string(kv.Key)]
			switch {
			case o == nil:
				unasked++
			case o.unsure:
			case o.revision != kv.ModRevision:
				k.violation("%s: stored at revision %d; its last change was acknowledged at revision %d", kv.Key, kv.ModRevision, o.revision)
			default:
				v.Acknowledged++
			}
			delete(objects, string(kv.Key))
		}
		n := len(answer.Kvs)
		if !answer.More || n == 0 {
			break
		}
		span.Key = append(bytes.Clone(answer.Kvs[n-1].Key), 0)
	}
	for key, o := range objects {
		if !o.unsure && o.revision != 0 {
			k.violation("%s: absent; its last change was acknowledged at revision %d", key, o.revision)
		}
	}
	if unknown := k.changes[of].unknown.Load(); unasked > unknown {
		k.violation("%s: %d objects are there that were deleted or never created, and %d changes are of unknown fate", resourcePrefix[of], unasked, unknown)
	}
	return nil
}
