# A node as a guide finds it: an agent, a default network, pods on it, and a card `eth1` on a network where 10.20.0.1 answers on
# port 3260. The agent reads manifests from a directory; `kubectl apply` puts them there, and does what kubelet and runtime do:
# a sandbox for each pod, ADD, and the pod's command with busybox as its image.
export PATH=$PWD/target/dist:$PATH
mkdir -p /run/manifests /run/node /run/image
for applet in $($home/image/busybox --list); do ln -s $home/image/busybox /run/image/$applet; done
cat > /run/manifests/default.yaml <<'EOT'
apiVersion: k8s.cni.cncf.io/v1
kind: NetworkAttachmentDefinition
metadata: {namespace: kube-system, name: default}
spec:
  config: |
    {"cniVersion": "1.0.0", "type": "bridge", "bridge": "na0", "isDefaultGateway": true,
     "ipam": {"type": "host-local", "subnet": "10.210.0.0/24"}}
EOT
ip netns add san
ip link add eth1 up type veth peer name eth0 netns san
ip -n san address add 10.20.0.1/24 dev eth0
ip -n san link set eth0 up
ip netns exec san /run/image/nc -ll -p 3260 -e /run/image/cat &
netattachd --source /run/manifests 2> /run/node/agent.log &
netattachctl status --wait --timeout 120s > /dev/null

sandbox() { # VERB NAMESPACE POD
  printf '{"cniVersion": "1.0.0", "name": "netattach", "type": "netattach"}' |
    CNI_COMMAND=$1 CNI_CONTAINERID=$3 CNI_NETNS=/run/netns/$3 CNI_IFNAME=eth0 CNI_PATH=$home/plugins \
      CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAMESPACE=$2;K8S_POD_NAME=$3" netattach
}

pods() { # FILE: starts its pods that do not run
  while read -r namespace pod command; do
    [ -e /run/netns/"$pod" ] && continue
    ip netns add "$pod"
    if ! sandbox ADD "$namespace" "$pod" > /run/node/"$pod"; then ip netns delete "$pod"; continue; fi
    eval "ip netns exec $pod env -i PATH=/run/image $command" < /dev/null > /dev/null 2>&1 &
  done < "$1".pods
}

kubectl() {
  [ "$1" = -n ] && shift 2
  case "$1 $2" in
    "create namespace") echo "{apiVersion: v1, kind: Namespace, metadata: {name: $3}}" > /run/manifests/namespace-"$3".yaml ;;
    "apply -f")
      cp "$3" /run/manifests/."$3"
      mv /run/manifests/."$3" /run/manifests/"$3"
      pods "$3"
      ;;
    "delete -f")
      rm /run/manifests/"$3"
      while read -r namespace pod _; do
        [ -e /run/netns/"$pod" ] || continue
        for process in $(ip netns pids "$pod"); do kill -9 "$process"; done
        sandbox DEL "$namespace" "$pod"
        ip netns delete "$pod"
      done < "$3".pods
      ;;
    "exec "*)
      local pod=$2
      shift 3
      ip netns exec "$pod" env -i PATH=/run/image "$@"
      ;;
    "wait "*) ;;
    "describe "*) echo "  Warning  FailedCreatePodSandBox  ... plugin type=\"netattach\" failed (add): $(sed -n 's/.*"msg": *"\(.*\)".*/\1/p' /run/node/"$3")" ;;
    *) echo "this kubectl does not know $*" >&2; return 1 ;;
  esac
}
