package auth

import (
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rights"
)

// Rule says who may call a method.
type Rule uint8

// The rules.
const (
	// Refused: nobody. Methods that are not in the table have this rule.
	Refused Rule = iota
	// Open: everybody. Nobody reads the token of such a call. In etcd AuthStatus fails with a bad one.
	Open
	// AnyUser: whoever has a token or certificate.
	AnyUser
	// RootOnly: root alone.
	RootOnly
	// RootOrHere: root. While checks are off, or the cluster is loaded: clients that are here. The face that is asked says
	// who that is.
	RootOrHere
	// NodeOrHere is RootOrHere, and the nodes by their certificates.
	NodeOrHere
	// ByRequest: what each message asks for, see [Check].
	ByRequest
	// ByLease: any user who may read, or write, all keys of a lease. Only who knows those can check that.
	ByLease
	// ByParts: any user, by an identity of the present auth revision. The method makes requests on the user's
	// behalf, which are checked one by one.
	ByParts
)

// rules are those of all methods by their full names.
var rules = tabulate([]rulesOf{
	{"etcdserverpb.KV", ByRequest, "Range RangeStream Put DeleteRange Txn"},
	{"etcdserverpb.KV", RootOnly, "Compact"},
	{"etcdserverpb.Watch", ByRequest, "Watch"},
	{"etcdserverpb.Lease", AnyUser, "LeaseGrant"},
	{"etcdserverpb.Lease", ByLease, "LeaseRevoke LeaseKeepAlive LeaseTimeToLive LeaseLeases"},
	{"etcdserverpb.Cluster", AnyUser, "MemberList"},
	{"etcdserverpb.Cluster", RootOnly, "MemberAdd MemberRemove MemberUpdate MemberPromote"},
	{"etcdserverpb.Maintenance", AnyUser, "Status"},
	{"etcdserverpb.Maintenance", ByRequest, "Alarm"},
	{"etcdserverpb.Maintenance", RootOnly, "Defragment Hash HashKV Snapshot MoveLeader Downgrade"},
	{"etcdserverpb.Auth", Open, "Authenticate AuthStatus"},
	{"etcdserverpb.Auth", ByRequest, "UserGet RoleGet"},
	{"etcdserverpb.Auth", RootOnly, `AuthEnable AuthDisable UserAdd UserList UserDelete UserChangePassword UserGrantRole UserRevokeRole
		RoleAdd RoleList RoleDelete RoleGrantPermission RoleRevokePermission`},
	{"v3lockpb.Lock", ByParts, "Lock Unlock"},
	{"v3electionpb.Election", ByParts, "Campaign Proclaim Leader Observe Resign"},
	{"grpc.health.v1.Health", Open, "Check List Watch"},
	{"grpc.reflection.v1.ServerReflection", Open, "ServerReflectionInfo"},
	{"grpc.reflection.v1alpha.ServerReflection", Open, "ServerReflectionInfo"},
	// Each operation of a pipe is checked as the call of KV that it is.
	{"skein.pipe.v1.Pipe", AnyUser, "Open"},
	{"skein.admin.v1.Admin", NodeOrHere, "NodeJoin"},
	{"skein.admin.v1.Admin", RootOnly, "RangeList RangeShow OperationList PlacementShow NodeList NodeShow ClusterShow HoldList Survey Heat Series Slow WatcherList"},
	// A bundle takes profiles of a node and has its log: it is no look that everybody may have while checks are off.
	{"skein.admin.v1.Admin", RootOrHere, "Bundle"},
	{"skein.data.v1.Data", RootOrHere, "Cut Renew Release"},
	{"skein.data.v1.Data", RootOnly, "Read"},
	{"skein.admin.v1.Admin", RootOrHere, `RangeSplit RangeMove RangeTransferLeader RangeMerge PlacementMove PlacementTransferLeader PlacementPause
		PlacementSetReplication PlacementSetMergeAfter NodeDrain NodeUndrain NodeDecommission NodeRecommission NodeRemove ClusterUpgrade HoldRelease`},
	{"skein.data.v1.Load", RootOrHere, "LoadBegin LoadState LoadSplit LoadLeases LoadPut LoadAdvance LoadAccess LoadFinish LoadAbandon"},
})

// rulesOf are methods of one service with the same rule.
type rulesOf struct {
	service string
	rule    Rule
	methods string // separated by spaces
}

