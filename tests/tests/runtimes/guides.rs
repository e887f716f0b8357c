//! README.md and the guides, as written: their commands, in order, and their output. See `netattach_tests::guide`.
//!
//! Parts of a guide that need a kernel feature that this machine may lack are run by the suite `policy`, in a virtual
//! machine.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use netattach_tests::guide::{self, BUSYBOX, Machine, Page, Tools};
use netattach_tests::tools;

use super::migrate::MIGRATE;

const README: Page = Page { path: "README.md", text: include_str!("../../../README.md") };
const NETWORKS: Page = Page { path: "docs/networks.md", text: include_str!("../../../docs/networks.md") };
const QUICK_START: Page =
    Page { path: "docs/quick-start.md", text: include_str!("../../../docs/quick-start.md") };
const INSTALL: Page = Page { path: "docs/install.md", text: include_str!("../../../docs/install.md") };
const RUNTIMES: Page = Page { path: "docs/runtimes.md", text: include_str!("../../../docs/runtimes.md") };
const FAQ: Page = Page { path: "docs/faq.md", text: include_str!("../../../docs/faq.md") };
const TROUBLESHOOTING: Page =
    Page { path: "docs/troubleshooting.md", text: include_str!("../../../docs/troubleshooting.md") };
const REMOVE: Page = Page { path: "docs/remove.md", text: include_str!("../../../docs/remove.md") };
const UPGRADE: Page = Page { path: "docs/upgrade.md", text: include_str!("../../../docs/upgrade.md") };
const POLICIES: Page = Page { path: "docs/policies.md", text: include_str!("../../../docs/policies.md") };

/// All that have commands.
const PAGES: [Page; 11] = [
    README,
    QUICK_START,
    INSTALL,
    RUNTIMES,
    NETWORKS,
    POLICIES,
    FAQ,
    MIGRATE,
    UPGRADE,
    TROUBLESHOOTING,
    REMOVE,
];

/// Where busybox is; `None` when it is missing.
fn image(test: &str) -> Option<PathBuf> {
    Some(tools::directory(test, "NETATTACH_RUNTIMES", &[BUSYBOX])?.join(BUSYBOX))
}

#[test]
fn the_readme_runs_as_written_and_prints_what_is_shown() {
    README.run("", Machine::Empty, Tools::default()).unwrap();
}

#[test]
fn a_node_is_set_up_as_the_page_on_runtimes_says() {
    RUNTIMES.run("", Machine::Bare, Tools::default()).unwrap();
}

/// The quick start without its installation, which `cluster::guides` has.
#[test]
fn the_first_pod_and_networks_of_each_type_are_as_the_guides_say() {
    let test = "the_first_pod_and_networks_of_each_type_are_as_the_guides_say";
    let Some(image) = image(test) else { return };
    let plugins = tools::directory(test, "NETATTACH_REFERENCE_PLUGINS", &["host-device", "host-local"]);
    let Some(plugins) = plugins else { return };
    let tools = Tools { busybox: Some(&image), plugins: Some(&plugins) };
    guide::run(&[QUICK_START, NETWORKS], "", Machine::Node, tools).unwrap();
}

/// On one node, as the answers are about the pods of the guide.
#[test]
fn policies_are_as_the_guide_says_and_so_are_the_answers_to_questions() {
    let Some(image) = image("policies_are_as_the_guide_says_and_so_are_the_answers_to_questions") else {
        return;
    };
    let tools = Tools { busybox: Some(&image), plugins: None };
    guide::run(&[POLICIES, FAQ], "", Machine::Node, tools).unwrap();
}

/// `policy::ipvlan` runs the part of its name, `cluster::guides` those of the quick start, of the upgrade, of
/// troubleshooting and of the removal, and the page on installing, which has no parts.
#[test]
fn every_part_of_a_page_is_run_by_a_test() {
    let parts: Vec<String> = PAGES.into_iter().flat_map(Page::parts).collect();
    let of_upgrade = ["upgrade", "upgrade-mine", "way-back"];
    let of_cluster = [
        "describe",
        "doctor",
        "doctor-before-1.30",
        "doctor-done",
        "agents",
        "agents-before-1.30",
        "new-pods",
        "old-pods",
    ];
    assert_eq!(parts, [&["cluster", "node", "ipvlan"][..], &of_upgrade, &of_cluster].concat());
}

/// No test would run a page that is none of these.
#[test]
fn every_page_that_has_commands_is_one_of_these() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let is_run = |line: &str| ["```sh", "```console"].iter().any(|fence| line.starts_with(fence));
    let mut found = BTreeSet::new();
    for directory in ["", "docs"] {
        for entry in fs::read_dir(top.join(directory)).unwrap() {
            let path = Path::new(directory).join(entry.unwrap().file_name());
            let is_page = path.extension().is_some_and(|extension| extension == "md");
            if is_page && fs::read_to_string(top.join(&path)).unwrap().lines().any(is_run) {
                found.insert(path.to_str().unwrap().to_owned());
            }
        }
    }
    assert_eq!(found, BTreeSet::from(PAGES.map(|page| page.path.to_owned())));
}
