//! Resolves the dependencies of kernel modules: which modules have to be loaded, and in which order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::child;

/// A module, ready to be loaded.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Module {
    /// Name, with `_` for `-`.
    pub(super) name: String,
    /// Not compressed.
    pub(super) content: Vec<u8>,
}

/// The modules `wanted` of those below a directory, and all that they need, each after its dependencies.
pub(super) fn closure(root: &Path, wanted: &[&str]) -> anyhow::Result<Vec<Module>> {
    let mut files = BTreeMap::new();
    collect(root, &mut files)?;
    ensure!(!files.is_empty(), "{} holds no modules", root.display());
    let mut order = Vec::new();
    for name in wanted {
        add(name, &files, &mut order)?;
    }
    Ok(order)
}

fn add(name: &str, files: &BTreeMap<String, PathBuf>, order: &mut Vec<Module>) -> anyhow::Result<()> {
    let name = name.replace('-', "_");
    if order.iter().any(|module| module.name == name) {
        return Ok(());
    }
    let content = read(files.get(&name).with_context(|| format!("there is no module {name}"))?)?;
    for needed in needs(&content) {
        // The kernel refuses modules that need each other, so this ends.
        add(&needed, files, order)?;
    }
    order.push(Module { name, content });
    Ok(())
}

/// The dependencies of a module: `depends=` in its information, which is a list of strings that end with a zero.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let names = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(names);
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension == "xz") {
        let mut unpack = Command::new("xz");
        return child::stdout_of(unpack.args(["--decompress", "--stdout"]).arg(path));
    }
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// The module name of a file: `sch-ingress.ko`, `igb.ko.xz`.
fn name_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".xz").unwrap_or(name).strip_suffix(".ko")?;
    Some(name.replace('-', "_"))
}

fn collect(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry.with_context(|| format!("list {}", directory.display()))?.path();
        if path.is_dir() && !path.is_symlink() {
            collect(&path, files)?;
        } else if let Some(name) = name_of(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir(root.join("net")).unwrap();
        for (name, information) in [
            ("net/bridge.ko", &b"\x7fELF\0license=GPL\0depends=stp,llc\0"[..]),
            ("net/stp.ko", b"\0depends=llc\0name=stp\0"),
            ("llc.ko", b"\0depends=\0"),
            ("net/sch-ingress.ko", b"no information"),
            ("modules.order", b""),
        ] {
            fs::write(root.join(name), information).unwrap();
        }
        let order = closure(root, &["bridge", "sch_ingress", "stp"]).unwrap();
        let names: Vec<&str> = order.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["llc", "stp", "bridge", "sch_ingress"]);
        assert_eq!(order[3].content, b"no information");
        assert_eq!(closure(root, &["veth"]).unwrap_err().to_string(), "there is no module veth");
    }

    #[test]
    fn a_module_is_known_by_its_file_compressed_or_not() {
        let table = [
            ("net/sch-ingress.ko", Some("sch_ingress")),
            ("igb.ko.xz", Some("igb")),
            ("modules.dep", None),
            ("notes.xz", None),
        ];
        for (path, expected) in table {
            assert_eq!(name_of(Path::new(path)).as_deref(), expected, "{path}");
        }
    }
}
