//! The promises of docs/architecture.md that a reader of the source can check, mostly absences.
//!
//! Each is one row of [`RULES`]: names, the modules that alone may use them, and the reason.

use anyhow::Context;

use super::names::{self, Named};
use super::{Violation, report};
use crate::progress::Done;
use crate::source::{self, Source};

/// Names that only some files may use.
struct Rule {
    /// Files the rule is about.
    within: &'static [&'static str],
    /// Files among them that are exempt.
    except: &'static [&'static str],
    /// Path prefixes; a last segment `x*` matches any continuation, and a single word matches anywhere.
    names: &'static [&'static str],
    rule: &'static str,
    why: &'static str,
}

const PURE: &[&str] = &[
    "netattach/src/cni/",
    "netattach/src/npwg/",
    "netattach/src/plan/",
    "netattach/src/link/",
    "netattach/src/objects/",
    "netattach/src/policy/",
    "netattach/src/multus/",
    "netattach/src/mac.rs",
    "netattach-common/src/",
];

const RULES: &[Rule] = &[
    Rule {
        within: &["netattach/src/"],
        except: &["netattach/src/netlink/"],
        names: &["rtnetlink", "netlink_packet*", "netlink_sys", "netlink_proto"],
        rule: "only netlink/ names the netlink crates",
        why: "one place knows attributes and kernel quirks; everyone else says Spec and reads State",
    },
    Rule {
        within: &["netattach/src/"],
        except: &["netattach/src/bpf/"],
        names: &["aya", "aya_obj", "aya_log"],
        rule: "only bpf/ names aya",
        why: "pins, layouts and features are checked in one place",
    },
    Rule {
        within: &["netattach/src/"],
        except: &["netattach/src/kube/"],
        names: &["kube", "k8s_openapi"],
        rule: "only kube/ names the crates of the Kubernetes client",
        why: "everything else works the same without a cluster",
    },
    Rule {
        within: &["netattach/src/"],
        except: &[
            "netattach/src/kube/",
            "netattach/src/agent/monitoring/http.rs",
            "netattach/src/agent/monitoring/traces.rs",
            "netattach/src/settings/monitoring.rs",
        ],
        names: &["http", "http_body_util", "hyper", "hyper_util"],
        rule: "only the Kubernetes client, the probes and the exporter of traces speak HTTP",
        why: "who listens and who connects is to be seen in few places",
    },
    Rule {
        within: &["netattach/src/"],
        // `copy` tries the executable that it has just written, before a runtime calls it.
        except: &["netattach/src/delegate/", "netattach/src/attach/standalone/copy.rs"],
        names: &[
            "std::process::Command",
            "tokio::process",
            "libc::fork",
            "libc::vfork",
            "libc::exec*",
            "posix_spawn*",
        ],
        rule: "only delegate/ starts processes",
        why: "a process needs a timeout, the right namespaces and a reaper; only one place provides them",
    },
    Rule {
        within: &["netattach/src/"],
        except: &["netattach/src/netns.rs", "netattach/src/netns/"],
        names: &[
            "setns",
            "unshare",
            "unshare_unsafe",
            "move_into_link_name_space",
            "move_into_thread_name_spaces",
        ],
        rule: "only netns.rs enters a namespace",
        why: "a thread left in a pod's namespace acts on the wrong machine, and netns.rs keeps open where threads return to",
    },
    Rule {
        within: PURE,
        except: &[],
        names: &["tokio", "kube", "rtnetlink", "netlink_packet*"],
        rule: "pure modules name no runtime, cluster or kernel interface",
        why: "what decides is tested without a machine",
    },
    Rule {
        within: PURE,
        // The one file that marks shared types as plain bytes for aya's maps.
        except: &["netattach-common/src/pod.rs"],
        names: &["aya", "aya_obj"],
        rule: "pure modules do not name aya",
        why: "what decides is tested without a machine",
    },
    Rule {
        within: PURE,
        except: &[],
        names: &[
            "std::fs",
            "std::env",
            "std::process",
            "std::thread",
            "std::net::TcpStream",
            "std::net::UdpSocket",
        ],
        rule: "pure modules do not touch the machine",
        why: "the same input must give the same decision",
    },
    Rule {
        within: PURE,
        except: &[],
        names: &["Instant", "SystemTime"],
        rule: "pure modules have no clock",
        why: "the same input must give the same decision; time comes in as an argument",
    },
    Rule {
        within: &["netattach-shim/src/"],
        except: &[],
        names: &["tokio", "kube", "rtnetlink", "netlink_packet*", "aya", "clap", "std::process::Command"],
        rule: "the CNI executable links little",
        why: "it is started for every CNI call, and a pod waits for it",
    },
];

