# Turns what go test -bench prints into the tables of bench/results/make-bench.md: a heading
# for each package, a row for each benchmark, a column for each unit, and the machine
# and the commit above them. Benchmarks that report other units begin a new table.

# short gives three digits that count, and the thousands apart.
function short(v,    s, out) {
	v += 0
	if (v != 0 && v < 10) return sprintf("%.2f", v)
	if (v < 100) return sprintf("%.1f", v)
	s = sprintf("%.0f", v); out = ""
	while (length(s) > 3) { out = "," substr(s, length(s) - 2) out; s = substr(s, 1, length(s) - 3) }
	return s out
}

function begin(    i, line, rule) {
	line = "\n| benchmark |"; rule = "| --- |"
	for (i = 4; i <= NF; i += 2) { line = line " " $i " |"; rule = rule " ---: |" }
	print line "\n" rule
}

/^cpu: / && !shown { printf "%s, %s cores, %s, commit %s\n", substr($0, 6), cores, go, commit; shown = 1 }
/^pkg: / { pkg = $2; sub(/^github.com\/skeindb\/skein\//, "", pkg); before = "" }
/^Benchmark/ && NF >= 4 {
	units = ""
	for (i = 4; i <= NF; i += 2) units = units " " $i
	if (before == "") printf "\n### %s\n", pkg
	if (units != before) begin()
	before = units
	row = $1
	sub(/^Benchmark/, "", row); sub(/-[0-9]+$/, "", row)
	row = "| " row " |"
	for (i = 3; i < NF; i += 2) row = row " " short($i) " |"
	print row
}
/^(--- FAIL|FAIL|panic:)/ { failed = failed "\n" $0 }
END { if (failed != "") { print "\nFAILED:" failed; exit 1 } }
