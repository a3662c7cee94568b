package etcdapi

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"expvar"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/skeindb/skein/auth"
	"github.com/skeindb/skein/keyspace"
	"github.com/skeindb/skein/kverror"
)

// clientMux serves HTTP on a client port.
func (s *Server) clientMux() http.Handler {
	mux := http.NewServeMux()
	s.handleHealth(mux)
	mux.HandleFunc("/version", s.serveVersion)
	mux.Handle("/debug/", s.forRoot(s.debugMux()))
	if s.gateway != nil {
		mux.Handle("/v3/", s.gateway)
	}
	etcds := s.origins(ownPages(today(mux)))
	if s.opts.Console == nil || len(s.opts.ConsoleURLs) > 0 {
		return s.knownHost(etcds)
	}
	console := s.consoleHandler()
	return s.knownHost(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path+"/" == consolePath || strings.HasPrefix(r.URL.Path, consolePath) {
			console.ServeHTTP(w, r)
			return
		}
		etcds.ServeHTTP(w, r)
	}))
}

// consoleMux serves the console alone.
func (s *Server) consoleMux() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(consolePath, s.consoleHandler())
	mux.Handle("/{$}", http.RedirectHandler(consolePath, http.StatusFound))
	return s.knownHost(mux)
}

// consoleHandler serves the console to pages of this node alone, in the name of whoever asks. --cors does not count: what
// it lets in is told to browsers, and the console is for people.
func (s *Server) consoleHandler() http.Handler {
	next := s.opts.Console(s.services)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown, _ := r.Context().Value(overTLS{}).(*tls.ConnectionState)
		if shown == nil && r.TLS != nil { // a listener of the console's own
			shown = r.TLS
			r = r.WithContext(context.WithValue(r.Context(), overTLS{}, shown))
		}
		switch {
		case r.URL.Path+"/" == consolePath:
			http.Redirect(w, r, consolePath, http.StatusFound)
			return
		case shown == nil && !s.ownName(r.Host):
			http.Error(w, fmt.Sprintf("the console is not served by the name %q: add it to --host-whitelist beside the * (as in '*,NAME', else other names and addresses are refused), or use https or an address", r.Host), http.StatusMisdirectedRequest)
			return
		case strings.HasPrefix(r.URL.Path, consolePath+"api/") && foreign(r):
			http.Error(w, "pages of another origin may not use the console", http.StatusForbidden)
			return
		}
		ctx := context.WithValue(r.Context(), claimKey{}, auth.ReadHTTPClaim(r.Header, shown, s.opts.Users.ClientCertAuth))
		next.ServeHTTP(w, r.WithContext(peer.NewContext(ctx, peerOf(r, shown))))
	})
}

