// Package kverror is the one table of everything that can go wrong with a request. It has
// the internal kind, etcd's code and text, whether the request may have taken effect, and
// who may repeat it.
//
// shard and placement return these errors and the bus carries them. router decides by
// them what to repeat, and etcdapi turns them into etcd's errors. Error texts exist only
// here and in etcd's own rpctypes.
package kverror

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/keyspace"
)

// Kind says what went wrong. A Kind is itself an error, for errors.Is(err,
// kverror.Compacted). The numbers travel between nodes: they are never reused, and new
// kinds are added at the end.
type Kind uint8

// The kinds. For each, the table gives the client's error, whether the request may have
// been applied, and who repeats it.
const (
	// Internal is anything without a kind of its own: a bug or an error of the machine.
	Internal Kind = iota
	EmptyKey
	KeyNotFound
	ValueProvided
	LeaseProvided
	TooManyOps
	DuplicateKey
	InvalidSort
	RequestTooLarge
	Compacted
	FutureRevision
	NoSpace
	// TooManyRequests: a byte budget or a queue is full.
	TooManyRequests
	LeaseNotFound
	// TooManyRanges: a transaction or a delete involves more ranges than one revision may
	// concern, including those that it only reads or compares.
	TooManyRanges
	// NotLeader: the replica does not lead; Leader may hold a hint.
	NotLeader
	// WrongRange: the request was routed by an old descriptor; Descriptors has newer
	// ones.
	WrongRange
	// RangeNotHere: the node has no replica of the range.
	RangeNotHere
	// Dropped: the request was evaluated, then discarded before it was proposed.
	Dropped
	// Busy: the range accepts no requests for a moment (a split, a transfer).
	Busy
	// Unreachable: the request never left for its node.
	Unreachable
	// NoLeader: no leader could be found in time; nothing was proposed.
	NoLeader
	// LeaderChanged: the request was proposed, then its leader lost leadership.
	LeaderChanged
	// Timeout: the outcome was not known in time.
	Timeout
	// TimeoutLeaderFail is Timeout if the leader failed meanwhile.
	TimeoutLeaderFail
	// TimeoutConnectionLost is Timeout if the connection to the leader broke.
	TimeoutConnectionLost
	// Stopped: the node is stopping; nothing was proposed.
	Stopped
	Corrupt
	Canceled
	DeadlineExceeded
	// BadRequest: the request cannot be understood; Detail says why.
	BadRequest
	// ReadAgain: a read's revision could not be confirmed, so the read starts over.
	ReadAgain
	// Conflict: a transaction over several ranges met an older one and starts over.
	Conflict
	LeaseExists
	LeaseTTLTooLarge
	// TooManyLeases: there is no room for another lease, or for another range with keys
	// of a lease.
	TooManyLeases
	// ReadByPages: a range's answer is larger than one page.
	ReadByPages
	// AnswerTooLarge: a read finds more than its gateway may assemble into one answer.
	AnswerTooLarge
	// NodeExists, NodeNotFound: the node exists already, or does not exist.
	NodeExists
	NodeNotFound
	// NodeRemoved: the node was removed from the cluster for good.
	NodeRemoved
	// PeerURLExists: another node has this peer URL.
	PeerURLExists
	// The errors of users and roles. Their names are etcd's. TooManyUsers: users, roles and
	// permissions take all the room that they may have.
	RootUserNotExist
	RootRoleNotExist
	UserExists
	UserEmpty
	UserNotFound
	RoleExists
	RoleNotFound
	RoleEmpty
	AuthFailed
	PermissionNotGiven
	PermissionDenied
	RoleNotGranted
	PermissionNotGranted
	AuthNotEnabled
	InvalidAuthToken
	InvalidAuthManagement
	AuthOldRevision
	TooManyUsers
	// AccessChanged: rights were taken away since the request was permitted. Its gateway checks
	// it anew.
	AccessChanged
	// KeysChanged: a key of the lease was written since its keys were checked for a revoke. They are
	// checked anew.
	KeysChanged
	// HoldEnded: the hold of a consistent cut has expired, was released, or came too late: some of what the
	// cut is to read may be removed.
	HoldEnded
	// Loading: the cluster is being loaded, or holds a part of a load that was abandoned.
	Loading
	// NotNext: a version of a load is not the next one of its key: something before it is missing or different here.
	NotNext

	numKinds
)

