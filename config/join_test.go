package config

import "testing"

// With --initial-cluster and --join, who is named founds and all others join, so that all nodes can have the same flags.
func TestFoundOrJoin(t *testing.T) {
	flags := []string{"--initial-cluster=n1=http://n1:2380,n2=http://n2:2380", "--join=n1:2379,n2:2379"}
	founder, _ := mustLoad(t, append(flags, "--name=n1", "--initial-advertise-peer-urls=http://n1:2380"))
	if len(founder.InitialCluster) != 2 || len(founder.Join) != 0 {
		t.Errorf("n1: founders %v, joins %v", founder.InitialCluster, founder.Join)
	}
	joiner, _ := mustLoad(t, append(flags, "--name=n3", "--initial-advertise-peer-urls=http://n3:2380"))
	if len(joiner.InitialCluster) != 0 || len(joiner.Join) != 2 {
		t.Errorf("n3: founders %v, joins %v", joiner.InitialCluster, joiner.Join)
	}
}
