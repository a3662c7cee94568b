package transport

// Crash stops the bus as the death of its process would: the sockets go silent.
func (q *QUIC) Crash() {
	// Closing the sockets first leaves nobody a way to say goodbye.
	for _, s := range q.sockets.listen {
		_ = s.udp.Close()
	}
	_ = q.Close()
}
