package config

import (
	"errors"
	"math"
	"net/url"
	"time"
)

// Setters of the honoured flags by the type of the field.

func setString(f func(*Config) *string) func(*Config, value) error {
	return func(c *Config, v value) error { *f(c) = v.text; return nil }
}

func setBool(f func(*Config) *bool) func(*Config, value) error {
	return func(c *Config, v value) error { *f(c) = v.b; return nil }
}

// setExtensive reads --metrics.
func setExtensive(c *Config, v value) error {
	if v.text != "basic" && v.text != "extensive" {
		return errors.New("must be basic or extensive")
	}
	c.ExtensiveMetrics = v.text == "extensive"
	return nil
}

// setConsole reads --console.
func setConsole(c *Config, v value) error {
	switch m := ConsoleMode(v.text); m {
	case ConsoleReadOnly, ConsoleFull, ConsoleOff:
		c.Console = m
		return nil
	}
	return errors.New("must be read-only, full or off")
}

// setPeerTransport reads --peer-transport.
func setPeerTransport(c *Config, v value) error {
	if v.text != "quic" && v.text != "tls" {
		return errors.New("must be quic or tls")
	}
	c.PeersByTCP = v.text == "tls"
	return nil
}

func setDuration(f func(*Config) *time.Duration) func(*Config, value) error {
	return func(c *Config, v value) error { *f(c) = v.d; return nil }
}

func setURLs(f func(*Config) *[]url.URL) func(*Config, value) error {
	return func(c *Config, v value) error { *f(c) = v.urls; return nil }
}

func setList(f func(*Config) *[]string) func(*Config, value) error {
	return func(c *Config, v value) error { *f(c) = v.list; return nil }
}

func setInt(f func(*Config) *int) func(*Config, value) error {
	return func(c *Config, v value) error {
		if v.u > math.MaxInt32 {
			return errors.New("value out of range")
		}
		*f(c) = int(v.u)
		return nil
	}
}

func setInt64(f func(*Config) *int64) func(*Config, value) error {
	return func(c *Config, v value) error {
		if v.u > math.MaxInt64 {
			return errors.New("value out of range")
		}
		*f(c) = int64(v.u)
		return nil
	}
}
