//! An image of one layer with one program under all its names, as an archive in the layout of the OCI image specification 1.0.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::IMAGE;

/// Writes the archive of [`IMAGE`].
pub(super) fn write(archive: &Path, busybox: &Path) -> Result<()> {
    let scratch = tempfile::tempdir()?;
    let (root, layout) = (scratch.path().join("root"), scratch.path().join("layout"));
    for directory in ["bin", "dev", "etc", "proc", "sys", "tmp"] {
        fs::create_dir_all(root.join(directory))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))?;
    fs::set_permissions(root.join("bin/busybox"), fs::Permissions::from_mode(0o755))?;
    let layer = scratch.path().join("layer.tar");
    let applets = Command::new(busybox).arg("--list").output().context("start busybox")?;
    for applet in String::from_utf8_lossy(&applets.stdout).lines().filter(|applet| *applet != "busybox") {
        symlink("busybox", root.join("bin").join(applet))?;
    }
    tar(&layer, &root)?;

    fs::create_dir_all(layout.join("blobs/sha256"))?;
    let layer = blob(&layout, "application/vnd.oci.image.layer.v1.tar", &fs::read(layer)?)?;
    let config = json!({
        "architecture": architecture(), "os": "linux",
        "config": {"Cmd": ["/bin/busybox", "sleep", "1000000"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}
    });
    let config = blob(&layout, "application/vnd.oci.image.config.v1+json", config.to_string().as_bytes())?;
    let media_type = "application/vnd.oci.image.manifest.v1+json";
    let manifest = json!({"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": [layer]});
    let mut manifest = blob(&layout, media_type, manifest.to_string().as_bytes())?;
    manifest["annotations"] = json!({"org.opencontainers.image.ref.name": IMAGE});
    fs::write(layout.join("index.json"), json!({"schemaVersion": 2, "manifests": [manifest]}).to_string())?;
    fs::write(layout.join("oci-layout"), json!({"imageLayoutVersion": "1.0.0"}).to_string())?;
    tar(archive, &layout)
}

/// Stores content under its digest; returns its descriptor.
fn blob(layout: &Path, media_type: &str, content: &[u8]) -> Result<Value> {
    let digest: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(layout.join("blobs/sha256").join(&digest), content)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": content.len()}))
}

fn tar(archive: &Path, directory: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--owner=0", "--group=0", "-cf"]).arg(archive).arg("-C").arg(directory).arg(".");
    let status = command.status().context("start tar")?;
    ensure!(status.success(), "tar of {}: {status}", directory.display());
    Ok(())
}

/// Go's (and so the image specification's) name of this machine's architecture.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}
