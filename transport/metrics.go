package transport

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/skeindb/skein/keyspace"
)

// Metrics are the bus's metrics. One Metrics serves one Endpoint.
type Metrics struct {
	class     [numClasses]classMetrics
	roundTrip *prometheus.HistogramVec
	// peerSent and peerReceived count the classes' bytes by peer.
	peerSent     *prometheus.CounterVec
	peerReceived *prometheus.CounterVec
	// sentFailures count frames that did not leave, receivedFailures sessions that broke, by peer.
	// activePeers, knownPeers and disconnections have both ends as labels. All five are etcd's.
	sentFailures, receivedFailures, disconnections *prometheus.CounterVec
	activePeers, knownPeers                        *prometheus.GaugeVec
	sessions                                       prometheus.Gauge
	dialFailures                                   *prometheus.CounterVec
	refusals                                       *prometheus.CounterVec
	sessionEnds                                    prometheus.Counter
	// detours and passed count calls and streams.
	detours, passed prometheus.Counter
}

// classMetrics are the metrics of one class. They are updated per batch, and for a frame that goes past the lane's writer.
type classMetrics struct {
	framesSent, framesReceived prometheus.Counter
	bytesSent, bytesReceived   prometheus.Counter
	dropped                    prometheus.Counter
	batchFrames                prometheus.Observer
	handlers                   prometheus.Gauge
	busy                       prometheus.Counter
	queued                     *atomic.Int64
}

func (m *classMetrics) sent(frames, bytes int) {
	m.framesSent.Add(float64(frames))
	m.bytesSent.Add(float64(bytes))
	m.batchFrames.Observe(float64(frames))
}

// NewMetrics makes the metrics and registers them, unless reg is nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	var all []prometheus.Collector
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		all = append(all, v)
		return v
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
		all = append(all, v)
		return v
	}
	framesSent := counter("skein_transport_sent_frames_total", "Frames handed to the network.", "class")
	framesReceived := counter("skein_transport_received_frames_total", "Frames received.", "class")
	bytesSent := counter("skein_transport_sent_bytes_total", "Bytes handed to the network, with frame headers.", "class")
	bytesReceived := counter("skein_transport_received_bytes_total", "Bytes received, with frame headers.", "class")
	dropped := counter("skein_transport_dropped_frames_total", "Frames refused by a full queue or lost with their session before they were sent.", "class")
	busy := counter("skein_transport_busy_total", "Calls and streams refused because a peer had too many handlers here.", "class")
	batchFrames := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "skein_transport_batch_frames", Help: "Frames per write of a lane's writer. Frames that come alone mostly go past it, and are not in here.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 11),
	}, []string{"class"})
	handlers := gauge("skein_transport_handlers", "Handlers of calls and streams that run now.", "class")
	m := &Metrics{
		roundTrip: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "etcd_network_peer_round_trip_time_seconds",
			Help:    "Round-Trip-Time histogram between peers",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}, []string{"To"}),
		peerSent:         counter("etcd_network_peer_sent_bytes_total", "The total number of bytes sent to peers.", "To"),
		peerReceived:     counter("etcd_network_peer_received_bytes_total", "The total number of bytes received from peers.", "From"),
		sentFailures:     counter("etcd_network_peer_sent_failures_total", "The total number of send failures from peers.", "To"),
		receivedFailures: counter("etcd_network_peer_received_failures_total", "The total number of receive failures from peers.", "From"),
		disconnections:   counter("etcd_network_disconnected_peers_total", "The total number of disconnected peers.", "Local", "Remote"),
		activePeers:      gauge("etcd_network_active_peers", "The current number of active peer connections.", "Local", "Remote"),
		knownPeers:       gauge("etcd_network_known_peers", "The current number of known peers.", "Local", "Remote"),
		sessions: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "skein_transport_sessions", Help: "Sessions that stand, of both kinds.",
		}),
		dialFailures: counter("skein_transport_dial_failures_total", "Failed attempts to reach a peer.", "kind"),
		refusals:     counter("skein_transport_refusals_total", "Hellos that were refused.", "reason"),
		sessionEnds: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "skein_transport_session_ends_total", Help: "Sessions that ended, for whatever reason.",
		}),
	}
	m.detours = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "skein_transport_detours_total", Help: "Calls and streams to a peer without a session that went by way of another node.",
	})
	m.passed = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "skein_transport_passed_on_total", Help: "Calls and streams that this node has passed on between two others.",
	})
	all = append(all, batchFrames, m.roundTrip, m.sessions, m.sessionEnds, m.detours, m.passed)
	for c := range Class(numClasses) {
		label := c.String()
		queued := new(atomic.Int64)
		all = append(all, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "skein_transport_queue_bytes", Help: "Bytes that wait to be sent, over all peers.",
			ConstLabels: prometheus.Labels{"class": label},
		}, func() float64 { return float64(queued.Load()) }))
		m.class[c] = classMetrics{
			framesSent: framesSent.WithLabelValues(label), framesReceived: framesReceived.WithLabelValues(label),
			bytesSent: bytesSent.WithLabelValues(label), bytesReceived: bytesReceived.WithLabelValues(label),
			dropped: dropped.WithLabelValues(label), batchFrames: batchFrames.WithLabelValues(label),
			handlers: handlers.WithLabelValues(label), busy: busy.WithLabelValues(label), queued: queued,
		}
	}
	if reg != nil {
		reg.MustRegister(all...)
	}
	return m
}

// peerMetrics are those of one peer, which count where no session is at hand.
type peerMetrics struct {
	sentFailures, receivedFailures, disconnections prometheus.Counter
	active                                         prometheus.Gauge
}

// know makes the metrics of a peer.
func (m *Metrics) know(self, peer keyspace.NodeID) peerMetrics {
	local, remote := self.String(), peer.String()
	m.knownPeers.WithLabelValues(local, remote).Set(1)
	return peerMetrics{
		sentFailures: m.sentFailures.WithLabelValues(remote), receivedFailures: m.receivedFailures.WithLabelValues(remote),
		disconnections: m.disconnections.WithLabelValues(local, remote), active: m.activePeers.WithLabelValues(local, remote),
	}
}

// forget drops the metrics of a peer.
func (m *Metrics) forget(peer keyspace.NodeID) {
	m.roundTrip.DeleteLabelValues(peer.String())
	m.peerSent.DeleteLabelValues(peer.String())
	m.peerReceived.DeleteLabelValues(peer.String())
	m.sentFailures.DeleteLabelValues(peer.String())
	m.receivedFailures.DeleteLabelValues(peer.String())
	of := prometheus.Labels{"Remote": peer.String()}
	m.disconnections.DeletePartialMatch(of)
	m.activePeers.DeletePartialMatch(of)
	m.knownPeers.DeletePartialMatch(of)
}
