//! docs/migrate-from-multus.md, as written, on a node where Multus has attached a pod. The actions of Multus are
//! simulated before: the reference plugins are executed, and the files of Multus and libcni are written. `crictl`
//! stands for a runtime that calls the plugins named by the first file of its directory.

use netattach_tests::guide::{Machine, Page, Tools};
use netattach_tests::tools;

pub(super) const MIGRATE: Page =
    Page { path: "docs/migrate-from-multus.md", text: include_str!("../../../docs/migrate-from-multus.md") };

const MULTUS: &str = r#"
mkdir -p /opt/cni/bin /etc/cni/net.d /etc/netattach/manifests /var/lib/cni/multus/results
cp $home/plugins/{bridge,macvlan,host-local} /opt/cni/bin/
export PATH=$home/target/dist:$PATH
# Another host on the network of the card.
ip netns add host
ip link add eth0 up type veth peer name eth0 netns host
ip -n host address add 10.45.0.200/24 dev eth0
ip -n host link set eth0 up

plugin='{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": {"type": "host-local", "subnet": "10.44.0.0/24"}'
cluster='{"cniVersion": "1.0.0", "name": "cbr0", "plugins": ['$plugin'}]}'
lan='{"cniVersion": "1.0.0", "name": "lan", "type": "macvlan", "master": "eth0", "ipam": {"type": "host-local", "subnet": "10.45.0.0/24"}}'
echo "$cluster" > /etc/cni/net.d/10-cluster.conflist
cat > /etc/cni/net.d/00-multus.conf <<'EOT'
{"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus", "logLevel": "error",
 "clusterNetwork": "/etc/cni/net.d/10-cluster.conflist",
 "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig"}
EOT
cat > /etc/netattach/manifests/shop.yaml <<EOT
{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}
---
{"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinition", "metadata": {"namespace": "shop", "name": "lan"},
 "spec": {"config": "$(sed 's/"/\\"/g' <<< "$lan")"}}
---
{"apiVersion": "v1", "kind": "Pod",
 "metadata": {"namespace": "shop", "name": "old", "annotations": {"k8s.v1.cni.cncf.io/networks": "lan"}}}
---
{"apiVersion": "v1", "kind": "Pod",
 "metadata": {"namespace": "shop", "name": "new", "annotations": {"k8s.v1.cni.cncf.io/networks": "lan"}}}
EOT

call() { # VERB POD INTERFACE EXECUTABLE CONFIGURATION
  CNI_COMMAND=$1 CNI_CONTAINERID=$2 CNI_NETNS=/run/netns/$2 CNI_IFNAME=$3 CNI_PATH=/opt/cni/bin \
  CNI_ARGS="IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=$2" /opt/cni/bin/$4 <<< "$5"
}
crictl() { # runp|stopp POD
  local first=$(ls /etc/cni/net.d | head -1)
  if ! grep -q '"type": *"netattach"' /etc/cni/net.d/$first; then
    echo "the runtime calls what $first says"
    return
  fi
  local conf='{"cniVersion": "1.0.0", "name": "netattach", "type": "netattach"}'
  case $1 in
    runp) ip netns add $2; call ADD $2 eth0 netattach "$conf" > /dev/null ;;
    stopp) call DEL $2 eth0 netattach "$conf"; ip netns del $2 ;;
  esac
}

# As Multus attaches a pod.
ip netns add old
remember() { # INTERFACE NETWORK CONFIGURATION RESULT
  cat > /var/lib/cni/multus/results/$2-old-$1 <<EOT
{"kind": "cniCacheV1", "containerId": "old", "config": "$(base64 -w0 <<< "$3")", "ifName": "$1", "networkName": "$2",
 "netns": "/run/netns/old", "cniArgs": [["IgnoreUnknown", "1"], ["K8S_POD_NAMESPACE", "shop"], ["K8S_POD_NAME", "old"]],
 "result": $4}
EOT
}
remember eth0 cbr0 "$cluster" "$(call ADD old eth0 bridge "$plugin"', "cniVersion": "1.0.0", "name": "cbr0"}')"
remember net1 lan "$lan" "$(call ADD old net1 macvlan "$lan")"
cat > /var/lib/cni/multus/old <<EOT
[{"Conf": {"name": "cbr0"}, "ConfList": {}, "Name": "", "ifnameRequest": "", "Bytes": "$(base64 -w0 <<< "$cluster")"},
 {"Conf": {"name": "lan"}, "ConfList": {}, "Name": "shop/lan", "ifnameRequest": "", "Bytes": "$(base64 -w0 <<< "$lan")"}]
EOT
"#;

#[test]
fn the_guide_runs_as_written_and_both_ways_leave_nothing() {
    let test = "the_guide_runs_as_written_and_both_ways_leave_nothing";
    let plugins = ["bridge", "macvlan", "host-local"];
    let Some(reference) = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &plugins) else { return };
    let tools = Tools { plugins: Some(&reference), ..Tools::default() };
    MIGRATE.run("", Machine::With(MULTUS), tools).unwrap();
}
