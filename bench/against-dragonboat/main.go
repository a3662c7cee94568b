// Command against-dragonboat measures what a proposal costs in raft groups with nothing
// above them: Skein's package raftgroup beside Dragonboat v4. Each side is three hosts in
// one process, its own transport on loopback, its own log on the disk of the current
// directory, and state machines that do nothing.
//
// The sides take turns, each turn in a process of its own. It prints every run and the
// ratios as Markdown, and leaves all figures as JSON.
//
//	go run . --pairs 5
//	go run . --pairs 1 --inflight 1000 --profiles
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// turnCommand is the first argument of a process that takes one turn. The second one is
// its settings as JSON.
const turnCommand = "turn"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	var err error
	if len(os.Args) == 3 && os.Args[1] == turnCommand {
		err = takeTurn(ctx, os.Args[2], os.Stdout)
	} else {
		err = run(ctx, os.Args[1:], os.Stdout)
	}
	stop()
	switch {
	case errors.Is(err, flag.ErrHelp):
	case err != nil:
		fmt.Fprintln(os.Stderr, "against-dragonboat:", err)
		os.Exit(1)
	}
}

// options are the command line.
type options struct {
	pairs    int
	inflight string
	only     string
	profiles bool
	seed     uint64
	each     settings // what every turn has in common
}

// run measures by pairs and prints the tables.
func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args)
	if err != nil {
		return err
	}
	depths, err := depthsOf(o.inflight, o.each.Groups)
	if err != nil {
		return err
	}
	if o.each.Dir == "" {
		if o.each.Dir, err = os.MkdirTemp(".", "results-"); err != nil {
			return err
		}
	}
	if o.each.Dir, err = filepath.Abs(o.each.Dir); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "seed:", o.seed)
	runs, err := measuredPairs(ctx, o, depths)
	// What was measured before an error is worth its time.
	for _, d := range depths {
		writePairs(out, fmt.Sprintf("%d groups, %d under way, %d bytes", o.each.Groups, o.each.Groups*d, o.each.Bytes), runs[d])
	}
	return errors.Join(err, save(filepath.Join(o.each.Dir, "figures.json"), o, runs))
}

// measuredPairs returns the figures by depth and side.
func measuredPairs(ctx context.Context, o options, depths []int) (map[int]map[string][]figures, error) {
	sides := []string{dragonboatSide, skeinSide}
	if o.only != "" {
		sides = []string{o.only}
	}
	random := rand.New(rand.NewPCG(o.seed, 0))
	runs := map[int]map[string][]figures{}
	for _, d := range depths {
		runs[d] = map[string][]figures{}
	}
	for pair := range o.pairs {
		for _, d := range random.Perm(len(depths)) {
			for _, i := range random.Perm(len(sides)) {
				s := o.each
				s.Side, s.Depth = sides[i], depths[d]
				if o.profiles {
					s.Profile = filepath.Join(s.Dir, fmt.Sprintf("%s-%d-%d.pprof", s.Side, s.Groups*s.Depth, pair+1))
				}
				f, err := turn(ctx, s)
				if err != nil {
					return runs, fmt.Errorf("%s, %d under way, pair %d: %w", s.Side, s.Groups*s.Depth, pair+1, err)
				}
				runs[s.Depth][s.Side] = append(runs[s.Depth][s.Side], f)
				fmt.Fprintf(os.Stderr, "%-10s %5d under way, pair %d: %+v\n", s.Side, s.Groups*s.Depth, pair+1, f)
			}
		}
	}
	return runs, nil
}

func parse(args []string) (o options, err error) {
	set := flag.NewFlagSet("against-dragonboat", flag.ContinueOnError)
	s := &o.each
	set.IntVar(&o.pairs, "pairs", 5, "pairs of turns for each number of proposals under way")
	set.StringVar(&o.inflight, "inflight", "48,1000,20000", "proposals under way over all groups, rounded down to as many in each")
	set.StringVar(&o.only, "only", "", "measure this side alone: "+skeinSide+" or "+dragonboatSide)
	set.BoolVar(&o.profiles, "profiles", false, "write a CPU profile of each turn into the directory")
	set.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()), "seed of the order of turns")
	set.IntVar(&s.Groups, "groups", 48, "raft groups, which the hosts lead in turn")
	set.IntVar(&s.Bytes, "bytes", 256, "bytes of a proposal")
	set.DurationVar(&s.Warm, "warm", time.Second, "load before what is measured")
	set.DurationVar(&s.Window, "window", 3*time.Second, "time that is measured in each turn")
	set.StringVar(&s.Dir, "dir", "", "directory for data and results (default: a new one in the current directory)")
	set.StringVar(&s.Carrier, "carrier", quicCarrier, "what Skein's hosts talk over: "+quicCarrier+" or "+tlsCarrier)
	set.StringVar(&s.LogDB, "logdb", pebbleLog, "Dragonboat's log: "+pebbleLog+" or "+tanLog)
	set.Uint64Var(&s.Shards, "shards", uint64(max(2, runtime.NumCPU())),
		"Dragonboat's step, commit and apply workers each, and shards of its Pebble log; it has 16 of each by default, here as many as processors, at least 2")
	if err := set.Parse(args); err != nil {
		return o, err
	}
	switch {
	case set.NArg() > 0:
		return o, fmt.Errorf("%q is no flag", set.Arg(0))
	case o.only != "" && o.only != skeinSide && o.only != dragonboatSide:
		return o, fmt.Errorf("--only %s: there are %s and %s", o.only, skeinSide, dragonboatSide)
	case s.LogDB != tanLog && s.LogDB != pebbleLog:
		return o, fmt.Errorf("--logdb %s: there are %s and %s", s.LogDB, tanLog, pebbleLog)
	case s.Carrier != quicCarrier && s.Carrier != tlsCarrier:
		return o, fmt.Errorf("--carrier %s: there are %s and %s", s.Carrier, quicCarrier, tlsCarrier)
	case o.pairs < 1 || s.Groups < 1 || s.Bytes < 1 || s.Shards < 1 || s.Window <= 0 || s.Warm < 0:
		return o, errors.New("--pairs, --groups, --bytes, --shards and --window must be above 0")
	}
	return o, nil
}

// depthsOf returns how many proposals of each group are under way.
func depthsOf(inflight string, groups int) (depths []int, err error) {
	for text := range strings.SplitSeq(inflight, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || n < groups {
			return nil, fmt.Errorf("--inflight %q: want numbers of at least one for each of %d groups", text, groups)
		}
		depths = append(depths, n/groups)
	}
	return depths, nil
}

// turn runs one turn in a process of its own: what a side leaves in memory, or does behind
// its load, costs the other one nothing.
func turn(ctx context.Context, s settings) (f figures, err error) {
	text, err := json.Marshal(s)
	if err != nil {
		return f, err
	}
	self, err := os.Executable()
	if err != nil {
		return f, err
	}
	cmd := exec.CommandContext(ctx, self, turnCommand, string(text))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Dir = s.Dir // Dragonboat reads settings from files of the current directory
	var stdout bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return f, err
	}
	return f, json.Unmarshal(stdout.Bytes(), &f)
}

// save writes all figures and prints the place.
func save(file string, o options, runs map[int]map[string][]figures) error {
	text, err := json.MarshalIndent(map[string]any{"settings": o.each, "seed": o.seed, "runs by depth of a group": runs}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, append(text, '\n'), 0o644); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "figures:", file)
	return nil
}
