//! Which of a kernel's modules have to be loaded for a few of them, and in which order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

/// The files of the modules `wanted` and of all that they need, each after what it needs.
pub(super) fn closure(root: &Path, wanted: &[&str]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = BTreeMap::new();
    collect(root, &mut files)?;
    ensure!(!files.is_empty(), "{} holds no modules that are not compressed", root.display());
    let mut order = Vec::new();
    for name in wanted {
        add(name, &files, &mut order)?;
    }
    Ok(order)
}

fn add(name: &str, files: &BTreeMap<String, PathBuf>, order: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let path = files.get(&name.replace('-', "_")).with_context(|| format!("there is no module {name}"))?;
    if order.contains(path) {
        return Ok(());
    }
    let content = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    for needed in needs(&content) {
        // The kernel refuses modules that need each other, so this ends.
        add(&needed, files, order)?;
    }
    order.push(path.clone());
    Ok(())
}

/// What a module says that it needs: `depends=` in its information, which is a list of strings that end with a zero.
fn needs(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let names = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(names);
    names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn collect(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry.with_context(|| format!("list {}", directory.display()))?.path();
        if path.is_dir() && !path.is_symlink() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "ko") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().replace('-', "_");
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
        ] {
            fs::write(root.join(name), information).unwrap();
        }
        let order = closure(root, &["bridge", "sch_ingress", "stp"]).unwrap();
        assert_eq!(
            order,
            ["llc.ko", "net/stp.ko", "net/bridge.ko", "net/sch-ingress.ko"].map(|name| root.join(name))
        );
        assert_eq!(closure(root, &["veth"]).unwrap_err().to_string(), "there is no module veth");
    }
}
