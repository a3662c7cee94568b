//go:build !planted

package lease

// planted is what a Keeper keeps for the bugs of package plant: nothing.
type planted struct{} //nolint:unused // has fields with the build tag planted

func (*Keeper) plantDeadlines(*term) {}
