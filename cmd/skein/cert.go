package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/skeindb/skein/adminapi"
	"github.com/skeindb/skein/certs"
	"github.com/skeindb/skein/clock"
	"github.com/skeindb/skein/config"
)

// certFlags are the flags of all commands for certificates.
type certFlags struct{ dir string }

func (f *certFlags) open() *certs.Dir { return certs.At(f.dir, clock.System().Wall) }

// makingFlags adds the flags of a command that makes a certificate.
func makingFlags(c *cobra.Command, o *certs.Issue, days int) *cobra.Command {
	c.Flags().IntVar(&o.Days, "days", days, "days for which it is valid")
	c.Flags().BoolVar(&o.Overwrite, "overwrite", false, "replace files that are there already")
	return c
}

// issuingFlags adds those of a command that makes one with the authority's key.
func issuingFlags(c *cobra.Command, o *certs.Issue) *cobra.Command {
	c.Flags().StringVar(&o.Out, "out", "", "directory for the certificate, its key, ca.crt and ca.crl; without it, --certs-dir")
	return makingFlags(c, o, certs.LeafDays)
}

func newCert() *cobra.Command {
	f := &certFlags{}
	c := &cobra.Command{
		Use: "cert", Short: "Make and check the certificates of nodes and clients", Args: cobra.NoArgs, RunE: needsCommand,
		Long: `Make and check the certificates of nodes and clients.

The directory of the authority holds ca.crt, ca.key, ca.crl (what is revoked) and
issued/ (a copy of each certificate). Keep ca.key off the nodes. A node has ca.crt,
ca.crl, node.crt and node.key, a client ca.crt, client.NAME.crt and client.NAME.key.`,
	}
	c.PersistentFlags().StringVar(&f.dir, "certs-dir", "certs", "directory of the certificates")
	c.AddCommand(newCreateCA(f), newCreateNode(f), newCreateClient(f), newCertList(f), newCertCheck(f), newCertRevoke(f))
	return c
}

func newCreateCA(f *certFlags) *cobra.Command {
	o := &certs.Issue{}
	return makingFlags(&cobra.Command{
		Use: "create-ca", Short: "Make the authority that signs all certificates", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error { return made(c)(f.open().CreateCA(o.Days, o.Overwrite)) }),
	}, o, certs.CADays)
}

func newCreateNode(f *certFlags) *cobra.Command {
	o, hosts := &certs.Issue{}, []string(nil)
	c := issuingFlags(&cobra.Command{
		Use: "create-node NAME", Short: "Make the certificate of the node that is started with --name NAME", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error { return made(c)(f.open().CreateNode(args[0], hosts, *o)) }),
	}, o)
	c.Flags().StringSliceVar(&hosts, "host", nil, "name or address at which clients and nodes reach the node; can be repeated")
	return c
}

func newCreateClient(f *certFlags) *cobra.Command {
	o := &certs.Issue{}
	c := issuingFlags(&cobra.Command{
		Use: "create-client NAME", Short: "Make the certificate of a client, with NAME as common name", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error { return made(c)(f.open().CreateClient(args[0], *o)) }),
	}, o)
	c.Flags().BoolVar(&o.NoUser, "no-user", false, "leave the common name out: it is nobody's user, as etcd's gRPC proxy wants it")
	return c
}

// made returns what tells of a new certificate.
func made(c *cobra.Command) func(certs.Info, error) error {
	return func(i certs.Info, err error) error {
		if err == nil {
			fmt.Fprintf(c.OutOrStdout(), "%s: %s %s, until %s, serial number %s\n", i.File, i.Kind, i.Name, i.Until.UTC().Format("2006-01-02"), i.Serial)
		}
		return err
	}
}

func newCertList(f *certFlags) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use: "list", Short: "List the certificates: until when they are valid, and which are revoked", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			all, err := f.open().List()
			switch {
			case err != nil:
				return err
			case output == string(adminapi.JSON):
				return json.NewEncoder(c.OutOrStdout()).Encode(all)
			case output != string(adminapi.Table):
				return &config.UsageError{Err: fmt.Errorf("-w %s: there are table and json", output)}
			}
			return certs.WriteList(c.OutOrStdout(), all)
		}),
	}
	c.Flags().StringVarP(&output, "write-out", "w", string(adminapi.Table), "table or json")
	return c
}

func newCertCheck(f *certFlags) *cobra.Command {
	var hosts []string
	c := &cobra.Command{
		Use: "check", Short: "Say whether a node's files fit together, and what to do if not", Args: cobra.NoArgs,
		RunE: failing(func(c *cobra.Command, _ []string) error {
			r := f.open().Check(hosts)
			for _, err := range r.Notes {
				fmt.Fprintf(c.OutOrStdout(), "soon: %v\n", err)
			}
			for _, err := range r.Problems {
				fmt.Fprintf(c.OutOrStdout(), "wrong: %v\n", err)
			}
			if n := len(r.Problems); n > 0 {
				return &certs.Problem{What: fmt.Sprintf("%s cannot be used; reasons: %d", f.dir, n), Next: "do what is said above, then check again"}
			}
			fmt.Fprintf(c.OutOrStdout(), "%s can be used by the node %s\n", f.dir, r.Node)
			return nil
		}),
	}
	c.Flags().StringSliceVar(&hosts, "host", nil, "name or address that the node's certificate has to hold for; can be repeated")
	return c
}

func newCertRevoke(f *certFlags) *cobra.Command {
	return &cobra.Command{
		Use: "revoke SERIAL|FILE", Short: "Add a certificate to the authority's revocation list, ca.crl", Args: cobra.ExactArgs(1),
		RunE: failing(func(c *cobra.Command, args []string) error {
			i, before, err := f.open().Revoke(args[0])
			switch {
			case err != nil:
				return err
			case before:
				fmt.Fprintf(c.OutOrStdout(), "%s %s, serial number %s, has been revoked before\n", i.Kind, i.Name, i.Serial)
				return nil
			}
			fmt.Fprintf(c.OutOrStdout(), "%s %s, serial number %s, is revoked; copy %s to all nodes\n", i.Kind, i.Name, i.Serial, certs.CRLFile)
			return nil
		}),
	}
}
