// Package processtest has a service manager in virtual time, for tests of what a node tells one.
package processtest

import (
	"strings"
	"sync"
	"testing/synctest"
)

// Manager is a service manager within a bubble of package synctest. The zero value was told nothing.
type Manager struct {
	mu   sync.Mutex
	said []string // guarded by mu
}

// Tell is what a supervisor tells by.
func (m *Manager) Tell(state string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.said = append(m.said, state)
	return nil
}

// Take returns what came since the last Take, once all goroutines of the bubble wait.
func (m *Manager) Take() string {
	synctest.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	all := strings.Join(m.said, "\n")
	m.said = nil
	return all
}
