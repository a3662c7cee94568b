package join

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.uber.org/zap"

	"github.com/skeindb/skein/clock"
)

// lookUpTimeout bounds one question to the resolver.
const lookUpTimeout = 10 * time.Second

// discovered returns the joiner with the founders that SRV records name as its --initial-cluster, or itself without
// --discovery-srv. Resolvers that fail are asked again until ctx ends; what they answer is final.
func (j *Joiner) discovered(ctx context.Context) (*Joiner, error) {
	if j.Config.DiscoverySRV == "" {
		return j, nil
	}
	for {
		found, err := j.lookUp(ctx)
		if err == nil || !passing(err) {
			return found, err
		}
		j.Logger.Warn("asking again for the SRV records of --discovery-srv", zap.Error(err))
		if clock.Sleep(ctx, j.Clock, joinPause) != nil {
			return nil, err
		}
	}
}

// discoveredAgain is discovered for a node that most likely needs no founders any more: it does not wait for resolvers.
func (j *Joiner) discoveredAgain(ctx context.Context) (*Joiner, error) {
	asked, cancel := clock.WithTimeout(ctx, j.Clock, sameClusterTimeout)
	defer cancel()
	found, err := j.lookUp(asked)
	if err != nil {
		j.Logger.Info("--discovery-srv is ignored: the data directory says which node this is", zap.Error(err))
	}
	return found, err
}

// unanswered is why a resolver has not answered, as opposed to what one says that knows no such name.
type unanswered struct{ error }

func (u unanswered) Unwrap() error { return u.error }

// passing says whether a question of those that failed was not answered.
func passing(err error) bool {
	var u unanswered
	return errors.As(err, &u)
}

// question asks the resolver once, for lookUpTimeout at most. The resolver takes the end of that time for a question that
// nobody wants answered any more, and not for a failure of its own: see clock.WithTimeout.
func (j *Joiner) question(ctx context.Context, ask func(ctx context.Context) error) error {
	asked, cancel := clock.WithTimeout(ctx, j.Clock, lookUpTimeout)
	defer cancel()
	err := ask(asked)
	var dns *net.DNSError
	if err != nil && (asked.Err() != nil && ctx.Err() == nil || errors.As(err, &dns) && dns.Temporary()) {
		return unanswered{err}
	}
	return err
}

// lookUp is discovered, once. Each founder works the ids out of the same records, so their hosts are taken as they are written,
// but in lower case: resolvers may return any.
func (j *Joiner) lookUp(ctx context.Context) (*Joiner, error) {
	c := *j.Config
	scheme := c.AdvertisePeerURLs[0].Scheme
	service := fmt.Sprintf("_%s._tcp.%s", c.PeerService(), c.DiscoverySRV)
	var records []*net.SRV
	if err := j.question(ctx, func(ctx context.Context) (err error) {
		_, records, err = j.Resolver.LookupSRV(ctx, c.PeerService(), "tcp", c.DiscoverySRV)
		return err
	}); err != nil {
		return nil, fmt.Errorf("--discovery-srv: the SRV records %s are to name the founders, since the peer URLs of this node are %s: %w", service, scheme, err)
	}
	var hosts []string
	for _, r := range records {
		hosts = append(hosts, net.JoinHostPort(strings.ToLower(strings.TrimSuffix(r.Target, ".")), strconv.Itoa(int(r.Port))))
	}
	slices.Sort(hosts)
	hosts = slices.Compact(hosts)
	own, err := j.ownOf(ctx, hosts)
	switch {
	case err != nil && passing(err):
		return nil, err
	case len(own) == 0:
		return nil, errors.Join(fmt.Errorf("--discovery-srv: none of the SRV records %s (%s) leads to %s: add one for this node, or give the address of one to --initial-advertise-peer-urls; a node that comes later is started with --join",
			service, strings.Join(hosts, ", "), types.URLs(c.AdvertisePeerURLs).String()), err)
	case len(own) > 1:
		return nil, fmt.Errorf("--discovery-srv: the SRV records %s name this node as %s: each founder has one", service, strings.Join(own, " and "))
	}
	c.InitialCluster = types.URLsMap{}
	for _, host := range hosts {
		name := host
		if host == own[0] {
			name = c.Name
		}
		c.InitialCluster[name] = types.URLs{{Scheme: scheme, Host: host}}
	}
	j.Logger.Info("the SRV records name the founders", zap.String("records", service), zap.Strings("founders", hosts), zap.String("this node", own[0]))
	found := *j
	found.Config = &c
	return &found, nil
}

// ownOf returns the hosts that are this node: those written as in its peer URLs, and without any those of the same address. An
// error says why an address is not known.
func (j *Joiner) ownOf(ctx context.Context, hosts []string) (own []string, err error) {
	for _, host := range hosts {
		if slices.ContainsFunc(j.Config.AdvertisePeerURLs, func(u url.URL) bool { return strings.EqualFold(u.Host, host) }) {
			own = append(own, host)
		}
	}
	if len(own) > 0 {
		return own, nil
	}
	var names []string
	for _, u := range j.Config.AdvertisePeerURLs {
		names = append(names, u.Host)
	}
	names = append(names, hosts...)
	at, errs := make([][]netip.AddrPort, len(names)), make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { at[i], errs[i] = j.addresses(ctx, name) })
	}
	wg.Wait()
	urls := len(names) - len(hosts)
	mine := slices.Concat(at[:urls]...)
	for i, host := range hosts {
		if slices.ContainsFunc(at[urls+i], func(a netip.AddrPort) bool { return slices.Contains(mine, a) }) {
			own = append(own, host)
		}
	}
	return own, errors.Join(errs...)
}

// addresses resolves HOST:PORT.
func (j *Joiner) addresses(ctx context.Context, hostPort string) (all []netip.AddrPort, err error) {
	host, port, err := net.SplitHostPort(hostPort)
	if err != nil {
		return nil, err
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", hostPort, err)
	}
	var ips []netip.Addr
	err = j.question(ctx, func(ctx context.Context) (err error) {
		ips, err = j.Resolver.LookupNetIP(ctx, "ip", host)
		return err
	})
	for _, ip := range ips {
		all = append(all, netip.AddrPortFrom(ip.Unmap(), uint16(p)))
	}
	return all, err
}
