{{/* A pod's name is also its peer's name, which has at most 32 letters: NAME-joined-999. */}}
{{- define "dataplane.name" -}}
{{- .Release.Name | trunc 20 | trimSuffix "-" -}}
{{- end -}}

{{- define "dataplane.plane" -}}
{{- .Values.plane | default .Release.Name -}}
{{- end -}}

{{- define "dataplane.labels" -}}
app.kubernetes.io/name: dataplane
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Mebibytes of 512Mi, 8Gi, 1Ti. */}}
{{- define "dataplane.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . }}{{ mul $number 1048576 }}
{{- else if hasSuffix "Gi" . }}{{ mul $number 1024 }}
{{- else }}{{ $number }}{{ end -}}
{{- end -}}

{{/* The memory of a pod. The arena counts towards its limit. */}}
{{- define "dataplane.memory" -}}
{{- $arena := include "dataplane.mebibytes" .Values.arena | int64 -}}
{{- $needed := add $arena (include "dataplane.mebibytes" .Values.overhead | int64) -}}
{{- $limit := dig "limits" "memory" (printf "%dMi" $needed) .Values.resources -}}
{{- if lt (include "dataplane.mebibytes" $limit | int64) $needed -}}
{{- fail (printf "resources.limits.memory is %s; an arena of %s counts towards it, and the peer needs %s more: give at least %dMi, or a smaller arena" $limit .Values.arena .Values.overhead $needed) -}}
{{- end -}}
{{- $limit -}}
{{- end -}}

{{- define "dataplane.domain" -}}
{{ include "dataplane.name" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{/* The founding peers, by names that each pod also has in its own /etc/hosts. */}}
{{- define "dataplane.seeds" -}}
{{- $root := . -}}
{{- $seeds := list -}}
{{- range $nth := until (int .Values.peers) -}}
{{- $seeds = append $seeds (printf "tcp://%s-%d.%s:%d" (include "dataplane.name" $root) $nth (include "dataplane.domain" $root) (int $root.Values.port)) -}}
{{- end -}}
{{- join "," $seeds -}}
{{- end -}}