/// File and directory names without information about the content.
const ATTICS: [&str; 8] = ["utils", "util", "helpers", "helper", "manager", "common", "misc", "shared"];

/// Files that log errors of the kernel or of a decoder themselves: such an error has no source.
const WITHOUT_SOURCE: [&str; 3] = [
    "netattach/src/agent/health/mod.rs",
    "netattach/src/journal/pools.rs",
    "netattach/src/netlink/answer.rs",
];

pub(super) fn check() -> anyhow::Result<Done> {
    let sources = source::all()?;
    let mut violations = Vec::new();
    for source in &sources {
        violations.extend(check_source(source)?);
    }
    report(violations, format!("{} rules on {} files", RULES.len() + 3, sources.len()))
}

fn check_source(source: &Source) -> anyhow::Result<Vec<Violation>> {
    let file = syn::parse_file(&source.text).with_context(|| format!("parse {}", source.path))?;
    let mut violations = Vec::new();
    violations.extend(attic(source));
    violations.extend(undescribed(source, &file));
    violations.extend(unchained(source));
    let rules: Vec<&Rule> = RULES.iter().filter(|rule| rule.governs(&source.path)).collect();
    if !rules.is_empty() {
        for named in names::named_in(&file) {
            violations.extend(rules.iter().filter(|rule| rule.forbids(&named)).map(|rule| Violation {
                path: source.path.clone(),
                line: named.line,
                found: named.segments.join("::"),
                rule: rule.rule,
                why: rule.why,
            }));
        }
    }
    Ok(violations)
}

impl Rule {
    fn governs(&self, path: &str) -> bool {
        let covers = |places: &[&str]| places.iter().any(|place| path.starts_with(place));
        covers(self.within) && !covers(self.except) && !is_test_module(path)
    }

    fn forbids(&self, named: &Named) -> bool {
        self.names.iter().any(|name| matches_name(name, &named.segments))
    }
}

/// A test module in a file of its own, declared `#[cfg(test)] mod tests;` in its parent.
fn is_test_module(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.ends_with("_tests.rs") || path.contains("/tests/")
}

/// Whether a path is, or continues, the name of a rule. A single lower-case word must stand first or last, so
/// that a crate is found by its root and a function by its end; our own `crate::x::aya` would be neither.
fn matches_name(name: &str, segments: &[String]) -> bool {
    let wanted: Vec<&str> = name.split("::").collect();
    let same = |wanted: &str, segment: &str| match wanted.strip_suffix('*') {
        Some(prefix) => segment.starts_with(prefix),
        None => segment == wanted,
    };
    let [word] = wanted[..] else {
        return wanted.len() <= segments.len()
            && wanted.iter().zip(segments).all(|(want, have)| same(want, have));
    };
    let ours = segments.first().is_some_and(|first| ["crate", "self", "super"].contains(&first.as_str()));
    if ours {
        return false;
    }
    segments.first().is_some_and(|first| same(word, first))
        || segments.last().is_some_and(|last| same(word, last))
        || (word.starts_with(char::is_uppercase) && segments.iter().any(|segment| same(word, segment)))
}

