package main

import (
	"cmp"
	"strings"

	"github.com/spf13/cobra"
)

// helpText is what the help of a command has besides its flags. A test runs or reads each example.
type helpText struct {
	// explains has the columns and other words of the output.
	explains string
	examples string
}

// addHelp gives all commands their texts, and has those that only group others name the one that was meant.
func addHelp(c *cobra.Command) {
	if c.HasSubCommands() {
		c.Args = onlyCommands
		if !c.Runnable() { // cobra's own: it would show its help for whatever is typed
			c.RunE = needsCommand
		}
	}
	if h, ok := helpTexts[strings.TrimPrefix(c.CommandPath(), c.Root().Name()+" ")]; ok {
		if h.explains != "" {
			c.Long = cmp.Or(c.Long, c.Short+".") + "\n\n" + h.explains
		}
		c.Example = "  " + strings.ReplaceAll(h.examples, "\n", "\n  ")
	}
	for _, sub := range c.Commands() {
		addHelp(sub)
	}
}

// Words that the help of several commands explains.
const (
	explainRanges = `START, END  the first key of the range, and the first one behind it; empty is the first and the end of all keys.
            Keys are printed so that they can be given to commands (--key-format); in a shell put a quoted one into single quotes.
REPLICAS    the nodes that hold the range. They vote, unless it says learner (it is being copied there) or another role of a change
            of members; quarantine is a copy that its node does not trust and that is replaced
KEYS        live keys; counting for a while after a split
ON DISK     bytes on the leader's disk, old versions included. What is in its memory alone does not count yet
WRITES/S, READS/S
            requests a second that the leader serves, a mean over about ten seconds
STATE       awake; asleep (at rest: its replicas exchange no heartbeats, and the next request wakes it); merging (it absorbs its
            neighbour); unreachable (nobody says that he leads it)
KEPT        yes for a range that begins where somebody has said so, at bootstrap or by range split: only range merge removes that border
OPERATION   what placement changes about it now`
	explainNodes = `STATE       serving; dead (nobody hears it); draining (it gives its leaders up); decommissioning and decommissioned (it gives up, or has
            given up, all it holds); learner, unstarted (it has not come yet); removed
SINCE       since when it is that
RANGES, LEADERS
            how many ranges it holds a replica of, and how many it leads
PLACEMENT   whether it has a replica of the placement group, which allocates revisions and knows who holds what, or leads it
ON DISK     bytes of its data directory`
	explainOperations = `KIND        move, add or remove a replica; merge; tidy (end a change of members that was left half done)
REASON      in one word: command if an operator has asked for it, otherwise what placement has seen
WHY         the same in words`
	explainPlacement = `LEADS       the term in which the node leads the placement group
REPLICATION how many voters each range is to have; FEWER and MORE VOTERS count the ranges that have not as many
A NODE SILENT
            ranges of which a voter's node is not heard
DECIDED BY  placement, or nobody while it is paused
MERGE AFTER how long neighbours have to be small and cold before they merge, if that is set for the cluster`
	explainSlow = `AT          when it ended, by the clock of its node
NODE        the node that the client called
TOOK        from its arrival there to its answer
RANGE       the range that took longest, if one is known
RETRIES     attempts that the node made again, because a range had moved or had no leader
CAUSE       what took longest: queued behind others, evaluation (reads of the disk), the lock of a transaction over several ranges,
            a revision, the quorum and who was last, a disk, applying, no leader, the bus, or the node itself`
	explainWatchers = `CLIENT, USER
            the client's address, and its user once users are checked
KEY, END    what it watches: one key, or the keys from one up to another, which is watched no more
FROM        the first revision that it asked for; none is what comes
BEHIND      how many revisions of the cluster the client has not got everything of. Most of them may have no event for it
QUEUED      events that wait for the client in the node's memory
EVENTS FROM memory, or history for a watcher that began in the past or whose client is too slow`
	explainCluster = `READS       the cluster versions that the node's build reads and writes
SINCE       since when it runs that build`
)

