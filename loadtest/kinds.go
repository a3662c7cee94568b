package loadtest

import "slices"

// opKind is a kind of operations and the class of its latencies.
type opKind struct {
	name  string
	class class
}

// operationKinds are all kinds of operations, as reports name them.
var operationKinds = slices.Concat([]opKind{{"put", classPut}, {"get", classGet}}, kubeKinds, leaseKinds)

// leaseKinds are the operations of workload lease: a lease is granted, a key is put with it, it is revoked.
var leaseKinds = []opKind{{"grant", classGrant}, {"attach", classAttach}, {"revoke", classRevoke}}

// Names of a report's histograms that are no kind of operations.
const (
	kindFailed   = "failed"
	kindLateness = "lateness"
	kindLag      = "scheduling lag"
	kindDelay    = "delay" // of events at watchers
)

func isOperation(name string) bool {
	return slices.ContainsFunc(operationKinds, func(k opKind) bool { return k.name == name })
}
