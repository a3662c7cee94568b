// Command mixin writes what a monitoring system needs for Skein: rules for Prometheus (alerts.yaml, rules.yaml), dashboards
// for Grafana, and mixin.libsonnet, which has both for those who build their monitoring with jsonnet. The files are in git;
// go generate ./deploy/mixin writes them anew.
//
// All queries are about jobs whose name has "skein" in it. The names of metrics are those of docs/METRICS.md, and a test
// compares them. docs/MONITORING.md says what to do at each alert; a test looks that each has its part there.
package main

//go:generate go run .
