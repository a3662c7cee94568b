package limits

import (
	"runtime"
	"testing"
	"testing/fstest"
)

func TestMemoryWithin(t *testing.T) {
	const gib = 1 << 30
	for name, test := range map[string]struct {
		files   map[string]string
		machine int64
		want    int64
	}{
		"no cgroup":               {nil, 8 * gib, 8 * gib},
		"nobody says":             {nil, -1, -1},
		"v2 without a limit":      {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8 * gib, 8 * gib},
		"v2 in a container":       {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "2147483648\n"}, 8 * gib, 2 * gib},
		"v2 of a service":         {map[string]string{"proc/self/cgroup": "0::/system.slice/skein.service\n", "sys/fs/cgroup/system.slice/skein.service/memory.max": "1073741824\n"}, 8 * gib, gib},
		"v2 of a slice around it": {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1073741824\n", "sys/fs/cgroup/a/b/memory.max": "2147483648\n"}, 8 * gib, gib},
		"v2, where it is slowed":  {map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "2147483648\n", "sys/fs/cgroup/a/memory.high": "1073741824\n"}, 8 * gib, gib},
		"v2 without its own path": {map[string]string{"sys/fs/cgroup/memory.max": "1073741824\n"}, 8 * gib, gib},
		"v2, machine unknown":     {map[string]string{"sys/fs/cgroup/memory.max": "1073741824\n"}, -1, gib},
		"v2 above the machine":    {map[string]string{"sys/fs/cgroup/memory.max": "1099511627776\n"}, 8 * gib, 8 * gib},
		"a path from above":       {map[string]string{"proc/self/cgroup": "0::/../../a\n", "sys/fs/cgroup/a/memory.max": "1073741824\n"}, 8 * gib, gib},
		"v1 without a limit":      {map[string]string{"proc/self/cgroup": "9:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8 * gib, 8 * gib},
		"v1 of a service":         {map[string]string{"proc/self/cgroup": "3:cpu,cpuacct:/x\n9:memory:/a\n0::/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824\n"}, 8 * gib, gib},
		"v1 beside others":        {map[string]string{"proc/self/cgroup": "9:hugetlb,memory:/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824\n"}, 8 * gib, gib},
		"v1 in a container":       {map[string]string{"proc/self/cgroup": "9:memory:/docker/4c1\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n"}, 8 * gib, gib},
		"not understood":          {map[string]string{"proc/self/cgroup": "x\n\n1:y\n", "sys/fs/cgroup/memory.max": "?\n"}, 8 * gib, 8 * gib},
	} {
		t.Run(name, func(t *testing.T) {
			root := fstest.MapFS{}
			for path, text := range test.files {
				root[path] = &fstest.MapFile{Data: []byte(text)}
			}
			if got := memoryWithin(root, test.machine); got != test.want {
				t.Errorf("%d, want %d", got, test.want)
			}
		})
	}
}

// TestOfThisMachine: this machine says something.
func TestOfThisMachine(t *testing.T) {
	if got := Memory(); got < 16<<20 || got > total() {
		t.Errorf("%d of %d", got, total())
	}
	if got := Processors(); got <= 0 || got > float64(runtime.NumCPU()) {
		t.Errorf("%v of %d processors", got, runtime.NumCPU())
	}
}

func TestProcessorsWithin(t *testing.T) {
	for name, test := range map[string]struct {
		files map[string]string
		want  float64
	}{
		"no cgroup":               {nil, 4},
		"v2 without a limit":      {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 4},
		"v2, half of one":         {map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5},
		"v2 of a slice around it": {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"}, 1},
		"v2 above the machine":    {map[string]string{"sys/fs/cgroup/cpu.max": "800000 100000\n"}, 4},
		"v1 without a limit":      {map[string]string{"proc/self/cgroup": "3:cpu,cpuacct:/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 4},
		"v1 of a service":         {map[string]string{"proc/self/cgroup": "3:cpu,cpuacct:/x\n", "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "150000\n", "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"}, 1.5},
		"not understood":          {map[string]string{"sys/fs/cgroup/cpu.max": "1\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "1000\n"}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			root := fstest.MapFS{}
			for path, text := range test.files {
				root[path] = &fstest.MapFile{Data: []byte(text)}
			}
			if got := processorsWithin(root, 4); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}
