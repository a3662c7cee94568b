//go:build !planted

package lease

// mutationState is what a Timer keeps for the bugs of package mutation: nothing.
type mutationState struct{} //nolint:unused // has fields with the build tag planted

func (*Timer) mutateDeadlines(*term) {}
