# Divides CPU profiles among the parts of a node: go tool pprof -traces FILES | awk
# -v ops=N -f bench/parts.awk. A sample belongs to the part that stands nearest to its
# leaf, so that a system call of the wal is the wal's, and memory that shard asks for
# is shard's. With ops, the operations that were made while the profiles were taken,
# a column has the CPU per operation.

function seconds(s) {
	if (s ~ /hrs?$/) return s * 3600
	if (s ~ /mins?$/) return s * 60
	if (s ~ /ms$/) return s / 1e3
	if (s ~ /(us|µs)$/) return s / 1e6
	if (s ~ /ns$/) return s / 1e9
	return s + 0
}

function part_of(f) {
	if (f ~ /^runtime\.(gcBgMarkWorker|gcAssistAlloc|bgsweep|bgscavenge|gcStart|gcMarkTermination)/) return "garbage collection"
	if (f ~ /^github\.com\/skeindb\/skein\//) { sub(/^github\.com\/skeindb\/skein\//, "", f); sub(/[.\/].*/, "", f); return f }
	if (f ~ /^github\.com\/quic-go\//) return "transport: quic-go"
	if (f ~ /^github\.com\/cockroachdb\/pebble/) return "engine: Pebble"
	if (f ~ /^go\.etcd\.io\/raft\//) return "raftgroup: etcd's raft"
	if (f ~ /^google\.golang\.org\/grpc|^golang\.org\/x\/net\/http2|^net\/http\./) return "etcdapi: gRPC"
	return ""
}

function finish() {
	if (sample == "") return
	if (part == "") part = "scheduler and the rest of the runtime"
	spent[part] += sample; total += sample
	sample = ""; part = ""
}

/^-+\+-+/ { finish(); next }
# The first line of a stack begins with what it took; labels stand above it.
sample == "" && $1 ~ /^[0-9.]+(ns|us|µs|ms|s|mins?|hrs?)$/ { sample = seconds($1); part = part_of($2); next }
sample != "" && part == "" { part = part_of($1) }

END {
	finish()
	print "| part | share |" (ops ? " CPU per operation, µs |" : "")
	print "| --- | ---: |" (ops ? " ---: |" : "")
	fflush()
	sorted = "sort -t '|' -k 3 -rn"
	for (p in spent) printf "| %s | %.1f %% |%s\n", p, 100 * spent[p] / total, ops ? sprintf(" %.2f |", spent[p] * 1e6 / ops) : "" | sorted
	close(sorted)
	printf "| all | 100 %% |%s\n", ops ? sprintf(" %.2f |", total * 1e6 / ops) : ""
}
