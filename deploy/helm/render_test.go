package helm

import (
	"errors"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	certmanager "github.com/cert-manager/cert-manager/pkg/apis/certmanager/v1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation"
)

// decoder refuses fields that the API does not know, or that are there twice.
var decoder = func() runtime.Decoder {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		apps.AddToScheme, batch.AddToScheme, core.AddToScheme, policy.AddToScheme, certmanager.AddToScheme, monitoring.AddToScheme,
	} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return serializer.NewCodecFactory(s, serializer.EnableStrict).UniversalDeserializer()
}()

// objects are what the chart makes, by kind and name.
type objects map[string]runtime.Object

func get[T runtime.Object](t *testing.T, o objects, name string) T {
	t.Helper()
	found, ok := o[name].(T)
	if !ok {
		t.Fatalf("there is no %s", name)
	}
	return found
}

// nodes is the StatefulSet of a release named skein.
func (o objects) nodes(t *testing.T) *apps.StatefulSet {
	t.Helper()
	return get[*apps.StatefulSet](t, o, "StatefulSet/skein")
}

// render has helm render the chart as the release skein in the namespace default.
func render(t *testing.T, args ...string) objects {
	t.Helper()
	text, err := template(args...)
	if err != nil {
		t.Fatal(err)
	}
	return decode(t, text)
}

func template(args ...string) (string, error) {
	c := exec.Command(program("helm"), append([]string{"template", "skein", "skein", "--namespace", "default"}, args...)...)
	out, err := c.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = errors.New(string(exit.Stderr))
	}
	return string(out), err
}

func decode(t *testing.T, text string) objects {
	t.Helper()
	all := objects{}
	for _, one := range regexp.MustCompile(`(?m)^---$`).Split(text, -1) {
		if strings.TrimSpace(regexp.MustCompile(`(?m)^#.*$`).ReplaceAllString(one, "")) == "" {
			continue
		}
		o, kind, err := decoder.Decode([]byte(one), nil, nil)
		if err != nil {
			t.Fatalf("%v:\n%s", err, one)
		}
		name := kind.Kind + "/" + o.(meta.Object).GetName()
		if all[name] != nil {
			t.Errorf("there are two of %s", name)
		}
		all[name] = o
	}
	return all
}

// variants are values with which the chart is linted and rendered.
var variants = map[string][]string{
	"defaults":   nil,
	"one node":   {"--set", "replicas=1,founders=1"},
	"other name": {"--set", "fullnameOverride=db,clusterDomain=example.org"},
	"secret":     {"--set", "tls.mode=secret"},
	"cert-manager, and all that can be switched on": {
		"--set", "tls.mode=certManager,tls.issuerRef.name=ca,serviceMonitor.enabled=true,serviceMonitor.labels.release=prometheus",
		"--set", "backup.enabled=true,backup.url=s3://b/p?region=r,backup.credentialsSecret=s3,backup.userSecret=root",
		"--set", "imagePullSecrets[0].name=r,priorityClassName=high,podAnnotations.a=b,podLabels.c=d,nodeSelector.e=f,persistence.storageClass=fast,persistence.annotations.g=h",
		"--set", "zones=true,tolerations[0].key=k,tolerations[0].operator=Exists,extraArgs={--metrics=extensive},extraEnv[0].name=GOGC,extraEnv[0].value=\"100\",service.annotations.i=j,serviceAccount.annotations.k=l",
	},
	"encrypted backups in a folder": {"--set", "backup.enabled=true,backup.url=file:///backup,backup.existingClaim=c,backup.keepFull=0,backup.encryptTo={age1a}"},
}

// Helm has nothing to say of the chart, and the API of Kubernetes takes all that it makes.
func TestRender(t *testing.T) {
	for name, values := range variants {
		t.Run(name, func(t *testing.T) {
			t.Log(output(t, program("helm"), append([]string{"lint", "--strict", "skein"}, values...)...))
			all := render(t, values...)
			var set *apps.StatefulSet
			for name, o := range all {
				if s, ok := o.(*apps.StatefulSet); ok {
					set = s
				}
				for _, wrong := range validation.IsDNS1123Subdomain(o.(meta.Object).GetName()) {
					t.Errorf("%s: %s", name, wrong)
				}
			}
			if set == nil {
				t.Fatal("there are no nodes")
			}
			fits(t, all, set)
		})
	}
}

