package kverror

import (
	"slices"
	"strings"

	"google.golang.org/grpc/status"
)

// Explanation is what a kind means to somebody who meets it in a client or a log, in sentences.
type Explanation struct {
	// Means says what has happened.
	Means string
	// Next says what to do.
	Next string
}

// Texts that several kinds share.
const (
	hidden = "The node that the client is connected to repeats the request by itself. A client sees it only if it lasts until the request's deadline, and then as a timeout."
	wait   = "Nothing, if it passes. If it lasts, see skein status for nodes that are silent and ranges without a quorum."
	mayBe  = "Read the key to learn whether the write has happened, then repeat it if it has not."
	fixIt  = "Correct the request."
	asRoot = "Give the right name. etcdctl user list and etcdctl role list show them to root."
)

var explanations = [numKinds]Explanation{
	Internal:              {"A bug, or an error of the machine.", "See the log of the node that answered, and report it with its lines. " + mayBe},
	EmptyKey:              {"The request has no key.", fixIt},
	KeyNotFound:           {"A put with ignore_value or ignore_lease needs a key that is there, and it is not.", "Put the key with its value first."},
	ValueProvided:         {"A put has a value and ignore_value.", fixIt},
	LeaseProvided:         {"A put has a lease and ignore_lease.", fixIt},
	TooManyOps:            {"A transaction has more operations than --max-txn-ops permits.", "Use several transactions, or raise --max-txn-ops on all nodes."},
	DuplicateKey:          {"A transaction writes one key twice.", "Write each key once."},
	InvalidSort:           {"A range request asks for an order that there is not.", fixIt},
	RequestTooLarge:       {"The request is larger than --max-request-bytes permits.", "Use smaller values or transactions, or raise --max-request-bytes on all nodes."},
	Compacted:             {"The revision that is asked for was compacted: its versions may be gone.", "Read at a newer revision. A watcher lists anew and watches from there."},
	FutureRevision:        {"The revision that is asked for has not come yet: the client has it from another cluster, or from before a restore.", "Read without a revision, and begin anew from the answer's."},
	NoSpace:               {"A node that the write needs has a full disk, or is above --quota-backend-bytes.", "Make room: delete keys and compact (etcdctl compact), move ranges away, or give it more disk. It takes writes again by itself; no alarm has to be disarmed."},
	TooManyRequests:       {"A queue or a memory budget of a node is full. Nothing was done.", "Repeat it after a pause. If it lasts, the cluster is overloaded: see skein range list --sort load."},
	LeaseNotFound:         {"The lease has expired, was revoked, or never was.", "Grant a new one."},
	TooManyRanges:         {"A transaction or a delete concerns more ranges than one revision may.", "Use several smaller requests."},
	NotLeader:             {"The node that was asked does not lead the range. " + hidden, wait},
	WrongRange:            {"The range has other borders than the node that the client is connected to knew, as after a split or a merge. " + hidden, wait},
	RangeNotHere:          {"The node that was asked has no replica of the range any more. " + hidden, wait},
	Dropped:               {"The request was given up before it was proposed. " + hidden, wait},
	Busy:                  {"The range takes no requests for a moment, as during a split or a change of its leader. " + hidden, wait},
	Unreachable:           {"The range's leader could not be reached. " + hidden, wait},
	NoLeader:              {"No leader of the range was found in time: most of its replicas' nodes are silent, or an election was under way. Nothing was done.", "Repeat it. If it lasts, the range has lost its quorum: start its nodes (skein status names them), or see docs/RECOVERY.md if they are lost for good."},
	LeaderChanged:         {"The range's leader lost its leadership while the request was under way. A write may have happened.", mayBe},
	Timeout:               {"The outcome was not known in time. A write may have happened.", mayBe + " If it lasts, see skein status: a range without a quorum, a slow disk, or too much load."},
	TimeoutLeaderFail:     {"As a timeout, and the range's leader has failed meanwhile. A write may have happened.", mayBe},
	TimeoutConnectionLost: {"As a timeout, and the connection to the range's leader broke. A write may have happened.", mayBe},
	Stopped:               {"The node is stopping.", "Use another endpoint. Give the client those of all nodes, and it does so by itself."},
	Corrupt:               {"Replicas of the range disagree, and no majority of them says which is right. The range answers nobody.", "See docs/OPERATIONS.md, replicas that disagree. Do not restart the nodes before that."},
	Canceled:              {"The client gave the request up. A write may have happened.", mayBe},
	DeadlineExceeded:      {"The client's own deadline passed. A write may have happened.", mayBe + " If it lasts, see skein status."},
	BadRequest:            {"The request cannot be understood; the rest of the text says why.", fixIt},
	ReadAgain:             {"The revision of a read could not be confirmed. " + hidden, wait},
	Conflict:              {"A transaction over several ranges met an older one. " + hidden, "Nothing, if it passes. If it lasts, many transactions write the same keys: make them smaller or fewer."},
	LeaseExists:           {"A lease with this id is there already.", "Choose another id, or 0 for one that is chosen."},
	LeaseTTLTooLarge:      {"The TTL is larger than 9,000,000,000 seconds.", fixIt},
	TooManyLeases:         {"There is no room for another lease, or for another range with keys of a lease.", "Revoke some, or wait until some have expired. Let many keys share a lease."},
	ReadByPages:           {"The answer is larger than a node may put together.", "Use a limit, or RangeStream."},
	AnswerTooLarge:        {"The answer is larger than a node may put together.", "Use a limit, or RangeStream."},
	NodeExists:            {"A node with this id is a member already.", "See skein node list."},
	NodeNotFound:          {"There is no node with this id.", "See skein node list."},
	NodeRemoved:           {"The node was removed from the cluster for good.", "Empty its directories and let it join as a new node (--join)."},
	PeerURLExists:         {"Another node has this peer URL.", "Choose another one, or remove that node first (skein node list)."},
	RootUserNotExist:      {"Users cannot be checked before there is a user root.", "etcdctl user add root"},
	RootRoleNotExist:      {"Users cannot be checked before the user root has the role root.", "etcdctl role add root, then etcdctl user grant-role root root"},
	UserExists:            {"There is a user of this name already.", asRoot},
	UserEmpty:             {"The request names no user, and users are checked; or the name of a user is empty.", "Give --user NAME:PASSWORD, or a client's certificate with that common name."},
	UserNotFound:          {"There is no user of this name.", asRoot},
	RoleExists:            {"There is a role of this name already.", asRoot},
	RoleNotFound:          {"There is no role of this name.", asRoot},
	RoleEmpty:             {"The name of a role is empty.", fixIt},
	AuthFailed:            {"The user's name or password is wrong.", "Check both. Root sets a new password with etcdctl user passwd."},
	PermissionNotGiven:    {"A grant has no permission.", fixIt},
	PermissionDenied:      {"The user may not do that with these keys; or may not command the cluster.", "See etcdctl user get NAME and role get ROLE. Root grants more with etcdctl role grant-permission."},
	RoleNotGranted:        {"The user does not have the role that is to be taken away.", asRoot},
	PermissionNotGranted:  {"The role does not have the permission that is to be taken away.", "See etcdctl role get ROLE: the span has to be the same as in the grant."},
	AuthNotEnabled:        {"Users are not checked in this cluster.", "Leave the user out, or turn the check on with etcdctl auth enable."},
	InvalidAuthToken:      {"The token has expired, or no node knows it.", "Log in again. Clients of etcd do so by themselves."},
	InvalidAuthManagement: {"Root cannot lose what the check of users needs.", "Turn the check off first (etcdctl auth disable)."},
	AuthOldRevision:       {"Users or roles have changed since the token was made.", "Repeat the request. Clients of etcd do so by themselves."},
	TooManyUsers:          {"Users, roles and permissions take all the room that they may have.", "Delete some, or give roles to several users."},
	AccessChanged:         {"Rights were taken away while the request was under way. Nothing was done.", "Repeat the request."},
	KeysChanged:           {"Keys of a lease were written again and again while it was to be revoked. Nothing was done.", "Repeat the request, once the lease's keys are not written any more."},
	HoldEnded:             {"What a backup, an export or a snapshot was reading is not kept any more: its hold has expired or was released.", "Begin it anew. skein hold list shows what is kept."},
	NotNext:               {"A version that a mirror or another load brings is not the next one of its key: what this cluster has of the key is not what the source had.", "Begin anew: skein mirror abandon, then start with an empty cluster. If it happens again, report it with the text."},
	Loading:               {"The cluster is being loaded by a restore, an import or a mirror, or one was broken off.", "Wait for its end. If it was broken off, give its command again, or begin with empty directories."},
}

