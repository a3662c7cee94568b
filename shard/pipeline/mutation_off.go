//go:build !planted

package pipeline

// mutationState is what a pipeline keeps for the bugs of package mutation: nothing.
type mutationState struct{} //nolint:unused // has fields with the build tag planted

func (*batch) mutateAnswers(*Answers) {}
func (*Pipeline) mutateKeep()         {}
func (*Pipeline) mutateKept()         {}
