package placement

// Term returns the placement group's raft term as this node knows it: from raft
// where the node has a replica, else as it was last told with a leader's name. 0
// means that nothing was heard yet.
func (c *Client) Term() uint64 {
	own := c.o.Service.machine.leaderState().Term
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(own, c.term)
}
