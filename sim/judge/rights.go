package judge

import (
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// Moment is a place in the order of all calls and returns, and its virtual time.
type Moment struct {
	Tick int64
	At   time.Duration
}

// Never is after every moment.
var Never = Moment{Tick: 1 << 62, At: 1 << 62}

// Fact says that something may hold from May to MayNot, and surely does from Must to MustNot. Between them the
// change is under way, or its fate is unknown.
type Fact struct{ May, Must, MustNot, MayNot Moment }

// NewFact is what a change has made true: begun says when it was asked for, and acked when it was acknowledged.
func NewFact(begun, acked Moment) Fact {
	return Fact{May: begun, Must: acked, MustNot: Never, MayNot: Never}
}

// Identity says that a password is a user's. Each password is used once.
type Identity struct {
	Fact
	User     string
	Password int
}

// Right is a user's right to a group of keys: to read it, and perhaps to write it.
type Right struct {
	Fact
	User  string
	Group byte
	Write bool
}

// Rights are all that an admin of a run has made true.
type Rights struct {
	// Off says that nothing is checked.
	Off        []*Fact
	Identities []*Identity
	Rights     []*Right
}

// Actor is who does something: a user, by a token that was got for a password. Nobody logs in with password 0: it is
// for requests without a token.
type Actor struct {
	User     string
	Password int
}

// UserOp is an operation of a user. It is one of the history, or a serializable read, which is in no order with others.
type UserOp struct {
	*Op
	Actor
}

// Login is one attempt to log in.
type Login struct {
	Actor
	Node        keyspace.NodeID
	Begun, Over Moment
	// OK says that there is a token, Refused that the password is none of the user's.
	OK, Refused bool
}

// Told are events of a group that a user's watcher has received.
type Told struct {
	Actor
	Node     keyspace.NodeID
	Group    byte
	Revision int64
	At       Moment
}

// Access is what happened to the users of a run.
type Access struct {
	Rights
	// Remote says that an answer and an event may be on their way for long. PausedClocks says that the nodes' clocks may
	// stand still, and with them the leases by which nodes answer alone.
	Remote, PausedClocks bool

	mu sync.Mutex
	// Guarded by mu.
	ops    []UserOp
	logins []Login
	told   []Told
}

// AddOp records an operation of a user.
func (a *Access) AddOp(o UserOp) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ops = append(a.ops, o)
}

// AddLogin records an attempt to log in.
func (a *Access) AddLogin(l Login) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.logins = append(a.logins, l)
}

// AddTold records events that a user's watcher has received.
func (a *Access) AddTold(t Told) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.told = append(a.told, t)
}

// Counts says how many operations, logins and events there were, and how many rights.
func (a *Access) Counts() (ops, denied, logins, events, rights int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range a.ops {
		if o.Err != nil && kverror.Of(Fated(o.Err)).Kind == kverror.PermissionDenied {
			denied++
		}
	}
	return len(a.ops), denied, len(a.logins), len(a.told), len(a.Rights.Rights)
}

// definite are the texts of errors after which certainly nothing has happened.
var definite = func() map[string]kverror.Kind {
	unknown, known := map[string]bool{}, map[string]kverror.Kind{}
	for _, r := range kverror.Table() {
		text := rpctypes.ErrorDesc(r.GRPC)
		known[text] = r.Kind
		unknown[text] = unknown[text] || r.Fate == kverror.Unknown
	}
	for text := range unknown {
		if unknown[text] {
			delete(known, text)
		}
	}
	return known
}()

// Certain says whether certainly nothing has happened after a client's error.
func Certain(err error) bool {
	_, ok := definite[rpctypes.ErrorDesc(err)]
	return ok
}

// Fated is a client's error, which says of its fate what the client knows.
func Fated(err error) error {
	if err == nil {
		return nil
	}
	if k, ok := definite[rpctypes.ErrorDesc(err)]; ok {
		return kverror.New(k, "%v", err)
	}
	return err
}
