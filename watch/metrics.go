package watch

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the package's metrics, under etcd's names where etcd has them.
type Metrics struct {
	// Streams, Watchers and Events are etcd's, and so are Lagging, the watchers that are not live,
	// and QueuedEvents, which wait for clients.
	Streams, Watchers prometheus.Gauge
	Lagging           prometheus.GaugeFunc
	QueuedEvents      prometheus.Gauge
	// Slow counts the watchers whose clients were too slow for live events.
	Slow   prometheus.Counter
	Events prometheus.Counter
	// Subscriptions are the followed ranges; FeedsOpened and FeedsLost count their feeds.
	Subscriptions          prometheus.Gauge
	FeedsOpened, FeedsLost prometheus.Counter
	// Questions counts requests to leaders for a resolved revision. Gaps counts revisions that the
	// allocation log could not tell.
	Questions, Gaps prometheus.Counter
	// Cut counts the groups that were sent to history for their pending bytes. HistoryReads counts
	// pages of history.
	Cut, HistoryReads prometheus.Counter
	// Shared counts the watchers that read history with others.
	Shared prometheus.Counter
	// LinksLost counts streams of feeds that ended. TooLarge counts cancellations for a revision
	// larger than four times RevisionBytes.
	LinksLost, TooLarge prometheus.Counter
	// PendingBytes wait for events with lower revisions; QueuedBytes wait for clients.
	PendingBytes, QueuedBytes prometheus.Gauge

	// lagging is asked by Lagging at each scrape; New sets it.
	lagging atomic.Pointer[func() int]
}

// NewMetrics returns the metrics, registered unless reg is nil.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &Metrics{
		Streams:       gauge("etcd_debugging_mvcc_watch_stream_total", "Total number of watch streams."),
		Watchers:      gauge("etcd_debugging_mvcc_watcher_total", "Total number of watchers."),
		Events:        counter("etcd_debugging_mvcc_events_total", "Total number of events sent by this member."),
		Slow:          counter("skein_watch_slow_watchers_total", "Watchers that were sent to history because their clients were too slow."),
		Subscriptions: gauge("skein_watch_subscriptions", "Ranges that are followed for watchers."),
		FeedsOpened:   counter("skein_watch_feeds_opened_total", "Feeds of ranges that were opened."),
		FeedsLost:     counter("skein_watch_feeds_lost_total", "Feeds of ranges that ended and were opened again."),
		Questions:     counter("skein_watch_questions_total", "Requests to leaders for a resolved revision."),
		Gaps:          counter("skein_watch_log_gaps_total", "Times that the allocation log did not tell the ranges of some revisions."),
		Cut:           counter("skein_watch_cut_groups_total", "Groups of watchers that were sent to history for their pending bytes."),
		HistoryReads:  counter("skein_watch_history_pages_total", "Pages of history that were read for watchers."),
		Shared:        counter("skein_watch_history_shared_total", "Watchers that read history with others of their span."),
		LinksLost:     counter("skein_watch_links_lost_total", "Streams of feeds from a node that ended, with all feeds of that node."),
		TooLarge:      counter("skein_watch_revisions_too_large_total", "Times that watchers were cancelled for a revision beyond the bound."),
		PendingBytes:  gauge("skein_watch_pending_bytes", "Bytes of events that wait for lower revisions."),
		QueuedEvents:  gauge("etcd_debugging_mvcc_pending_events_total", "Total number of pending events to be sent."),
		QueuedBytes:   gauge("skein_watch_queued_bytes", "Bytes of events that wait for watchers' clients."),
	}
	m.Lagging = prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "etcd_debugging_mvcc_slow_watcher_total", Help: "Total number of unsynced slow watchers.",
	}, func() float64 {
		if count := m.lagging.Load(); count != nil {
			return float64((*count)())
		}
		return 0
	})
	if reg != nil {
		reg.MustRegister(m.Streams, m.Watchers, m.Events, m.Slow, m.Subscriptions, m.FeedsOpened, m.FeedsLost, m.Questions, m.Gaps,
			m.Cut, m.HistoryReads, m.Shared, m.LinksLost, m.TooLarge, m.PendingBytes, m.QueuedBytes, m.QueuedEvents, m.Lagging)
	}
	return m
}