// Fate says whether a failed request may have taken effect.
type Fate uint8

// The two fates.
const (
	// NotApplied: it certainly did not and never will.
	NotApplied Fate = iota
	// Unknown: it may have, or may yet.
	Unknown
)

// Retry says who may repeat a failed request without asking the client.
type Retry uint8

// Who repeats a request.
const (
	// RetryNever: the answer would be the same, or the fate is unknown.
	RetryNever Retry = iota
	// RetryRouter: the gateway does, invisible to the client.
	RetryRouter
	// RetryClient: the client may, after a pause.
	RetryClient
)

// Row is one row of the table.
type Row struct {
	Kind  Kind
	Name  string
	Fate  Fate
	Retry Retry
	// GRPC is the client's error: etcd's own error value if etcd has one for the case. If
	// the gateway repeats the request, the client gets GRPC only after the deadline.
	GRPC error
}

// errAnswerTooLarge has no counterpart: etcd would build the answer and might run out of
// memory.
var errAnswerTooLarge = status.Error(codes.ResourceExhausted, "skein: the answer is larger than a node may put together: use a limit, or RangeStream")

var rows = [numKinds]Row{
	Internal:              {Name: "internal", Fate: Unknown, Retry: RetryNever, GRPC: status.Error(codes.Unknown, "etcdserver: internal error")},
	EmptyKey:              {Name: "empty key", GRPC: rpctypes.ErrGRPCEmptyKey},
	KeyNotFound:           {Name: "key not found", GRPC: rpctypes.ErrGRPCKeyNotFound},
	ValueProvided:         {Name: "value provided", GRPC: rpctypes.ErrGRPCValueProvided},
	LeaseProvided:         {Name: "lease provided", GRPC: rpctypes.ErrGRPCLeaseProvided},
	TooManyOps:            {Name: "too many operations", GRPC: rpctypes.ErrGRPCTooManyOps},
	DuplicateKey:          {Name: "duplicate key", GRPC: rpctypes.ErrGRPCDuplicateKey},
	InvalidSort:           {Name: "invalid sort option", GRPC: rpctypes.ErrGRPCInvalidSortOption},
	RequestTooLarge:       {Name: "request too large", GRPC: rpctypes.ErrGRPCRequestTooLarge},
	Compacted:             {Name: "compacted", GRPC: rpctypes.ErrGRPCCompacted},
	FutureRevision:        {Name: "future revision", GRPC: rpctypes.ErrGRPCFutureRev},
	NoSpace:               {Name: "no space", GRPC: rpctypes.ErrGRPCNoSpace},
	TooManyRequests:       {Name: "too many requests", Retry: RetryClient, GRPC: rpctypes.ErrGRPCRequestTooManyRequests},
	LeaseNotFound:         {Name: "lease not found", GRPC: rpctypes.ErrGRPCLeaseNotFound},
	TooManyRanges:         {Name: "too many ranges", GRPC: status.Error(codes.ResourceExhausted, "skein: the request concerns too many ranges: use several smaller ones")},
	NotLeader:             {Name: "not leader", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	WrongRange:            {Name: "wrong range", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	RangeNotHere:          {Name: "range not here", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	Dropped:               {Name: "dropped", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	Busy:                  {Name: "busy", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	Unreachable:           {Name: "unreachable", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	NoLeader:              {Name: "no leader", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCNoLeader},
	LeaderChanged:         {Name: "leader changed", Fate: Unknown, GRPC: rpctypes.ErrGRPCLeaderChanged},
	Timeout:               {Name: "timeout", Fate: Unknown, GRPC: rpctypes.ErrGRPCTimeout},
	TimeoutLeaderFail:     {Name: "timeout, leader failed", Fate: Unknown, GRPC: rpctypes.ErrGRPCTimeoutDueToLeaderFail},
	TimeoutConnectionLost: {Name: "timeout, connection lost", Fate: Unknown, GRPC: rpctypes.ErrGRPCTimeoutDueToConnectionLost},
	Stopped:               {Name: "stopped", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCStopped},
	Corrupt:               {Name: "corrupt", Fate: Unknown, GRPC: rpctypes.ErrGRPCCorrupt},
	Canceled:              {Name: "canceled", Fate: Unknown, GRPC: status.Error(codes.Canceled, context.Canceled.Error())},
	DeadlineExceeded:      {Name: "deadline exceeded", Fate: Unknown, GRPC: status.Error(codes.DeadlineExceeded, context.DeadlineExceeded.Error())},
	BadRequest:            {Name: "bad request", GRPC: status.Error(codes.InvalidArgument, "skein: bad request")},
	ReadAgain:             {Name: "read again", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	Conflict:              {Name: "transaction conflict", Retry: RetryRouter, GRPC: rpctypes.ErrGRPCTimeout},
	LeaseExists:           {Name: "lease exists", GRPC: rpctypes.ErrGRPCLeaseExist},
	LeaseTTLTooLarge:      {Name: "lease ttl too large", GRPC: rpctypes.ErrGRPCLeaseTTLTooLarge},
	TooManyLeases:         {Name: "too many leases", Retry: RetryClient, GRPC: status.Error(codes.ResourceExhausted, "skein: there are too many leases, or they have keys in too many ranges: revoke some, or wait until some have expired")},
	ReadByPages:           {Name: "read by pages", GRPC: errAnswerTooLarge},
	AnswerTooLarge:        {Name: "answer too large", GRPC: errAnswerTooLarge},
	NodeExists:            {Name: "node exists", GRPC: rpctypes.ErrGRPCMemberExist},
	NodeNotFound:          {Name: "node not found", GRPC: rpctypes.ErrGRPCMemberNotFound},
	NodeRemoved:           {Name: "node removed", GRPC: rpctypes.ErrGRPCMemberNotFound},
	PeerURLExists:         {Name: "peer URL exists", GRPC: rpctypes.ErrGRPCPeerURLExist},
	RootUserNotExist:      {Name: "root user does not exist", GRPC: rpctypes.ErrGRPCRootUserNotExist},
	RootRoleNotExist:      {Name: "root user has no root role", GRPC: rpctypes.ErrGRPCRootRoleNotExist},
	UserExists:            {Name: "user exists", GRPC: rpctypes.ErrGRPCUserAlreadyExist},
	UserEmpty:             {Name: "user name is empty", GRPC: rpctypes.ErrGRPCUserEmpty},
	UserNotFound:          {Name: "user not found", GRPC: rpctypes.ErrGRPCUserNotFound},
	RoleExists:            {Name: "role exists", GRPC: rpctypes.ErrGRPCRoleAlreadyExist},
	RoleNotFound:          {Name: "role not found", GRPC: rpctypes.ErrGRPCRoleNotFound},
	RoleEmpty:             {Name: "role name is empty", GRPC: rpctypes.ErrGRPCRoleEmpty},
	AuthFailed:            {Name: "authentication failed", GRPC: rpctypes.ErrGRPCAuthFailed},
	PermissionNotGiven:    {Name: "permission not given", GRPC: rpctypes.ErrGRPCPermissionNotGiven},
	PermissionDenied:      {Name: "permission denied", GRPC: rpctypes.ErrGRPCPermissionDenied},
	RoleNotGranted:        {Name: "role not granted", GRPC: rpctypes.ErrGRPCRoleNotGranted},
	PermissionNotGranted:  {Name: "permission not granted", GRPC: rpctypes.ErrGRPCPermissionNotGranted},
	AuthNotEnabled:        {Name: "authentication not enabled", GRPC: rpctypes.ErrGRPCAuthNotEnabled},
	InvalidAuthToken:      {Name: "invalid auth token", GRPC: rpctypes.ErrGRPCInvalidAuthToken},
	InvalidAuthManagement: {Name: "invalid auth management", GRPC: rpctypes.ErrGRPCInvalidAuthMgmt},
	AuthOldRevision:       {Name: "auth revision is old", GRPC: rpctypes.ErrGRPCAuthOldRevision},
	TooManyUsers:          {Name: "too many users", GRPC: status.Error(codes.ResourceExhausted, "skein: users, roles and permissions take more than 16 MiB: delete some")},
	AccessChanged:         {Name: "access changed", Retry: RetryClient, GRPC: grpcAccessChanged},
	KeysChanged:           {Name: "keys of the lease changed", Retry: RetryClient, GRPC: status.Error(codes.Unavailable, "skein: keys of the lease were written again and again while it was to be revoked: repeat the request")},
	HoldEnded:             {Name: "hold ended", GRPC: status.Error(codes.FailedPrecondition, "skein: old versions are not held for this cut any more: begin it anew")},
	NotNext:               {Name: "not the next version", GRPC: status.Error(codes.DataLoss, "skein: a version of a load is not the next one of its key")},
	Loading:               {Name: "loading", Retry: RetryClient, GRPC: status.Error(codes.Unavailable, "skein: this cluster is being loaded")},
}

// Table returns all rows in the order of their kinds.
func Table() []Row {
	t := make([]Row, numKinds)
	for k := range rows {
		t[k] = rows[k]
		t[k].Kind = Kind(k)
	}
	return t
}

// row returns the kind's row; an unknown kind of a newer node counts as Internal.
func (k Kind) row() *Row {
	if k >= numKinds {
		return &rows[Internal]
	}
	return &rows[k]
}

// Error implements error.
func (k Kind) Error() string { return k.row().Name }

// Fate says whether a request that failed with this kind may have taken effect.
func (k Kind) Fate() Fate { return k.row().Fate }

// Retry says who may repeat a request that failed with this kind.
func (k Kind) Retry() Retry { return k.row().Retry }

// Error is a failed request. Detail is for people, the other fields are for the router.
type Error struct {
	Kind Kind
	// Detail gives details for logs, and for clients if etcd has no text for the kind.
	Detail string
	// Descriptors are newer copies than the one by which the request was routed.
	Descriptors []keyspace.Descriptor
	// Leader is the node that the answering node takes for the leader; 0 is unknown.
	Leader keyspace.NodeID
	// CompactRevision is the compacted revision, for Compacted.
	CompactRevision keyspace.Revision
}

// New returns an Error of the kind with a formatted detail.
func New(k Kind, format string, args ...any) *Error {
	return &Error{Kind: k, Detail: fmt.Sprintf(format, args...)}
}

// Error implements error.
func (e *Error) Error() string {
	if e.Detail == "" {
		return e.Kind.Error()
	}
	return e.Kind.Error() + ": " + e.Detail
}

// Unwrap lets errors.Is find the Kind.
func (e *Error) Unwrap() error { return e.Kind }

// Fate says whether the request may have taken effect.
func (e *Error) Fate() Fate { return e.Kind.Fate() }

// Retry says who may repeat the request.
func (e *Error) Retry() Retry { return e.Kind.Retry() }

// Of returns err as an *Error. An *Error stays as it is. An error that wraps a Kind, or
// is a context's error, becomes an *Error of that kind; any other becomes Internal.
// Of(nil) is nil.
func Of(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	var k Kind
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &k):
		return &Error{Kind: k, Detail: err.Error()}
	case errors.Is(err, context.Canceled):
		return &Error{Kind: Canceled}
	case errors.Is(err, context.DeadlineExceeded):
		return &Error{Kind: DeadlineExceeded}
	}
	return &Error{Kind: Internal, Detail: err.Error()}
}

// grpcAccessChanged is a value of its own, so that [IsAccessChanged] knows it. Its text is for a client whose
// gateway has not heard in time what was taken away: nothing has happened.
var grpcAccessChanged = status.Error(status.Code(rpctypes.ErrGRPCNoLeader), rpctypes.ErrorDesc(rpctypes.ErrGRPCNoLeader))

// IsAccessChanged says whether an error is AccessChanged, or what GRPC makes of it.
func IsAccessChanged(err error) bool {
	return err != nil && (err == grpcAccessChanged || errors.Is(err, AccessChanged)) //nolint:errorlint // GRPC returns the value itself
}

// GRPC returns the client's error for err: etcd's own error value if there is one. Kinds
// without a text of etcd's carry their detail. An error that already is a gRPC status
// stays as it is.
func GRPC(err error) error {
	if err == nil {
		return nil
	}
	var k Kind
	var e *Error
	if !errors.As(err, &e) && !errors.As(err, &k) {
		if _, isStatus := status.FromError(err); isStatus {
			return err
		}
	}
	e = Of(err)
	g := e.Kind.row().GRPC
	if e.Detail != "" && (e.Kind == Internal || e.Kind == BadRequest || e.Kind == TooManyRanges || e.Kind == AnswerTooLarge || e.Kind == Loading || e.Kind == NotNext) {
		s := status.Convert(g)
		return status.Error(s.Code(), s.Message()+": "+e.Detail)
	}
	return g
}
