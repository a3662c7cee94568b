package rangefeed

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the package's metrics, summed over all feeds of the node.
type Metrics struct {
	feeds            prometheus.Gauge
	behind, sent     prometheus.Counter
	failed, tooLarge prometheus.Counter
	read             prometheus.Counter
}

// NewMetrics makes the metrics and registers them, if reg is not nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &Metrics{
		feeds:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "skein_shard_feeds", Help: "Feeds of ranges on this node to gateways."}),
		behind:   counter("skein_shard_feeds_behind_total", "Feeds whose queue was full and that went on from the store."),
		sent:     counter("skein_shard_fed_events_total", "Events sent in feeds."),
		failed:   counter("skein_shard_feed_connections_failed_total", "Gateways that could not be sent feeds and that open them anew."),
		tooLarge: counter("skein_shard_feed_messages_too_large_total", "Those of these failures whose message was larger than the bus takes. Any is a fault."),
		read:     counter("skein_shard_history_events_total", "Events read from the store, for feeds that are behind and for watchers that begin in the past."),
	}
	if reg != nil {
		reg.MustRegister(m.feeds, m.behind, m.sent, m.failed, m.tooLarge, m.read)
	}
	return m
}
