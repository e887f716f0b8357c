//! Whether the kernel can load a driver as a module, when somebody asks for a device of its kind. Asks for none itself.
//!
//! [`judged`] decides, and is pure.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use crate::bounded;

/// Most of a list of modules that is read, in bytes. That of a distribution's kernel has some 700 KB.
const MOST_OF_LIST: usize = 8 << 20;
/// Most of a file of modprobe's configuration that is read, in bytes, and most such files of a directory.
const MOST_OF_FILE: usize = 256 << 10;
const MOST_FILES: usize = 1000;
/// Where modprobe's configuration is (`modprobe.d(5)`), in the order in which it is looked for.
const CONFIGURED_IN: [&str; 5] =
    ["etc/modprobe.d", "run/modprobe.d", "usr/local/lib/modprobe.d", "usr/lib/modprobe.d", "lib/modprobe.d"];

/// Whether a driver can be had as a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Loadable {
    /// The kernel finds it and loads it on demand.
    Yes,
    /// It is there, and modprobe's configuration has it do something else in place of loading it.
    Kept,
    /// There is none, or the kernel loads no modules.
    No,
    /// Where modules are cannot be read from here, as in most containers.
    Unknown,
}

/// Whether the running kernel can load that module, by the files under `root`. A driver that is built in is none.
pub(crate) fn loadable(root: &Path, module: &str) -> Loadable {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let list = bounded::read_text(&root.join("lib/modules").join(release).join("modules.dep"), MOST_OF_LIST);
    let switch = root.join("proc/sys/kernel/modules_disabled");
    let loads_none = match bounded::read_text(&switch, MOST_OF_FILE) {
        Ok(text) => text.trim() == "1",
        // A kernel that was built without modules does not have it, and has its neighbours.
        Err(error) => bounded::is_absent(&error) && root.join("proc/sys/kernel/ostype").exists(),
    };
    judged(module, loads_none, list.ok().as_deref(), || configured(root))
}

/// `list`: what `modules.dep` has, if that can be read. `configured`: the files of modprobe's configuration.
fn judged(
    module: &str,
    loads_none: bool,
    list: Option<&str>,
    configured: impl FnOnce() -> Vec<String>,
) -> Loadable {
    match list {
        _ if loads_none => Loadable::No,
        None => Loadable::Unknown,
        Some(list) if !list.lines().any(|line| is_of(line, module)) => Loadable::No,
        Some(_) => {
            let files = configured();
            let lines = files.iter().flat_map(|text| text.lines());
            let mut kept = lines.filter_map(|line| is_kept(line, module)).peekable();
            // Of several, modprobe takes one.
            let is_kept = kept.peek().is_some() && kept.all(|is_kept| is_kept);
            if is_kept { Loadable::Kept } else { Loadable::Yes }
        }
    }
}

/// Whether a line of `modules.dep` is about a module: `kernel/drivers/net/ifb.ko.xz: ...`.
fn is_of(line: &str, module: &str) -> bool {
    let path = line.split(':').next().unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default();
    file.split_once(".ko").is_some_and(|(name, _)| name == module)
}

/// Of a line of modprobe's configuration that has it run something in place of loading a module: whether that does nothing. Whether
/// `blacklist` keeps what the kernel itself asks for depends on how modprobe is called: it does not count.
fn is_kept(line: &str, module: &str) -> Option<bool> {
    let mut words = line.split_whitespace();
    if (words.next(), words.next()) != (Some("install"), Some(module)) {
        return None;
    }
    let program = words.next().and_then(|program| program.rsplit('/').next());
    // A shell gets the line: behind the program there may be another.
    Some(matches!(program, Some("false" | "true")) && words.next().is_none())
}