// debugMux serves what shows the inside of the process. Whatever is added to it is for root.
func (s *Server) debugMux() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/debug/vars", expvar.Handler())
	if s.opts.EnablePprof {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// forRoot refuses all but root, while users are checked.
func (s *Server) forRoot(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown, _ := r.Context().Value(overTLS{}).(*tls.ConnectionState)
		ctx := context.WithValue(r.Context(), claimKey{}, auth.ReadHTTPClaim(r.Header, shown, s.opts.Users.ClientCertAuth))
		if _, err := s.allowed(ctx, (*auth.Caller).Root); err != nil {
			s.auditDenial(context.WithValue(ctx, fromKey{}, r.RemoteAddr), r.URL.Path, err)
			code := http.StatusForbidden
			switch kverror.Of(err).Kind {
			case kverror.UserEmpty, kverror.InvalidAuthToken:
				code = http.StatusUnauthorized
			case kverror.NoLeader, kverror.Canceled, kverror.DeadlineExceeded:
				code = http.StatusServiceUnavailable
			default:
			}
			http.Error(w, wordOf(kverror.GRPC(err)).Error()+": this page is for root (a token in the header Authorization, or with --client-cert-auth a certificate)", code)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// metricsMux serves the metrics URLs: metrics and health alone.
func (s *Server) metricsMux() http.Handler {
	mux := http.NewServeMux()
	s.handleHealth(mux)
	return mux
}

// knownHost refuses requests without TLS for a host that is not listed. A page whose own name leads to this node by
// now (DNS rebinding) has the node for its own origin, and could read and write everything. With TLS that name
// would have to stand in the certificate.
func (s *Server) knownHost(next http.Handler) http.Handler {
	list := s.opts.HostWhitelist
	if len(list) == 0 || slices.Contains(list, "*") {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		secure := r.TLS != nil || r.Context().Value(overTLS{}) != nil // a listener of the console's own, or the sniffer's
		if !secure && !slices.Contains(list, host) {
			s.log.Warn("rejecting HTTP request to prevent DNS rebinding attacks", zap.String("host", host))
			http.Error(w, fmt.Sprintf("this node does not serve the host %q: add it to --host-whitelist, or use https", host), http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// origins tells browsers whose pages they may let in: all by default, as in etcd, or those listed. etcd serves the
// others too, and a browser keeps only the answer from them. So such a page could still write, and a
// websocket would even show it the answers. With a list they are refused here.
func (s *Server) origins(next http.Handler) http.Handler {
	list := s.opts.CORS
	all := len(list) == 0 || slices.Contains(list, "*")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		allowed, origin := "*", r.Header.Get("Origin")
		if !all {
			allowed = origin
			w.Header().Set("Vary", "Origin")
		}
		listed := all || slices.ContainsFunc(list, func(o string) bool { return originOf(o) == originOf(origin) })
		if listed {
			w.Header().Set("Access-Control-Allow-Methods", "POST, GET, OPTIONS, PUT, DELETE")
			w.Header().Set("Access-Control-Allow-Origin", allowed)
			w.Header().Set("Access-Control-Allow-Headers", "accept, content-type, authorization")
		}
		if r.Method == http.MethodOptions {
			return
		}
		if !listed && foreign(r) {
			http.Error(w, fmt.Sprintf("pages of the origin %q may not use this node: add it to --cors", origin), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// originOf writes an origin with its port, which a browser leaves out if it is the default one.
func originOf(s string) string {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" {
		return s
	}
	if port := map[string]string{"http": "80", "https": "443"}[u.Scheme]; u.Port() == "" && port != "" {
		u.Host += ":" + port
	}
	return u.Scheme + "://" + u.Host
}

// overTLS is the context key of the *tls.ConnectionState of a connection with TLS.
type overTLS struct{}

// noteTLS is an HTTP server's ConnContext. net/http does not know of the sniffer's handshake.
func noteTLS(ctx context.Context, c net.Conn) context.Context {
	s, ok := c.(*sniffedConn)
	if !ok || s.state == nil {
		return ctx
	}
	return context.WithValue(ctx, overTLS{}, s.state)
}

// ownPages refuses pages of other origins if the client has a certificate. A browser attaches its
// user's certificate to every request of any page. It does not ask first if the page need not read
// the answer, or if it opens a websocket. So any page that the user looks at could write keys and
// watch them. A client without a certificate has to show a token, which no browser attaches, or is
// nobody in particular. etcd lets them all in. The answers still say that any origin may read them,
// as etcd's do. Browsers ignore that for clients with a certificate, because they want the origin's
// name then.
func ownPages(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if shown, _ := r.Context().Value(overTLS{}).(*tls.ConnectionState); shown != nil && len(shown.PeerCertificates) > 0 && foreign(r) {
			http.Error(w, "a page of another origin may not use its reader's certificate", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// foreign says whether a browser sends a request for a page of another origin. Every browser says
// so by one of the two headers, for websockets by the first; other clients send neither.
func foreign(r *http.Request) bool {
	if origin := r.Header.Get("Origin"); origin != "" {
		scheme := "http"
		if r.Context().Value(overTLS{}) != nil {
			scheme = "https"
		}
		u, err := url.Parse(origin)
		return err != nil || !strings.EqualFold(u.Scheme, scheme) || !strings.EqualFold(u.Host, r.Host)
	}
	site := r.Header.Get("Sec-Fetch-Site")
	return site != "" && site != "same-origin" && site != "none"
}

func (s *Server) handleHealth(mux *http.ServeMux) {
	mux.Handle("/metrics", promhttp.HandlerFor(s.opts.Gatherer, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	mux.HandleFunc("/health", s.serveHealth)
	s.handleChecks(mux, "livez", []check{{"serializable_read", s.ownReadCheck}})
	s.handleChecks(mux, "readyz", []check{
		{"stopping", s.stoppingCheck},
		{"data_corruption", s.corruptCheck},
		{"serializable_read", s.ownReadCheck},
		{"linearizable_read", s.readCheck},
		{"non_learner", s.learnerCheck},
	})
}

// onlyGet refuses all methods but GET.
func onlyGet(w http.ResponseWriter, r *http.Request) bool {
	if r.Method == http.MethodGet {
		return true
	}
	w.Header().Set("Allow", http.MethodGet)
	http.Error(w, "Method Not Allowed", http.StatusMethodNotAllowed)
	return false
}

// serveVersion answers like etcd's /version: numbers and dots alone.
func (s *Server) serveVersion(w http.ResponseWriter, r *http.Request) {
	if !onlyGet(w, r) {
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = fmt.Fprintf(w, `{"etcdserver":%q,"etcdcluster":%q,"storage":%q}`, EtcdVersion, ClusterVersion, StorageVersion)
}

// serveHealth answers like etcd's /health: alarms, the leader, and a read.
func (s *Server) serveHealth(w http.ResponseWriter, r *http.Request) {
	if !onlyGet(w, r) {
		return
	}
	reason := s.unhealthy(r.Context(), r.URL.Query()["exclude"], r.URL.Query().Get("serializable") == "true")
	answer := struct {
		Health string `json:"health"`
		Reason string `json:"reason"`
	}{Health: "true", Reason: reason}
	if reason == "" {
		s.metrics.HealthSuccess.Inc()
	} else {
		s.metrics.HealthFailures.Inc()
		answer.Health = "false"
	}
	b, err := json.Marshal(answer)
	if err != nil {
		panic(fmt.Sprintf("etcdapi: marshal two strings %+v: %v", answer, err))
	}
	if reason != "" {
		s.log.Warn("/health error", zap.String("output", string(b)), zap.Int("status-code", http.StatusServiceUnavailable))
		http.Error(w, string(b), http.StatusServiceUnavailable)
		return
	}
	_, _ = w.Write(b)
}

// unhealthy returns why the node is unhealthy, or "".
func (s *Server) unhealthy(ctx context.Context, excluded []string, serializable bool) string {
	for _, a := range s.unhealthyBy() {
		if slices.Contains(excluded, a.Type.String()) {
			continue
		}
		if a.Type == pb.AlarmType_NOSPACE || a.Type == pb.AlarmType_CORRUPT {
			return "ALARM " + a.Type.String()
		}
		return "ALARM UNKNOWN"
	}
	if !serializable && s.opts.Node.Leader() == 0 {
		return "RAFT NO LEADER"
	}
	read := s.readCheck
	if serializable {
		read = s.ownReadCheck
	}
	if err := read(ctx); err != nil {
		return "RANGE ERROR:" + err.Error()
	}
	return ""
}

// check is one of the named checks of /livez and /readyz.
type check struct {
	name string
	run  func(context.Context) error
}

// readCheck reads the first possible key. It concerns one range, so a health check costs the same
// for any number of ranges. A cluster that is being loaded is not ready, also while it answers reads.
func (s *Server) readCheck(ctx context.Context) error {
	if s.opts.Loading != nil {
		if _, err := s.opts.Loading(); err != nil {
			return wordOf(kverror.GRPC(err))
		}
	}
	return wordOf(s.readFirst(ctx, false))
}

// ownReadCheck is the read by which a supervisor decides to restart this process. etcd's reads its
// own store, and succeeds on a member without a quorum. This one does too, if a replica of this
// node has the key. If none does, or it cannot be read now, the range's leader is asked. A cluster
// without a leader, a quorum or an answer in time does not fail this check. Restarting this node
// would not help then, and restarting all survivors would do harm.
func (s *Server) ownReadCheck(ctx context.Context) error {
	if s.opts.Node.Leader() == 0 {
		return nil // and the read need not wait for one
	}
	err := s.readFirst(ctx, true)
	if status.Code(err) == codes.Unavailable {
		return nil
	}
	return wordOf(err)
}

func (s *Server) readFirst(ctx context.Context, serializable bool) error {
	inner, cancel, wording := s.bounded(ctx)
	defer cancel()
	// The node asks for itself: probes have no user.
	inner = keyspace.WithPermit(inner, keyspace.Internal)
	_, err := s.opts.KV.Range(inner, &pb.RangeRequest{Key: []byte{0}, KeysOnly: true, Limit: 1, Serializable: serializable})
	if err != nil {
		return wording(err)
	}
	return nil
}

// wordOf is a status's message alone, as etcd writes it.
func wordOf(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(status.Convert(err).Message())
}

// stoppingCheck is not etcd's: a node that stops soon serves on for a while, and nobody new is to be sent to it.
func (s *Server) stoppingCheck(context.Context) error {
	if s.stopping.Load() {
		return errors.New("the node stops")
	}
	return nil
}

func (s *Server) corruptCheck(context.Context) error {
	for _, a := range s.unhealthyBy() {
		if a.Type == pb.AlarmType_CORRUPT {
			return errors.New("alarm activated: CORRUPT")
		}
	}
	return nil
}

func (s *Server) learnerCheck(context.Context) error {
	if s.opts.Node.Status().Learner {
		return errors.New("not supported for learner")
	}
	return nil
}

// handleChecks installs /name, which runs all checks without those in ?exclude, and /name/check for
// each check.
func (s *Server) handleChecks(mux *http.ServeMux, name string, checks []check) {
	mux.HandleFunc("/"+name, func(w http.ResponseWriter, r *http.Request) {
		excluded := r.URL.Query()["exclude"]
		s.serveChecks(w, r, name, slices.DeleteFunc(slices.Clone(checks), func(c check) bool { return slices.Contains(excluded, c.name) }))
	})
	for _, c := range checks {
		mux.HandleFunc("/"+name+"/"+c.name, func(w http.ResponseWriter, r *http.Request) {
			s.serveChecks(w, r, name, []check{c})
		})
	}
}

func (s *Server) serveChecks(w http.ResponseWriter, r *http.Request, name string, checks []check) {
	if !onlyGet(w, r) {
		return
	}
	var report strings.Builder
	failed := false
	for _, c := range checks {
		value, result := 1.0, "success"
		if err := c.run(r.Context()); err != nil {
			failed = true
			value, result = 0, "error"
			fmt.Fprintf(&report, "[-]%s failed: %v\n", c.name, err)
		} else {
			fmt.Fprintf(&report, "[+]%s ok\n", c.name)
		}
		s.metrics.HealthCheck.WithLabelValues(name, c.name).Set(value)
		s.metrics.HealthChecks.WithLabelValues(name, c.name, result).Inc()
	}
	if failed {
		s.log.Error("Health check error", zap.String("path", r.URL.Path), zap.String("reason", report.String()),
			zap.Int("status-code", http.StatusServiceUnavailable))
		http.Error(w, report.String(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.URL.Query().Has("verbose") {
		_, _ = fmt.Fprint(w, report.String())
	}
	_, _ = fmt.Fprintln(w, "ok")
}
