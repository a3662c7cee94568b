package shard

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	"github.com/skeindb/skein/kverror"
	"github.com/skeindb/skein/rangeapi"
)

// The stories' requests, one per line, words separated by blanks:
//
//	put KEY [VALUE] [prev] [lease=N] [ignore-value] [ignore-lease]
//	del KEY [END] [prev]
//	get KEY [END] [limit=N] [rev=N] [count] [keys] [serializable]
//	    [sort=key|version|create|mod|value] [order=asc|desc] [min-mod=N] [max-mod=N] [min-create=N] [max-create=N]
//	txn [if ( COMPARE , ... )] [then ( OP ; ... )] [else ( OP ; ... )]
//
// OP is one of these requests, "empty" an operation without one. COMPARE is TARGET
// KEY[..END] = != < > WHAT with TARGET version, create, mod, value or lease. A key or end ∞ is
// "\x00", "" is the empty key.
type parser struct{ words []string }

func parseRequest(line string) proto.Message {
	p := &parser{strings.Fields(line)}
	op := p.request()
	if len(p.words) > 0 {
		panic(fmt.Sprintf("left over: %q", p.words))
	}
	return op
}

func (p *parser) peek() string {
	if len(p.words) == 0 {
		return ""
	}
	return p.words[0]
}

func (p *parser) next() string {
	w := p.peek()
	if w == "" {
		panic("request ends early")
	}
	p.words = p.words[1:]
	return w
}

// ends says whether the request ends here.
func (p *parser) ends() bool {
	w := p.peek()
	return w == "" || w == ";" || w == ")" || w == ","
}

func word(w string) []byte {
	switch w {
	case "∞":
		return []byte{0}
	case `""`:
		return nil
	}
	return []byte(w)
}

func (p *parser) request() proto.Message {
	switch verb := p.next(); verb {
	case "put":
		return p.put()
	case "del":
		d := &pb.DeleteRangeRequest{Key: word(p.next())}
		for !p.ends() {
			if w := p.next(); w == "prev" {
				d.PrevKv = true
			} else {
				d.RangeEnd = word(w)
			}
		}
		return d
	case "get":
		return p.get()
	case "txn":
		return p.txn()
	default:
		panic("unknown request " + verb)
	}
}

func (p *parser) put() proto.Message {
	r := &pb.PutRequest{Key: word(p.next())}
	for !p.ends() {
		w := p.next()
		switch {
		case w == "prev":
			r.PrevKv = true
		case w == "ignore-value":
			r.IgnoreValue = true
		case w == "ignore-lease":
			r.IgnoreLease = true
		case strings.HasPrefix(w, "lease="):
			r.Lease = number(w)
		default:
			r.Value = word(w)
		}
	}
	return r
}

func number(w string) int64 {
	_, n, _ := strings.Cut(w, "=")
	v, err := strconv.ParseInt(n, 10, 64)
	if err != nil {
		panic(err)
	}
	return v
}

func (p *parser) get() proto.Message {
	r := &pb.RangeRequest{Key: word(p.next())}
	for !p.ends() {
		w := p.next()
		name, value, has := strings.Cut(w, "=")
		switch {
		case w == "count":
			r.CountOnly = true
		case w == "keys":
			r.KeysOnly = true
		case w == "serializable":
			r.Serializable = true
		case !has:
			r.RangeEnd = word(w)
		case name == "limit":
			r.Limit = number(w)
		case name == "rev":
			r.Revision = number(w)
		case name == "sort":
			r.SortTarget = pb.RangeRequest_SortTarget(pb.RangeRequest_SortTarget_value[strings.ToUpper(value)])
		case name == "order":
			r.SortOrder = map[string]pb.RangeRequest_SortOrder{"asc": pb.RangeRequest_ASCEND, "desc": pb.RangeRequest_DESCEND, "bad": 9}[value]
		case name == "min-mod":
			r.MinModRevision = number(w)
		case name == "max-mod":
			r.MaxModRevision = number(w)
		case name == "min-create":
			r.MinCreateRevision = number(w)
		case name == "max-create":
			r.MaxCreateRevision = number(w)
		default:
			panic("unknown option " + w)
		}
	}
	return r
}

func (p *parser) txn() *pb.TxnRequest {
	t := &pb.TxnRequest{}
	for {
		switch p.peek() {
		case "if":
			p.next()
			p.list(",", func() { t.Compare = append(t.Compare, p.compare()) })
		case "then":
			p.next()
			p.list(";", func() { t.Success = append(t.Success, p.op()) })
		case "else":
			p.next()
			p.list(";", func() { t.Failure = append(t.Failure, p.op()) })
		default:
			return t
		}
	}
}

