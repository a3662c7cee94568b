package config

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// meaningless is a row for a flag to which nothing here corresponds.
func meaningless(section, name string, k kind, def, file, why string) Flag {
	return Flag{Name: name, Section: section, Support: Meaningless, kind: k, Default: def, File: file, Note: why}
}

// notYet is a row for a flag that asks for something missing.
func notYet(section, name string, k kind, def, file, why string) Flag {
	return Flag{Name: name, Section: section, Support: NotYet, kind: k, Default: def, File: file, Note: why}
}

func meaninglessFlags() []Flag {
	const (
		bbolt   = "There is no bbolt: Pebble batches and compacts by itself."
		hashes  = "Replicas are always compared, at equal applied index."
		catchUp = "Logs are cut by size, and followers beyond the cut get a snapshot."
	)
	gates := meaningless(sectionFeatures, "feature-gates", kindString, "", "feature-gates",
		"What the gates of etcd switch is either always on here or not there. SetMemberLocalAddr=true is refused.")
	gates.check = checkFeatureGates
	return []Flag{
		meaningless(sectionMember, "snapshot-count", kindUint, "10000", "snapshot-count", catchUp),
		meaningless(sectionMember, "max-snapshots", kindUint, "5", "max-snapshots", "Snapshots are streamed, not kept."),
		meaningless(sectionMember, "max-wals", kindUint, "5", "max-wals", "Segments of the wal are recycled once nothing needs them."),
		meaningless(sectionMember, "initial-election-tick-advance", kindBool, "true", "initial-election-tick-advance",
			"A new cluster's first election does not wait, and a restarted voter has to."),
		meaningless(sectionMember, "backend-bbolt-freelist-type", kindString, "", "backend-bbolt-freelist-type", bbolt),
		meaningless(sectionMember, "backend-batch-interval", kindDuration, "0s", "backend-batch-interval", bbolt),
		meaningless(sectionMember, "backend-batch-limit", kindInt, "0", "backend-batch-limit", bbolt),
		meaningless(sectionMember, "raft-read-timeout", kindDuration, "5s", "", "Nodes talk QUIC, which finds dead connections by itself."),
		meaningless(sectionMember, "raft-write-timeout", kindDuration, "5s", "", "Nodes talk QUIC, which finds dead connections by itself."),
		meaningless(sectionClustering, "v2-deprecation", kindString, "write-only", "v2-deprecation", "There never was a v2 store. etcd ignores it too."),
		gates,
		meaningless(sectionFeatures, "compact-hash-check-time", kindDuration, "1m0s", "compact-hash-check-time", hashes),
		meaningless(sectionFeatures, "bootstrap-defrag-threshold-megabytes", kindUint, "0", "bootstrap-defrag-threshold-megabytes", "There is nothing to defragment."),
		meaningless(sectionFeatures, "downgrade-check-time", kindDuration, "5s", "downgrade-check-time", "Nothing waits for the nodes to go back: each does when the build before is started. etcdctl downgrade enable keeps the cluster version where that can be."),
		meaningless(sectionFeatures, "snapshot-catchup-entries", kindUint, "5000", "snapshot-catchup-entries", catchUp),
		meaningless(sectionSecurity, "peer-skip-client-san-verification", kindBool, "false", "peer-transport-security.skip-client-san-verification",
			"A peer proves which node it is by a skein:// name in its certificate, or by the authority alone; where it connects from is never compared."),
	}
}

func unsafeFlags() []Flag {
	return []Flag{{
		Name: "force-new-cluster", kind: kindBool, Default: "false", File: "force-new-cluster", Section: sectionUnsafe,
		Usage: "Force to create a new cluster of this node alone: it keeps its data, and all other nodes are removed.",
		Note:  "For a lost majority. Refused if this node has no copy of some ranges: then, and wherever more than one node survives, use skein recover (docs/RECOVERY.md). Give it for one start.",
		set:   setBool(func(c *Config) *bool { return &c.ForceNewCluster }),
	}}
}

