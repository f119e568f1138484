{{- define "kvctl.labels" -}}
app.kubernetes.io/name: kvctl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvctl
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Metadata of a resource: a list of the root context, the suffix of its name, and further labels, which win. */}}
{{- define "kvctl.metadata" -}}
{{- $root := first . -}}
name: {{ printf "%s%s" $root.Release.Name (index . 1) | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- merge (dict) (last .) (include "kvctl.labels" $root | fromYaml) | toYaml | nindent 2 }}
{{- end }}

{{- define "kvctl.workers" -}}
{{- with .Values.workers.matchLabels -}}
matchLabels:
  {{- toYaml . | nindent 2 }}
{{- else -}}
{}
{{- end }}
{{- end }}
