package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// jsonKinds are the calls by HTTP and JSON, of the kinds that clients use.
var jsonKinds = []*kind{
	overJSON("Range", "/v3/kv/range", 3),
	overJSON("Put", "/v3/kv/put", 2),
	overJSON("DeleteRange", "/v3/kv/deleterange", 1),
	overJSON("Txn", "/v3/kv/txn", 3),
	overJSON("LeaseTimeToLive", "/v3/lease/timetolive", 1),
	overJSON("LeaseRevoke", "/v3beta/kv/lease/revoke", 1),
	overJSON("LeaseKeepAlive", "/v3/lease/keepalive", 1),
}

// jsonMaxBytes is the size limit of a generated JSON request: a little more than gRPC
// accepts. Skein refuses a body far above it before it has read it, with its own text
// (docs/CONFORMANCE.md).
const jsonMaxBytes = maxRequestBytes + grpcOverheadBytes + 1<<10

// jsonClients are the clients of the gateways that make JSON calls, by host. Each keeps a connection for each call at
// a time.
var jsonClients sync.Map

// clientOf returns the client for a gateway.
func clientOf(host string) *http.Client {
	c, _ := jsonClients.LoadOrStore(host, &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}})
	return c.(*http.Client)
}

// hostOf is HOST:PORT of a gateway.
func hostOf(conn *grpc.ClientConn) string {
	return strings.TrimPrefix(conn.Target(), "passthrough:///")
}

// forget closes a gateway's connections of JSON calls, also those that are still dialled. A call that has ended sends
// nothing. But etcd waits for the first byte of each connection, also when it stops.
func forget(host string) {
	if c, ok := jsonClients.LoadAndDelete(host); ok {
		c.(*http.Client).CloseIdleConnections()
	}
}

// overJSON returns a kind that makes the calls of another kind, found by name, by
// posting them to the path.
func overJSON(of, path string, weight int) *kind {
	k := &kind{name: "JSON " + of, weight: weight}
	for _, base := range append(append([]*kind{}, kvKinds...), leaseKinds...) {
		if base.name != of {
			continue
		}
		k.alone = base.alone
		k.generate = func(s *source) proto.Message {
			r := base.generate(s)
			for proto.Size(r) > jsonMaxBytes {
				r = base.generate(s)
			}
			if read, ok := r.(*pb.RangeRequest); ok {
				read.Serializable = false // asOf compares messages, not texts
			}
			return r
		}
		k.do = func(ctx context.Context, conn *grpc.ClientConn, req proto.Message) answer {
			return post(ctx, hostOf(conn), path, req, base.response(), false)
		}
		return k
	}
	panic(fmt.Sprintf("conformance: no kind has the name %q", of))
}

// post posts the request as JSON. The answer has the received text, with the header's
// normalised fields made equal, and the response in it, if it is one. Of an endless answer
// it is the first response.
func post(ctx context.Context, host, path string, req, resp proto.Message, endless bool) answer {
	broken := func(err error) answer { return answer{code: codes.Internal, text: "conformance: " + err.Error()} }
	body, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(req)
	if err != nil {
		return broken(err)
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+host+path, bytes.NewReader(body))
	if err != nil {
		return broken(err)
	}
	r.Header.Set("Content-Type", "application/json")
	if token, ok := tokenOf(ctx); ok {
		r.Header.Set("Authorization", token)
	}
	got, err := clientOf(host).Do(r)
	if err != nil {
		return broken(err)
	}
	defer got.Body.Close()
	from := io.Reader(got.Body)
	if !endless {
		raw, err := io.ReadAll(got.Body)
		if err != nil {
			return broken(err)
		}
		from = bytes.NewReader(raw)
	}
	return heard(from, got.StatusCode, got.Header.Get("Content-Type"), resp)
}

// heard is the answer that the first JSON value from r is.
func heard(r io.Reader, code int, content string, resp proto.Message) answer {
	broken := func(err error) answer { return answer{code: codes.Internal, text: "conformance: " + err.Error()} }
	var raw json.RawMessage
	var all any
	err := json.NewDecoder(r).Decode(&raw)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(raw))
		d.UseNumber()
		err = d.Decode(&all)
	}
	if err != nil {
		return broken(fmt.Errorf("HTTP %d, %q: %w", code, cut(string(raw), shownBytes), err))
	}
	inner := all
	fields, _ := all.(map[string]any)
	if fields["result"] != nil {
		inner = fields["result"] // of a stream
	}
	a := answer{}
	if code == http.StatusOK && fields["error"] == nil {
		message, err := json.Marshal(inner)
		if err == nil {
			err = protojson.Unmarshal(message, resp)
		}
		if err != nil {
			return broken(fmt.Errorf("%q: %w", cut(string(raw), shownBytes), err))
		}
		a.response = resp
	}
	alike(inner, resp)
	text, err := json.Marshal(all)
	if err != nil {
		return broken(err)
	}
	a.text = fmt.Sprintf("HTTP %d, %s: %s", code, content, text)
	return a
}

// alike makes equal in a JSON response what normalise and settled make equal in a
// message.
func alike(of any, resp proto.Message) {
	m, ok := of.(map[string]any)
	if !ok {
		return
	}
	if header, ok := m["header"].(map[string]any); ok {
		for _, name := range normalised {
			if _, has := header[string(name)]; has {
				header[string(name)] = "1"
			}
		}
	}
	if ttl, ok := resp.(*pb.LeaseTimeToLiveResponse); ok && m["TTL"] != nil {
		settled(ttl)
		m["TTL"], m["keys"] = fmt.Sprint(ttl.GetTTL()), fmt.Sprintf("%q", ttl.GetKeys())
	}
}
