package lifecycle

import (
	"context"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/internal/wake"
	"github.com/skeindb/skein/keyspace"
)

// Times and bounds of a Lifecycle.
const (
	// SweepEvery is how often Owner.Suspects is called.
	SweepEvery = 10 * time.Second
	// RetryAfter is the pause after a removal that failed or has to wait.
	RetryAfter = time.Second
	// MaxTogether is how many replicas are removed together: they share each flush. One flush and
	// one look at all the node's records take longer than the rest of so many removals, and
	// the batch still ends within a second.
	MaxTogether = 512
	// AskTimeout is how long a peer may take to answer Owner.Ask.
	AskTimeout = time.Second
)

// Unknown says that the node From speaks to replica To of a group, which is not open here.
type Unknown struct {
	From  keyspace.NodeID
	Group keyspace.GroupID
	To    keyspace.ReplicaID
}

// Opener opens replicas.
type Opener interface {
	// OpenStored opens the replica if the node has a record of it. done says that no peer
	// need be asked: the replica is open, or none can be opened now.
	OpenStored(ctx context.Context, u Unknown) (done bool, err error)
	// Ask asks u.From for the group's descriptor.
	Ask(ctx context.Context, u Unknown) (keyspace.Descriptor, error)
	// OpenEmpty opens the replica without state. d is the answer to Ask and lists the replica.
	OpenEmpty(ctx context.Context, u Unknown, d *keyspace.Descriptor) error
}

// Verdict says what is to happen to a replica.
type Verdict uint8

// The verdicts.
const (
	// Stay: it is a member as far as is known, or there is no such replica.
	Stay Verdict = iota
	// Wait: it is no member, and cannot be removed yet.
	Wait
	// Remove: it is certainly no member.
	Remove
)

// Remover removes replicas. RunGC and Lifecycle.Remove call it, one call at a time.
type Remover interface {
	// Suspects returns the groups to look at in a sweep.
	Suspects() []keyspace.GroupID
	// Verdict judges the node's replica of the group.
	Verdict(g keyspace.GroupID) (Verdict, error)
	// End ends the replicas for those who use them, and makes their tombstones durable unless
	// Destroy does. It returns those for which it failed. It is called again for a replica after
	// a failure of any step.
	End(ctx context.Context, gs []keyspace.GroupID) (failed map[keyspace.GroupID]error)
	// Destroy deletes the replicas' logs and data for good, as raftgroup.Host.Remove does.
	Destroy(ctx context.Context, gs []keyspace.GroupID) (failed map[keyspace.GroupID]error)
	// Gone is called when nothing of the replica is left.
	Gone(g keyspace.GroupID) error
}

// Owner has the replicas.
type Owner interface {
	Opener
	Remover
}

// Config is what a Lifecycle is made of. All fields are required.
type Config struct {
	Self       keyspace.NodeID
	Clock      clock.Clock
	Owner      Owner
	Tombstones Tombstones
	// MaxUnknown bounds the questions that wait. Peers repeat what is dropped.
	MaxUnknown int
	Logger     *zap.Logger
}

// Lifecycle opens and removes the replicas of one owner.
type Lifecycle struct {
	cfg        Config
	ask, check wake.Signal
	// removing has a token while replicas are removed together. It is no mutex, since who waits for it
	// waits for a disk: in tests a mutex would stop the virtual clock.
	removing     chan struct{}
	mu           sync.Mutex
	unknown      []Unknown                 // guarded by mu: questions that wait
	todo         []keyspace.GroupID        // guarded by mu: groups to look at, each once
	listed       map[keyspace.GroupID]bool // guarded by mu: those in todo
	later        map[keyspace.GroupID]bool // guarded by mu: groups to look at after a pause
	underRemoval map[keyspace.GroupID]bool // guarded by mu: removals that began
}

// New returns a Lifecycle. Its owner starts RunOpener and RunGC.
func New(cfg Config) *Lifecycle {
	return &Lifecycle{
		cfg: cfg, ask: wake.New(), check: wake.New(), removing: make(chan struct{}, 1),
		listed: map[keyspace.GroupID]bool{}, later: map[keyspace.GroupID]bool{}, underRemoval: map[keyspace.GroupID]bool{},
	}
}
