package config

import "net/url"

// socketFlags are those of sockets, memory and the log's files that etcd's users set.
func socketFlags() []Flag {
	return []Flag{
		{
			Name: "listen-client-http-urls", kind: kindURLs, Default: "", File: "listen-client-http-urls", Section: sectionMember,
			Usage: "URLs to listen on for clients that speak HTTP alone. With them listen-client-urls serve gRPC alone.",
			Note:  "HTTP/1.1 and HTTP/2. Not needed for the sake of gRPC: on a shared address the two do not disturb each other.",
			set:   setURLs(func(c *Config) *[]url.URL { return &c.ListenClientHTTPURLs }),
		},
		{
			Name: "socket-reuse-port", kind: kindBool, Default: "false", File: "socket-options.reuse-port", Section: sectionMember,
			Usage: "Let another process listen at the addresses for clients too.",
			Note:  "The peers' port belongs to one process: the system would divide their packets between the two.",
			set:   setBool(func(c *Config) *bool { return &c.SocketReusePort }),
		},
		meaningless(sectionMember, "socket-reuse-address", kindBool, "false", "socket-options.reuse-address",
			"Go lets a listener take over an address in TIME_WAIT in any case."),
		{
			Name: "memory-mlock", kind: kindBool, Default: "false", File: "memory-mlock", Section: sectionMember,
			Usage: "Keep the memory of the process from being swapped out.",
			Note:  "All of it that is used, not only that of the store. Needs the right to lock so much (ulimit -l, LimitMEMLOCK= of systemd).",
			set:   setBool(func(c *Config) *bool { return &c.LockMemory }),
		},
		{
			Name: "enable-log-rotation", kind: kindBool, Default: "false", File: "enable-log-rotation", Section: sectionLogging,
			Usage: "Rotate the log. Exactly one of log-outputs is a file then.", set: setBool(func(c *Config) *bool { return &c.Log.Rotate }),
		},
		{
			Name: "log-rotation-config-json", kind: kindString, Default: defaultRotation, File: "log-rotation-config-json", Section: sectionLogging,
			Usage: "When the log is rotated and what is kept: maxsize in MiB, maxage in days, maxbackups; 0 keeps all.",
			Note:  "Empty means the default.",
			set: func(c *Config, v value) error {
				if v.text != "" {
					c.Log.Rotation = v.text
				}
				return nil
			},
		},
		{
			Name: "unsafe-no-fsync", kind: kindBool, Default: "false", File: "unsafe-no-fsync", Section: sectionUnsafe,
			Usage: "Never wait for the disk. A crash of the machine loses or corrupts data, and votes: for tests alone.",
			set:   setBool(func(c *Config) *bool { return &c.NoFsync }),
		},
	}
}
