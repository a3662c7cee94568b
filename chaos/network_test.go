package chaos

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// space is a network namespace without a name. It lasts as long as this file is open or
// a process lives in it. So no run leaves one behind, however it ends, and two runs
// share nothing.
type space struct{ file *os.File }

// newSpace makes a network namespace.
func newSpace() (s space, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("a network namespace: %w", err)
		}
		s.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return s, err
}

// do runs f on a thread in the namespace: its sockets and processes belong there.
func (s space) do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(s.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return f()
	})
}

// onThread runs f on a thread of its own and then returns the thread to its old
// namespace. If the thread ended, the processes started there would die with it, by
// their death signals.
func onThread(f func() error) error {
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	err = f()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		// The thread stays locked, and ends with the goroutine.
		return errors.Join(err, fmt.Errorf("leave a network namespace: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

// command runs a command in the namespace, with text as its input.
func (s space) command(text, name string, args ...string) error {
	return s.do(func() error { return command(text, name, args...) })
}

func command(text, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w %s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// network is a bridge with a namespace for each machine. Clients are on the bridge's own
// address.
type network struct {
	spaces []space
	// faults numbers the tables of nft.
	faults atomic.Int64
}

// The addresses are in this process's own namespace and disturb nobody.
const (
	clientsAddress = "10.77.0.254"
	bridge         = "bridge"
	link           = "eth0" // of each machine
)

func address(machine int) string { return fmt.Sprintf("10.77.0.%d", machine+1) }

// outer is the bridge's end of a machine's link.
func outer(machine int) string { return fmt.Sprintf("machine%d", machine+1) }

// newNetwork makes the namespaces of so many machines. It returns an error if this
// machine or this user cannot.
func newNetwork(t *testing.T, machines int) (*network, error) {
	t.Helper()
	if noNamespace != "" {
		return nil, errors.New(noNamespace)
	}
	for _, tool := range []string{"ip", "tc", "nft"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, err
		}
	}
	n := &network{}
	t.Cleanup(func() {
		// The next network must find the names free; the kernel is slow to remove a
		// namespace.
		for i, s := range n.spaces {
			if err := command("", "ip", "link", "del", outer(i)); err != nil {
				t.Error(err)
			}
			s.file.Close()
		}
		if err := command("", "ip", "link", "del", bridge); err != nil {
			t.Error(err)
		}
	})
	err := errors.Join(command("", "ip", "link", "add", bridge, "type", "bridge"),
		command("", "ip", "address", "add", clientsAddress+"/24", "dev", bridge), command("", "ip", "link", "set", bridge, "up"))
	for i := 0; i < machines && err == nil; i++ {
		err = n.plug(i)
	}
	return n, err
}

// plug makes the namespace of a machine and connects it to the bridge.
func (n *network) plug(machine int) error {
	s, err := newSpace()
	if err != nil {
		return err
	}
	n.spaces = append(n.spaces, s)
	// ip takes a path in place of a name.
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.file.Fd())
	return errors.Join(
		command("", "ip", "link", "add", outer(machine), "type", "veth", "peer", "name", link, "netns", path),
		command("", "ip", "link", "set", outer(machine), "master", bridge, "up"),
		s.command("", "ip", "address", "add", address(machine)+"/24", "dev", link),
		s.command("", "ip", "link", "set", link, "up"),
		s.command("", "ip", "link", "set", "lo", "up"))
}

// drop loses, at a machine, the incoming and outgoing packets that fit one of nft's
// expressions, until heal is called. heal says whether anything was lost.
func (n *network) drop(machine int, in, out []string) (heal healing, err error) {
	table := fmt.Sprintf("fault%d", n.faults.Add(1))
	var b strings.Builder
	fmt.Fprintf(&b, "table ip %s {\n", table)
	for hook, rules := range map[string][]string{"input": in, "output": out} {
		fmt.Fprintf(&b, "chain %s { type filter hook %s priority 0; policy accept;\n", hook, hook)
		for _, r := range rules {
			fmt.Fprintf(&b, "%s counter drop;\n", r)
		}
		fmt.Fprintf(&b, "}\n")
	}
	fmt.Fprintf(&b, "}\n")
	s := n.spaces[machine]
	if err := s.command(b.String(), "nft", "-f", "-"); err != nil {
		return nil, err
	}
	return func() (took bool, err error) {
		lost, err := s.counted(packetsLost, "nft", "list", "table", "ip", table)
		return lost, errors.Join(err, s.command("", "nft", "delete", "table", "ip", table))
	}, nil
}

// healing ends a fault, and says whether it took effect: whether there was traffic or
// work for it.
type healing func() (took bool, err error)

// What nft prints of the losses of a rule, and tc of the delays of a queue.
var (
	packetsLost   = regexp.MustCompile(`counter packets [1-9]`)
	packetsHeldUp = regexp.MustCompile(`overlimits [1-9]`)
)

// counted says whether a count in a command's output in the namespace is above zero.
func (s space) counted(above *regexp.Regexp, name string, args ...string) (found bool, err error) {
	err = s.do(func() error {
		out, err := exec.Command(name, args...).CombinedOutput()
		found = above.Match(out)
		if err != nil {
			return fmt.Errorf("%s %s: %w %s", name, strings.Join(args, " "), err, out)
		}
		return nil
	})
	return found, err
}

// from and to are nft's expressions for the packets from machines and to machines.
func from(machines []int) []string { return []string{"ip saddr { " + addresses(machines) + " }"} }
func to(machines []int) []string   { return []string{"ip daddr { " + addresses(machines) + " }"} }

func addresses(machines []int) string {
	var all []string
	for _, m := range machines {
		all = append(all, address(m))
	}
	return strings.Join(all, ", ")
}

// Expressions for all packets but a machine's own to itself, for some of them, and for
// the packets from and to clients.
var (
	anythingIn  = []string{`iifname "` + link + `"`}
	anythingOut = []string{`oifname "` + link + `"`}
	lossyIn     = []string{`iifname "` + link + `" numgen random mod 100 < 30`}
	lossyOut    = []string{`oifname "` + link + `" numgen random mod 100 < 30`}
	clientsIn   = []string{"ip saddr " + clientsAddress}
	clientsOut  = []string{"ip daddr " + clientsAddress}
)

// slow lets a machine send only a little, until heal is called, which says whether
// anything was delayed.
func (n *network) slow(machine int) (heal healing, err error) {
	s := n.spaces[machine]
	if err := s.command("", "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", "1mbit", "burst", "4kb", "latency", "300ms"); err != nil {
		return nil, err
	}
	return func() (took bool, err error) {
		held, err := s.counted(packetsHeldUp, "tc", "-s", "qdisc", "show", "dev", link)
		return held, errors.Join(err, s.command("", "tc", "qdisc", "del", "dev", link, "root"))
	}, nil
}

// bringUp brings up the loopback of this new namespace.
func bringUp(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	r, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	r.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
}

// words is how many datagrams one machine sends to another to test the link. Those of
// all machines fit into a receiver's buffer.
const words = 40

// hears returns how many datagrams of each machine a machine receives; those of the
// clients come last.
func (n *network) hears(t *testing.T, machine int) []int {
	t.Helper()
	target := address(machine) + ":4000"
	var l net.PacketConn
	err := n.spaces[machine].do(func() (err error) {
		l, err = net.ListenPacket("udp4", target)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	heard := make([]int, len(n.spaces)+1)
	for from := range heard {
		say := func() error { return sayTo(target, byte(from)) }
		if from < len(n.spaces) {
			err = n.spaces[from].do(say)
		} else {
			err = say()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for b := make([]byte, 16); ; {
		if err := l.SetReadDeadline(time.Now().Add(200 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := l.ReadFrom(b); err != nil {
			return heard
		}
		heard[b[0]]++
	}
}

// sayTo sends datagrams of one byte. A packet that an output rule drops is a write
// error.
func sayTo(target string, what byte) error {
	c, err := net.Dial("udp4", target)
	if err != nil {
		return err
	}
	defer c.Close()
	for range words {
		if _, err := c.Write([]byte{what}); err != nil && !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	return nil
}

// Rules of nft lose the packets that they should, in one direction or both, and no
// others. After healing they lose none.
func TestPartitionsLoseWhatTheyAreTo(t *testing.T) {
	n, err := newNetwork(t, 3)
	if err != nil {
		leaveOut(t, err)
	}
	all := []int{words, words, words, words}
	expect := func(when string, machine int, want []int) {
		t.Helper()
		if got := n.hears(t, machine); !slices.Equal(got, want) {
			t.Errorf("%s: machine %d hears %d, want %d", when, machine+1, got, want)
		}
	}
	for i := range 3 {
		// On a busy machine the bridge takes a while to forward, and neighbours to find each other. Nothing is
		// lost after that.
		for tries := 0; tries < 20 && !slices.Equal(n.hears(t, i), all); tries++ {
		}
		expect("at first", i, all)
	}
	for _, c := range []struct {
		what           string
		in, out        []string
		first, another []int // packets that the first machine receives, and the second
	}{
		{"the first does not hear the second", from([]int{1}), nil, []int{words, 0, words, words}, all},
		{"the others do not hear the first", nil, to([]int{1, 2}), all, []int{0, words, words, words}},
		{"both ways", from([]int{1}), to([]int{1}), []int{words, 0, words, words}, []int{0, words, words, words}},
		{"cut off", anythingIn, anythingOut, []int{words, 0, 0, 0}, []int{0, words, words, words}},
		{"no clients", clientsIn, clientsOut, []int{words, words, words, 0}, all},
	} {
		heal, err := n.drop(0, c.in, c.out)
		if err != nil {
			t.Fatal(err)
		}
		expect(c.what, 0, c.first)
		expect(c.what, 1, c.another)
		if took, err := heal(); err != nil || !took {
			t.Fatalf("%s: it took effect: %t, %v", c.what, took, err)
		}
		expect(c.what+", healed", 0, all)
		expect(c.what+", healed", 1, all)
	}
	heal, err := n.drop(0, lossyIn, lossyOut)
	if err != nil {
		t.Fatal(err)
	}
	if got := n.hears(t, 0); got[0] != words || got[1] == 0 || got[1] == words || got[3] == 0 || got[3] == words {
		t.Errorf("over a link that loses 30 of 100 are heard %d", got)
	}
	if took, err := heal(); err != nil || !took {
		t.Fatalf("a link that loses: it took effect: %t, %v", took, err)
	}
	expect("healed", 0, all)
	// A rule without traffic loses nothing.
	for what, begin := range map[string]func() (healing, error){
		"cut off": func() (healing, error) { return n.drop(2, anythingIn, anythingOut) },
		"slow":    func() (healing, error) { return n.slow(2) },
	} {
		heal, err := begin()
		if err != nil {
			t.Fatal(err)
		}
		if took, err := heal(); err != nil || took {
			t.Errorf("a silent machine, %s: it took effect: %t, %v", what, took, err)
		}
	}
}

// leaveOut skips a test that this machine cannot run, or fails it if nothing may be
// left out.
func leaveOut(t *testing.T, err error) {
	t.Helper()
	leave := t.Skipf
	if nothingLeftOut() {
		leave = t.Fatalf
	}
	leave("left out: %v", err)
}
