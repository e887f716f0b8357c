//! Every metric: name, kind, meaning, labels and how many series it may have. `docs/metrics.md` is this list.

/// A metric, as it is written and documented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Metric {
    /// Its name, with its unit and without the suffix of its kind.
    pub(super) name: &'static str,
    /// Its kind.
    pub(super) kind: Kind,
    /// Its meaning, in one line without a full stop.
    pub(super) help: &'static str,
    /// Its labels, each with the values that it may have.
    pub(super) labels: &'static [(&'static str, &'static str)],
    /// Most series. Further label values are counted in one series whose labels are all [`OTHER`].
    pub(super) most: usize,
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Only grows, from 0 at the agent's start.
    Counter,
    /// Any value.
    Gauge,
    /// Durations in seconds, as a histogram.
    Seconds,
}

/// The label value of the series for all that exceeds the bound of a metric.
pub(super) const OTHER: &str = "other";

/// Most series of a metric with one for each network: more networks than a node uses.
const NETWORKS: usize = 1024;
/// Most series of a metric with one for each attachment.
const ATTACHMENTS: usize = 16_384;

const NETWORK: (&str, &str) =
    ("network", "namespace/name of the definition, or the name of a network of a file");
const POD: [(&str, &str); 4] =
    [("namespace", "of the pod"), ("pod", "its name"), ("interface", "its interface"), NETWORK];

/// Declares the metrics and the list of all of them.
macro_rules! metrics {
    ($($constant:ident = $kind:ident $name:literal, $help:literal, [$($labels:expr),*], $most:expr;)*) => {
        $(pub(super) const $constant: Metric =
            Metric { name: $name, kind: Kind::$kind, help: $help, labels: &[$($labels),*], most: $most };)*
        /// All metrics.
        #[cfg(test)]
        pub(super) const ALL: &[Metric] = &[$($constant),*];
    };
}

const RESULT: (&str, &str) = ("result", "`ok`, or the code of the CNI error");

