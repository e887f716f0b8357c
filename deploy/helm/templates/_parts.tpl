{{- define "netattach.values" -}}
{{- /* Keys that a chart of before had not: helm upgrade --reuse-values takes that chart's values.yaml in place of this one's. */ -}}
{{- $uninstall := dict "nodes" list "dryRun" false "force" false -}}
{{- $came := dict "executedPlugins" (dict "enabled" false) "kubernetesBefore122" false "kubernetesBefore130" false "uninstall" $uninstall -}}
{{- $_ := merge .Values $came -}}
{{- end }}
{{- define "netattach.labels" -}}
app.kubernetes.io/name: netattach
app.kubernetes.io/part-of: netattach
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "netattach.image" -}}
{{ required "image.repository is empty: set it to the image in your registry" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- define "netattach.config" -}}
{{- include "netattach.values" . -}}
{{- $settings := .Values.settings -}}
{{- if hasKey $settings "defaultNetwork" }}{{ fail "settings.defaultNetwork contradicts defaultNetwork: set defaultNetwork alone" }}{{ end -}}
{{- if hasKey $settings "kubernetes" }}{{ if hasKey $settings.kubernetes "enabled" }}{{ fail "settings.kubernetes.enabled contradicts the chart, whose agents read the cluster: remove it" }}{{ end }}{{ end -}}
{{- if hasKey $settings "source" }}{{ fail "settings.source contradicts the chart, whose agents read the cluster: remove it" }}{{ end -}}
{{- if and .Values.metrics.enabled (hasKey $settings "metrics") }}{{ if hasKey $settings.metrics "listen" }}{{ fail "settings.metrics.listen contradicts metrics.enabled, which sets it: remove one of them" }}{{ end }}{{ end -}}
{{- if hasKey $settings "metrics" }}{{ if hasKey $settings.metrics "listen" }}{{ if ne $settings.metrics.listen "127.0.0.1:10475" }}{{ fail "settings.metrics.listen contradicts the probes, which ask 127.0.0.1:10475: remove it, or set metrics.enabled for an address that others reach" }}{{ end }}{{ end }}{{ end -}}
{{- if hasKey $settings "log" }}{{ if hasKey $settings.log "format" }}{{ fail "settings.log.format contradicts log.format: set log.format alone" }}{{ end }}{{ end -}}
{{- if and .Values.kubernetesBefore130 .Values.admissionPolicy.enabled }}{{ fail "admissionPolicy.enabled contradicts kubernetesBefore130, whose API servers know no such policy: set it to false" }}{{ end -}}
{{- if hasKey $settings "delegation" }}{{ if hasKey $settings.delegation "root" }}{{ fail "settings.delegation.root contradicts executedPlugins.enabled, which mounts the node's root directory and sets it: set executedPlugins.enabled alone" }}{{ end }}{{ end -}}
{{- $ours := dict "kubernetes" (dict "enabled" true) "defaultNetwork" .Values.defaultNetwork "cniConf" (dict "dir" "/etc/cni/net.d") -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $ours "metrics" (dict "listen" "0.0.0.0:10475") }}{{ end -}}
{{- if ne .Values.log.format "text" }}{{ $_ := set $ours "log" (dict "format" .Values.log.format) }}{{ end -}}
{{- $all := mergeOverwrite $ours (deepCopy $settings) -}}
{{- /* What the agent keeps on the node has to be in a volume of its pod. */ -}}
{{- range list (list "stateDir" (get $all "stateDir") "/var/lib/netattach") (list "runDir" (get $all "runDir") "/run/netattach") (list "bpffs" (get $all "bpffs") "/sys/fs/bpf") (list "cniConf.dir" $all.cniConf.dir "/etc/cni") -}}
{{- $key := index . 0 }}{{ $dir := index . 1 }}{{ $volume := index . 2 }}{{ if $dir }}{{ if not (hasPrefix (printf "%s/" $volume) (printf "%v/" $dir | clean | printf "%s/")) }}{{ fail (printf "settings.%s: %v is in no volume of the agent's pod: set a directory in %s, or remove it" $key $dir $volume) }}{{ end }}{{ end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end }}