fn configured(root: &Path) -> Vec<String> {
    let files = CONFIGURED_IN.iter().flat_map(|directory| {
        let entries = std::fs::read_dir(root.join(directory)).into_iter().flatten().flatten();
        entries.take(MOST_FILES).map(|entry| entry.path())
    });
    let files = files.filter(|path| path.extension().is_some_and(|it| it == "conf"));
    // One hides those of its name in the directories that follow.
    let mut names = BTreeSet::new();
    let files = files.filter(|path| names.insert(path.file_name().map(OsStr::to_owned)));
    files.filter_map(|path| bounded::read_text(&path, MOST_OF_FILE).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "kernel/drivers/net/dummy.ko.xz:\n\
                        kernel/drivers/net/ifb.ko.zst: kernel/net/core/other.ko.zst\n\
                        kernel/drivers/net/wifb.ko: kernel/drivers/net/veth.ko\n";

    #[test]
    fn a_module_is_loaded_that_is_listed_unless_modprobe_is_told_otherwise() {
        let of = |module, list, conf: &[&str]| {
            judged(module, false, list, || conf.iter().map(|text| (*text).to_owned()).collect())
        };
        assert_eq!(of("ifb", Some(LIST), &[]), Loadable::Yes);
        assert_eq!(of("wifb", Some(LIST), &[]), Loadable::Yes);
        for absent in ["fb", "veth", "ifb.ko", "other"] {
            assert_eq!(of(absent, Some(LIST), &[]), Loadable::No, "{absent}");
        }
        assert_eq!(of("ifb", None, &["install ifb /bin/false"]), Loadable::Unknown);
        assert_eq!(judged("ifb", true, Some(LIST), Vec::new), Loadable::No);
        let kept = ["install ifb /bin/false", "# x\n  install\tifb  true ", "install ifb /usr/bin/false\n"];
        for conf in kept {
            assert_eq!(of("ifb", Some(LIST), &["options dummy x=1\n", conf]), Loadable::Kept, "{conf:?}");
        }
        let others = [
            "blacklist ifb",
            "# install ifb /bin/false",
            "install dummy /bin/false",
            "install ifb /sbin/modprobe -i ifb numifbs=0",
            "install ifb",
            "install ifb /bin/false || /sbin/modprobe -i ifb",
            "install ifb /bin/true; /sbin/modprobe -i ifb",
            "install ifb /bin/false\ninstall ifb /sbin/modprobe -i ifb",
        ];
        for conf in others {
            assert_eq!(of("ifb", Some(LIST), &[conf]), Loadable::Yes, "{conf:?}");
        }
    }

    /// One that is not there might say otherwise than the others.
    #[test]
    fn a_pod_that_sees_modprobes_configuration_sees_all_directories_of_it() {
        let component = include_str!("../../deploy/components/modprobe-configuration/kustomization.yaml");
        for directory in CONFIGURED_IN {
            for part in [
                format!("mountPath: /{directory}, readOnly: true}}"),
                format!("hostPath: {{path: /{directory}}}}}"),
            ] {
                assert_eq!(component.matches(&part).count(), 1, "{part}");
            }
        }
        assert_eq!(component.matches("mountPath: ").count(), CONFIGURED_IN.len());
    }

    #[test]
    fn files_are_read_where_the_kernel_and_modprobe_have_them() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        let write = |path: &str, text: &str| {
            std::fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            std::fs::write(at(path), text).unwrap();
        };
        write("proc/sys/kernel/modules_disabled", "0\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Unknown);
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        write(&format!("lib/modules/{release}/modules.dep"), LIST);
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Yes);
        write("etc/modprobe.d/ifb.txt", "install ifb /bin/false\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Yes);
        write("etc/modprobe.d/ifb.conf", "install ifb /bin/false\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Kept);
        // A file of that name hides the distribution's.
        write("etc/modprobe.d/ifb.conf", "\n");
        write("usr/lib/modprobe.d/ifb.conf", "install ifb /bin/false\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Yes);
        write("usr/lib/modprobe.d/other.conf", "install ifb /bin/false\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Kept);
        write("proc/sys/kernel/modules_disabled", "1\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::No);
        // A kernel without modules.
        std::fs::remove_file(at("proc/sys/kernel/modules_disabled")).unwrap();
        assert_eq!(loadable(root.path(), "ifb"), Loadable::Kept);
        write("proc/sys/kernel/ostype", "Linux\n");
        assert_eq!(loadable(root.path(), "ifb"), Loadable::No);
    }
}