fn attic(source: &Source) -> Option<Violation> {
    let named = source.path.trim_end_matches(".rs").split('/').find(|part| ATTICS.contains(part))?;
    Some(Violation {
        path: source.path.clone(),
        line: 1,
        found: format!("a place called `{named}`"),
        rule: "files and directories are named for what they hold",
        why: "everything lands in a place whose name excludes nothing",
    })
}

fn undescribed(source: &Source, file: &syn::File) -> Option<Violation> {
    let described = file.attrs.iter().any(|attribute| {
        matches!(attribute.style, syn::AttrStyle::Inner(_)) && attribute.path().is_ident("doc")
    });
    (!described).then(|| Violation {
        path: source.path.clone(),
        line: 1,
        found: "no module comment".to_owned(),
        rule: "every file begins with `//!` lines",
        why: "a reader must know what a file is for before reading it",
    })
}

/// Errors that are logged without their cause: `%error`, and `error = %other`.
fn unchained(source: &Source) -> Vec<Violation> {
    let path = source.path.as_str();
    if !path.starts_with("netattach/src/") || WITHOUT_SOURCE.contains(&path) || is_test_module(path) {
        return Vec::new();
    }
    let lines = source.text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
    lines
        .filter(|(_, line)| logs_alone(line))
        .map(|(index, line)| Violation {
            path: source.path.clone(),
            line: index + 1,
            found: line.trim().to_owned(),
            rule: "an error is logged with its sources: `error = %Chain(&error)`",
            why: "its text says its own layer only; what the kernel has said is the source",
        })
        .collect()
}

