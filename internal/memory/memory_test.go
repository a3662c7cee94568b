package memory

import (
	"testing"
	"testing/fstest"
)

func TestWithin(t *testing.T) {
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
			if got := within(root, test.machine); got != test.want {
				t.Errorf("%d, want %d", got, test.want)
			}
		})
	}
}

// TestAvailable: this machine says something.
func TestAvailable(t *testing.T) {
	if got := Available(); got < 16<<20 || got > total() {
		t.Errorf("%d of %d", got, total())
	}
}