// Explanation says what the kind means, for people.
func (k Kind) Explanation() Explanation {
	if k >= numKinds {
		k = Internal
	}
	return explanations[k]
}

// Named returns the kind of a name, which may have dashes in the place of spaces.
func Named(name string) (Kind, bool) {
	name = strings.ReplaceAll(strings.ToLower(strings.TrimSpace(name)), "-", " ")
	i := slices.IndexFunc(rows[:], func(r Row) bool { return strings.ToLower(r.Name) == name })
	return Kind(max(i, 0)), i >= 0
}

// InText returns the kinds that may be behind a text of a client's or a log's. Those whose texts are longest come alone: the others
// are parts of other sentences.
func InText(text string) (found []Kind) {
	text, longest := strings.ToLower(text), 0
	take := func(k Kind, part string) {
		switch n := len(part); {
		case n == 0 || n < longest || !hasWords(text, part):
		case n > longest:
			found, longest = []Kind{k}, n
		case !slices.Contains(found, k):
			found = append(found, k)
		}
	}
	for k := range numKinds {
		take(k, strings.ToLower(rows[k].Name))
		if k.hides() {
			continue
		}
		message := strings.ToLower(status.Convert(rows[k].GRPC).Message())
		take(k, message)
		// Clients and logs leave the program's name out, or put another one in its place.
		_, bare, _ := strings.Cut(message, ": ")
		take(k, bare)
	}
	return found
}

// hides says whether clients get another kind's text, that of a timeout, after their deadline.
func (k Kind) hides() bool {
	return rows[k].Retry == RetryRouter && status.Convert(rows[k].GRPC).Message() == status.Convert(rows[Timeout].GRPC).Message()
}

// hasWords says whether part is in text, and neither begins nor ends within a word there.
func hasWords(text, part string) bool {
	letter := func(b byte) bool { return b >= 'a' && b <= 'z' || b >= '0' && b <= '9' }
	for at := 0; ; {
		i := strings.Index(text[at:], part)
		if i < 0 {
			return false
		}
		begin, end := at+i, at+i+len(part)
		if (begin == 0 || !letter(text[begin-1])) && (end == len(text) || !letter(text[end])) {
			return true
		}
		at = begin + 1
	}
}
