package node

import (
	"github.com/skeindb/skein/internal/mutation"
	"github.com/skeindb/skein/placement/driver"
)

// measurer tells placement of this node.
type measurer struct{ c *Core }

// Led implements driver.Measurer.
func (m measurer) Led() []driver.Measure {
	all := m.c.shards.Measures()
	out := make([]driver.Measure, 0, len(all))
	for i := range all {
		if r := &all[i]; r.Leads {
			out = append(out, driver.Measure{Range: r.Descriptor.Range, Term: r.Term, Bytes: r.Bytes, Load: int64(r.Load())})
		}
	}
	return out
}

// Disk implements driver.Measurer: the disk of the data directory.
func (m measurer) Disk() (capacity, used int64) {
	u, err := m.c.o.FS.GetDiskUsage(m.c.o.DataDir)
	if err != nil {
		return 0, 0 // a file system that does not tell, as one in memory
	}
	const most = 1 << 62
	capacity, used = int64(min(u.TotalBytes, most)), int64(min(u.TotalBytes-min(u.AvailBytes, u.TotalBytes), most))
	return capacity, used
}

// Full implements driver.Measurer.
func (m measurer) Full() bool { return m.c.shards.Room(1) != nil }

// Alarms implements driver.Measurer.
func (m measurer) Alarms() (noSpace, corrupt bool) {
	return m.c.full(), len(m.c.host.Quarantined()) > 0
}

// Quarantined implements driver.Measurer.
func (m measurer) Quarantined() []driver.Quarantined {
	var out []driver.Quarantined
	for g, q := range m.c.host.Quarantined() {
		if !g.IsSystem() && !mutation.Is(mutation.QuarantineUntold) {
			out = append(out, driver.Quarantined{Range: g.Range(), Replica: q.Replica, Reason: q.Reason})
		}
	}
	return out
}
