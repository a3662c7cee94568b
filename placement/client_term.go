package placement

// Term returns the placement group's raft term as this node knows it: from raft if the node
// has a replica, else from the last word about a leader. 0 means that nothing was heard yet.
func (c *Client) Term() uint64 {
	own := c.o.Service.machine.leaderState().Term
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(own, c.term)
}
