//! The upgrade of a cluster from the release that landed last, with its manifests and its image, and the way back.
//! `cargo xtask setup --previous` has built both; without them `daemonset` replaces an image by itself.

use netattach_tests::cluster::site::{Before, Site, copy};
use netattach_tests::tools;

use crate::daemonset::{AGAIN, BESIDE, Release, lives, primary};

/// As `cargo xtask setup --previous` names its image.
const PREVIOUS: Release = Release { manifests: "previous", tag: Some("previous") };
const ARCHIVE: &str = "netattach.oci.tar";

#[test]
fn the_release_that_landed_last_is_upgraded_under_traffic_and_comes_back() {
    const TEST: &str = "the_release_that_landed_last_is_upgraded_under_traffic_and_comes_back";
    let files = [ARCHIVE, "deploy/kustomization.yaml"];
    let Some(previous) = tools::directory(TEST, "NETATTACH_PREVIOUS", &files) else { return };
    let Some((list, plugins)) = primary(TEST) else { return };
    let before = Before { primary: Some((list, &plugins)), has_bpffs: true };
    let Some(site) = Site::new(TEST, &before).unwrap() else { return };
    site.worker.containerd().import_for_pods(&previous.join(ARCHIVE)).unwrap();
    copy(&previous.join("deploy"), &site.directory().join(PREVIOUS.manifests)).unwrap();
    lives(&site, &BESIDE, PREVIOUS, &[AGAIN, PREVIOUS, AGAIN]);
}
