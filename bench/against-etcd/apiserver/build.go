// Package apiserver builds a kube-apiserver, starts it on the client URLs of an etcd or of Skein, and loads it as
// the nodes and controllers of a Kubernetes cluster do.
package apiserver

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// kubernetes is the module that has kube-apiserver's source.
const kubernetes = "k8s.io/kubernetes"

// Build compiles kube-apiserver of a version of Kubernetes, such as v1.36.3, into a file, by a module of its own in dir. It takes
// some minutes.
func Build(ctx context.Context, version, dir, file string) error {
	if !strings.HasPrefix(version, "v1.") {
		return fmt.Errorf("build kube-apiserver: %q is no version of Kubernetes, such as v1.36.3", version)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// A module around this place is none of its business.
	modFile := filepath.Join(dir, "go.mod")
	if err := os.WriteFile(modFile, []byte("module build\n"), 0o600); err != nil {
		return err
	}
	var source struct{ GoMod string }
	if err := goJSON(ctx, dir, &source, "mod", "download", "-json", kubernetes+"@"+version); err != nil {
		return err
	}
	var upstream module
	if err := goJSON(ctx, dir, &upstream, "mod", "edit", "-json", source.GoMod); err != nil {
		return err
	}
	if err := os.WriteFile(modFile, []byte(upstream.build(version)), 0o600); err != nil {
		return err
	}
	cmd := goTool(ctx, dir, "build", "-mod=mod", "-ldflags", "-X k8s.io/component-base/version.gitVersion="+version,
		"-o", file, kubernetes+"/cmd/kube-apiserver")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build kube-apiserver %s in %s: %w\n%s", version, dir, err, text)
	}
	return nil
}

func goTool(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "GOWORK=off", "PWD="+dir)
	return cmd
}

// goJSON runs go and takes what it prints.
func goJSON(ctx context.Context, dir string, to any, args ...string) error {
	cmd := goTool(ctx, dir, args...)
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	if err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, text)
	}
	return nil
}

// module is a go.mod as go prints it.
type module struct {
	Go      string
	Replace []struct{ Old, New struct{ Path string } }
}

// build is the go.mod of a module that can build the commands of this one. Kubernetes replaces its staging modules by folders of its
// repository, which a module that requires it cannot see. They are published with the same minor and patch version.
func (m *module) build(version string) string {
	var text strings.Builder
	fmt.Fprintf(&text, "module build\n\ngo %s\n\nrequire %s %s\n\n", m.Go, kubernetes, version)
	for _, r := range m.Replace {
		if strings.HasPrefix(r.New.Path, "./staging/") {
			fmt.Fprintf(&text, "replace %s => %s v0.%s\n", r.Old.Path, r.Old.Path, strings.TrimPrefix(version, "v1."))
		}
	}
	return text.String()
}
