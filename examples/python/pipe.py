#!/usr/bin/env python3
"""A client of Skein's pipe in Python, to be read beside docs/PIPE.md, and a start for your own.

    go run ./api/descriptors > etcd.binpb
    protoc --descriptor_set_in=etcd.binpb -I api --include_imports --descriptor_set_out=pipe.binpb pipepb/pipe.proto
    python3 examples/python/pipe.py pipe.binpb 127.0.0.1:2379

It needs grpcio and protobuf (Debian: python3-grpcio). The messages are made from pipe.binpb at its start, so there is no generated code.
It leaves out what a client for production has: another node when this one stops, deadlines, cancels, logins and TLS.
"""

import sys
import threading
from concurrent.futures import Future

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FRAMING = 6  # the most bytes that an operation takes of a frame beside its own: tag and length
PATIENCE = 60  # seconds until an answer that does not come is an error


def messages(path):
    """Returns a function from the names of messages to their classes, by a descriptor set."""
    pool = descriptor_pool.DescriptorPool()
    with open(path, "rb") as file:
        for described in descriptor_pb2.FileDescriptorSet.FromString(file.read()).file:
            pool.Add(described)
    if hasattr(message_factory, "GetMessageClass"):  # since protobuf 4.22
        make = message_factory.GetMessageClass
    else:
        make = message_factory.MessageFactory(pool).GetPrototype
    return lambda name: make(pool.FindMessageTypeByName("skein.pipe.v1." + name))


class PipeError(Exception):
    """What an operation has failed with: a code of gRPC's and etcd's text."""

    def __init__(self, error):
        super().__init__(error.message)
        self.code = error.code