// fits says what of the objects does not belong together, which the API would take all the same.
func fits(t *testing.T, all objects, set *apps.StatefulSet) {
	t.Helper()
	pod := labels.Set(set.Spec.Template.Labels)
	selects := func(name string, selector labels.Set) {
		t.Helper()
		if len(selector) == 0 || !selector.AsSelector().Matches(pod) {
			t.Errorf("%s selects %v, and nodes have %v", name, selector, pod)
		}
	}
	selects("the StatefulSet", set.Spec.Selector.MatchLabels)
	for _, c := range set.Spec.Template.Spec.TopologySpreadConstraints {
		selects("a constraint", c.LabelSelector.MatchLabels)
	}
	ports := map[string]core.ContainerPort{}
	for _, p := range set.Spec.Template.Spec.Containers[0].Ports {
		for _, wrong := range validation.IsValidPortName(p.Name) {
			t.Errorf("port %s: %s", p.Name, wrong)
		}
		ports[p.Name] = p
	}
	for name, o := range all {
		switch o := o.(type) {
		case *core.Service:
			selects(name, o.Spec.Selector)
			for _, p := range o.Spec.Ports {
				to, ok := ports[p.TargetPort.StrVal]
				if !ok || to.ContainerPort != p.Port || strings.Replace(string(p.Protocol), "TCP", "", 1) != strings.Replace(string(to.Protocol), "TCP", "", 1) {
					t.Errorf("%s: port %s leads to %+v", name, p.Name, to)
				}
			}
		case *policy.PodDisruptionBudget:
			selects(name, o.Spec.Selector.MatchLabels)
		case *monitoring.ServiceMonitor:
			s := labels.Set(o.Spec.Selector.MatchLabels).AsSelector()
			if !s.Matches(labels.Set(get[*core.Service](t, all, "Service/"+set.Spec.ServiceName).Labels)) || s.Matches(labels.Set(get[*core.Service](t, all, "Service/"+set.Name).Labels)) {
				t.Errorf("%s does not scrape the pods once: %v", name, s)
			}
		case *batch.CronJob:
			p := o.Spec.JobTemplate.Spec.Template
			if labels.Set(set.Spec.Selector.MatchLabels).AsSelector().Matches(labels.Set(p.Labels)) {
				t.Errorf("the pods of %s are taken for nodes: %v", name, p.Labels)
			}
			mounted(t, name, &p.Spec)
		}
	}
	mounted(t, set.Name, &set.Spec.Template.Spec, "data")
	headless := get[*core.Service](t, all, "Service/"+set.Spec.ServiceName)
	udp := slices.ContainsFunc(headless.Spec.Ports, func(p core.ServicePort) bool { return p.Port == 2380 && p.Protocol == core.ProtocolUDP })
	if !headless.Spec.PublishNotReadyAddresses || headless.Spec.ClusterIP != core.ClusterIPNone || !udp {
		t.Errorf("%+v", headless.Spec)
	}
}

// mounted says which mounts of a pod have no volume, and which volumes are not mounted.
func mounted(t *testing.T, name string, p *core.PodSpec, claimed ...string) {
	t.Helper()
	have := map[string]bool{}
	for _, v := range p.Volumes {
		have[v.Name] = false
	}
	for _, c := range claimed {
		have[c] = false
	}
	for _, c := range append(p.InitContainers, p.Containers...) {
		for _, m := range c.VolumeMounts {
			if _, ok := have[m.Name]; !ok {
				t.Errorf("%s: nothing is there to mount at %s", name, m.MountPath)
			}
			have[m.Name] = true
		}
	}
	for v, used := range have {
		if !used {
			t.Errorf("%s: nobody mounts %s", name, v)
		}
	}
}

// A change of replicas alone changes nothing else, so no pod is made anew.
func TestReplicasChangeNothingElse(t *testing.T) {
	for _, values := range [][]string{nil, {"--set", "tls.mode=secret"}, {"--set", "tls.mode=certManager,tls.issuerRef.name=ca"}} {
		three, five := render(t, values...), render(t, append(values, "--set", "replicas=5")...)
		if got := *five.nodes(t).Spec.Replicas; got != 5 {
			t.Errorf("%d replicas", got)
		}
		five.nodes(t).Spec.Replicas = three.nodes(t).Spec.Replicas
		if !equality.Semantic.DeepEqual(three, five) {
			t.Errorf("%q: more than the number differs", values)
		}
	}
}

// What cannot work is refused with what to do.
func TestRefusals(t *testing.T) {
	for values, want := range map[string]string{
		"replicas=1":                             "Give founders no more than replicas",
		"tls.mode=secret,replicas=10":            "raise tls.nodes",
		"tls.mode=certManager":                   "needs tls.issuerRef.name",
		"tls.mode=some":                          "tls",
		"replica=4":                              "replica",
		"replicas=0":                             "replicas",
		"image.tags=1":                           "tags",
		"memoryBudgetBytes=1":                    "memoryBudgetBytes",
		"backup.enabled=true":                    "needs backup.url",
		"backup.enabled=true,backup.url=ftp://a": "url",
		"backup.enabled=true,backup.url=file:///backup":                                     "needs backup.existingClaim",
		"backup.enabled=true,backup.url=s3://a,tls.mode=secret":                             "needs tls.clientSecret",
		"backup.enabled=true,backup.url=s3://a,backup.encryptTo={age1a}":                    "needs backup.keepFull=0",
		"backup.enabled=true,backup.url=s3://a,backup.keepFull=0,backup.encryptTo={secret}": "encryptTo",
	} {
		if _, err := template("--set", values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", values, err, want)
		}
	}
}
