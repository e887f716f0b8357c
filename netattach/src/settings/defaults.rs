//! The defaults of the settings.

use std::path::PathBuf;

use super::{
    AlwaysAllow, BpfLog, CniConf, ConfRepair, Delegation, EstablishedOnChange, InvalidAnnotation, Kubernetes,
    LogSettings, MetricsSettings, Midstream, OtherMacvlans, Overflow, PolicyTypes, Repair, Settings,
    StatusWrites, TracesSettings, WrittenCommonRules,
};
use crate::attach::RepeatedAdd;
use crate::builtin;
use crate::delegate::DEFAULT_DIRECTORY;
use crate::enforce::admission::EnforcementRequirement;
use crate::fast_path;
use crate::hooks::AttachBy;
use crate::multus;
use crate::npwg::status::Form;
use crate::plan::CachedResults;
use crate::plan::resolve::UnsupportedPortMappings;
use crate::rpc::shim::DEFAULT_AGENT_WAIT;
use crate::step::EnforceWhen;

impl Default for Settings {
    fn default() -> Self {
        Self {
            source: PathBuf::new(),
            kubernetes: Kubernetes::default(),
            pod_wait_seconds: 5,
            run_dir: "/run/netattach".into(),
            state_dir: "/var/lib/netattach".into(),
            bpffs: "/sys/fs/bpf/netattach".into(),
            stand_by_seconds: 0,
            default_network: "kube-system/default".into(),
            default_network_namespace: "kube-system".into(),
            builtin: builtin::Settings::default(),
            namespace_isolation: false,
            global_namespaces: vec!["default".into()],
            cni_bin_dirs: vec!["/opt/cni/bin".into()],
            cni_conf_dir: "/etc/cni/netattach.d".into(),
            device_info_dir: "/var/run/k8s.cni.cncf.io/devinfo".into(),
            pod_resources_socket: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
            device_checkpoint: "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint".into(),
            network_status: Form::default(),
            cni_conf: CniConf::default(),
            multus_state_dir: multus::STATE_DIRECTORY.into(),
            collect_after_seconds: 60,
            runtime_socket: PathBuf::new(),
            repair: Repair::default(),
            repair_after_seconds: 60,
            delegation: Delegation::default(),
            separate_pools: true,
            invalid_annotation: InvalidAnnotation::default(),
            unsupported_port_mappings: UnsupportedPortMappings::default(),
            // The kubelet's API, and kube-proxy's health check for load balancers.
            reserved_host_ports: vec![10250, 10256],
            keep_cluster_routes: None,
            cluster_cidrs: Vec::new(),
            pod_sources: Vec::new(),
            repeated_add: RepeatedAdd::default(),
            policy_types_inference: PolicyTypes::default(),
            network_policy: None,
            always_allow: AlwaysAllow::default(),
            common_rules: WrittenCommonRules::default(),
            on_overflow: Overflow::default(),
            unenforceable: EnforcementRequirement::default(),
            attach: AttachBy::default(),
            max_attachments: 8192,
            bpf_log: BpfLog::default(),
            bpf_log_object: PathBuf::new(),
            bpf_log_of: String::new(),
            parallel_adds: 8,
            new_flows_per_second: 25_000,
            midstream: Midstream::default(),
            established_on_change: EstablishedOnChange::default(),
            fast_path: fast_path::Mode::default(),
            xdp: fast_path::Xdp::default(),
            accept_icmp: false,
            accept_icmpv6: false,
            other_macvlans: OtherMacvlans::default(),
            metrics: MetricsSettings::default(),
            log: LogSettings::default(),
            traces: TracesSettings::default(),
        }
    }
}

impl Default for Kubernetes {
    fn default() -> Self {
        Self {
            enabled: false,
            kubeconfig: PathBuf::new(),
            node_name: String::new(),
            status: StatusWrites::default(),
            startup_taint: String::new(),
            watch_seconds: 240,
        }
    }
}

impl Default for CniConf {
    fn default() -> Self {
        Self {
            dir: PathBuf::new(),
            name: "00-netattach.conflist".into(),
            network: "netattach".into(),
            repair: ConfRepair::default(),
            remove: false,
            agent_wait_seconds: DEFAULT_AGENT_WAIT,
        }
    }
}

impl Default for Delegation {
    fn default() -> Self {
        Self {
            exec: Vec::new(),
            timeout_seconds: 60,
            memory_limit_mib: None,
            result_cache: CachedResults::default(),
            cache_dir: DEFAULT_DIRECTORY.into(),
            enforce: EnforceWhen::default(),
            root: PathBuf::new(),
        }
    }
}
