package config

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/skeindb/skein/auth"
)

// Errors that [Load] returns for command lines that ask for no node.
var (
	// ErrHelp: -h or --help was given.
	ErrHelp = flag.ErrHelp
	// ErrVersion: --version was given.
	ErrVersion = errors.New("config: the version was asked for")
)

// UsageError is a command line that cannot be read, as opposed to one that asks for
// something impossible.
type UsageError struct{ Err error }

// Error implements error.
func (e *UsageError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong.
func (e *UsageError) Unwrap() error { return e.Err }

// Notice is something to log about the configuration once there is a logger: a flag
// that means nothing here, an unknown variable, a setting that is not used.
type Notice struct {
	Message string
	Fields  []zap.Field
}

// Prefixes of environment variables; the first one wins.
var envPrefixes = []string{"SKEIN_", "ETCD_"}

// given is a value that somebody gave for a flag.
type given struct {
	flag   *Flag
	value  value
	source string // for notices: the flag, the variable or the key of the file
	origin Origin
}

// Load makes the configuration from a command line without the program's name and
// an environment in the form of os.Environ. Errors name the flag, variable or key; all
// refused settings are named at once.
func Load(args, environ []string) (*Config, []Notice, error) {
	l, err := load(Flags(), args, environ)
	if err != nil {
		return nil, nil, err
	}
	return l.config, l.notices, nil
}

func load(table []Flag, args, environ []string) (*loader, error) {
	flags, err := parseArgs(table, args)
	if err != nil {
		return nil, err
	}
	env := newEnviron(environ)
	l := &loader{config: Default()}
	path := env.configFile()
	for _, g := range flags {
		switch {
		case g.flag.Name == "version" && g.value.b:
			return nil, ErrVersion
		case g.flag.Name == "config-file" && g.value.text != "":
			path = g.value.text
		}
	}
	if path != "" {
		err = l.fromFile(table, path, flags, env)
	} else {
		err = l.fromFlags(table, flags, env)
	}
	if err != nil {
		return nil, err
	}
	l.config.Complete()
	if err := l.config.Validate(); err != nil {
		return nil, err
	}
	l.advise()
	return l, nil
}

// loader gathers what Load returns, and the settings that it was made of.
type loader struct {
	config  *Config
	notices []Notice
	given   []given
	file    string // "" without one
}

func (l *loader) note(message string, fields ...zap.Field) {
	l.notices = append(l.notices, Notice{Message: message, Fields: fields})
}

// advise notes what is allowed and seldom meant, and what is not used.
func (l *loader) advise() {
	c := l.config
	if c.Name == "default" {
		l.note("it isn't recommended to use default name, please set a value for --name", zap.String("name", c.Name))
	}
	for i := range c.ListenClientURLs {
		if u := &c.ListenClientURLs[i]; !secure(u) && (c.ClientTLS.given() || c.ClientTLS.ClientCertAuth) {
			l.note("the URL is without TLS although certificates or client-cert-auth are given; clients need none there", zap.Stringer("client-url", u))
		}
	}
	if u := &c.ListenPeerURLs[0]; !secure(u) && (c.PeerTLS.given() || c.PeerTLS.ClientCertAuth) {
		l.note("peer URLs are http although certificates or peer-client-cert-auth are given; any process may claim to be a peer", zap.Stringer("peer-url", u))
	}
	if c.ClientTLS.Auto && c.ClientTLS.given() || c.PeerTLS.Auto && c.PeerTLS.given() {
		l.note("ignoring auto TLS since certificates are given")
	}
	l.adviseAuth()
}

func (l *loader) adviseAuth() {
	c := l.config
	if o, err := auth.ParseOptions(c.AuthToken); err == nil && len(o.Ignored) > 0 {
		l.note("unknown options of --auth-token are ignored", zap.Strings("options", o.Ignored))
	}
	if c.BcryptCost < auth.MinCost {
		l.note("use default bcrypt cost instead of the invalid given cost", zap.Int("min-cost", auth.MinCost), zap.Int("max-cost", auth.MaxCost),
			zap.Int("default-cost", defaultBcryptCost), zap.Int("given-cost", c.BcryptCost))
		c.BcryptCost = defaultBcryptCost
	}
}

// fromFlags takes over the command line, then the environment where that is silent.
func (l *loader) fromFlags(table []Flag, flags []given, env *environ) error {
	for i := range table {
		f := &table[i]
		set := slices.ContainsFunc(flags, func(g given) bool { return g.flag == f })
		name, text, ok := env.take(f.Name, func(other string) {
			l.note("environment variable is shadowed by another one", zap.String("environment-variable", other))
		})
		switch {
		case !ok || f.kind == kindIgnored || f.Name == "version":
			continue
		case set:
			l.note("environment variable is shadowed by the command-line flag", zap.String("environment-variable", name))
			continue
		}
		v, err := f.kind.parse(text)
		if err != nil {
			return fmt.Errorf("invalid value %q for %s: %w", text, name, err)
		}
		flags = append(flags, given{flag: f, value: v, source: name, origin: FromEnvironment})
	}
	for _, name := range env.unknown() {
		l.note("unrecognized environment variable", zap.String("environment-variable", name))
	}
	if err := l.apply(flags); err != nil {
		return err
	}
	has := func(name string) bool {
		return slices.ContainsFunc(flags, func(g given) bool { return g.flag.Name == name })
	}
	if has("listen-client-urls") && !has("advertise-client-urls") {
		// Clients may be unable to reach the listen URLs; etcd refuses to guess too.
		l.config.AdvertiseClientURLs = nil
	}
	return nil
}

// fromFile takes over the configuration file alone, as etcd does.
func (l *loader) fromFile(table []Flag, path string, flags []given, env *environ) error {
	for _, g := range flags {
		if g.flag.Name != "config-file" {
			l.note("the configuration file excludes command-line flags, this one is ignored", zap.String("flag", "--"+g.flag.Name))
		}
	}
	for i := range table {
		if name, _, ok := env.take(table[i].Name, func(string) {}); ok && table[i].Name != "config-file" {
			l.note("the configuration file excludes environment variables, this one is ignored", zap.String("environment-variable", name))
		}
	}
	l.file = path
	keys, err := readFile(table, path)
	if err != nil {
		return fmt.Errorf("configuration file %s: %w", path, err)
	}
	if err := l.apply(keys); err != nil {
		return fmt.Errorf("configuration file %s: %w", path, err)
	}
	return nil
}

// apply sets honoured flags, notes meaningless ones and gathers the refused.
func (l *loader) apply(settings []given) error {
	l.given = settings
	var refused []error
	for _, g := range settings {
		if g.flag.Name == "certs-dir" && g.value.text != "" {
			refused = append(refused, l.config.useCertsDir(g.value.text, settings)...)
		}
	}
	for _, g := range settings {
		if err := g.flag.refuses(g.value); err != nil {
			refused = append(refused, err)
			continue
		}
		switch g.flag.Support {
		case Honoured:
			if err := g.flag.set(l.config, g.value); err != nil {
				refused = append(refused, fmt.Errorf("invalid value %q for %s: %w", g.value.text, g.source, err))
			}
		case Meaningless:
			l.note("this setting means nothing here", zap.String("setting", g.source), zap.String("reason", g.flag.Note))
		case NotYet:
			// The value asks for nothing that is missing, or refuses had named it.
		}
	}
	return errors.Join(refused...)
}

// flagValue collects one flag's value for package flag, whose syntax etcd has: one
// dash or two, a value after = or in the next argument.
type flagValue struct {
	flag *Flag
	out  *[]given
}

func (f flagValue) String() string { return "" }

func (f flagValue) IsBoolFlag() bool { return f.flag.IsBool() }

func (f flagValue) Set(s string) error {
	v, err := f.flag.kind.parse(s)
	if err != nil {
		return err
	}
	*f.out = slices.DeleteFunc(*f.out, func(g given) bool { return g.flag == f.flag }) // the last one counts
	*f.out = append(*f.out, given{flag: f.flag, value: v, source: "--" + f.flag.Name, origin: FromFlag})
	return nil
}

// parseArgs reads a command line.
func parseArgs(table []Flag, args []string) ([]given, error) {
	var out []given
	fs := flag.NewFlagSet("skein", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	for i := range table {
		fs.Var(flagValue{&table[i], &out}, table[i].Name, "")
	}
	switch err := fs.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return nil, ErrHelp
	case err != nil:
		return nil, &UsageError{withNearest(err, table)}
	case fs.NArg() > 0:
		return nil, &UsageError{fmt.Errorf("%q is not a valid flag", fs.Arg(0))}
	}
	return out, nil
}

// withNearest adds to the error of an unknown flag the one that was meant.
func withNearest(err error, table []Flag) error {
	name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !unknown {
		return err
	}
	names := make([]string, len(table))
	for i := range table {
		names[i] = table[i].Name
	}
	if n := Nearest(strings.TrimLeft(name, "-"), names); n != "" {
		return fmt.Errorf("%w; did you mean --%s?", err, n)
	}
	return err
}

// ofCommands are the variables that the commands which ask a cluster read, without their prefix. A node is often
// started in an environment that has them.
var ofCommands = []string{
	"ENDPOINTS", "COMMAND_TIMEOUT", "DIAL_TIMEOUT", "CACERT", "CERT", "KEY", "USER", "PASSWORD", "WRITE_OUT", "INSECURE_SKIP_TLS_VERIFY",
}

// environ is the part of an environment that concerns this program.
type environ struct {
	vars  map[string]string
	taken map[string]bool
}

func newEnviron(vars []string) *environ {
	e := &environ{vars: make(map[string]string), taken: make(map[string]bool)}
	for _, v := range vars {
		name, text, _ := strings.Cut(v, "=")
		for _, p := range envPrefixes {
			// An empty variable counts as none, as in etcd.
			if strings.HasPrefix(name, p) && text != "" {
				e.vars[name] = text
			}
		}
	}
	return e
}

// take returns the variable for a flag by the order of the prefixes, and tells
// shadowed of another one that is set too.
func (e *environ) take(flagName string, shadowed func(name string)) (name, text string, ok bool) {
	suffix := strings.ToUpper(strings.ReplaceAll(flagName, "-", "_"))
	for _, p := range envPrefixes {
		t, set := e.vars[p+suffix]
		switch {
		case !set:
		case ok:
			e.taken[p+suffix] = true
			shadowed(p + suffix)
		default:
			e.taken[p+suffix] = true
			name, text, ok = p+suffix, t, true
		}
	}
	return name, text, ok
}

func (e *environ) configFile() string {
	_, path, _ := e.take("config-file", func(string) {})
	return path
}

// unknown returns the variables that no flag and no command takes, ascending. Their values may be
// secrets and stay unsaid.
func (e *environ) unknown() []string {
	var names []string
	for name := range e.vars {
		own, ok := strings.CutPrefix(name, "SKEIN_")
		if !e.taken[name] && (!ok || !slices.Contains(ofCommands, own)) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
