package keyspace

// AccessIndex is the index of the placement group's log at which rights were taken from somebody last, 0
// before that.
type AccessIndex uint64

// Permit says under which rights a request was permitted. The zero value is no user's request: the
// cluster's own work, which users' rights do not end.
type Permit uint64

// PermitAt is the permit of a request that was checked by the rights of an index.
func PermitAt(at AccessIndex) Permit { return Permit(at) + 1 }

// Ended says whether rights were taken from somebody, at the index, after the request was permitted.
func (p Permit) Ended(at AccessIndex) bool { return 0 < p && p <= Permit(at) }
