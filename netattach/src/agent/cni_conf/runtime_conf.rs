//! Checks whether the runtime calls netattach for each pod exactly once, as the runtime itself reports
//! (`runtimeSocket`): the directory of configurations ([`super::conf_keeper`]) does not show which files,
//! or how many, a runtime reads.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::agent::health::Health;
use crate::cri::{self, LoadedList, Networking};
use crate::error_chain::Chain;
use crate::ticks;

/// How often the runtime is asked.
const INTERVAL: Duration = Duration::from_secs(30);
/// The interval after its report has changed: it may be about to read a file that was just written.
const SOON: Duration = Duration::from_secs(2);
/// The interval while there is a problem, or when a request wants the status.
const WHILE_WRONG: Duration = Duration::from_secs(5);
/// The type of netattach among plugins.
const NETATTACH: &str = "netattach";
/// Most configurations that are listed.
const NAMED: usize = 4;

/// Asks the runtime, forever. A report counts when it was the same twice.
pub(in crate::agent) async fn keep_asking(health: Arc<Health>, socket: PathBuf) {
    let mut before = None;
    loop {
        let mut pause = INTERVAL;
        match cri::networking(&socket).await {
            Ok(read) => {
                let said = read.and_then(|read| problem(&read, health.conf_directory()));
                let is_same = before.as_ref() == Some(&said);
                if is_same || said.is_none() {
                    health.runtime_reads(said.clone());
                }
                if said.is_some() {
                    pause = if is_same { WHILE_WRONG } else { SOON };
                }
                before = Some(said);
            }
            // The runtime may be restarting. Its last report stays.
            Err(error) => {
                tracing::debug!(error = %Chain(&error), "the runtime does not say which CNI configurations it reads");
            }
        }
        // Both may be dropped at any time: a notification is kept.
        tokio::select! {
            () = ticks::pause(pause) => {}
            () = async {
                tokio::time::sleep(WHILE_WRONG).await;
                health.runtime_wanted().await;
            } => {}
        }
    }
}

/// Returns the problem with the configurations that the runtime has read. `ours`: the directory of
/// netattach's own file.
fn problem(read: &Networking, ours: Option<&Path>) -> Option<String> {
    let (own, others): (Vec<&LoadedList>, Vec<&LoadedList>) =
        read.lists.iter().partition(|list| list.plugins.iter().any(|plugin| plugin == NETATTACH));
    let (read_from, others) = (read.directory.display(), named(&others));
    if own.len() > 1 {
        return Some(format!(
            "the runtime calls netattach {} times for each pod, by {}: leave one of them in {read_from}, or set the runtime's \
             max_conf_num to 1",
            own.len(),
            named(&own)
        ));
    }
    match (own.first(), ours.filter(|ours| *ours != read.directory), read.lists.is_empty()) {
        (Some(_), _, _) if others.is_empty() => None,
        (Some(_), _, _) => Some(format!(
            "the runtime attaches each pod by {others} as well: set its max_conf_num to 1, or remove that from {read_from}"
        )),
        (None, Some(ours), _) => Some(format!(
            "the runtime reads CNI configurations from {read_from}, and netattach writes its own to {}: {}; set cniConf.dir to \
             the runtime's directory, or the runtime's conf_dir to that",
            ours.display(),
            if others.is_empty() {
                "no pod starts".to_owned()
            } else {
                format!("pods are attached by {others} alone")
            }
        )),
        // There is no configuration yet: the runtime reports that itself.
        (None, None, true) => None,
        (None, None, false) => Some(format!(
            "the runtime attaches pods by {others}, and does not call netattach: its file has to come first in {read_from}"
        )),
    }
}

/// Returns names and plugins of configurations.
fn named(lists: &[&LoadedList]) -> String {
    let mut names: Vec<String> = lists
        .iter()
        .take(NAMED)
        .map(|list| match list.plugins.is_empty() {
            true => list.name.clone(),
            false => format!("{} ({})", list.name, list.plugins.join(", ")),
        })
        .collect();
    if lists.len() > NAMED {
        names.push(format!("{} more", lists.len() - NAMED));
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(name: &str, plugins: &[&str]) -> LoadedList {
        LoadedList { name: name.to_owned(), plugins: plugins.iter().map(|it| (*it).to_owned()).collect() }
    }

    #[test]
    fn a_runtime_has_to_call_netattach_once_for_each_pod_and_nobody_beside_it() {
        let (pods, flannel) = (list("pods", &["netattach"]), list("cbr0", &["flannel", "portmap"]));
        let of = |lists: &[&LoadedList], ours: &str| {
            let lists = lists.iter().map(|list| (*list).clone()).collect();
            let read = Networking { directory: "/etc/cni/net.d".into(), lists };
            problem(&read, Some(Path::new(ours)).filter(|ours| *ours != Path::new("")))
        };
        let text = |text: &str| Some(text.to_owned());
        for ours in ["/etc/cni/net.d", "/host/etc/cni/net.d", ""] {
            assert_eq!(of(&[&pods], ours), None, "{ours}");
            assert_eq!(
                of(&[&pods, &flannel], ours),
                text(
                    "the runtime attaches each pod by cbr0 (flannel, portmap) as well: set its max_conf_num to 1, or remove that \
                      from /etc/cni/net.d"
                )
            );
            assert_eq!(
                of(&[&pods, &pods], ours),
                text(
                    "the runtime calls netattach 2 times for each pod, by pods (netattach), pods (netattach): leave one of them \
                      in /etc/cni/net.d, or set the runtime's max_conf_num to 1"
                )
            );
        }
        let elsewhere = |what: &str| {
            text(&format!(
                "the runtime reads CNI configurations from /etc/cni/net.d, and netattach writes its own to /run/net.d: {what}; set \
                 cniConf.dir to the runtime's directory, or the runtime's conf_dir to that"
            ))
        };
        let by_flannel = elsewhere("pods are attached by cbr0 (flannel, portmap) alone");
        assert_eq!(of(&[&flannel], "/run/net.d"), by_flannel);
        assert_eq!(of(&[], "/run/net.d"), elsewhere("no pod starts"));
        for ours in ["/etc/cni/net.d", ""] {
            assert_eq!(of(&[], ours), None, "the runtime says so itself");
            assert_eq!(
                of(&[&flannel], ours),
                text(
                    "the runtime attaches pods by cbr0 (flannel, portmap), and does not call netattach: its file has to come \
                      first in /etc/cni/net.d"
                )
            );
        }
        assert_eq!(named(&[&flannel; 6]).matches("cbr0").count(), NAMED);
        assert!(named(&[&flannel; 6]).ends_with(", 2 more"));
    }
}
