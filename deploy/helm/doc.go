// Package helm tests the chart in the directory skein. Helm lints and renders it, and every object is decoded as the API of
// Kubernetes does it. What is rendered runs: a process in a network and a root of its own stands for each pod. make chart
// runs all of it.
package helm
