package keyspace

import "context"

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

// Internal is the permit of the cluster's own work.
const Internal Permit = 0

type permitKey struct{}

// permitted is a context with a permit. Package context would take memory for the permit too.
type permitted struct {
	context.Context
	permit Permit
}

// Value implements context.Context.
func (c *permitted) Value(key any) any {
	if key == (permitKey{}) {
		return c
	}
	return c.Context.Value(key)
}

// Room is a context with room for one permit, so that [WithPermit] need not make another context.
type Room struct {
	permitted
	taken bool
}

// Value implements context.Context.
func (r *Room) Value(key any) any {
	if !r.taken {
		return r.Context.Value(key)
	}
	return r.permitted.Value(key)
}

func (r *Room) room() *Room { return r }

// WithPermit returns a context of a request that was permitted. That is ctx itself if it has a free [Room]: then nobody
// else may use it yet.
func WithPermit(ctx context.Context, p Permit) context.Context {
	if c, ok := ctx.(interface{ room() *Room }); ok {
		if r := c.room(); !r.taken {
			r.permit, r.taken = p, true
			return ctx
		}
	}
	return &permitted{ctx, p}
}

// PermitOf returns the permit of a context's request. ok is false where nobody has said under which rights it
// is made.
func PermitOf(ctx context.Context) (p Permit, ok bool) {
	c, ok := ctx.Value(permitKey{}).(*permitted)
	if !ok {
		return Internal, false
	}
	return c.permit, true
}
