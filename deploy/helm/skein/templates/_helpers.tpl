{{- define "skein.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Names of pods are labels of DNS, and stand before "-headless" and the like. */ -}}
{{- define "skein.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "skein.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "skein.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "skein.selector" -}}
app.kubernetes.io/name: {{ include "skein.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "skein.labels" -}}
{{ include "skein.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "skein.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "skein.scheme" -}}
{{ ternary "http" "https" (eq .Values.tls.mode "none") }}
{{- end -}}

{{- define "skein.headless" -}}
{{ include "skein.fullname" . }}-headless
{{- end -}}

{{- /* The domain of the pods: POD.DOMAIN is a pod's name. */ -}}
{{- define "skein.domain" -}}
{{ include "skein.headless" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- define "skein.client" -}}
{{ include "skein.scheme" . }}://{{ include "skein.fullname" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:2379
{{- end -}}

{{- define "skein.initialCluster" -}}
{{- $root := . -}}
{{- $founders := list -}}
{{- range $i := until (int .Values.founders) -}}
{{- $pod := printf "%s-%d" (include "skein.fullname" $root) $i -}}
{{- $founders = append $founders (printf "%s=%s://%s.%s:2380" $pod (include "skein.scheme" $root) $pod (include "skein.domain" $root)) -}}
{{- end -}}
{{- join "," $founders -}}
{{- end -}}

{{- define "skein.secretPrefix" -}}
{{ default (printf "%s-node" (include "skein.fullname" .)) .Values.tls.secretPrefix }}
{{- end -}}

{{- define "skein.clientSecret" -}}
{{ default (printf "%s-client" (include "skein.fullname" .)) .Values.tls.clientSecret }}
{{- end -}}

{{- /* Programs of the image run so, in every pod. */ -}}
{{- define "skein.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "skein.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* What no schema can say. */ -}}
{{- define "skein.check" -}}
{{- if and (gt (int .Values.founders) 0) (lt (int .Values.replicas) (int .Values.founders)) -}}
{{- fail (printf "replicas is %d and founders %d: all founders have to be there at the first start. Give founders no more than replicas; a cluster that runs does not read it any more" (int .Values.replicas) (int .Values.founders)) -}}
{{- end -}}
{{- if and (ne .Values.tls.mode "none") (gt (int .Values.replicas) (int .Values.tls.nodes)) -}}
{{- fail (printf "replicas is %d and only tls.nodes=%d have certificates: raise tls.nodes" (int .Values.replicas) (int .Values.tls.nodes)) -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "certManager") (not .Values.tls.issuerRef.name) -}}
{{- fail "tls.mode=certManager needs tls.issuerRef.name: an issuer that signs for this cluster alone" -}}
{{- end -}}
{{- if .Values.backup.enabled -}}
{{- if not .Values.backup.url -}}
{{- fail "backup.enabled needs backup.url" -}}
{{- end -}}
{{- if and (hasPrefix "file:" .Values.backup.url) (not .Values.backup.existingClaim) -}}
{{- fail "a backup.url of a folder needs backup.existingClaim, which is mounted at /backup" -}}
{{- end -}}
{{- if and .Values.backup.encryptTo .Values.backup.keepFull -}}
{{- fail "backup.encryptTo needs backup.keepFull=0: only who has the identity can read the backups, so run skein backup prune there" -}}
{{- end -}}
{{- if and (eq .Values.tls.mode "secret") (not .Values.tls.clientSecret) -}}
{{- fail "backup.enabled with tls.mode=secret needs tls.clientSecret" -}}
{{- end -}}
{{- end -}}
{{- end -}}
