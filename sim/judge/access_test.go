package judge

import (
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
)

// accessScript is a history of one user, made by hand. Each step takes a second.
type accessScript struct {
	*script
	a *Access
}

func (s *accessScript) moment() Moment {
	s.at += time.Second
	return Moment{s.h.tick.Add(1), s.at}
}

// allowedTo is a script in which the user u has the password 2, and may write the groups.
func allowedTo(groups ...byte) *accessScript {
	s := &accessScript{newScript(), &Access{}}
	s.a.Off = []*Fact{{MustNot: s.moment(), MayNot: s.moment()}}
	s.a.Identities = []*Identity{{NewFact(s.moment(), s.moment()), "u", 2}}
	for _, g := range groups {
		s.a.Rights.Rights = append(s.a.Rights.Rights, &Right{NewFact(s.moment(), s.moment()), "u", g, true})
	}
	s.a.told = []Told{{Actor{"u", 2}, 1, 'c', 1, s.moment()}}
	return s
}

// done is an operation of the user, which the client begins now. More happens before it is over.
func (s *accessScript) done(req, resp proto.Message, err error, meanwhile func()) {
	s.moment()
	o := s.h.Begin(300, 1, req, s.at)
	s.now.rev++
	rev := s.now.rev
	if meanwhile != nil {
		meanwhile()
	}
	s.moment()
	if err == nil {
		setRevision(resp, rev)
	}
	s.h.End(o, resp, err, false, s.at)
	s.a.ops = append(s.a.ops, UserOp{o, Actor{"u", 2}})
}

// others is a change of another client.
func (s *accessScript) others() {
	o := s.h.Begin(1, 1, &pb.PutRequest{Key: []byte("z0")}, s.at)
	s.now.rev++
	resp := &pb.PutResponse{}
	setRevision(resp, s.now.rev)
	s.h.End(o, resp, nil, false, s.at)
}

// revoke ends a right: asked for and acknowledged.
func (s *accessScript) revoke(f *Fact) { f.MustNot, f.MayNot = s.moment(), s.moment() }

