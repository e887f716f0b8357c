{{- define "netattach.values" -}}
{{- /* Keys that a chart of before had not: helm upgrade --reuse-values takes that chart's values.yaml in place of this one's. */ -}}
{{- $uninstall := dict "nodes" list "dryRun" false "force" false -}}
{{- $came := dict "executedPlugins" (dict "enabled" false) "imagePullSecrets" list "kubernetesBefore122" false "kubernetesBefore130" false "uninstall" $uninstall -}}
{{- $_ := merge .Values $came -}}
{{- /* Of keys that came later still, and of keys inside of others, templates ask with get, which takes a missing one for empty. */ -}}
{{- end }}
{{- define "netattach.labels" -}}
app.kubernetes.io/name: netattach
app.kubernetes.io/part-of: netattach
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "netattach.image" -}}
{{- $repository := required "image.repository is empty: set it to the image in your registry" .Values.image.repository -}}
{{- with get .Values.image "digest" }}{{ $repository }}@{{ . }}{{ else }}{{ $repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}
{{- define "netattach.initResources" -}}
{{- $usual := dict "requests" (dict "cpu" "10m" "memory" "16Mi") "limits" (dict "memory" "64Mi") -}}
{{- if hasKey .Values "initResources" }}{{ toYaml .Values.initResources }}{{ else }}{{ toYaml $usual }}{{ end -}}
{{- end }}
{{- define "netattach.hostPath" -}}
{{- /* Of the values, a key of hostPaths and the usual path. */ -}}
{{- get (get (index . 0) "hostPaths" | default dict) (index . 1) | default (index . 2) -}}
{{- end }}
{{- define "netattach.configName" -}}
netattach-{{ include "netattach.config" . | sha256sum | trunc 10 }}
{{- end }}
{{- define "netattach.config" -}}
{{- include "netattach.values" . -}}
{{- $settings := .Values.settings -}}
{{- if hasKey $settings "defaultNetwork" }}{{ fail "settings.defaultNetwork contradicts defaultNetwork: set defaultNetwork alone" }}{{ end -}}
{{- $kubernetes := get $settings "kubernetes" | default dict -}}
{{- if hasKey $kubernetes "enabled" }}{{ fail "settings.kubernetes.enabled contradicts the chart, whose agents read the cluster: remove it" }}{{ end -}}
{{- if hasKey $kubernetes "kubeconfig" }}{{ fail "settings.kubernetes.kubeconfig contradicts the chart, whose agents have a service account: remove it" }}{{ end -}}
{{- if hasKey $kubernetes "nodeName" }}{{ fail "settings.kubernetes.nodeName contradicts the chart, whose agents are told the name of their node: remove it" }}{{ end -}}
{{- if hasKey $settings "source" }}{{ fail "settings.source contradicts the chart, whose agents read the cluster: remove it" }}{{ end -}}
{{- /* Any address: of IPv4, of both families. A Prometheus and the probes reach the agent by either. */ -}}
{{- $listen := get (get $settings "metrics" | default dict) "listen" -}}
{{- $anywhere := or (eq (printf "%v" $listen) "0.0.0.0:10475") (eq (printf "%v" $listen) "[::]:10475") -}}
{{- if and .Values.metrics.enabled (hasKey $settings "metrics") }}{{ if and (hasKey $settings.metrics "listen") (not $anywhere) }}{{ fail "settings.metrics.listen contradicts metrics.enabled, which sets it: remove one of them" }}{{ end }}{{ end -}}
{{- if hasKey $settings "metrics" }}{{ if and (hasKey $settings.metrics "listen") (not $anywhere) }}{{ if ne (printf "%v" $listen) "127.0.0.1:10475" }}{{ fail "settings.metrics.listen contradicts the probes, which ask 127.0.0.1:10475: remove it, or set metrics.enabled for an address that others reach" }}{{ end }}{{ end }}{{ end -}}
{{- if hasKey $settings "log" }}{{ if hasKey $settings.log "format" }}{{ fail "settings.log.format contradicts log.format: set log.format alone" }}{{ end }}{{ end -}}
{{- if and .Values.kubernetesBefore122 (not .Values.kubernetesBefore130) }}{{ fail "kubernetesBefore122 contradicts kubernetesBefore130, as API servers before 1.22 are before 1.30 too: set both to true" }}{{ end -}}
{{- $rolling := get (get .Values "updateStrategy" | default dict) "rollingUpdate" | default dict -}}
{{- if and .Values.kubernetesBefore122 (hasKey $rolling "maxSurge") }}{{ fail "updateStrategy.rollingUpdate.maxSurge contradicts kubernetesBefore122, whose DaemonSets have none: remove it" }}{{ end -}}
{{- if and .Values.kubernetesBefore130 .Values.admissionPolicy.enabled }}{{ fail "admissionPolicy.enabled contradicts kubernetesBefore130, whose API servers know no such policy: set it to false" }}{{ end -}}
{{- $taint := get $kubernetes "startupTaint" | default "" | printf "%v" -}}
{{- if and .Values.admissionPolicy.enabled $taint (not (hasPrefix "netattach.dev/" $taint)) }}{{ fail "settings.kubernetes.startupTaint contradicts admissionPolicy.enabled, whose policies let agents remove taints with keys that begin with netattach.dev/ only: name such a key, or set admissionPolicy.enabled to false" }}{{ end -}}
{{- if hasKey $settings "delegation" }}{{ if hasKey $settings.delegation "root" }}{{ if or .Values.executedPlugins.enabled (ne (printf "%v" $settings.delegation.root) "/") }}{{ fail "settings.delegation.root contradicts executedPlugins.enabled, which mounts the node's root directory and sets it: set executedPlugins.enabled alone" }}{{ end }}{{ end }}{{ end -}}
{{- $conf := get $settings "cniConf" | default dict -}}
{{- $chained := and (eq .Values.defaultNetwork "chained") (not (get $conf "remove")) -}}
{{- if and $chained (get $conf "dir") }}{{ fail "settings.cniConf.dir contradicts defaultNetwork chained, where the runtime's list is another program's: remove it" }}{{ end -}}
{{- $ours := dict "kubernetes" (dict "enabled" true) "defaultNetwork" .Values.defaultNetwork -}}
{{- if not $chained }}{{ $_ := set $ours "cniConf" (dict "dir" "/etc/cni/net.d") }}{{ end -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $ours "metrics" (dict "listen" "0.0.0.0:10475") }}{{ end -}}
{{- if ne .Values.log.format "text" }}{{ $_ := set $ours "log" (dict "format" .Values.log.format) }}{{ end -}}
{{- $all := mergeOverwrite $ours (deepCopy $settings) -}}
{{- /* What the agent keeps on the node, or finds there, has to be in a volume of its pod. */ -}}
{{- $cache := get (get $all "delegation" | default dict) "cacheDir" -}}
{{- $places := list
  (list "stateDir" (get $all "stateDir") "a directory in /var/lib/netattach" "/var/lib/netattach")
  (list "runDir" (get $all "runDir") "a directory in /run/netattach" "/run/netattach")
  (list "bpffs" (get $all "bpffs") "a directory in /sys/fs/bpf" "/sys/fs/bpf")
  (list "cniConf.dir" (get (get $all "cniConf" | default dict) "dir") "a directory in /etc/cni" "/etc/cni")
  (list "cniConfDir" (get $all "cniConfDir") "a directory in /etc/cni" "/etc/cni")
  (list "builtin.dataDir" (get (get $all "builtin" | default dict) "dataDir") "a directory in /var/lib/cni" "/var/lib/cni")
  (list "delegation.cacheDir" $cache "a directory in /var/lib/cni" "/var/lib/cni")
  (list "multusStateDir" (get $all "multusStateDir") "a directory in /var/lib/cni" "/var/lib/cni")
  (list "deviceInfoDir" (get $all "deviceInfoDir") "a directory in /var/run/k8s.cni.cncf.io" "/var/run/k8s.cni.cncf.io")
  (list "podResourcesSocket" (get $all "podResourcesSocket") "a file in /var/lib/kubelet/pod-resources" "/var/lib/kubelet/pod-resources")
  (list "deviceCheckpoint" (get $all "deviceCheckpoint") "a file in /var/lib/kubelet/device-plugins" "/var/lib/kubelet/device-plugins")
-}}
{{- if not .Values.executedPlugins.enabled }}{{ range get $all "cniBinDirs" | default list }}{{ $places = append $places (list "cniBinDirs" . "executedPlugins.enabled, or directories in /opt/cni/bin" "/opt/cni/bin") }}{{ end }}{{ end -}}
{{- range $places -}}
{{- $key := index . 0 }}{{ $place := index . 1 }}{{ $instead := index . 2 }}{{ $volume := index . 3 }}{{ if $place }}{{ if not (hasPrefix (printf "%s/" $volume) (printf "%v/" $place | clean | printf "%s/")) }}{{ fail (printf "settings.%s: %v is in no volume of the agent's pod: set %s, or remove it" $key $place $instead) }}{{ end }}{{ end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end }}