/// Whether a line logs a variable by its text alone, as an error.
fn logs_alone(line: &str) -> bool {
    let is_of_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    line.match_indices('%').any(|(at, _)| {
        let (before, shown) = (&line[..at], &line[at + 1..]);
        let (name, rest) =
            shown.split_at(shown.find(|letter: char| !is_of_name(letter)).unwrap_or(shown.len()));
        let is_variable = !name.is_empty() && !rest.starts_with(['(', ':', '.']);
        is_variable && (name == "error" || before.ends_with(" error = ") || before.ends_with("(error = "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(usize, String)> {
        let source = Source { path: path.to_owned(), text: format!("//! About.\n{text}") };
        check_source(&source)
            .unwrap()
            .into_iter()
            .map(|violation| (violation.line, violation.rule.to_owned()))
            .collect()
    }

    #[test]
    fn each_rule_catches_its_names_and_spares_the_owner() {
        let table = [
            (
                "netattach/src/attach/mod.rs",
                "netattach/src/netlink/link/create.rs",
                "use netlink_packet_route::link;",
                0,
            ),
            (
                "netattach/src/attach/mod.rs",
                "netattach/src/netlink/link/create.rs",
                "use rtnetlink::Handle;",
                0,
            ),
            ("netattach/src/agent/run/mod.rs", "netattach/src/bpf/load.rs", "use aya::Ebpf;", 1),
            ("netattach/src/agent/run/mod.rs", "netattach/src/kube/watch.rs", "use kube::Client;", 2),
            (
                "netattach/src/agent/run/mod.rs",
                "netattach/src/agent/monitoring/http.rs",
                "use hyper::server;",
                3,
            ),
            ("netattach/src/ipam/dhcp.rs", "netattach/src/delegate/exec.rs", "use std::process::Command;", 4),
            (
                "netattach/src/ipam/dhcp.rs",
                "netattach/src/delegate/exec.rs",
                "use std::{process::{Command}};",
                4,
            ),
            (
                "netattach/src/link/veth.rs",
                "netattach/src/netns.rs",
                "fn f() { nix::sched::setns(1, 2); }",
                5,
            ),
            ("netattach/src/plan/mod.rs", "netattach/src/attach/mod.rs", "use tokio::sync::mpsc;", 6),
            (
                "netattach-common/src/key.rs",
                "netattach-common/src/pod.rs",
                "unsafe impl aya::Pod for Key {}",
                7,
            ),
            ("netattach/src/cni/config.rs", "netattach/src/journal/store.rs", "use std::fs;", 8),
            (
                "netattach/src/policy/index.rs",
                "netattach/src/enforce/enforcer.rs",
                "fn f() { std::time::Instant::now(); }",
                9,
            ),
            (
                "netattach/src/npwg/status.rs",
                "netattach/src/agent/run/mod.rs",
                "use std::time::{Duration, SystemTime};",
                9,
            ),
        ];
        for (guilty, owner, text, rule) in table {
            assert_eq!(found(guilty, text), [(2, RULES[rule].rule.to_owned())], "{guilty}: {text}");
            assert_eq!(found(owner, text), [], "{owner}: {text}");
        }
    }

    #[test]
    fn what_only_resembles_a_forbidden_name_is_allowed() {
        let table = [
            ("netattach/src/plan/mod.rs", "use crate::policy::kube;"),
            ("netattach/src/agent/run/mod.rs", "fn f() -> std::process::ExitCode { kubelet() }"),
            ("netattach/src/cni/config.rs", "use std::fmt;"),
            ("netattach/src/cni/config.rs", "use std::net::Ipv4Addr;"),
            ("netattach/src/plan/mod.rs", "#[cfg(test)] mod tests { use std::fs; }"),
            ("netattach/src/link/tests.rs", "use std::fs;"),
            ("netattach/src/cni/config_tests.rs", "use std::fs;"),
            ("tests/tests/plugins/netlink.rs", "use std::process::Command;"),
        ];
        for (path, text) in table {
            assert_eq!(found(path, text), [], "{path}: {text}");
        }
    }

    #[test]
    fn a_file_without_a_module_comment_is_reported() {
        let source =
            Source { path: "netattach/src/x.rs".to_owned(), text: "/// Item.\nfn f() {}".to_owned() };
        let violations = check_source(&source).unwrap();
        assert_eq!(
            violations.iter().map(|violation| violation.found.as_str()).collect::<Vec<_>>(),
            ["no module comment"]
        );
    }

    #[test]
    fn an_error_that_is_logged_without_its_sources_is_reported() {
        let rule = "an error is logged with its sources: `error = %Chain(&error)`".to_owned();
        let (alone, chained) = (vec![(2, rule)], Vec::new());
        let table = [
            ("fn f() { tracing::warn!(%error, \"lost\"); }", &alone),
            ("fn f() { tracing::warn!(path = %path.display(), error = %other, \"lost\"); }", &alone),
            ("fn f() { tracing::warn!(error = %Chain(&error), \"lost\"); }", &chained),
            ("fn f() { tracing::warn!(error = %crate::error_chain::Chain(&error), \"lost\"); }", &chained),
            ("fn f() { tracing::warn!(%problem, errors = %error_count, \"lost\"); }", &chained),
            ("// tracing::warn!(%error)", &chained),
        ];
        for (text, expected) in table {
            assert_eq!(&found("netattach/src/attach/mod.rs", text), expected, "{text}");
        }
        let text = "fn f() { tracing::warn!(%error, \"lost\"); }";
        for path in
            ["netattach/src/agent/health/mod.rs", "netattach/src/link/tests.rs", "tests/tests/cni/add.rs"]
        {
            assert_eq!(found(path, text), [], "{path}");
        }
    }

    #[test]
    fn places_named_after_nothing_are_reported() {
        for path in ["netattach/src/utils.rs", "netattach/src/helpers/mod.rs", "tests/src/common/mod.rs"] {
            assert_eq!(
                found(path, ""),
                [(1, "files and directories are named for what they hold".to_owned())],
                "{path}"
            );
        }
        assert_eq!(found("netattach-common/src/lib.rs", ""), []);
    }
}