metrics! {
    BUILD = Gauge "netattach_build_info", "Is 1; what runs",
        [("version", "of the agent"), ("layout", "version of the layout of the BPF maps")], 1;
    READY = Gauge "netattach_ready", "Whether a condition of `netattachctl status` holds, 1 or 0",
        [("condition", "one of at most eight")], 16;
    TROUBLES = Gauge "netattach_problems", "Problems of this node and its pods that `netattachctl status` lists", [], 1;
    OBJECT_PROBLEMS = Gauge "netattach_object_problems",
        "Definitions and policies with problems that `netattachctl status` lists, of namespaces with pods or used networks here", [], 1;
    OPERATION = Seconds "netattach_cni_operation_duration_seconds",
        "Time of requests of runtimes and users, from their arrival to the answer",
        [("verb", "`ADD`, `DEL`, `CHECK`, `GC`, `STATUS`, `VERSION`, `attach`, `detach` or `other`"), RESULT], 64;
    STAGE = Seconds "netattach_add_stage_duration_seconds",
        "Time of the parts of ADDs that succeeded; they add up to the work of an ADD, without its waiting",
        [("stage", "part of the agent's work, such as `journal`, `plugin` or `RTM_NEWLINK`; `the rest`")], 64;
    PLUGIN = Seconds "netattach_plugin_duration_seconds", "Time of calls of other plugins",
        [("plugin", "type of the plugin"), ("verb", "`ADD`, `DEL`, `CHECK`, `GC`, `STATUS`, `VERSION`"),
         ("result", "`ok` or `failed`")], 256;
    ATTACHMENTS_BY = Gauge "netattach_attachments", "Attachments of this node",
        [NETWORK, ("kind", "type of the plugin that made it"), ("enforcement", "how far policies are enforced there")], NETWORKS;
    ATTACHMENT_INFO = Gauge "netattach_attachment_info",
        "Is 1; joins an interface of a pod with its network: cAdvisor's metrics have the first three labels too; without it by `metrics.attachmentInfo`",
        [POD[0], POD[1], POD[2], POD[3], ("host_interface", "its end or its parent on the node, empty if it has none"),
         ("container_id", "of the sandbox, its first 12 characters")], ATTACHMENTS;
    POOL_SIZE = Gauge "netattach_ipam_pool_addresses", "Addresses of a network's pool that pods may have",
        [NETWORK, ("family", "`IPv4` or `IPv6`")], NETWORKS;
    POOL_USED = Gauge "netattach_ipam_pool_addresses_used", "Addresses of a network's pool that are held",
        [NETWORK, ("family", "`IPv4` or `IPv6`")], NETWORKS;
    PACKETS = Counter "netattach_packets", "Packets that the programs let pass",
        [NETWORK, ("direction", "`received` or `sent`, as the pod sees it")], NETWORKS;
    BYTES = Counter "netattach_bytes", "Bytes of packets that the programs let pass",
        [NETWORK, ("direction", "`received` or `sent`, as the pod sees it")], NETWORKS;
    DROPS = Counter "netattach_drops", "Packets that the programs dropped; network `-`: of devices without an attachment",
        [NETWORK, ("reason", "one of those in docs/troubleshooting.md")], 4096;
    NEW_FLOWS = Counter "netattach_flows_opened", "Flows that policies allowed", [NETWORK], NETWORKS;
    DISPLACED = Counter "netattach_flows_displaced", "Flows displaced by other flows of the same attachment", [NETWORK], NETWORKS;
    FLOWS = Gauge "netattach_flow_table_entries", "Entries of the flow table", [("family", "`IPv4` or `IPv6`")], 2;
    FLOW_CAPACITY = Gauge "netattach_flow_table_capacity", "Most entries of the flow table", [("family", "`IPv4` or `IPv6`")], 2;
    POLICIES = Gauge "netattach_policies", "Policies that the source has", [], 1;
    PROGRAMMED = Gauge "netattach_policy_programmed", "Compiled policies in the maps; attachments share equal ones", [], 1;
    RULES = Gauge "netattach_policy_rules", "Rules of the compiled policies in the maps", [], 1;
    POLICY_PROBLEMS = Gauge "netattach_policy_problems",
        "Policies that are not in force as written, of namespaces with attached pods here", [], 1;
    POLICY_WARNINGS = Gauge "netattach_policy_warnings",
        "Policies of these namespaces that may not do what their authors intend", [], 1;
    POLICY_PODS = Gauge "netattach_policy_pod_problems",
        "Pods whose addresses or policies are not certain, such as those that claim an address of a pod of this node", [], 1;
    UNENFORCED = Gauge "netattach_policy_unenforced_attachments",
        "Attachments that a policy selects and where it is not enforced, or not as far as required", [], 1;
    POLICY_CHANGE = Seconds "netattach_policy_change_duration_seconds",
        "Time of changes of policies, from the source's change to the kernel",
        [("phase", "`read`, `compile`, `write`, `switch`, or `all`")], 5;
    PUT_BACK = Counter "netattach_programs_put_back", "Programs that another program had detached and the agent attached again", [], 1;
    RECORDS = Gauge "netattach_journal_records", "Records of sandboxes in the journal", [], 1;
    LEFT_OVER = Gauge "netattach_journal_unfinished", "Containers with operations of earlier agents that are still to be finished", [], 1;
    COLLECTED = Counter "netattach_collected_sandboxes", "Sandboxes that were detached although no runtime asked for it", [], 1;
    API = Seconds "netattach_api_request_duration_seconds",
        "Time of requests to the API server until the answer begins",
        [("verb", "`get`, `list`, `watch`, `create`, `patch`, `delete` or `other`"), ("resource", "the API's name"),
         ("code", "HTTP status, or `none` if there was no answer")], 256;
    POD_PACKETS = Counter "netattach_attachment_packets", "Packets of an attachment that the programs let pass, with `metrics.perPod`",
        [POD[0], POD[1], POD[2], POD[3], ("direction", "`received` or `sent`, as the pod sees it")], ATTACHMENTS;
    POD_BYTES = Counter "netattach_attachment_bytes", "Bytes of those packets, with `metrics.perPod`",
        [POD[0], POD[1], POD[2], POD[3], ("direction", "`received` or `sent`, as the pod sees it")], ATTACHMENTS;
    POD_DROPS = Counter "netattach_attachment_drops", "Packets of an attachment that the programs dropped, with `metrics.perPod`",
        [POD[0], POD[1], POD[2], POD[3], ("reason", "one of those in docs/troubleshooting.md")], ATTACHMENTS;
    SERIES_OVER = Counter "netattach_series_over_bound", "Values that were added to a series `other`, because their metric has as many as it may",
        [("metric", "its name")], 64;
    SCRAPE = Gauge "netattach_scrape_duration_seconds", "Time of the agent's work for the scrape before this one", [], 1;
    MEMORY = Gauge "process_resident_memory_bytes", "Resident memory of the agent", [], 1;
    DESCRIPTORS = Gauge "process_open_fds", "Open file descriptors of the agent", [], 1;
    MOST_DESCRIPTORS = Gauge "process_max_fds", "Most file descriptors that it may have", [], 1;
    STARTED = Gauge "process_start_time_seconds", "When the agent started, in seconds since 1970", [], 1;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write;

    use super::*;

    /// The table of `docs/metrics.md`.
    fn table() -> String {
        let mut table =
            "| metric | kind | what it says | labels | most series |\n|---|---|---|---|--:|\n".to_owned();
        for metric in ALL {
            let (kind, suffix) = match metric.kind {
                Kind::Counter => ("counter", "_total"),
                Kind::Gauge => ("gauge", ""),
                Kind::Seconds => ("histogram", ""),
            };
            let labels: Vec<String> =
                metric.labels.iter().map(|(label, values)| format!("`{label}`: {values}")).collect();
            let Metric { name, help, most, .. } = metric;
            let labels = labels.join("<br>");
            writeln!(table, "| `{name}{suffix}` | {kind} | {help} | {labels} | {most} |").unwrap();
        }
        table
    }

    #[test]
    fn the_page_has_every_metric() {
        let page = include_str!("../../../../../docs/metrics.md");
        let (_, rest) = page.split_once("<!-- metrics -->\n").expect("docs/metrics.md has the mark");
        let (there, _) = rest.split_once("<!-- end of metrics -->").expect("docs/metrics.md has the end");
        assert_eq!(there, table(), "docs/metrics.md has to be:\n{}", table());
    }

    #[test]
    fn names_follow_the_rules_of_prometheus() {
        let names: BTreeSet<&str> = ALL.iter().map(|metric| metric.name).collect();
        assert_eq!(names.len(), ALL.len(), "each name once");
        for metric in ALL {
            let Metric { name, kind, labels, most, .. } = metric;
            assert!(name.starts_with("netattach_") || name.starts_with("process_"), "{name}");
            assert!(!name.ends_with("_total") && !name.contains("__"), "{name}");
            assert_eq!(
                *kind == Kind::Seconds,
                name.ends_with("_duration_seconds") && *kind != Kind::Gauge,
                "{name}"
            );
            assert!(
                labels.iter().all(|(label, _)| *label != "le" && *label != "job" && *label != "instance"),
                "{name}"
            );
            assert!(*most > 0 && (*most == 1 || !labels.is_empty()), "{name}");
        }
    }
}
