package etcdapi

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"testing/iotest"
)

// scripted is a connection that reads what a client has sent.
type scripted struct {
	net.Conn
	io.Reader
}

func (s scripted) Read(b []byte) (int, error) { return s.Reader.Read(b) }

// FuzzSniff: the first bytes alone determine the protocol, however they are split, and the server
// reads every byte.
func FuzzSniff(f *testing.F) {
	f.Add([]byte(preface+"\x00\x00\x00\x04"), false)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), true)
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\rX"), true)
	f.Add([]byte("PRI"), false)
	f.Fuzz(func(t *testing.T, said []byte, slowly bool) {
		var r io.Reader = bytes.NewReader(said)
		if slowly {
			r = iotest.OneByteReader(r)
		}
		s := &sniffer{grpc: newConnQueue(), http: newConnQueue()}
		c, queue, _, err := s.sniff(t.Context(), scripted{Reader: r})
		isPreface := bytes.HasPrefix(said, []byte(preface))
		undecided := strings.HasPrefix(preface, string(said)) && !isPreface
		switch {
		case undecided:
			if err == nil {
				t.Fatalf("%q was decided", said)
			}
			return
		case err != nil:
			t.Fatalf("%q: %v", said, err)
		case isPreface != (queue == s.grpc):
			t.Fatalf("%q went the wrong way", said)
		}
		if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, said) {
			t.Fatalf("said %q, the server reads %q, %v", said, got, err)
		}
	})
}