func (p *parser) list(sep string, item func()) {
	if w := p.next(); w != "(" {
		panic("want (, got " + w)
	}
	for p.peek() != ")" {
		item()
		if p.peek() == sep {
			p.next()
		}
	}
	p.next()
}

func (p *parser) op() *pb.RequestOp {
	if p.peek() == "empty" {
		p.next()
		return &pb.RequestOp{}
	}
	switch r := p.request().(type) {
	case *pb.RangeRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}}
	case *pb.PutRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: r}}
	case *pb.DeleteRangeRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: r}}
	case *pb.TxnRequest:
		return &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: r}}
	}
	panic("no operation")
}

func (p *parser) compare() *pb.Compare {
	target := p.next()
	key, end, _ := strings.Cut(p.next(), "..")
	c := &pb.Compare{
		Key: word(key), RangeEnd: word(end),
		Target: pb.Compare_CompareTarget(pb.Compare_CompareTarget_value[strings.ToUpper(target)]),
		Result: map[string]pb.Compare_CompareResult{
			"=": pb.Compare_EQUAL, "!=": pb.Compare_NOT_EQUAL, "<": pb.Compare_LESS, ">": pb.Compare_GREATER,
		}[p.next()],
	}
	what := p.next()
	if target == "value" {
		c.TargetUnion = &pb.Compare_Value{Value: word(what)}
		return c
	}
	n := number("=" + what)
	switch target {
	case "version":
		c.TargetUnion = &pb.Compare_Version{Version: n}
	case "create":
		c.TargetUnion = &pb.Compare_CreateRevision{CreateRevision: n}
	case "mod":
		c.TargetUnion = &pb.Compare_ModRevision{ModRevision: n}
	case "lease":
		c.TargetUnion = &pb.Compare_Lease{Lease: n}
	}
	return c
}

// formatAnswer prints what a caller got.
func formatAnswer(p *rangeapi.Response, err error) string {
	if err != nil {
		e := kverror.Of(err)
		s := "error " + e.Kind.Error()
		if e.Fate() == kverror.Unknown {
			s += " (fate unknown)"
		}
		if e.Retry() == kverror.RetryRouter {
			s += " (rerouted)"
		}
		if errors.Is(err, kverror.Compacted) {
			s += fmt.Sprintf(" %d", e.CompactRevision)
		}
		return s
	}
	return formatResponse(p.Op)
}

func formatResponse(op proto.Message) string {
	switch o := op.(type) {
	case *pb.RangeResponse:
		s := fmt.Sprintf("get@%d", o.GetHeader().GetRevision())
		for _, kv := range o.Kvs {
			s += " " + formatKV(kv)
		}
		s += fmt.Sprintf(" count=%d", o.Count)
		if o.More {
			s += " more"
		}
		return s
	case *pb.PutResponse:
		return fmt.Sprintf("put@%d%s", o.GetHeader().GetRevision(), formatPrev(o.PrevKv))
	case *pb.DeleteRangeResponse:
		return fmt.Sprintf("del@%d %d%s", o.GetHeader().GetRevision(), o.Deleted, formatPrev(o.PrevKvs...))
	case *pb.TxnResponse:
		s := fmt.Sprintf("txn@%d %t (", o.GetHeader().GetRevision(), o.Succeeded)
		for i, r := range o.Responses {
			if i > 0 {
				s += " ; "
			}
			switch x := r.Response.(type) {
			case *pb.ResponseOp_ResponseRange:
				s += formatResponse(x.ResponseRange)
			case *pb.ResponseOp_ResponsePut:
				s += formatResponse(x.ResponsePut)
			case *pb.ResponseOp_ResponseDeleteRange:
				s += formatResponse(x.ResponseDeleteRange)
			case *pb.ResponseOp_ResponseTxn:
				s += formatResponse(x.ResponseTxn)
			default:
				s += "nothing"
			}
		}
		return s + ")"
	}
	return fmt.Sprintf("%T", op)
}

func formatKV(kv *mvccpb.KeyValue) string {
	s := fmt.Sprintf("%s=%s{mod=%d create=%d version=%d", kv.Key, kv.Value, kv.ModRevision, kv.CreateRevision, kv.Version)
	if kv.Lease != 0 {
		s += fmt.Sprintf(" lease=%d", kv.Lease)
	}
	return s + "}"
}

func formatPrev(kvs ...*mvccpb.KeyValue) string {
	s := ""
	for _, kv := range kvs {
		if kv != nil {
			s += " prev " + formatKV(kv)
		}
	}
	return s
}
