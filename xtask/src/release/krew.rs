//! The manifest for krew, the package manager of kubectl's plugins: `kubectl netattach` is `netattachctl` of the archive under
//! the name by which kubectl looks for it.

use super::{Arch, version};

/// URL of the archive unless a release gives one: a placeholder, for `krew install --archive`.
pub const NOWHERE: &str = "https://registry.example/netattach";

/// The manifest for one archive, which is `file` below `url`. krew wants a `v` before versions.
pub(super) fn manifest(arch: Arch, url: &str, file: &str, sha256: &str) -> String {
    let (version, arch, url) = (version(), arch.name(), url.trim_end_matches('/'));
    format!(
        r#"apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: netattach
spec:
  version: v{version}
  homepage: {url}
  shortDescription: Show and test additional networks of pods
  description: |
    Asks the agents of netattach, a multi-network CNI plugin, through pods/exec:
    attachments, flows, policies and why they allow or deny, pools of addresses,
    problems with their remedies. It takes an installed netattach, and the right
    to run commands in its pods.
  platforms:
    - selector:
        matchLabels:
          os: linux
          arch: {arch}
      uri: {url}/{file}
      sha256: {sha256}
      files:
        - from: netattach-{version}/bin/netattachctl
          to: kubectl-netattach
        - from: netattach-{version}/LICENSE
          to: .
      bin: kubectl-netattach
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_names_the_archive_its_checksum_and_what_is_taken_of_it() {
        let manifest = manifest(Arch::Arm64, "https://files.example/1/", "a.tar.gz", &"0f".repeat(32));
        let platforms = manifest.split_once("  platforms:\n").unwrap().1;
        let version = version();
        let expected = format!(
            "    - selector:\n        matchLabels:\n          os: linux\n          arch: arm64\n      \
             uri: https://files.example/1/a.tar.gz\n      sha256: {}\n      files:\n        \
             - from: netattach-{version}/bin/netattachctl\n          to: kubectl-netattach\n        \
             - from: netattach-{version}/LICENSE\n          to: .\n      bin: kubectl-netattach\n",
            "0f".repeat(32)
        );
        assert_eq!(platforms, expected);
        assert!(
            manifest.contains(&format!("\n  version: v{version}\n  homepage: https://files.example/1\n"))
        );
    }
}
