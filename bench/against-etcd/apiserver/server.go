package apiserver

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	// startWithin bounds the wait for the server, stopWithin that for its end.
	startWithin = 2 * time.Minute
	stopWithin  = 30 * time.Second
	// connections are shared by the workers.
	connections = 4
	// token is the bearer token of a member of system:masters.
	token = "bench"
)

// Server is a running kube-apiserver.
type Server struct {
	url     string
	dir     string
	cmd     *exec.Cmd
	ended   chan struct{} // closed when the process has ended, after which err is set
	err     error
	clients []*http.Client
	created int // pods, so far
	leases  []string
}

// Start starts a server with its files in dir, and waits until it is ready. etcd are the client URLs of its store.
func Start(ctx context.Context, binary, dir string, port int, etcd string) (*Server, error) {
	s := &Server{url: "https://127.0.0.1:" + strconv.Itoa(port), dir: dir, ended: make(chan struct{})}
	args, err := s.prepare(port, etcd)
	if err != nil {
		return nil, err
	}
	log, err := os.Create(s.log())
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s.cmd = exec.Command(binary, args...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		s.err = s.cmd.Wait()
		close(s.ended)
	}()
	if err := s.wait(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

func (s *Server) log() string         { return filepath.Join(s.dir, "log") }
func (s *Server) certificate() string { return filepath.Join(s.dir, "certs", "apiserver.crt") }

// PID is the server's process.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// prepare makes the files that the server needs, and returns its arguments. The flags are its defaults, but for what a server
// without a cluster has to do without: service accounts, and an address that others can reach.
func (s *Server) prepare(port int, etcd string) ([]string, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	keyFile, tokens := filepath.Join(s.dir, "accounts.key"), filepath.Join(s.dir, "tokens.csv")
	err = os.MkdirAll(s.dir, 0o700)
	if err == nil {
		err = os.WriteFile(keyFile, text, 0o600)
	}
	if err == nil {
		err = os.WriteFile(tokens, []byte(token+",bench,bench,system:masters\n"), 0o600)
	}
	return []string{
		"--etcd-servers=" + etcd, "--bind-address=127.0.0.1", "--secure-port=" + strconv.Itoa(port),
		"--cert-dir=" + filepath.Dir(s.certificate()), "--token-auth-file=" + tokens, "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + keyFile,
		"--service-account-signing-key-file=" + keyFile, "--service-cluster-ip-range=10.0.0.0/24",
		"--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none",
	}, err
}

// wait waits until the server is ready and has made the namespaces of the load.
func (s *Server) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	var last error
	for {
		if last = s.ready(ctx); last == nil {
			return nil
		}
		select {
		case <-s.ended:
			return last
		case <-ctx.Done():
			return fmt.Errorf("kube-apiserver is not ready: %w; log %s", last, s.log())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (s *Server) ready(ctx context.Context) error {
	if s.clients == nil {
		roots := x509.NewCertPool()
		text, err := os.ReadFile(s.certificate())
		if err != nil {
			return err
		}
		if !roots.AppendCertsFromPEM(text) {
			return fmt.Errorf("%s is not whole yet", s.certificate())
		}
		for range connections {
			s.clients = append(s.clients, &http.Client{Transport: &http.Transport{
				TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true,
			}})
		}
	}
	for _, path := range []string{"/readyz", "/api/v1/namespaces/default", "/api/v1/namespaces/kube-node-lease"} {
		if _, err := s.do(ctx, 0, http.MethodGet, path, ""); err != nil {
			return err
		}
	}
	return nil
}

// do sends a request as a worker, and returns the answer's body.
func (s *Server) do(ctx context.Context, worker int, method, path, body string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, s.url+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := s.clients[worker%len(s.clients)].Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode >= http.StatusMultipleChoices {
		err = fmt.Errorf("%s %s: %s: %.400s", method, path, answer.Status, text)
	}
	return text, err
}

// Stop ends the server. Its files stay: the log explains errors.
func (s *Server) Stop() error {
	for _, c := range s.clients {
		c.CloseIdleConnections()
	}
	select {
	case <-s.ended:
		return fmt.Errorf("kube-apiserver ended by itself (%v); log %s", s.cmd.ProcessState, s.log())
	default:
	}
	// If it ends just now there is nothing to signal.
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(stopWithin, func() { _ = s.cmd.Process.Kill() })
	defer timer.Stop()
	if <-s.ended; s.err != nil {
		return fmt.Errorf("stop kube-apiserver: %w; log %s", s.err, s.log())
	}
	return nil
}