func tabulate(table []rulesOf) map[string]Rule {
	all := map[string]Rule{}
	for _, row := range table {
		for _, method := range strings.Fields(row.methods) {
			all["/"+row.service+"/"+method] = row.rule
		}
	}
	return all
}

// RuleOf returns the rule of a method by its full name, /SERVICE/METHOD. A name that is written in any other
// way is none.
func RuleOf(method string) Rule { return rules[method] }

// Begin returns an error where a caller may not even begin a call. It is all that there is to check in the
// call but what ByRequest, ByLease and ByParts say.
func (r Rule) Begin(c *Caller) error {
	switch r {
	case Open, ByRequest:
		return nil
	case AnyUser, ByLease:
		return c.AnyUser()
	case ByParts:
		if err := c.AnyUser(); err != nil {
			return err
		}
		return c.Stale() // its parts act for the user of now, whatever has become of the identity
	case NodeOrHere:
		if c.Node != "" {
			return nil
		}
		return c.Root()
	case RootOnly, RootOrHere:
		return c.Root()
	case Refused:
	}
	return kverror.PermissionDenied
}

// Commands says whether a method commands the cluster itself, or looks into a node's process. etcd has no such method: so
// while checks are off it is not open to everybody, as all others are.
func (r Rule) Commands() bool { return r == RootOrHere || r == NodeOrHere }

// Check returns an error where a caller may not send a message of a method whose rule is ByRequest. The
// message must be as the client sent it: the ends of its spans mean what they mean in permissions. The other
// keys of the lease of a put are not checked here.
func Check(c *Caller, message proto.Message) error {
	switch m := message.(type) {
	case *pb.RangeRequest:
		return c.May(rights.Read, m.GetKey(), m.GetRangeEnd())
	case *pb.PutRequest:
		return c.mayPut(m)
	case *pb.DeleteRangeRequest:
		return c.mayDelete(m)
	case *pb.TxnRequest:
		if len(m.GetCompare())+len(m.GetSuccess())+len(m.GetFailure()) == 0 {
			return c.stale // it needs no right, and yet etcd reads for no old identity
		}
		return c.mayTxn(m)
	case *pb.WatchRequest:
		if create := m.GetCreateRequest(); create != nil {
			return c.mayWatch(create)
		}
		return nil // to cancel a watcher of the stream, or to ask how far they are
	case *pb.WatchCreateRequest:
		return c.mayWatch(m)
	case *pb.AlarmRequest:
		if m.GetAction() == pb.AlarmRequest_GET {
			return c.AnyUser()
		}
		return c.Root()
	case *pb.AuthUserGetRequest:
		if m.GetName() == c.User {
			return nil
		}
		return c.Root()
	case *pb.AuthRoleGetRequest:
		if c.has(m.GetRole()) {
			return nil
		}
		return c.Root()
	}
	return kverror.PermissionDenied
}

func (c *Caller) mayPut(r *pb.PutRequest) error {
	what := rights.Write
	if r.GetPrevKv() {
		what = rights.ReadWrite
	}
	return c.May(what, r.GetKey(), nil)
}

func (c *Caller) mayDelete(r *pb.DeleteRangeRequest) error {
	what := rights.Write
	if r.GetPrevKv() {
		what = rights.ReadWrite
	}
	return c.May(what, r.GetKey(), r.GetRangeEnd())
}

// mayTxn checks both branches, whichever will be taken: what a user may do says nothing about what there is.
func (c *Caller) mayTxn(r *pb.TxnRequest) error {
	for _, compare := range r.GetCompare() {
		if err := c.May(rights.Read, compare.GetKey(), compare.GetRangeEnd()); err != nil {
			return err
		}
	}
	for _, branch := range [2][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
		for _, op := range branch {
			if err := c.mayOp(op); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Caller) mayOp(op *pb.RequestOp) error {
	switch o := op.GetRequest().(type) {
	case *pb.RequestOp_RequestRange:
		return Check(c, o.RequestRange)
	case *pb.RequestOp_RequestPut:
		return c.mayPut(o.RequestPut)
	case *pb.RequestOp_RequestDeleteRange:
		return c.mayDelete(o.RequestDeleteRange)
	case *pb.RequestOp_RequestTxn:
		return c.mayTxn(o.RequestTxn)
	}
	return nil // it does nothing, and is refused for that
}

func (c *Caller) mayWatch(r *pb.WatchCreateRequest) error {
	key := r.GetKey()
	if len(key) == 0 {
		key = []byte{0} // the smallest one, as etcd has it
	}
	return c.May(rights.Read, key, r.GetRangeEnd())
}
