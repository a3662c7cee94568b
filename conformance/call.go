package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"github.com/google/go-cmp/cmp"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/testing/protocmp"
)

// call is one call: unary, or a stream that ends when all of it has arrived.
type call struct {
	kind    *kind
	request proto.Message
	// user is as whom it is made, where there are users; "" is nobody.
	user string
	// byPipe has it go to Skein by a pipe, if one can carry it. Once it is made, it says whether it went there.
	byPipe bool
}

// String shows the call for a report: large values are cut.
func (c *call) String() string {
	as := ""
	if c.user != "" {
		as = fmt.Sprintf(" as %q", c.user)
	}
	if c.byPipe {
		as += " by the pipe"
	}
	return fmt.Sprintf("%s{%s}%s", c.kind.name, short(c.request), as)
}

// answer is a store's answer: a response, or an error by its code and text.
type answer struct {
	response proto.Message // nil with an error
	code     codes.Code
	text     string // of an error, or of any answer that came as JSON
}

// do makes the call and returns the answer unchanged.
func do(ctx context.Context, conn *grpc.ClientConn, c *call) answer {
	if c.kind.do != nil {
		return c.kind.do(ctx, conn, c.request)
	}
	resp := c.kind.response()
	invoke := c.kind.invoke
	if invoke == nil {
		invoke = func(ctx context.Context, conn *grpc.ClientConn, req, resp proto.Message) error {
			return conn.Invoke(ctx, c.kind.method, req, resp)
		}
	}
	if err := invoke(ctx, conn, c.request, resp); err != nil {
		return failed(err)
	}
	return answer{response: resp}
}

// failed is the answer of an error.
func failed(err error) answer {
	s := status.Convert(err)
	return answer{code: s.Code(), text: s.Message()}
}

// rangeStream makes a RangeStream and returns the response that its parts form.
func rangeStream(ctx context.Context, conn *grpc.ClientConn, req proto.Message) answer {
	stream, err := pb.NewKVClient(conn).RangeStream(ctx, req.(*pb.RangeRequest))
	if err != nil {
		return failed(err)
	}
	all := &pb.RangeResponse{}
	for ended := false; ; {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if !ended {
				return answer{text: "conformance: a stream without a last part"}
			}
			return answer{response: all}
		}
		if err != nil {
			return failed(err)
		}
		r := part.GetRangeResponse()
		if ended || r.GetHeader() == nil && (r.GetMore() || r.GetCount() != 0 || len(r.GetKvs()) == 0) {
			return answer{text: fmt.Sprintf("conformance: a part that says %s, the last has come: %v", short(r), ended)}
		}
		ended = r.GetHeader() != nil
		proto.Merge(all, r)
	}
}

// String shows the answer for a report.
func (a answer) String() string {
	if a.response == nil {
		return fmt.Sprintf("error %s %q", a.code, a.text)
	}
	return short(a.response)
}

// normalised are the header fields that differ between two clusters. The comparison
// ignores their values, but not whether they are set. It ignores nothing else,
// anywhere.
var normalised = []protoreflect.Name{"cluster_id", "member_id", "raft_term"}

// normalise returns the answer with every set field of normalised replaced by 1, and
// settled.
func normalise(a answer) answer {
	if a.response == nil {
		return a
	}
	a.response = proto.Clone(a.response)
	settled(a.response)
	m := a.response.ProtoReflect()
	field := m.Descriptor().Fields().ByName("header")
	if field == nil || !m.Has(field) {
		return a
	}
	header := m.Mutable(field).Message()
	for _, name := range normalised {
		if f := header.Descriptor().Fields().ByName(name); header.Has(f) {
			header.Set(f, protoreflect.ValueOfUint64(1))
		}
	}
	return a
}

// compare returns how Skein's answer differs from etcd's, "" if it does not.
func compare(etcd, skein answer) string {
	etcd, skein = normalise(etcd), normalise(skein)
	if (etcd.response == nil) != (skein.response == nil) || etcd.code != skein.code || etcd.text != skein.text {
		return fmt.Sprintf("  etcd:  %s\n  Skein: %s\n  %s\n  %s\n", etcd, skein, cut(etcd.text, shownBytes), cut(skein.text, shownBytes))
	}
	if etcd.response == nil || proto.Equal(etcd.response, skein.response) {
		return ""
	}
	diff := cmp.Diff(etcd.response, skein.response, protocmp.Transform())
	return fmt.Sprintf("  etcd:  %s\n  Skein: %s\n  difference (-etcd +Skein):\n%s", etcd, skein, cut(diff, 8<<10))
}

// shownBytes is how much of a message is shown in a report.
const shownBytes = 4 << 10

func short(m proto.Message) string {
	text := strings.TrimSpace(prototext.MarshalOptions{}.Format(m))
	return cut(padding.ReplaceAllStringFunc(text, func(s string) string { return fmt.Sprintf("%s…(%d)", s[:1], len(s)) }), shownBytes)
}

// padding is the content of large fields from the generators.
var padding = regexp.MustCompile(`v{9,}|k{9,}|B{9,}|K{9,}`)

func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return fmt.Sprintf("%s … (%d bytes)", s[:n], len(s))
}
