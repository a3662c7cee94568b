//go:build !planted

package shard

// planted is what a replica keeps for the bugs of package plant: nothing.
type planted struct{}

func (*batch) plantAnswers(*answers) {}
func (*Replica) plantKeep()          {}
func (*Replica) plantKept()          {}