class Pipe:
    """A pipe to one node. Its methods may be called from many threads."""

    def __init__(self, target, message):
        self.Operation, self.ClientFrame, server_frame = message("Operation"), message("ClientFrame"), message("ServerFrame")
        self.changed = threading.Condition()  # guards all below
        self.queue = []  # operations and their futures that are not sent
        self.under = {}  # size and future of those that are, by their tags
        self.bytes = 0  # the sizes together
        self.tag = 0
        self.closed = False  # nothing more comes into the queue
        self.channel = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)])
        stream = self.channel.stream_stream(
            "/skein.pipe.v1.Pipe/Open", request_serializer=self.ClientFrame.SerializeToString, response_deserializer=server_frame.FromString
        )
        self.frames = stream(self.send())
        self.window = next(self.frames).window  # until now the queue is empty, so nothing is sent
        self.receiver = threading.Thread(target=self.receive)
        self.receiver.start()

    def do(self, **request):
        """Begins an operation, such as put={"key": b"k", "value": b"v"}, and returns the future of its response."""
        operation, future = self.Operation(**request), Future()
        with self.changed:
            if self.closed:
                raise RuntimeError("the pipe is closed, or its node stops: open another one")
            self.tag += 1
            operation.tag = self.tag
            self.queue.append((operation, future))
            self.changed.notify_all()
        return future

    def take(self):
        """Takes from the queue what the window and a frame have room for."""
        taken, frame = [], self.window.frame_bytes if self.queue else 0
        while self.queue and len(self.under) < self.window.operations:
            operation, future = self.queue[0]
            size = operation.ByteSize()
            if size + FRAMING > self.window.frame_bytes:
                future.set_exception(ValueError("the operation fits into no frame"))
            elif size + FRAMING > frame or self.bytes + size > self.window.bytes:
                break
            else:
                frame -= size + FRAMING
                self.bytes += size
                self.under[operation.tag] = size, future
                taken.append(operation)
            del self.queue[0]
        return taken

    def send(self):
        """Yields frames of all that there is. What comes while gRPC sends one joins the next."""
        while True:
            with self.changed:
                operations = self.take()
                while not operations and not (self.closed and not self.queue):
                    self.changed.wait()
                    operations = self.take()
            if not operations:
                return  # so the client's side is closed
            yield self.ClientFrame(operations=operations)

    def receive(self):
        """Gives answers to their futures, in whatever order they come."""
        why = RuntimeError("the node has ended the pipe")
        try:
            for frame in self.frames:
                for answer in frame.answers:
                    with self.changed:
                        size, future = self.under.pop(answer.tag)
                        self.bytes -= size
                        self.changed.notify_all()
                    kind = answer.WhichOneof("answer")
                    if kind == "error":
                        future.set_exception(PipeError(answer.error))
                    else:
                        future.set_result(getattr(answer, kind))
                if frame.closing:
                    self.leave()
        except grpc.RpcError as error:
            why = error
        self.leave()
        with self.changed:  # a change that was sent may have happened
            futures = [future for _, future in self.queue] + [future for _, future in self.under.values()]
            self.queue, self.under = [], {}
            self.changed.notify_all()
        for future in futures:
            future.set_exception(why)

    def leave(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def close(self):
        """Ends the pipe once all is answered."""
        self.leave()
        self.receiver.join()
        self.channel.close()


def main(descriptors, target):
    pipe = Pipe(target, messages(descriptors))
    print(f"at most {pipe.window.operations} operations of {pipe.window.bytes} bytes under way")
    put = pipe.do(put={"key": b"greeting", "value": b"hello"}).result(PATIENCE)
    got = pipe.do(range={"key": b"greeting"}).result(PATIENCE)
    assert got.kvs[0].value == b"hello" and got.kvs[0].mod_revision == put.header.revision, got

    # More puts at a time than the window has room for. Each future has the answer to its own, so all revisions differ.
    came, futures = [], {}
    for i in range(2000):
        futures[i] = pipe.do(put={"key": b"job/%04d" % i, "value": b"%d" % i})
        futures[i].add_done_callback(lambda _, i=i: came.append(i))
    revisions = {future.result(PATIENCE).header.revision for future in futures.values()}
    assert len(revisions) == 2000, len(revisions)
    reads = [pipe.do(range={"key": b"job/%04d" % i}) for i in range(2000)]
    assert [int(read.result(PATIENCE).kvs[0].value) for read in reads] == list(range(2000))
    print(f"{sum(a > b for a, b in zip(came, came[1:]))} of 2000 answers came before one to an earlier put")

    # A list in pages, all at the revision of the first.
    keys, key, revision, more = [], b"job/", 0, True
    while more:
        page = pipe.do(range={"key": key, "range_end": b"job0", "limit": 300, "revision": revision, "keys_only": True}).result(PATIENCE)
        keys += [kv.key for kv in page.kvs]
        key, revision, more = page.kvs[-1].key + b"\0", revision or page.header.revision, page.more
    assert len(keys) == 2000 and keys == sorted(keys), len(keys)

    absent = {"key": b"lock", "target": "VERSION", "result": "EQUAL", "version": 0}
    lock = {"compare": [absent], "success": [{"request_put": {"key": b"lock", "value": b"mine"}}]}
    assert [pipe.do(txn=lock).result(PATIENCE).succeeded for _ in range(2)] == [True, False]
    swap = {"mod_revision": put.header.revision, "put": {"key": b"greeting", "value": b"good day"}}
    assert pipe.do(compare_and_put=swap).result(PATIENCE).succeeded
    again = pipe.do(compare_and_put=swap).result(PATIENCE)
    assert not again.succeeded and again.responses[0].response_range.kvs[0].value == b"good day", again

    # An error is that of one operation, and the pipe goes on.
    try:
        pipe.do(put={"value": b"without a key"}).result(PATIENCE)
        raise AssertionError("a put without a key is answered")
    except PipeError as error:
        print(f"a put without a key: {grpc.StatusCode.INVALID_ARGUMENT.value[0] == error.code}, {error}")
    assert pipe.do(delete_range={"key": b"lock"}).result(PATIENCE).deleted == 1
    pipe.close()
    print("all is well")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: pipe.py PIPE.BINPB HOST:PORT")
    main(*sys.argv[1:])