var helpTexts = map[string]helpText{
	"start": {"", `skein --name n1 --data-dir d1 --initial-ranges 8
skein start --config-file /etc/skein/n1.yaml
skein --name n4 --data-dir d4 --join 127.0.0.1:2379 --listen-client-urls http://127.0.0.1:42379 --advertise-client-urls http://127.0.0.1:42379 --listen-peer-urls http://127.0.0.1:42380 --initial-advertise-peer-urls http://127.0.0.1:42380`},
	"config check": {"", `skein config check /etc/skein/n1.yaml
skein config check --name n1 --data-dir d1 --initial-ranges 8`},
	"config show": {"", `skein config show --effective /etc/skein/n1.yaml
skein config show --name n1 --data-dir d1
skein config show --effective -w json --name n1`},
	"demo": {"", `skein demo
skein demo --nodes 5 --ranges 16 --load 10s
skein demo --kill`},

	"top": {`CPU         percent of one processor
PUTS/S, GETS/S
            what clients ask of the node
LAG         committed log entries that the node has not applied yet, of all its ranges
FSYNC P99   what the slowest of a hundred fsyncs of the log takes
WRITES/S, READS/S
            requests a second that the range's leader serves, a mean over about ten seconds`, "skein top\nskein top --once\nskein top -w json --interval 10s"},
	"debug bundle": {"", `skein debug bundle --endpoints 127.0.0.1:12379,127.0.0.1:22379,127.0.0.1:32379
skein debug bundle -o n2.tar.gz --nodes n2 --cpu 10s`},

	"debug slow": {explainSlow, `skein debug slow
skein debug slow --min 500ms
skein debug slow -w json`},

	"debug watchers": {explainWatchers, `skein debug watchers
skein debug watchers --node n2 --limit 10
skein debug watchers --limit 1000 --skip 1000 -w json`},

	"range list": {explainRanges, `skein range list
skein range list --sort load
skein range list --node n2 -w json
skein range list --holding /registry/pods/a
skein range list --holding '"a\x00"'
skein range list --holding YQA= --key-format base64`},
	"range show": {`generation  how often borders or members of the range have changed: of two copies of its description the one with the higher is newer
not split   why a range that is too large or too busy is not split by itself
waits for   why it has no quorum: the voters that are silent or in quarantine
DOES        leads, has led (without a quorum nobody leads), follows, asleep (at rest), receives a copy, disagrees with others
APPLIED     the log entry up to which the replica has executed; BEHIND is how many it lacks of what is committed
WAITING     requests that wait for their evaluation
With -w json it is all that the replicas say of themselves, for a bug report.`, `skein range show 1
skein range show 1 -w json`},
	"range heat": {`START, END  the keys of the row. Each request counts at the first of its keys. How a range's requests lie over its keys is known by a
            sample; their number is exact
SHARE       the row's part of all requests of the time
WRITES, READS, WRITTEN
            how many there were in that time, and what the writes brought
It needs no quorum; what a node has served that does not answer is not counted. With -w json it is the whole map: each row with a
value for every minute, ten minutes or hour, whichever is stored for all of the time.`, `skein range heat
skein range heat /registry/ --last 24h --top 5
skein range heat -w json`},
	"range split": {"A range that begins where this command has said is not merged by itself; range merge removes the border.", `skein range split m
skein range split '"m\x00"'
skein range split 6d00 --key-format hex`},
	"range move":            {explainRanges, "skein range move 1 --from n1 --to n4\nskein range move 1 --from n1 --to n4 --wait=false"},
	"range merge":           {explainRanges, "skein range merge 1"},
	"range transfer-leader": {"", "skein range transfer-leader 1 --to n2"},

	"node list":         {explainNodes, "skein node list\nskein node list -w json --endpoints 127.0.0.1:2379,127.0.0.1:22379"},
	"node show":         {explainNodes, "skein node show n2"},
	"node drain":        {explainNodes, "skein node drain n2\nskein node drain n2 --wait=false"},
	"node undrain":      {explainNodes, "skein node undrain n2"},
	"node decommission": {explainNodes, "skein node decommission n3 --wait-timeout 2h"},
	"node recommission": {explainNodes, "skein node recommission n3"},

	"placement operations":      {explainOperations, "skein placement operations"},
	"placement pause":           {"", "skein placement pause"},
	"placement resume":          {"", "skein placement resume"},
	"placement show":            {explainPlacement, "skein placement show"},
	"placement move":            {explainPlacement, "skein placement move --from n1 --to n4"},
	"placement add":             {explainPlacement, "skein placement add n5"},
	"placement remove":          {explainPlacement, "skein placement remove n1"},
	"placement transfer-leader": {"", "skein placement transfer-leader --to n2"},
	"placement set-replication": {`BYTES COPIED is about what the new replicas bring to disks.`, `skein placement set-replication 5 --dry-run
skein placement set-replication 5`},
	"placement set-merge-after": {"", `skein placement set-merge-after 30m
skein placement set-merge-after off
skein placement set-merge-after default`},

	"cluster show":    {explainCluster, "skein cluster show"},
	"cluster upgrade": {"", "skein cluster upgrade"},
	"cluster hold":    {"", "skein cluster hold"},
	"cluster unhold":  {"", "skein cluster unhold"},

	"hold list": {`KIND        what reads the old versions: a backup, an export, a snapshot
OWNER       who, as machine and process
REVISION    the lowest revision that is kept; BEHIND is how far that is behind the newest one`, "skein hold list"},
	"hold release": {"", "skein hold release 00000000000000b0"},

	"etcdctl":    {"", "skein etcdctl put a 1\nskein etcdctl get a --write-out json\nskein etcdctl --help"},
	"grpc-proxy": {"", "skein grpc-proxy start --endpoints 127.0.0.1:12379,127.0.0.1:22379 --namespace tenant/\nskein grpc-proxy start --help"},

	"cert create-ca":     {"", "skein cert create-ca --certs-dir certs"},
	"cert create-node":   {"", "skein cert create-node n1 --host n1.example.com --host 10.0.0.1 --certs-dir certs --out n1"},
	"cert create-client": {"", "skein cert create-client root --certs-dir certs --out root"},
	"cert list":          {"", "skein cert list --certs-dir certs"},
	"cert check":         {"", "skein cert check --certs-dir n1 --host 10.0.0.1"},
	"cert revoke":        {"", "skein cert revoke n1/node.crt --certs-dir certs"},
	"audit check":        {"", "skein audit check audit.log.1 audit.log"},

	"recover collect": {"", "skein recover collect --data-dir d1 -o n1.collected"},
	"recover plan":    {"", "skein recover plan n1.collected n2.collected --dead n3 -o plan"},
	"recover apply":   {"", "skein recover apply --data-dir d1 --plan plan"},
	"recover verify":  {"", "skein recover verify --plan plan"},

	"diff": {"", `skein diff 127.0.0.1:2379 127.0.0.1:22379
skein diff https://etcd1:2379,https://etcd2:2379 127.0.0.1:2379 --a-cacert ca.crt --prefix /registry/`},
	"backup create": {"", `skein backup create file:///var/backups/skein
skein backup create s3://bucket/skein?region=eu-central-1 --incremental`},
	"backup follow": {"", "skein backup follow file:///var/backups/skein --interval 1m --full-every 24h"},
	"backup list":   {"", "skein backup list file:///var/backups/skein"},
	"backup show":   {"", "skein backup show file:///var/backups/skein 20261121T120000Z-150"},
	"backup verify": {"", "skein backup verify file:///var/backups/skein --deep"},
	"backup prune":  {"", "skein backup prune file:///var/backups/skein --keep 30d --dry-run"},
	"restore": {"", `skein restore file:///var/backups/skein
skein restore file:///var/backups/skein --at 2026-11-24T12:00:00Z`},
	"import etcd":    {"", "skein import etcd a.db"},
	"export etcd":    {"", "skein export etcd a.db --etcd-version 3.6"},
	"mirror start":   {"", "skein mirror start --source-endpoints 127.0.0.1:2379 --endpoints 127.0.0.1:12379 --spool /var/lib/skein-mirror"},
	"mirror status":  {"", "skein mirror status --spool /var/lib/skein-mirror"},
	"mirror cutover": {"", "skein mirror cutover --spool /var/lib/skein-mirror"},
	"mirror abandon": {"", "skein mirror abandon --spool /var/lib/skein-mirror"},

	"explain": {"", `skein explain no-leader
skein explain "etcdserver: mvcc: required revision has been compacted"`},
	"version": {`Cluster Versions are the versions of the formats on disk and between nodes that this build reads and writes (skein cluster show).`, `skein version
skein version -w json`},
}
