//! The versions that `--version` of the agent and the command line shows.

use netattach_common::LAYOUT_VERSION;
use netattach_shim::built;

use crate::journal;

pub use netattach_shim::built::commit;

/// Returns the text that the agent, the command line and the native plugins share: the commit, and the versions of
/// the formats that they exchange with other parts of netattach. `more`: rows of only this executable. Begins with
/// the version, and has no newline at its end.
pub fn describe(more: &[(&str, String)]) -> String {
    let versions = journal::VERSIONS;
    let rows = [
        ("maps", format!("layout {LAYOUT_VERSION}")),
        ("journal", format!("records of version {} to {}", versions.start(), versions.end())),
        ("features", features()),
    ];
    built::describe(&[&rows, more].concat())
}

/// Returns the package's features that change the behaviour of an executable.
fn features() -> String {
    let known = [("crash-points", cfg!(feature = "crash-points")), ("model", cfg!(feature = "model"))];
    let with: Vec<&str> = known.iter().filter(|(_, with)| *with).map(|(name, _)| *name).collect();
    if with.is_empty() { "the usual".to_owned() } else { with.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::message::PROTOCOL;

    #[test]
    fn every_version_that_others_depend_on_has_a_row() {
        let features = features();
        let text = describe(&[("more", "and more".into())]);
        let expected = format!(
            "{}\ncommit    {}\ntarget    {}-linux\nsocket    protocol {PROTOCOL}\nmaps      layout {LAYOUT_VERSION}\n\
             journal   records of version 1 to {}\nfeatures  {features}\nmore      and more",
            env!("CARGO_PKG_VERSION"),
            commit(),
            std::env::consts::ARCH,
            journal::VERSIONS.end()
        );
        assert_eq!(text, expected);
    }

    /// The example of docs/image.md has the rows of this version: all but the commit, and the programs, which `netattachd` has.
    #[test]
    fn the_documents_show_these_versions() {
        const PAGE: &str = include_str!("../../docs/image.md");
        let (_, shown) = PAGE.split_once("# netattachd --version\n").unwrap();
        let (shown, _) = shown.split_once("\n```").unwrap();
        let rows = |text: &str| -> Vec<(String, String)> {
            let row = |line: &str| {
                let (key, value) = line.split_once(' ').unwrap();
                let varies = ["commit", "programs"].contains(&key);
                (key.to_owned(), if varies { String::new() } else { value.trim_start().to_owned() })
            };
            text.lines().map(row).collect()
        };
        let text = format!("netattachd {}", describe(&[("programs", String::new())]));
        let usual = text.replace(&format!("features  {}", features()), "features  the usual");
        assert_eq!(rows(shown), rows(&usual));
    }
}
