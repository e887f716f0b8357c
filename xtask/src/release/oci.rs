//! A container image of one layer as an archive of an OCI image layout (image specification 1.1: `image-layout.md`,
//! `manifest.md`, `config.md`), written without a container daemon.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::tarball::{Tarball, gzip};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The metadata of an image.
#[derive(Debug, Clone)]
pub(super) struct Image {
    /// Registry, name and tag under which a runtime keeps it.
    pub(super) name: String,
    /// Go's name of the architecture.
    pub(super) architecture: &'static str,
    /// The process of a container, and its environment.
    pub(super) entrypoint: String,
    /// `PATH` of its processes.
    pub(super) path: String,
    /// `org.opencontainers.image.*` and others.
    pub(super) labels: Vec<(&'static str, String)>,
    /// Timestamp of every entry, in seconds since 1970.
    pub(super) time: u64,
}

/// A finished archive.
#[derive(Debug)]
pub(super) struct Archive {
    /// The bytes of the tar file.
    pub(super) bytes: Vec<u8>,
    /// Digest of the manifest, by which registries and runtimes know the image.
    pub(super) digest: String,
    /// Bytes of the layer's files.
    pub(super) unpacked: u64,
}

/// Makes the archive of an image with these files.
pub(super) fn archive(image: &Image, files: &Tarball) -> anyhow::Result<Archive> {
    let mut layout = Tarball::default();
    let layer = files.finish(image.time)?;
    let unpacked_digest = digest(&layer);
    let layer = blob(&mut layout, LAYER, &gzip(&layer)?)?;
    let created = rfc3339(image.time);
    let labels: Value = image.labels.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let config = json!({
        "created": created,
        "architecture": image.architecture,
        "os": "linux",
        "config": {
            "Entrypoint": [image.entrypoint],
            "Env": [format!("PATH={}", image.path)],
            "Labels": labels,
            // The agent needs root's capabilities; stated explicitly instead of relying on the default.
            "User": "0:0",
            "WorkingDir": "/",
        },
        "rootfs": {"type": "layers", "diff_ids": [unpacked_digest]},
        "history": [{"created": created, "created_by": "cargo xtask image"}],
    });
    let config = blob(&mut layout, CONFIG, config.to_string().as_bytes())?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer], "annotations": labels,
    });
    let mut manifest = blob(&mut layout, MANIFEST, manifest.to_string().as_bytes())?;
    let digest = manifest["digest"].as_str().unwrap_or_default().to_owned();
    manifest["platform"] = json!({"architecture": image.architecture, "os": "linux"});
    let tag = image.name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
    manifest["annotations"] = json!({
        // The whole name is containerd's own annotation; by the specification the other is the tag alone.
        "io.containerd.image.name": image.name,
        "org.opencontainers.image.ref.name": tag,
    });
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest]});
    layout.file("index.json", 0o644, index.to_string())?;
    layout.file("oci-layout", 0o644, json!({"imageLayoutVersion": "1.0.0"}).to_string())?;
    Ok(Archive { bytes: layout.finish(image.time)?, digest, unpacked: files.content_bytes() })
}

/// `sha256:` and 64 digits.
pub(super) fn digest(content: &[u8]) -> String {
    format!("sha256:{}", sha256(content))
}

/// 64 digits.
pub(super) fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Stores content under its digest; returns its descriptor.
fn blob(layout: &mut Tarball, media_type: &str, content: &[u8]) -> anyhow::Result<Value> {
    let digits = sha256(content);
    layout.file(&format!("blobs/sha256/{digits}"), 0o644, content)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{digits}"), "size": content.len()}))
}

/// A time of the calendar, in UTC. Days are counted in eras of 400 years that begin on 1 March, so that a leap day is a
/// year's last.
fn rfc3339(time: u64) -> String {
    const DAYS_OF_ERA: u64 = 146_097;
    /// Days from 1 March 0000 to 1 January 1970.
    const TO_EPOCH: u64 = 719_468;
    let days = time / 86_400 + TO_EPOCH;
    let (era, day) = (days / DAYS_OF_ERA, days % DAYS_OF_ERA);
    let year = (day - day / 1460 + day / 36_524 - day / (DAYS_OF_ERA - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year, if month < 10 { month + 3 } else { month - 9 });
    let year = if month <= 2 { year + 1 } else { year };
    let (hour, minute, second) = (time / 3600 % 24, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    fn image() -> Image {
        Image {
            name: "localhost/netattach:1.2.3".into(),
            architecture: "amd64",
            entrypoint: "/usr/bin/netattachd".into(),
            path: "/usr/bin".into(),
            labels: vec![("org.opencontainers.image.version", "1.2.3".into())],
            time: 1_700_000_000,
        }
    }

    fn files() -> Tarball {
        let mut files = Tarball::default();
        files.file("usr/bin/netattachd", 0o755, *b"program").unwrap();
        files
    }

    fn entries(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(bytes);
        let read = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            (entry.path().unwrap().display().to_string(), content)
        };
        archive.entries().unwrap().map(read).collect()
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let table = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ];
        for (time, expected) in table {
            assert_eq!(rfc3339(time), expected);
        }
    }

    #[test]
    fn two_archives_of_the_same_have_the_same_bytes_and_a_changed_one_another_digest() {
        let one = archive(&image(), &files()).unwrap();
        let two = archive(&image(), &files()).unwrap();
        assert_eq!(one.bytes, two.bytes);
        let later = archive(&Image { time: 1_700_000_001, ..image() }, &files()).unwrap();
        assert_ne!(one.digest, later.digest);
    }

    #[test]
    fn every_descriptor_leads_to_a_blob_of_its_digest_and_size() {
        let archive = archive(&image(), &files()).unwrap();
        let entries = entries(&archive.bytes);
        let parsed = |path: &str| serde_json::from_slice::<Value>(&entries[path]).unwrap();
        let content = |descriptor: &Value| {
            let digits = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            let content = &entries[&format!("blobs/sha256/{digits}")];
            assert_eq!(sha256(content), digits);
            assert_eq!(descriptor["size"], content.len());
            content.clone()
        };
        assert_eq!(parsed("oci-layout"), json!({"imageLayoutVersion": "1.0.0"}));
        let descriptor = parsed("index.json")["manifests"][0].clone();
        assert_eq!(descriptor["digest"], archive.digest);
        assert_eq!(descriptor["platform"], json!({"architecture": "amd64", "os": "linux"}));
        let names = json!({
            "io.containerd.image.name": "localhost/netattach:1.2.3",
            "org.opencontainers.image.ref.name": "1.2.3"
        });
        assert_eq!(descriptor["annotations"], names);
        let manifest: Value = serde_json::from_slice(&content(&descriptor)).unwrap();
        let config: Value = serde_json::from_slice(&content(&manifest["config"])).unwrap();
        assert_eq!(config["config"]["Entrypoint"], json!(["/usr/bin/netattachd"]));
        assert_eq!(config["created"], "2023-11-14T22:13:20Z");
        let mut layer = Vec::new();
        let compressed = content(&manifest["layers"][0]);
        flate2::read::GzDecoder::new(compressed.as_slice()).read_to_end(&mut layer).unwrap();
        assert_eq!(config["rootfs"]["diff_ids"], json!([digest(&layer)]));
        assert_eq!(archive.unpacked, 7);
    }
}
