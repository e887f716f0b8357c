//! Checks the order of CNI configurations, and the executables that they name.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Check;
use crate::attach::DefaultNetwork;
use crate::settings::Settings;
use crate::{bounded, budget};

/// The default directories of runtimes; the DaemonSet copies executables to the second one, whatever the settings
/// say.
const CONFIGURATIONS: &str = "/etc/cni/net.d";
const EXECUTABLES: &str = "/opt/cni/bin";

/// The command that copies the executables to a directory, except over a `loopback` of another program. Without
/// `--copy`, it would link the names of plugins, which do not include `netattach`.
const COPY: &str = "netattach-cni install DIR --copy --also=loopback";

/// The type by which a runtime calls netattach.
const OURS: &str = "netattach";

pub(super) fn checks(settings: &Settings) -> Vec<Check> {
    let set = &settings.cni_conf.dir;
    let directory = if set.as_os_str().is_empty() { Path::new(CONFIGURATIONS) } else { set };
    let is_chained = settings.default_network() == Ok(DefaultNetwork::Chained);
    let order = if settings.cni_conf.remove { kept_away(directory) } else { order(directory, is_chained) };
    vec![order, installed(&executables(&settings.cni_bin_dirs))]
}

/// Returns the directories where the runtime may find executables. The settings name directories of other plugins,
/// which may be in other places.
fn executables(set: &[PathBuf]) -> Vec<PathBuf> {
    let mut directories = set.to_vec();
    if !directories.iter().any(|directory| directory == Path::new(EXECUTABLES)) {
        directories.push(EXECUTABLES.into());
    }
    directories
}

/// Returns the warning for settings that remove netattach from the node.
fn kept_away(directory: &Path) -> Check {
    Check::warning(
        "CNI configuration",
        format!("cniConf.remove keeps netattach's out of {}: new pods are not attached", directory.display()),
        "go on by docs/remove.md, or take cniConf.remove out of the settings",
    )
}

/// Checks which configuration a runtime uses: the first by name. `is_chained`: netattach follows another plugin.
fn order(directory: &Path, is_chained: bool) -> Check {
    const NAME: &str = "CNI configuration";
    let place = directory.display();
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            let remedy = "set cniConf.dir to the directory that the container runtime reads, and start netattachd, which \
                          writes its file there";
            return Check::failed(NAME, format!("{place}: {error}"), remedy);
        }
    };
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| [".conf", ".conflist", ".json"].iter().any(|end| name.ends_with(end)))
        .collect();
    names.sort();
    let found: Vec<(&String, Vec<String>)> =
        names.iter().map(|name| (name, types(&directory.join(name)))).collect();
    let is_ours = |kinds: &[String]| kinds.iter().any(|kind| kind == OURS);
    match found.as_slice() {
        [] => {
            let remedy = "start netattachd with cniConf.dir set, or write the file by docs/runtimes.md; until then the \
                          node is NotReady";
            Check::failed(NAME, format!("{place} has none"), remedy)
        }
        [(name, kinds), ..] if is_ours(kinds) => {
            let first = kinds.first().map_or("", String::as_str);
            match (first == OURS, is_chained) {
                (true, false) => Check::ok(NAME, format!("{place}/{name} is the first, and netattach's")),
                (false, true) => Check::ok(
                    NAME,
                    format!("{place}/{name} is the first, and calls netattach behind {first}"),
                ),
                (true, true) => Check::failed(
                    NAME,
                    format!("{place}/{name} calls netattach first, and defaultNetwork is chained"),
                    "put netattach behind the plugin that makes the pod's interface, or let defaultNetwork name the \
                     network (docs/primary-networks.md)",
                ),
                (false, false) => Check::failed(
                    NAME,
                    format!(
                        "{place}/{name} calls netattach behind {first}, and defaultNetwork is not chained"
                    ),
                    format!(
                        "set defaultNetwork to chained, or take netattach out of {name} (docs/primary-networks.md)"
                    ),
                ),
            }
        }
        [(name, kinds), others @ ..] => {
            let of = kinds.first().map_or("cannot be read".to_owned(), |kind| format!("calls {kind}"));
            match others.iter().find(|(_, kinds)| is_ours(kinds)) {
                Some((ours, _)) => Check::failed(
                    NAME,
                    format!("a runtime uses {place}/{name}, which {of}, before {ours} of netattach"),
                    format!(
                        "remove or rename {name}, or choose a cniConf.name that sorts before it (docs/primary-networks.md)"
                    ),
                ),
                None => Check::failed(
                    NAME,
                    format!("a runtime uses {place}/{name}, which {of}; none is netattach's"),
                    "start netattachd with cniConf.dir set, with a cniConf.name that sorts first",
                ),
            }
        }
    }
}

