//! The network configuration list with which a container runtime calls netattach, for nodes whose agent does not
//! write one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::copy::{Copied, CopyError};
use crate::{bounded, budget, durable};

/// The file's name, which sorts before those of other plugins.
const NAME: &str = "00-netattach.conflist";
/// Marks a file that netattach has written: an agent and `uninstall` may replace or remove it.
const MANAGED: &str = "netattach.dev/managed";

/// Writes the file into the runtime's directory atomically, unless it exists: a file that an agent has written
/// contains more.
pub(super) fn write(directory: &Path) -> Result<(PathBuf, Copied), CopyError> {
    let path = directory.join(NAME);
    let failed = |source| CopyError::Write { path: path.clone(), source };
    match bounded::read(&path, budget::CONFIG.most) {
        Ok(content) => {
            let is_ours = serde_json::from_slice::<Value>(&content).is_ok_and(|conf| conf[MANAGED] == true);
            return if is_ours { Ok((path, Copied::Was)) } else { Err(CopyError::Foreign(path)) };
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let conf = json!({
        "cniVersion": "1.0.0",
        "cniVersions": ["1.0.0", "1.1.0"],
        "name": "netattach",
        "disableCheck": false,
        MANAGED: true,
        "plugins": [{"type": "netattach", "capabilities": {"portMappings": true}}],
    });
    fs::create_dir_all(directory).map_err(failed)?;
    let content = crate::cni::json::pretty(&conf) + "\n";
    // Runtimes select files by their extension, so the temporary file must not have theirs.
    durable::replace(&path, &format!(".{NAME}.new"), content.as_bytes(), 0o644).map_err(failed)?;
    Ok((path, Copied::Made))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_once_and_none_of_others_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let net_d = directory.path().join("net.d");
        let path = net_d.join(NAME);
        assert_eq!(write(&net_d).unwrap(), (path.clone(), Copied::Made));
        let conf: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!((&conf["plugins"][0]["type"], &conf[MANAGED]), (&json!("netattach"), &json!(true)));
        assert_eq!(write(&net_d).unwrap(), (path.clone(), Copied::Was));
        fs::write(&path, "{}").unwrap();
        assert!(matches!(write(&net_d), Err(CopyError::Foreign(found)) if found == path));
        assert_eq!(fs::read(&path).unwrap(), b"{}");
    }
}
