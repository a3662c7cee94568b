// Package embed runs a node of Skein within another Go program, as etcd's package embed does for etcd.
//
//	cfg := config.Default()
//	cfg.DataDir = "/var/lib/app/skein"
//	s, err := embed.Start(ctx, cfg, embed.WithLogger(logger))
//	if err != nil {
//		return err
//	}
//	defer s.Stop(context.Background())
//	<-s.Ready()
//	_, err = s.Client().Put(ctx, "greeting", "hello")
//
// For tests of programs that use etcd see package embedtest.
//
// # What is guaranteed
//
//   - A Server is all that Start has made. Several may run in one program, of one cluster or of several, each with a
//     directory and ports of its own. After Stop no goroutine, port, lock or file of it is left.
//   - The program is left alone. A Server ends no process, catches no signal, sets nothing of the garbage collector, and
//     registers nothing globally. Its metrics are served at /metrics of its client URLs. Two things are the process's all
//     the same: while copies of ranges, backups or password hashes run, GOMAXPROCS is up to eight higher, and
//     QUIC_GO_DISABLE_RECEIVE_BUFFER_WARNING is set in its environment.
//   - The data are those of the command: a directory may be served by one today and by the other tomorrow.
//   - A bad configuration is refused before a directory is touched, with the words of the command line. They name settings by
//     their flags.
//
// # What if
//
//   - There is no quorum yet, as the other founders have not started: Start waits for a majority of them, until its context
//     ends. Start the nodes of one program at the same time.
//   - The quorum is lost: the Server serves on, and requests fail in their time, as with the command.
//   - The disk fails, or the node is removed from its cluster: Done is closed and Err says why. Requests fail; Stop it.
//   - The program ends without Stop: nothing acknowledged is lost, as after kill -9.
//   - A disk hangs: Stop waits for it beyond its context, since nothing may be used twice. The command exits then; whether this
//     program does is its own decision.
//   - Users are checked (etcdctl auth enable): Client has no user any more, NewClient takes one.
package embed