/// Returns the types of a configuration's plugins; empty if it cannot be read.
fn types(path: &Path) -> Vec<String> {
    let read = bounded::read(path, budget::CONFIG.most).ok();
    let value: Value = read.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let alone = [value];
    let plugins = alone[0].get("plugins").and_then(Value::as_array).map_or(&alone[..], Vec::as_slice);
    plugins.iter().map_while(|plugin| plugin.get("type")?.as_str().map(str::to_owned)).collect()
}

/// Checks whether the runtime finds the executable.
fn installed(directories: &[PathBuf]) -> Check {
    const NAME: &str = "CNI executables";
    let find = |name: &str| {
        let mut paths = directories.iter().map(|directory| directory.join(name));
        paths
            .find(|path| path.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0))
    };
    let places = directories.iter().map(|it| it.display().to_string()).collect::<Vec<_>>().join(", ");
    match (find(OURS), find("loopback")) {
        (Some(path), Some(_)) => Check::ok(NAME, format!("{} and loopback", path.display())),
        (Some(path), None) => Check::warning(
            NAME,
            format!(
                "{} is there, and in {places} no loopback, which containerd calls for every pod",
                path.display()
            ),
            format!("{COPY} puts one there, where no other program has the name (docs/runtimes.md)"),
        ),
        (None, _) => Check::failed(
            NAME,
            format!("{places}: no executable netattach"),
            format!(
                "{COPY} puts it there, from the directory that has both executables (docs/runtimes.md); on a cluster the \
                 container install of the agent's pod does"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::State;
    use super::*;

    #[test]
    fn the_first_configuration_by_name_is_the_one_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let state = || (order(dir.path(), false).state, order(dir.path(), false).detail);
        let chained = || (order(dir.path(), true).state, order(dir.path(), true).detail);
        assert_eq!(state().0, State::Failed);
        write("README", "no configuration");
        write("50-netattach.conflist", r#"{"plugins": [{"type": "netattach"}]}"#);
        assert_eq!(state().0, State::Ok);
        write("99-other.conf", r#"{"type": "bridge"}"#);
        assert_eq!(state().0, State::Ok);
        let place = dir.path().display();
        let first =
            format!("{place}/50-netattach.conflist calls netattach first, and defaultNetwork is chained");
        assert_eq!(chained(), (State::Failed, first));
        write("40-flannel.conflist", r#"{"plugins": [{"type": "flannel"}, {"type": "netattach"}]}"#);
        let behind = "40-flannel.conflist is the first, and calls netattach behind flannel";
        assert_eq!(chained(), (State::Ok, format!("{place}/{behind}")));
        let behind = "40-flannel.conflist calls netattach behind flannel, and defaultNetwork is not chained";
        assert_eq!(state(), (State::Failed, format!("{place}/{behind}")));
        fs::remove_file(dir.path().join("40-flannel.conflist")).unwrap();
        write("10-multus.conf", r#"{"type": "multus"}"#);
        let (found, detail) = state();
        assert_eq!(found, State::Failed);
        assert!(
            detail.contains("10-multus.conf, which calls multus, before 50-netattach.conflist"),
            "{detail}"
        );
        write("00-broken.conf", "{");
        assert!(
            state().1.contains("00-broken.conf, which cannot be read, before 50-netattach"),
            "{}",
            state().1
        );
        fs::remove_file(dir.path().join("50-netattach.conflist")).unwrap();
        assert!(state().1.ends_with("none is netattach's"), "{}", state().1);
    }

    #[test]
    fn an_executable_has_to_be_executable() {
        let dir = tempfile::tempdir().unwrap();
        let state = || installed(&[dir.path().to_owned()]).state;
        fs::write(dir.path().join("netattach"), "").unwrap();
        assert_eq!(state(), State::Failed);
        fs::set_permissions(dir.path().join("netattach"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(state(), State::Warning);
        fs::write(dir.path().join("loopback"), "").unwrap();
        fs::set_permissions(dir.path().join("loopback"), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(state(), State::Ok);
    }

    /// The DaemonSet copies to the default directory, whatever `cniBinDirs` contains for other plugins.
    #[test]
    fn executables_are_looked_for_where_the_settings_say_and_where_they_are_usually() {
        let of = |set: &[&str]| executables(&set.iter().map(PathBuf::from).collect::<Vec<_>>());
        let usual = PathBuf::from("/opt/cni/bin");
        assert_eq!(of(&[]), std::slice::from_ref(&usual));
        assert_eq!(of(&["/opt/cni/bin", "/a"]), [usual.clone(), "/a".into()]);
        assert_eq!(of(&["/a", "/b"]), ["/a".into(), "/b".into(), usual]);
        let dir = tempfile::tempdir().unwrap();
        let (set, other) = (dir.path().join("set"), dir.path().join("usual"));
        for directory in [&set, &other] {
            fs::create_dir(directory).unwrap();
        }
        for name in ["netattach", "loopback"] {
            fs::write(other.join(name), "").unwrap();
            fs::set_permissions(other.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let detail = format!("{}/netattach and loopback", other.display());
        assert_eq!(installed(&[set, other]), Check::ok("CNI executables", detail));
    }
}
