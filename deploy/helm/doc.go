// Package helm tests the chart in the directory skein: helm lints and renders it, every object is decoded as the API of
// Kubernetes does it, and what is rendered runs as processes, each in a network and a root of its own, that stand for the
// pods. make chart runs it.
package helm
