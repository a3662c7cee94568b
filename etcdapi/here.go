package etcdapi

import (
	"context"
	"fmt"
	"net"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/api/adminpb"
)

// fromHere returns an error where a request comes from elsewhere, and so may not command a cluster that knows no
// users. A user of this machine could as well stop the node. Somebody has given a certificate to its owner.
// An address counts only if it is one of this machine's loopback, or of the program that the node is a part of. The JSON
// gateway's connections are within the process too, but stand for clients from everywhere.
func (s *Server) fromHere(ctx context.Context, what wish) error {
	if s.opts.Users.InsecureAdmin {
		return nil
	}
	p, ok := peer.FromContext(ctx)
	if !ok {
		return elsewhere("an unknown address", what)
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.VerifiedChains) > 0 {
		return nil
	}
	switch a := p.Addr.(type) {
	case *net.UnixAddr, insideAddr:
		return nil
	case *net.TCPAddr:
		if a.IP.IsLoopback() {
			return nil
		}
	}
	return elsewhere(p.Addr.String(), what)
}

// wish is a call that is permitted from here alone: what a caller from elsewhere is told, and what to do next.
type wish struct{ reason, next string }

var (
	commands = wish{"checks no users, so %s may not change it or make a debug bundle of it", "let users be checked and give --user root (etcdctl user add root, then etcdctl auth enable), " +
		"or start the node with --insecure-admin, by which everybody who reaches its client port may command the cluster"}
	readsLoad = wish{"is being loaded and checks no users yet, so %s may not read it", "wait for the end of the load, " +
		"or start the node with --insecure-admin, by which everybody who reaches its client port may command the cluster"}
)

// elsewhere names the ways to permit the request. They come in two halves too, as skein's commands show them.
func elsewhere(address string, what wish) error {
	r := &adminpb.Refusal{
		Reason:   fmt.Sprintf("this cluster "+what.reason+": only loopback, unix sockets and clients with a certificate may", address),
		NextStep: what.next,
	}
	plain := status.New(codes.PermissionDenied, r.Reason+"; "+r.NextStep)
	if st, err := plain.WithDetails(r); err == nil {
		return st.Err()
	}
	return plain.Err()
}