func notYetFlags() []Flag {
	return []Flag{
		notYet(sectionClustering, "discovery-fallback", kindString, "exit", "", "there is no proxy to fall back to"),
	}
}

func discoveryFlags() []Flag {
	const why = "discovery by an etcd is not there yet: name the founders in --initial-cluster, or by --discovery-srv"
	row := func(name string, k kind, def, file string) Flag {
		return notYet(sectionDiscovery, "discovery-"+name, k, def, "discovery-config."+file, why)
	}
	return []Flag{
		row("token", kindString, "", "token"),
		row("endpoints", kindSet, "", "client.endpoints"),
		row("dial-timeout", kindDuration, "2s", "client.dial-timeout"),
		row("request-timeout", kindDuration, "5s", "client.request-timeout"),
		row("keepalive-time", kindDuration, "2s", "client.keepalive-time"),
		row("keepalive-timeout", kindDuration, "6s", "client.keepalive-timeout"),
		row("insecure-transport", kindBool, "true", "client.secure.insecure-transport"),
		row("insecure-skip-tls-verify", kindBool, "false", "client.secure.insecure-skip-tls-verify"),
		row("cert", kindString, "", "client.secure.cert"),
		row("key", kindString, "", "client.secure.key"),
		row("cacert", kindString, "", "client.secure.cacert"),
		row("user", kindString, "", "client.auth.username"),
		row("password", kindString, "", "client.auth.password"),
	}
}

// fileOnly are the keys of the configuration file for which there is no flag. Their
// names are the keys.
func fileOnly() []Flag {
	return []Flag{
		{Name: "client-transport-security.allowed-cn", kind: kindList, set: setList(func(c *Config) *[]string { return &c.ClientTLS.AllowedCNs })},
		meaningless("", "client-transport-security.skip-client-san-verification", kindBool, "false", "",
			"Clients' certificates are not compared with the host that they come from."),
	}
}

// relicFlags are flags of old versions that etcd 3.7 still accepts and ignores.
func relicFlags() []Flag {
	names := []string{
		"cluster-active-size", "cluster-remove-delay", "cluster-sync-interval", "config", "force", "max-result-buffer",
		"max-retry-attempts", "peer-heartbeat-interval", "peer-election-timeout", "retry-interval", "snapshot", "v", "vv",
		"test.coverprofile", "test.outputdir",
	}
	flags := make([]Flag, len(names))
	for i, n := range names {
		flags[i] = meaningless(sectionRelics, n, kindIgnored, "", "", "A flag of a version long gone.")
	}
	return flags
}

// checkFeatureGates refuses gates that etcd 3.7 does not know, as etcd does, and the
// one whose effect would be missed.
func checkFeatureGates(v value) error {
	known := []string{
		"AllAlpha", "AllBeta", "StopGRPCServiceOnDefrag", "InitialCorruptCheck", "CompactHashCheck", "TxnModeWriteWithSharedBuffer",
		"LeaseCheckpoint", "LeaseCheckpointPersist", "SetMemberLocalAddr", "FastLeaseKeepAlive", "PriorityRequest",
	}
	for _, pair := range strings.Split(v.text, ",") {
		pair = strings.TrimSpace(pair)
		if pair == "" {
			continue
		}
		name, on, ok := strings.Cut(pair, "=")
		if !ok {
			return fmt.Errorf("missing bool value for %s", pair)
		}
		set, err := strconv.ParseBool(strings.TrimSpace(on))
		switch {
		case err != nil:
			return fmt.Errorf("invalid value of %s: %q", name, on)
		case !slices.Contains(known, strings.TrimSpace(name)):
			return fmt.Errorf("unrecognized feature gate: %s", name)
		case strings.TrimSpace(name) == "SetMemberLocalAddr" && set:
			return errors.New("SetMemberLocalAddr is not there yet: the kernel chooses the address that nodes talk from")
		}
	}
	return nil
}
