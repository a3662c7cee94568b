//go:build !planted

package shard

// planted is what a replica keeps for the bugs of package plant: nothing.
type planted struct{} //nolint:unused // has fields with the build tag planted

func (*batch) plantAnswers(*answers) {}
func (*Replica) plantKeep()          {}
func (*Replica) plantKept()          {}
