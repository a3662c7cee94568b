package node_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"
)

// limitFiles has a process start with a limit of open files.
func (p *process) limitFiles(limit int) {
	p.args = append([]string{"-c", fmt.Sprintf(`ulimit -n %d; exec "$0" "$@"`, limit), p.binary}, p.args...)
	p.binary = "/bin/sh"
}

// lives fails where the process has ended.
func (c *processes) lives(p *process) {
	c.t.Helper()
	select {
	case <-p.exited:
		c.t.Fatalf("%s has ended: %v", p.name, p.exitErr)
	default:
	}
}

// connections opens connections that speak HTTP/2 and then say nothing, and returns how many of them
// are served.
func connections(t *testing.T, addr string, n int) (served int, closeAll func()) {
	t.Helper()
	var all []net.Conn
	for range n {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
		all = append(all, conn)
	}
	for _, conn := range all {
		_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		_, err := conn.Read(make([]byte, 1))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("a connection is neither served nor refused")
		}
		if err == nil {
			served++
		}
	}
	return served, func() {
		for _, conn := range all {
			conn.Close()
		}
	}
}

// More clients come than the node has files for. Those beyond its limit are refused, and that can be
// seen. Connected clients go on. When the others have left, new ones are served again.
func TestMoreConnectionsThanFiles(t *testing.T) {
	c := newProcessesOf(t, 1)
	p := c.nodes[0]
	metrics := fmt.Sprintf("http://127.0.0.1:%d", unusedPorts(t, 1)[0])
	p.args = append(p.args, "--listen-metrics-urls", metrics)
	p.limitFiles(512)
	c.startAll()
	c.ready()
	cl := c.clientOf(p)
	put := func(i int) {
		t.Helper()
		if _, err := cl.Put(t.Context(), fmt.Sprint("k", i), strings.Repeat("v", 100<<10)); err != nil {
			t.Fatal(err)
		}
	}
	put(0)
	served, closeAll := connections(t, strings.TrimPrefix(p.client, "http://"), 700)
	defer closeAll()
	if served == 0 || served > 256 {
		t.Errorf("of 700 connections %d are served, with a limit of 512 files", served)
	}
	for i := range 200 { // a good deal of data meanwhile
		put(i)
	}
	resp, err := http.Get(metrics + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if want := fmt.Sprintf("skein_etcdapi_rejected_connections_total{cause=\"limit\"} %d", 700-served); err != nil || !bytes.Contains(b, []byte(want)) {
		t.Errorf("the metrics lack %s: %v", want, err)
	}
	if b, err := os.ReadFile(p.logPath()); err != nil || !bytes.Contains(b, []byte("refused client connections")) {
		t.Errorf("the log does not say that clients are refused: %v", err)
	}
	late := c.clientOf(p)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	if _, err := late.Get(ctx, "k1"); err == nil {
		t.Error("a client beyond the limit is served")
	}
	cancel()
	closeAll()
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if _, err := late.Get(ctx, "k1", clientv3.WithSerializable()); err != nil {
		t.Errorf("when the others have left: %v", err)
	}
	c.lives(p)
}

// Too low a limit of open files is refused at the start, with what to do.
func TestStartWithTooFewFiles(t *testing.T) {
	c := newProcessesOf(t, 1)
	p := c.nodes[0]
	p.limitFiles(128)
	c.startAll()
	select {
	case <-p.exited:
	case <-time.After(20 * time.Second):
		t.Fatal("it goes on")
	}
	b, err := os.ReadFile(p.logPath())
	if err != nil || p.exitErr == nil || !bytes.Contains(b, []byte("the process may open 128 files")) || !bytes.Contains(b, []byte("ulimit -n")) {
		t.Errorf("%v, %v: %s", p.exitErr, err, tail(b, 2<<10))
	}
}

// A process that can open no more files refuses writes as with a full disk. It reads on, loses
// nothing, and takes writes again when there are files.
func TestNoFilesLeft(t *testing.T) {
	c := newProcessesOf(t, 1)
	p := c.nodes[0]
	c.startAll()
	c.ready()
	cl := c.clientOf(p)
	var before unix.Rlimit
	limit := func(cur uint64) {
		t.Helper()
		l := before
		l.Cur = cur
		if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, &l, &before); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Prlimit(p.cmd.Process.Pid, unix.RLIMIT_NOFILE, nil, &before); err != nil {
		t.Fatal(err)
	}
	usual := before.Cur
	if _, err := cl.Put(t.Context(), "k", "v"); err != nil {
		t.Fatal(err)
	}
	limit(3)
	value, puts := strings.Repeat("v", 1<<20), 0
	put := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := cl.Put(ctx, fmt.Sprint("k", puts), value)
		return err
	}
	for err := error(nil); !errors.Is(err, rpctypes.ErrNoSpace); puts++ {
		if err = put(); err != nil && !errors.Is(err, rpctypes.ErrNoSpace) {
			t.Fatalf("put %d: %v", puts, err)
		}
		if puts > 1000 {
			t.Fatal("a thousand puts need no new file")
		}
	}
	puts--
	time.Sleep(3 * time.Second)
	for range 3 {
		if err := put(); !errors.Is(err, rpctypes.ErrNoSpace) {
			t.Errorf("some seconds later: %v", err)
		}
		if r, err := cl.Get(t.Context(), "k"); err != nil || len(r.Kvs) != 1 {
			t.Errorf("get: %v, %v", r, err)
		}
	}
	c.lives(p)
	limit(usual)
	for end := time.Now().Add(20 * time.Second); put() != nil; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("with files again, puts are still refused")
		}
	}
	for i := range puts {
		if r, err := cl.Get(t.Context(), fmt.Sprint("k", i)); err != nil || len(r.Kvs) != 1 || len(r.Kvs[0].Value) != len(value) {
			t.Fatalf("of %d puts k%d is lost: %v", puts, i, err)
		}
	}
	c.lives(p)
}
