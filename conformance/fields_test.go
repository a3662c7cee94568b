package conformance

import (
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// class says what a field of a request means for rights.
type class int

const (
	// aside: no right depends on it.
	aside class = iota + 1
	// firstKey is a key, or the first of a span that ends at the field range_end. Each request is made with
	// many spans.
	firstKey
	// endKey is the end of the span that begins at firstKey.
	endKey
	// namesKeys is the name of a lock or an election, which is a prefix of keys.
	namesKeys
	// changesRight changes which rights the keys need, or who answers: this node or all of them.
	changesRight
	// ofLease is a lease, whose keys the request may concern.
	ofLease
	// identity is a user, a role or a password.
	identity
	// wide is of the whole cluster.
	wide
	// inside are requests in the request: each variant of them makes one of the request.
	inside
)

// field is what the matrix knows of a field. The first value is that of most requests; each other one is tried
// with a few spans.
type field struct {
	class  class
	values []any
}

// Names and leases that requests use. self stands for the name of the caller's user, and ownRole for its role.
const (
	self, ownRole = "$self", "$role"

	leaseOfB, leaseOfMany, leaseOfNone, leaseOfC, leaseOfA, leaseUnknown, leaseGranted = 1, 2, 3, 4, 5, 99, 100
	atBase                                                                             = -77 // stands for the revision before the cases
	ofKey                                                                              = -78 // stands for the revision that created the leader's key
)

// leaseTwo are leases that a put with a lease may attach a key to.
var leaseTwo = []any{0, leaseOfB, leaseOfMany, leaseOfNone, leaseUnknown}

// leaseAll are leases that calls about leases use.
var leaseAll = []any{leaseOfB, leaseOfMany, leaseOfNone, leaseOfC, leaseUnknown, 0}

// revisions are values of a revision: none, readable, compacted, in the future.
var revisions = []any{0, atBase, 1, 1 << 40}

// fields are those of all messages that clients send. A field without a row fails the test.
var fields = map[protoreflect.FullName]field{
	"etcdserverpb.RangeRequest.key":                 {firstKey, nil},
	"etcdserverpb.RangeRequest.range_end":           {endKey, nil},
	"etcdserverpb.RangeRequest.limit":               {aside, []any{0, 2}},
	"etcdserverpb.RangeRequest.revision":            {changesRight, revisions},
	"etcdserverpb.RangeRequest.sort_order":          {aside, []any{0, 2, 9}},
	"etcdserverpb.RangeRequest.sort_target":         {aside, nil},
	"etcdserverpb.RangeRequest.serializable":        {changesRight, []any{false, true}},
	"etcdserverpb.RangeRequest.keys_only":           {changesRight, []any{false, true}},
	"etcdserverpb.RangeRequest.count_only":          {changesRight, []any{false, true}},
	"etcdserverpb.RangeRequest.min_mod_revision":    {aside, []any{0, 3}},
	"etcdserverpb.RangeRequest.max_mod_revision":    {aside, nil},
	"etcdserverpb.RangeRequest.min_create_revision": {aside, nil},
	"etcdserverpb.RangeRequest.max_create_revision": {aside, nil},

	"etcdserverpb.PutRequest.key":          {firstKey, nil},
	"etcdserverpb.PutRequest.value":        {aside, []any{"v"}},
	"etcdserverpb.PutRequest.lease":        {ofLease, leaseTwo},
	"etcdserverpb.PutRequest.prev_kv":      {changesRight, []any{false, true}},
	"etcdserverpb.PutRequest.ignore_value": {changesRight, []any{false, true}},
	"etcdserverpb.PutRequest.ignore_lease": {changesRight, []any{false, true}},

	"etcdserverpb.DeleteRangeRequest.key":       {firstKey, nil},
	"etcdserverpb.DeleteRangeRequest.range_end": {endKey, nil},
	"etcdserverpb.DeleteRangeRequest.prev_kv":   {changesRight, []any{false, true}},

	"etcdserverpb.TxnRequest.compare":             {inside, nil},
	"etcdserverpb.TxnRequest.success":             {inside, nil},
	"etcdserverpb.TxnRequest.failure":             {inside, nil},
	"etcdserverpb.RequestOp.request_range":        {inside, nil},
	"etcdserverpb.RequestOp.request_put":          {inside, nil},
	"etcdserverpb.RequestOp.request_delete_range": {inside, nil},
	"etcdserverpb.RequestOp.request_txn":          {inside, nil},
	"etcdserverpb.Compare.key":                    {firstKey, nil},
	"etcdserverpb.Compare.range_end":              {endKey, nil},
	"etcdserverpb.Compare.result":                 {aside, []any{0, 3}},
	"etcdserverpb.Compare.target":                 {aside, []any{0, 3}},
	"etcdserverpb.Compare.version":                {aside, nil},
	"etcdserverpb.Compare.create_revision":        {aside, nil},
	"etcdserverpb.Compare.mod_revision":           {aside, nil},
	"etcdserverpb.Compare.value":                  {aside, nil},
	"etcdserverpb.Compare.lease":                  {aside, nil},

	"etcdserverpb.CompactionRequest.revision": {wide, []any{1 << 40, 1}},
	"etcdserverpb.CompactionRequest.physical": {wide, []any{false, true}},

	"etcdserverpb.WatchRequest.create_request":        {inside, nil},
	"etcdserverpb.WatchRequest.cancel_request":        {aside, nil},
	"etcdserverpb.WatchRequest.progress_request":      {aside, nil},
	"etcdserverpb.WatchCreateRequest.key":             {firstKey, nil},
	"etcdserverpb.WatchCreateRequest.range_end":       {endKey, nil},
	"etcdserverpb.WatchCreateRequest.start_revision":  {changesRight, revisions},
	"etcdserverpb.WatchCreateRequest.progress_notify": {aside, []any{false, true}},
	"etcdserverpb.WatchCreateRequest.filters":         {aside, []any{nil, []any{0}, []any{0, 1}}},
	"etcdserverpb.WatchCreateRequest.prev_kv":         {changesRight, []any{false, true}},
	"etcdserverpb.WatchCreateRequest.watch_id":        {aside, []any{0, 7}},
	"etcdserverpb.WatchCreateRequest.fragment":        {aside, []any{false, true}},
	"etcdserverpb.WatchCancelRequest.watch_id":        {aside, nil},
	"etcdserverpb.LeaseGrantRequest.TTL":              {aside, []any{3600, 1 << 60}},
	"etcdserverpb.LeaseGrantRequest.ID":               {ofLease, []any{leaseGranted, leaseOfB}},
	"etcdserverpb.LeaseRevokeRequest.ID":              {ofLease, leaseAll},
	"etcdserverpb.LeaseKeepAliveRequest.ID":           {ofLease, leaseAll},
	"etcdserverpb.LeaseTimeToLiveRequest.ID":          {ofLease, leaseAll},
	"etcdserverpb.LeaseTimeToLiveRequest.keys":        {changesRight, []any{true, false}},
	"etcdserverpb.MemberAddRequest.peerURLs":          {wide, []any{[]any{"http://127.0.0.1:1"}, []any{"none"}}},
	"etcdserverpb.MemberAddRequest.isLearner":         {wide, []any{false, true}},
	"etcdserverpb.MemberRemoveRequest.ID":             {wide, []any{77}},
	"etcdserverpb.MemberUpdateRequest.ID":             {wide, []any{77}},
	"etcdserverpb.MemberUpdateRequest.peerURLs":       {wide, []any{[]any{"http://127.0.0.1:1"}}},
	"etcdserverpb.MemberListRequest.linearizable":     {changesRight, []any{false, true}},
	"etcdserverpb.MemberPromoteRequest.ID":            {wide, []any{77}},
	"etcdserverpb.AlarmRequest.action":                {changesRight, []any{0, 1, 2}},
	"etcdserverpb.AlarmRequest.memberID":              {wide, []any{77}},
	"etcdserverpb.AlarmRequest.alarm":                 {wide, []any{0, 9}},
	"etcdserverpb.HashKVRequest.revision":             {wide, []any{0, 1 << 40}},
	"etcdserverpb.MoveLeaderRequest.targetID":         {wide, []any{77}},
	"etcdserverpb.DowngradeRequest.action":            {wide, []any{0, 2}},
	"etcdserverpb.DowngradeRequest.version":           {wide, []any{"none", "3.5.0"}},

	"etcdserverpb.AuthenticateRequest.name":                     {identity, []any{"point RW", "unknown", ""}},
	"etcdserverpb.AuthenticateRequest.password":                 {identity, []any{passwordOfAll, "wrong", ""}},
	"etcdserverpb.AuthUserAddRequest.name":                      {identity, []any{"fresh", "victim", self, ""}},
	"etcdserverpb.AuthUserAddRequest.password":                  {identity, []any{passwordOfAll, ""}},
	"etcdserverpb.AuthUserAddRequest.options":                   {identity, nil},
	"etcdserverpb.AuthUserAddRequest.hashedPassword":            {identity, []any{"", "JDJhJDA0", "no base64"}},
	"authpb.UserAddOptions.no_password":                         {identity, nil},
	"etcdserverpb.AuthUserGetRequest.name":                      {identity, []any{self, "root", "point RW", "unknown", ""}},
	"etcdserverpb.AuthUserDeleteRequest.name":                   {identity, []any{"victim", "root", "unknown", ""}},
	"etcdserverpb.AuthUserChangePasswordRequest.name":           {identity, []any{"victim", "unknown", ""}},
	"etcdserverpb.AuthUserChangePasswordRequest.password":       {identity, []any{"other", ""}},
	"etcdserverpb.AuthUserChangePasswordRequest.hashedPassword": {identity, []any{"", "JDJhJDA0"}},
	"etcdserverpb.AuthUserGrantRoleRequest.user":                {identity, []any{"victim", "unknown", ""}},
	"etcdserverpb.AuthUserGrantRoleRequest.role":                {identity, []any{"victim", "root", "unknown", ""}},
	"etcdserverpb.AuthUserRevokeRoleRequest.name":               {identity, []any{"victim", "root", "unknown", ""}},
	"etcdserverpb.AuthUserRevokeRoleRequest.role":               {identity, []any{"root", "victim", "unknown", ""}},
	"etcdserverpb.AuthRoleAddRequest.name":                      {identity, []any{"fresh", "victim", "root", ""}},
	"etcdserverpb.AuthRoleGetRequest.role":                      {identity, []any{ownRole, "root", "span R", "unknown", ""}},
	"etcdserverpb.AuthRoleDeleteRequest.role":                   {identity, []any{"victim", "root", "unknown", ""}},
	"etcdserverpb.AuthRoleGrantPermissionRequest.name":          {identity, []any{"victim", "unknown", ""}},
	"etcdserverpb.AuthRoleGrantPermissionRequest.perm":          {inside, nil},
	"etcdserverpb.AuthRoleRevokePermissionRequest.role":         {identity, []any{"victim", "unknown", ""}},
	"etcdserverpb.AuthRoleRevokePermissionRequest.key":          {firstKey, nil},
	"etcdserverpb.AuthRoleRevokePermissionRequest.range_end":    {endKey, nil},
	"authpb.Permission.permType":                                {identity, []any{0, 1, 2}},
	"authpb.Permission.key":                                     {firstKey, nil},
	"authpb.Permission.range_end":                               {endKey, nil},

	"v3lockpb.LockRequest.name":  {namesKeys, []any{"b", "d", "zz", ""}},
	"v3lockpb.LockRequest.lease": {ofLease, []any{leaseOfNone, leaseOfB, leaseOfMany, leaseUnknown}},
	"v3lockpb.UnlockRequest.key": {firstKey, nil},

	"v3electionpb.CampaignRequest.name":   {namesKeys, []any{"b", "d", "zz", ""}},
	"v3electionpb.CampaignRequest.lease":  {ofLease, []any{leaseOfNone, leaseOfB, leaseOfMany, leaseUnknown}},
	"v3electionpb.CampaignRequest.value":  {aside, []any{"v"}},
	"v3electionpb.ProclaimRequest.leader": {inside, nil},
	"v3electionpb.ProclaimRequest.value":  {aside, []any{"w"}},
	"v3electionpb.LeaderRequest.name":     {namesKeys, []any{"c", "a"}},
	"v3electionpb.ResignRequest.leader":   {inside, nil},
	"v3electionpb.LeaderKey.name":         {namesKeys, []any{"c", "a"}},
	"v3electionpb.LeaderKey.key":          {firstKey, nil},
	"v3electionpb.LeaderKey.rev":          {aside, []any{ofKey, 1}},
	"v3electionpb.LeaderKey.lease":        {ofLease, []any{leaseOfC, leaseOfB, leaseUnknown}},
}

// baseKeys are the keys that there are, with their leases. a/e and c/e are of leaders of elections.
var baseKeys = map[string]int64{"a": 0, "a/e": leaseOfA, "b": leaseOfB, "bb": leaseOfMany, "c": 0, "c/e": leaseOfC, "d": 0, "m": leaseOfMany, "z": 0}

// permissions are of b, of [b, d), from b on, and of [b, c) and [c, d). So the spans of requests lie in, on and
// beyond their borders.
var (
	someSpans = [][2]string{{"b", ""}, {"b", "d"}, {"bb", "e"}, {"c", fromKey}}
	moreSpans = [][2]string{
		{"c", ""},
		{"a", ""},
		{"d", ""},
		{"z", ""},
		{"b", "c"},
		{"c", "d"},
		{"b", "b\x00"},
		{"bb", "cc"},
		{"a", "c"},
		{"b", fromKey},
		{"\x00", fromKey},
		{"d", "b"},
		{"b", "b"},
		{"", ""},
		{"", "z"},
	}
	someKeys = [][2]string{{"b", ""}, {"c", ""}, {"z", ""}}
	moreKeys = [][2]string{{"a", ""}, {"bb", ""}, {"d", ""}, {"c/e", ""}, {"", ""}}
)

// variants returns requests that differ in every way that matters for rights. Brief are those for which others
// stand already: of another face, or deep inside.
func variants(md protoreflect.MessageDescriptor, brief bool, depth int) (all []proto.Message) {
	base := newMessage(md)
	var key, end protoreflect.FieldDescriptor
	eachField(md, func(fd protoreflect.FieldDescriptor) {
		switch f := fields[fd.FullName()]; {
		case f.class == firstKey:
			key = fd
		case f.class == endKey:
			end = fd
		case f.class != inside && len(f.values) > 0 && fd.ContainingOneof() == nil:
			setField(base, fd, f.values[0])
		}
	})
	bases := []protoreflect.Message{base}
	some := 1
	if key != nil {
		spans, rest := someSpans, moreSpans
		if end == nil {
			spans, rest = someKeys, moreKeys
		}
		some, bases = len(spans), nil
		if !brief {
			spans = slices.Concat(spans, rest)
		}
		for _, s := range spans {
			m := cloneOf(base)
			setField(m, key, s[0])
			if end != nil {
				setField(m, end, s[1])
			}
			bases = append(bases, m)
		}
	}
	for _, m := range bases {
		all = append(all, m.Interface())
	}
	eachField(md, func(fd protoreflect.FieldDescriptor) {
		f := fields[fd.FullName()]
		if f.class == inside {
			all = append(all, insides(base, fd, brief, depth)...)
			return
		}
		if f.class == aside && brief || len(f.values) < 2 || fd.ContainingOneof() != nil {
			return
		}
		for _, v := range f.values[1:] {
			for _, m := range bases[:some] {
				m = cloneOf(m)
				setField(m, fd, v)
				all = append(all, m.Interface())
			}
		}
	})
	return all
}

// deepest is how deep transactions lie in each other.
const deepest = 3

// insides returns requests with one request inside, and with two.
func insides(base protoreflect.Message, fd protoreflect.FieldDescriptor, brief bool, depth int) (all []proto.Message) {
	if depth >= deepest {
		return nil
	}
	for i, v := range variants(fd.Message(), brief || depth > 1, depth+1) {
		m := cloneOf(base)
		if fd.IsList() {
			setField(m, fd, []any{v})
			if i%5 == 4 {
				two := cloneOf(base)
				setField(two, fd, []any{variants(fd.Message(), true, deepest)[0], v})
				all = append(all, two.Interface())
			}
		} else {
			setField(m, fd, v)
		}
		all = append(all, m.Interface())
	}
	return all
}

func eachField(md protoreflect.MessageDescriptor, f func(protoreflect.FieldDescriptor)) {
	for i := range md.Fields().Len() {
		f(md.Fields().Get(i))
	}
}

func cloneOf(m protoreflect.Message) protoreflect.Message {
	return proto.Clone(m.Interface()).ProtoReflect()
}

// setField sets a field to a value of the table.
func setField(m protoreflect.Message, fd protoreflect.FieldDescriptor, v any) {
	if !fd.IsList() {
		m.Set(fd, valueOf(fd, v))
		return
	}
	m.Clear(fd)
	if v != nil {
		for _, e := range v.([]any) {
			m.Mutable(fd).List().Append(valueOf(fd, e))
		}
	}
}

func valueOf(fd protoreflect.FieldDescriptor, v any) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte(v.(string)))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(v.(int)))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(v.(int)))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(v.(int)))
	case protoreflect.MessageKind:
		return protoreflect.ValueOfMessage(v.(proto.Message).ProtoReflect())
	default: // strings and booleans
		return protoreflect.ValueOf(v)
	}
}

// TestFieldsHaveClasses: whatever a newer etcd lets clients say has a place in the matrix.
func TestFieldsHaveClasses(t *testing.T) {
	seen := map[protoreflect.FullName]bool{}
	var walk func(md protoreflect.MessageDescriptor)
	walk = func(md protoreflect.MessageDescriptor) {
		if seen[md.FullName()] {
			return
		}
		seen[md.FullName()] = true
		eachField(md, func(fd protoreflect.FieldDescriptor) {
			seen[fd.FullName()] = true
			if fields[fd.FullName()].class == 0 {
				t.Errorf("%s has no class: say in fields what it means for rights", fd.FullName())
			}
			if fd.Message() != nil {
				walk(fd.Message())
			}
		})
	}
	for _, m := range allMethods() {
		walk(m.Input())
	}
	for name := range fields {
		if !seen[name] {
			t.Errorf("%s has a class, and no client can say it", name)
		}
	}
}
