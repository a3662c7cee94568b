// Package rawwatch has watchers that read the bytes of a response in place. clientv3, and protobuf's structures alone, cost more
// for each event than a server does, on the same machine. Both sides are read alike, and each watcher checks that its
// revisions ascend.
package rawwatch

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Fields of WatchResponse, Event and KeyValue that are read.
const (
	fieldWatchID  = 2
	fieldCreated  = 3
	fieldCanceled = 4
	fieldReason   = 6
	fieldEvents   = 11

	fieldKV          = 2
	fieldModRevision = 3
	fieldValue       = 5
)

// answer is the decoded part of a WatchResponse. Its events stay parts of the
// message.
type answer struct {
	id                int64
	created, canceled bool
	reason            string
	events            [][]byte
}

// EachField calls f with the fields of a message: with a varint's value, or with the
// bytes of a field with a length.
func EachField(b []byte, f func(n protowire.Number, v uint64, bytes []byte) error) error {
	for len(b) > 0 {
		n, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			return protowire.ParseError(size)
		}
		b = b[size:]
		var v uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			v, size = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			bytes, size = protowire.ConsumeBytes(b)
		default:
			size = protowire.ConsumeFieldValue(n, kind, b)
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		b = b[size:]
		if err := f(n, v, bytes); err != nil {
			return err
		}
	}
	return nil
}

// parse decodes a response and forgets the one before.
func (a *answer) parse(b []byte) error {
	*a = answer{events: a.events[:0]}
	return EachField(b, func(n protowire.Number, v uint64, bytes []byte) error {
		switch int(n) {
		case fieldWatchID:
			a.id = int64(v)
		case fieldCreated:
			a.created = v != 0
		case fieldCanceled:
			a.canceled = v != 0
		case fieldReason:
			a.reason = string(bytes)
		case fieldEvents:
			a.events = append(a.events, bytes)
		}
		return nil
	})
}

// parseEvent reads an event's revision and value.
func parseEvent(b []byte) (mod int64, value []byte, err error) {
	err = EachField(b, func(n protowire.Number, _ uint64, kv []byte) error {
		if int(n) != fieldKV {
			return nil
		}
		return EachField(kv, func(n protowire.Number, v uint64, bytes []byte) error {
			switch int(n) {
			case fieldModRevision:
				mod = int64(v)
			case fieldValue:
				value = bytes
			}
			return nil
		})
	})
	return mod, value, err
}

// A Watch is a stream of watchers.
type Watch struct {
	stream grpc.ClientStream
	answer answer
	// last is each watcher's last revision, by its id: both sides count ids from 0.
	last []int64
	// take is called with each message that has events, after event has been called with
	// each of them.
	take  func(events int)
	event func(value []byte)
}

var (
	errOrder    = errors.New("watch: revisions do not ascend")
	errCanceled = errors.New("watch: canceled")
)

// Connect makes a connection to a client URL.
func Connect(endpoint string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient(strings.TrimPrefix(endpoint, "http://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	return conn, nil
}

// Open opens a stream and n watchers on it, and returns when all are created. take
// and event must not keep their arguments.
func Open(ctx context.Context, conn *grpc.ClientConn, request *pb.WatchCreateRequest, n int, take func(int), event func([]byte)) (*Watch, error) {
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, pb.Watch_Watch_FullMethodName,
		grpc.ForceCodecV2(codec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32))
	if err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	w := &Watch{stream: stream, last: make([]int64, n), take: take, event: event}
	for range n {
		if err := stream.SendMsg(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: request}}); err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
	}
	for made := 0; made < n; {
		if err := stream.RecvMsg(w); err != nil {
			return nil, fmt.Errorf("watch: %w", err)
		}
		if w.answer.created {
			made++
		}
	}
	return w, nil
}

// Receive reads until the stream ends.
func (w *Watch) Receive() error {
	for {
		if err := w.stream.RecvMsg(w); err != nil {
			return err
		}
	}
}

// read takes a message.
func (w *Watch) read(b []byte) error {
	if err := w.answer.parse(b); err != nil {
		return err
	}
	if w.answer.canceled {
		return fmt.Errorf("%w: %s", errCanceled, w.answer.reason)
	}
	if len(w.answer.events) == 0 {
		return nil
	}
	id := w.answer.id
	if id < 0 || id >= int64(len(w.last)) {
		return fmt.Errorf("watch: events of watcher %d of %d", id, len(w.last))
	}
	for _, e := range w.answer.events {
		mod, value, err := parseEvent(e)
		if err != nil {
			return err
		}
		if mod <= w.last[id] {
			return fmt.Errorf("%w: %d behind %d", errOrder, mod, w.last[id])
		}
		w.last[id] = mod
		w.event(value)
	}
	w.take(len(w.answer.events))
	return nil
}

// codec passes the bytes of received messages to a Watch.
type codec struct{}

// Name is that of gRPC's own codec: the bytes are the same.
func (codec) Name() string { return "proto" }

// Marshal encodes a request.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("watch: %T is no message", v)
	}
	b, err := proto.Marshal(m)
	return mem.BufferSlice{mem.SliceBuffer(b)}, err
}

// Unmarshal passes a message to a Watch, which no longer uses it after the call.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	w, ok := v.(*Watch)
	if !ok {
		return fmt.Errorf("watch: %T takes no messages", v)
	}
	b := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer b.Free()
	return w.read(b.ReadOnlyData())
}
