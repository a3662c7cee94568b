package transport

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/skeindb/skein/keyspace"
)

// The frames that make a connection a session, or come before one. Their numbers differ from those of a
// session's frames, so that none can be mistaken.
const (
	frameHello   = 16
	frameAnswer  = 17
	frameConfirm = 18
	frameLane    = 19
	frameAsk     = 20
	frameTold    = 21
	frameKnock   = 22
	frameJoin    = 23
)

// ALPN is the protocol's name in the TLS handshake: the version of what comes before a session
// stands. What a session carries goes by the cluster version. Peers of another ALPN name do not
// get past the handshake.
const ALPN = "skein-bus/4"

// verdict is the answer to a Hello.
type verdict uint8

const (
	verdictWelcome   verdict = 0
	verdictCluster   verdict = 1 // another cluster
	verdictNode      verdict = 2 // the Hello wanted another node than this one
	verdictUnknown   verdict = 3 // the sender is not among this node's peers
	verdictDuplicate verdict = 4 // this node's own Hello is under way and goes first
	verdictIdentity  verdict = 5 // the certificate names another cluster or node
	verdictMalformed verdict = 6
	verdictClosing   verdict = 7
	verdictVersion   verdict = 8 // one of the two does not read what the other writes
	verdictRecovery  verdict = 9 // one of the two waits for the survivors of a recovery

	numVerdicts = 10
)

// String returns the reason for logs and metrics.
func (v verdict) String() string {
	names := [numVerdicts]string{
		"welcome", "wrong cluster", "wrong node", "unknown peer", "duplicate",
		"certificate names another node", "malformed", "closing", "the builds are too far apart", "waits for the survivors of a recovery",
	}
	if v < numVerdicts {
		return names[v]
	}
	return fmt.Sprintf("verdict-%d", uint8(v))
}

// lasting says that a refusal will not pass by itself: somebody must change a
// configuration.
func (v verdict) lasting() bool {
	return v == verdictCluster || v == verdictNode || v == verdictIdentity || v == verdictMalformed || v == verdictVersion
}

// hello is what each side first tells the other: the dialler in the Hello, the accepter
// in the answer.
type hello struct {
	verdict  verdict // of the answer
	kind     Kind
	features uint64
	cluster  keyspace.ClusterID
	node     keyspace.NodeID // who speaks
	to       keyspace.NodeID // the node that the sender means to reach
	boot     keyspace.BootID
	// maxMessage and window are what the speaker accepts: bytes of a payload, bytes
	// of an unread stream.
	maxMessage, window uint32
	// reads are the versions that the speaker reads; it writes in version.
	reads   keyspace.Versions
	version keyspace.Version
	// plan is the recovery plan that was applied to the speaker's directory, 0 for none.
	plan uint64
}

// errTooLate says that a Hello or its answer took too long.
var errTooLate = errors.New("no hello in time")

// featureFresh says that the speaker's version is only what its build begins with (Version.Fresh).
const featureFresh = 1 << 0

// featureTogether says that all survivors have applied the speaker's plan (Recovery.Now).
const featureTogether = 1 << 1

const helloBody = leastHelloBody + 8

// leastHelloBody is that of a node whose build knows no recovery plan: it has none.
const leastHelloBody = 1 + 1 + 1 + 5*8 + 5*4

// maxHelloBytes bounds the bytes read before the peer is known. A later minor version
// may append fields, which this one ignores.
const maxHelloBytes = 1 << 10

func helloFrame(frameKind uint8, h *hello) []byte {
	be := binary.BigEndian
	dst := be.AppendUint32(make([]byte, 0, lengthBytes+helloBody), helloBody)
	dst = append(dst, frameKind, uint8(h.verdict), uint8(h.kind))
	dst = be.AppendUint64(dst, h.features)
	dst = be.AppendUint64(dst, uint64(h.cluster))
	dst = be.AppendUint64(dst, uint64(h.node))
	dst = be.AppendUint64(dst, uint64(h.to))
	dst = be.AppendUint64(dst, uint64(h.boot))
	dst = be.AppendUint32(dst, h.maxMessage)
	dst = be.AppendUint32(dst, h.window)
	dst = be.AppendUint32(dst, uint32(h.reads.Oldest))
	dst = be.AppendUint32(dst, uint32(h.reads.Newest))
	dst = be.AppendUint32(dst, uint32(h.version))
	return be.AppendUint64(dst, h.plan)
}

// parseHello decodes the body of a Hello or an answer.
func parseHello(b []byte, frameKind uint8) (hello, error) {
	if len(b) < leastHelloBody || b[0] != frameKind {
		return hello{}, fmt.Errorf("%w: hello of %d bytes", errMalformed, len(b))
	}
	be := binary.BigEndian
	h := hello{
		verdict: verdict(b[1]), kind: Kind(b[2]), features: be.Uint64(b[3:]),
		cluster: keyspace.ClusterID(be.Uint64(b[11:])), node: keyspace.NodeID(be.Uint64(b[19:])),
		to: keyspace.NodeID(be.Uint64(b[27:])), boot: keyspace.BootID(be.Uint64(b[35:])),
		maxMessage: be.Uint32(b[43:]), window: be.Uint32(b[47:]),
		reads:   keyspace.Versions{Oldest: keyspace.Version(be.Uint32(b[51:])), Newest: keyspace.Version(be.Uint32(b[55:]))},
		version: keyspace.Version(be.Uint32(b[59:])),
	}
	if len(b) >= helloBody {
		h.plan = be.Uint64(b[leastHelloBody:])
	}
	if h.verdict >= numVerdicts || h.kind >= numKinds {
		return hello{}, fmt.Errorf("%w: hello with verdict %d, kind %d", errMalformed, b[1], b[2])
	}
	if h.verdict == verdictWelcome && (h.node == 0 || h.maxMessage == 0 || h.window == 0 || h.maxMessage > 1<<30 || h.window > 1<<30) {
		return hello{}, fmt.Errorf("%w: hello of node %s, %d bytes, window %d", errMalformed, h.node, h.maxMessage, h.window)
	}
	return h, nil
}

// A confirmation is one byte; a lane's header names class and slot.
func appendConfirm(dst []byte) []byte {
	return append(binary.BigEndian.AppendUint32(dst, 1), frameConfirm)
}

func parseConfirm(b []byte) error {
	if len(b) < 1 || b[0] != frameConfirm {
		return fmt.Errorf("%w: no confirmation", errMalformed)
	}
	return nil
}

func appendLane(dst []byte, c Class, slot int) []byte {
	return append(binary.BigEndian.AppendUint32(dst, 3), frameLane, uint8(c), uint8(slot))
}

func parseLane(b []byte) (Class, int, error) {
	if len(b) < 3 || b[0] != frameLane || b[1] >= numClasses || b[2] >= maxLanes {
		return 0, 0, fmt.Errorf("%w: lane header %x", errMalformed, b[:min(len(b), 8)])
	}
	return Class(b[1]), int(b[2]), nil
}

// body reads the body of one small frame that comes before a session stands.
func (fr *frameReader) body() ([]byte, error) {
	limit := fr.max
	fr.max = maxHelloBytes
	n, err := fr.length()
	fr.max = limit
	if err != nil {
		return nil, err
	}
	b := make([]byte, lengthBytes+n)
	for read := 0; read < len(b); {
		got, err := fr.r.Read(b[read:])
		if read += got; err != nil && read < len(b) {
			return nil, unexpectedEnd(err)
		}
	}
	return b[lengthBytes:], nil
}
