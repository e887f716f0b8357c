//! The archive that `cargo xtask image` writes, in a real containerd.
//!
//! `NETATTACH_IMAGES` names the directory of the archive.

use std::process::Command;

use netattach_tests::cluster::site::archive;
use netattach_tests::machine::Machine;
use netattach_tests::machine::containerd::{Containerd, Version};
use netattach_tests::node::executable;
use netattach_tests::{Node, tools};

/// Whether a row names a commit; also whether the sources were modified.
fn names_a_commit(row: &str) -> bool {
    let said = row.trim_start_matches("commit").trim_start();
    let commit = said.strip_suffix(" modified").unwrap_or(said);
    commit.len() == 40 && commit.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// containerd imports the archive under the image's name. A container of it has each executable, with the same output
/// as on the node, including the commit that it was built from: the very same file; nothing else can be run in it.
#[test]
fn a_container_of_the_image_runs_the_executables_and_nothing_else() {
    const TEST: &str = "a_container_of_the_image_runs_the_executables_and_nothing_else";
    let Some(images) = tools::directory(TEST, "NETATTACH_IMAGES", &[&archive()]) else { return };
    let Some(machine) = Machine::new(TEST, Node::new(&[]).unwrap()).unwrap() else { return };
    let containerd = Containerd::start(machine, Version::V1_6).unwrap();
    containerd.import_from(&images.join(archive())).unwrap();
    let image = format!("localhost/netattach:{}", env!("CARGO_PKG_VERSION"));
    let images = containerd.images().unwrap();
    assert!(images.lines().any(|row| row.starts_with(&format!("{image} "))), "{images}");
    for name in ["netattachd", "netattachctl", "netattach", "netattach-cni"] {
        let on_node = Command::new(executable(name).unwrap()).arg("--version").output().unwrap();
        let on_node = String::from_utf8(on_node.stdout).unwrap();
        assert!(on_node.starts_with(&format!("{name} {}\ncommit ", env!("CARGO_PKG_VERSION"))), "{on_node}");
        assert!(names_a_commit(on_node.lines().nth(1).unwrap()), "{on_node}");
        let inside = containerd.run_once(&image, name, &[&format!("/usr/bin/{name}"), "--version"]).unwrap();
        assert_eq!(inside, on_node);
    }
    for absent in ["/bin/sh", "/usr/bin/sh", "/bin/busybox"] {
        let error = containerd.run_once(&image, "absent", &[absent]).unwrap_err().to_string();
        assert!(error.contains("no such file or directory"), "{error}");
    }
}
