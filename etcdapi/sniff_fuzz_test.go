package etcdapi

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"testing/iotest"
)

// scripted is a connection that reads what a client has sent. The client reads everything.
type scripted struct {
	net.Conn
	io.Reader
}

func (s scripted) Read(b []byte) (int, error) { return s.Reader.Read(b) }

func (s scripted) Write(b []byte) (int, error) { return len(b), nil }

// FuzzSniff: the first bytes alone determine the protocol, however they are split, and the server
// reads every byte, but for one answer to the sniffer's settings where that is HTTP's.
func FuzzSniff(f *testing.F) {
	f.Add([]byte(preface+"\x00\x00\x00\x04"), false)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), true)
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\rX"), true)
	f.Add([]byte("PRI"), false)
	f.Add([]byte(preface+emptySettings+"\x00\x00\x01\x01\x05\x00\x00\x00\x01\x82"+settingsAck), true)
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
		case !isPreface && queue == s.grpc, isPreface && (queue == s.grpc) != firstIsGRPC(bytes.NewReader(said[len(preface):]), true):
			t.Fatalf("%q went the wrong way", said)
		}
		if isPreface && queue == s.http {
			got, err := io.ReadAll(c)
			if left := len(said) - len(got); err != nil || left != 0 && left != len(settingsAck) || !bytes.HasPrefix(got, []byte(preface)) {
				t.Fatalf("said %q, the server reads %q, %v", said, got, err)
			}
			return
		}
		if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, said) {
			t.Fatalf("said %q, the server reads %q, %v", said, got, err)
		}
	})
}
