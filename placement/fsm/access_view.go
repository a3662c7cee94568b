package fsm

import (
	"encoding/binary"
	"fmt"
	"iter"

	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/rights"
)

// Access is an unchanging copy of the users and roles. Members of the placement group have the hashes
// of passwords in it, other nodes have none.
type Access struct {
	*rights.State
	// Changed is the index of the last change.
	Changed uint64
	// Key is the secret of the tokens' MAC, empty before checks were switched on.
	Key []byte

	log accessLog
}

// viewAccess returns the copy for a View, the previous one's if nothing has changed since.
func (s *State) viewAccess(prev *View) *Access {
	if s.accessChanged == 0 {
		return nil
	}
	if prev != nil && prev.Access != nil && prev.Access.Changed == s.accessChanged {
		return prev.Access
	}
	return &Access{State: s.access.Clone(), Changed: s.accessChanged, Key: s.accessKey, log: s.accessLog}
}

// AccessPart is a part of what brings an Access to a later index. All parts of it have the same fields
// above the users; the parts together have the users and roles, without hashes.
type AccessPart struct {
	// Full says that the parts together have everything. Otherwise they go over an earlier Access.
	Full    bool
	Meta    rights.Meta
	Changed uint64
	Key     []byte

	Users     []*rights.User
	Roles     []*rights.Role
	GoneUsers []string
	GoneRoles []string
}

// partBytes is about how large a part is at most, unless one role is larger.
const partBytes = 256 << 10

// Parts returns what brings an Access of the index since to this one, nothing if that is so already. Index
// 0 is none at all. No part has the hash of a password.
func (a *Access) Parts(since uint64) iter.Seq[*AccessPart] {
	return func(yield func(*AccessPart) bool) {
		if a == nil || a.Changed <= since {
			return
		}
		users, roles, ok := a.log.since(since)
		if !ok {
			users, roles = nil, nil
			for _, u := range a.State.Users() {
				users = append(users, u.Name)
			}
			for _, r := range a.State.Roles() {
				roles = append(roles, r.Name)
			}
		}
		empty := AccessPart{Full: !ok, Meta: a.Meta, Changed: a.Changed, Key: a.Key}
		p, bytes := empty, 0
		room := func(more int) bool {
			if bytes += more; bytes <= partBytes || bytes == more {
				return true
			}
			full := p
			p, bytes = empty, more
			return yield(&full)
		}
		for _, name := range users {
			u := a.User(name)
			if u == nil {
				p.GoneUsers = append(p.GoneUsers, name)
				continue
			}
			if !room(u.Bytes()) {
				return
			}
			told := *u
			if !mutation.Is(mutation.HashesTold) {
				told.Hash = nil
			}
			p.Users = append(p.Users, &told)
		}
		for _, name := range roles {
			r := a.Role(name)
			if r == nil {
				p.GoneRoles = append(p.GoneRoles, name)
				continue
			}
			if !room(r.Bytes()) {
				return
			}
			p.Roles = append(p.Roles, r)
		}
		yield(&p)
	}
}

// With returns the Access that all parts give over this one, which may be nil.
func (a *Access) With(parts []*AccessPart) (*Access, error) {
	if len(parts) == 0 {
		return a, nil
	}
	first := parts[0]
	next := &Access{State: rights.New(), Changed: first.Changed, Key: first.Key}
	switch {
	case first.Full:
	case a == nil:
		return nil, fmt.Errorf("placement: users and roles of index %d over none", first.Changed)
	default:
		next.State = a.State.Clone()
	}
	next.Meta = first.Meta
	next.log.floor = first.Changed
	for _, p := range parts {
		if p.Changed != first.Changed || p.Full != first.Full {
			return nil, fmt.Errorf("placement: parts of users and roles of index %d and index %d", first.Changed, p.Changed)
		}
		for _, name := range p.GoneUsers {
			next.RemoveUser(name)
		}
		for _, name := range p.GoneRoles {
			next.RemoveRole(name)
		}
		for _, u := range p.Users {
			next.PutUser(u)
		}
		for _, r := range p.Roles {
			next.PutRole(r)
		}
	}
	return next, next.Check()
}

// AppendAccessPart appends the form of a part.
func AppendAccessPart(dst []byte, p *AccessPart) []byte {
	dst = AppendBool(dst, p.Full)
	dst = appendAccessMeta(dst, &accessMeta{Meta: p.Meta, Changed: p.Changed, Key: p.Key})
	dst = binary.AppendUvarint(dst, uint64(len(p.Users)))
	for _, u := range p.Users {
		dst = appendUser(dst, u)
	}
	dst = binary.AppendUvarint(dst, uint64(len(p.Roles)))
	for _, r := range p.Roles {
		dst = appendRole(dst, r)
	}
	return appendStrings(appendStrings(dst, p.GoneUsers), p.GoneRoles)
}

// AccessPart reads what AppendAccessPart wrote.
func (r *Reader) AccessPart() AccessPart {
	p := AccessPart{Full: r.Bool()}
	m := r.accessMeta()
	p.Meta, p.Changed, p.Key = m.Meta, m.Changed, m.Key
	for range r.CountUpTo(rights.MaxBytes, 5) {
		u := r.user()
		if !r.OK() {
			return p
		}
		if len(u.Hash) > 0 {
			r.Failf("a hash of user %q", u.Name)
		}
		p.Users = append(p.Users, &u)
	}
	for range r.CountUpTo(rights.MaxBytes, 2) {
		o := r.role()
		if !r.OK() {
			return p
		}
		p.Roles = append(p.Roles, &o)
	}
	p.GoneUsers = r.StringsUpTo(rights.MaxBytes, rights.MaxNameBytes)
	p.GoneRoles = r.StringsUpTo(rights.MaxBytes, rights.MaxNameBytes)
	return p
}

// AccessIndex returns the index at which rights were taken from somebody last.
func (v *View) AccessIndex() keyspace.AccessIndex {
	if v.Access == nil {
		return 0
	}
	return keyspace.AccessIndex(v.Access.Access)
}