func TestCheckAccess(t *testing.T) {
	put := func(key string) proto.Message { return &pb.PutRequest{Key: []byte(key), Value: []byte("v")} }
	read := func(serializable bool) proto.Message {
		return &pb.RangeRequest{Key: []byte("c"), RangeEnd: []byte("c9"), Serializable: serializable}
	}
	for _, c := range []struct {
		name string
		make func(s *accessScript)
		want string
	}{
		{"all is right", func(s *accessScript) {
			s.done(put("c0"), &pb.PutResponse{}, nil, nil)
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.done(put("c0"), nil, kverror.PermissionDenied, nil)
		}, ""},
		{"the right is taken while the answer is under way", func(s *accessScript) {
			s.done(put("c0"), &pb.PutResponse{}, nil, func() { s.revoke(&s.a.Rights.Rights[0].Fact) })
		}, ""},
		{"a revision after the acknowledgement", func(s *accessScript) {
			s.done(put("c0"), &pb.PutResponse{}, nil, func() {
				s.revoke(&s.a.Rights.Rights[0].Fact)
			})
			last := s.a.ops[len(s.a.ops)-1]
			s.others()
			o := s.h.Ops()[1]
			o.Response, last.Response = last.Response, o.Response // the other change has the lower revision
		}, "had not the right from"},
		{"a change without a right", func(s *accessScript) { s.done(put("f0"), &pb.PutResponse{}, nil, nil) }, "had not the right from"},
		{"an old password", func(s *accessScript) {
			s.revoke(&s.a.Identities[0].Fact)
			s.done(put("c0"), &pb.PutResponse{}, nil, nil)
		}, "had not the right from"},
		{"checks are off", func(s *accessScript) {
			f := NewFact(s.moment(), s.moment())
			s.a.Off = append(s.a.Off, &f)
			s.done(put("f0"), &pb.PutResponse{}, nil, nil)
		}, ""},
		{"a serializable read by a right that is gone", func(s *accessScript) {
			s.done(read(true), &pb.RangeResponse{}, nil, func() { s.revoke(&s.a.Rights.Rights[0].Fact) })
		}, "had not the right when this was answered"},
		{"a linearizable read by it", func(s *accessScript) {
			s.done(read(false), &pb.RangeResponse{}, nil, func() { s.revoke(&s.a.Rights.Rights[0].Fact) })
		}, ""},
		{"an event by a right that is gone", func(s *accessScript) {
			s.done(read(false), &pb.RangeResponse{}, nil, nil)
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.a.told = append(s.a.told, Told{Actor{"u", 2}, 1, 'c', 9, s.moment()})
		}, "a watcher without the right"},
		{"a right is denied", func(s *accessScript) { s.done(put("c0"), nil, kverror.PermissionDenied, nil) }, "had the right, and was denied"},
		{"a right is denied while it is taken", func(s *accessScript) {
			s.done(put("c0"), nil, kverror.PermissionDenied, func() { s.revoke(&s.a.Rights.Rights[0].Fact) })
		}, ""},
		{"a password is refused", func(s *accessScript) {
			s.done(read(false), &pb.RangeResponse{}, nil, nil)
			s.a.logins = append(s.a.logins, Login{Actor{"u", 2}, 1, s.moment(), s.moment(), false, true})
		}, "is the password of the user, and was refused"},
		{"a login with an old password", func(s *accessScript) {
			s.done(read(false), &pb.RangeResponse{}, nil, nil)
			s.revoke(&s.a.Identities[0].Fact)
			s.a.logins = append(s.a.logins, Login{Actor{"u", 2}, 1, s.moment(), s.moment(), true, false})
		}, "this is no password of the user"},
		{"a far answer to a right that is taken meanwhile", func(s *accessScript) {
			s.a.Remote = true
			s.done(read(true), &pb.RangeResponse{}, nil, func() { s.revoke(&s.a.Rights.Rights[0].Fact) })
		}, ""},
		{"a far read that was asked for too late", func(s *accessScript) {
			s.a.Remote = true
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.done(read(true), &pb.RangeResponse{}, nil, nil)
		}, "had not the right when this was answered"},
		{"that read at a node whose clock may stand still", func(s *accessScript) {
			s.a.Remote, s.a.PausedClocks = true, true
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.done(read(true), &pb.RangeResponse{}, nil, nil)
		}, ""},
		{"a change that was asked for too late there", func(s *accessScript) {
			s.a.Remote, s.a.PausedClocks = true, true
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.done(put("c0"), &pb.PutResponse{}, nil, nil)
		}, "had not the right from"},
		{"a far event that is older than the acknowledgement", func(s *accessScript) {
			s.a.Remote = true
			s.done(read(false), &pb.RangeResponse{}, nil, nil)
			s.others()
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.a.told = append(s.a.told, Told{Actor{"u", 2}, 1, 'c', s.now.rev, s.moment()})
		}, ""},
		{"a far event that is younger", func(s *accessScript) {
			s.a.Remote = true
			s.done(read(false), &pb.RangeResponse{}, nil, nil)
			s.revoke(&s.a.Rights.Rights[0].Fact)
			s.others()
			s.a.told = append(s.a.told, Told{Actor{"u", 2}, 1, 'c', s.now.rev + 1, s.moment()})
		}, "a watcher without the right"},
		{"nothing happened", func(*accessScript) {}, "missed its purpose"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := allowedTo('c')
			c.make(s)
			bad := strings.Join(checkAccess(s.a, s.h.Ops(), nil), "\n")
			if (bad == "") != (c.want == "") || !strings.Contains(bad, c.want) {
				t.Errorf("found %q, want %q", bad, c.want)
			}
		})
	}
}
