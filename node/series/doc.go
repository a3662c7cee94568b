// Package series keeps what a node has measured of itself during the last hour, for charts of people who have no
// Prometheus. A ring takes a point every ten seconds from the node's own metrics: rates of counters, values of gauges, and
// percentiles of what histograms counted since the point before. It is in memory alone, about 70 kB, and begins anew with
// the process. Nothing depends on it.
package series
