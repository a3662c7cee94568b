//go:build !planted

package shard

// mutationState is what a replica keeps for the bugs of package mutation: nothing.
type mutationState struct{} //nolint:unused // has fields with the build tag planted

func (*batch) mutateAnswers(*answers) {}
func (*Replica) mutateKeep()          {}
func (*Replica) mutateKept()          {}
